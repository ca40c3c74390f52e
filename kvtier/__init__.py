"""KV-cache tiering runtime for LLM agents."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvtier._version import __version__

if TYPE_CHECKING:
    from kvtier.runtime import TieredRuntime

__all__ = ["TieredRuntime", "__version__"]


def __getattr__(name: str) -> Any:
    # Not before it is asked for: the command line and the schedulers need no torch.
    if name == "TieredRuntime":
        return import_module("kvtier.runtime").TieredRuntime
    raise AttributeError(f"module 'kvtier' has no attribute {name!r}")
