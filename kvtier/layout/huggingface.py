"""Reads the shape of a model from the fields of a Hugging Face `config.json`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from kvtier.errors import ConfigError, UnknownNameError
from kvtier.layout.counting import DecoderShape, MoeShape, count_params
from kvtier.layout.model import MlaShape, ModelSpec

_Number = TypeVar("_Number", int, float, bool, str)

_GQA_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
_MLA_FAMILIES = ("deepseek_v2", "deepseek_v3", "kimi_k2")
MODEL_TYPES = (*_GQA_FAMILIES, *_MLA_FAMILIES)
"""Values of `model_type` that are understood."""

_WEIGHT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of one `config.json`; `where` names it in messages."""

    values: Mapping[str, object]
    where: str

    def get(self, name: str, default: _Number) -> _Number:
        """The value of `name`, `default` if absent or null; ConfigError if of another kind."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not type(default):
            raise ConfigError(
                f"{self.where}: {name}={value!r} must be of kind {type(default).__name__}"
            )
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """The size `name`, required without a `default`; ConfigError unless it is 1 or more."""
        if default is None and self.values.get(name) is None:
            raise ConfigError(f"{self.where}: {name} is missing; is this a model's config.json?")
        value = self.get(name, default or 0)
        if value < 1:
            raise ConfigError(f"{self.where}: {name}={value} must be at least 1")
        return value

    def section(self, *names: str) -> "Fields | None":
        """The first of the mappings `names` that is there; None if none is."""
        for name in names:
            value = self.values.get(name)
            if isinstance(value, Mapping):
                return Fields(value, f"{self.where}: {name}")
        return None


def parse_model(
    values: Mapping[str, object], name: str, where: str, documented_context: int | None = None
) -> ModelSpec:
    """The `ModelSpec` of a `config.json`.

    `where` names the file in messages. `documented_context` (tokens), where given, takes the place
    of the limit in the file. Raises ConfigError for a missing or impossible field and for features
    outside the model of `ModelSpec`; UnknownNameError for another `model_type`.
    """
    fields = Fields(values, where)
    if "model_type" not in values:
        raise ConfigError(f"{where}: model_type is missing; is this a model's config.json?")
    family = fields.get("model_type", "")
    if family not in MODEL_TYPES:
        raise UnknownNameError(f"model_type in {where}", family, MODEL_TYPES)
    _reject_sliding_window(fields)
    shape = _decoder_shape(fields, family)
    params = count_params(shape)
    return ModelSpec(
        name=name,
        num_layers=shape.num_layers,
        num_q_heads=shape.num_q_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        hidden_size=shape.hidden_size,
        params_total=params.total,
        params_active=params.active,
        num_experts=1 if shape.moe is None else shape.moe.num_experts,
        experts_per_token=1 if shape.moe is None else shape.moe.experts_per_token,
        expert_params=params.in_routed_experts,
        weight_dtype_bytes=_weight_dtype_bytes(fields),
        max_context=documented_context or _max_context(fields),
        mla=shape.mla,
    )


def _decoder_shape(fields: Fields, family: str) -> DecoderShape:
    num_q_heads = fields.size("num_attention_heads")
    mla = _mla_shape(fields) if family in _MLA_FAMILIES else None
    head_dim = fields.size("head_dim", fields.size("hidden_size") // num_q_heads)
    return DecoderShape(
        num_layers=fields.size("num_hidden_layers"),
        hidden_size=fields.size("hidden_size"),
        num_q_heads=num_q_heads,
        num_kv_heads=_num_kv_heads(fields, num_q_heads),
        head_dim=head_dim if mla is None else mla.v_head_dim,
        intermediate_size=fields.size("intermediate_size"),
        vocab_size=fields.size("vocab_size"),
        tied_embeddings=fields.get("tie_word_embeddings", False),
        qkv_bias=fields.get("attention_bias", family == "qwen2"),
        head_norms=family.startswith("qwen3"),
        mla=mla,
        moe=_moe_shape(fields, family),
    )


def _num_kv_heads(fields: Fields, num_q_heads: int) -> int:
    num_kv_heads = fields.size("num_key_value_heads", num_q_heads)
    if num_q_heads % num_kv_heads:
        raise ConfigError(
            f"{fields.where}: num_key_value_heads={num_kv_heads} must divide "
            f"num_attention_heads={num_q_heads}"
        )
    return num_kv_heads


def _mla_shape(fields: Fields) -> MlaShape:
    has_q_lora = fields.values.get("q_lora_rank") is not None
    return MlaShape(
        kv_lora_rank=fields.size("kv_lora_rank"),
        qk_rope_head_dim=fields.size("qk_rope_head_dim"),
        qk_nope_head_dim=fields.size("qk_nope_head_dim"),
        v_head_dim=fields.size("v_head_dim"),
        q_lora_rank=fields.size("q_lora_rank") if has_q_lora else None,
    )


def _moe_shape(fields: Fields, family: str) -> MoeShape | None:
    if family == "qwen3_moe":
        name, num_shared, num_moe_layers = "num_experts", 0, _num_sparse_layers(fields)
    elif family in _MLA_FAMILIES and fields.values.get("n_routed_experts") is not None:
        name, num_shared = "n_routed_experts", fields.get("n_shared_experts", 0)
        num_moe_layers = fields.size("num_hidden_layers") - fields.get("first_k_dense_replace", 0)
    else:
        return None
    num_experts = fields.size(name)
    experts_per_token = fields.size("num_experts_per_tok")
    if experts_per_token > num_experts or num_moe_layers < 0 or num_shared < 0:
        raise ConfigError(
            f"{fields.where}: {experts_per_token} of {num_experts} experts per token, "
            f"{num_shared} shared, in {num_moe_layers} layers is no mixture of experts"
        )
    return MoeShape(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        num_shared_experts=num_shared,
        expert_intermediate_size=fields.size("moe_intermediate_size"),
        num_moe_layers=num_moe_layers,
        router_bias=fields.get("topk_method", "") == "noaux_tc",
    )


def _num_sparse_layers(fields: Fields) -> int:
    """Layers with experts: every `decoder_sparse_step`-th, less those listed as dense."""
    listed = fields.values.get("mlp_only_layers") or ()
    if not isinstance(listed, list | tuple):
        raise ConfigError(f"{fields.where}: mlp_only_layers={listed!r} must be a list of layers")
    step = fields.size("decoder_sparse_step", 1)
    layers = range(fields.size("num_hidden_layers"))
    return sum(1 for layer in layers if layer not in listed and (layer + 1) % step == 0)


def _reject_sliding_window(fields: Fields) -> None:
    """A window bounds what a token keeps, so bytes per token would be wrong."""
    if fields.get("use_sliding_window", False):
        raise ConfigError(
            f"{fields.where}: use_sliding_window is on; only full attention is modelled, "
            "set it to false or choose another model"
        )


def _weight_dtype_bytes(fields: Fields) -> int:
    quantization = fields.section("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method", "")
        if method != "fp8":
            raise UnknownNameError(f"quant_method in {fields.where}", method, ("fp8",))
        return 1
    dtype = fields.get("dtype", fields.get("torch_dtype", "bfloat16"))
    if dtype not in _WEIGHT_BYTES:
        raise UnknownNameError(f"dtype in {fields.where}", dtype, _WEIGHT_BYTES)
    return _WEIGHT_BYTES[dtype]


def _max_context(fields: Fields) -> int:
    """`max_position_embeddings`, or the longer reach that YaRN gives it."""
    limit = fields.size("max_position_embeddings")
    scaling = fields.section("rope_scaling", "rope_parameters")
    if scaling is None:
        return limit
    if "yarn" not in (scaling.get("rope_type", ""), scaling.get("type", "")):
        return limit
    original = scaling.size("original_max_position_embeddings", limit)
    factor = scaling.get("factor", 1.0)
    if not math.isfinite(factor):
        raise ConfigError(f"{scaling.where}: factor={factor} must be a finite number")
    return max(limit, int(original * factor))
