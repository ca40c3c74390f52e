"""Tiering for research code: programs, their inferences, and pages that go where they belong."""

from kvtier.runtime.inference import Inference, Program
from kvtier.runtime.runtime import TieredRuntime

__all__ = ["Inference", "Program", "TieredRuntime"]
