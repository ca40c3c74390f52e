"""Models known by name, and `load_model`.

Each preset holds the shape fields of the maker's published `config.json`, so that presets and
files go through one reader. The documented context is the longest that the maker's model card
names: 131,072 tokens for Qwen2.5 and Qwen3 (with YaRN) and for Llama 3.1 (128K), and 128K for
DeepSeek-V3, whose file allows 163,840 positions.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from kvtier.errors import ConfigError, UnknownNameError
from kvtier.layout.huggingface import parse_model
from kvtier.layout.model import ModelSpec

_DOCUMENTED_CONTEXT_TOKENS = 131_072

_QWEN3 = {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151_936}

_PRESETS: Mapping[str, Mapping[str, object]] = {
    "Qwen2.5-7B": {
        "model_type": "qwen2",
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18_944,
        "vocab_size": 152_064,
    },
    "Qwen3-8B": {
        **_QWEN3,
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 12_288,
    },
    "Qwen3-30B-A3B": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "Qwen3-32B": {
        **_QWEN3,
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "num_attention_heads": 64,
        "intermediate_size": 25_600,
    },
    "Llama-3.1-70B": {
        "model_type": "llama",
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28_672,
        "vocab_size": 128_256,
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "intermediate_size": 18_432,
        "vocab_size": 129_280,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "topk_method": "noaux_tc",
        "quantization_config": {"quant_method": "fp8"},
    },
}


def known_models() -> tuple[str, ...]:
    """The names of the presets."""
    return tuple(_PRESETS)


def load_model(name_or_path: str) -> ModelSpec:
    """The model of that preset name, or of that `config.json` or folder that holds one.

    Names are matched without regard to letter case; an owner before a slash is ignored where no
    such path exists, and `~` is expanded. Raises UnknownNameError for a name that is no preset,
    ConfigError when a path leads nowhere, the file cannot be read or does not describe a model
    that `ModelSpec` can hold.
    """
    spec = _preset(name_or_path)
    if spec is not None:
        return spec
    path = _path(name_or_path)
    if path.is_dir():
        return _load_file(path / "config.json")
    if path.suffix == ".json" or path.is_file():
        return _load_file(path)
    spec = _preset(name_or_path.rsplit("/", 1)[-1])
    if spec is not None:
        return spec
    if "/" in name_or_path:
        raise ConfigError(
            f"{path}: no such file or folder; name a config.json or a preset "
            f"({', '.join(known_models())})"
        )
    raise UnknownNameError("model", name_or_path, known_models())


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"model {text}: no such user; give another path") from error


def _preset(wanted: str) -> ModelSpec | None:
    for name, fields in _PRESETS.items():
        if name.lower() == wanted.lower():
            return parse_model(fields, name, f"preset {name}", _DOCUMENTED_CONTEXT_TOKENS)
    return None


def _load_file(path: Path) -> ModelSpec:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}); give a model's config.json") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no JSON object; give a model's config.json")
    stem = path.parent.name if path.name == "config.json" else path.stem
    return parse_model(values, stem or path.stem, str(path))
