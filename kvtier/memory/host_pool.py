"""The host tier's memory: whole pages side by side."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Self

from kvtier.errors import PoolError
from kvtier.kernels.with_torch import Tensor, torch
from kvtier.memory.limits import HostRoom
from kvtier.memory.mapping import Mapping
from kvtier.memory.numa import ANYWHERE, Placement
from kvtier.memory.pages import PageAllocator
from kvtier.memory.registration import Pinning, Registration

_LOG = logging.getLogger(__name__)


class HostPool:
    """`num_pages` pages of `page_bytes` each, page-first, exactly as large as that.

    A page is one contiguous run over all segments, so that every later hop is one large piece.
    `pages` says which are free. A context manager: leaving it is `close`.
    """

    def __init__(self, mapping: Mapping, num_pages: int, page_bytes: int) -> None:
        """A pool over memory of that size; see `allocate`, which makes both."""
        if mapping.num_bytes != num_pages * page_bytes:
            raise PoolError(
                f"{mapping.num_bytes} bytes are not {num_pages} pages of {page_bytes} bytes"
            )
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.pages = PageAllocator(num_pages)
        self._mapping = mapping
        self._packed: Tensor | None = torch.from_numpy(
            mapping.memory.reshape(num_pages, page_bytes)
        )
        self._registration: Registration | None = None

    @classmethod
    def allocate(
        cls,
        num_pages: int,
        page_bytes: int,
        *,
        near: Placement = ANYWHERE,
        room: HostRoom | None = None,
        num_ranks: int = 1,
        reserve_bytes: int | None = None,
        pinning: Pinning | None = None,
    ) -> HostPool:
        """Check the limits, map the memory, touch it on its node, register it; all or nothing.

        `near` is where it is to lie (Topology.near). `room` is read now if not given; ranks that
        start together share one reading (see HostRoom). `num_ranks` and `reserve_bytes` as in
        HostRoom.check. Without `pinning` nothing is registered. Raises CapacityError when it does
        not fit, PoolError for sizes below 1 and where registering fails.
        """
        if num_pages < 1 or page_bytes < 1:
            raise PoolError(f"num_pages={num_pages}, page_bytes={page_bytes}; pass 1 or more")
        room = HostRoom.read() if room is None else room
        room.check(num_pages, page_bytes, num_ranks=num_ranks, reserve_bytes=reserve_bytes)
        pool = cls(Mapping(num_pages * page_bytes), num_pages, page_bytes)
        try:
            pool._mapping.touch(near)
            if pinning is not None:
                pool._register(pinning)
        except BaseException:
            pool.close()
            raise
        _LOG.info(
            "event=host_pool_ready pages=%d bytes=%d node=%s chunks=%d",
            num_pages,
            pool.num_bytes,
            near.node_id,
            pool._registration.num_chunks if pool._registration else 0,
        )
        return pool

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def packed(self) -> Tensor:
        """uint8[num_pages, page_bytes] over the memory itself. Raises PoolError once closed."""
        if self._packed is None:
            raise PoolError("this host pool is closed; make another one")
        return self._packed

    @property
    def chunk_pages(self) -> int | None:
        """Pages of one registered chunk, beyond which no single copy reaches; None if unpinned."""
        return self._registration.chunk_pages if self._registration else None

    def close(self) -> None:
        """Unregister, then let go of the memory; end the copies before. Twice is fine.

        Views of `packed` that somebody keeps stay readable, and keep the memory. Raises PoolError
        where a chunk cannot be unregistered; the pool is closed even so.
        """
        registration, self._registration = self._registration, None
        try:
            if registration is not None:
                registration.close()
        finally:
            self._packed = None
            self._mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _register(self, pinning: Pinning) -> None:
        self._mapping.keep_from_children()
        self._registration = Registration(
            self._mapping.address, self.num_pages, self.page_bytes, pinning
        )
