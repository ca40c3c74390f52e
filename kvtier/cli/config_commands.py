"""`kvtier config`: what is in effect, and why."""

import os
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.output import print_json, print_table, print_text
from kvtier.cli.paths import path_parser

app = typer.Typer(help="Show the configuration.")


@app.callback()
def config() -> None:
    """Show the configuration."""


@app.command()
def show(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="TOML file; KVTIER_CONFIG when absent.",
            parser=path_parser("--config"),
            metavar="PATH",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print every effective value with its origin, its default and the default's source."""
    from kvtier.config import list_settings, resolve

    resolved = resolve({}, config, os.environ)
    rows = [
        {
            "key": setting.key,
            "value": resolved.value(setting.key),
            "origin": resolved.origins[setting.key],
            "default": setting.default,
            "source": setting.source,
        }
        for setting in list_settings()
    ]
    if as_json:
        print_json(rows)
    else:
        columns = ("key", "value", "origin", "default", "source of the default")
        print_table("configuration", columns, [list(row.values()) for row in rows])


@app.command()
def reference() -> None:
    """Print the reference of all settings as Markdown (docs/config.md)."""
    from kvtier.config import reference_markdown

    print_text(reference_markdown())
