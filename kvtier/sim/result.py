"""One run's figures, as they are printed, plotted and written to results.json."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from kvtier.ids import Direction
from kvtier.sim.driver import Simulation
from kvtier.sim.record import total
from kvtier.sim.settings import SimSettings
from kvtier.sim.workload import plan_programs
from kvtier.traces import Trace


def simulate(
    trace: Trace,
    settings: SimSettings,
    on_progress: Callable[[float, int], None] = lambda now_s, num_ended: None,
) -> dict[str, Any]:
    """Replay `trace` under one policy; returns the run's record (docs/replay.md lists its fields).

    `on_progress(now_s, num_ended)` is called once a tick. An interrupt ends the run early, and its
    record says `partial`. Raises CapacityError when the model does not fit, UnknownNameError for
    an unknown policy or admission.
    """
    plans = plan_programs(trace, settings.model.max_context, settings.gaps, settings.gap_cap_s)
    simulation = Simulation(settings, plans, on_progress)
    simulation.run()
    return summarize_run(simulation, trace)


def summarize_run(simulation: Simulation, trace: Trace) -> dict[str, Any]:
    """The record of a finished simulation: plain numbers, strings, lists."""
    return {
        **_conditions(simulation, trace),
        **_engine_figures(simulation),
        **_program_figures(simulation),
        "series": simulation.recorder.series,
    }


def _conditions(simulation: Simulation, trace: Trace) -> dict[str, Any]:
    settings, engines = simulation.settings, simulation.engines.values()
    return {
        "policy": settings.policy,
        "admission": simulation.scheduler.admission.name,
        "seed": settings.seed,
        "programs": settings.num_programs,
        "mode": settings.mode.value,
        "simulated": True,
        "partial": simulation.recorder.partial,
        "model": settings.model.name,
        "gpu": settings.gpu.name,
        "tp": settings.tp,
        "workers": settings.num_workers,
        "dram_ratio": settings.dram_ratio,
        "gaps": settings.gaps.value,
        "trace_sha256": trace.sha256,
        "hbm_tokens": sum(e.cache.capacity for e in engines),
        "dram_tokens": sum(e.cache.dram_capacity for e in engines),
    }


def _engine_figures(simulation: Simulation) -> dict[str, Any]:
    recorder, engines = simulation.recorder, simulation.engines.values()
    sums = total(engines)
    seconds = recorder.end_s or math.inf
    return {
        "simulated_s": recorder.end_s,
        "makespan_s": recorder.end_s if recorder.ran_out else None,
        "output_tok_per_s": sums.output / seconds,
        "steps_per_min": 60.0 * recorder.steps / seconds,
        **_ttft(recorder.ttft_s + recorder.unanswered_s),
        "num_unanswered": len(recorder.unanswered_s),
        "hit_rate_hbm": _share(sums.hbm_hit, sums.prompt),
        "hit_rate_dram": _share(sums.dram_hit, sums.prompt),
        "prompt_tokens": sums.prompt,
        "output_tokens": sums.output,
        "prefilled_tokens": sums.prefilled,
        "recomputed_tokens": sums.recomputed,
        "d2h_bytes": sum(e.cache.link.moved_bytes[Direction.D2H] for e in engines),
        "h2d_bytes": sum(e.cache.link.moved_bytes[Direction.H2D] for e in engines),
        "gpu_busy_share": sums.busy_s / (seconds * simulation.settings.num_workers),
        "held_s_per_step": recorder.held_s / max(recorder.steps, 1),
    }


def _program_figures(simulation: Simulation) -> dict[str, Any]:
    recorder, sums = simulation.recorder, total(simulation.engines.values())
    moves = recorder.moves["demote"] + recorder.moves["promote"] + recorder.moves["drop"]
    return {
        "moves_per_program": moves / max(recorder.programs, 1),
        "demotions": recorder.moves["demote"],
        "promotions": recorder.moves["promote"],
        "drops": recorder.moves["drop"],
        "refused_moves": recorder.moves["refused"],
        "switches": recorder.switches,
        "retractions": sums.retractions,
        "truncated_requests": sums.truncated,
        "rejected_requests": recorder.rejected,
        "compactions": recorder.compactions,
        "steps": recorder.steps,
        "programs_started": recorder.programs,
        "programs_ended": recorder.programs_ended,
        "subagents_started": recorder.subagents,
    }


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _ttft(values: list[float]) -> dict[str, float | None]:
    """Percentiles in seconds; a request still without a first token counts at its age."""
    names = {"ttft_p50_s": 50, "ttft_p90_s": 90, "ttft_p99_s": 99}
    if not values:
        return dict.fromkeys(names)
    return {name: float(np.percentile(values, q)) for name, q in names.items()}
