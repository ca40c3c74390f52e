"""What every way of copying pages offers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kvtier.kernels.ids import PageIds
from kvtier.kernels.pool import PagedPool


class CopyBackend(Protocol):
    """Copies between the pages of a pool and one packed buffer, exact to the byte.

    `packed` is contiguous uint8[len(page_ids), pool.page_bytes] on the pool's device, a row for
    each page id. Only the segments of `pool` are read or written (`pool.segments(first, count)`
    is one layer, say); they keep their offsets in the whole page. `checksums`, where given, is
    int64[len(page_ids)] and is overwritten with each page's sum over these segments (naive.py).
    Empty `page_ids` copy nothing. Raises CopyError, with nothing written, for whatever does not
    fit: see ids.py and pool.py for the checks.
    """

    name: str

    def gather(
        self,
        pool: PagedPool,
        page_ids: PageIds,
        packed: Tensor,
        *,
        checksums: Tensor | None = None,
    ) -> None:
        """packed[i] = page page_ids[i]; ids may repeat, the pool is not changed."""
        ...

    def scatter(
        self,
        pool: PagedPool,
        page_ids: PageIds,
        packed: Tensor,
        *,
        checksums: Tensor | None = None,
    ) -> None:
        """Page page_ids[i] = packed[i]; no id may repeat, other pages keep their bytes."""
        ...
