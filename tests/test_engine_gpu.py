"""The engine on a GPU: graphs equal eager bit for bit, fall back with a reason, and give their memory back."""

import dataclasses
import gc
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.modeling_outputs import CausalLMOutputWithPast

import outpace
from outpace.tree import tensors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

SHAPES = [(1, 1), (2, 7), (1, 33), (2, 7), (1, 1), (4, 16), (2, 7)]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def llama(seed: int = 0, layers: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=1000, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)
    return model.cuda().eval()


def same(left: Any, right: Any) -> bool:
    pairs = list(zip(tensors(left), tensors(right), strict=True))
    return bool(pairs) and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_graph_equals_eager_over_changing_shapes_and_two_engines(dtype: torch.dtype) -> None:
    eager = [outpace.init_inference(llama(seed), dtype=dtype) for seed in (0, 1)]
    graph = [outpace.init_inference(llama(seed), dtype=dtype, enable_cuda_graph=True) for seed in (0, 1)]
    for step, shape in enumerate(SHAPES * 2):
        torch.manual_seed(step)
        ids = torch.randint(3, 1000, shape, device="cuda")
        mask = torch.ones_like(ids)
        mask[0, : shape[1] // 3] = 0
        # A mask without a hole is dropped by Hugging Face when it runs eager, which then takes another kernel.
        inputs = {"input_ids": ids} if step % 2 or shape[1] < 3 else {"input_ids": ids, "attention_mask": mask}
        for which in (0, 1):
            expected, found = eager[which](**inputs), graph[which](**inputs)
            assert type(found) is CausalLMOutputWithPast
            assert same(expected, found), (step, shape, which)


def test_outputs_are_the_callers_unless_static() -> None:
    first, second = (torch.full((1, 4), value, device="cuda") for value in (5, 9))
    copy = outpace.init_inference(llama(), enable_cuda_graph=True)
    kept = copy(input_ids=first).logits
    before = kept.clone()
    copy(input_ids=second)
    assert torch.equal(kept, before)
    static = outpace.init_inference(llama(), enable_cuda_graph=True, graph_output="static")
    shared = static(input_ids=first).logits
    before = shared.clone()
    static(input_ids=second)
    assert not torch.equal(shared, before)


def test_inputs_from_the_host_and_strided_ones() -> None:
    engine, plain = outpace.init_inference(llama(), enable_cuda_graph=True), outpace.init_inference(llama())
    ids = torch.randint(3, 1000, (4, 10))
    assert same(engine(input_ids=ids), plain(input_ids=ids.cuda()))
    assert same(engine(input_ids=ids.cuda()[:, ::2]), plain(input_ids=ids.cuda()[:, ::2].contiguous()))


def test_number_of_graphs_is_bounded() -> None:
    engine = outpace.init_inference(llama(layers=1), enable_cuda_graph=True, max_cuda_graphs=2)
    plain = outpace.init_inference(llama(layers=1))
    for length in (1, 2, 3, 4, 1, 2):
        ids = torch.full((1, length), 7, device="cuda")
        assert same(engine(input_ids=ids), plain(input_ids=ids))
        assert engine._graphs is not None
        assert len(engine._graphs) <= 2


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: tuple[torch.Tensor, dict[str, torch.Tensor]]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, pair: Pair, scale: float = 1.0) -> Pair:
        first, named = pair.right
        return Pair(self.linear(pair.left) * scale, (first + 1, {"x": named["x"] * 2}))


def test_nested_inputs_and_outputs_keep_their_classes() -> None:
    torch.manual_seed(0)
    engine = outpace.init_inference(Nested(), dtype=torch.float32, enable_cuda_graph=True)
    for scale in (1.0, 3.0):  # a constant is part of the signature
        pair = Pair(torch.randn(2, 8).cuda(), (torch.randn(3).cuda(), {"x": torch.randn(1).cuda()}))
        found = engine(pair, scale=scale)
        expected = engine.module(pair, scale=scale)
        assert isinstance(found, Pair)
        assert isinstance(found.right, tuple)
        assert same(found, expected)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y if x.sum().item() > 0 else -y


