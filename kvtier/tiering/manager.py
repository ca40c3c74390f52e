"""The tier manager of one worker: what its requests hold, and what moves between the tiers.

Sans-IO: it copies nothing and has no clock. A `Mover` copies, and tells of each end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvtier.errors import TieringError
from kvtier.ids import Label
from kvtier.memory.pages import PageAllocator
from kvtier.tiering.counters import Counters
from kvtier.tiering.kept import Kept, kept_of
from kvtier.tiering.lease import NO_PAGES, Lease, LeaseState
from kvtier.tiering.moves import Move, Mover, Why
from kvtier.tiering.room import Room, TierMode
from kvtier.tiering.traffic import Traffic
from kvtier.tree.holders import label_of
from kvtier.tree.keys import Namespace
from kvtier.tree.node import Node, State, Tier, path_to
from kvtier.tree.order import Rules
from kvtier.tree.programs import Program
from kvtier.tree.tree import Ints, Match, RadixTree

_DEFAULT = Namespace()
_READABLE = (State.PRESENT, State.READING)


class TierManager:
    """Pages of HBM and DRAM of one worker, and the requests and programs that hold them.

    `hbm_pages` and `dram_pages` are the pools' pages, or how many. `reserve_pages` of HBM are kept
    free or free of the need to be copied, so that few requests wait for room. One thread at a time.
    """

    def __init__(
        self,
        hbm_pages: int | PageAllocator,
        dram_pages: int | PageAllocator,
        mover: Mover,
        *,
        page_size: int = 16,
        mode: TierMode | None = None,
        reserve_pages: int = 0,
    ) -> None:
        self.mode = TierMode() if mode is None else mode
        self.counters = Counters()
        rules = Rules(labels=self.mode.labels, keep_duplicates=self.mode.write_through)
        self.tree = RadixTree(page_size, rules)
        self.pools = {Tier.HBM: _allocator(hbm_pages), Tier.DRAM: _allocator(dram_pages)}
        self.traffic = Traffic(self.tree, mover, self.counters)
        self.leases: dict[Lease, None] = {}
        self.room = Room(
            self.tree, self.pools, self.mode, self.counters, self.traffic, reserve_pages
        )

    # --- requests ---

    def open(
        self,
        tokens: Ints,
        *,
        num_pages: int,
        request: str | None = None,
        program: str | None = None,
        namespace: Namespace = _DEFAULT,
        spare_pages: int = 0,
        on_ready: Callable[[Lease], None] | None = None,
    ) -> Lease | None:
        """Give a prompt its pages: what is there of it, loaded where it is in DRAM, and new ones.

        `num_pages` are all that the request needs now, those of the prompt included. None, and
        nothing done, unless HBM can give them with `spare_pages` to spare; ask again when something
        has ended. A lease that is not READY when this returns runs `on_ready` once it is, or has
        FAILED. A request and its program go together, or are both left out.
        """
        if (request is None) is not (program is None):
            raise TieringError("a request needs its program, and a program its request")
        match = self.tree.match(tokens, namespace)
        if num_pages * self.tree.page_size < match.tokens:
            raise TieringError(
                f"num_pages={num_pages} is less than the {match.tokens} tokens found"
            )
        lease = self._lease(match.node, num_pages, namespace, spare_pages)
        if lease is None:
            return None
        if request is not None and program is not None:
            lease.request = request
            self.tree.begin(request, program, match)
        self.counters.hbm_hit += lease.hbm_pages
        self.counters.dram_hit += lease.dram_pages
        self._get_room(lease, self._load)
        lease.on_ready = on_ready
        return lease

    def extend(self, lease: Lease, num_pages: int, on_room: Callable[[], None]) -> bool | None:
        """More pages at the lease's end: True now, False where `on_room` will run, None never.

        Only a READY lease can grow, one step at a time.
        """
        self._check_open(lease)
        if lease.want is not None:
            raise TieringError("this lease is growing already; wait for it")
        want = self.room.ask(num_pages, first=True)
        if want is None:
            return None
        lease.want = want
        lease.num_pages += num_pages
        if not want.missing:
            lease.take()
            return True
        self._get_room(lease, lambda lease: on_room())
        return False

    def shrink(self, lease: Lease, num_pages: int) -> None:
        """Give back the last of a READY lease's own pages."""
        self._check_open(lease)
        self._surplus(lease, num_pages)
        lease.num_pages -= num_pages
        self.room.pump()

    def publish(self, lease: Lease, tokens: Ints) -> None:
        """The KV of `tokens`, the prompt and what followed, is computed: others may use it.

        Where somebody was faster, the lease has his pages in place of its own: read `lease.pages`
        anew. Tokens beyond the last whole page stay the lease's alone.
        """
        self._check_open(lease)
        end = len(tokens) // self.tree.page_size
        if not lease.cached <= end <= lease.cached + lease.own.size:
            raise TieringError(
                f"{end} pages are published, but the lease has {lease.cached} in the tree and "
                f"{lease.own.size} of its own"
            )
        given = lease.own[: end - lease.cached]
        inserted = self.tree.insert(
            tokens,
            given,
            lease.namespace,
            first_page=lease.cached,
            after=Match(lease.node, lease.node.end, lease.node.end),
            request=lease.request,
        )
        self.tree.protect(inserted.node)
        self.tree.unprotect(lease.node)
        if lease.request is not None:
            self.tree.publish(lease.request, inserted.node)
        taken = inserted.end // self.tree.page_size - lease.cached
        lease.node, lease.cached = inserted.node, lease.cached + taken
        lease.own = lease.own[taken:].copy()
        self.room.give(Tier.HBM, inserted.duplicates)
        self.room.pump()

    def close(self, lease: Lease, *, well: bool) -> None:
        """The request has left the engine: what it published stays, its own pages are free.

        In any state; a load goes on for whoever wants it next. Raises TieringError the second time.
        """
        if lease.state is LeaseState.ENDED:
            raise TieringError(f"the lease of request {lease.request} has ended already")
        lease.state = LeaseState.ENDED
        del self.leases[lease]
        if lease.want is not None:
            self.room.forget(lease.want)
            lease.want = None
        self.room.give(Tier.HBM, lease.own)
        lease.own = NO_PAGES
        self.tree.unprotect(lease.node)
        if lease.request is not None:
            program = self.tree.end(lease.request, well=well)
            if program is not None and self.mode.write_through and self.mode.offload:
                self._copy_down(program, _in_hbm_alone, Why.WRITE_THROUGH)
        self.room.pump()

    # --- programs ---

    def relabel(self, program: str, label: Label, epoch: int | None = None) -> bool:
        """Change the class of a program's pages; False where the epoch is stale."""
        return self.tree.relabel(program, label, epoch)

    def release(self, program: str) -> None:
        """The program, with its children, has ended: its pages become INACTIVE."""
        self.tree.release(program)

    def demote(
        self, program: str, on_end: Callable[[bool], None] = lambda well: None
    ) -> Move | bool:
        """Copy down what a program alone has in HBM, so that its room is free without delay.

        Returns the move, True where there is nothing left to copy, False where the program holds
        nothing, runs now, or DRAM has no room for all of it. Pages of BUSY programs stay up.
        """
        known = self.tree.programs.find(program)
        if known is None or known.runs or known.holds_nothing or not self.mode.offload:
            return False
        return self._copy_down(known, self._idle, Why.DEMOTE, on_end)

    def promote(self, program: str, on_end: Callable[[bool], None] = lambda well: None) -> bool:
        """Bring up a program's last prompts before its request comes; False where HBM is full.

        `on_end(well)` runs once all that was in DRAM is in HBM, or one of the loads has failed.
        """
        known = self.tree.programs.find(program)
        opened: list[Lease] = []
        for anchor in [] if known is None else [*known.finished]:
            if (end := anchor.node) is None:  # by now: room for the one may have been the other's
                continue
            lease = self._lease(end, end.end // self.tree.page_size, _DEFAULT)
            if lease is None:
                for other in opened:
                    self.close(other, well=True)
                return False
            opened.append(lease)
        left = len(opened)
        all_well = True

        def ready(lease: Lease) -> None:
            nonlocal left, all_well
            all_well &= lease.cached == lease.num_pages
            left -= 1
            self.close(lease, well=True)
            if not left:
                on_end(all_well)

        for lease in opened:
            lease.why, lease.on_ready = Why.PREFETCH, ready
        for lease in opened:
            self._get_room(lease, self._load)
        if not opened:
            on_end(True)
        return True

    def kept(self, program: str) -> Kept:
        """What is left of the program's last prompts; the longest counts."""
        known = self.tree.programs.find(program)
        ends = () if known is None else (*known.anchors(), *known.finished)
        found = (kept_of(anchor.node, self.tree.page_size) for anchor in ends)
        return max(found, key=lambda kept: kept.pages, default=Kept(0, 0))

    # --- moves ---

    def ended(self, move: Move, *, well: bool) -> None:
        """A copy has ended, or (not `well`) failed or was cancelled: then all is as before it.

        Raises TieringError for a move that is not under way.
        """
        unused = self.traffic.end(move, well=well)
        self.room.give(move.transfer.target, unused)
        if move.why in (Why.ROOM, Why.RESERVE, Why.DEMOTE):
            self.room.written(move, well)
        for callback in move.on_end:
            callback(well)
        self.room.pump()

    # --- parts of the above ---

    def _lease(
        self, node: Node, num_pages: int, namespace: Namespace, spare_pages: int = 0
    ) -> Lease | None:
        """Protect the path to the node; None, and nothing done, without room for the rest."""
        size = self.tree.num_pages
        path = path_to(node)
        found = sum(map(size, path))
        absent = sum(size(n) for n in path if n.states[Tier.HBM] is State.ABSENT)
        there = sum(size(n) for n in path if n.states[Tier.HBM] in _READABLE)
        self.tree.protect(node)
        if num_pages - found + absent + spare_pages > self.room.available:
            self.tree.unprotect(node)
            return None
        lease = Lease(
            request=None,
            namespace=namespace,
            node=node,
            num_pages=num_pages,
            page_size=self.tree.page_size,
            hbm_pages=there,
            dram_pages=found - there,
            cached=found,
        )
        self.leases[lease] = None
        lease.want = self.room.ask(num_pages - found + absent)
        return lease

    def _get_room(self, lease: Lease, then: Callable[[Lease], None]) -> None:
        """Go on once the wanted pages are there, maybe now."""
        assert lease.want is not None

        def arrived() -> None:
            lease.take()
            then(lease)

        if lease.want.missing:
            lease.want.on_room = arrived
        else:
            arrived()

    def _load(self, lease: Lease) -> None:
        """The lease has its room: begin to load what is in DRAM, and wait for others' loads."""
        path = path_to(lease.node)
        loads = [node for node in path if node.states[Tier.HBM] is State.ABSENT]
        coming = [node for node in path if node.states[Tier.HBM] is State.WRITING]
        found = dict.fromkeys(self.traffic.of(node) for node in coming)
        lease.awaits = [move for move in found if move is not None]
        count = sum(map(self.tree.num_pages, loads))
        if 0 < count <= lease.own.size:  # it has less where a load that it counted on has failed
            target, lease.own = lease.own[:count], lease.own[count:].copy()
            lease.awaits.append(self.traffic.start(Tier.HBM, loads, target, lease.why))
        lease.state = LeaseState.LOADING
        for move in lease.awaits:
            move.on_end.append(partial(self._arrived, lease, move))
        self._check_ready(lease)

    def _arrived(self, lease: Lease, move: Move, well: bool) -> None:
        del well  # the states of the nodes tell
        if lease.state is LeaseState.LOADING:
            lease.awaits.remove(move)
            self._check_ready(lease)

    def _check_ready(self, lease: Lease) -> None:
        """All loads have ended; what a failed one left out is computed instead."""
        if lease.awaits:
            return
        there = 0
        for node in path_to(lease.node):
            if node.states[Tier.HBM] not in _READABLE:
                break
            there += self.tree.num_pages(node)
        if there < lease.cached:
            self._shorten(lease, there)
        missing = lease.num_pages - lease.cached - lease.own.size
        if missing <= 0:
            self._surplus(lease, -missing)
        if missing <= 0 or lease.why is Why.PREFETCH:  # which computes nothing
            self._ready(lease, LeaseState.READY)
            return
        lease.want = self.room.ask(missing)
        if lease.want is None:
            self._ready(lease, LeaseState.FAILED)
        else:
            self._get_room(lease, lambda lease: self._ready(lease, LeaseState.READY))

    def _surplus(self, lease: Lease, num_pages: int) -> None:
        """Pages that were to be loaded or computed and were there by the time there was room."""
        if num_pages:
            keep = lease.own.size - num_pages
            extra, lease.own = lease.own[keep:], lease.own[:keep].copy()
            self.room.give(Tier.HBM, extra)

    def _shorten(self, lease: Lease, cached: int) -> None:
        """Only the first `cached` pages of the path are in HBM."""
        node = lease.node
        while node.end > cached * self.tree.page_size:
            assert node.parent is not None
            node = node.parent
        self.tree.protect(node)
        self.tree.unprotect(lease.node)
        lease.node, lease.cached = node, cached

    def _ready(self, lease: Lease, state: LeaseState) -> None:
        lease.state = state
        if lease.on_ready is not None:
            lease.on_ready(lease)

    def _idle(self, node: Node) -> bool:
        return _in_hbm_alone(node) and not (self.mode.labels and label_of(node) is Label.BUSY)

    def _copy_down(
        self,
        program: Program,
        chosen: Callable[[Node], bool],
        why: Why,
        on_end: Callable[[bool], None] | None = None,
    ) -> Move | bool:
        """True without anything to copy, False without room for all of it."""
        while True:
            path = dict.fromkeys(n for held in program.finished for n in path_to(held.node))
            nodes = [node for node in path if chosen(node)]
            target = self.room.dram(sum(map(self.tree.num_pages, nodes)))
            if not nodes or target is None:
                return not nodes
            if not any(node.dead for node in nodes):
                break
            self.room.give(Tier.DRAM, target)  # room was made of the program's own: choose anew
        if why is Why.DEMOTE:
            self.room.expect(target.size)
        return self.traffic.start(Tier.DRAM, nodes, target, why, on_end)

    def _check_open(self, lease: Lease) -> None:
        if lease.state is not LeaseState.READY:
            raise TieringError(f"the lease of request {lease.request} is {lease.state}, not ready")


def _in_hbm_alone(node: Node) -> bool:
    return node.states == [State.PRESENT, State.ABSENT]


def _allocator(pages: int | PageAllocator) -> PageAllocator:
    return PageAllocator(pages) if isinstance(pages, int) else pages
