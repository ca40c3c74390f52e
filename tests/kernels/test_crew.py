"""No byte moves once a copy has returned or raised: interrupts, closing, forks, the end."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Barrier, Event, Thread, current_thread, get_ident, main_thread

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'kvtier[runtime]'")

import torch

from kvtier.errors import CopyError
from kvtier.kernels.cpu import CpuCopy
from kvtier.kernels.crew import Crew
from kvtier.kernels.pool import PagedPool

ROOT = Path(__file__).resolve().parents[2]
NUM_INTERRUPTS = 40
WAIT_S = 60


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[..., None]], None]]:
    """Sets what SIGUSR1 does; afterwards it does what it did."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, handler)
    signal.signal(signal.SIGUSR1, before)


def test_through_all_interrupts_the_caller_waits_for_parts_that_have_begun(
    on_signal: Callable[[Callable[..., None]], None],
) -> None:
    caller, seen, begun, ended = get_ident(), [], Barrier(2), []

    def interrupt(*_: object) -> None:
        seen.append(None)
        if not ended:
            raise KeyboardInterrupt(len(seen))

    def part() -> None:
        begun.wait(WAIT_S)
        if current_thread() is main_thread():
            return
        while len(seen) < NUM_INTERRUPTS:  # one that comes just before a wait does not end it
            signal.pthread_kill(caller, signal.SIGUSR1)
        ended.append(True)

    on_signal(interrupt)
    threads = Crew(1)
    with pytest.raises(KeyboardInterrupt) as caught:
        threads.run([part, part], 1)
    assert ended == [True]
    assert caught.value.args == (1,)
    threads.close()


def test_the_error_of_a_part_on_a_thread_stops_the_copy_and_is_raised() -> None:
    begun, failed, ran = Barrier(2), Event(), []

    def part() -> None:
        begun.wait(WAIT_S)
        if current_thread() is main_thread():
            assert failed.wait(WAIT_S)
            return
        failed.set()
        raise MemoryError("on a thread")

    threads = Crew(1)
    with pytest.raises(MemoryError, match="on a thread"):
        threads.run([part, part], 1)
    threads.close()
    threads.run([lambda at=at: ran.append((at, current_thread())) for at in range(3)], 1)
    assert ran == [(at, main_thread()) for at in range(3)]


def test_a_copy_is_completed_or_refused_when_another_thread_closes_it() -> None:
    memory = torch.arange(8 * 64 * 4096).to(torch.uint8).view(8, 64, 4096)
    pool, ids = PagedPool.of(list(memory)), np.arange(64)[::-1].copy()
    expected = np.ascontiguousarray(memory.numpy()[:, ids].transpose(1, 0, 2)).reshape(64, -1)
    ends: SimpleQueue[BaseException | None] = SimpleQueue()

    def copy_until_closed(copy: CpuCopy, started: Event) -> None:
        packed = torch.from_numpy(np.zeros_like(expected))
        try:
            while True:
                packed.numpy()[:] = 0
                copy.gather(pool, ids, packed)
                started.set()
                assert np.array_equal(packed.numpy(), expected)
        except BaseException as error:
            ends.put(error)

    for _ in range(10):
        copy, starts = CpuCopy(3), [Event() for _ in range(3)]
        threads = [Thread(target=copy_until_closed, args=(copy, start)) for start in starts]
        for thread in threads:
            thread.start()
        assert all(start.wait(WAIT_S) for start in starts)
        copy.close()
        for thread in threads:
            thread.join(WAIT_S)
            assert isinstance(ends.get(timeout=WAIT_S), CopyError)


_SETUP = """
import os, signal, threading
import numpy as np, torch
from kvtier.kernels.cpu import CpuCopy
from kvtier.kernels.pool import PagedPool

torch.set_num_threads(1)
memory = np.random.default_rng(0).integers(0, 256, (8, 64, 8192), dtype=np.uint8)
pool, ids = PagedPool.of(list(torch.from_numpy(memory))), np.arange(64)[::-1].copy()
expected = memory[:, ids].transpose(1, 0, 2).reshape(64, -1)
copy = CpuCopy(4)

def is_exact():
    packed = np.zeros((64, pool.page_bytes), dtype=np.uint8)
    copy.gather(pool, ids, torch.from_numpy(packed))
    return np.array_equal(packed, expected)
"""
_INTERRUPTS = """
def interrupt(_, frame):
    while frame is not None and frame.f_code is not CpuCopy.gather.__code__:
        frame = frame.f_back
    if frame is not None:
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
packed = np.zeros((64, pool.page_bytes), dtype=np.uint8)
interrupted, late, turns = 0, 0, 0
while interrupted < 40 and turns < 1000:
    turns += 1
    copy = CpuCopy(8)
    signal.setitimer(signal.ITIMER_REAL, turns % 40 * 5e-5 + 1e-5, 1e-4)
    try:
        copy.gather(pool, ids, torch.from_numpy(packed))
    except KeyboardInterrupt:
        interrupted += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    packed[:] = 0
    copy.close()  # ends its threads, so whatever they still wrote is there now
    late += packed.any()
print(interrupted, late)
"""
_FORKS = """
stop = threading.Event()
def keep_copying():
    while not stop.is_set():
        assert is_exact()
others = [threading.Thread(target=keep_copying) for _ in range(2)]
for other in others:
    other.start()
ends = []
while len(ends) < 60 and not any(ends):
    child = os.fork()
    if not child:
        signal.alarm(20)
        exact = is_exact()
        threads = len(os.listdir("/proc/self/task")) > 1
        copy.close()
        os._exit(0 if exact and threads else 3)
    ends.append(os.waitpid(child, 0)[1])
stop.set()
for other in others:
    other.join()
print(ends.count(0), is_exact())
"""
_AT_EXIT = """
import atexit
atexit.register(lambda: print(is_exact()))
print(is_exact())
"""


@pytest.mark.parametrize(
    ("script", "said"),
    [
        pytest.param(_INTERRUPTS, "40 0\n", id="interrupted"),
        pytest.param(_FORKS, "60 True\n", id="forked"),
        pytest.param(_AT_EXIT, "True\nTrue\n", id="at-exit"),
    ],
)
def test_a_process_of_its_own_sees_copies_end_when_interrupted_and_work_in_a_child_and_at_exit(
    script: str, said: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SETUP + script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.stderr, done.stdout, done.returncode) == ("", said, 0)
