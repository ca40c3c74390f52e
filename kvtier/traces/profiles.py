"""Workload profiles for `synth`: distributions of steps, sizes and gaps, each with its source.

Sources, by short name:
    MORI          its Fig 3: tool calls of Claude Code on SWE-bench Pro, n = 16,886
    GLM runs      AgentCgroup: autonomous SWE tasks run by Claude Code, self-hosted model
    sessions      public Claude Code sessions of one company (entireio/cli), 172 in the step table
    TraceLab      its published tables: 4,265 Claude Code and Codex sessions
    CONCUR        its Fig 1 and batch set-up: ReAct agents submitted together
    Continuum     its Table 2: tool times on SWE-Bench
A point without a source is a bound that the sources leave open, set so that the figures the
source does give (named in the profile) come out.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass

from kvtier.errors import UnknownNameError


@dataclass(frozen=True)
class Quantiles:
    """A distribution given by (probability, value) points from 0 to 1, values > 0 and rising.

    Between two points the logarithm of the value is linear, so that a long tail keeps its shape.
    """

    points: tuple[tuple[float, float], ...]

    def at(self, probability: float) -> float:
        """The value below which a share `probability` (0 to 1) of draws fall."""
        right = max(1, bisect_left(self.points, (probability, -math.inf)))
        right = min(right, len(self.points) - 1)
        (p0, v0), (p1, v1) = self.points[right - 1], self.points[right]
        share = (probability - p0) / (p1 - p0)
        return math.exp(math.log(v0) + share * (math.log(v1) - math.log(v0)))


@dataclass(frozen=True)
class ToolMix:
    """Names of the tools behind gaps of up to `below_s` seconds, with their weights."""

    below_s: float
    names: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Profile:
    """The distributions of one workload.

    `gap_s` and `prompt_gap_s` are gaps that end in a tool result or a person's prompt; a gap is
    a prompt with probability `prompt_share`. `gap_persistence` is the correlation of a tool gap
    with the one before, on the normal scale of its quantile. `append_tokens` is what a gap adds
    to the context (tool result or prompt). A context that would pass the program's limit, drawn
    from `compact_at_tokens`, is compacted to a size drawn from `compact_to_tokens`.
    """

    name: str
    num_steps: Quantiles
    first_context_tokens: Quantiles
    append_tokens: Quantiles
    output_tokens: Quantiles
    reason_s: Quantiles
    gap_s: Quantiles
    gap_persistence: float
    tools: tuple[ToolMix, ...]
    shared_tokens: int
    prompt_share: float = 0.0
    prompt_gap_s: Quantiles | None = None
    compact_at_tokens: Quantiles | None = None
    compact_to_tokens: Quantiles | None = None
    compact_gap_s: Quantiles | None = None


# sessions: compaction boundaries at 155,000 to 177,000 tokens; right after one p10/p50/p90 of
# 41.5k/51.8k/61.5k tokens and a gap of 49/72/158 s, which holds the call that writes the summary
_COMPACT_AT = Quantiles(((0.0, 155_000), (1.0, 177_000)))
_COMPACT_TO = Quantiles(((0.0, 31_000), (0.1, 41_500), (0.5, 51_800), (0.9, 61_500), (1.0, 71_000)))
_COMPACT_GAP_S = Quantiles(((0.0, 35), (0.1, 49), (0.5, 72), (0.9, 158), (1.0, 248)))

# sessions: median Read 0.04 s, Edit 0.11 s, Bash 2.45 s, Task (sub-agent) 65 s; counts 4,509,
# 3,846, 5,467 and 202
_CODING_TOOLS = (
    ToolMix(0.2, (("Read", 55), ("Edit", 30), ("Grep", 15))),
    ToolMix(30.0, (("Bash", 75), ("Edit", 20), ("Read", 5))),
    ToolMix(math.inf, (("Bash", 65), ("Task", 25), ("Edit", 10))),
)

CODING_AUTONOMOUS = Profile(
    name="coding-autonomous",
    # GLM runs: calls per session p10/p50/p90/max 17/44/91/144
    num_steps=Quantiles(((0.0, 8), (0.1, 17), (0.5, 44), (0.9, 91), (1.0, 144))),
    # GLM runs: contexts of all calls p10/p50/p90/max 20k/42k/73k/127k, which these starts and
    # additions give; at least the 15k head that sessions share
    first_context_tokens=Quantiles(((0.0, 15_500), (0.5, 18_000), (0.9, 24_000), (1.0, 41_000))),
    append_tokens=Quantiles(((0.0, 20), (0.1, 70), (0.5, 270), (0.9, 900), (1.0, 4_000))),
    # sessions: output by text length p10/p50/p90 37/117/677 tokens
    output_tokens=Quantiles(((0.0, 10), (0.1, 37), (0.5, 117), (0.9, 677), (1.0, 2_500))),
    # GLM runs: model time p10/p50/p90/p99 1.1/3.6/12.6/27 s
    reason_s=Quantiles(((0.0, 0.5), (0.1, 1.1), (0.5, 3.6), (0.9, 12.6), (0.99, 27), (1.0, 60))),
    # MORI: P50 1.096 s, P90 2.034 s, P99 19.98 s, P99.95 83.6 s; 13 % of calls take more than
    # 2 s, which are 58 % of the time (the lower bound is set to meet that share)
    gap_s=Quantiles(
        (
            (0.0, 0.3),
            (0.5, 1.096),
            (0.87, 2.0),
            (0.9, 2.034),
            (0.99, 19.98),
            (0.9995, 83.6),
            (1.0, 120),
        )
    ),
    # GLM runs: median lag-1 correlation of the log gap 0.30, as short programs estimate it
    gap_persistence=0.38,
    tools=_CODING_TOOLS,
    # sessions: about 15k tokens of tools and system text are shared
    shared_tokens=15_000,
    compact_at_tokens=_COMPACT_AT,
    compact_to_tokens=_COMPACT_TO,
    compact_gap_s=_COMPACT_GAP_S,
)

CODING_INTERACTIVE = Profile(
    name="coding-interactive",
    # sessions: calls per session p10/p50/p90/max 9/45/165/288
    num_steps=Quantiles(((0.0, 1), (0.1, 9), (0.5, 45), (0.9, 165), (1.0, 288))),
    # sessions: first context 24k to 44k for 97 % of them, p10/p50/p90 26.6k/41.2k/44.2k; with
    # the additions below the contexts of all calls are near p10/p50/p90 49k/93k/142k
    first_context_tokens=Quantiles(((0.0, 24_000), (0.1, 26_600), (0.5, 41_200), (1.0, 44_500))),
    append_tokens=Quantiles(((0.0, 15), (0.1, 120), (0.5, 430), (0.9, 1_900), (1.0, 25_000))),
    output_tokens=CODING_AUTONOMOUS.output_tokens,
    # sessions: model time p10/p50/p90/p99 3.4/5.3/13.7/46 s
    reason_s=Quantiles(((0.0, 1.5), (0.1, 3.4), (0.5, 5.3), (0.9, 13.7), (0.99, 46), (1.0, 200))),
    # TraceLab, per step: P50 0.1 s, P90 10 s, P99 192 s
    gap_s=Quantiles(((0.0, 0.003), (0.5, 0.1), (0.9, 10), (0.99, 192), (1.0, 3_600))),
    # sessions: median lag-1 correlation of the log tool gap 0.15, as short programs estimate it
    gap_persistence=0.17,
    tools=_CODING_TOOLS,
    shared_tokens=15_000,
    # TraceLab: 8.8 steps per user request; human waits P50 86 s, P90 21 min, P99 14 h
    prompt_share=1 / 8.8,
    prompt_gap_s=Quantiles(((0.0, 3), (0.5, 86), (0.9, 1_260), (0.99, 50_400), (1.0, 100_000))),
    compact_at_tokens=_COMPACT_AT,
    compact_to_tokens=_COMPACT_TO,
    compact_gap_s=_COMPACT_GAP_S,
)

BATCH_REACT = Profile(
    name="batch-react",
    # CONCUR: KV of about 1.5 GB by step 10 on Qwen3-32B, 256 KiB a token: about 6k tokens
    num_steps=Quantiles(((0.0, 8), (0.5, 10), (1.0, 12))),
    first_context_tokens=Quantiles(((0.0, 1_100), (0.5, 1_200), (1.0, 1_350))),
    append_tokens=Quantiles(((0.0, 150), (0.5, 410), (1.0, 900))),
    output_tokens=Quantiles(((0.0, 40), (0.5, 100), (1.0, 220))),
    # about 100 tokens at the 40.7 tokens/s median decode rate of TraceLab
    reason_s=Quantiles(((0.0, 1), (0.5, 2.5), (1.0, 6))),
    # Continuum: mean 0.925 s, standard deviation 3.55
    gap_s=Quantiles(((0.0, 0.05), (0.5, 0.35), (0.9, 1.6), (0.99, 10), (1.0, 40))),
    gap_persistence=0.0,
    tools=(ToolMix(math.inf, (("search", 70), ("lookup", 20), ("finish", 10))),),
    # prompt text and few-shot examples that all agents of a batch share
    shared_tokens=1_000,
)

PROFILES = {p.name: p for p in (CODING_AUTONOMOUS, CODING_INTERACTIVE, BATCH_REACT)}


def find_profile(name: str) -> Profile:
    """The profile of that name; UnknownNameError names the nearest one otherwise."""
    if name not in PROFILES:
        raise UnknownNameError("profile", name, PROFILES)
    return PROFILES[name]
