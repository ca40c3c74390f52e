"""Traces drawn from a workload profile: no data file needed, same seed same bytes."""

import random
from dataclasses import dataclass, field
from statistics import NormalDist

from kvtier.errors import ConfigError
from kvtier.traces.model import GapKind, ProgramTrace, Step, ToolCall, Trace, build_trace
from kvtier.traces.profiles import Profile, Quantiles, find_profile
from kvtier.traces.reuse import reused_tokens

FORMAT = "synthetic"
_NORMAL = NormalDist()


def synth(profile: str | Profile, num_programs: int, seed: int) -> Trace:
    """Draw `num_programs` programs; the same arguments give the same trace, byte for byte.

    All programs start at 0: who is let in when is the replay's choice. Model times are draws,
    too. Program i depends on the profile, the seed and i alone, so that a larger trace begins
    with the smaller one. Raises UnknownNameError for an unknown profile, ConfigError when
    `num_programs` is below 1.
    """
    chosen = find_profile(profile) if isinstance(profile, str) else profile
    if num_programs < 1:
        raise ConfigError(f"programs={num_programs}: a trace needs at least one program")
    programs = [_draw_program(chosen, index, seed) for index in range(num_programs)]
    return build_trace(FORMAT, programs, {}, f"{chosen.name}-n{num_programs}-s{seed}")


def _draw_program(profile: Profile, index: int, seed: int) -> ProgramTrace:
    draw = _Draw(profile, f"{profile.name}/{seed}/{index}")
    return ProgramTrace(
        program=f"{profile.name}-{index:05d}",
        steps=tuple(draw.steps()),
        start_s=0.0,
        shared_group=f"synth-{profile.name}",
        shared_tokens=profile.shared_tokens,
    )


@dataclass
class _Draw:
    """The random sources of one program, one per quantity, and the state that links its steps."""

    profile: Profile
    name: str
    sources: dict[str, random.Random] = field(default_factory=dict)
    latent: float | None = None
    limit_tokens: float | None = None

    def source(self, quantity: str) -> random.Random:
        if quantity not in self.sources:
            self.sources[quantity] = random.Random(f"{self.name}/{quantity}")
        return self.sources[quantity]

    def number(self, quantity: str, quantiles: Quantiles) -> float:
        return quantiles.at(self.source(quantity).random())

    def whole(self, quantity: str, quantiles: Quantiles) -> int:
        return round(self.number(quantity, quantiles))

    def steps(self) -> list[Step]:
        profile = self.profile
        remaining = self.whole("num_steps", profile.num_steps)
        context_tokens = self.whole("first_context", profile.first_context_tokens)
        reused = 0
        steps: list[Step] = []
        while True:
            remaining -= 1
            output = self.whole("output", profile.output_tokens)
            grown = context_tokens + output + self.whole("append", profile.append_tokens)
            kind = GapKind.END if remaining == 0 else self.gap_kind(grown)
            steps.append(self.step(context_tokens, output, reused, kind))
            if kind is GapKind.END:
                return steps
            before = context_tokens, output
            compacted = kind is GapKind.COMPACT
            context_tokens = self.compact_size() if compacted else grown
            reused = reused_tokens(
                before, context_tokens, profile.shared_tokens, compacted=compacted
            )

    def gap_kind(self, grown_tokens: int) -> GapKind:
        if self.profile.compact_at_tokens is not None:
            if self.limit_tokens is None:
                self.limit_tokens = self.number("compact_at", self.profile.compact_at_tokens)
            if grown_tokens > self.limit_tokens:
                return GapKind.COMPACT
        is_prompt = self.source("prompt").random() < self.profile.prompt_share
        return GapKind.PROMPT if is_prompt else GapKind.TOOL

    def step(self, context_tokens: int, output: int, reused: int, kind: GapKind) -> Step:
        gap_s = self.gap_s(kind)
        return Step(
            context_tokens=context_tokens,
            output_tokens=output,
            reused_tokens=reused,
            gap_s=gap_s,
            gap_kind=kind,
            tools=(ToolCall(self.tool_name(gap_s), gap_s),) if kind is GapKind.TOOL else (),
            reason_s=_milliseconds(self.number("reason", self.profile.reason_s)),
        )

    def gap_s(self, kind: GapKind) -> float:
        profile = self.profile
        if kind is GapKind.TOOL:
            return _milliseconds(profile.gap_s.at(self.linked_probability()))
        if kind is GapKind.PROMPT and profile.prompt_gap_s is not None:
            return _milliseconds(self.number("prompt_gap", profile.prompt_gap_s))
        if kind is GapKind.COMPACT and profile.compact_gap_s is not None:
            return _milliseconds(self.number("compact_gap", profile.compact_gap_s))
        return 0.0

    def linked_probability(self) -> float:
        """A uniform draw that is correlated with the one before (a Gaussian AR(1) underneath)."""
        rho = self.profile.gap_persistence
        noise = self.source("gap").gauss(0.0, 1.0)
        if self.latent is None:
            self.latent = noise
        else:
            self.latent = rho * self.latent + (1.0 - rho * rho) ** 0.5 * noise
        return _NORMAL.cdf(self.latent)

    def compact_size(self) -> int:
        to = self.profile.compact_to_tokens
        if to is None:
            raise ConfigError(f"profile {self.profile.name}: compact_to_tokens is missing; set it")
        return self.whole("compact_to", to)

    def tool_name(self, gap_s: float) -> str:
        mix = next(m for m in self.profile.tools if gap_s < m.below_s)
        names = [name for name, _ in mix.names]
        weights = [weight for _, weight in mix.names]
        return self.source("tool").choices(names, weights)[0]


def _milliseconds(seconds: float) -> float:
    return round(seconds, 3)
