"""The `kvtier` command."""

from kvtier.cli.app import main

__all__ = ["main"]
