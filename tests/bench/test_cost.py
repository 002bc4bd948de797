"""The limit is what the model's own numbers say."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace.bench.cost import Attention, Cost, Experts, cost_of, ideal_steps
from outpace.bench.workload import Item
from outpace.kernels.limits import Speed, device_name, measure_speed, peak_memory
from outpace.llm import LLM
from tests.models import VOCAB, tiny
from tests.quant.mixtures import latent

CPU = torch.device("cpu")
# 1000 weights in layers and 100 in the head, 2 bytes each; two layers that read 8 bytes for a token
SMALL = Cost(weight_bytes=2200, token_flops=2000, head_flops=200, attention=((Attention(8, 16, 0), 2),))


def test_work_that_computing_bounds() -> None:
    speed = Speed(bandwidth=1e6, flops=1e4)
    # 3 prompt tokens and one decode through the layers, two choices, attention of prompts: 1 + 2 + 3 tokens seen
    flops = 4 * 2000 + 2 * 200 + 2 * 16 * 6
    reads = 2 * 8 * 4
    assert SMALL.work_seconds([Item([5, 6, 7], 2)], 1, speed) == pytest.approx(flops / 1e4 + reads / 1e6)


def test_work_that_reading_weights_bounds() -> None:
    speed = Speed(bandwidth=1e3, flops=1e9)
    one = SMALL.work_seconds([Item([5], 4)], 1, speed)
    assert one == pytest.approx((4 * 2200 + 2 * 8 * (2 + 3 + 4)) / 1e3)
    beside = SMALL.work_seconds([Item([5], 4), Item([5], 1)], 2, speed)
    assert beside == pytest.approx(one)  # the steps are shared, and a prompt of one token reads nothing
    after = SMALL.work_seconds([Item([5], 4), Item([5], 4)], 1, speed)
    assert after == pytest.approx(2 * one)  # unless there is one place


def test_a_window_bounds_what_is_read() -> None:
    cost = Cost(0, 0, 0, ((Attention(1, 1, 3), 1), (Attention(1, 1, 0), 1)))
    assert cost.kv_bytes(2, 6) == (2 + 3 + 3 + 3) + (2 + 3 + 4 + 5)
    assert cost.kv_bytes(4, 6) == 6 + 9
    assert cost.kv_bytes(1, 3) == 3 + 3
    assert cost.kv_bytes(3, 3) == 0


def test_one_step_and_one_prompt() -> None:
    speed = Speed(bandwidth=1e3, flops=1e6)
    assert SMALL.decode_seconds(1, 10.0, speed) == pytest.approx((2200 + 160) / 1e3)
    assert SMALL.decode_seconds(1000, 10.0, Speed(1e9, 1e3)) == pytest.approx(2200, rel=1e-3)
    assert SMALL.prompt_seconds(1, 2, speed) == pytest.approx(2.2)
    assert SMALL.prompt_seconds(3, 2, Speed(1e9, 1e3)) == pytest.approx(3 * (4000 + 200 + 2 * 16 * 3) / 1e3)


@pytest.mark.parametrize("tied", [False, True])
def test_the_numbers_of_a_model(tied: bool) -> None:
    model = tiny("llama", tie_word_embeddings=tied)
    names = {name: parameter.numel() for name, parameter in model.named_parameters()}
    embedding = 32 * VOCAB
    layers = sum(names.values()) - (embedding if tied else 2 * embedding)
    LLM(model, device="cpu", dtype=torch.bfloat16)
    cost = cost_of(model)
    assert cost == Cost(
        weight_bytes=2 * (layers + embedding),
        token_flops=2 * layers,
        head_flops=2 * embedding,
        attention=((Attention(2 * 2 * 8 * 2, 4 * 4 * 8, 0), 2),),
    )


def test_windows_and_models_without_a_policy() -> None:
    gemma = tiny("gemma3")
    LLM(gemma, device="cpu")
    found = cost_of(gemma)
    assert found is not None
    assert {kind.window for kind, _ in found.attention} == {4}
    arcee = _without_policy()
    LLM(arcee, device="cpu")
    plain = cost_of(arcee)
    assert plain is not None
    assert plain.attention == ((Attention(2 * 2 * 8 * 4, 4 * 4 * 8, 0), 2),)
    int8 = cost_of(arcee, "int8")
    assert int8 is not None
    assert int8.attention == ((Attention(2 * 2 * (8 + 4), 4 * 4 * 8, 0), 2),), "a scale for each token and head"


def _without_policy() -> torch.nn.Module:
    import transformers as hf

    config = hf.ArceeConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=2, eos_token_id=3, pad_token_id=1,
    )  # fmt: skip
    return hf.ArceeForCausalLM(config).eval()


SIZES = st.tuples(st.integers(1, 256), st.integers(1, 256)).map(lambda pair: (max(pair), min(pair)))
COUNTS = st.lists(st.tuples(st.integers(0, 600), st.floats(0, 300)))


@given(SIZES, COUNTS, st.integers(0, 1000), st.integers(1, 1000))
def test_experts_that_are_touched(sizes: tuple[int, int], counts: list[tuple[int, float]], few: int, more: int) -> None:
    total, top_k = sizes
    for kind in (Experts(total, top_k, 1), Experts(total, top_k, 1).with_counts(counts)):
        assert kind.touched(0) == 0
        assert kind.touched(1) == pytest.approx(top_k)
        assert kind.touched(few) <= kind.touched(few + more) + 1e-9
        assert kind.touched(few + more) <= total + 1e-9


@given(SIZES, st.integers(0, 1000))
def test_tokens_touch_no_more_experts_than_they_choose(sizes: tuple[int, int], tokens: int) -> None:
    assert Experts(*sizes, 1).touched(tokens) <= tokens * sizes[1] + 1e-6


def test_what_was_counted_takes_the_place_of_what_is_expected() -> None:
    kind = Experts(8, 2, 100)
    assert kind.touched(3) == pytest.approx(8 * (1 - 0.75**3))
    counted = kind.with_counts([(8, 4.0), (8, 5.0), (4, 3.5), (1, 2.0), (0, 0.0)])
    assert list(counted.counted) == [(4.0, 3.5), (8.0, 4.5)]
    assert [counted.touched(tokens) for tokens in (1, 4, 6, 8, 1000)] == [2.0, 3.5, 4.0, 4.5, 4.5]
    cost = Cost(1000, 0, 0, (), ((kind, 3),)).with_counts([(8, 4.5)])
    assert cost.step_bytes(8) == 1000 + 3 * 100 * 4.5


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 20))
def test_steps_of_a_batch_of_requests(outputs: list[int], places: int) -> None:
    steps = ideal_steps(outputs, places)
    assert sum(steps) == sum(outputs)
    assert max(steps) <= places
    assert len(steps) == max(max(outputs), -(-sum(outputs) // places))
    if len(outputs) <= places:
        assert steps == [sum(length > number for length in outputs) for number in range(max(outputs))]


def test_a_step_reads_the_experts_that_its_tokens_touch() -> None:
    cost = Cost(weight_bytes=100, token_flops=0, head_flops=0, attention=(), experts=((Experts(4, 1, 10), 2),))
    speed = Speed(bandwidth=1.0, flops=1e9)
    assert cost.decode_seconds(1, 10.0, speed) == pytest.approx(100 + 2 * 10)
    assert cost.decode_seconds(2, 10.0, speed) == pytest.approx(100 + 2 * 10 * 1.75)
    assert cost.prompt_seconds(1, 2, speed) == cost.decode_seconds(2, 10.0, speed)
    two = cost.work_seconds([Item([5], 3), Item([5], 2)], 2, speed)  # steps of two prompts, two tokens and one
    assert two == pytest.approx(300 + 2 * 10 * (1.75 + 1.75 + 1))


@pytest.mark.parametrize("started", [False, True])
def test_the_numbers_of_experts(started: bool) -> None:
    model = tiny("mixtral")
    weights = {name: weight.numel() for name, weight in model.named_parameters()}
    experts = sum(size for name, size in weights.items() if ".experts." in name)
    others = sum(weights.values()) - experts - 2 * 32 * VOCAB
    if started:
        LLM(model, device="cpu")
    cost = cost_of(model)
    assert cost is not None
    assert cost.experts == ((Experts(4, 2, experts // 2), 2),)  # of 4 bytes each, 4 in each of 2 layers
    assert cost.weight_bytes == 4 * (others + 32 * VOCAB)
    assert cost.token_flops == 2 * (others + experts // 2)
    assert cost.step_bytes(10_000) == pytest.approx(cost.weight_bytes + 4 * experts)


@pytest.mark.parametrize("make", [partial(tiny, "mixtral"), latent])
def test_quantized_weights_are_fewer_bytes_and_as_many_products(make: Any) -> None:
    plain, int4 = make(), make()
    LLM(plain, device="cpu")
    llm = LLM(int4, device="cpu", quantization="int4")
    before, after = cost_of(plain), cost_of(int4)
    assert before is not None
    assert after is not None
    assert (after.token_flops, after.head_flops) == (before.token_flops, before.head_flops)
    assert llm.quantized is not None
    saved = llm.quantized.before - llm.quantized.after
    assert after.step_bytes(1e6) == pytest.approx(before.step_bytes(1e6) - saved)
    assert after.experts[0][0].weight_bytes < 0.3 * before.experts[0][0].weight_bytes


def test_experts_of_which_the_config_does_not_say_how_many_are_used_have_no_limit() -> None:
    model = tiny("mixtral")
    model.config.num_experts_per_tok = 0
    assert cost_of(model) is None


def test_fused_experts_need_no_config() -> None:
    model = tiny("mixtral")
    LLM(model, device="cpu")
    before = cost_of(model)
    assert before is not None
    model.config.num_experts_per_tok = 0
    assert cost_of(model) == before


def test_what_this_machine_does_is_measured() -> None:
    speed = measure_speed(CPU, torch.float32)
    assert 1e8 < speed.bandwidth < 1e13
    assert 1e8 < speed.flops < 1e15
    assert device_name(CPU).startswith("cpu-")
    assert peak_memory(CPU) > 1 << 20
