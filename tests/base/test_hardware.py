"""GPU presets and the KV that fits beside a model's weights."""

from pathlib import Path

import pytest

from kvtier.errors import CapacityError, ConfigError, UnknownNameError
from kvtier.hardware import known_gpus, kv_capacity_tokens, load_gpu
from kvtier.layout import KVDtype, load_model

ROOT = Path(__file__).resolve().parents[2]


def test_the_presets_are_the_documented_ones() -> None:
    documented = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    for name in known_gpus():
        gpu = load_gpu(name)
        row = (
            f"| {name} | {gpu.hbm_bytes} | {gpu.hbm_bandwidth_bytes_per_s / 1e12:g} | "
            f"{gpu.bf16_flops / 1e12:g} | {gpu.fp8_flops / 1e12:g} | "
            f"{gpu.link_bytes_per_s / 1e9:g} | {gpu.link_duplex_bytes_per_s / 1e9:g} |"
        )
        assert row in documented


@pytest.mark.parametrize("name", known_gpus())
def test_a_preset_names_the_source_of_every_figure(name: str) -> None:
    gpu = load_gpu(name)
    assert all((gpu.compute_source, gpu.memory_source, gpu.link_source))
    assert gpu.link_bytes_per_s < gpu.link_duplex_bytes_per_s < 2 * gpu.link_bytes_per_s


def test_a_gpu_is_found_whatever_its_case() -> None:
    assert load_gpu("h200-80gb") == load_gpu("H200-80GB")


def test_an_unknown_gpu_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown GPU 'H20', did you mean 'H200'"):
        load_gpu("H20")


def test_capacity_is_what_weights_leave_of_the_usable_memory() -> None:
    # 0.88 x 80 GB less 15.23 GB of weights, at 56 KiB per token: about 0.96 million tokens.
    tokens = kv_capacity_tokens(load_model("Qwen2.5-7B"), load_gpu("H200-80GB"), 1, 0.88)
    assert tokens == (70_400_000_000 - 2 * 7_615_616_512) // 57_344
    assert tokens == pytest.approx(0.96e6, rel=0.01)


def test_ranks_add_their_memory_and_share_the_weights() -> None:
    model, gpu = load_model("Qwen3-32B"), load_gpu("H100")
    expected = (int(0.88 * gpu.hbm_bytes * 2) - model.weight_bytes) // 262_144
    assert kv_capacity_tokens(model, gpu, 2, 0.88) == expected


def test_replicated_latents_cost_their_place_on_every_rank() -> None:
    model, gpu = load_model("DeepSeek-V3"), load_gpu("H200")
    free_bytes = int(0.88 * gpu.hbm_bytes * 16) - model.weight_bytes
    assert kv_capacity_tokens(model, gpu, 16, 0.88) == free_bytes // (16 * 70_272)


def test_fp8_kv_doubles_the_tokens() -> None:
    model, gpu = load_model("Qwen3-8B"), load_gpu("H100")
    wide = kv_capacity_tokens(model, gpu, 1, 0.88)
    assert kv_capacity_tokens(model, gpu, 1, 0.88, dtype=KVDtype.FP8) in (2 * wide, 2 * wide + 1)


def test_a_model_larger_than_the_gpu_is_refused_with_a_way_out() -> None:
    with pytest.raises(CapacityError) as caught:
        kv_capacity_tokens(load_model("Llama-3.1-70B"), load_gpu("H100"), 1, 0.88)
    message = str(caught.value)
    assert "Llama-3.1-70B needs 141.1 GB" in message
    assert "--tp 2 would fit" in message
    assert "fp8" in message
    assert "\n" not in message


def test_the_way_out_is_one_that_works() -> None:
    model, gpu = load_model("DeepSeek-V3"), load_gpu("H100")
    with pytest.raises(CapacityError, match="--tp 16 would fit"):
        kv_capacity_tokens(model, gpu, 8, 0.88)
    assert kv_capacity_tokens(model, gpu, 16, 0.88) > 0


def test_room_for_less_than_a_page_is_no_room() -> None:
    model, gpu = load_model("Qwen3-8B"), load_gpu("H100")
    tokens = kv_capacity_tokens(model, gpu, 1, 0.88)
    assert kv_capacity_tokens(model, gpu, 1, 0.88, page_size=tokens) == tokens
    with pytest.raises(CapacityError, match="tokens of KV"):
        kv_capacity_tokens(model, gpu, 1, 0.88, page_size=tokens + 1)


@pytest.mark.parametrize("mem_fraction", [0.0, -0.1, 1.1, float("nan")])
def test_a_share_of_memory_outside_its_range_is_refused(mem_fraction: float) -> None:
    with pytest.raises(ConfigError, match="mem_fraction"):
        kv_capacity_tokens(load_model("Qwen3-8B"), load_gpu("H100"), 1, mem_fraction)
