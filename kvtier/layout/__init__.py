"""Shapes of models and of the KV they keep: bytes per token, per page and per fragment."""

from kvtier.layout.kv import KVDtype, KVLayout, Segment
from kvtier.layout.model import AttentionKind, MlaShape, ModelSpec
from kvtier.layout.presets import known_models, load_model

__all__ = [
    "AttentionKind",
    "KVDtype",
    "KVLayout",
    "MlaShape",
    "ModelSpec",
    "Segment",
    "known_models",
    "load_model",
]
