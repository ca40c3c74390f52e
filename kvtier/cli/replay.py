"""`kvtier replay`: a trace through the scheduling core, under several policies, in a simulator."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvtier.cli import replay_options as opt
from kvtier.cli.interrupts import EXIT_INTERRUPTED, deferred_interrupt, raised_interrupt
from kvtier.cli.output import note

if TYPE_CHECKING:
    from kvtier.cli.replay_plan import ReplayPlan

_WHOLE = "all runs had ended, and the results are whole"
DEFAULT_POLICIES = "lru,lru+offload,lru+offload-wb,elapsed,mori,mori+concur"


def replay(
    ctx: typer.Context,
    path: opt.TracePath = None,
    profile: opt.Profile = None,
    policy: opt.Policies = DEFAULT_POLICIES,
    admission: opt.Admissions = "none",
    model: opt.Model = None,
    gpu: opt.Gpu = None,
    tp: opt.Tp = None,
    workers: opt.Workers = 1,
    programs: opt.Programs = None,
    mode: opt.ModeName = None,
    duration: opt.Duration = None,
    dram_ratio: opt.DramRatio = None,
    gaps: opt.GapsName = None,
    gap_cap: opt.GapCap = None,
    seed: opt.SeedList = None,
    seeds: opt.NumSeeds = None,
    copy_path: opt.CopyPathName = "staged",
    bound: opt.Bound = True,
    config: opt.ConfigFile = None,
    out: opt.OutFolder = Path("kvtier-replay"),
    as_json: opt.AsJson = False,
) -> None:
    """Replay a trace under several policies in a simulator: table, results.json and two plots."""
    given = dict(locals())
    from kvtier.cli.replay_plan import ReplayFlags, make_plan
    from kvtier.report import check_folder

    flags = {name: given[name] for name in ReplayFlags.__dataclass_fields__}
    with raised_interrupt():
        check_folder(out)
    _make(make_plan(ReplayFlags(**flags)), _command(ctx), out, as_json=as_json)


def _make(plan: "ReplayPlan", command: list[str], out: Path, *, as_json: bool) -> None:
    """Runs, then files, then what is printed, so that no failing stream costs a result."""
    from kvtier.cli.replay_output import print_outcome, write_outcome
    from kvtier.cli.replay_runs import run_all

    with deferred_interrupt() as interrupt:
        outcome = run_all(plan, interrupt)
        written = write_outcome(plan, outcome, command, out)
    if interrupt.requested:
        note("interrupted; " + ("the results are partial" if outcome.interrupted else _WHOLE))
    note(f"written to {out}: {', '.join(path.name for path in written)}")
    print_outcome(plan, outcome, written[0], as_json=as_json)
    if interrupt.requested:
        raise typer.Exit(EXIT_INTERRUPTED)


def _command(ctx: typer.Context) -> list[str]:
    """The options that were given, in declared order; where the results go is not part of them.

    An absolute path is cut to its last part, so that equal inputs give equal bytes anywhere.
    """
    words = ["kvtier", "replay"]
    for parameter in ctx.command.params:
        name = parameter.name or ""
        source = ctx.get_parameter_source(name)
        if name in ("out", "as_json") or source is None or source.name != "COMMANDLINE":
            continue
        value = ctx.params[name]
        if parameter.param_type_name == "option":
            words.append(parameter.opts[0] if value is not False else parameter.secondary_opts[0])
        if not isinstance(value, bool):
            text = str(value)
            words.append(Path(text).name if Path(text).is_absolute() else text)
    return words
