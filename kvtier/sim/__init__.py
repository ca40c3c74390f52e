"""The simulator: the real scheduling core over modelled engines, links and clients."""

from kvtier.sim.result import simulate
from kvtier.sim.settings import SimSettings
from kvtier.sim.workload import Gaps, Mode
from kvtier.transfer.link import CopyPath

__all__ = ["CopyPath", "Gaps", "Mode", "SimSettings", "simulate"]
