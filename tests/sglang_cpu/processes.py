"""A process with all that it starts: ended by process id, nothing of it left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

# PR_SET_PDEATHSIG outlives exec: the server ends also where the tests are killed.
_TIED_TO_PARENT = (
    "import ctypes, os, sys\n"
    f"ctypes.CDLL(None).prctl(1, {int(signal.SIGTERM)}, 0, 0, 0)\n"
    "if os.getppid() != int(sys.argv[1]): sys.exit(1)\n"
    "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])\n"
)
_KILL_S = 10.0
_POLL_S = 0.1


class ProcessGroup:
    """A Python program in a process group of its own, its output in a file.

    Ends when the thread that made it ends. `arguments` are those of the interpreter.
    """

    def __init__(
        self,
        python: str,
        arguments: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        with log.open("wb") as output:
            self._leader = subprocess.Popen(
                [python, "-c", _TIED_TO_PARENT, str(os.getpid()), *arguments],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the leader, and of the group."""
        return self._leader.pid

    def wait(self, timeout_s: float) -> int | None:
        """The leader's exit status, None where it still runs after `timeout_s`."""
        with suppress(subprocess.TimeoutExpired):
            return self._leader.wait(timeout_s)
        return None

    def members(self) -> set[psutil.Process]:
        """All living processes of the group, and what the leader started outside of it."""
        found = {process for process in psutil.process_iter() if _group(process.pid) == self.pid}
        if self._leader.poll() is None:
            with suppress(psutil.NoSuchProcess):
                leader = psutil.Process(self.pid)
                found |= {leader, *leader.children(recursive=True)}
        return set(_living(found))

    def stop(self, grace_s: float) -> None:
        """SIGTERM to the leader, `grace_s` later SIGKILL to all that is left of the group.

        Returns when all have gone and raises RuntimeError if some have not. Again is harmless.
        """
        members = self.members()
        shared = _shared_memory(members)
        if grace_s > 0:
            self._leader.terminate()
            self.wait(grace_s)
        members |= self.members()
        for process in members:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.wait(_KILL_S)
        deadline = time.monotonic() + _KILL_S
        while left := _living(members):
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes outlive SIGKILL: {left}")
            psutil.wait_procs(left, timeout=_POLL_S)
        for path in shared:
            path.unlink(missing_ok=True)


def _group(pid: int) -> int | None:
    with suppress(ProcessLookupError, PermissionError):
        return os.getpgid(pid)
    return None


def _living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that are neither gone nor zombies, which wait only for their parent to ask."""
    living = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def _shared_memory(processes: Iterable[psutil.Process]) -> set[Path]:
    """Files in /dev/shm that the processes map; SGLang leaves some of its own there."""
    found = set()
    for process in processes:
        with suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")
            lines = (line.split(maxsplit=5) for line in maps.splitlines())
            found |= {Path(line[5]) for line in lines if line[5:] and "/dev/shm/" in line[5]}
    return {path for path in found if path.exists()}
