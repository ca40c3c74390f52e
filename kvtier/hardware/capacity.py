"""Tokens of KV that fit into HBM beside a model's weights."""

from kvtier.errors import CapacityError, ConfigError
from kvtier.hardware.gpu import GpuSpec
from kvtier.layout import KVDtype, ModelSpec

_GB = 10**9


def kv_capacity_tokens(
    model: ModelSpec,
    gpu: GpuSpec,
    tp: int,
    mem_fraction: float,
    *,
    page_size: int = 1,
    dtype: KVDtype = KVDtype.BF16,
) -> int:
    """Tokens of KV in the HBM of `tp` GPUs, whole tokens over all ranks.

    `mem_fraction` of the HBM holds weights and KV; weights are split over the ranks, and so is
    KV except for the parts that `ModelSpec.layout` replicates. Raises CapacityError when the
    weights do not fit or less than one page of `page_size` tokens remains, ConfigError when
    `mem_fraction` or `tp` is out of range.
    """
    if not 0 < mem_fraction <= 1:
        raise ConfigError(f"mem_fraction={mem_fraction} must be above 0 and at most 1")
    usable_bytes = int(mem_fraction * gpu.hbm_bytes * tp)
    tokens = _tokens_in(model, usable_bytes, tp, dtype)
    if tokens >= page_size:
        return tokens
    raise CapacityError(
        f"{model.name} needs {model.weight_bytes / _GB:.1f} GB for weights and at least "
        f"{page_size} tokens of KV, but {tp} x {gpu.name} give {usable_bytes / _GB:.1f} GB "
        f"(mem_fraction {mem_fraction}); {_way_out(model, usable_bytes // tp, page_size, dtype)}"
    )


def _tokens_in(model: ModelSpec, usable_bytes: int, tp: int, dtype: KVDtype) -> int:
    left_bytes = usable_bytes - model.weight_bytes
    return left_bytes // model.layout(tp, dtype=dtype).bytes_per_token_all_ranks


def _way_out(model: ModelSpec, bytes_per_gpu: int, page_size: int, dtype: KVDtype) -> str:
    """What to change: the smallest doubling of `tp` that fits, and what else would help."""
    others = "a GPU with more memory"
    if model.weight_dtype_bytes > 1:
        others = "fp8 weights or a GPU with more memory"
    tp = 2
    while tp <= model.num_q_heads and model.num_q_heads % tp == 0:
        if _tokens_in(model, bytes_per_gpu * tp, tp, dtype) >= page_size:
            return f"--tp {tp} would fit, or take {others}"
        tp *= 2
    return f"take a smaller model, {others}"
