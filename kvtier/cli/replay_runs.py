"""The runs of a replay, one after the other, with progress on stderr and a clean way to stop."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

from kvtier.cli.interrupts import Interrupt
from kvtier.cli.output import note
from kvtier.cli.replay_plan import ReplayPlan
from kvtier.sim import Mode, SimSettings, simulate


@dataclass(slots=True)
class Outcome:
    """Records of the runs that were made; `interrupted` when there would have been more."""

    records: list[dict[str, Any]] = field(default_factory=list)
    interrupted: bool = False


class Progress(Protocol):
    """What is told of the runs while they go."""

    def start(self, settings: SimSettings) -> None:
        """A run begins."""

    def advance(self, now_s: float, share: float) -> None:
        """It has come to `now_s` simulated seconds and `share` (0 to 1) of its length."""

    def finish(self, settings: SimSettings, simulated_s: float, wall_s: float) -> None:
        """It is over."""


def run_all(plan: ReplayPlan, interrupt: Interrupt) -> Outcome:
    """Make every run of the plan.

    An interrupt that is requested ends the run under way at its next tick, where its state is
    whole, and starts no other.
    """
    outcome = Outcome()
    with _progress(len(plan.runs)) as progress:
        for settings in plan.runs:
            if interrupt.requested:
                outcome.interrupted = True
                break
            record = _run(plan, settings, progress, interrupt)
            outcome.records.append(record)
            outcome.interrupted |= record["partial"]
    return outcome


def _run(
    plan: ReplayPlan, settings: SimSettings, progress: Progress, interrupt: Interrupt
) -> dict[str, Any]:
    def on_progress(now_s: float, num_ended: int) -> None:
        if settings.mode is Mode.BATCH:
            progress.advance(now_s, num_ended / settings.num_programs)
        else:
            progress.advance(now_s, now_s / settings.duration_s)
        if interrupt.requested:
            raise KeyboardInterrupt

    progress.start(settings)
    started_s = perf_counter()
    record = simulate(plan.traces[settings.seed], settings, on_progress)
    progress.finish(settings, record["simulated_s"], perf_counter() - started_s)
    return record


@contextmanager
def _progress(num_runs: int) -> Iterator[Progress]:
    if sys.stderr is None or not sys.stderr.isatty():
        yield _Lines(num_runs)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _Bar(bar, num_runs)


class _Lines:
    """One line a run, for a stderr that is no terminal."""

    def __init__(self, num_runs: int) -> None:
        self._num_runs = num_runs
        self._num_done = 0

    def start(self, settings: SimSettings) -> None:
        """A run says nothing before its end."""

    def advance(self, now_s: float, share: float) -> None:
        """A run says nothing before its end."""

    def finish(self, settings: SimSettings, simulated_s: float, wall_s: float) -> None:
        """Say what the run was, and how fast."""
        self._num_done += 1
        rate = simulated_s / wall_s
        note(
            f"run {self._num_done}/{self._num_runs}: {_name(settings)}, {simulated_s:,.0f} "
            f"simulated s in {wall_s:.1f} s ({rate:,.0f} simulated s per s)"
        )


class _Bar:
    """One bar over all runs, with rate and time left."""

    def __init__(self, bar: Any, num_runs: int) -> None:
        self._bar = bar
        self._num_runs = num_runs
        self._num_done = 0
        self._simulated_s = 0.0
        self._started_s = perf_counter()
        self._task = bar.add_task("starting", total=num_runs, rate="")

    def start(self, settings: SimSettings) -> None:
        """Name the run."""
        text = f"run {self._num_done + 1}/{self._num_runs}: {_name(settings)}"
        self._bar.update(self._task, description=text)

    def advance(self, now_s: float, share: float) -> None:
        """Move the bar by the share of this run."""
        rate = (self._simulated_s + now_s) / max(perf_counter() - self._started_s, 1e-9)
        self._bar.update(
            self._task,
            completed=self._num_done + min(share, 1.0),
            rate=f"{rate:,.0f} simulated s per s",
        )

    def finish(self, settings: SimSettings, simulated_s: float, wall_s: float) -> None:
        """Count the run."""
        del settings, wall_s
        self._num_done += 1
        self._simulated_s += simulated_s
        self._bar.update(self._task, completed=self._num_done)


def _name(settings: SimSettings) -> str:
    return f"{settings.policy}, admission {settings.admission}, seed {settings.seed}"
