"""Who holds what, by the rules alone: each prompt is the tokens of its path, nothing is counted.

A request that was aborted leaves nothing behind but its relabelling: what is held is what would be
held had it never come.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvtier.ids import Label

from .plain_tree import Path


@dataclass(eq=False)
class Prompt:
    """`later` are the program's requests that came when this prompt had ended well."""

    path: Path
    published: bool = False
    later: set[str] = field(default_factory=set)


@dataclass(eq=False)
class Known:
    """What is known of a program."""

    label: Label = Label.BUSY
    epoch: int = 0
    released: bool = False
    running: dict[str, Prompt] = field(default_factory=dict)
    finished: list[Prompt] = field(default_factory=list)

    def prompts(self) -> Iterator[Prompt]:
        yield from self.running.values()
        yield from self.finished

    def held(self) -> list[Path]:
        """Prompts that label nodes: an earlier one does not while a later one is there."""
        return [prompt.path for prompt in self.prompts() if not prompt.later]


class Holders:
    def __init__(self) -> None:
        self.programs: dict[str, Known] = {}

    def running(self, request: str) -> str | None:
        """The program whose request it is."""
        return next((n for n, known in self.programs.items() if request in known.running), None)

    def all_running(self) -> list[str]:
        return [request for known in self.programs.values() for request in known.running]

    def begin(self, request: str, name: str, path: Path, *, labelled: bool = False) -> None:
        known = self.programs.setdefault(name, Known())
        if known.released and not labelled:
            self.relabel(name, Label.BUSY, None)
        for prompt in known.finished:
            prompt.later.add(request)
        known.running[request] = Prompt(path)

    def matched(self, request: str, path: Path) -> None:
        prompt = self._prompt(request)
        if prompt is not None and not prompt.published:
            prompt.path = path

    def published(self, request: str, path: Path) -> None:
        prompt = self._prompt(request)
        if prompt is not None:
            prompt.published, prompt.path = True, path

    def retracted(self, request: str) -> None:
        prompt = self._prompt(request)
        if prompt is not None:
            prompt.published = False

    def ended(self, request: str, well: bool) -> None:
        name = self.running(request)
        if name is None:
            return
        known = self.programs[name]
        ended = known.running.pop(request)
        if well:
            known.finished = [p for p in known.finished if request not in p.later] + [ended]
        for prompt in known.finished:
            prompt.later.discard(request)

    def relabel(self, name: str, label: Label, epoch: int | None) -> bool:
        known = self.programs.setdefault(name, Known())
        if epoch is not None:
            if epoch < known.epoch:
                return False
            known.epoch = epoch
        known.label, known.released = label, False
        return True

    def release(self, name: str) -> None:
        known = self.programs[name]
        known.finished.clear()
        known.label, known.released = Label.INACTIVE, True

    def deleted(self, path: Path, parent: Path) -> None:
        """Prompts that ended at the leaf end at its parent."""
        for known in self.programs.values():
            for prompt in known.prompts():
                if prompt.path == path:
                    prompt.path = parent

    def emptied(self) -> None:
        """The tree was emptied."""
        for known in self.programs.values():
            known.finished.clear()
            for prompt in known.running.values():
                prompt.published, prompt.path = False, ()

    def counts(self, path: Path) -> list[int]:
        """Prompts that hold the node with this path: INACTIVE, IDLE, BUSY."""
        counts = dict.fromkeys((Label.INACTIVE, Label.IDLE, Label.BUSY), 0)
        for known in self.programs.values():
            counts[known.label] += sum(held[: len(path)] == path for held in known.held())
        return list(counts.values())

    def num_ends(self, path: Path) -> int:
        """Prompts that end at the node with this path, those that label nothing included."""
        everyone = self.programs.values()
        return sum(prompt.path == path for known in everyone for prompt in known.prompts())

    def private(self, name: str, path: Path) -> bool | None:
        """Whether nobody else holds the node; None where the program does not hold it."""
        own = sum(held[: len(path)] == path for held in self.programs[name].held())
        return own == sum(self.counts(path)) if own else None

    def _prompt(self, request: str) -> Prompt | None:
        name = self.running(request)
        return None if name is None else self.programs[name].running[request]
