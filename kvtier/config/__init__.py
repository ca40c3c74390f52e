"""The configuration: one frozen tree, and where each effective value comes from."""

from kvtier.config.model import (
    AdmissionConfig,
    Config,
    EngineConfig,
    ReplayConfig,
    SchedulerConfig,
)
from kvtier.config.reference import Setting, list_settings, reference_markdown
from kvtier.config.resolve import Resolved, resolve

__all__ = [
    "AdmissionConfig",
    "Config",
    "EngineConfig",
    "ReplayConfig",
    "Resolved",
    "SchedulerConfig",
    "Setting",
    "list_settings",
    "reference_markdown",
    "resolve",
]
