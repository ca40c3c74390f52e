"""What every way of copying pages offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import ClassVar, Self

from kvtier.errors import CopyError
from kvtier.kernels.ids import Ids, PageIds, check_page_ids
from kvtier.kernels.pool import PagedPool, check_checksums, check_packed
from kvtier.kernels.with_torch import Tensor


class CopyBackend(ABC):
    """Copies between the pages of a pool and one packed buffer, exact to the byte.

    `packed` is contiguous uint8[len(page_ids), pool.page_bytes] on the pool's device, a row for
    each page id. Only the segments of `pool` are read or written (`pool.segments(first, count)`
    is one layer, say); they keep their offsets in the whole page. `checksums`, where given, is
    int64[len(page_ids)] and is overwritten with each page's sum over these segments (naive.py).
    Empty `page_ids` copy nothing. Raises CopyError, with nothing written, for whatever does not
    fit (see ids.py and pool.py for the checks): `packed` or `checksums` in each other's memory or
    in the pool's as well. A context manager: leaving it is `close`.
    """

    name: ClassVar[str]
    _closed = False

    def close(self) -> None:
        """End threads where there are some; a later copy raises CopyError. Twice is fine."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def gather(
        self,
        pool: PagedPool,
        page_ids: PageIds,
        packed: Tensor,
        *,
        checksums: Tensor | None = None,
    ) -> None:
        """packed[i] = page page_ids[i]; ids may repeat, the pool is not changed."""
        self._checked(pool, page_ids, packed, checksums, scatter=False)

    def scatter(
        self,
        pool: PagedPool,
        page_ids: PageIds,
        packed: Tensor,
        *,
        checksums: Tensor | None = None,
    ) -> None:
        """Page page_ids[i] = packed[i]; no id may repeat, other pages keep their bytes."""
        self._checked(pool, page_ids, packed, checksums, scatter=True)

    def _checked(
        self,
        pool: PagedPool,
        page_ids: PageIds,
        packed: Tensor,
        checksums: Tensor | None,
        *,
        scatter: bool,
    ) -> None:
        if self._closed:
            raise CopyError(f"this {type(self).__name__} is closed; make another one")
        self._check(pool)
        ids = check_page_ids(page_ids, pool.num_pages, unique=scatter)
        check_packed(packed, len(ids), pool)
        check_checksums(checksums, packed, pool)
        if len(ids):
            self._copy(pool, ids, packed, checksums, scatter=scatter)

    @abstractmethod
    def _check(self, pool: PagedPool) -> None:
        """Raise CopyError unless this backend can copy pools on this device now."""

    @abstractmethod
    def _copy(
        self, pool: PagedPool, ids: Ids, packed: Tensor, checksums: Tensor | None, *, scatter: bool
    ) -> None:
        """The copy itself: arguments fit one another, and there is at least one id."""
