"""What a tier manager has done, in pages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    hbm_hit: int = 0
    """Pages of opened prompts that were in HBM."""
    dram_hit: int = 0
    """Pages of opened prompts that were in DRAM, or on their way up."""
    loaded: int = 0
    load_failed: int = 0
    written_back: int = 0
    """Copied down because their room was needed, or might be soon."""
    demoted: int = 0
    """Copied down ahead of need."""
    write_failed: int = 0
    dropped: int = 0
    """Lost with their last copy."""
