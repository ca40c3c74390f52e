"""What one simulated run is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.hardware import GpuSpec
from kvtier.layout import ModelSpec
from kvtier.scheduling import ConcurSettings, SchedulerSettings
from kvtier.sim.cost import Efficiency
from kvtier.sim.request import EngineSettings
from kvtier.sim.workload import Gaps, Mode
from kvtier.transfer.link import CopyPath


@dataclass(frozen=True, slots=True)
class SimSettings:
    """One run: one policy, one admission, one seed."""

    policy: str
    model: ModelSpec
    gpu: GpuSpec
    admission: str = "none"
    tp: int = 1
    num_workers: int = 1
    num_programs: int = 60
    mode: Mode = Mode.CLOSED
    duration_s: float = 3600.0
    """Simulated seconds; batch mode runs until all programs have ended."""
    dram_ratio: float = 1.0
    """DRAM for KV as a multiple of HBM for KV."""
    gaps: Gaps = Gaps.CAPPED
    gap_cap_s: float = 60.0
    seed: int = 0
    ramp_s: float = 60.0
    """Closed loop: the slots open evenly over this time."""
    mem_fraction: float = 0.88
    page_size: int = 64
    copy_path: CopyPath = CopyPath.STAGED
    sample_s: float = 5.0
    """Distance of the points of the recorded series."""
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    concur: ConcurSettings = field(default_factory=ConcurSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    efficiency: Efficiency = field(default_factory=Efficiency)
