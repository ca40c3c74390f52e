"""The simulator: the real scheduling core over modelled engines, links and clients."""

from kvtier.sim.link import CopyPath
from kvtier.sim.result import simulate
from kvtier.sim.settings import SimSettings
from kvtier.sim.workload import Gaps, Mode

__all__ = ["CopyPath", "Gaps", "Mode", "SimSettings", "simulate"]
