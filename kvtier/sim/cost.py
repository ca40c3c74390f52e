"""How long one engine step takes: a roofline over weights, KV reads and matrix products."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.hardware import GpuSpec
from kvtier.layout import ModelSpec


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the data sheet that serving engines reach, and fixed costs. Assumptions, stated."""

    flops_share: float = 0.55
    """Dense products in prefill."""
    bandwidth_share: float = 0.80
    """Weight and KV reads in decode."""
    step_s: float = 0.002
    """Launches, sampling and bookkeeping of a step, s."""
    tensor_parallel_share: float = 0.90
    """What is left of the sum of several GPUs after their collectives."""


class StepCost:
    """Step times of one model on `tp` GPUs, s.

    A step decodes one token for each of B requests, whose contexts sum to K tokens, and prefills
    c tokens that start at position p. Products: 2 P (B + c) + 2 l h e (K + c (p + c / 2)) with P
    active parameters, l layers, h query heads, and e the sum of the widths of a key and a value
    (MLA attends in its latent space). Reads: touched weights, and KV of K + p tokens on every rank
    that holds it. The slower of the two, plus a fixed cost.
    """

    def __init__(
        self, model: ModelSpec, gpu: GpuSpec, tp: int, efficiency: Efficiency | None = None
    ) -> None:
        eff = efficiency if efficiency is not None else Efficiency()
        scale = tp * (eff.tensor_parallel_share if tp > 1 else 1.0)
        self._flops_per_s = gpu.bf16_flops * eff.flops_share * scale
        self._bytes_per_s = gpu.hbm_bandwidth_bytes_per_s * eff.bandwidth_share * scale
        self._step_s = eff.step_s
        self._flops_per_token = 2.0 * model.params_active
        self._flops_per_pair = 2.0 * model.num_layers * model.num_q_heads * _pair_dim(model)
        self._kv_bytes = float(model.layout(tp).bytes_per_token_all_ranks)
        self._expert_bytes = float(model.expert_params * model.weight_dtype_bytes)
        self._dense_bytes = (
            float(model.params_total * model.weight_dtype_bytes) - self._expert_bytes
        )
        self._miss_share = 1.0 - model.experts_per_token / model.num_experts

    def step_s(
        self, num_decoding: float, decode_tokens: float, chunk: float, position: float
    ) -> float:
        """Seconds for one step: B, K, c and p as above."""
        tokens = num_decoding + chunk
        pairs = decode_tokens + chunk * (position + 0.5 * chunk)
        flops = self._flops_per_token * tokens + self._flops_per_pair * pairs
        read = self._dense_bytes + self._kv_bytes * (decode_tokens + (position if chunk else 0.0))
        if self._expert_bytes:
            # Share of the experts that at least one of the tokens is routed to.
            read += self._expert_bytes * (1.0 - self._miss_share**tokens)
        return max(flops / self._flops_per_s, read / self._bytes_per_s) + self._step_s


def _pair_dim(model: ModelSpec) -> int:
    """Width of one key and one value as attention multiplies them."""
    if model.mla is not None:
        return model.mla.latent_dim + model.mla.kv_lora_rank
    return 2 * model.head_dim
