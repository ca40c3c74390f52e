"""`TieredRuntime`: two tiers of real pages, any policy, and programs that run on them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from threading import Event, Thread
from typing import Any, Self

from kvtier.errors import ConfigError, KvtierError, TieringError
from kvtier.ids import Direction
from kvtier.kernels.cpu import CpuCopy
from kvtier.layout import KVLayout, load_model
from kvtier.memory.device_pool import DevicePool
from kvtier.memory.host_pool import HostPool
from kvtier.runtime.inference import Program
from kvtier.runtime.mover import EngineMover
from kvtier.runtime.serial import Serial
from kvtier.runtime.views import segment_views
from kvtier.runtime.worker import LocalWorker
from kvtier.scheduling import ConcurSettings, SchedulerSettings, build, policy, split_policy
from kvtier.tiering.counters import Counters
from kvtier.tiering.integrity import check_integrity
from kvtier.tiering.manager import TierManager
from kvtier.tiering.moves import Move
from kvtier.tiering.room import TierMode
from kvtier.transfer.cpu import CpuBackend
from kvtier.transfer.engine import TransferEngine
from kvtier.transfer.window import TransferWindow, WindowSettings
from kvtier.tree.node import Tier

_CHUNK_BYTES = 16 << 20


class TieredRuntime:
    """KV pages of many programs in little HBM, the rest of them in DRAM; by `policy`.

    `layout` says what a page is (`KVLayout`, or a model's name for its layout); `hbm_tokens` and
    `dram_tokens` are rounded down to whole pages. `policy` and `admission` are names as in
    `kvtier replay` ("mori", "mori+concur", "lru+offload-wb"; "none", "fixed:8"). With `ticks` a
    thread gives the scheduler its period; without it call `tick`.

    HBM is memory of `device`; "cpu" alone so far. All methods may be called from any thread. A
    context manager: leaving it cancels what still runs, and gives back all memory. Raises
    ConfigError for settings that make no runtime, CapacityError where memory is too small.
    """

    def __init__(
        self,
        layout: KVLayout | str,
        *,
        hbm_tokens: int,
        dram_tokens: int,
        page_size: int | None = None,
        policy: str = "mori",
        admission: str | None = None,
        device: str = "cpu",
        settings: SchedulerSettings | None = None,
        concur: ConcurSettings | None = None,
        num_threads: int = 2,
        ticks: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        layout = _layout(layout, page_size)
        self.page_size = layout.page_size
        self._clock = clock
        hbm_pages = _pages("hbm_tokens", hbm_tokens, self.page_size)
        self._mode, scheduler = _scheduling(policy, admission, settings, concur)
        dram_pages = dram_tokens // self.page_size if self._mode.offload else 0
        if device != "cpu":
            raise ConfigError(f"device={device!r}: its transfers are not there yet; use 'cpu'")
        self._device = DevicePool.allocate(layout, hbm_pages, device)
        # A pool has a page at least; without a tier below, nothing ever moves to it.
        self._host = HostPool.allocate(max(dram_pages, 1), self._device.page_bytes)
        self._copy = CpuCopy(num_threads)
        chunk_bytes = max(_CHUNK_BYTES, self._device.page_bytes)
        windows = {way: TransferWindow(WindowSettings(chunk_bytes)) for way in Direction}
        self._engine = TransferEngine(
            CpuBackend(self._device, self._host, self._copy),
            chunk_bytes=chunk_bytes,
            windows=windows,
            reports=False,
        )
        self._serial = Serial()
        self._mover = EngineMover(self._engine, self._on_end)
        self._manager = TierManager(
            self._device.pages,
            self._host.pages if dram_pages else 0,
            self._mover,
            page_size=self.page_size,
            mode=self._mode,
        )
        self._worker = LocalWorker(scheduler, self._manager)
        self._numbers = count(1)
        self._waiting: set[Future[Any]] = set()
        self._closed = False
        self._broken: BaseException | None = None
        self._stop = Event()
        self._ticker: Thread | None = None
        with self._inside():
            self._worker.start(clock())
        if ticks:
            self._ticker = Thread(
                target=self._keep_ticking, args=(scheduler.settings.tick_s,), name="kvtier-ticks"
            )
            self._ticker.daemon = True
            self._ticker.start()

    # --- programs ---

    def program(self, name: str, *, parent: str | None = None) -> Program:
        """The program of this name; a sub-agent of `parent` is released with it."""
        with self._inside():
            self._worker.program(name, parent, self._clock())
        return Program(self, name)

    # --- pages ---

    def segments(self, library: str = "torch") -> list[Any]:
        """A view of HBM per segment, [num_pages, bytes of a page in it] of uint8, without a copy.

        `library` is "torch", "numpy" or "cupy" (device memory alone). Row p of each is page p.
        """
        return segment_views(self._device, library)

    @property
    def num_pages(self) -> dict[Tier, int]:
        """Pages of both tiers."""
        return {tier: self._manager.pools[tier].num_pages for tier in Tier}

    @property
    def page_bytes(self) -> int:
        """Bytes of a page over all segments: a row of what `Inference.read` returns."""
        return self._device.page_bytes

    # --- the rest ---

    def tick(self) -> None:
        """Give the scheduler its period now."""
        with self._inside():
            self._worker.tick(self._clock())

    def settle(self, timeout_s: float = 60.0) -> None:
        """Wait until no copy is under way. Raises TieringError after `timeout_s`."""
        give_up_s = time.monotonic() + timeout_s
        while self._busy():
            left_s = give_up_s - time.monotonic()
            if left_s <= 0 or not self._engine.drain(left_s):
                raise TieringError(f"copies are still under way after {timeout_s} s")

    def counters(self) -> Counters:
        """What was found, moved and lost since the start, in pages; a copy."""
        with self._inside():
            return replace(self._manager.counters)

    def check_integrity(self) -> None:
        """Raise unless every page is somebody's, and every sum is right. O(pages)."""
        with self._inside():
            check_integrity(self._manager)
        self._engine.check_integrity()

    def close(self) -> None:
        """Cancel what runs, wait for copies in flight, give back all memory. Twice is fine."""
        if self._closed:
            return
        with self._serial.inside():
            self._closed = True
            self._mover.closing = True
            error = TieringError("the runtime was closed")
            self._fail_all(error)  # before the first cancel lets others start
            for request in reversed(self._worker.live):
                self._worker.cancel(request, self._clock(), error)
        self._stop.set()
        if self._ticker is not None:
            self._ticker.join()
        self._engine.close()
        self._copy.close()
        self._host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # --- for handles ---

    def _inside(self) -> _Inside:
        return _Inside(self)

    def _next_name(self, program: str) -> str:
        return f"{program}#{next(self._numbers)}"

    def _expect(self) -> Future[Any]:
        """A future that somebody waits for; `close` and a failure of ours end it, too."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # ends by `_resolve` alone
        self._waiting.add(future)
        return future

    def _forget(self, future: Future[Any]) -> None:
        """What it was for was refused: nobody waits."""
        self._waiting.discard(future)

    def _resolve(
        self, future: Future[Any] | None, error: KvtierError | None, result: object = None
    ) -> None:
        """Once, and outside the lock: a future's callbacks may call the runtime."""
        if future is None or future not in self._waiting:
            return
        self._waiting.remove(future)
        if error is None:
            self._serial.later(lambda: future.set_result(result))
        else:
            self._serial.later(lambda: future.set_exception(error))

    def _fail_all(self, error: KvtierError) -> None:
        for future in list(self._waiting):
            self._resolve(future, error)

    # --- what other threads do ---

    def _on_end(self, move: Move, well: bool) -> None:
        self._serial.post(lambda: self._guarded(lambda: self._note_end(move, well)))

    def _note_end(self, move: Move, well: bool) -> None:
        self._mover.forget(move)
        self._worker.moved(move, self._clock(), well=well)

    def _keep_ticking(self, period_s: float) -> None:
        while not self._stop.wait(period_s):
            self._serial.post(lambda: self._guarded(lambda: self._worker.tick(self._clock())))

    def _guarded(self, what: Callable[[], None]) -> None:
        """What goes wrong in a thread of ours is raised where the runtime is called next."""
        try:
            if self._broken is None:
                what()
        except BaseException as error:
            self._broken = error
            self._fail_all(TieringError(f"the runtime has failed: {error!r}"))

    def _busy(self) -> bool:
        with self._inside():
            return len(self._manager.traffic) > 0


class _Inside:
    """`with runtime._inside():` alone with the runtime, which must be open and whole."""

    def __init__(self, runtime: TieredRuntime) -> None:
        self._runtime = runtime
        self._block = runtime._serial.inside()

    def __enter__(self) -> LocalWorker:
        self._block.__enter__()
        runtime = self._runtime
        if runtime._closed or runtime._broken is not None:
            self._block.__exit__(None, None, None)
            if runtime._broken is not None:
                raise TieringError("the runtime has failed; make another one") from runtime._broken
            raise TieringError("this runtime is closed; make another one")
        return runtime._worker

    def __exit__(self, *raised: object) -> None:
        self._block.__exit__(None, None, None)


def _layout(layout: KVLayout | str, page_size: int | None) -> KVLayout:
    if isinstance(layout, str):
        layout = load_model(layout).layout()
    return layout if page_size is None else replace(layout, page_size=page_size)


def _pages(name: str, tokens: int, page_size: int) -> int:
    if tokens < page_size:
        raise ConfigError(f"{name}={tokens} is less than a page of {page_size} tokens")
    return tokens // page_size


def _scheduling(
    name: str,
    admission: str | None,
    settings: SchedulerSettings | None,
    concur: ConcurSettings | None,
) -> tuple[TierMode, Any]:
    if settings is None:
        # One thread that runs programs in turn must not wait for margins with the machine idle.
        settings = SchedulerSettings(swap_when_idle=True)
    name, with_policy = split_policy(name)
    if with_policy is not None and admission is not None:
        raise ConfigError(f"admission is given twice: {with_policy!r} and {admission!r}")
    spec = policy(name)
    if spec.unbounded:
        raise ConfigError(f"policy {name!r} is a bound of the simulator; real memory ends")
    scheduler = build(name, admission or with_policy or "none", settings, concur)
    return TierMode(spec.offload, spec.write_through, spec.labels), scheduler
