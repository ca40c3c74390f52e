"""Programs as one worker sees them: label, epoch, running requests, held prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvtier.errors import TreeError
from kvtier.ids import Label
from kvtier.tree.holders import RANKS, Anchor, Node, place, set_counted, set_rank

_MAX_PROGRAMS = 65_536
"""Programs that hold nothing are forgotten beyond this many, those longest unused first."""


@dataclass(eq=False)
class Run:
    """A request of a program that the engine has now.

    `suspended` are prompts of earlier requests. They gave up their label when this one was matched
    and get it back if it is aborted.
    """

    program: Program
    anchor: Anchor
    published: bool = False
    suspended: list[Anchor] = field(default_factory=list)


@dataclass(eq=False)
class Program:
    """`finished` are the prompts of its last requests that ended well.

    `children` are its sub-agents; when it is released, so are they.
    """

    name: str
    label: Label = Label.BUSY
    epoch: int = 0
    released: bool = False
    runs: dict[str, Run] = field(default_factory=dict)
    finished: list[Anchor] = field(default_factory=list)
    parent: Program | None = None
    children: list[Program] = field(default_factory=list)

    def anchors(self) -> Iterator[Anchor]:
        """All that label nodes now."""
        yield from (run.anchor for run in self.runs.values())
        yield from (anchor for anchor in self.finished if anchor.counted)

    @property
    def holds_nothing(self) -> bool:
        """Whether forgetting it loses no more than its label and epoch."""
        held = self.runs or self.children or any(anchor.node for anchor in self.finished)
        return not held

    def family(self) -> Iterator[Program]:
        """Itself and all that descend from it."""
        left = [self]
        while left:
            member = left.pop()
            yield member
            left.extend(reversed(member.children))


class Programs:
    """All programs of a worker. Called from the scheduler thread only."""

    def __init__(self) -> None:
        self._programs: dict[str, Program] = {}
        self._runs: dict[str, Run] = {}
        self._prune_at = _MAX_PROGRAMS

    def __iter__(self) -> Iterator[Program]:
        return iter(self._programs.values())

    def find(self, name: str) -> Program | None:
        """The program, if the worker knows it."""
        return self._programs.get(name)

    def run(self, request: str) -> Run | None:
        """The request, while the engine has it."""
        return self._runs.get(request)

    def begin(
        self,
        request: str,
        name: str,
        node: Node,
        *,
        label: Label | None = None,
        epoch: int | None = None,
    ) -> Run:
        """A request's prompt was looked up for the first time; it is cached up to `node`.

        `label` and `epoch` are a decision that came with it, as for `relabel`.
        The program's earlier prompts lose their label: only its last ones keep one (after a
        compaction the old branch must not stay BUSY). A run that still has the request's id was
        dropped by the engine. A program that was released starts anew, BUSY.
        """
        label = None if label is None else _checked(label)
        if request in self._runs:
            self.lost(request, self._runs[request])
        program = self._find_or_add(name)
        if label is not None:
            self.relabel(name, label, epoch)
        elif program.released:
            self.relabel(program.name, Label.BUSY, None)
        run = Run(program, Anchor(program.name, RANKS[program.label]))
        place(run.anchor, node)
        for anchor in program.finished:
            set_counted(anchor, False)
            run.suspended.append(anchor)
        self._runs[request] = program.runs[request] = run
        return run

    def matched(self, request: str, run: Run, node: Node) -> None:
        """A request that has begun was looked up again, as engines do until it is admitted."""
        if self._runs.get(request) is run and not run.published:
            place(run.anchor, node)

    def published(self, request: str, node: Node) -> None:
        """What the request has computed so far lies in the tree and ends at `node`."""
        run = self._runs.get(request)
        if run is not None:
            run.published = True
            place(run.anchor, node)

    def retracted(self, request: str) -> None:
        """The request lost its place and will be matched again."""
        run = self._runs.get(request)
        if run is not None:
            run.published = False

    def ended(self, request: str, *, well: bool) -> Program | None:
        """The request left the engine; returns its program, None where it had none.

        An aborted request leaves the holders of all nodes as they were before it.
        """
        run = self._runs.pop(request, None)
        if run is None:
            return None
        del run.program.runs[request]
        others = run.program.runs.values()
        if well:
            for anchor in run.suspended:
                place(anchor, None)
                run.program.finished.remove(anchor)
                for other in others:
                    if anchor in other.suspended:
                        other.suspended.remove(anchor)
            run.program.finished.append(run.anchor)
        else:
            for anchor in run.suspended:
                if not any(anchor in other.suspended for other in others):
                    set_counted(anchor, True)
            place(run.anchor, None)
        return run.program

    def set_parent(self, name: str, parent: str) -> None:
        """The program is a sub-agent of `parent`.

        Raises TreeError where it has another parent, or is the parent's own ancestor.
        """
        child, above = self._find_or_add(name), self._find_or_add(parent)
        if child.parent is above:
            return
        if child.parent is not None:
            raise TreeError(f"{name} is a child of {child.parent.name}, not of {parent}")
        if above in child.family():
            raise TreeError(f"{name} cannot be a child of {parent}, which descends from it")
        child.parent = above
        above.children.append(child)

    def lost(self, request: str, run: Run) -> None:
        """The engine dropped the request; a later one may have its id by now."""
        if self._runs.get(request) is run:
            self.ended(request, well=False)

    def relabel(self, name: str, label: Label, epoch: int | None) -> bool:
        """Set label and epoch; False, and nothing done, where a higher epoch was seen before.

        Without an epoch the label counts as a decision of the current one.
        """
        label = _checked(label)
        program = self._find_or_add(name)
        if epoch is not None and epoch < program.epoch:
            return False
        program.epoch = program.epoch if epoch is None else epoch
        program.released = False
        if label is not program.label:
            program.label = label
            for run in program.runs.values():
                set_rank(run.anchor, RANKS[label])
            for anchor in program.finished:
                set_rank(anchor, RANKS[label])
        return True

    def release(self, program: Program) -> None:
        """Give up the finished prompts of the program and of its children, who become INACTIVE.

        A later request without a label starts it anew, as if it had never been here.
        """
        for member in list(program.family()):
            self._release(member)
        if program.parent is not None:
            program.parent.children.remove(program)
            program.parent = None

    def _release(self, program: Program) -> None:
        self.relabel(program.name, Label.INACTIVE, None)
        program.released = True
        for anchor in program.finished:
            place(anchor, None)
        for run in program.runs.values():
            run.suspended.clear()
        program.finished.clear()
        for child in program.children:
            child.parent = None
        program.children.clear()

    def forget_places(self) -> None:
        """The tree was emptied: nobody holds anything."""
        for program in self._programs.values():
            for run in program.runs.values():
                run.anchor.node, run.published = None, False
                run.suspended.clear()
            program.finished.clear()

    def _find_or_add(self, name: str) -> Program:
        program = self._programs.pop(name, None) or Program(name)
        self._programs[name] = program  # last in order: most recently used
        if len(self._programs) > self._prune_at:
            self._prune()
        return program

    def _prune(self) -> None:
        idle = [name for name, program in self._programs.items() if program.holds_nothing]
        for name in idle[: len(idle) // 2]:  # never the last, which is being used
            program = self._programs.pop(name)
            if program.parent is not None:
                program.parent.children.remove(program)
        # Where all hold something, look again only after a good many more.
        self._prune_at = max(_MAX_PROGRAMS, len(self._programs) * 9 // 8)


def _checked(label: Label) -> Label:
    try:
        return Label(label)
    except ValueError:
        raise TreeError(f"label {label!r}; use one of {', '.join(Label)}") from None
