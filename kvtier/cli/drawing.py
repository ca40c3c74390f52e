"""Synthetic traces for the commands, with a word on stderr when the draw takes long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.cli.output import note

if TYPE_CHECKING:
    from kvtier.traces import Trace

# About ten seconds of work.
_SLOW_PROGRAMS = 5_000


def draw(profile: str, num_programs: int, seed: int) -> Trace:
    """`synth`, announced when there are many programs. Raises what `synth` raises."""
    from kvtier.traces import PROFILES, synth

    if profile in PROFILES and num_programs >= _SLOW_PROGRAMS:
        note(f"drawing {num_programs:,} programs of {profile}, seed {seed}")
    return synth(profile, num_programs, seed)
