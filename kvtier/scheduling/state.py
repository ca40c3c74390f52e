"""What the scheduler knows: programs, workers, and the sums of each queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from kvtier.scheduling.idleness import IdlenessRing


class Queue(StrEnum):
    """Where a program belongs. GPU and CPU are queues of one worker; WAITING is global."""

    GPU = "gpu"
    CPU = "cpu"
    WAITING = "waiting"


class Status(StrEnum):
    """What a program does at this moment."""

    REASONING = "reasoning"
    ACTING = "acting"
    HELD = "held"


@dataclass(slots=True)
class HeldRequest:
    """A request that waits in the gateway since `since_s`."""

    request: str
    since_s: float


@dataclass(slots=True)
class ProgramState:
    """One program. `tokens` is its whole context, shared head included."""

    program: str
    sequence: int
    ring: IdlenessRing
    parent: str | None = None
    shared_group: str | None = None
    shared_tokens: int = 0
    tokens: int = 0
    queue: Queue = Queue.WAITING
    worker: str | None = None
    marked: bool = False
    epoch: int = 0
    num_moves: int = 0
    num_steps: int = 0
    moved_s: float = float("-inf")
    entered: int = 0
    """Counts entries into GPU queues, over all programs; the latest admitted has the highest."""
    reasoning_since_s: float | None = None
    tool: str | None = None
    held: dict[str, HeldRequest] = field(default_factory=dict)
    running: dict[str, WorkerState] = field(default_factory=dict)
    """Running requests and the worker that has each, which may be down by now."""
    placed_tokens: int = 0
    """Private tokens it had when it came to its queue."""
    kept_tokens: int = 0
    """Private tokens that a CPU-queue program still has, as of its demotion or last report."""

    @property
    def status(self) -> Status:
        if self.running:
            return Status.REASONING
        return Status.HELD if self.held else Status.ACTING

    @property
    def private_tokens(self) -> int:
        """Tokens that no other program shares; a context shorter than the head has none."""
        return self.tokens - self.head_tokens

    @property
    def head_tokens(self) -> int:
        """The part of the shared head that this context covers."""
        return min(self.shared_tokens, self.tokens) if self.shared_group is not None else 0

    @property
    def charged_tokens(self) -> int:
        """Private tokens that its queue is charged: a copy in DRAM does not grow with a prompt."""
        return self.kept_tokens if self.queue is Queue.CPU else self.private_tokens

    def held_since_s(self) -> float:
        """When its longest-held request began to wait; infinity when none is held."""
        return min((h.since_s for h in self.held.values()), default=float("inf"))


@dataclass(frozen=True, slots=True)
class _Entry:
    private_tokens: int
    group: str | None
    head_tokens: int


class Ledger:
    """Tokens of a set of programs: their private parts, plus the largest shared part per group."""

    __slots__ = ("_entries", "_heads", "tokens")

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._heads: dict[str, Counter[int]] = {}
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, program: str) -> bool:
        return program in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def add(self, state: ProgramState) -> None:
        """Count a program that is not counted yet."""
        if state.program in self._entries:
            raise AssertionError(f"{state.program} is counted already")
        entry = _Entry(state.charged_tokens, state.shared_group, state.head_tokens)
        self._entries[state.program] = entry
        self.tokens += entry.private_tokens
        if entry.group is not None:
            sizes = self._heads.setdefault(entry.group, Counter())
            before = max(sizes, default=0)
            sizes[entry.head_tokens] += 1
            self.tokens += max(entry.head_tokens - before, 0)

    def remove(self, program: str) -> None:
        """Take back exactly what `add` or `update` counted for this program."""
        entry = self._entries.pop(program)
        self.tokens -= entry.private_tokens
        if entry.group is not None:
            sizes = self._heads[entry.group]
            before = max(sizes)
            sizes[entry.head_tokens] -= 1
            if not sizes[entry.head_tokens]:
                del sizes[entry.head_tokens]
            self.tokens -= before - max(sizes, default=0)
            if not sizes:
                del self._heads[entry.group]

    def update(self, state: ProgramState) -> None:
        """Count the program at its present size."""
        self.remove(state.program)
        self.add(state)

    def cost_tokens(self, state: ProgramState) -> int:
        """How much the sum would grow if this program were added."""
        sizes = self._heads.get(state.shared_group) if state.shared_group is not None else None
        covered = max(sizes) if sizes else 0
        return state.private_tokens + max(state.head_tokens - covered, 0)

    def clone(self) -> Ledger:
        """An independent ledger with the same entries."""
        other = Ledger()
        other._entries = self._entries.copy()
        other._heads = {group: sizes.copy() for group, sizes in self._heads.items()}
        other.tokens = self.tokens
        return other

    def check_integrity(self, states: Iterable[ProgramState]) -> None:
        """Compare the running sums with sums taken afresh."""
        fresh = Ledger()
        for state in states:
            fresh.add(state)
        assert fresh._entries == self._entries, "a queue's ledger and its programs differ"
        heads = sum(max(sizes) for sizes in fresh._heads.values())
        summed = heads + sum(entry.private_tokens for entry in fresh._entries.values())
        assert summed == self.tokens, f"ledger says {self.tokens} tokens, its entries {summed}"


@dataclass(slots=True)
class WorkerState:
    """One worker: capacities in KV tokens, and the ledgers of its queues.

    The GPU queue is `staying` and `leaving` together; `leaving` holds the marked programs, which
    go when their running inference ends.
    """

    worker: str
    hbm_tokens: int
    dram_tokens: int
    limit_tokens: int
    staying: Ledger = field(default_factory=Ledger)
    leaving: Ledger = field(default_factory=Ledger)
    cpu: Ledger = field(default_factory=Ledger)
    num_running_requests: int = 0

    @property
    def num_gpu(self) -> int:
        """Programs in the GPU queue, those marked to leave included."""
        return len(self.staying) + len(self.leaving)

    @property
    def free_tokens(self) -> int:
        """HBM room under the limit that no program of the GPU queue has claimed."""
        return self.limit_tokens - self.staying.tokens - self.leaving.tokens

    def fits(self, state: ProgramState, staying: Ledger | None = None) -> bool:
        """Whether the program fits beside the whole GPU queue; an empty one takes any that can.

        `staying` stands in for the programs that stay, when some of them are about to go.
        """
        others = self.staying if staying is None else staying
        if not len(others) + len(self.leaving):
            return state.tokens <= self.hbm_tokens
        free_tokens = self.limit_tokens - others.tokens - self.leaving.tokens
        return others.cost_tokens(state) <= free_tokens

    def ledger_of(self, state: ProgramState) -> Ledger | None:
        """The ledger that counts this program on this worker, if any."""
        if state.queue is Queue.GPU:
            return self.leaving if state.marked else self.staying
        return self.cpu if state.queue is Queue.CPU else None
