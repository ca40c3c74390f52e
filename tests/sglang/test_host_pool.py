"""The page-first host pool over SGLang's own device pools: every byte of both, and what it refuses.

Device pools are real ones; the byte patterns hold NaNs in every slot.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from kvtier.errors import ConfigError, CopyError
from kvtier.integration.sglang.host_pool import PagedHostPool

from .host_pools import (
    WIPED,
    Pages,
    Shape,
    as_bytes,
    device_pool,
    equal,
    fill,
    host_pool,
    packed_page,
    slots_of,
    snapshot,
    tensors,
    wipe,
)

BF16, FP32 = torch.bfloat16, torch.float32
FP8 = torch.float8_e4m3fn
LONG = Shape(BF16, 64, num_layers=1, head_num=16, head_dim=128, v_head_dim=128)
"""Pages of 512 KiB: 80 of them are more than one staging buffer holds."""
SHAPES = {
    "mha-bf16-token": Shape(BF16, 1),
    "mha-bf16": Shape(BF16, 16),
    "mha-fp32-large": Shape(FP32, 64),
    "mha-short-v": Shape(BF16, 16, head_num=1, head_dim=24, v_head_dim=8),
    "mha-long-v-token": Shape(FP32, 1, head_num=3, head_dim=5, v_head_dim=7),
    "mha-fp8-odd": Shape(FP8, 1, head_num=1, head_dim=3, v_head_dim=5),
    "mha-one-layer": Shape(BF16, 16, num_layers=1),
    "mla-bf16-token": Shape(BF16, 1, v_head_dim=0),
    "mla-bf16": Shape(BF16, 64, v_head_dim=0),
    "mla-fp32": Shape(FP32, 16, num_layers=1, v_head_dim=0),
}
ORDERS: dict[str, Callable[[Pages], Pages]] = {
    "scattered": lambda pages: np.random.default_rng(7).permutation(pages),
    "ascending": lambda pages: pages,
    "descending": lambda pages: pages[::-1].copy(),
    "runs": lambda pages: np.roll(pages, len(pages) // 3),
}
SMALL = Shape(BF16, 16)


def _small_host_pool(num_pages: int = 4) -> PagedHostPool:
    return host_pool(device_pool(SMALL, 6), SMALL.page_size, num_pages * SMALL.page_bytes)


@pytest.mark.parametrize("device_order", ORDERS)
@pytest.mark.parametrize("host_order", ORDERS)
@pytest.mark.parametrize("name", SHAPES)
def test_pages_come_back_from_the_host_as_they_were_and_no_other_page_is_written(
    name: str, host_order: str, device_order: str
) -> None:
    _check_both_ways(SHAPES[name], host_order, device_order, "cpu")


@pytest.mark.parametrize(
    ("host_order", "device_order"),
    [("scattered", "scattered"), ("runs", "ascending"), ("descending", "runs")],
)
def test_more_pages_than_the_staging_buffer_holds_come_back_as_they_were(
    host_order: str, device_order: str
) -> None:
    _check_both_ways(LONG, host_order, device_order, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("order", ["scattered", "runs"])
@pytest.mark.parametrize("shape", [*SHAPES.values(), LONG], ids=[*SHAPES, "mha-long"])
def test_pages_come_back_to_a_gpu_as_they_were(shape: Shape, order: str) -> None:
    _check_both_ways(shape, order, order, "cuda")


def _check_both_ways(shape: Shape, host_order: str, device_order: str, device: str) -> None:
    num_pages = 80 if shape is LONG else 9
    pool = device_pool(shape, num_pages + 3, device)
    fill(pool)
    before = snapshot(pool)
    host = host_pool(pool, shape.page_size, (num_pages + 2) * shape.page_bytes)
    host.kv_buffer.fill_(WIPED)
    sources = ORDERS[device_order](np.arange(2, num_pages + 2))
    kept = ORDERS[host_order](np.arange(1, num_pages + 1))

    host.backup_from_device_all_layer(
        pool, slots_of(kept, shape.page_size), slots_of(sources, shape.page_size), "direct"
    )
    _wait(device)

    expected = torch.full_like(host.kv_buffer, WIPED)
    for source, page in zip(sources, kept, strict=True):
        expected[page] = packed_page(before, int(source), shape.page_size)
    assert torch.equal(host.kv_buffer, expected)
    assert equal(snapshot(pool), before)

    wipe(pool)
    targets = ORDERS[device_order](np.arange(1, num_pages + 1))
    _check_loads(pool, host, before, (sources, kept, targets), shape.page_size, device)
    assert torch.equal(host.kv_buffer, expected)
    host.destroy()


def _check_loads(
    pool: Any,
    host: PagedHostPool,
    before: list[list[torch.Tensor]],
    pages: tuple[Pages, Pages, Pages],
    page_size: int,
    device: str,
) -> None:
    """Load the layers, last one first; after each the device has its bytes and no others."""
    sources, kept, targets = pages
    expected = snapshot(pool)
    for layer in reversed(range(host.layer_num)):
        host.load_to_device_per_layer(
            pool, slots_of(kept, page_size), slots_of(targets, page_size), layer, "direct"
        )
        _wait(device)
        for wanted, original in zip(expected[layer], before[layer], strict=True):
            wanted[slots_of(targets, page_size)] = original[slots_of(sources, page_size)]
        assert equal(snapshot(pool), expected)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def test_copies_of_no_pages_change_nothing() -> None:
    pool = device_pool(SMALL, 4)
    fill(pool)
    before = snapshot(pool)
    host = host_pool(pool, SMALL.page_size, 3 * SMALL.page_bytes)
    host.kv_buffer.fill_(WIPED)
    none = torch.empty(0, dtype=torch.int64)
    host.backup_from_device_all_layer(pool, none, none, "direct")
    host.load_to_device_per_layer(pool, none, none, 0, "direct")
    assert bool((host.kv_buffer == WIPED).all())
    assert equal(snapshot(pool), before)


def _slots(*pages: int) -> torch.Tensor:
    return slots_of(np.array(pages), SMALL.page_size)


_BAD_SLOTS = {
    "begins within a page": (_slots(1) + 1, _slots(1), "no page of 16"),
    "skips a slot": (torch.cat([_slots(1)[:8], _slots(1)[7:15]]), _slots(1), "no page of 16"),
    "half a page": (_slots(1)[:8], _slots(1)[:8], "8 slots are no whole number of pages"),
    "beyond the host pool": (_slots(0, 4), _slots(1, 2), "page id 4 at 1 is outside"),
    "beyond the device pool": (_slots(0, 1), _slots(1, 7), "page id 7 at 1 is outside"),
    "unequal": (_slots(0, 1), _slots(1), "1 device pages and 2 host pages"),
    "two dimensions": (_slots(1)[None], _slots(1), "one dimension"),
}


@pytest.mark.parametrize("bad", _BAD_SLOTS)
@pytest.mark.parametrize("up", [False, True], ids=["backup", "load"])
def test_slots_that_make_no_pages_are_refused_before_a_byte_is_written(bad: str, up: bool) -> None:
    host_slots, device_slots, message = _BAD_SLOTS[bad]
    _check_refused(host_slots, device_slots, message, up=up)


@pytest.mark.parametrize(
    ("up", "host_pages", "device_pages"),
    [(False, (1, 1), (2, 3)), (True, (2, 3), (1, 1))],
    ids=["backup", "load"],
)
def test_a_page_that_would_be_written_twice_is_refused(
    up: bool, host_pages: tuple[int, ...], device_pages: tuple[int, ...]
) -> None:
    _check_refused(_slots(*host_pages), _slots(*device_pages), "page id 1 occurs twice", up=up)


def _check_refused(
    host_slots: torch.Tensor, device_slots: torch.Tensor, message: str, *, up: bool
) -> None:
    pool = device_pool(SMALL, 6)
    fill(pool)
    before = snapshot(pool)
    host = host_pool(pool, SMALL.page_size, 4 * SMALL.page_bytes)
    host.kv_buffer.fill_(WIPED)
    copy = (
        partial(host.load_to_device_per_layer, layer_id=0)
        if up
        else host.backup_from_device_all_layer
    )
    with pytest.raises(CopyError, match=message):
        copy(pool, host_slots, device_slots, io_backend="direct")
    assert bool((host.kv_buffer == WIPED).all())
    assert equal(snapshot(pool), before)


@pytest.mark.parametrize(("layer", "draft"), [(-1, False), (3, False), (0, True)])
def test_a_layer_that_the_pool_does_not_hold_is_refused(layer: int, draft: bool) -> None:
    host = _small_host_pool()
    with pytest.raises(CopyError, match="layer"):
        host.load_to_device_per_layer(None, _slots(1), _slots(1), layer, "direct", is_draft=draft)


@pytest.mark.parametrize(("extra_bytes", "num_pages"), [(0, 5), (SMALL.page_bytes - 1, 5), (-1, 4)])
def test_the_pool_holds_exactly_the_whole_pages_of_the_bytes_asked_for(
    extra_bytes: int, num_pages: int
) -> None:
    host = host_pool(device_pool(SMALL, 3), 16, 5 * SMALL.page_bytes + extra_bytes)
    assert (host.page_num, host.size) == (num_pages, num_pages * 16)
    assert host.available_size() == host.size
    assert tuple(host.kv_buffer.shape) == (num_pages, SMALL.page_bytes)
    assert host.get_size_per_token() * 16 == host.size_per_token * 16 == SMALL.page_bytes


@pytest.mark.parametrize(("ratio", "num_pages"), [(2.0, 200), (0.29, 29), (0.295, 29), (0.01, 1)])
def test_the_pool_holds_the_whole_pages_of_the_ratio_asked_for(
    ratio: float, num_pages: int
) -> None:
    pool = device_pool(SMALL, 100)
    with host_memory_budget_scope(1 << 30):
        host = PagedHostPool(pool, page_size=16, hicache_ratio=ratio, hicache_size=0)
    assert host.page_num == num_pages


def test_memory_is_pinned_only_for_cuda() -> None:
    host = _small_host_pool()
    assert not host.pin_memory
    assert not host.kv_buffer.is_pinned()


def test_alloc_and_free_account_for_every_slot() -> None:
    host = _small_host_pool(num_pages=4)
    first, second = host.alloc(3 * 16), host.alloc(16)
    assert host.alloc(16) is None
    assert host.available_size() == 0
    assert sorted(torch.cat([first, second]).tolist()) == list(range(4 * 16))
    assert host.free(first) == 48
    assert host.available_size() == 48
    with pytest.raises(AssertionError, match="Double-free"):
        host.free(first)
    again = host.alloc(48)
    assert sorted(again.tolist()) == sorted(first.tolist())
    host.clear()
    assert host.available_size() == 64


@pytest.mark.parametrize("shape", [SMALL, Shape(BF16, 16, v_head_dim=0)], ids=["mha", "mla"])
def test_a_store_reads_and_writes_whole_pages(shape: Shape) -> None:
    pool = device_pool(shape, 4)
    fill(pool)
    host = host_pool(pool, 16, 4 * shape.page_bytes)
    host.kv_buffer.fill_(WIPED)
    host.backup_from_device_all_layer(pool, _slots(2), _slots(3), "direct")
    expected = packed_page(snapshot(pool), 3, 16)

    page = host.get_data_page(torch.tensor(32))
    assert page.dtype == BF16
    assert torch.equal(page.view(torch.uint8), expected)
    empty = host.get_dummy_flat_data_page()
    assert (empty.shape, empty.dtype) == (page.shape, page.dtype)
    host.set_from_flat_data_page(32, empty)
    assert torch.equal(page.view(torch.uint8), expected)  # the store keeps what it read
    host.set_from_flat_data_page(16, page)
    wanted = [torch.full_like(expected, WIPED), expected, torch.zeros_like(expected)]
    assert torch.equal(host.kv_buffer[:3], torch.stack(wanted))


@pytest.mark.parametrize(("v_head_dim", "num_objects"), [(8, 2), (0, 1)], ids=["mha", "mla"])
def test_a_store_that_reads_the_pool_itself_finds_each_page_in_whole(
    v_head_dim: int, num_objects: int
) -> None:
    shape = Shape(BF16, 16, v_head_dim=v_head_dim)
    pool = device_pool(shape, 4)
    host = host_pool(pool, 16, 4 * shape.page_bytes)
    host.kv_buffer.copy_(torch.randint(0, 256, host.kv_buffer.shape, dtype=torch.uint8))
    addresses, lengths = host.get_page_buffer_meta(_slots(3, 1))
    assert len(addresses) == len(lengths) == 2 * num_objects
    read = b"".join(map(ctypes.string_at, addresses, lengths))
    assert read == bytes(host.kv_buffer[3].tolist() + host.kv_buffer[1].tolist())
    assert host.get_page_buffer_element_size() == shape.page_bytes // num_objects


@pytest.mark.parametrize("index", [8, -16, 64])
def test_a_store_cannot_reach_what_is_no_page(index: int) -> None:
    host = _small_host_pool()
    with pytest.raises(CopyError, match=f"slot {index} begins no page of 16"):
        host.get_data_page(index)


def test_a_page_of_another_length_is_refused() -> None:
    host = _small_host_pool()
    with pytest.raises(CopyError, match=f"a page is {SMALL.page_bytes} bytes"):
        host.set_from_flat_data_page(0, torch.zeros(8, dtype=BF16))


def test_a_destroyed_pool_lets_go_of_its_memory_and_copies_no_more() -> None:
    host = _small_host_pool()
    host.destroy()
    host.destroy()
    assert host.kv_buffer is None
    with pytest.raises(CopyError, match="destroyed"):
        host.backup_from_device_all_layer(None, _slots(1), _slots(1), "direct")
    with pytest.raises(CopyError, match="destroyed"):
        host.get_data_page(0)


_TRAITS: dict[str, tuple[str, Any, str]] = {
    "sharded": ("layer_shard_enabled", True, "layers sharded"),
    "moving": ("host_transfer_translate", lambda slots: slots, "unified memory"),
    "shared buffer": ("host_capacity_tokens", 64, "unified memory"),
    "scales": ("k_scale_buffer", [torch.zeros(1)], "quantized KV"),
    "layout": ("kv_cache_layout", "hnd", "another layout than NHD"),
    "no layers": ("layer_num", 0, "without layers"),
    "sparse": ("use_dsa", True, "sparse attention"),
    "device": ("device", "meta", "KV on meta"),
}


@pytest.mark.parametrize("trait", _TRAITS)
def test_a_device_pool_with_more_than_plain_kv_is_refused(trait: str) -> None:
    name, value, message = _TRAITS[trait]
    pool = device_pool(SMALL, 4)
    setattr(pool, name, value)
    with pytest.raises(ConfigError, match=message) as refusal:
        host_pool(pool, 16, 4 * SMALL.page_bytes)
    assert "start without --radix-cache-backend kvtier" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_device_pool_of_strided_rows_is_refused() -> None:
    pool = device_pool(SMALL, 4)
    wide = torch.zeros(*pool.v_buffer[1].shape[:2], 40, dtype=BF16)
    pool.v_buffer[1] = wide[..., :32]
    with pytest.raises(ConfigError, match="strided KV"):
        host_pool(pool, 16, 4 * SMALL.page_bytes)


def test_a_device_pool_of_another_kind_is_refused() -> None:
    pool = SWAKVPool(
        size=64,
        size_swa=64,
        page_size=16,
        dtype=BF16,
        head_num=2,
        head_dim=32,
        swa_attention_layer_ids=[1],
        full_attention_layer_ids=[0],
        device="cpu",
    )
    with pytest.raises(ConfigError, match="the KV of a SWAKVPool"):
        host_pool(pool, 16, 4 * SMALL.page_bytes)


def test_less_than_one_page_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"15 tokens, less than one page of 16 .* raise --hicache"
    ):
        host_pool(device_pool(SMALL, 4), 16, SMALL.page_bytes - 1)


def test_more_memory_than_may_be_used_is_refused() -> None:
    pool = device_pool(SMALL, 4)
    with (
        host_memory_budget_scope(4 * SMALL.page_bytes - 1),
        pytest.raises(ConfigError, match="keeps 10 GiB of host memory free; lower --hicache-size"),
    ):
        PagedHostPool(pool, page_size=16, hicache_ratio=1.0, hicache_size=0)


def test_the_padding_page_can_be_copied_too() -> None:
    """SGLang's slot 0 belongs to its padding; nothing treats its page as absent."""
    pool = device_pool(SMALL, 2)
    fill(pool)
    host = host_pool(pool, 16, 2 * SMALL.page_bytes)
    host.backup_from_device_all_layer(pool, _slots(1), _slots(0), "direct")
    assert torch.equal(host.kv_buffer[1], packed_page(snapshot(pool), 0, 16))
    assert as_bytes(tensors(pool)[0][0]).shape[0] == 3 * 16
