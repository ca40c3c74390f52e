"""`kvtier replay` in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLOSED = (
    *("--profile", "coding-autonomous", "--policy", "lru,lru+offload-wb,mori+concur"),
    *("--gpu", "H200-80GB", "--programs", "30", "--duration", "2m", "--seeds", "2"),
)
BATCH = (
    *("--profile", "batch-react", "--policy", "lru", "--admission", "none,concur"),
    *("--programs", "48"),
)


@dataclass(frozen=True)
class Replay:
    """A finished `kvtier replay`: its process and the folder it wrote."""

    process: subprocess.CompletedProcess[str]
    folder: Path

    @property
    def results(self) -> dict[str, Any]:
        """results.json, read as strictly as JSON is defined."""
        text = (self.folder / "results.json").read_text(encoding="utf-8")
        document = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        assert isinstance(document, dict)
        return document


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child that imports this checkout and knows no other settings."""
    clean = {
        name: v
        for name, v in os.environ.items()
        if not name.startswith("KVTIER_") and name != "COLUMNS"
    }
    return {**clean, "PYTHONPATH": str(ROOT), **(extra or {})}


def replay(folder: Path, *arguments: str, environ: Mapping[str, str] | None = None) -> Replay:
    """Run `kvtier replay` in `folder`, with results in its folder `out`."""
    process = subprocess.run(
        [sys.executable, "-m", "kvtier", "replay", *arguments, "--out", "out"],
        cwd=folder,
        env=environment(environ),
        capture_output=True,
        text=True,
        check=False,
    )
    return Replay(process, folder / "out")
