"""The options of `kvtier replay`, as typer reads them."""

from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.paths import path_parser

MOST_SEEDS = 1_000

TracePath = Annotated[
    Path | None,
    typer.Argument(
        help="Trace file, or folder of Claude Code transcripts.",
        show_default=False,
        parser=path_parser("PATH"),
        metavar="[PATH]",
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(help="Built-in workload in place of PATH; kvtier trace synth --help names them."),
]
Policies = Annotated[
    str, typer.Option("--policy", help="Policies, separated by commas; mori+concur is short.")
]
Admissions = Annotated[
    str,
    typer.Option(
        "--admission",
        help="Admissions, separated by commas: none, fixed:N, request-cap:N, concur, concur+.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(help="Preset, or a config.json. (default: Qwen2.5-7B; batch-react: Qwen3-32B)"),
]
Gpu = Annotated[str | None, typer.Option(help="Preset. (default: H200; batch-react: H100)")]
Tp = Annotated[
    int | None, typer.Option(min=1, help="GPUs that share a model. (default: 1; batch-react: 2)")
]
Workers = Annotated[
    int, typer.Option(min=1, max=1_024, help="Engines, each with its own HBM and DRAM.")
]
Programs = Annotated[
    int | None,
    typer.Option(min=1, max=100_000, help="Programs at once. (default: 60; batch-react: 256)"),
]
ModeName = Annotated[
    str | None,
    typer.Option("--mode", help="closed, batch or open. (default: closed; batch-react: batch)"),
]
Duration = Annotated[
    str | None,
    typer.Option(help="Simulated time: 90s, 20m, 1h, up to 720h. (default: replay.duration_s)"),
]
DramRatio = Annotated[
    float | None, typer.Option(help="DRAM as a multiple of HBM. (default: replay.dram_ratio)")
]
GapsName = Annotated[
    str | None, typer.Option("--gaps", help="capped, tool or raw. (default: replay.gaps)")
]
GapCap = Annotated[
    str | None, typer.Option(help="Longest gap when capped: 60s. (default: replay.gap_cap_s)")
]
SeedList = Annotated[
    str | None, typer.Option("--seed", help="Seeds, separated by commas. (default: replay.seed)")
]
NumSeeds = Annotated[
    int | None,
    typer.Option("--seeds", min=1, max=MOST_SEEDS, help="How many seeds, from replay.seed on."),
]
CopyPathName = Annotated[
    str, typer.Option("--copy-path", help="How pages cross the link: staged, batch-dma, per-page.")
]
Bound = Annotated[
    bool, typer.Option("--bound/--no-bound", help="Run infinite HBM beside the policies.")
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="TOML file of settings; KVTIER_CONFIG when absent.",
        parser=path_parser("--config"),
        metavar="PATH",
    ),
]
OutFolder = Annotated[
    Path,
    typer.Option(
        "--out",
        help="Folder for results.json and plots.",
        parser=path_parser("--out"),
        metavar="PATH",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print results.json instead of the table.")]
