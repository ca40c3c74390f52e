"""Whether rows at constant distances share bytes; exact, and without a look at each row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rows:
    """`count` rows of `row` bytes each, `stride` bytes apart from `base` on; stride >= row."""

    base: int
    count: int
    row: int
    stride: int

    @property
    def end(self) -> int:
        """The address after the last row."""
        return self.base + (self.count - 1) * self.stride + self.row


def share_bytes(one: Rows, other: Rows) -> bool:
    """Whether a row of the one and a row of the other have a byte in common."""
    if one.end <= other.base or other.end <= one.base:
        return False
    # Row q of `other` meets one of `one` where a multiple of one.stride is in
    # [start - one.row + 1, start + other.row - 1], start counted from one.base. Only rows within
    # the span of `one` are looked at, where such a multiple is always one of its rows.
    distance = other.base - one.base
    first = max(0, -(-(1 - other.row - distance) // other.stride))
    span = (one.count - 1) * one.stride + one.row
    last = min(other.count - 1, (span - 1 - distance) // other.stride)
    if last < first:
        return False
    high = distance + first * other.stride + other.row - 1
    width = one.row + other.row - 1
    meeting = _sum_of_quotients(last - first + 1, one.stride, other.stride, high)
    return meeting > _sum_of_quotients(last - first + 1, one.stride, other.stride, high - width)


def first_pair(rows: list[Rows]) -> tuple[int, int] | None:
    """Indices, in order, of two of these that share bytes; None where all are apart."""
    ordered = sorted(range(len(rows)), key=lambda at: rows[at].base)
    near: list[int] = []  # those so far that do not end before the next begins
    for at in ordered:
        near = [other for other in near if rows[other].end > rows[at].base]
        for other in near:
            if share_bytes(rows[other], rows[at]):
                return min(at, other), max(at, other)
        near.append(at)
    return None


def _sum_of_quotients(count: int, divisor: int, step: int, start: int) -> int:
    """The sum of (start + q * step) // divisor over q in [0, count), in logarithmic time."""
    total = 0
    while True:
        total += count * (count - 1) // 2 * (step // divisor) + count * (start // divisor)
        step, start = step % divisor, start % divisor
        most = step * count + start
        if most < divisor:
            return total
        count, start, divisor, step = most // divisor, most % divisor, step, divisor
