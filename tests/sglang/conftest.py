"""Fixtures of tests with SGLang, in process and as a server; logs of servers in failure reports."""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from ..sglang_cpu import logs, shim
from ..sglang_cpu.collecting import SglangModule, is_installed, skip_where_missing

if is_installed():
    shim.install()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return SglangModule.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections += [("SGLang server", log.tail()) for log in logs.running]
    return report


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """The interpreter to start servers with; the test is skipped where it has no SGLang."""
    skip_where_missing()
    return sys.executable


@pytest.fixture(scope="session")
def tiny_model(sglang_python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model with random weights, see `tiny_model.py`."""
    from ..sglang_cpu.tiny_model import make_tiny_model  # its imports come with SGLang

    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def server_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for logs of servers."""
    return tmp_path_factory.mktemp("sglang-logs")
