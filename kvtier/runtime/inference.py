"""Handles of programs and of their inferences."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kvtier.errors import TieringError, WaitTimeoutError
from kvtier.kernels.with_torch import Tensor, torch
from kvtier.runtime.worker import LocalWorker, Request, Stage
from kvtier.tiering.lease import Lease
from kvtier.tree.keys import Namespace, Pages, Tokens, as_tokens

if TYPE_CHECKING:
    from kvtier.runtime.runtime import TieredRuntime

TokenIds = Sequence[int] | npt.NDArray[np.integer]
_DEFAULT = Namespace()


class Found(NamedTuple):
    """Tokens of a prompt whose KV is in HBM, and in DRAM after or between those."""

    hbm_tokens: int
    dram_tokens: int


class Program:
    """An agent: it infers, calls tools, infers again. A context manager: leaving releases it."""

    def __init__(self, runtime: TieredRuntime, name: str) -> None:
        self._runtime = runtime
        self.name = name

    def match(self, tokens: TokenIds, namespace: Namespace = _DEFAULT) -> Found:
        """How much of the prompt is there, in whole pages. Changes nothing but its age."""
        with self._runtime._inside() as worker:
            tree = worker.manager.tree
            match = tree.match(tokens, namespace)
        return Found(match.hbm_tokens, match.tokens - match.hbm_tokens)

    def inference(
        self,
        tokens: TokenIds,
        *,
        new_tokens: int = 0,
        namespace: Namespace = _DEFAULT,
        timeout_s: float | None = None,
    ) -> Inference:
        """One model call on this prompt; `with` or `async with` starts it.

        `new_tokens` of output have room from the start; `extend` gets more. Beyond `timeout_s` a
        wait for pages raises WaitTimeoutError.
        """
        return Inference(self._runtime, self.name, tokens, new_tokens, namespace, timeout_s)

    def tool_called(self, name: str) -> None:
        """The program waits for this tool now."""
        with self._runtime._inside() as worker:
            worker.tool_called(self.name, name, self._runtime._clock())

    def demote(self) -> Future[bool]:
        """Copy down now what only HBM has of the program's prompts; they are IDLE from here on.

        False: it runs, or DRAM has no room, or a copy failed. Policies that label demote by
        themselves; this is for those who know that a long wait begins.
        """
        return self._move(LocalWorker.demote)

    def prefetch(self) -> Future[bool]:
        """Bring the program's last prompts up now, before its call. False: HBM has no room."""
        return self._move(LocalWorker.prefetch)

    def _move(
        self, order: Callable[[LocalWorker, str, Callable[[bool], None]], None]
    ) -> Future[bool]:
        with self._runtime._inside() as worker:
            future: Future[bool] = self._runtime._expect()
            order(worker, self.name, lambda well: self._runtime._resolve(future, None, well))
            return future

    def release(self) -> None:
        """The program has ended: its pages are the first to leave."""
        with self._runtime._inside() as worker:
            worker.release(self.name, self._runtime._clock())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()


