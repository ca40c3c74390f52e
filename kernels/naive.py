"""What every copy must equal, in plain torch; and the page checksum, in plain numpy.

Checksum of a page of bytes b_0 .. b_{n-1} (its packed form), modulo 2^64, as a signed int64:

    sum over j of  b_j * 256^(j mod 4) * (j // 4 + 1)

that is, little-endian 32-bit words, each weighted by its position. Parts may be summed in any
order. Two swapped words change it: the difference, (w_i - w_j) (i - j), is below 2^63.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.kernels.pool import PagedPool
from kvtier.kernels.with_torch import Tensor, torch

_WORD = 4


def gather_naive(pool: PagedPool, page_ids: Tensor, packed: Tensor) -> None:
    """packed[i] = the rows of page page_ids[i], segment after segment; ids may repeat."""
    ids = page_ids.to(pool.device, torch.int64)
    for tensor, offset, row in zip(pool.tensors, pool.offset_bytes, pool.row_bytes, strict=True):
        packed[:, offset : offset + row] = _rows(tensor).index_select(0, ids)


def scatter_naive(pool: PagedPool, page_ids: Tensor, packed: Tensor) -> None:
    """Page page_ids[i] = packed[i]; ids are unique, other pages keep their bytes."""
    ids = page_ids.to(pool.device, torch.int64)
    for tensor, offset, row in zip(pool.tensors, pool.offset_bytes, pool.row_bytes, strict=True):
        _rows(tensor)[ids] = packed[:, offset : offset + row]


def _rows(tensor: Tensor) -> Tensor:
    """The segment as uint8[pages, row_bytes], a view."""
    pages = tensor.shape[0]
    flat = torch.as_strided(tensor, (pages, tensor[0].numel()), (tensor.stride(0), 1))
    return flat.view(torch.uint8)


def page_checksums(pages: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """The checksum of each row of uint8[n, page_bytes]: int64[n]."""
    num_pages, num_bytes = pages.shape
    ragged = num_bytes % _WORD
    if ragged:
        padding = np.zeros((num_pages, _WORD - ragged), dtype=np.uint8)
        pages = np.concatenate((pages, padding), axis=1)
    words = np.ascontiguousarray(pages).view("<u4").astype(np.uint64)
    weights = np.arange(1, words.shape[1] + 1, dtype=np.uint64)
    sums: npt.NDArray[np.uint64] = (words * weights).sum(axis=1, dtype=np.uint64)
    return sums.view(np.int64)
