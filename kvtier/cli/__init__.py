"""The `kvtier` command."""

from kvtier.cli.entry import main

__all__ = ["main"]
