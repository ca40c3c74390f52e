"""Page ids are checked on the host, before anything is launched or copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.ma import MaskedArray  # np.ma would take the import lock at every copy

from kvtier.errors import CopyError
from kvtier.kernels.with_torch import Tensor, torch

PageIds = Sequence[int] | npt.NDArray[np.integer] | Tensor
Ids = npt.NDArray[np.int32]

MAX_PAGES = (1 << 31) - 1
"""As many pages as int32 ids can name, less one."""


def check_num_pages(num_pages: int) -> None:
    """Raise CopyError for a pool of more pages than its ids can name."""
    if num_pages > MAX_PAGES:
        raise CopyError(f"a pool of {num_pages} pages; ids are int32, so at most {MAX_PAGES} fit")


def check_page_ids(page_ids: PageIds, num_pages: int, *, unique: bool) -> Ids:
    """The ids as a new contiguous int32[n]; n may be 0, which copies nothing.

    `page_ids` is a sequence, an integer array, or an integer tensor in host memory, of one
    dimension. Raises CopyError, naming the first offender, for ids outside [0, num_pages), for
    whatever is no integer (bools and masked arrays, too), for more than one dimension, and, where
    `unique`, for an id that occurs twice: a scatter to it would be a race.
    """
    check_num_pages(num_pages)
    # First the copy, then the checks: nobody else can change what has been checked.
    given = _copied(page_ids, num_pages)
    if given.ndim != 1:
        raise CopyError(
            f"page ids have shape {given.shape}; pass one dimension, a list or array of integers"
        )
    if given.size == 0:
        return np.empty(0, dtype=np.int32)
    if given.dtype.kind not in "iu":
        raise CopyError(f"page ids have dtype {given.dtype}; pass integers")
    outside = np.flatnonzero((given < 0) | (given >= num_pages))
    if outside.size:
        raise _outside(given[outside[0]], int(outside[0]), num_pages)
    ids = given.astype(np.int32, order="C")
    if unique:
        _check_unique(ids)
    return ids


def _copied(page_ids: PageIds, num_pages: int) -> npt.NDArray[Any]:
    """The ids as an array of whatever shape and type they have."""
    if isinstance(page_ids, Tensor):
        return _from_tensor(page_ids)
    if isinstance(page_ids, MaskedArray):
        raise CopyError("page ids are a masked array; pass a plain one")
    if isinstance(page_ids, list | tuple) and _are_integers(page_ids):
        return _from_integers(page_ids, num_pages)
    try:
        return np.array(page_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise CopyError(f"page ids make no array of one dimension: {reason}") from error


def _from_tensor(page_ids: Tensor) -> npt.NDArray[Any]:
    of_integers = not (
        page_ids.is_floating_point() or page_ids.is_complex() or page_ids.is_quantized
    )
    if page_ids.device.type != "cpu" or page_ids.layout != torch.strided or not of_integers:
        raise CopyError(
            f"page ids are {page_ids.dtype} on {page_ids.device}; pass integers in host memory"
        )
    return np.array(page_ids.numpy())


def _are_integers(values: Sequence[object]) -> bool:
    """Whether each is one. Raises CopyError for bools, which numpy would take for integers."""
    kinds = set(map(type, values))
    if any(issubclass(kind, bool | np.bool_) for kind in kinds):
        raise CopyError("page ids have dtype bool; pass integers")
    return all(issubclass(kind, int | np.integer) for kind in kinds)


def _from_integers(values: Sequence[int], num_pages: int) -> npt.NDArray[np.int64]:
    try:
        return np.fromiter(values, dtype=np.int64, count=len(values))
    except OverflowError:
        at = next(at for at, value in enumerate(values) if not 0 <= value < num_pages)
        raise _outside(values[at], at, num_pages) from None


def _outside(page_id: int, at: int, num_pages: int) -> CopyError:
    return CopyError(f"page id {page_id} at {at} is outside the pool of {num_pages} pages")


def _check_unique(ids: Ids) -> None:
    ordered = np.sort(ids)
    repeated = np.flatnonzero(ordered[1:] == ordered[:-1])
    if repeated.size:
        raise CopyError(
            f"page id {ordered[repeated[0]]} occurs twice among the targets of a scatter; "
            "each page can be written once"
        )
