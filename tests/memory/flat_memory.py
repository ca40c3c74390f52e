"""Alloc/free rounds with long-lived holders, and what they do to this process's memory (B03).

    python flat_memory.py ROUNDS own|views

Prints the resident bytes once all holders have pages, then after every tenth of the rounds.
`views` hands out views of ever new lists of free pages, as the engine of the field bug did.
"""

import sys
from mmap import PAGESIZE
from pathlib import Path

import numpy as np

from kvtier.memory.pages import PageAllocator

NUM_PAGES = 200_000
NUM_LONG, NUM_SHORT = 2_000, 2_000
LONG_EVERY = 100  # rounds after which one of the long-lived holders is replaced
SIZES = 8


class Views:
    """A list of free pages that is cut at the front and joined with what comes back."""

    def __init__(self, num_pages: int) -> None:
        self._free = np.arange(num_pages, dtype=np.int32)

    def take(self, num_pages: int) -> np.ndarray:
        taken, self._free = self._free[:num_pages], self._free[num_pages:]
        return taken

    def give(self, pages: np.ndarray) -> None:
        self._free = np.concatenate([self._free, pages])


def resident_bytes() -> int:
    return PAGESIZE * int(Path("/proc/self/statm").read_text().split()[1])


def _run(pool: PageAllocator | Views, holders: list[np.ndarray], num_rounds: int) -> None:
    for at in range(num_rounds):
        nth, rest = divmod(at, LONG_EVERY)
        holder = NUM_LONG + at % NUM_SHORT if rest else nth % NUM_LONG
        pool.give(holders[holder])
        holders[holder] = pool.take(1 + at * 7 % SIZES)


def main(num_rounds: int, kind: str) -> None:
    pool = PageAllocator(NUM_PAGES) if kind == "own" else Views(NUM_PAGES)
    rng = np.random.default_rng(3)
    holders = [pool.take(int(n)) for n in rng.integers(1, SIZES + 1, NUM_LONG + NUM_SHORT)]
    _run(pool, holders, num_rounds // 100)  # what the interpreter sets up once is there then
    print(resident_bytes())
    for _ in range(10):
        _run(pool, holders, num_rounds // 10)
        print(resident_bytes())
    if isinstance(pool, PageAllocator):
        pool.check_integrity()
        assert pool.num_taken == sum(len(pages) for pages in holders)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
