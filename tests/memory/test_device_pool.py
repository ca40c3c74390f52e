"""A device's pages: of our own, or an engine's tensors without a copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtier.errors import CapacityError, ConfigError, CopyError, PoolError
from kvtier.kernels.cpu import CpuCopy
from kvtier.layout import KVDtype, KVLayout, Segment, load_model
from kvtier.memory.device_pool import DevicePool


def mixed(page_size: int = 4) -> KVLayout:
    """Rows of 24, 32 and 5 bytes a token, segments not in the order of their layers."""
    segments = (
        Segment("k.0", 0, 24),
        Segment("k.1", 1, 24),
        Segment("indexer.0", 0, 5),
        Segment("v.0", 0, 32),
        Segment("v.1", 1, 32),
    )
    return KVLayout(segments, KVDtype.FP8, page_size)


@pytest.mark.parametrize(("model", "segments_per_layer"), [("Qwen2.5-7B", 2), ("DeepSeek-V3", 1)])
def test_a_layout_becomes_its_segments(model: str, segments_per_layer: int) -> None:
    layout = load_model(model).layout()
    pool = DevicePool.allocate(layout, 3, page_size=2)
    assert pool.page_bytes == layout.page_bytes(2)
    assert pool.pool.row_bytes == tuple(s.row_bytes * 2 for s in layout.segments)
    assert pool.num_pages == pool.pages.num_free == 3
    assert pool.num_bytes == 3 * layout.page_bytes(2)
    assert {len(layer) for layer in pool.layers} == {segments_per_layer}
    assert [at for layer in pool.layers for at in layer] == list(range(len(layout.segments)))


def test_segments_are_in_the_order_of_their_layers() -> None:
    pool = DevicePool.allocate(mixed(), 7)
    assert pool.pool.row_bytes == (96, 20, 128, 96, 128)
    assert pool.layers == (range(3), range(3, 5))


def test_the_page_size_is_the_layouts_own_unless_given() -> None:
    assert DevicePool.allocate(mixed(page_size=4), 2).page_bytes == 4 * 117
    assert DevicePool.allocate(mixed(page_size=4), 2, page_size=16).page_bytes == 16 * 117
    with pytest.raises(ConfigError, match="page_size=0"):
        DevicePool.allocate(mixed(), 2, page_size=0)


def test_equal_rows_lie_side_by_side_so_that_one_call_copies_all_segments() -> None:
    pool = DevicePool.allocate(load_model("Qwen2.5-7B").layout(), 5, page_size=1).pool
    row = pool.row_bytes[0]
    assert [base - pool.bases[0] for base in pool.bases] == [
        at * 5 * row for at in range(pool.num_segments)
    ]
    with CpuCopy(num_threads=1, method="flat") as copy:  # refuses rows that lie otherwise
        copy.gather(pool, [4, 0], torch.empty(2, pool.page_bytes, dtype=torch.uint8))


def test_rows_of_whole_words_begin_at_one_whatever_lies_before() -> None:
    pool = DevicePool.allocate(mixed(page_size=1), 7).pool
    assert pool.row_bytes == (24, 5, 32, 24, 32)
    assert [base % 16 for base in (pool.bases[2], pool.bases[4])] == [0, 0]
    assert pool.bases[3] % 8 == 0


def test_a_pool_on_another_device_has_the_same_shape() -> None:
    pool = DevicePool.allocate(mixed(), 7, "meta")
    assert pool.pool.device.type == "meta"
    assert pool.page_bytes == DevicePool.allocate(mixed(), 7).page_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_pool_on_a_gpu_has_the_same_shape() -> None:
    pool = DevicePool.allocate(mixed(), 7, "cuda")
    assert pool.pool.device == torch.device("cuda", torch.cuda.current_device())
    assert pool.pool.row_bytes == DevicePool.allocate(mixed(), 7).pool.row_bytes


def test_an_engines_tensors_are_adopted_without_a_copy() -> None:
    layers = [
        (torch.zeros(32, 2, 8, dtype=torch.bfloat16), torch.zeros(32, 2, 4, dtype=torch.bfloat16))
        for _ in range(3)
    ]
    pool = DevicePool.adopt(layers, page_size=8)
    assert pool.num_pages == 4
    assert pool.pool.row_bytes == (256, 128) * 3
    assert pool.layers == (range(2), range(2, 4), range(4, 6))
    assert pool.pool.bases == tuple(t.data_ptr() for layer in layers for t in layer)
    packed = torch.full((1, pool.page_bytes), 7, dtype=torch.uint8)
    with CpuCopy(num_threads=1) as copy:
        copy.scatter(pool.pool, [1], packed)
    written = layers[2][1].view(torch.uint8).eq(7).flatten(1).all(dim=1)
    assert written.nonzero().flatten().tolist() == list(range(8, 16))


def test_a_layer_of_one_tensor_needs_no_list() -> None:
    pool = DevicePool.adopt([torch.zeros(6, 576), torch.zeros(6, 576)])
    assert pool.layers == (range(1), range(1, 2))
    assert pool.num_pages == 6


def test_slots_with_a_gap_between_them_are_adopted_where_a_page_is_one_slot() -> None:
    kv = torch.zeros(10, 2, 16)
    pool = DevicePool.adopt([[kv[:, 0], kv[:, 1]]])
    assert pool.pool.stride_bytes == (128, 128)
    with pytest.raises(CopyError, match="not contiguous"):
        DevicePool.adopt([[kv[:, 0], kv[:, 1]]], page_size=2)


@pytest.mark.parametrize(
    ("layers", "options", "error", "message"),
    [
        ([torch.zeros(33, 4)], {"page_size": 16}, PoolError, r"33 slots.*pass its first 32"),
        ([torch.zeros(32, 4)], {"page_size": 0}, PoolError, r"page_size=0"),
        ([torch.zeros(8, 4), torch.zeros(16, 4)], {"page_size": 8}, CopyError, "2 pages"),
        ([torch.zeros(8, 4), []], {}, PoolError, r"layer 1 is \[\]; pass a tensor"),
        ([torch.zeros(8, 4), None], {}, PoolError, "layer 1 is None"),
        ([], {}, CopyError, "at least one segment"),
        (torch.zeros(8, 4), {}, PoolError, "layers are a Tensor; pass a list"),
        (3, {}, PoolError, "layers are a int"),
        ([["k", "v"]], {"page_size": 4}, CopyError, "pass a torch tensor"),
    ],
)
def test_tensors_that_make_no_pool_are_refused_in_one_line(
    layers: Any, options: dict[str, int], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        DevicePool.adopt(layers, **options)
    assert "\n" not in str(raised.value)


def test_memory_that_a_device_has_not_got_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"cpu has no .* GB for the pool") as error:
        DevicePool.allocate(KVLayout((Segment("k", 0, 1 << 30),), KVDtype.FP8, 1), 1 << 30)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("device", ["gpu9", "xpu", ""])
def test_a_device_that_cannot_be_used_is_named(device: str) -> None:
    with pytest.raises(PoolError, match=f"device '{device}' cannot be used") as error:
        DevicePool.allocate(mixed(), 2, device)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("num_pages", [0, -3])
def test_no_pages_are_no_pool(num_pages: int) -> None:
    with pytest.raises(PoolError, match="pass 1 or more"):
        DevicePool.allocate(mixed(), num_pages)
