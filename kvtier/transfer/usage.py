"""Which pages of a tier live jobs read and write."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvtier.errors import TransferError

Index = npt.NDArray[np.intp]
Users = npt.NDArray[np.int64] | None
"""What each page's users add up to; None where no page has any."""

# Of each page's count, what one reader and one writer add.
READ = np.int64(1)
WRITE = np.int64(1 << 32)


class PageUse:
    """Readers and writers of each page of one tier, counted; 8 bytes a page.

    Any number of live jobs may read a page. One that writes it shares it with no other live job,
    except those that ended before it begins.
    """

    def __init__(self, tier: str, num_pages: int) -> None:
        self._tier = tier
        self._users = np.zeros(num_pages, np.int64)
        self._num_sharing = 0  # live jobs that came to pages which others had

    def of(self, pages: Index) -> Users:
        """Who has the pages. Raises TransferError for a page outside the pool."""
        try:
            users = self._users[pages]
        except IndexError:
            wrong = pages[pages >= self._users.size][:1].astype(np.int32)
            raise TransferError(
                f"{self._tier} page {wrong[0]} is outside the pool of {self._users.size} pages"
            ) from None
        return users if np.count_nonzero(users) else None

    def check_readable(self, pages: Index, earlier: Iterable[tuple[Index, np.int64]]) -> None:
        """Raise TransferError where a job writes one of the pages.

        `earlier` are the pages on this tier of the jobs that end before these are read, and what
        each adds, READ or WRITE.
        """
        self._refuse(pages, self._without(pages, earlier) >= WRITE, "is written by")

    def check_writable(self, pages: Index, earlier: Iterable[tuple[Index, np.int64]]) -> None:
        """As `check_readable`, where a job reads or writes one of the pages."""
        self._refuse(pages, self._without(pages, earlier) != 0, "is in")

    def add(self, pages: Index, users: Users, use: np.int64) -> None:
        """A job reads or writes the pages, whose users `of` has just told."""
        # A page that occurs twice is counted once, here and in `remove`.
        if users is None:
            self._users[pages] = use
        else:
            self._num_sharing += 1
            self._users[pages] = users + use

    def remove(self, pages: Index, users: Users, use: np.int64) -> None:
        """The job of that `add` has ended."""
        if self._num_sharing:
            self._num_sharing -= users is not None
            self._users[pages] = self._users[pages] - use
        else:  # no two live jobs have a page in common
            self._users[pages] = 0

    def recount(self, jobs: Iterable[tuple[Index, np.int64]]) -> bool:
        """Whether the users are these and no others."""
        users = np.zeros_like(self._users)
        for pages, use in jobs:
            users[pages] += use
        return np.array_equal(self._users, users)

    def _without(
        self, pages: Index, earlier: Iterable[tuple[Index, np.int64]]
    ) -> npt.NDArray[np.int64]:
        left = self._users[pages]
        for theirs, use in earlier:
            left -= np.isin(pages, theirs) * use
        return left

    def _refuse(self, pages: Index, refused: npt.NDArray[np.bool_], how: str) -> None:
        if np.count_nonzero(refused):
            raise TransferError(
                f"{self._tier} page {pages[refused][0]} {how} another live job; wait until that "
                "one ends, or name it in `after`"
            )
