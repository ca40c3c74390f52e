"""One simulated worker's KV: the real tier manager over a modelled link, counted in tokens."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.ids import Label
from kvtier.sim.growth import Growth
from kvtier.sim.link import Link
from kvtier.sim.prompts import Prompts
from kvtier.sim.request import EngineRequest
from kvtier.tiering.integrity import check_integrity
from kvtier.tiering.lease import Lease, LeaseState
from kvtier.tiering.manager import TierManager
from kvtier.tiering.moves import Move
from kvtier.tiering.room import TierMode
from kvtier.tree.node import Tier

RESERVE_TOKENS = 8192
"""Free, or free of the need to be copied down first: a chunk of prefill."""


class LinkMover:
    """Moves take as long as the link says, and never fail."""

    def __init__(self, link: Link, page_bytes: int) -> None:
        self.link = link
        self._page_bytes = page_bytes
        self.on_end: Callable[[Move], None] = lambda move: None

    def start(self, move: Move) -> None:
        """Queue the move's bytes."""
        self.link.submit(
            move.direction, move.num_pages * self._page_bytes, lambda now_s: self.on_end(move)
        )

    def hasten(self, move: Move) -> None:
        """Nothing: the modelled link has one order, first come first served."""


class WorkerCache:
    """Pages for the requests of one engine. A page's content is one token of the tree's.

    `capacity` and `dram_capacity` are tokens, in whole pages.
    """

    def __init__(
        self,
        hbm_tokens: int,
        dram_tokens: int,
        mode: TierMode,
        page_size: int,
        mover: LinkMover,
        prompts: Prompts,
    ) -> None:
        hbm_pages = hbm_tokens // page_size
        dram_pages = dram_tokens // page_size if mode.offload else 0
        # Peers copy nothing down ahead of need; without labels this is one of them.
        reserve = min(RESERVE_TOKENS // page_size, hbm_pages // 32) if mode.labels else 0
        self.page_size = page_size
        self.capacity = hbm_pages * page_size
        self.dram_capacity = dram_pages * page_size
        self.mode = mode
        self.prompts = prompts
        self.link = mover.link
        self.manager = TierManager(
            hbm_pages, dram_pages, mover, page_size=1, mode=mode, reserve_pages=reserve
        )
        mover.on_end = lambda move: self.manager.ended(move, well=True)
        self._growth = Growth(page_size)
        buffer = self.manager.open([], num_pages=0)
        assert buffer is not None
        self._buffer = buffer  # pages for output, `_committed` of them used or about to be
        self._committed = 0

    # --- sums, in tokens ---

    @property
    def locked(self) -> int:
        """Tokens of HBM that running requests hold, or have been promised."""
        pages = self.manager.pools[Tier.HBM].num_pages - self.manager.room.available
        return (pages - self._spare) * self.page_size

    @property
    def free(self) -> int:
        """Tokens of HBM in which nothing is."""
        return self.manager.pools[Tier.HBM].num_free * self.page_size

    def kept(self, program: str) -> tuple[int, int]:
        """Tokens of the program's prompt that HBM can give, and that either tier can."""
        kept = self.manager.kept(program)
        return kept.hbm_pages * self.page_size, kept.pages * self.page_size

    # --- requests ---

    def open(
        self, request: EngineRequest, spare_tokens: int, on_ready: Callable[[], None]
    ) -> bool | None:
        """Give a request the pages of its prompt: True now, False once `on_ready` runs, None never.

        None changes nothing. `request.lease` says what of the prompt was found.
        """

        def ready(lease: Lease) -> None:
            assert lease.state is LeaseState.READY, "a modelled copy failed"
            on_ready()

        request.lease = self.manager.open(
            request.prompt,
            num_pages=self._num_pages(request.context_tokens),
            request=request.request,
            program=request.program,
            spare_pages=self._num_pages(spare_tokens),
            on_ready=ready,
        )
        if request.lease is None:
            return None
        return request.lease.state is LeaseState.READY

    def publish(self, request: EngineRequest) -> None:
        """All of the request's tokens are computed; whole pages of them serve others, too."""
        assert request.lease is not None
        tokens = self.prompts.with_output(request.program, request.context_tokens)
        self.manager.publish(request.lease, tokens)

    def publish_part(self, request: EngineRequest, context_tokens: int) -> None:
        """Of the prompt only so many tokens are computed."""
        assert request.lease is not None
        num_pages = max(context_tokens // self.page_size, request.lease.cached)
        self.manager.publish(request.lease, request.prompt[:num_pages])

    def close(self, request: EngineRequest) -> None:
        """The request has left the engine; what was published stays."""
        assert request.lease is not None
        self.manager.close(request.lease, well=True)
        request.lease = None

    # --- output ---

    def start_decoding(self, request: EngineRequest, step: int) -> None:
        """The request produces a token a step from `step` on."""
        self._growth.add(request.context_tokens, step)

    def stop_decoding(self, request: EngineRequest, step: int) -> None:
        """The request, with its `context_tokens` by `step`, has all the pages that it needs."""
        assert request.lease is not None
        self._growth.remove(request.context_tokens, step)
        num_pages = self._num_pages(request.context_tokens) - request.lease.num_pages
        self._buffer.give_to(request.lease, num_pages)
        self._committed -= num_pages
        if not self._growth.num_requests and self._buffer.want is None:
            self.manager.shrink(self._buffer, self._spare)

    def next_step(self, step: int, on_room: Callable[[], None]) -> bool | None:
        """Room for a token of each decoding request: True now, False later, None never.

        A page each is asked for where less is missing: the next steps will need the rest.
        """
        missing = self._growth.pages(step, 1) - self._spare
        if missing <= 0:
            return True
        if self._buffer.want is not None:
            return False
        soon = self._growth.pages(step, self.page_size) - self._spare
        count = max(missing, min(soon, self.manager.room.available))
        return self.manager.extend(self._buffer, count, on_room)

    def steps_with_room(self, step: int, most: int) -> int:
        """How many steps, up to `most`, have room now; what needs no copy down makes way."""
        missing = self._growth.pages(step, most) - self._spare
        free = 0
        if missing > 0 and self._buffer.want is None:
            free = self.manager.room.clear(min(missing, RESERVE_TOKENS // self.page_size + 1))
        return self._growth.steps_within(step, self._spare + free, most)

    def begin_steps(self, step: int, num_steps: int) -> None:
        """The pages of the next steps, which have room, are as good as used."""
        num_pages = self._growth.pages(step, num_steps)
        if num_pages > self._spare:
            now = self.manager.extend(self._buffer, num_pages - self._spare, lambda: None)
            assert now, "there was room a moment ago"
        self._committed += num_pages

    def cut_steps(self, step: int, planned: int, num_steps: int) -> None:
        """Of the steps begun at `step` only `num_steps` will be taken."""
        self._committed -= self._growth.pages(step, planned) - self._growth.pages(step, num_steps)

    # --- programs ---

    def demote(self, program: str, done: Callable[[int], None]) -> bool:
        """Copy the program's KV down; `done(tokens)` once it is there. False: refused."""
        move = self.manager.demote(program)
        if isinstance(move, Move):
            tokens = move.num_pages * self.page_size
            move.on_end.append(lambda well: done(tokens))
            return True
        return move

    def relabel(self, program: str, label: Label) -> None:
        """Change the eviction class of the program's pages."""
        self.manager.relabel(program, label)

    def drop(self, program: str) -> None:
        """The program's KV is nobody's any more, in both tiers."""
        self.manager.release(program)

    def check_integrity(self) -> None:
        """Every page is somebody's, and every sum is right."""
        check_integrity(self.manager)
        assert 0 <= self._committed <= self._buffer.own.size, "output without pages"

    @property
    def _spare(self) -> int:
        return self._buffer.own.size - self._committed

    def _num_pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
