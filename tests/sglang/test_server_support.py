"""What starts servers: nothing outlives a test, no port is given twice, failures say why."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from ..sglang_cpu import logs
from ..sglang_cpu.ports import ReservedPort
from ..sglang_cpu.processes import ProcessGroup
from ..sglang_cpu.server import ServerStartError, SglangServer
from ..sglang_cpu.tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 30.0
DEAF = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
SLEEPER = DEAF + "print('up', flush=True); time.sleep(600)"
# A deaf leader with two deaf children, one of them in a session of its own.
FAMILY = DEAF + (
    "import subprocess\n"
    f"children = [subprocess.Popen([sys.executable, '-c', {SLEEPER!r}],\n"
    "    stdout=subprocess.PIPE, start_new_session=own) for own in (False, True)]\n"
    "for child in children: child.stdout.readline()\n"
    "open('children', 'w').write(' '.join(str(child.pid) for child in children))\n"
    "open('ready', 'w').close()\n"
    "time.sleep(600)\n"
)
OBEDIENT = (
    "import signal, sys\n"
    "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
    "open('ready', 'w').close()\n"
    "signal.sigwait([signal.SIGTERM])\n"
    "sys.exit(7)\n"
)
# Starts a group, tells its id, and waits to be killed.
GUARDIAN = (
    "import os, sys\n"
    "from pathlib import Path\n"
    "from tests.sglang_cpu.processes import ProcessGroup\n"
    "folder = Path(sys.argv[1])\n"
    "group = ProcessGroup(sys.executable, ['-c', 'import time; time.sleep(600)'],\n"
    "    folder=folder, environment=dict(os.environ), log=folder / 'log')\n"
    "print(group.pid, flush=True)\n"
    "sys.stdin.read()\n"
)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], ProcessGroup]]:
    """Starts a group that runs the given program in tmp_path."""
    groups = []

    def start(program: str) -> ProcessGroup:
        log = tmp_path / "log"
        group = ProcessGroup(
            sys.executable, ["-c", program], folder=tmp_path, environment={}, log=log
        )
        groups.append(group)
        return group

    yield start
    for group in groups:
        group.stop(grace_s=0)


def is_alive(process: psutil.Process) -> bool:
    """A zombie whose new parent has not asked for it yet is dead."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def wait_for(group: ProcessGroup, file: Path) -> None:
    for _ in range(int(WAIT_S / 0.05)):
        if file.exists():
            return
        assert group.wait(0.05) is None
    pytest.fail(f"no {file} after {WAIT_S} s")


def test_a_group_that_ignores_sigterm_is_killed_with_its_children_in_other_sessions(
    start: Callable[[str], ProcessGroup], tmp_path: Path
) -> None:
    group = start(FAMILY)
    wait_for(group, tmp_path / "ready")
    children = {int(pid) for pid in (tmp_path / "children").read_text().split()}
    assert {process.pid for process in group.members()} == {group.pid, *children}
    members = group.members()
    group.stop(grace_s=0.2)
    assert not [process for process in members if is_alive(process)]
    assert group.members() == set()
    group.stop(grace_s=0.2)


def test_a_group_that_heeds_sigterm_is_not_killed(
    start: Callable[[str], ProcessGroup], tmp_path: Path
) -> None:
    group = start(OBEDIENT)
    wait_for(group, tmp_path / "ready")
    group.stop(grace_s=WAIT_S)
    assert group.wait(0) == 7


def test_a_group_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", GUARDIAN, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as guardian:
        assert guardian.stdout is not None
        orphan = psutil.Process(int(guardian.stdout.readline()))
        guardian.kill()
    deadline = time.monotonic() + WAIT_S
    while is_alive(orphan) and time.monotonic() < deadline:
        psutil.wait_procs([orphan], timeout=0.05)
    assert not is_alive(orphan)


def test_reserved_ports_differ_and_come_back() -> None:
    ports = [ReservedPort() for _ in range(200)]
    assert len({port.number for port in ports}) == 200
    for port in ports:
        port.close()


@pytest.mark.server
def test_a_server_that_ends_while_starting_raises_with_its_log_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    server = SglangServer(tmp_path / "no-model", tmp_path)
    with pytest.raises(ServerStartError, match=r"status [1-9](.|\n)*no-model"), server:
        pytest.fail("a server without a model is ready")
    assert str(server.log.path) in str(server.log.tail())
    assert logs.running == []
    assert server.processes() == set()


def test_the_same_seed_gives_the_same_model_and_another_seed_another(tmp_path: Path) -> None:
    first, again, other = (
        make_tiny_model(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    files = sorted(path.name for path in first.iterdir())
    assert all((first / name).read_bytes() == (again / name).read_bytes() for name in files)
    weights = "model.safetensors"
    assert (first / weights).read_bytes() != (other / weights).read_bytes()
