"""Which pages are free, against a plain set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import PoolError
from kvtier.memory.pages import PageAllocator

TAKE, GIVE = "take", "give"
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just(TAKE), st.integers(0, 9)),
        st.tuples(st.just(GIVE), st.lists(st.integers(-2, 22), max_size=6)),
    ),
    max_size=60,
)


@given(num_pages=st.integers(0, 20), operations=OPERATIONS)
@settings(max_examples=200)
def test_free_and_taken_pages_are_the_pool_whatever_is_asked(
    num_pages: int, operations: list[tuple[str, Any]]
) -> None:
    pool, taken = PageAllocator(num_pages), set[int]()
    for kind, value in operations:
        if kind == TAKE:
            pages = pool.take(value)
            assert (pages is None) == (value > num_pages - len(taken))
            got = [] if pages is None else pages.tolist()
            assert len(got) == len(set(got) - taken) == (0 if pages is None else value)
            assert set(got) <= set(range(num_pages))
            taken |= set(got)
        elif len(set(value)) == len(value) and set(value) <= taken:
            pool.give(value)
            taken -= set(value)
        else:
            with pytest.raises(PoolError):
                pool.give(value)
        assert (pool.num_free, pool.num_taken) == (num_pages - len(taken), len(taken))
        pool.check_integrity()


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([1, 0], "page 0 is free already"),
        ([1, 3], "page 3 was never taken"),
        ([-1], "page -1 was never taken"),
        ([2, 1, 2], "page 2 is given back twice"),
        ([1.0], "pass integers"),
        ([[1, 2]], "one dimension"),
    ],
)
def test_a_page_that_is_not_the_callers_is_named_and_nothing_changes(
    pages: list[Any], message: str
) -> None:
    pool = PageAllocator(8)
    pool.take(3)
    pool.give([0])
    with pytest.raises(PoolError, match=message) as error:
        pool.give(pages)
    assert "\n" not in str(error.value)
    assert pool.num_taken == 2
    pool.check_integrity()


def test_neighbours_that_come_back_go_out_as_one_run() -> None:
    pool = PageAllocator(100)
    pool.take(50)
    pool.give(np.array([7, 5, 6], np.int64))
    again = pool.take(5)
    assert again is not None
    assert again.tolist() == [5, 6, 7, 50, 51]


def test_arrays_own_their_memory_b03() -> None:
    pool = PageAllocator(10)
    pages = pool.take(4)
    assert pages is not None
    assert (pages.dtype, pages.base) == (np.int32, None)
    pages[:] = 99  # its owner's alone: the pool goes by its own books
    assert pool.num_taken == 4
    pool.check_integrity()


@pytest.mark.parametrize("num_pages", [-1, 2**31])
def test_a_pool_that_ids_cannot_name_is_refused(num_pages: int) -> None:
    with pytest.raises(PoolError, match="pass a whole number, 0 to 2147483647"):
        PageAllocator(num_pages)


def test_fewer_than_no_pages_are_refused() -> None:
    with pytest.raises(PoolError, match="pass 0 or more"):
        PageAllocator(3).take(-1)
