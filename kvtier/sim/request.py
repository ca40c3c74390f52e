"""A request inside an engine, and an engine's limits and totals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvtier.tiering.lease import Lease
from kvtier.tree.keys import Tokens


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One model call inside an engine. Token counts include the shared head."""

    request: str
    program: str
    context_tokens: int
    output_tokens: int
    reused_tokens: int
    """Leading prompt tokens that the program, or its group's head, has computed before."""
    group: str | None = None
    head_tokens: int = 0
    on_first_token: Callable[[float], None] = lambda now_s: None
    on_finish: Callable[[float], None] = lambda now_s: None
    produced: int = 0
    reported: int = 0
    """Produced tokens that the scheduler has been told of."""
    prefill_left: int = 0
    joined_step: int = 0
    order: int = 0
    prompt: Tokens = field(default_factory=lambda: np.empty(0, np.int32))
    """Its whole pages, see Prompts; set when the engine gets it."""
    lease: Lease | None = None


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Batching limits. Defaults follow SGLang's."""

    chunk_tokens: int = 8192
    """Prefill tokens per step."""
    max_running: int = 256
    """Requests in the batch."""
    reserve_tokens: int = 256
    """Room kept per running request for tokens to come, at admission."""


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start. Tokens unless the name says otherwise."""

    prompt: int = 0
    hbm_hit: int = 0
    dram_hit: int = 0
    prefilled: int = 0
    recomputed: int = 0
    output: int = 0
    finished_requests: int = 0
    retractions: int = 0
    truncated: int = 0
    busy_s: float = 0.0
