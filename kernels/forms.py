"""Which kernel copies which rows, and with which constants."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

_KIB = 1024


class Form(StrEnum):
    """The shape of the work that one program does."""

    PAGE = "page"
    """One block of one row."""
    SMALL = "small"
    """One row of several pages: for rows too short to fill a program."""
    PERSISTENT = "persistent"
    """A fixed number of programs that stride over all pages: few SMs; never chosen by itself."""
    MIXED = "mixed"
    """One block of one row, rows of different lengths."""


# Bytes in flight per program: 8 accesses of 16 bytes by each of 128 threads.
_BLOCK_BYTES = 16 * _KIB
# Narrower words take a lane each: fewer, or registers run out.
_LANES = {16: 2 * _KIB, 4: 4 * _KIB, 1: 4 * _KIB}
_SMALL_ROW_BYTES = 4 * _KIB
_SMALL_TILE_BYTES = 8 * _KIB
_LANES_PER_WARP = 512


@dataclass(frozen=True, slots=True)
class Shape:
    """Constants of one compiled kernel. Sizes in words of `word_bytes`."""

    form: Form
    word_bytes: int
    row: int
    """0 where rows differ: their lengths are in the table."""
    block: int
    """Words per program of a row; in SMALL the padded row."""
    pages: int = 1
    """Pages per program (SMALL)."""
    num_warps: int = 4

    @property
    def unit(self) -> int:
        """Elements per word."""
        return 2 if self.word_bytes == 16 else 1


def choose_form(row_bytes: int | None) -> Form:
    """The form for rows of this length; None where they differ."""
    if row_bytes is None:
        return Form.MIXED
    return Form.SMALL if row_bytes < _SMALL_ROW_BYTES else Form.PAGE


def make_shape(form: Form, row_bytes: int, word_bytes: int) -> Shape:
    """Constants for rows of `row_bytes` bytes (the longest, in MIXED), a multiple of the word."""
    row = row_bytes // word_bytes
    unit = 2 if word_bytes == 16 else 1
    most = min(_BLOCK_BYTES // word_bytes, _LANES[word_bytes] // unit)
    if form == Form.SMALL:
        width = _power_of_two(row)
        pages = max(min(_SMALL_TILE_BYTES // word_bytes, most) // width, 1)
        return Shape(form, word_bytes, row, width, pages, _warps(width * pages * unit))
    block = min(_power_of_two(row), most)
    return Shape(
        form,
        word_bytes,
        0 if form == Form.MIXED else row,
        block,
        num_warps=_warps(block * unit),
    )


def _warps(num_lanes: int) -> int:
    return min(max(num_lanes // _LANES_PER_WARP, 1), 4)


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
