"""Everything that must be true of a core at rest, recomputed from its live jobs."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.errors import TransferError
from kvtier.ids import Direction
from kvtier.transfer.channel import Channel
from kvtier.transfer.job import JobState
from kvtier.transfer.live import Live
from kvtier.transfer.usage import READ, WRITE, PageUse


def check_integrity(
    channels: Mapping[Direction, Channel],
    uses: Mapping[Direction, tuple[PageUse, PageUse]],
    lives: Mapping[int, Live],
) -> None:
    """Raise TransferError with the first thing that is wrong. O(pages of the pools)."""
    for live in lives.values():
        _check_job(live, channels[live.job.direction])
    for direction, channel in channels.items():
        _check_channel(channel, [x for x in lives.values() if x.job.direction is direction])
    _check_pages(uses, lives)


def _check_job(live: Live, channel: Channel) -> None:
    job = live.job
    _require(not job.state.ended, f"{job} has ended and is kept")
    started = job.state is JobState.IN_FLIGHT
    _require(not (started and live.blockers), f"{job} started before what it waits for ended")
    _require(started or not live.chunks_in_flight, f"{job} has a chunk in flight")
    _require((live.chunks_in_flight > 0) == (live.bytes_in_flight > 0), f"{job}: bytes in flight")
    may_start = live.piece is not None and not live.blockers
    _require((job.id in channel.queue) == may_start, f"{job}: in the queue? {not may_start}")
    _require((live.bytes_left > 0) == (live.piece is not None), f"{job}: {live.bytes_left} left")
    waits = may_start or bool(live.blockers) or live.chunks_in_flight > 0
    _require(waits, f"{job} waits for nothing and has not ended")
    tied = all(live is blocker.heirs.get(job.id) for blocker in live.blockers.values())
    _require(tied, f"{job} is not known to a job that it waits for")


def _check_channel(channel: Channel, lives: list[Live]) -> None:
    counters = channel.counters
    counters.check()
    in_flight = sum(live.bytes_in_flight for live in lives)
    _require(counters.live == len(lives), f"{counters.live} jobs counted, {len(lives)} live")
    _require(counters.in_flight_bytes == in_flight, f"{in_flight} bytes in flight: {counters}")
    left = sum(live.bytes_left for live in lives)
    _require(counters.queued_bytes == left, f"{left} bytes not started: {counters}")


def _check_pages(
    uses: Mapping[Direction, tuple[PageUse, PageUse]], lives: Mapping[int, Live]
) -> None:
    for use in uses[Direction.D2H]:
        jobs = [
            (live.source, READ) if uses[live.job.direction][0] is use else (live.target, WRITE)
            for live in lives.values()
        ]
        _require(use.recount(jobs), "pages in use are not those of live jobs")


def _require(true: bool, otherwise: str) -> None:
    if not true:
        raise TransferError(f"the transfer core is broken: {otherwise}")
