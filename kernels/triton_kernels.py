"""Triton kernels that copy pages between the segments of a pool and one packed buffer.

Arguments, the same everywhere:
- `table`: int64[segments, 4] on the device: base address in bytes, then page stride, offset in a
  packed page, and row, these three in words;
- `ids`: int32[pages], the pool's page for each packed page;
- `packed`: elements of the packed buffer, `page_words` words a page;
- `sums`: int64[pages], added to where CHECK is set (see naive.py for the formula).

A word is 16, 4 or 1 bytes and has UNIT elements: 2 of int64, 1 of int32, 1 of uint8. Counting in
words keeps 16-byte alignment visible to the compiler: a product with UNIT = 2 is even, whatever
the row. Hints stand on pointers after the cast and the addition; on integers or bare arguments
they are lost, and with them the 16-byte access.
"""

from __future__ import annotations

from kvtier.kernels.with_triton import tl, triton


@triton.jit
def weighted(values, element):
    """What elements at these positions of a page add to its checksum, as uint64."""
    if values.dtype == tl.int64:
        bits = values.to(tl.uint64, bitcast=True)
        place = element.to(tl.uint64) * 2
        low = bits & 0xFFFFFFFF
        total = low * (place + 1) + (bits >> 32) * (place + 2)
    elif values.dtype == tl.int32:
        bits = values.to(tl.uint32, bitcast=True).to(tl.uint64)
        total = bits * (element.to(tl.uint64) + 1)
    else:
        place = element.to(tl.uint64)
        total = (values.to(tl.uint64) << ((place % 4) * 8)) * (place // 4 + 1)
    return total


@triton.jit
def pages_copy(
    table,
    ids,
    packed,
    sums,
    page_words,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    SCATTER: tl.constexpr,
    CHECK: tl.constexpr,
):
    """One program copies one block of one row: grid (pages, segments, blocks of a row)."""
    page = tl.program_id(0)
    entry = table + tl.program_id(1) * 4
    offset = tl.load(entry + 2)
    base = tl.load(entry).to(tl.pointer_type(packed.dtype.element_ty))
    if UNIT == 2:
        base = tl.multiple_of(base, 16)
    source_page = tl.load(ids + page).to(tl.int64)
    in_pool = base + source_page * tl.load(entry + 1) * UNIT
    in_packed = packed + (tl.cast(page, tl.int64) * page_words + offset) * UNIT
    if UNIT == 2:
        in_packed = tl.multiple_of(in_packed, 16)
    lanes = tl.program_id(2) * (BLOCK * UNIT) + tl.arange(0, BLOCK * UNIT)  # [BLOCK * UNIT]
    if SCATTER:
        source, target = in_packed, in_pool
    else:
        source, target = in_pool, in_packed
    if ROW % BLOCK == 0:
        values = tl.load(source + lanes, eviction_policy="evict_first")
        tl.store(target + lanes, values, eviction_policy="evict_first")
    else:
        inside = lanes < ROW * UNIT
        values = tl.load(source + lanes, mask=inside, other=0, eviction_policy="evict_first")
        tl.store(target + lanes, values, mask=inside, eviction_policy="evict_first")
    if CHECK:
        total = tl.sum(weighted(values, offset * UNIT + lanes), axis=0)
        tl.atomic_add(sums + page, total.to(tl.int64, bitcast=True))


@triton.jit
def pages_copy_small(
    table,
    ids,
    packed,
    sums,
    num_pages,
    page_words,
    ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGES: tl.constexpr,
    UNIT: tl.constexpr,
    SCATTER: tl.constexpr,
    CHECK: tl.constexpr,
):
    """One program copies a row of PAGES pages: grid (groups of pages, segments); WIDTH >= ROW."""
    entry = table + tl.program_id(1) * 4
    offset = tl.load(entry + 2)
    base = tl.load(entry).to(tl.pointer_type(packed.dtype.element_ty))
    if UNIT == 2:
        base = tl.multiple_of(base, 16)
    pages = tl.program_id(0) * PAGES + tl.arange(0, PAGES)  # [PAGES]
    present = pages < num_pages
    source_pages = tl.load(ids + pages, mask=present, other=0).to(tl.int64)
    lanes = tl.arange(0, WIDTH * UNIT)[None, :]  # [1, WIDTH * UNIT]
    in_pool = base + (source_pages * tl.load(entry + 1) * UNIT)[:, None] + lanes
    first = packed + offset * UNIT
    if UNIT == 2:
        first = tl.multiple_of(first, 16)
    in_packed = first + (pages.to(tl.int64) * page_words * UNIT)[:, None] + lanes
    inside = present[:, None]
    if ROW != WIDTH:
        inside = inside & (lanes < ROW * UNIT)
    if SCATTER:
        values = tl.load(in_packed, mask=inside, other=0, eviction_policy="evict_first")
        tl.store(in_pool, values, mask=inside, eviction_policy="evict_first")
    else:
        values = tl.load(in_pool, mask=inside, other=0, eviction_policy="evict_first")
        tl.store(in_packed, values, mask=inside, eviction_policy="evict_first")
    if CHECK:
        totals = tl.sum(weighted(values, offset * UNIT + lanes), axis=1)  # [PAGES]
        tl.atomic_add(sums + pages, totals.to(tl.int64, bitcast=True), mask=present)


@triton.jit
def pages_copy_persistent(
    table,
    ids,
    packed,
    sums,
    num_pages,
    num_segments,
    page_words,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    SCATTER: tl.constexpr,
    CHECK: tl.constexpr,
):
    """A fixed grid on few SMs: programs stride over pages (axis 0) and segments (axis 1)."""
    block = tl.arange(0, BLOCK * UNIT)  # [BLOCK * UNIT]
    for segment in tl.range(tl.program_id(1), num_segments, tl.num_programs(1)):
        entry = table + segment * 4
        stride = tl.load(entry + 1)
        offset = tl.load(entry + 2)
        base = tl.load(entry).to(tl.pointer_type(packed.dtype.element_ty))
        if UNIT == 2:
            base = tl.multiple_of(base, 16)
        for page in tl.range(tl.program_id(0), num_pages, tl.num_programs(0)):
            source_page = tl.load(ids + page).to(tl.int64)
            in_pool = base + source_page * stride * UNIT
            in_packed = packed + (tl.cast(page, tl.int64) * page_words + offset) * UNIT
            if UNIT == 2:
                in_packed = tl.multiple_of(in_packed, 16)
            if SCATTER:
                source, target = in_packed, in_pool
            else:
                source, target = in_pool, in_packed
            # Not unrolled: hoisted loads of a long row would spill.
            for start in tl.range(0, ROW * UNIT, BLOCK * UNIT):
                lanes = start + block
                if ROW % BLOCK == 0:
                    values = tl.load(source + lanes, eviction_policy="evict_first")
                    tl.store(target + lanes, values, eviction_policy="evict_first")
                else:
                    inside = lanes < ROW * UNIT
                    values = tl.load(
                        source + lanes, mask=inside, other=0, eviction_policy="evict_first"
                    )
                    tl.store(target + lanes, values, mask=inside, eviction_policy="evict_first")
                if CHECK:
                    total = tl.sum(weighted(values, offset * UNIT + lanes), axis=0)
                    tl.atomic_add(sums + page, total.to(tl.int64, bitcast=True))


@triton.jit
def pages_copy_mixed(
    table,
    ids,
    packed,
    sums,
    page_words,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    SCATTER: tl.constexpr,
    CHECK: tl.constexpr,
):
    """Rows of different lengths: grid (pages, segments, blocks of the longest row)."""
    page = tl.program_id(0)
    entry = table + tl.program_id(1) * 4
    start = tl.program_id(2) * (BLOCK * UNIT)
    row = tl.load(entry + 3) * UNIT
    if start < row:
        offset = tl.load(entry + 2)
        base = tl.load(entry).to(tl.pointer_type(packed.dtype.element_ty))
        if UNIT == 2:
            base = tl.multiple_of(base, 16)
        source_page = tl.load(ids + page).to(tl.int64)
        in_pool = base + source_page * tl.load(entry + 1) * UNIT
        in_packed = packed + (tl.cast(page, tl.int64) * page_words + offset) * UNIT
        if UNIT == 2:
            in_packed = tl.multiple_of(in_packed, 16)
        lanes = start + tl.arange(0, BLOCK * UNIT)  # [BLOCK * UNIT]
        inside = lanes < row
        if SCATTER:
            source, target = in_packed, in_pool
        else:
            source, target = in_pool, in_packed
        values = tl.load(source + lanes, mask=inside, other=0, eviction_policy="evict_first")
        tl.store(target + lanes, values, mask=inside, eviction_policy="evict_first")
        if CHECK:
            total = tl.sum(weighted(values, offset * UNIT + lanes), axis=0)
            tl.atomic_add(sums + page, total.to(tl.int64, bitcast=True))
