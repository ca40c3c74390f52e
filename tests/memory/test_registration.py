"""Registration in chunks on page borders; all or nothing (B29)."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import PoolError
from kvtier.memory.registration import MAX_CHUNK_BYTES, Pinning, Registration, log_progress

from .registrars import FakeRegistrar

BASE = 0x7F00_0000_0000
PAGE = 1000


def silent(done: int, total: int) -> None:
    pass


def five_chunks(registrar: FakeRegistrar) -> Registration:
    return Registration(BASE, 9, PAGE, Pinning(registrar, 2 * PAGE + 999, silent))


def test_two_tebibytes_go_in_chunks_that_a_driver_takes_b29() -> None:
    registrar = FakeRegistrar()
    page = 3 << 20
    num_pages = (2 << 40) // page
    Registration(BASE, num_pages, page, Pinning(registrar, MAX_CHUNK_BYTES))
    assert sum(registrar.live.values()) == num_pages * page
    assert max(registrar.live.values()) <= MAX_CHUNK_BYTES


@given(num_pages=st.integers(1, 200), page_bytes=st.integers(1, 5000), chunk=st.integers(1, 20_000))
def test_chunks_are_whole_pages_side_by_side(num_pages: int, page_bytes: int, chunk: int) -> None:
    registrar = FakeRegistrar()
    progress: list[tuple[int, int]] = []
    pinning = Pinning(registrar, chunk, lambda done, total: progress.append((done, total)))
    registration = Registration(BASE, num_pages, page_bytes, pinning)
    ends = [address + size for address, size in registrar.calls]
    assert [BASE, *ends[:-1]] == [address for address, _ in registrar.calls]
    assert ends[-1] == BASE + num_pages * page_bytes
    assert all(size <= max(chunk, page_bytes) for _, size in registrar.calls)
    assert all((end - BASE) % (registration.chunk_pages * page_bytes) == 0 for end in ends[:-1])
    assert progress == [(end - BASE, num_pages * page_bytes) for end in ends]
    assert registration.num_chunks == len(ends)
    registration.close()
    assert registrar.live == {}


@pytest.mark.parametrize("failing", range(5))
def test_a_chunk_that_fails_undoes_those_before_latest_first_b29(failing: int) -> None:
    registrar = FakeRegistrar(fail_register=frozenset({failing}))
    with pytest.raises(PoolError) as error:
        five_chunks(registrar)
    assert registrar.live == {}
    assert registrar.undone == [address for address, _ in registrar.calls[:failing]][::-1]
    size = "1.00 kB" if failing == 4 else "2.00 kB"
    done = f"{2 * failing}.00 kB" if failing else "0 bytes"
    assert str(error.value) == (
        f"registering {size} of host memory failed after {done} of 9.00 kB (error 2: out of "
        "memory); what was registered is rolled back: ask for less, or free memory"
    )


def test_an_interrupt_undoes_what_was_done() -> None:
    registrar = FakeRegistrar()

    def interrupted(done: int, total: int) -> None:
        if done > 3 * PAGE:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Registration(BASE, 9, PAGE, Pinning(registrar, 2 * PAGE, interrupted))
    assert len(registrar.undone) == 2
    assert registrar.live == {}


def test_a_roll_back_that_fails_goes_on_and_is_told_of() -> None:
    registrar = FakeRegistrar(fail_register=frozenset({3}), fail_unregister=frozenset({0}))
    with pytest.raises(PoolError, match="registering") as error:
        five_chunks(registrar)
    assert len(registrar.undone) == 3
    assert list(registrar.live) == [BASE + 4 * PAGE]
    assert error.value.__notes__ == [
        "a chunk stays pinned until the process ends: error 713: not registered"
    ]


def test_closing_undoes_every_chunk_even_when_one_fails() -> None:
    registrar = FakeRegistrar(fail_unregister=frozenset({1}))
    registration = five_chunks(registrar)
    with pytest.raises(PoolError, match=r"1 of 5 chunks .* stay pinned .* error 713"):
        registration.close()
    assert len(registrar.undone) == 5
    assert list(registrar.live) == [BASE + 6 * PAGE]
    registration.close()
    assert len(registrar.undone) == 5


@pytest.mark.parametrize("chunk_bytes", [0, -1, MAX_CHUNK_BYTES + 1])
def test_chunks_beyond_what_a_driver_takes_are_refused(chunk_bytes: int) -> None:
    with pytest.raises(PoolError, match=f"chunk_bytes={chunk_bytes}; pass 1 to"):
        Pinning(FakeRegistrar(), chunk_bytes)


def test_progress_is_shown_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    assert Pinning(FakeRegistrar()).progress is log_progress
    with caplog.at_level(logging.INFO, "kvtier.memory"):
        Registration(BASE, 3, PAGE, Pinning(FakeRegistrar(), 2 * PAGE))
    assert [record.getMessage() for record in caplog.records] == [
        "event=host_memory_registered done_bytes=2000 total_bytes=3000",
        "event=host_memory_registered done_bytes=3000 total_bytes=3000",
    ]
