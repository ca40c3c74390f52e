"""KV-cache tiering runtime for LLM agents."""

from kvtier._version import __version__

__all__ = ["__version__"]
