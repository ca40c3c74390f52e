"""Memory that a second process copies: what the transfer benchmark has in place of a GPU's link.

Both processes map one memory file of two halves; the parent writes requests into a pipe, the child
copies them one after the other from the first half to the second and answers each with a byte. The
queue in the pipe is the copy queue: nothing overtakes in it.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
from mmap import mmap
from types import TracebackType

import numpy as np
import numpy.typing as npt

from kvtier.errors import SimulationError

_REQUEST = struct.Struct("=qqq")
_PIPE_BYTES = 1 << 20
_ODD = 0x9E3779B97F4A7C15  # odd, so that its multiples differ


class MemoryCopier:
    """The child and its memory, `half_bytes` a side; a context manager that ends the child."""

    def __init__(self, half_bytes: int) -> None:
        self._half_bytes = half_bytes
        memory = os.memfd_create("copies")
        os.ftruncate(memory, 2 * half_bytes)
        self._bytes = np.frombuffer(mmap(memory, 2 * half_bytes), np.uint8)
        self._fill()
        child_in, self._requests = os.pipe()
        self._answers, child_out = os.pipe()
        fcntl.fcntl(self._requests, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        passed = (memory, child_in, child_out)
        self._child = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, *map(str, (*passed, half_bytes))],
            pass_fds=passed,
        )
        for descriptor in passed:
            os.close(descriptor)

    def _fill(self) -> None:
        """Touch all of it first; no two words of the source are equal."""
        words = self._bytes.view(np.uint64)
        half = words.size // 2
        np.multiply(np.arange(half, dtype=np.uint64), np.uint64(_ODD), out=words[:half])
        words[half:] = 0

    def submit(self, source: int, target: int, num_bytes: int) -> None:
        """Queue a copy between byte offsets of the two halves."""
        os.write(self._requests, _REQUEST.pack(source, self._half_bytes + target, num_bytes))

    def ended(self, timeout_s: float) -> int:
        """How many more copies have ended, in their order; waits for the first.

        Raises SimulationError when the child is gone.
        """
        ready, _, _ = select.select([self._answers], [], [], max(timeout_s, 0.0))
        if not ready:
            return 0
        answers = os.read(self._answers, 4096)
        if not answers:
            raise SimulationError("the process that copies memory has ended; see its error above")
        return len(answers)

    def same(self, source: int, target: int, num_bytes: int) -> bool:
        """Whether the target holds the bytes of the source."""
        half = self._half_bytes
        mine: npt.NDArray[np.uint8] = self._bytes[source : source + num_bytes]
        return bool(np.array_equal(mine, self._bytes[half + target : half + target + num_bytes]))

    def close(self) -> None:
        """End the child; copies that are queued are made first."""
        os.close(self._requests)
        self._child.wait()
        os.close(self._answers)

    def __enter__(self) -> MemoryCopier:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def serve(memory: int, requests: int, answers: int, half_bytes: int) -> None:
    """The child: copy until the parent closes its end."""
    shared = np.frombuffer(mmap(memory, 2 * half_bytes), np.uint8)
    os.set_blocking(requests, False)
    while (request := _next(requests)) != b"":
        source, target, num_bytes = _REQUEST.unpack(request)
        np.copyto(shared[target : target + num_bytes], shared[source : source + num_bytes])
        os.write(answers, b".")


def _next(requests: int) -> bytes:
    """Poll as a copy engine does: waking up would take longer than a small copy."""
    while True:
        try:
            return os.read(requests, _REQUEST.size)
        except BlockingIOError:
            pass


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
