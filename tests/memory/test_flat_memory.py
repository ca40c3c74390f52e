"""B03: index arrays in long-lived holders keep nothing else alive."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("flat_memory.py")


def spread(num_rounds: int, kind: str) -> float:
    """Largest distance from the resident memory of the start, as a share of it."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(num_rounds), kind],
        capture_output=True,
        text=True,
        check=True,
    )
    start, *later = map(int, done.stdout.split())
    assert len(later) == 10
    return max(abs(now - start) for now in later) / start


def test_resident_memory_is_flat_over_a_million_rounds_b03() -> None:
    assert spread(1_000_000, "own") <= 0.02


def test_views_of_the_free_list_would_be_seen() -> None:
    assert spread(1_000, "views") > 0.5
