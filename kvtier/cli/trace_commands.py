"""`kvtier trace`: look into a trace, or make one."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.output import print_json, print_table

app = typer.Typer(help="Look into traces, or make one.")


@app.callback()
def trace() -> None:
    """Look into traces, or make one."""


@app.command()
def info(
    path: Annotated[Path, typer.Argument(help="Trace file, or folder of Claude Code transcripts.")],
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
    programs: Annotated[int, typer.Option(help="Number of programs.")],
    out: Annotated[Path, typer.Option(help="File to write, in the native format.")],
    seed: Annotated[
        int | None, typer.Option(help="Seed; the setting replay.seed when absent.")
    ] = None,
) -> None:
    """Write a synthetic trace drawn from published statistics."""
    from kvtier.config import resolve
    from kvtier.traces import synth as draw
    from kvtier.traces import write_native

    settings = resolve({"replay.seed": seed}, None, os.environ).config.replay
    drawn = draw(profile, programs, settings.seed)
    write_native(drawn, out)
    typer.echo(f"{out}: {drawn.num_programs} programs, {drawn.num_steps} steps")


def _flat_rows(summary: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """One row per entry; an entry that is itself a mapping is shown on one line."""
    for name, value in summary.items():
        if isinstance(value, Mapping):
            parts = [f"{key} {_cell(part)}" for key, part in value.items()]
            yield name, ", ".join(parts) or "none"
        else:
            yield name, _cell(value)


def _cell(value: object) -> str:
    if value is None:
        return "unknown"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
