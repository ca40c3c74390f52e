"""What carries out chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvtier.transfer.chunks import Geometry
from kvtier.transfer.job import Chunk

Done = Callable[[Exception | None], None]
"""Called once per chunk: with None when its bytes are where they belong, else with what failed."""


class Backend(Protocol):
    """Copies chunks between the two pools of one device.

    `geometry` says what the pools are, `path_name` how bytes go (for metrics). A backend whose
    `polled` is True notices ends in `poll` only; another one calls `done` from threads of its own,
    or within `start`.
    """

    geometry: Geometry
    path_name: str
    polled: bool

    def start(self, chunk: Chunk, done: Done) -> None:
        """Begin the copy of a chunk; it need not have ended, or begun, when this returns.

        Chunks of one direction are copied in the order of their starts, each once what its
        `job.ready` stands for has happened. After an error a chunk's targets hold anything. When
        `done` is called, nothing reads or writes pages for this chunk any more. An Exception that
        this raises is the chunk's error: `done` is not called, nothing is copied. A chunk that an
        interrupt kept from being started for certain is started again: that does nothing where its
        copy has begun (`chunk.begun`, which is the backend's).
        """

    def poll(self) -> None:
        """Call `done` for chunks that have ended by now; a matter of microseconds."""

    def close(self) -> None:
        """End threads and the like; no chunk is in flight. Twice is fine."""
