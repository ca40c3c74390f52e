"""Bytes as people read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.memory.sizes import at_least, at_most

UNITS = {"GB": 10**9, "MB": 10**6, "kB": 10**3, "bytes": 1}


@pytest.mark.parametrize(
    ("num_bytes", "up", "down"),
    [
        (0, "0 bytes", "0 bytes"),
        (999, "999 bytes", "999 bytes"),
        (1_001, "1.01 kB", "1.00 kB"),
        (2_500_001, "2.51 MB", "2.50 MB"),
        (40_000_000_000, "40.00 GB", "40.00 GB"),
        (1_234_567_890_123, "1,234.57 GB", "1,234.56 GB"),
        (-1_500_000_001, "-1.50 GB", "-1.51 GB"),
    ],
)
def test_two_decimals_up_for_what_is_asked_and_down_for_what_is_there(
    num_bytes: int, up: str, down: str
) -> None:
    assert (at_least(num_bytes), at_most(num_bytes)) == (up, down)


@given(st.integers(-(10**14), 10**14))
def test_the_text_is_never_on_the_wrong_side(num_bytes: int) -> None:
    assert value(at_most(num_bytes)) <= num_bytes <= value(at_least(num_bytes))
    assert value(at_least(num_bytes)) - value(at_most(num_bytes)) <= max(1, abs(num_bytes) // 99)


def value(text: str) -> int:
    number, unit = text.replace(",", "").split()
    whole, _, cents = number.partition(".")
    if not cents:
        return int(whole)
    return int(whole + cents) * UNITS[unit] // 100
