"""Replays that several tests look at, each made once."""

import pytest

from .replays import BATCH, CLOSED, Replay, replay


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
