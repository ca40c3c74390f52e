"""`ModelSpec`: what the runtime needs to know about a model."""

from dataclasses import dataclass
from enum import StrEnum

from kvtier.errors import ConfigError
from kvtier.layout.kv import KVDtype, KVLayout, Segment


class AttentionKind(StrEnum):
    """How keys and values are kept: one head each, shared heads, or one latent vector."""

    MHA = "mha"
    GQA = "gqa"
    MLA = "mla"


@dataclass(frozen=True, slots=True)
class MlaShape:
    """Sizes of multi-head latent attention, in elements."""

    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None
    """None when queries are projected without a low-rank step."""

    @property
    def latent_dim(self) -> int:
        """Elements that one token keeps in one layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Elements of one query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape of one decoder-only model with full attention in every layer."""

    name: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    """Elements of one head; of one value head under MLA."""
    hidden_size: int
    params_total: int
    params_active: int
    """Parameters that one token passes through."""
    num_experts: int
    """Routed experts per layer; 1 for a dense model."""
    experts_per_token: int
    """Routed experts that one token visits in a layer; 1 for a dense model."""
    expert_params: int
    """Parameters in routed experts over all layers; 0 for a dense model."""
    weight_dtype_bytes: int
    max_context: int
    """Longest context in tokens that the maker documents, YaRN included."""
    mla: MlaShape | None = None

    @property
    def attention(self) -> AttentionKind:
        """The kind of attention that the shape implies."""
        if self.mla is not None:
            return AttentionKind.MLA
        return AttentionKind.MHA if self.num_kv_heads == self.num_q_heads else AttentionKind.GQA

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, over all ranks."""
        return self.params_total * self.weight_dtype_bytes

    def layout(self, tp: int = 1, page_size: int = 1, dtype: KVDtype = KVDtype.BF16) -> KVLayout:
        """The KV layout of one of `tp` ranks, with pages of `page_size` tokens.

        KV heads are split over the ranks, and replicated when there are fewer heads than ranks;
        the latent of MLA is replicated on every rank. Raises ConfigError when `tp` does not divide
        the query heads, or neither divides the KV heads nor is a multiple of them.
        """
        self._check_tp(tp)
        if self.mla is not None:
            row_bytes = self.mla.latent_dim * dtype.num_bytes
            names: tuple[str, ...] = ("latent",)
        else:
            row_bytes = max(1, self.num_kv_heads // tp) * self.head_dim * dtype.num_bytes
            names = ("k", "v")
        segments = tuple(
            Segment(f"{name}.{layer}", layer, row_bytes)
            for layer in range(self.num_layers)
            for name in names
        )
        return KVLayout(segments, dtype, page_size, tp)

    def _check_tp(self, tp: int) -> None:
        if tp < 1:
            raise ConfigError(f"tp={tp} must be at least 1")
        if self.num_q_heads % tp:
            raise ConfigError(
                f"tp={tp} does not divide the {self.num_q_heads} query heads of {self.name}; "
                f"choose one of {_divisors(self.num_q_heads)}"
            )
        if self.mla is None and self.num_kv_heads % tp and tp % self.num_kv_heads:
            raise ConfigError(
                f"tp={tp} neither divides the {self.num_kv_heads} KV heads of {self.name} nor is a "
                f"multiple of them; choose one of {_divisors(self.num_kv_heads)}"
            )


def _divisors(number: int) -> str:
    return ", ".join(str(i) for i in range(1, number + 1) if number % i == 0)
