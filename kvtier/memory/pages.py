"""Which pages of a pool are free. NumPy alone: the simulator counts pages with it, too."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.errors import PoolError

Pages = npt.NDArray[np.int32]
_MAX_PAGES = 2**31 - 1


class PageAllocator:
    """Page ids [0, num_pages) of one pool; all or nothing, O(pages asked for).

    Pages that were never taken cost no memory, so a pool without end is as cheap as a small one.
    Arrays that `take` returns own their memory: whoever keeps one keeps nothing else alive.
    One thread at a time.
    """

    def __init__(self, num_pages: int) -> None:
        if not isinstance(num_pages, int | np.integer) or not 0 <= num_pages <= _MAX_PAGES:
            raise PoolError(f"num_pages={num_pages}; pass a whole number, 0 to {_MAX_PAGES}")
        self.num_pages = int(num_pages)
        self._fresh = 0  # pages from here on were never taken
        self._stack: Pages = np.empty(0, np.int32)
        self._returned = 0  # of the stack
        self._taken: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)

    @property
    def num_free(self) -> int:
        """Pages that `take` can give."""
        return self.num_pages - self._fresh + self._returned

    @property
    def num_taken(self) -> int:
        """Pages that somebody has."""
        return self._fresh - self._returned

    def take(self, num_pages: int) -> Pages | None:
        """int32[num_pages] page ids that are the caller's now, or None if fewer are free.

        Ids returned last come first, in ascending order: neighbours are copied as one run.
        """
        if num_pages < 0:
            raise PoolError(f"{num_pages} pages cannot be taken; pass 0 or more")
        if num_pages > self.num_free:
            return None
        reused = min(num_pages, self._returned)
        pages = np.empty(num_pages, np.int32)
        pages[:reused] = self._stack[self._returned - reused : self._returned]
        pages[:reused].sort()
        self._returned -= reused
        fresh = num_pages - reused
        pages[reused:] = np.arange(self._fresh, self._fresh + fresh, dtype=np.int32)
        self._fresh += fresh
        if self._fresh > self._taken.size:
            self._reserve()
        self._taken[pages] = True
        return pages

    def give(self, pages: npt.ArrayLike) -> None:
        """Take pages back. Raises PoolError, and takes none, where one is free or not ours."""
        given = np.asarray(pages)
        if given.size == 0:
            return
        if given.ndim != 1 or given.dtype.kind not in "iu":
            raise PoolError(f"pages are {given.dtype}{given.shape}; pass integers in one dimension")
        if not 0 <= int(given.min()) <= int(given.max()) < self._fresh:
            wrong = given[(given < 0) | (given >= self._fresh)][0]
            raise PoolError(
                f"page {wrong} was never taken from this pool of {self.num_pages}; give back what "
                "take returned"
            )
        self._check_taken(given)
        self._taken[given] = False
        self._stack[self._returned : self._returned + given.size] = given
        self._returned += given.size

    def check_integrity(self) -> None:
        """Raise PoolError unless free and taken pages are the pool, each once. O(pages)."""
        free = self._stack[: self._returned]
        if np.unique(free).size != free.size or self._taken[free].any():
            raise PoolError("the allocator is broken: a page is free twice, or free and taken")
        if int(np.count_nonzero(self._taken)) != self.num_taken:
            raise PoolError("the allocator is broken: a page is lost")

    def _check_taken(self, given: npt.NDArray[np.integer]) -> None:
        taken = self._taken[given]
        if not taken.all():
            raise PoolError(f"page {given[~taken][0]} is free already; give each page back once")
        if given.size > 1:
            ordered = np.sort(given)
            twice = ordered[1:][ordered[1:] == ordered[:-1]]
            if twice.size:
                raise PoolError(f"page {twice[0]} is given back twice in one call")

    def _reserve(self) -> None:
        """Room to note the pages below `_fresh`, and some more."""
        size = min(max(self._fresh, self._taken.size * 5 // 4, 1024), self.num_pages)
        more = size - self._taken.size
        self._taken = np.concatenate([self._taken, np.zeros(more, np.bool_)])
        self._stack = np.concatenate([self._stack, np.empty(more, np.int32)])