def test_what_cannot_be_captured_runs_without_and_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = outpace.init_inference(Branches(), dtype=torch.float32, enable_cuda_graph=True)
    with caplog.at_level(logging.WARNING, logger="outpace"):
        for _ in range(3):
            x = torch.randn(2, 4, device="cuda")
            assert torch.equal(engine(x), engine.module(x))
    assert len([record for record in caplog.records if "cannot be captured" in record.message]) == 1
    torch.rand(4, device="cuda")  # the generator is whole again
    other = outpace.init_inference(llama(layers=1), enable_cuda_graph=True)
    ids = torch.full((1, 3), 7, device="cuda")
    assert same(other(input_ids=ids), outpace.init_inference(llama(layers=1))(input_ids=ids))


def test_the_models_own_error_is_not_hidden() -> None:
    engine = outpace.init_inference(nn.Linear(4, 4), dtype=torch.float32, enable_cuda_graph=True)
    with pytest.raises(RuntimeError, match="shapes"):
        engine(torch.randn(2, 5, device="cuda"))
    assert engine(torch.randn(2, 4, device="cuda")).shape == (2, 4)


def test_a_cache_given_by_the_caller_runs_eager_and_is_updated() -> None:
    engine, plain = outpace.init_inference(llama(), enable_cuda_graph=True), outpace.init_inference(llama())
    ids = torch.randint(3, 1000, (1, 6), device="cuda")
    first = engine(input_ids=ids[:, :5], use_cache=True)
    assert first.past_key_values.get_seq_length() == 5
    second = engine(input_ids=ids[:, 5:], past_key_values=first.past_key_values)
    assert second.past_key_values is first.past_key_values
    assert first.past_key_values.get_seq_length() == 6
    whole = plain(input_ids=ids)
    torch.testing.assert_close(second.logits[:, -1], whole.logits[:, -1], rtol=2e-2, atol=2e-3)


def test_encoder_and_encoder_decoder_under_graphs() -> None:
    torch.manual_seed(0)
    bert = BertModel(
        BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=500)
    )
    t5 = T5ForConditionalGeneration(T5Config(d_model=64, d_kv=16, num_heads=4, num_layers=2, d_ff=128, vocab_size=500))
    ids = torch.randint(3, 500, (2, 9), device="cuda")
    for model, extra in ((bert, {}), (t5, {"decoder_input_ids": ids[:, :3]})):
        plain = outpace.init_inference(model.eval())
        expected = plain(input_ids=ids, **extra)
        graph = outpace.init_inference(model, enable_cuda_graph=True)
        assert same(graph(input_ids=ids, **extra), expected)


def test_generate_is_the_same_with_graphs_turned_on() -> None:
    ids = torch.randint(3, 1000, (2, 6))
    outputs = [
        outpace.init_inference(llama(), dtype=torch.float32, enable_cuda_graph=on).generate(
            ids, max_new_tokens=12, do_sample=False
        )
        for on in (False, True)
    ]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("events", [False, True])
def test_profiling_times_are_positive_and_less_than_the_wall(graphs: bool, events: bool) -> None:
    engine = outpace.init_inference(llama(), enable_cuda_graph=graphs)
    ids = torch.randint(3, 1000, (1, 8), device="cuda")
    engine(input_ids=ids)
    engine.profile_model_time(use_cuda_events=events)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(5):
        engine(input_ids=ids)
    last.record()
    last.synchronize()
    times = engine.model_times()
    assert len(times) == 5
    assert all(time > 0 for time in times)
    if events:
        assert sum(times) <= first.elapsed_time(last) * 1.01
    assert engine.model_times() == []
    engine.generate(ids, max_new_tokens=4, do_sample=False)
    assert len(engine.model_times()) == 4


