"""Exits and interrupts in callbacks, forked children, and what is no job: nothing hangs."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvtier.errors import CapacityError, PoolError, TransferError
from kvtier.ids import Direction
from kvtier.kernels.cpu import CpuCopy
from kvtier.layout import KVDtype, KVLayout, Segment
from kvtier.memory.device_pool import DevicePool
from kvtier.memory.pages import PageAllocator
from kvtier.transfer.cpu import CpuBackend
from kvtier.transfer.engine import TransferEngine
from kvtier.transfer.fixed_window import FixedWindow

from .engines import LONG_S
from .scene import PAGE_BYTES, Pools


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    pools = Pools(8, 8)
    backend = CpuBackend(pools.device_pool, pools.host_pool, CpuCopy(num_threads=1))
    windows = {direction: FixedWindow() for direction in Direction}
    engine = TransferEngine(backend, chunk_bytes=PAGE_BYTES, windows=windows)
    yield engine
    engine.check_integrity()
    engine.close()
    pools.close()


class Ready:
    def __init__(self, error: BaseException) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error


def test_a_callback_that_exits_stops_no_thread_and_no_job(
    engine: TransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    holding = threading.Event()
    held = engine.submit(Direction.D2H, [1], [1], ready=holding)
    held.future.add_done_callback(lambda future: sys.exit(1))
    after = engine.submit(Direction.D2H, [2], [2])
    holding.set()
    assert engine.wait([held, after], LONG_S)
    assert held.future.result(0) is after.future.result(0) is None
    assert engine.drain(LONG_S)
    assert told
    assert all(args.exc_type is SystemExit for args in told)
    assert engine.wait([engine.submit(Direction.D2H, [3], [3])], LONG_S)


def test_a_wait_that_exits_fails_its_job_alone(engine: TransferEngine) -> None:
    job = engine.submit(Direction.D2H, [0], [0], ready=Ready(SystemExit(3)))
    with pytest.raises(TransferError, match="SystemExit: 3"):
        job.future.result(LONG_S)
    assert engine.wait([engine.submit(Direction.D2H, [1], [1])], LONG_S)


def test_a_failure_is_told_in_one_line(engine: TransferEngine) -> None:
    job = engine.submit(Direction.D2H, [0], [0], ready=Ready(RuntimeError("never\nready")))
    with pytest.raises(TransferError, match="never ready") as caught:
        job.future.result(LONG_S)
    assert "\n" not in str(caught.value)


def test_what_is_no_job_is_refused(engine: TransferEngine) -> None:
    for after in (["x"], [None]):
        with pytest.raises(TransferError, match="jobs that `submit` returned"):
            engine.submit(Direction.D2H, [0], [0], after=after)  # type: ignore[arg-type]
    with pytest.raises(TransferError, match="not submitted here"):
        engine.cancel(None)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_is_told_that_the_engine_is_not_its_own(engine: TransferEngine) -> None:
    child = os.fork()
    if not child:
        signal.alarm(LONG_S)  # a hang is a failure
        try:
            for use in (lambda: engine.submit(Direction.D2H, [0], [0]), engine.drain):
                with pytest.raises(TransferError, match="parent process"):
                    use()
            engine.close()
        except BaseException:
            os._exit(3)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert engine.wait([engine.submit(Direction.D2H, [0], [0])], LONG_S)


def test_sizes_beyond_any_memory_have_one_line() -> None:
    layout = KVLayout((Segment("k", 0, 2**20),), KVDtype.BF16, 16)
    with pytest.raises(CapacityError, match="ask for fewer pages"):
        DevicePool.allocate(layout, 10**14)
    with pytest.raises(PoolError, match="whole number"):
        PageAllocator(1.5)  # type: ignore[arg-type]
    with pytest.raises(PoolError):
        PageAllocator(4).give(np.zeros((2, 2), np.int32))
