"""Agent traces: load, check, summarise, synthesise and write them (docs/traces.md)."""

from kvtier.traces.load import load
from kvtier.traces.model import (
    GapKind,
    ProgramTrace,
    Step,
    ToolCall,
    Trace,
    build_trace,
    check,
    digest,
)
from kvtier.traces.native import native_target, write_native
from kvtier.traces.profiles import PROFILES, Profile
from kvtier.traces.summary import summarize
from kvtier.traces.synth import synth

__all__ = [
    "PROFILES",
    "GapKind",
    "Profile",
    "ProgramTrace",
    "Step",
    "ToolCall",
    "Trace",
    "build_trace",
    "check",
    "digest",
    "load",
    "native_target",
    "summarize",
    "synth",
    "write_native",
]
