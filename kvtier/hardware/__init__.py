"""GPUs known by name, and how many tokens of KV fit beside a model's weights."""

from kvtier.hardware.capacity import kv_capacity_tokens
from kvtier.hardware.gpu import GpuSpec, known_gpus, load_gpu

__all__ = ["GpuSpec", "known_gpus", "kv_capacity_tokens", "load_gpu"]
