"""The transfer window: how many bytes of one direction may be in flight at once.

CONCUR's law (section 4.3: grow by a step, cut by a factor, one cut per congestion event) on what a
link shows: goodput and queueing delay. Bytes that wait in a copy queue cannot be overtaken any
more, so an urgent page waits for all of them; bytes that are not needed to keep the link busy only
cost delay.

Units are bytes and seconds. Neither clock nor lock: the caller hands in the time, and calls from
one thread at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from kvtier.errors import ConfigError

_COUNTS = ("chunk_bytes", "max_chunks", "epoch_chunks", "probe_windows", "growth_epochs")
# A size that paid is cut for a look after so many windows, then twice as many, and so on.
_FIRST_TRUST_WINDOWS = 32


class Window(Protocol):
    """Bound on the bytes in flight of one direction.

    A caller starts a chunk while `room` is no less than the chunk, says `sent` for every chunk that
    starts (also for one that passes the window because a copy up waits for it), and `ended` for
    every chunk that ends, failed ones included.
    """

    size_bytes: int
    """The bound at the moment."""

    def room(self, in_flight_bytes: int) -> int:
        """Bytes that may start beside those in flight. Asked only while a chunk waits."""

    def sent(self, num_bytes: int, now_s: float) -> None:
        """A chunk starts."""

    def ended(self, num_bytes: int, sent_s: float, now_s: float) -> None:
        """A chunk that started at `sent_s` has ended."""


@dataclass(frozen=True, slots=True)
class WindowSettings:
    """Parameters of the law. CONCUR gives the form and `beta`; the rest are ours."""

    chunk_bytes: int
    """Largest chunk: the step of growth and the least window. An urgent page waits for about
    one chunk, so it is the unit of latency."""
    max_chunks: int = 64
    beta: float = 0.5
    """Factor of a cut (CONCUR)."""
    gain: float = 0.05
    """Share of goodput that one more chunk in flight must bring to be worth its delay."""
    slack: float = 1 / 16
    """Share of a chunk by which in-flight bytes may exceed the window: an urgent page under way
    does not keep the next chunk from lining up behind it."""
    delay_target: float = 0.5
    """Queueing delay that counts as none, in copy times of the same chunks."""
    epoch_chunks: int = 8
    """Chunks' worth of bytes, rounded up to whole windows, that end between two judgements."""
    probe_windows: int = 1024
    """Windows' worth of bytes after which a size that did not pay is tried again; at most so long
    is one that did trusted. A try that does not pay lasts an epoch and a window: less than 1 % of
    the time, out of sight of a p99."""
    growth_epochs: int = 4
    """Epochs at a size before the next larger one is tried: what it is compared with is a mean."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ConfigError(f"transfer window: {name}={getattr(self, name)}; use >= 1")
        if not 0 < self.beta < 1:
            raise ConfigError(f"transfer window: beta={self.beta} is no cut; use 0 < beta < 1")
        if not 0 <= self.slack <= 1:
            raise ConfigError(f"transfer window: slack={self.slack}; use 0 <= slack <= 1")
        for name in ("gain", "delay_target"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"transfer window: {name}={getattr(self, name)}; use > 0")


class _Change(Enum):
    """How the window came to its size."""

    NONE = auto()
    GROWTH = auto()
    CUT = auto()


@dataclass(slots=True)
class _Epoch:
    """What one judgement rests on."""

    num_bytes: int = 0
    num_ends: int = 0
    num_limited: int = 0
    """Ends before which the window had been full."""
    busy_s: float = 0.0
    """Time with bytes in flight."""
    queued_byte_s: float = 0.0
    """Queueing delay by byte: that of a page behind a whole chunk is no sign of a full link."""
    copied_byte_s: float = 0.0


class _Mean:
    """Goodput at one size, bytes/s: the mean of its epochs, the older ones fading."""

    _MOST = 16

    def __init__(self) -> None:
        self.num_epochs = 0
        self.value = 0.0

    def add(self, goodput: float) -> None:
        self.num_epochs += 1
        self.value += (goodput - self.value) / min(self.num_epochs, self._MOST)


class TransferWindow:
    """AIMD window of one direction. See `Window` for how it is called.

    A chunk's queueing delay is the time from its start to the end of the chunk that ended before it
    (0 where that is earlier): what it took beyond what the same bytes take on the idle link, as
    chunks of one direction run in order. After each epoch in which the window was full most of the
    time:

    - delay above its target, and no sign that a smaller window brings less (the growth to this size
      gained goodput, or the cut to it lost some): `W *= beta`. Nothing is judged until the bytes in
      flight at the cut have ended: one congestion, one cut.
    - otherwise, after some epochs, `W += chunk`, except to a size that did not pay, which is left
      alone until `probe_windows` have passed.

    What a growth gained is believed for a time that doubles with each cut that confirms it.

    W is a whole number of chunks, 1 to `max_chunks`. An epoch in which the window was not full says
    nothing of it and changes nothing.
    """

    def __init__(self, settings: WindowSettings) -> None:
        self.settings = settings
        self.size_bytes = settings.chunk_bytes
        self._slack_bytes = int(settings.slack * settings.chunk_bytes)
        self.num_cuts = 0
        self.in_flight_bytes = 0
        self._limited = False
        self._sent_bytes = 0
        self._ended_bytes = 0
        self._last_s = -math.inf
        """Last time at which a chunk started or ended."""
        self._last_end_s = -math.inf
        self._epoch = _Epoch()
        self._settled_bytes = 0
        """No judgement before so many bytes have ended: what the last change has not touched."""
        self._change = _Change.NONE
        self._reference: float | None = None
        """Mean goodput before the last change, bytes/s; None where it is not known."""
        self._trusted_until_bytes = 0
        self._trust_windows = _FIRST_TRUST_WINDOWS
        self._size_before_bytes = self.size_bytes
        self._goodput = _Mean()
        self._ceiling_bytes: float = math.inf
        self._ceiling_until_bytes = 0

    def room(self, in_flight_bytes: int) -> int:
        """Bytes that may start beside those in flight; a whole chunk where there are none."""
        room = max(self.size_bytes + self._slack_bytes - in_flight_bytes, 0)
        if room < self.settings.chunk_bytes:
            self._limited = True
        return room

    def sent(self, num_bytes: int, now_s: float) -> None:
        """A chunk of `num_bytes` starts."""
        self._pass_time(now_s)
        self.in_flight_bytes += num_bytes
        self._sent_bytes += num_bytes

    def ended(self, num_bytes: int, sent_s: float, now_s: float) -> None:
        """A chunk that started at `sent_s` has ended; may change `size_bytes`."""
        assert num_bytes <= self.in_flight_bytes, (
            f"{num_bytes} bytes ended, {self.in_flight_bytes} were in flight"
        )
        self._pass_time(now_s)
        epoch, begun_s = self._epoch, max(sent_s, self._last_end_s)
        epoch.queued_byte_s += num_bytes * (begun_s - sent_s)
        epoch.copied_byte_s += num_bytes * (now_s - begun_s)
        epoch.num_bytes += num_bytes
        epoch.num_ends += 1
        epoch.num_limited += self._limited
        self._limited = False
        self._last_end_s = now_s
        self.in_flight_bytes -= num_bytes
        self._ended_bytes += num_bytes
        if self._ended_bytes < self._settled_bytes:
            return
        if self._ended_bytes - num_bytes < self._settled_bytes:
            self._epoch = _Epoch()
        elif epoch.num_bytes >= self._epoch_bytes():
            self._judge(epoch)
            self._epoch = _Epoch()

    def _pass_time(self, now_s: float) -> None:
        if self.in_flight_bytes:
            self._epoch.busy_s += now_s - self._last_s
        self._last_s = now_s

    def _epoch_bytes(self) -> int:
        """Whole windows, since ends come in bursts that repeat with each window."""
        chunk_bytes = self.settings.chunk_bytes
        window_chunks = self.size_bytes // chunk_bytes
        return -(-self.settings.epoch_chunks // window_chunks) * window_chunks * chunk_bytes

    def _judge(self, epoch: _Epoch) -> None:
        if 2 * epoch.num_limited <= epoch.num_ends or epoch.busy_s <= 0.0:
            self._reference, self._change, self._goodput = None, _Change.NONE, _Mean()
            return
        law = self.settings
        self._goodput.add(epoch.num_bytes / epoch.busy_s)
        late = epoch.queued_byte_s > law.delay_target * epoch.copied_byte_s
        if late and not self._pays():
            self._cut()
        elif self._goodput.num_epochs >= law.growth_epochs:
            if self._change is _Change.CUT:
                self._weigh_cut()
            self._grow()

    def _pays(self) -> bool:
        """Whether a smaller window is known to bring less; after a cut, whether this one does."""
        gain, goodput, before = self.settings.gain, self._goodput.value, self._reference
        if before is None:
            return False
        if self._change is _Change.CUT:
            return goodput < (1.0 - gain) * before
        return goodput > (1.0 + gain) * before and self._ended_bytes < self._trusted_until_bytes

    def _cut(self) -> None:
        law = self.settings
        if self._change is _Change.GROWTH and self._ended_bytes < self._trusted_until_bytes:
            self._leave_alone(self.size_bytes)
        chunks = int(law.beta * (self.size_bytes // law.chunk_bytes))
        smaller = max(chunks, 1) * law.chunk_bytes
        self.num_cuts += smaller < self.size_bytes
        self._resize(smaller, _Change.CUT, self._sent_bytes)

    def _weigh_cut(self) -> None:
        """A cut lost goodput, so that the larger size can be trusted for longer; or it did not."""
        if self._pays():
            self._trust_windows = min(2 * self._trust_windows, self.settings.probe_windows)
        else:
            self._trust_windows = _FIRST_TRUST_WINDOWS
            self._leave_alone(self._size_before_bytes)
        self._reference, self._change = None, _Change.NONE

    def _leave_alone(self, size_bytes: int) -> None:
        self._ceiling_bytes = size_bytes
        self._ceiling_until_bytes = self._ended_bytes + self.settings.probe_windows * size_bytes

    def _grow(self) -> None:
        law = self.settings
        if self._ended_bytes >= self._ceiling_until_bytes:
            self._ceiling_bytes = math.inf
        larger = min(self.size_bytes + law.chunk_bytes, law.max_chunks * law.chunk_bytes)
        if self.size_bytes < larger < self._ceiling_bytes:
            self._resize(larger, _Change.GROWTH, self._ended_bytes + larger)

    def _resize(self, size_bytes: int, change: _Change, settled_bytes: int) -> None:
        self._size_before_bytes, self.size_bytes = self.size_bytes, size_bytes
        self._change = change
        self._settled_bytes = settled_bytes
        self._reference, self._goodput = self._goodput.value, _Mean()
        self._trusted_until_bytes = self._ended_bytes + self._trust_windows * size_bytes
