"""What operators see of a transfer engine: names, labels, values."""

from __future__ import annotations

from typing import NamedTuple

from kvtier.ids import Direction
from kvtier.transfer.channel import Counters
from kvtier.transfer.core import TransferCore
from kvtier.transfer.window import Window


class Sample(NamedTuple):
    """One value of one metric; `_total` in its name where it only grows."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


def samples(core: TransferCore, path_name: str) -> list[Sample]:
    """All metrics of a core whose bytes go by that path. Labels: direction, path; see each."""
    return [
        sample
        for direction, counters in core.counters.items()
        for sample in _of(direction, path_name, counters, core.window(direction))
    ]


def _of(direction: Direction, path_name: str, counters: Counters, window: Window) -> list[Sample]:
    base = (("direction", str(direction)), ("path", path_name))
    per_outcome = {
        "jobs": ("done", "failed", "cancelled"),
        "bytes": ("moved", "lost", "dropped"),
    }
    outcomes = [
        Sample(
            f"kvtier_transfer_{unit}_total",
            (*base, ("outcome", outcome)),
            getattr(counters, outcome if unit == "jobs" else f"{outcome}_{unit}"),
        )
        for unit, names in per_outcome.items()
        for outcome in names
    ]
    plain = {
        "chunks_total": counters.chunks,
        "waiting_seconds_total": counters.waiting_s,
        "copying_seconds_total": counters.copying_s,
        "late_jobs_total": counters.late,
        "live_jobs": counters.live,
        "queued_bytes": counters.queued_bytes,
        "in_flight_bytes": counters.in_flight_bytes,
        "window_bytes": window.size_bytes,
    }
    return [
        *outcomes,
        *(Sample(f"kvtier_transfer_{name}", base, value) for name, value in plain.items()),
    ]
