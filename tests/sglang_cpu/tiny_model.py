"""A tiny Qwen2 model with random weights: serves in milliseconds, answers depend on every page.

Needs numpy, safetensors and tokenizers; torch and transformers stay out, so that it is quick and
its bytes do not depend on their versions. The projections of attention are large on purpose: scores
are spread, so that a wrong page anywhere in thousands of tokens changes a greedy answer.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HIDDEN = 64
LAYERS = 2
HEADS = 4
KV_HEADS = 2
HEAD_DIM = HIDDEN // HEADS
INTERMEDIATE = 128
VOCABULARY = 512
CONTEXT = 32_768
END = "<|endoftext|>"
KV_BYTES_PER_TOKEN = LAYERS * 2 * KV_HEADS * HEAD_DIM * 4
"""Bytes of keys and values of one token over all layers, in fp32."""

_SENTENCES = (
    "The agent reads the failing test, opens the file, and waits for its tools while the cache "
    "keeps what it has said so far; then it writes a patch, runs everything again, and is done.",
)


def make_tiny_model(folder: Path, *, seed: int = 0) -> Path:
    """Write model and tokenizer into `folder`, made if need be, and return it.

    The weights are fp32. The same seed gives the same bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", _config())
    _write_json(folder / "generation_config.json", {"eos_token_id": 0, "pad_token_id": 0})
    save_file(_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer().save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": END,
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
        },
    )
    return folder


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _config() -> dict[str, object]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": INTERMEDIATE,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }


def _weights(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def normal(*shape: int, gain: float = 1.0) -> np.ndarray:
        values = rng.standard_normal(shape, dtype=np.float32)
        return values * np.float32(gain / shape[-1] ** 0.5)

    ones = np.ones(HIDDEN, dtype=np.float32)
    tensors = {"model.embed_tokens.weight": normal(VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, rows, gain in (("q", HEADS, 3.0), ("k", KV_HEADS, 3.0), ("v", KV_HEADS, 2.0)):
            tensors[f"{at}.self_attn.{name}_proj.weight"] = normal(
                rows * HEAD_DIM, HIDDEN, gain=gain
            )
            tensors[f"{at}.self_attn.{name}_proj.bias"] = normal(rows * HEAD_DIM)
        tensors[f"{at}.self_attn.o_proj.weight"] = normal(HIDDEN, HEADS * HEAD_DIM, gain=2.0)
        tensors[f"{at}.mlp.gate_proj.weight"] = normal(INTERMEDIATE, HIDDEN)
        tensors[f"{at}.mlp.up_proj.weight"] = normal(INTERMEDIATE, HIDDEN)
        tensors[f"{at}.mlp.down_proj.weight"] = normal(HIDDEN, INTERMEDIATE)
        tensors[f"{at}.input_layernorm.weight"] = ones.copy()
        tensors[f"{at}.post_attention_layernorm.weight"] = ones.copy()
    return {
        **tensors,
        "model.norm.weight": ones.copy(),
        "lm_head.weight": normal(VOCABULARY, HIDDEN),
    }


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    return tokenizer
