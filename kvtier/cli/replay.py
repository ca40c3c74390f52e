"""`kvtier replay`: a trace through the scheduling core, under several policies, in a simulator."""

from pathlib import Path

import typer

from kvtier.cli import replay_options as opt

DEFAULT_POLICIES = "lru,lru+offload,lru+offload-wb,elapsed,mori,mori+concur"
_EXIT_INTERRUPTED = 130


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
    from kvtier.cli.replay_output import write_outputs
    from kvtier.cli.replay_plan import ReplayFlags, make_plan
    from kvtier.cli.replay_runs import run_all
    from kvtier.report import prepare_folder

    flags = {name: given[name] for name in ReplayFlags.__dataclass_fields__}
    plan = make_plan(ReplayFlags(**flags))
    prepare_folder(out)
    outcome = run_all(plan)
    write_outputs(plan, outcome, _command(ctx), out, as_json=as_json)
    if outcome.interrupted:
        raise typer.Exit(_EXIT_INTERRUPTED)


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
