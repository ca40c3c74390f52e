"""`TritonCopy` refuses what does not fit in one line and with nothing written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kvtier.errors import CopyError
from kvtier.kernels.forms import Form
from kvtier.kernels.naive import gather_naive
from kvtier.kernels.pool import PagedPool
from kvtier.kernels.triton_copy import TritonCopy

from .cases import position_pattern
from .interpreting import poisoned_sums, require_interpreter, skip_bad_pair

require_interpreter()
pytestmark = skip_bad_pair

NUM_PAGES = 6
ROW_BYTES = 256
PAGE_BYTES = 2 * ROW_BYTES
GOOD_IDS = (4, 1)


def bytes_of(*shape: int) -> Tensor:
    return torch.from_numpy(position_pattern(int(np.prod(shape)))).view(shape)


def sums_of(*shape: int) -> Tensor:
    return poisoned_sums(int(np.prod(shape))).view(shape)


@dataclass(frozen=True)
class BadCall:
    """One argument of a copy that does not fit, and what the error says of it."""

    name: str
    message: str
    ids: Any = GOOD_IDS
    packed: Callable[[], Tensor] = lambda: bytes_of(2, PAGE_BYTES)
    sums: Callable[[], Tensor | None] = lambda: None


BAD_CALLS = [
    BadCall("id-beyond", r"page id 6 at 1 is outside the pool of 6 pages", ids=[0, 6]),
    BadCall("id-negative", r"page id -1 at 0 is outside", ids=[-1, 2]),
    BadCall("id-of-64-bits", r"page id 4294967296 at 1 is outside", ids=[0, 1 << 32]),
    BadCall("ids-float", r"dtype float64; pass integers", ids=[0.0, 1.0]),
    BadCall("ids-bool", r"dtype bool; pass integers", ids=[True, False]),
    BadCall("ids-2d", r"shape \(1, 2\); pass one dimension", ids=[[0, 1]]),
    BadCall("ids-scalar", r"shape \(\); pass one dimension", ids=3),
    BadCall(
        "packed-dtype", r"packed is torch\.int8", packed=lambda: bytes_of(2, 512).view(torch.int8)
    ),
    BadCall("packed-rows", r"must be uint8\(2, 512\)", packed=lambda: bytes_of(3, PAGE_BYTES)),
    BadCall("packed-width", r"must be uint8\(2, 512\)", packed=lambda: bytes_of(2, ROW_BYTES)),
    BadCall("packed-flat", r"must be uint8\(2, 512\)", packed=lambda: bytes_of(2 * PAGE_BYTES)),
    BadCall(
        "packed-strided",
        r"packed is not contiguous; strides \(1024, 1\)",
        packed=lambda: bytes_of(4, PAGE_BYTES)[::2],
    ),
    BadCall(
        "packed-elsewhere",
        r"packed is on meta, the pool on cpu",
        packed=lambda: torch.empty(2, PAGE_BYTES, dtype=torch.uint8, device="meta"),
    ),
    BadCall(
        "packed-for-no-ids",
        r"must be uint8\(0, 512\)",
        ids=[],
        packed=lambda: bytes_of(1, PAGE_BYTES),
    ),
    BadCall("sums-dtype", r"checksums is torch\.int32", sums=lambda: sums_of(1).view(torch.int32)),
    BadCall("sums-length", r"must be int64\(2,\)", sums=lambda: sums_of(3)),
    BadCall("sums-2d", r"must be int64\(2,\)", sums=lambda: sums_of(2, 1)),
    BadCall("sums-strided", r"checksums must be contiguous", sums=lambda: sums_of(4)[::2]),
    BadCall(
        "sums-elsewhere",
        r"checksums must be contiguous and on cpu",
        sums=lambda: torch.empty(2, dtype=torch.int64, device="meta"),
    ),
]


def make_pool() -> PagedPool:
    return PagedPool.of([bytes_of(NUM_PAGES, ROW_BYTES) for _ in range(2)])


def refuse(copier: TritonCopy, verb: str, pool: PagedPool, bad: BadCall) -> None:
    """The call raises its message in one line and leaves every tensor as it was."""
    packed, sums = bad.packed(), bad.sums()
    memory = [t for t in (*pool.tensors, packed, sums) if t is not None and not t.is_meta]
    before = [tensor.clone() for tensor in memory]
    with pytest.raises(CopyError, match=bad.message) as caught:
        getattr(copier, verb)(pool, bad.ids, packed, checksums=sums)
    assert "\n" not in str(caught.value)
    for tensor, old in zip(memory, before, strict=True):
        assert torch.equal(tensor, old)


@pytest.mark.parametrize("verb", ["gather", "scatter"])
@pytest.mark.parametrize("bad", BAD_CALLS, ids=lambda bad: bad.name)
def test_a_copy_that_does_not_fit_is_refused(bad: BadCall, verb: str) -> None:
    refuse(TritonCopy(), verb, make_pool(), bad)


def test_a_scatter_to_one_page_twice_is_refused() -> None:
    bad = BadCall("repeated", r"page id 4 occurs twice", ids=[4, 4])
    refuse(TritonCopy(), "scatter", make_pool(), bad)


def test_ids_of_any_integer_type_are_taken() -> None:
    pool, expected = make_pool(), None
    for ids in ([4, 1], (4, 1), *(np.array([4, 1], dtype=d) for d in ("i1", "u2", "i4", "u8"))):
        packed = bytes_of(2, PAGE_BYTES)
        TritonCopy().gather(pool, ids, packed)
        expected = packed if expected is None else expected
        assert torch.equal(packed, expected)


def test_no_ids_copy_nothing_and_need_an_empty_packed() -> None:
    pool = make_pool()
    before = [tensor.clone() for tensor in pool.tensors]
    packed, sums = torch.empty(0, PAGE_BYTES, dtype=torch.uint8), poisoned_sums(0)
    for form in (None, *Form):
        TritonCopy(form).gather(pool, [], packed, checksums=sums)
        TritonCopy(form).scatter(pool, [], packed, checksums=sums)
    assert all(torch.equal(t, old) for t, old in zip(pool.tensors, before, strict=True))


def test_read_only_ids_are_taken_without_a_warning() -> None:
    pool, packed, expected = make_pool(), bytes_of(2, PAGE_BYTES), bytes_of(2, PAGE_BYTES)
    given = np.frombuffer(np.array(GOOD_IDS, dtype=np.int32).tobytes(), dtype=np.int32)
    TritonCopy().gather(pool, given, packed)
    gather_naive(pool, torch.tensor(GOOD_IDS), expected)
    assert torch.equal(packed, expected)


@pytest.mark.parametrize("width", [PAGE_BYTES + 1, PAGE_BYTES + 4, 2 * PAGE_BYTES])
@pytest.mark.parametrize("lead_bytes", [0, 1, 4, 8, 12])
def test_a_single_packed_row_is_right_wherever_it_lies(width: int, lead_bytes: int) -> None:
    """torch calls one row contiguous whatever its stride, and knows its offset, not its address."""
    pool, expected = make_pool(), bytes_of(1, PAGE_BYTES)
    gather_naive(pool, torch.tensor([3]), expected)
    for start in range(16):  # memory whose own address is odd
        memory = torch.from_numpy(position_pattern(4 * width + 32)[start:])
        packed = memory[lead_bytes:].as_strided((1, PAGE_BYTES), (width, 1))
        before = memory.clone()
        TritonCopy().gather(pool, [3], packed)
        before[lead_bytes : lead_bytes + PAGE_BYTES] = expected[0]
        assert torch.equal(memory, before)


@pytest.mark.parametrize("verb", ["gather", "scatter"])
def test_packed_in_the_memory_of_the_pool_is_refused(verb: str) -> None:
    memory = bytes_of(NUM_PAGES, PAGE_BYTES)
    bad = BadCall(
        "inside",
        "packed overlaps the memory of segment 0; pass memory of its own",
        packed=lambda: memory[2:4],
    )
    refuse(TritonCopy(), verb, PagedPool.of([memory]), bad)


def test_a_pool_on_a_gpu_is_refused_where_kernels_are_interpreted() -> None:
    with FakeTensorMode():  # says that it is on a GPU, and has no memory
        packed = torch.empty(1, ROW_BYTES, dtype=torch.uint8, device="cuda")
    pool = PagedPool((packed,), 1, (ROW_BYTES,), (ROW_BYTES,), (0,), ROW_BYTES)
    with pytest.raises(CopyError, match=r"on cuda:0, Triton's interpreter reaches host memory"):
        TritonCopy().gather(pool, [0], packed)


@pytest.mark.parametrize("form", [Form.PAGE, Form.SMALL, Form.PERSISTENT])
def test_a_forced_form_refuses_rows_of_different_lengths(form: Form) -> None:
    pool = PagedPool.of([bytes_of(NUM_PAGES, 384), bytes_of(NUM_PAGES, 128)])
    for verb in ("gather", "scatter"):
        bad = BadCall(
            "mixed", rf"the {form.value} form needs rows of one length", sums=lambda: sums_of(2)
        )
        refuse(TritonCopy(form), verb, pool, bad)


def test_the_small_form_refuses_long_rows() -> None:
    pool = PagedPool.of([bytes_of(2, 4096)])
    bad = BadCall(
        "long",
        r"rows of 4096 bytes are too long",
        [1],
        lambda: bytes_of(1, 4096),
        lambda: sums_of(1),
    )
    for verb in ("gather", "scatter"):
        refuse(TritonCopy(Form.SMALL), verb, pool, bad)
