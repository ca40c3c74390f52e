"""Small traces, and a GPU whose HBM holds a chosen number of KV tokens."""

from __future__ import annotations

import math
from dataclasses import replace

from kvtier.hardware import GpuSpec, kv_capacity_tokens, load_gpu
from kvtier.layout import ModelSpec, load_model
from kvtier.traces import GapKind, ProgramTrace, Step, ToolCall, Trace, build_trace

MODEL: ModelSpec = load_model("Qwen2.5-7B")
MEM_FRACTION = 0.88


def gpu_with(hbm_tokens: int) -> GpuSpec:
    """An H200 cut down to `hbm_tokens` of KV beside the weights of MODEL."""
    needed = MODEL.weight_bytes + (hbm_tokens + 0.5) * MODEL.layout().bytes_per_token
    gpu = replace(load_gpu("H200"), hbm_bytes=math.ceil(needed / MEM_FRACTION))
    assert kv_capacity_tokens(MODEL, gpu, 1, MEM_FRACTION) == hbm_tokens
    return gpu


def program(
    name: str,
    contexts: list[int],
    *,
    output: int = 50,
    gap_s: float = 1.0,
    kind: GapKind = GapKind.TOOL,
    start_s: float = 0.0,
    parent: str | None = None,
    group: str | None = None,
    shared: int = 0,
    reason_s: float | None = None,
) -> ProgramTrace:
    """A program that reuses all it can: each prompt extends the one before where it is longer."""
    steps = []
    for index, context in enumerate(contexts):
        last = index == len(contexts) - 1
        before = contexts[index - 1] + output if index else 0
        reused = min(before, context) if context >= before else min(shared, context)
        steps.append(
            Step(
                context_tokens=context,
                output_tokens=output,
                reused_tokens=reused if index else 0,
                gap_s=0.0 if last else gap_s,
                gap_kind=GapKind.END if last else kind,
                tools=(ToolCall("bash", gap_s),) if kind is GapKind.TOOL and not last else (),
                reason_s=reason_s,
            )
        )
    return ProgramTrace(name, tuple(steps), start_s, parent, group, shared)


def trace_of(*programs: ProgramTrace) -> Trace:
    return build_trace("test", programs, {}, "test")
