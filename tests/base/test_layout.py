"""Bytes per token, per page and per fragment; models from presets and files."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError, KvtierError, UnknownNameError
from kvtier.layout import (
    AttentionKind,
    KVDtype,
    KVLayout,
    ModelSpec,
    Segment,
    known_models,
    load_model,
)
from kvtier.layout.huggingface import parse_model

ROOT = Path(__file__).resolve().parents[2]

# Public figures: KiB per token, and bytes of the smallest fragment at pages of 1 and 64 tokens.
BYTES = {
    "Qwen2.5-7B": (56, 1024, 65_536),
    "Qwen3-8B": (144, 2048, 131_072),
    "Qwen3-30B-A3B": (96, 1024, 65_536),
    "Qwen3-32B": (256, 2048, 131_072),
    "Llama-3.1-70B": (320, 2048, 131_072),
    "DeepSeek-V3": (68.625, 1152, 73_728),
}

# Billions of parameters that the makers publish: all, and active per token.
PARAMS = {
    "Qwen2.5-7B": (7.62, 7.62),
    "Qwen3-8B": (8.19, 8.19),
    "Qwen3-30B-A3B": (30.5, 3.3),
    "Qwen3-32B": (32.8, 32.8),
    "Llama-3.1-70B": (70.6, 70.6),
    "DeepSeek-V3": (671, 37),
}

TINY = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 10,
    "max_position_embeddings": 64,
}


def parse(**changes: object) -> ModelSpec:
    return parse_model({**TINY, **changes}, "tiny", "config.json")


def test_the_presets_are_those_with_public_figures() -> None:
    assert set(known_models()) == set(BYTES) == set(PARAMS)


@pytest.mark.parametrize("name", BYTES)
def test_bytes_per_token_and_fragments_equal_the_public_figures(name: str) -> None:
    kib, fragment_1, fragment_64 = BYTES[name]
    layout = load_model(name).layout(tp=1, page_size=64)
    assert layout.bytes_per_token == kib * 1024
    assert layout.fragment_bytes(1) == fragment_1
    assert layout.fragment_bytes() == fragment_64
    assert layout.page_bytes() == kib * 1024 * 64


@pytest.mark.parametrize("name", PARAMS)
def test_parameters_counted_from_shapes_equal_the_published_ones(name: str) -> None:
    total, active = PARAMS[name]
    model = load_model(name)
    assert model.params_total / 1e9 == pytest.approx(total, rel=0.002)
    assert model.params_active / 1e9 == pytest.approx(active, rel=0.02)


def test_a_dense_model_has_no_routed_experts() -> None:
    model = load_model("Qwen3-8B")
    assert (model.num_experts, model.experts_per_token, model.expert_params) == (1, 1, 0)


def test_active_parameters_are_the_common_ones_and_the_visited_experts() -> None:
    model = load_model("Qwen3-30B-A3B")
    common = model.params_total - model.expert_params
    assert model.params_active == common + model.expert_params * 8 // 128


@pytest.mark.parametrize(("tp", "share"), [(1, 1), (2, 2), (4, 4), (8, 8), (16, 8), (64, 8)])
def test_kv_heads_are_split_over_ranks_and_then_replicated(tp: int, share: int) -> None:
    model = load_model("Qwen3-32B")
    layout = model.layout(tp)
    assert layout.bytes_per_token == model.layout().bytes_per_token // share
    assert layout.bytes_per_token_all_ranks == layout.bytes_per_token * tp


def test_the_latent_is_whole_on_every_rank() -> None:
    model = load_model("DeepSeek-V3")
    assert model.attention is AttentionKind.MLA
    assert model.layout(16).bytes_per_token == model.layout(1).bytes_per_token
    assert len(model.layout().segments) == model.num_layers


def test_attention_with_heads_has_keys_and_values_in_every_layer() -> None:
    segments = parse().layout().segments
    assert [(s.name, s.layer) for s in segments] == [
        ("k.0", 0),
        ("v.0", 0),
        ("k.1", 1),
        ("v.1", 1),
    ]


def test_as_many_kv_heads_as_query_heads_is_mha() -> None:
    assert parse(num_key_value_heads=None).attention is AttentionKind.MHA
    assert parse().attention is AttentionKind.GQA


def test_fp8_halves_the_bytes() -> None:
    model = load_model("Qwen3-8B")
    half = model.layout(dtype=KVDtype.FP8).bytes_per_token
    assert 2 * half == model.layout(dtype=KVDtype.FP16).bytes_per_token
    assert 2 * half == model.layout(dtype=KVDtype.BF16).bytes_per_token


@pytest.mark.parametrize(("tp", "reason"), [(0, "at least 1"), (3, "query heads"), (-2, "least")])
def test_a_tp_that_cannot_split_the_heads_is_refused(tp: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_model("Qwen3-8B").layout(tp)


def test_a_tp_that_neither_splits_nor_replicates_kv_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tp=7 neither divides the 4 KV heads.*1, 2, 4"):
        load_model("Qwen2.5-7B").layout(7)


def test_a_page_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="page_size=0"):
        load_model("Qwen3-8B").layout(1, 0)
    with pytest.raises(ConfigError, match="page_size=-1"):
        load_model("Qwen3-8B").layout().page_bytes(-1)


def test_the_smallest_segment_decides_the_fragment() -> None:
    layout = KVLayout((Segment("a", 0, 64), Segment("b", 0, 16)), KVDtype.BF16, page_size=4)
    assert layout.fragment_bytes() == 64
    assert layout.page_bytes() == 320


def test_a_layout_without_segments_or_with_empty_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one segment"):
        KVLayout((), KVDtype.BF16, 1)
    with pytest.raises(ConfigError, match="no bytes"):
        KVLayout((Segment("k.0", 0, 0),), KVDtype.BF16, 1)


def test_a_preset_is_found_whatever_its_case_or_owner() -> None:
    assert load_model("qwen3-8b") == load_model("Qwen/Qwen3-8B") == load_model("Qwen3-8B")


def test_an_unknown_model_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'Qwen3-8B'"):
        load_model("Qwen3-9B")


def test_a_file_or_its_folder_gives_the_same_model(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    model = load_model(str(folder / "config.json"))
    assert model == load_model(str(folder)) == parse()
    assert model.name == "tiny"


def test_a_local_folder_beats_a_preset_of_another_owner(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    assert load_model(str(folder)).num_layers == 2


def test_dense_parameters_are_counted_by_hand() -> None:
    embeddings, norms = 2 * 10 * 8, 2 * 2 * 8 + 8
    attention, mlp = 8 * (2 * 8 + 2 * 4), 3 * 8 * 16
    assert parse().params_total == embeddings + norms + 2 * (attention + mlp)
    assert parse(tie_word_embeddings=True).params_total == parse().params_total - 80
    assert parse(model_type="qwen2").params_total == parse().params_total + 2 * (8 + 4 + 4)
    assert parse(model_type="qwen3").params_total == parse().params_total + 2 * 2 * 2


def test_only_every_nth_layer_has_experts_where_the_file_says_so() -> None:
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
    every = parse(model_type="qwen3_moe", **moe)
    second = parse(model_type="qwen3_moe", decoder_sparse_step=2, **moe)
    listed = parse(model_type="qwen3_moe", mlp_only_layers=[0], **moe)
    assert every.expert_params == 2 * 4 * 3 * 8 * 4
    assert second.expert_params == listed.expert_params == every.expert_params // 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 64),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 64),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 256),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4,
                    "original_max_position_embeddings": 32,
                }
            },
            128,
        ),
    ],
)
def test_yarn_extends_the_context(changes: dict[str, object], expected: int) -> None:
    assert parse(**changes).max_context == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 2),
        ({"torch_dtype": "float32"}, 4),
        ({"dtype": "float16"}, 2),
        ({"quantization_config": {"quant_method": "fp8"}}, 1),
    ],
)
def test_the_file_says_how_wide_weights_are(changes: dict[str, object], expected: int) -> None:
    assert parse(**changes).weight_dtype_bytes == expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "8"}, "hidden_size='8' must be of kind int"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be at least 1"),
        ({"num_key_value_heads": 3}, "must divide num_attention_heads=4"),
        ({"model_type": "mamba"}, "unknown model_type in config.json 'mamba'"),
        ({"use_sliding_window": True}, "use_sliding_window is on"),
        ({"dtype": "int4"}, "unknown dtype"),
        ({"quantization_config": {"quant_method": "awq"}}, "unknown quant_method"),
        ({"rope_scaling": {"type": "yarn", "factor": float("inf")}}, "finite"),
        (
            {
                "model_type": "qwen3_moe",
                "num_experts": 2,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 4,
            },
            "no mixture of experts",
        ),
    ],
)
def test_a_file_outside_the_model_is_refused_with_the_reason(
    changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse(**changes)


@pytest.mark.parametrize(
    ("content", "reason"), [("", "is not JSON"), ("[1]", "no JSON object"), ("{}", "model_type")]
)
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=reason):
        load_model(str(path))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_model(str(tmp_path / "config.json"))


SCALARS = (
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text("fp8yarn", max_size=4)
)
FIELDS = st.sampled_from(
    [*TINY, "head_dim", "mlp_only_layers", "decoder_sparse_step", "kv_lora_rank", "rope_scaling"]
)


@given(
    family=st.sampled_from(["llama", "qwen3_moe", "deepseek_v3"]),
    changes=st.dictionaries(FIELDS, SCALARS | st.lists(SCALARS, max_size=2), max_size=4),
)
def test_any_file_gives_a_sound_model_or_one_clear_error(
    family: str, changes: dict[str, object]
) -> None:
    base = {**TINY, "model_type": family, "num_experts": 4, "num_experts_per_tok": 2}
    base |= {"moe_intermediate_size": 4, "kv_lora_rank": 8, "qk_rope_head_dim": 2}
    base |= {"qk_nope_head_dim": 2, "v_head_dim": 2}
    try:
        model = parse_model({**base, **changes}, "any", "config.json")
    except KvtierError:
        return
    assert model.params_total >= model.params_active > 0
    assert model.max_context >= 1
    assert model.layout().bytes_per_token >= 1


def test_the_documented_models_are_the_presets() -> None:
    documented = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    for name in known_models():
        model = load_model(name)
        layout = model.layout(1, 64)
        row = (
            f"| {name} | {model.params_total / 1e9:.2f}e9 | {model.params_active / 1e9:.2f}e9 | "
            f"{model.attention} | {layout.bytes_per_token} | {layout.fragment_bytes()} | "
            f"{model.max_context} |"
        )
        assert row in documented
