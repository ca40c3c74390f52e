"""Replays that several tests look at, each made once."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .replays import BATCH, CLOSED, Replay, environment, replay


@pytest.fixture(scope="session")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Replay:
    """A closed loop of three policies and the bound over two seeds."""
    return replay(tmp_path_factory.mktemp("closed"), *CLOSED)


@pytest.fixture(scope="session")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Replay:
    """A small batch with and without admission."""
    return replay(tmp_path_factory.mktemp("batch"), *BATCH)


@pytest.fixture(scope="session")
def closed_again(tmp_path_factory: pytest.TempPathFactory) -> Replay:
    """The same closed loop in another process, folder and hash seed."""
    return replay(tmp_path_factory.mktemp("again"), *CLOSED, environ={"PYTHONHASHSEED": "7"})


@pytest.fixture
def start_replay(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts a replay in a process that the test may signal; results go to `tmp_path`/out."""

    def start(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "kvtier", "replay", *arguments, "--out", "out"],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start
