"""Page ids are checked on the host, before anything is launched or copied."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.errors import CopyError

PageIds = Sequence[int] | npt.NDArray[np.integer]
Ids = npt.NDArray[np.int32]


def check_page_ids(page_ids: PageIds, num_pages: int, *, unique: bool) -> Ids:
    """The ids as contiguous int32[n]; n may be 0, which copies nothing.

    `page_ids` is a sequence or integer array of one dimension in host memory. Raises CopyError,
    naming the first offender, for ids outside [0, num_pages), for floats, for more than one
    dimension, and, where `unique`, for an id that occurs twice: a scatter to it would be a race.
    """
    given = np.asarray(page_ids)
    if given.ndim != 1:
        raise CopyError(f"page ids have shape {given.shape}; pass one dimension")
    if given.size == 0:
        return np.empty(0, dtype=np.int32)
    if given.dtype.kind not in "iu":
        raise CopyError(f"page ids have dtype {given.dtype}; pass integers")
    outside = np.flatnonzero((given < 0) | (given >= num_pages))
    if outside.size:
        at = int(outside[0])
        raise CopyError(f"page id {given[at]} at {at} is outside the pool of {num_pages} pages")
    ids = np.ascontiguousarray(given, dtype=np.int32)
    if unique:
        _check_unique(ids)
    return ids


def _check_unique(ids: Ids) -> None:
    ordered = np.sort(ids)
    repeated = np.flatnonzero(ordered[1:] == ordered[:-1])
    if repeated.size:
        raise CopyError(
            f"page id {ordered[repeated[0]]} occurs twice among the targets of a scatter; "
            "each page can be written once"
        )
