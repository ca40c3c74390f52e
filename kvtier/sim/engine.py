"""One inference engine: continuous batching with chunked prefill over two-tier KV.

Time leaps from change to change: between two changes of the batch all decoding requests advance in
lockstep, so a phase of n equal steps is one event, and a new arrival cuts it at a step border.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from kvtier.sim.cache import WorkerCache
from kvtier.sim.cost import StepCost
from kvtier.sim.heap import EventHeap
from kvtier.sim.request import EngineCounters, EngineRequest, EngineSettings


@dataclass(slots=True)
class _Phase:
    start_s: float
    step_s: float
    num_steps: int
    pieces: list[tuple[EngineRequest, int]] = field(default_factory=list)


class Engine:
    """A worker. `submit` takes a request; its callbacks tell of the first token and the end."""

    def __init__(
        self,
        heap: EventHeap,
        cache: WorkerCache,
        cost: StepCost,
        settings: EngineSettings,
    ) -> None:
        self._heap = heap
        self.cache = cache
        self._cost = cost
        self._settings = settings
        self.counters = EngineCounters()
        self.waiting: deque[EngineRequest] = deque()
        self._prefill: deque[EngineRequest] = deque()
        self._finishes: list[tuple[int, int, EngineRequest]] = []
        self._decoding: dict[str, EngineRequest] = {}
        self._num_loading = 0
        self._pending_prefill = 0
        self._step = 0
        self._decode_tokens = 0
        self._order = 0
        self._phase: _Phase | None = None
        self._version = 0
        self._settling = False

    @property
    def num_running(self) -> int:
        """Admitted requests: loading, in prefill, or decoding."""
        return self._num_loading + len(self._prefill) + len(self._decoding)

    def submit(self, request: EngineRequest) -> None:
        """Queue a request."""
        request.prompt = self.cache.prompts.next_prompt(
            request.program,
            request.context_tokens,
            request.reused_tokens,
            request.group,
            request.head_tokens,
        )
        self.waiting.append(request)
        self._poke(self._heap.now_s)

    def demote(self, program: str, done: Callable[[float, int], None]) -> bool:
        """Copy the program's KV down; `done(now_s, tokens)` when it is there. False: refused."""
        return self.cache.demote(program, lambda tokens: done(self._heap.now_s, tokens))

    def produced_since_report(self) -> list[tuple[EngineRequest, int]]:
        """Decoding requests with the tokens they produced since the last call."""
        news = []
        step = self._step
        if self._phase is not None:
            step += self._steps_by(self._phase, self._heap.now_s, included=True)
        for request in self._decoding.values():
            produced = request.produced + step - request.joined_step
            if produced > request.reported:
                news.append((request, produced - request.reported))
                request.reported = produced
        return news

    # Phases --------------------------------------------------------------------------------

    def _poke(self, now_s: float) -> None:
        """Something changed: start a phase, or cut the running one at its next step border."""
        if self._settling:
            return
        phase = self._phase
        if phase is None:
            self._start_phase(now_s)
            return
        if not (self.waiting or self._prefill) or phase.num_steps == 1:
            return
        steps = min(self._steps_by(phase, now_s, included=False) + 1, phase.num_steps)
        if steps < phase.num_steps:
            self.cache.cut_steps(self._step, phase.num_steps, steps)
            phase.pieces = [(r, tokens // phase.num_steps * steps) for r, tokens in phase.pieces]
            phase.num_steps = steps
            phase.step_s = self._mean_step_s(phase.pieces, steps)
            self._schedule_end(phase)

    def _steps_by(self, phase: _Phase, now_s: float, *, included: bool) -> int:
        """How many steps of the phase end before `now_s`, or by it if a border there counts."""
        chunks = [(r, tokens // phase.num_steps) for r, tokens in phase.pieces]

        def end_s(steps: int) -> float:
            pieces = [(r, chunk * steps) for r, chunk in chunks]
            return phase.start_s + steps * self._mean_step_s(pieces, steps)

        find = bisect_right if included else bisect_left
        return find(range(1, phase.num_steps + 1), now_s, key=end_s)

    def _schedule_end(self, phase: _Phase) -> None:
        self._version += 1
        version = self._version
        end_s = max(phase.start_s + phase.num_steps * phase.step_s, self._heap.now_s)
        self._heap.at(end_s, lambda now_s: self._end_phase(now_s, version))

    def _start_phase(self, now_s: float) -> None:
        self._admit()
        if not self._clear_growth():
            return
        num_steps, pieces = self._plan_prefill()
        if self._decoding:
            self._drop_stale_finishes()
            left = self._finishes[0][0] - self._step
            num_steps = min(num_steps, left) if pieces else left
            num_steps = self.cache.steps_with_room(self._step, num_steps)
        if not self._decoding and not pieces:
            return
        if pieces and len(pieces) == 1:
            head = pieces[0][0]
            pieces = [(head, min(pieces[0][1], num_steps * self._settings.chunk_tokens))]
        self.cache.begin_steps(self._step, num_steps)
        step_s = self._mean_step_s(pieces, num_steps)
        self._phase = _Phase(now_s, step_s, num_steps, pieces)
        self._schedule_end(self._phase)

    def _mean_step_s(self, pieces: list[tuple[EngineRequest, int]], num_steps: int) -> float:
        """Mean time of the batch's next `num_steps` steps, s: priced at their middle."""
        batch = len(self._decoding)
        half = 0.5 * (num_steps - 1)
        chunk = sum(tokens for _, tokens in pieces) / num_steps
        position = self._mean_start(pieces) + (half * chunk if chunk else 0.0)
        return self._cost.step_s(batch, self._decode_tokens + half * batch, chunk, position)

    def _plan_prefill(self) -> tuple[int, list[tuple[EngineRequest, int]]]:
        """Steps and pieces: one long prompt in full chunks, or several that share one chunk."""
        if not self._prefill:
            return 0, []
        budget = self._settings.chunk_tokens
        head = self._prefill[0]
        if head.prefill_left >= budget:
            steps = head.prefill_left // budget
            return steps, [(head, steps * budget)]
        pieces = []
        for request in self._prefill:
            tokens = min(request.prefill_left, budget)
            if tokens <= 0:
                break
            pieces.append((request, tokens))
            budget -= tokens
        return 1, pieces

    @staticmethod
    def _mean_start(pieces: list[tuple[EngineRequest, int]]) -> float:
        """Token-weighted mean position at which the pieces start."""
        total = sum(tokens for _, tokens in pieces)
        starts = sum(tokens * (r.context_tokens - r.prefill_left) for r, tokens in pieces)
        return starts / total if total else 0.0

    def _clear_growth(self) -> bool:
        """Retract requests until a step of decoding has room; False: wait for running copies.

        The latest admitted goes first, so that the oldest always gets on.
        """
        while self._decoding:
            there = self.cache.next_step(self._step, self._poke_soon)
            if there is not None:
                return there
            candidates = [*self._decoding.values(), *self._prefill]
            if len(candidates) > 1:
                self._retract(max(candidates, key=lambda r: r.order))
            elif self._num_loading:
                return False
            else:
                self._truncate()
        return True

    def _end_phase(self, now_s: float, version: int) -> None:
        if version != self._version or self._phase is None:
            return
        phase, self._phase = self._phase, None
        batch = len(self._decoding)
        self._step += phase.num_steps
        self._decode_tokens += batch * phase.num_steps
        self.counters.output += batch * phase.num_steps
        self.counters.busy_s += now_s - phase.start_s
        ended = self._collect_finished()
        for request, tokens in phase.pieces:
            request.prefill_left -= tokens
            self._pending_prefill -= tokens
            self.counters.prefilled += tokens
        while self._prefill and self._prefill[0].prefill_left == 0:
            ended.extend(self._first_token(self._prefill.popleft(), now_s))
        self._settling = True  # what the endings set off joins the phase that starts below
        for request in ended:
            self._finish(request, now_s)
        self._settling = False
        self._start_phase(now_s)

    def _first_token(self, request: EngineRequest, now_s: float) -> list[EngineRequest]:
        """The prefill's last step yields a token; the request decodes on unless it was the last."""
        self.cache.publish(request)
        if request.produced == 0:
            request.produced = 1
            self.counters.output += 1
            request.on_first_token(now_s)
        left = request.output_tokens - request.produced
        if left <= 0:
            return [request]
        request.joined_step = self._step
        self._decoding[request.request] = request
        self.cache.start_decoding(request, self._step)
        self._decode_tokens += request.context_tokens
        heappush(self._finishes, (self._step + left, request.order, request))
        return []

    def _drop_stale_finishes(self) -> None:
        """A request that was retracted left its old entry behind; its order has changed since."""
        while self._finishes:
            _, order, request = self._finishes[0]
            if request.order == order and request.request in self._decoding:
                return
            heappop(self._finishes)

    def _collect_finished(self) -> list[EngineRequest]:
        ended = []
        self._drop_stale_finishes()
        while self._finishes and self._finishes[0][0] <= self._step:
            request = heappop(self._finishes)[2]
            self._stop_decoding(request)
            ended.append(request)
            self._drop_stale_finishes()
        return ended

    def _stop_decoding(self, request: EngineRequest) -> None:
        del self._decoding[request.request]
        decoded = self._step - request.joined_step
        request.produced += decoded
        request.context_tokens += decoded
        self._decode_tokens -= request.context_tokens
        self.cache.stop_decoding(request, self._step)

    def _finish(self, request: EngineRequest, now_s: float) -> None:
        self.counters.finished_requests += 1
        self.cache.publish(request)
        self.cache.close(request)
        request.on_finish(now_s)

    # Admission, retraction -----------------------------------------------------------------

    def _admit(self) -> None:
        settings = self._settings
        while (
            self.waiting
            and self.num_running < settings.max_running
            and self._pending_prefill < settings.chunk_tokens
        ):
            if not self._admit_one(self.waiting[0]):
                return
            self.waiting.popleft()

    def _admit_one(self, request: EngineRequest) -> bool:
        """Prefill starts when the request's room is there and its prefix is loaded."""
        idle = self.num_running == 0
        reserve = 0 if idle else self._settings.reserve_tokens * (self.num_running + 1)
        ready = self.cache.open(request, reserve, lambda: self._arrived(request))
        if ready is None:
            assert not idle, f"{request.request} can never fit"
            return False
        self._order += 1
        request.order = self._order
        self._count_hits(request)
        if ready:
            self._prefill.append(request)
        else:
            self._num_loading += 1
        return True

    def _count_hits(self, request: EngineRequest) -> None:
        lease = request.lease
        assert lease is not None
        size = self.cache.page_size
        in_hbm = lease.hbm_pages * size
        found = min(in_hbm + lease.dram_pages * size, request.context_tokens - 1)
        self.counters.prompt += request.context_tokens
        self.counters.hbm_hit += min(in_hbm, found)
        self.counters.dram_hit += found - min(in_hbm, found)
        self.counters.recomputed += max(request.reused_tokens - found, 0)
        request.prefill_left = request.context_tokens - found
        self._pending_prefill += request.prefill_left

    def _arrived(self, request: EngineRequest) -> None:
        self._num_loading -= 1
        self._prefill.append(request)
        self._poke_soon()

    def _poke_soon(self) -> None:
        """Room or a prefix has come, in the middle of the tier manager's own work."""
        self._heap.at(self._heap.now_s, self._poke)

    def _retract(self, request: EngineRequest) -> None:
        """Decode ran out of room: the request goes back to the queue's head."""
        self.counters.retractions += 1
        if request.request in self._decoding:
            self._stop_decoding(request)
            request.reused_tokens = request.context_tokens
            self.cache.publish(request)
            request.prompt = self.cache.prompts.with_output(request.program, request.context_tokens)
        else:
            self._prefill.remove(request)
            self._pending_prefill -= request.prefill_left
            self.counters.prompt -= request.prefill_left
            self.cache.publish_part(request, request.context_tokens - request.prefill_left)
        self.cache.close(request)
        self.waiting.appendleft(request)

    def _truncate(self) -> None:
        """A lone request has filled HBM: it ends here, short of its output."""
        request = next(iter(self._decoding.values()))
        self._stop_decoding(request)
        self.counters.truncated += 1

        def end(now_s: float) -> None:
            self._finish(request, now_s)
            self._poke(now_s)

        self._heap.at(self._heap.now_s, end)

    def check_integrity(self) -> None:
        """The cache's laws, and this engine's own sums."""
        self.cache.check_integrity()
        now = sum(r.context_tokens + self._step - r.joined_step for r in self._decoding.values())
        assert now == self._decode_tokens, f"{now} tokens decode, counter {self._decode_tokens}"
        left = sum(r.prefill_left for r in self._prefill)
        assert left <= self._pending_prefill, f"{left} tokens to prefill, {self._pending_prefill}"
