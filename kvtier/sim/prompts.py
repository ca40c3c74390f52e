"""What is in the simulated prompts, page by page, as the radix tree needs to know it.

A page's content is one number: equal numbers are equal pages. Programs of a group have the pages
of its head in common; all others are a program's own.
"""

from __future__ import annotations

import numpy as np

from kvtier.tree.keys import Tokens

_NONE: Tokens = np.empty(0, np.int32)


class Prompts:
    """The current prompt of every program, the same on all workers."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._heads: dict[str, Tokens] = {}
        self._programs: dict[str, Tokens] = {}
        self._next = 0

    def next_prompt(
        self,
        program: str,
        context_tokens: int,
        reused_tokens: int,
        group: str | None = None,
        head_tokens: int = 0,
    ) -> Tokens:
        """int32[pages]: the whole pages of a prompt of `context_tokens`.

        Its first `head_tokens` are those of the group's head. Of the program's last prompt it
        repeats the pages within its first `reused_tokens`; the rest is new.
        """
        num_pages = context_tokens // self._page_size
        shared = self._head(group, min(head_tokens, context_tokens) // self._page_size)
        before = self._programs.get(program, _NONE)
        repeated = before[shared.size : min(reused_tokens // self._page_size, num_pages)]
        prompt = np.concatenate([shared, repeated])
        return self._extended(program, prompt, num_pages)

    def with_output(self, program: str, context_tokens: int) -> Tokens:
        """The program's prompt and what was generated after it, `context_tokens` in all."""
        return self._extended(
            program, self._programs.get(program, _NONE), context_tokens // self._page_size
        )

    def forget(self, program: str) -> None:
        """The program has ended."""
        self._programs.pop(program, None)

    def _head(self, group: str | None, num_pages: int) -> Tokens:
        if group is None:
            return _NONE
        head = self._heads.get(group, _NONE)
        if head.size < num_pages:
            head = self._heads[group] = np.concatenate([head, self._new(num_pages - head.size)])
        return head[:num_pages]

    def _extended(self, program: str, prompt: Tokens, num_pages: int) -> Tokens:
        if prompt.size < num_pages:
            prompt = np.concatenate([prompt, self._new(num_pages - prompt.size)])
        self._programs[program] = prompt = prompt[:num_pages]
        return prompt

    def _new(self, num_pages: int) -> Tokens:
        first, self._next = self._next, self._next + num_pages
        return np.arange(first, self._next, dtype=np.int32)