def test_destroy_gives_the_memory_back() -> None:
    outpace.init_inference(nn.Linear(8, 8), enable_cuda_graph=True)(torch.randn(2, 8, device="cuda", dtype=torch.half))
    gc.collect()  # what torch itself allocates once, such as cuBLAS's workspace, is there now
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model = llama(layers=4)
    engine = outpace.init_inference(model, enable_cuda_graph=True)
    for length in (1, 5, 9):
        engine(input_ids=torch.full((1, length), 7, device="cuda"))
    assert torch.cuda.memory_allocated() > before
    engine.destroy()
    del model
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_default_dtype_and_device_on_a_gpu() -> None:
    engine = outpace.init_inference(nn.Linear(4, 4))
    assert engine.device.type == "cuda"
    assert engine.dtype == torch.float16


def test_seeded_sampling_does_not_disturb_the_callers_generator() -> None:
    engine = outpace.init_inference(llama(), dtype=torch.float32, seed=11)
    ids = torch.randint(3, 1000, (2, 6), device="cuda")
    state = torch.cuda.get_rng_state()
    texts = [engine.generate(ids, max_new_tokens=8, do_sample=True) for _ in range(2)]
    assert torch.equal(*texts)
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_threads_that_capture_at_the_same_time() -> None:
    ids = torch.randint(3, 1000, (2, 6), device="cuda")
    calls = {"max_new_tokens": 12, "do_sample": False}
    first, *engines = (
        outpace.init_inference(llama(), dtype=torch.float32, kernel_inject=True, enable_cuda_graph=True)
        for _ in range(3)
    )
    logits, tokens = first(input_ids=ids).logits, first.generate(ids, **calls)
    with ThreadPoolExecutor(4) as pool:
        forwards = [pool.submit(engine, input_ids=ids) for engine in engines]
        answers = [pool.submit(engine.generate, ids, **calls) for engine in engines]
        assert all(torch.equal(forward.result().logits, logits) for forward in forwards)
        assert all(torch.equal(answer.result(), tokens) for answer in answers)
    for engine in engines:
        assert engine._graphs is not None
        assert engine._graphs.uncapturable is None


def test_calls_on_different_streams_do_not_overwrite_each_other() -> None:
    engine = outpace.init_inference(llama(), dtype=torch.float32, kernel_inject=True, enable_cuda_graph=True)
    ids = torch.randint(3, 1000, (6, 1, 9), device="cuda")
    calls = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}  # no end: a call waits for nothing
    expected = [(engine(input_ids=each).logits, engine.generate(each, **calls)) for each in ids]
    torch.cuda.synchronize()
    found = []
    for each in ids:
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append((engine(input_ids=each).logits, engine.generate(each, **calls)))
    torch.cuda.synchronize()
    for (logits, tokens), (same_logits, same_tokens) in zip(expected, found, strict=True):
        assert torch.equal(same_logits, logits)
        assert torch.equal(same_tokens, tokens)


def test_a_capture_that_fails_leaves_the_callers_stream() -> None:
    stream = torch.cuda.current_stream()
    engine = outpace.init_inference(Branches(), dtype=torch.float32, enable_cuda_graph=True)
    engine(torch.randn(2, 4, device="cuda"))
    assert engine._graphs is not None
    assert engine._graphs.uncapturable
    assert torch.cuda.current_stream() == stream


def test_calls_with_and_without_inference_mode() -> None:
    engine = outpace.init_inference(llama(), dtype=torch.float32, kernel_inject=True, enable_cuda_graph=True)
    ids = torch.randint(3, 1000, (2, 6), device="cuda")
    with torch.inference_mode():
        expected = engine(input_ids=ids).logits, engine.generate(ids, max_new_tokens=9, do_sample=False)
    found = engine(input_ids=ids).logits, engine.generate(ids, max_new_tokens=9, do_sample=False)
    assert same(found, expected)
