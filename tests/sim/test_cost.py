"""Step times against figures taken by hand from the data sheets and the models' shapes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.hardware import load_gpu
from kvtier.layout import load_model
from kvtier.sim.cost import Efficiency, StepCost

H200 = load_gpu("H200")
IDEAL = Efficiency(flops_share=1.0, bandwidth_share=1.0, step_s=0.0, tensor_parallel_share=1.0)


def step_cost(model: str, tp: int = 1, efficiency: Efficiency = IDEAL) -> StepCost:
    return StepCost(load_model(model), H200, tp, efficiency)


def test_a_decode_step_reads_the_weights_and_the_kv_of_every_context() -> None:
    # 7.616e9 parameters x 2 bytes, 32 contexts of 10,000 tokens x 56 KiB, at 4.8 TB/s.
    weights_s = 7_615_616_512 * 2 / 4.8e12
    kv_s = 320_000 * 57_344 / 4.8e12
    measured = step_cost("Qwen2.5-7B").step_s(32, 320_000, 0, 0)
    assert measured == pytest.approx(weights_s + kv_s, rel=1e-6)
    assert measured == pytest.approx(0.00700, rel=0.01)


def test_a_full_prefill_chunk_is_bound_by_its_products() -> None:
    # 2 P c, and 28 layers x 28 heads x (128 + 128) x 2 per pair of a query and an earlier key.
    linear = 2 * 7_615_616_512 * 8192
    attention = 2 * 28 * 28 * 256 * 8192 * 4096
    measured = step_cost("Qwen2.5-7B").step_s(0, 0, 8192, 0)
    assert measured == pytest.approx((linear + attention) / 989e12, rel=1e-3)
    assert measured == pytest.approx(0.1398, rel=0.01)


def test_stated_efficiencies_stretch_each_bound_by_their_share() -> None:
    real, ideal = step_cost("Qwen2.5-7B", efficiency=Efficiency()), step_cost("Qwen2.5-7B")
    assert real.step_s(32, 320_000, 0, 0) == pytest.approx(
        ideal.step_s(32, 320_000, 0, 0) / 0.80 + 0.002
    )
    assert real.step_s(0, 0, 8192, 0) == pytest.approx(ideal.step_s(0, 0, 8192, 0) / 0.55 + 0.002)


def test_prefill_grows_with_the_square_of_the_context() -> None:
    cost = step_cost("Qwen2.5-7B")

    def prefill_s(tokens: int) -> float:
        return sum(cost.step_s(0, 0, 4096, at) for at in range(0, tokens, 4096))

    # c n + a n^2: second differences over equal steps are constant, and above zero.
    times = [prefill_s(n * 32_768) for n in range(1, 5)]
    first = [b - a for a, b in pairwise(times)]
    second = [b - a for a, b in pairwise(first)]
    assert second[0] == pytest.approx(second[1], rel=1e-6)
    assert second[0] == pytest.approx(2 * 28 * 28 * 256 * 32_768**2 / 989e12, rel=1e-3)


def test_a_chunk_far_into_a_context_costs_more_than_one_at_its_start() -> None:
    cost = step_cost("Qwen2.5-7B")
    assert cost.step_s(0, 0, 8192, 100_000) > 2 * cost.step_s(0, 0, 8192, 0)


def test_more_tokens_touch_more_experts_until_all_are_read() -> None:
    model = load_model("Qwen3-30B-A3B")
    cost = step_cost("Qwen3-30B-A3B")
    one, two, many = (cost.step_s(n, 0, 0, 0) for n in (1, 2, 512))
    dense = (model.params_total - model.expert_params) * 2
    assert one == pytest.approx((dense + model.expert_params * 2 * 8 / 128) / 4.8e12, rel=1e-6)
    assert one < two < many
    assert two < 2 * one
    assert many == pytest.approx(model.params_total * 2 / 4.8e12, rel=1e-3)


def test_a_dense_model_reads_its_weights_once_whatever_the_batch() -> None:
    cost = step_cost("Qwen3-8B")
    assert cost.step_s(1, 0, 0, 0) == pytest.approx(cost.step_s(16, 0, 0, 0))


@pytest.mark.parametrize(("batch", "tokens", "chunk"), [(64, 640_000, 0), (0, 0, 8192)])
def test_two_gpus_take_about_half_the_time_of_one(batch: int, tokens: int, chunk: int) -> None:
    one = step_cost("Qwen3-32B", 1, Efficiency()).step_s(batch, tokens, chunk, 0)
    two = step_cost("Qwen3-32B", 2, Efficiency()).step_s(batch, tokens, chunk, 0)
    assert 0.5 < two / one < 0.62


def test_every_rank_reads_the_whole_latent_of_mla() -> None:
    # 61 layers x 576 elements x 2 bytes per token and rank: sharding it does not shorten the read.
    extra_tokens = 1_000_000
    for tp in (8, 16):
        cost = step_cost("DeepSeek-V3", tp)
        extra_s = cost.step_s(1, extra_tokens, 0, 0) - cost.step_s(1, 0, 0, 0)
        assert extra_s == pytest.approx(extra_tokens * 61 * 576 * 2 / 4.8e12, rel=1e-6)


def test_kv_heads_split_over_the_ranks_of_gqa() -> None:
    extra_tokens = 1_000_000

    def extra_s(tp: int) -> float:
        cost = step_cost("Qwen3-32B", tp)
        return cost.step_s(1, extra_tokens, 0, 0) - cost.step_s(1, 0, 0, 0)

    assert extra_s(1) == pytest.approx(extra_tokens * 262_144 / 4.8e12, rel=1e-6)
    assert extra_s(2) == pytest.approx(extra_s(1) / 2, rel=1e-6)


@given(
    st.integers(0, 256),
    st.integers(0, 1_000_000),
    st.integers(0, 8192),
    st.integers(0, 131_072),
    st.sampled_from(["Qwen2.5-7B", "Qwen3-30B-A3B", "DeepSeek-V3"]),
)
def test_more_work_never_takes_less_time(
    batch: int, tokens: int, chunk: int, position: int, model: str
) -> None:
    cost = step_cost(model, 8 if model == "DeepSeek-V3" else 1, Efficiency())
    base = cost.step_s(batch, tokens, chunk, position)
    assert base > 0.002
    assert cost.step_s(batch + 1, tokens, chunk, position) >= base
    assert cost.step_s(batch, tokens + 1000, chunk, position) >= base
    assert cost.step_s(batch, tokens, chunk + 1, position) >= base
    assert cost.step_s(batch, tokens, chunk, position + 1000) >= base
