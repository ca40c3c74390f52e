"""Pages of a pool as CuPy arrays over the same memory."""

from __future__ import annotations

from typing import Any

from kvtier.errors import CopyError
from kvtier.kernels.cupy_device import check_cuda, load_cupy
from kvtier.kernels.pool import PagedPool
from kvtier.kernels.with_torch import Tensor, torch

_KNOWN_TO_NUMPY = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)


def segment_array(pool: PagedPool, segment: int) -> Any:
    """The segment as a cupy.ndarray of the tensor's shape and strides; no byte is copied.

    Types that NumPy has not (bfloat16, the float8 types) come as unsigned integers of the same
    size: the bits, not the values. The array keeps the tensor's memory alive, and orders nothing:
    use it on a stream that waits for torch's. Raises CopyError for a segment that is not there,
    for a pool in host memory, and without CuPy or a GPU.
    """
    check_cuda(pool.device)
    return array_over(load_cupy(), _segment(pool, segment), pool.device.index)


def page_array(pool: PagedPool, segment: int, page: int) -> Any:
    """The row of one page of a segment, otherwise like `segment_array`.

    Raises CopyError for a page that is not there as well.
    """
    if not 0 <= page < pool.num_pages:
        raise CopyError(f"page {page} is outside the pool of {pool.num_pages} pages")
    return segment_array(pool, segment)[page]


def array_over(cupy: Any, tensor: Tensor, device_index: int) -> Any:
    """A cupy.ndarray over a tensor's memory on that device, taken as it is, without a check."""
    size = tensor.element_size()
    elements = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    memory = cupy.cuda.UnownedMemory(tensor.data_ptr(), elements * size, tensor, device_index)
    return cupy.ndarray(
        tuple(tensor.shape),
        dtype=numpy_name(tensor.dtype),
        memptr=cupy.cuda.MemoryPointer(memory, 0),
        strides=tuple(step * size for step in tensor.stride()),
    )


def numpy_name(dtype: torch.dtype) -> str:
    """NumPy's name of the type, or of the unsigned integer of its size where it has none."""
    if dtype in _KNOWN_TO_NUMPY:
        return str(dtype).removeprefix("torch.")
    return f"uint{8 * dtype.itemsize}"


def _segment(pool: PagedPool, segment: int) -> Tensor:
    if not 0 <= segment < pool.num_segments:
        raise CopyError(f"segment {segment} is outside the pool's {pool.num_segments}")
    return pool.tensors[segment]
