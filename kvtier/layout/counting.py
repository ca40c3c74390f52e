"""Parameter counts of decoder-only models from their shapes.

Weights counted: embeddings and output head, norms, attention (with biases and head norms where the
family has them), gated MLPs, routers, routed and shared experts. Prediction heads that only
speculative decoding uses are left out. Each count is checked in the tests against the figure that
the model's maker publishes.
"""

from dataclasses import dataclass

from kvtier.layout.model import MlaShape


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Sizes of a mixture of experts."""

    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    expert_intermediate_size: int
    num_moe_layers: int
    router_bias: bool


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes of a decoder-only model, in elements."""

    num_layers: int
    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool
    qkv_bias: bool
    head_norms: bool
    mla: MlaShape | None
    moe: MoeShape | None


@dataclass(frozen=True, slots=True)
class ParamCount:
    """Parameters of a model: all, those one token passes through, those in routed experts."""

    total: int
    active: int
    in_routed_experts: int


def count_params(shape: DecoderShape) -> ParamCount:
    """Count the parameters of `shape`."""
    num_moe_layers = 0 if shape.moe is None else shape.moe.num_moe_layers
    num_dense_layers = shape.num_layers - num_moe_layers
    embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    layers = shape.num_layers * (_attention(shape) + 2 * shape.hidden_size)
    dense = num_dense_layers * _mlp(shape.hidden_size, shape.intermediate_size)
    common = embeddings + layers + shape.hidden_size + dense
    if shape.moe is None:
        return ParamCount(common, common, 0)
    routed, always = _experts(shape.hidden_size, shape.moe)
    visited = routed * shape.moe.experts_per_token // shape.moe.num_experts
    return ParamCount(common + always + routed, common + always + visited, routed)


def _mlp(hidden_size: int, intermediate_size: int) -> int:
    return 3 * hidden_size * intermediate_size


def _experts(hidden_size: int, moe: MoeShape) -> tuple[int, int]:
    """Parameters in routed experts, and in routers and shared experts, over all layers."""
    expert = _mlp(hidden_size, moe.expert_intermediate_size)
    router = moe.num_experts * (hidden_size + int(moe.router_bias))
    routed = moe.num_moe_layers * moe.num_experts * expert
    always = moe.num_moe_layers * (moe.num_shared_experts * expert + router)
    return routed, always


def _attention(shape: DecoderShape) -> int:
    if shape.mla is not None:
        return _latent_attention(shape, shape.mla)
    q_dim = shape.num_q_heads * shape.head_dim
    kv_dim = shape.num_kv_heads * shape.head_dim
    projections = shape.hidden_size * (2 * q_dim + 2 * kv_dim)
    biases = q_dim + 2 * kv_dim if shape.qkv_bias else 0
    norms = 2 * shape.head_dim if shape.head_norms else 0
    return projections + biases + norms


def _latent_attention(shape: DecoderShape, mla: MlaShape) -> int:
    q_dim = shape.num_q_heads * mla.qk_head_dim
    if mla.q_lora_rank is None:
        queries = shape.hidden_size * q_dim
    else:
        queries = mla.q_lora_rank * (shape.hidden_size + q_dim + 1)
    down = shape.hidden_size * mla.latent_dim + mla.kv_lora_rank
    up = mla.kv_lora_rank * shape.num_q_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    output = shape.num_q_heads * mla.v_head_dim * shape.hidden_size
    return queries + down + up + output
