"""`kvtier trace`: look into a trace, or make one."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.drawing import draw
from kvtier.cli.interrupts import raised_interrupt
from kvtier.cli.output import plain, print_json, print_table, print_text
from kvtier.cli.paths import path_parser

app = typer.Typer(help="Look into traces, or make one.")


@app.callback()
def trace() -> None:
    """Look into traces, or make one."""


@app.command()
def info(
    path: Annotated[
        Path,
        typer.Argument(
            help="Trace file, or folder of Claude Code transcripts.",
            parser=path_parser("PATH"),
            metavar="PATH",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what a trace holds: programs, steps, tokens, gaps, and what was repaired."""
    from kvtier.traces import load, summarize

    summary = summarize(load(path))
    if as_json:
        print_json(summary)
    else:
        print_table(path.name, ("what", "value"), _flat_rows(summary))


@app.command()
def synth(
    profile: Annotated[
        str,
        typer.Option(help="Workload: coding-autonomous, coding-interactive or batch-react."),
    ],
    programs: Annotated[int, typer.Option(min=1, max=1_000_000, help="Number of programs.")],
    out: Annotated[
        Path,
        typer.Option(
            help="File to write, in the native format.",
            parser=path_parser("--out"),
            metavar="PATH",
        ),
    ],
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**63 - 1, help="Seed; the setting replay.seed when absent."),
    ] = None,
) -> None:
    """Write a synthetic trace drawn from published statistics."""
    from kvtier.config import resolve
    from kvtier.traces import native_target, write_native

    settings = resolve({"replay.seed": seed}, None, os.environ).config.replay
    native_target(out)
    drawn = draw(profile, programs, settings.seed)
    with raised_interrupt():
        write_native(drawn, out)
    print_text(f"{plain(str(out))}: {drawn.num_programs} programs, {drawn.num_steps} steps\n")


def _flat_rows(summary: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """One row per entry; an entry that is itself a mapping is shown on one line."""
    for name, value in summary.items():
        if isinstance(value, Mapping):
            parts = [f"{key} {_cell(part)}" for key, part in value.items()]
            yield name, ", ".join(parts) or "none"
        else:
            yield name, _cell(value)


def _cell(value: object) -> str:
    """Thousands are separated; a number below 1,000 has four digits at most."""
    if value is None:
        return "unknown"
    if isinstance(value, int | float):
        return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"
    return str(value)
