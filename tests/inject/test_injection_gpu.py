"""Injected models on a GPU: no further from the truth than Hugging Face's own, and the same tokens under graphs."""

import copy
import gc
from typing import Any

import pytest
import torch

import outpace
from outpace.runner.step_graphs import Shape, StepGraphs
from tests.inject import families, test_bert
from tests.inject.checks import padded_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

FAMILIES = ("Bloom", "Falcon", "Gemma", "GPT2", "GPTNeoX", "GPTJ", "Llama", "OPT", "Phi", "Phi3")
CASES = [(family, case) for family in FAMILIES for case in list(families.FAMILIES[family][1])[:2]]
DTYPES = (torch.bfloat16, torch.float16)


def build(family: str, case: str) -> Any:
    """The tiny model of a case, with weights of a size that 16 bits hold."""
    model = families.family_model(family, case)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= 0.3
    return model.cuda()


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth.double()).norm() / truth.double().norm())


@pytest.mark.parametrize(("family", "case"), CASES)
def test_errors_are_no_larger_than_hugging_faces(family: str, case: str) -> None:
    """Summed over prompts: the error of one small tensor is noise."""
    model = build(family, case)
    vocab = model.config.vocab_size
    for dtype in DTYPES:
        plain = outpace.init_inference(copy.deepcopy(model), dtype=dtype)
        fused = outpace.init_inference(copy.deepcopy(model), dtype=dtype, kernel_inject=True)
        exact = copy.deepcopy(plain.module).float().eval()  # the rounded weights, in exact arithmetic
        errors = torch.zeros(2)
        for seed in range(6):
            inputs = {name: value.cuda() for name, value in padded_prompts(vocab, seed=seed).items()}
            keep = inputs["attention_mask"].bool()
            with torch.no_grad():
                truth = exact(**inputs).logits[keep]
            errors += torch.tensor([error(engine(**inputs).logits[keep], truth) for engine in (plain, fused)])
        assert errors[1] <= 1.5 * errors[0], (dtype, errors.tolist())


@pytest.mark.parametrize(("family", "case"), CASES)
def test_tokens_in_fp32_equal_plain_hugging_face_with_and_without_graphs(family: str, case: str) -> None:
    model = build(family, case)
    inputs = {name: value.cuda() for name, value in padded_prompts(model.config.vocab_size).items()}
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    precision = torch.backends.cuda.matmul.allow_tf32
    assert not precision, "fp32 must be fp32"
    expected = model.generate(**inputs, **options)
    for graphs in (False, True):
        engine = outpace.init_inference(
            copy.deepcopy(model), dtype=torch.float32, kernel_inject=True, enable_cuda_graph=graphs
        )
        for _ in range(2):  # the second call finds pages and graphs of the first
            assert torch.equal(engine.generate(**inputs, **options), expected), graphs


def test_sampling_under_graphs_equals_sampling_without() -> None:
    model = build("Llama", "grouped keys")
    inputs = {name: value.cuda() for name, value in padded_prompts(97).items()}
    texts = []
    for graphs in (False, True):
        engine = outpace.init_inference(
            copy.deepcopy(model), dtype=torch.float32, kernel_inject=True, enable_cuda_graph=graphs, seed=5
        )
        texts.append(engine.generate(**inputs, max_new_tokens=40, do_sample=True, top_k=8, temperature=0.8))
    assert torch.equal(*texts)


def test_alternating_batch_sizes_and_lengths_share_pages_and_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Llama", "grouped keys")
    captured: list[Shape] = []
    capture = StepGraphs.capture

    def noted(graphs: StepGraphs, shape: Shape, run: Any, **options: Any) -> bool:
        captured.append(shape)
        return capture(graphs, shape, run, **options)

    monkeypatch.setattr(StepGraphs, "capture", noted)
    engine = outpace.init_inference(
        copy.deepcopy(model), dtype=torch.float32, kernel_inject=True, enable_cuda_graph=True
    )
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    for turn in range(2):
        before = len(captured)
        for rows, length in ((12, 9), (1, 40), (3, 70), (12, 5), (1, 1)):
            ids = padded_prompts(97, rows, length, seed=turn)["input_ids"].cuda()
            assert torch.equal(engine.generate(ids, **options), model.generate(ids, **options)), (rows, length)
        assert (len(captured) == before) == bool(turn)
    assert {shape.kind for shape in captured} == {"fresh", "chunks", "mixed", "decode"}


def test_destroy_gives_pages_and_graphs_back() -> None:
    def used() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def generate() -> None:
        engine = outpace.init_inference(
            build("Llama", "grouped keys"), dtype=torch.float32, kernel_inject=True, enable_cuda_graph=True
        )
        ids = torch.full((2, 9), 7, device="cuda")
        engine.generate(ids, max_new_tokens=8, do_sample=False)
        engine.generate(ids, max_new_tokens=8, do_sample=True)
        engine.destroy()

    generate()  # what libraries keep for good
    before = used()
    generate()
    assert used() <= before


@pytest.mark.parametrize("case", list(test_bert.CASES)[:2])
def test_encoders_under_graphs(case: str) -> None:
    family, options = test_bert.CASES[case]
    model = test_bert.made(family, "Model", options).cuda()
    inputs = {name: value.cuda() for name, value in padded_prompts(97).items()}
    engine = outpace.init_inference(
        copy.deepcopy(model), dtype=torch.float32, kernel_inject=True, enable_cuda_graph=True
    )
    with torch.no_grad():
        expected = model(**inputs)
    for _ in range(2):
        torch.testing.assert_close(engine(**inputs)[0], expected[0], rtol=1e-4, atol=1e-4)