class Inference:
    """Pages of HBM for one model call, from `start` to its end.

    The KV of the first `cached_tokens` is there; the caller computes the rest, writes it to `pages`
    (`write`, or views of `TieredRuntime.segments`), and may `extend` with output. Left normally,
    all of `tokens` count as computed and serve others; left by an exception, only what was
    published.
    """

    def __init__(
        self,
        runtime: TieredRuntime,
        program: str,
        tokens: TokenIds,
        new_tokens: int,
        namespace: Namespace,
        timeout_s: float | None,
    ) -> None:
        self._runtime = runtime
        self._timeout_s = timeout_s
        ids = as_tokens(tokens).copy()
        if not ids.size:
            raise TieringError("an inference needs a prompt of at least one token")
        if new_tokens < 0:
            raise TieringError(f"new_tokens={new_tokens}; pass 0 or more")
        self._started: Future[None] | None = None
        self._growing: Future[None] | None = None
        self._request = Request(
            runtime._next_name(program),
            program,
            ids,
            -(-(ids.size + new_tokens) // runtime.page_size),
            namespace,
            lambda error: runtime._resolve(self._started, error),
        )
        self._tokens = ids

    # --- life ---

    def start(self) -> Future[None]:
        """Ask for pages; the future resolves once they are there, or with why they never will be.

        CapacityError: more than HBM has. RejectedError: the scheduler refused it.
        """
        with self._runtime._inside() as worker:
            if self._started is not None:
                raise TieringError(f"{self._request.request} was started before")
            self._started = future = self._runtime._expect()
            try:
                worker.arrive(self._request, self._runtime._clock())
            except BaseException:
                self._runtime._forget(future)
                self._started = None
                raise
            return future

    def finish(self) -> None:
        """The model call has ended, and the KV of all of `tokens` is computed."""
        with self._runtime._inside() as worker:
            worker.finish(self._request, self._tokens, self._runtime._clock())

    def cancel(self) -> None:
        """End the call in whatever state it is. Twice is fine."""
        with self._runtime._inside() as worker:
            error = TieringError(f"{self._request.request} was cancelled")
            worker.cancel(self._request, self._runtime._clock(), error)
            self._runtime._resolve(self._growing, error)

    def __enter__(self) -> Self:
        self._wait(self.start(), "pages")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.cancel()
        elif self._request.stage is not Stage.ENDED:
            try:
                self.finish()
            except BaseException:
                self.cancel()  # refused while it waits for room, say: it must not stay for good
                raise

    async def __aenter__(self) -> Self:
        await self._wait_async(self.start(), "pages")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, traceback)

    # --- what it has ---

    @property
    def tokens(self) -> Tokens:
        """int32[n]: the prompt, and what `extend` added."""
        return self._tokens

    @property
    def cached_tokens(self) -> int:
        """How many of the first tokens have their KV in HBM already."""
        with self._runtime._inside():
            return self._lease.cached * self._runtime.page_size

    @property
    def pages(self) -> Pages:
        """int32[pages]: rows of `TieredRuntime.segments`, in the order of the tokens.

        Read it anew after `publish`: where somebody computed the same first, his pages are here.
        """
        with self._runtime._inside():
            return self._lease.pages

    # --- what it does ---

    def extend(self, tokens: TokenIds) -> None:
        """Append output tokens, with room for their KV. Raises CapacityError where HBM has none."""
        waiting = self._extend(tokens)
        if waiting is not None:
            self._wait(waiting, "room")

    async def extend_async(self, tokens: TokenIds) -> None:
        """`extend` for asyncio."""
        waiting = self._extend(tokens)
        if waiting is not None:
            await self._wait_async(waiting, "room")

    def read(self, first_page: int = 0, end_page: int | None = None) -> Tensor:
        """uint8[pages, page_bytes]: a copy of pages, each with its segments side by side."""
        pages = self._slice(first_page, end_page)
        packed = torch.empty((pages.size, self._runtime.page_bytes), dtype=torch.uint8)
        if pages.size:
            self._runtime._copy.gather(self._runtime._device.pool, pages, packed)
        return packed

    def write(self, first_page: int, packed: Tensor) -> None:
        """Fill pages from uint8[pages, page_bytes]. Those of `cached_tokens` are others', too."""
        pages = self._slice(first_page, first_page + len(packed))
        cached = self.cached_tokens // self._runtime.page_size
        if first_page < cached:
            raise TieringError(
                f"page {first_page} is one of {cached} that others read; write from {cached} on"
            )
        if pages.size:
            self._runtime._copy.scatter(self._runtime._device.pool, pages, packed)

    def publish(self) -> None:
        """The KV of all of `tokens` is written: whole pages serve others before the call ends."""
        with self._runtime._inside() as worker:
            worker.publish(self._request, self._tokens)

    # --- parts of the above ---

    @property
    def _lease(self) -> Lease:
        if self._request.stage is not Stage.RUNNING or self._request.lease is None:
            raise TieringError(f"{self._request.request} is {self._request.stage}, not running")
        return self._request.lease

    def _slice(self, first_page: int, end_page: int | None) -> Pages:
        pages = self.pages
        end_page = pages.size if end_page is None else end_page
        if not 0 <= first_page <= end_page <= pages.size:
            raise TieringError(
                f"pages [{first_page}, {end_page}) of {pages.size}; stay within those it has"
            )
        return pages[first_page:end_page]

    def _extend(self, tokens: TokenIds) -> Future[None] | None:
        added = as_tokens(tokens)
        with self._runtime._inside() as worker:
            total = np.concatenate([self._tokens, added])
            num_pages = max(-(-total.size // self._runtime.page_size) - self._lease.num_pages, 0)
            waiting = self._runtime._expect()
            try:
                now = worker.extend(
                    self._request,
                    added.size,
                    num_pages,
                    lambda: self._runtime._resolve(waiting, None),
                )
            except BaseException:
                self._runtime._forget(waiting)
                raise
            self._tokens, self._growing = total, waiting
            if now:
                self._runtime._resolve(waiting, None)
        return None if now else waiting

    def _wait(self, future: Future[None], what: str) -> None:
        try:
            future.result(self._timeout_s)
        except FutureTimeout:
            self._give_up(what)
        except BaseException:
            self.cancel()
            raise

    async def _wait_async(self, future: Future[None], what: str) -> None:
        try:
            await asyncio.wait_for(asyncio.wrap_future(future), self._timeout_s)
        except TimeoutError:
            self._give_up(what)
        except BaseException:
            self.cancel()
            raise

    def _give_up(self, what: str) -> None:
        """Cancel it, for it waited too long."""
        self.cancel()
        raise WaitTimeoutError(
            f"{self._request.request} waited {self._timeout_s} s for {what}; finish or cancel "
            "other inferences, or wait longer"
        )
