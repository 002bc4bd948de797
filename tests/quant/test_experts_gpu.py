"""Quantized experts on a GPU: tokens in fp32 are those of separate code, and 16 bits are as near as plain experts."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import outpace
from outpace import LLM, SamplingParams
from outpace.config import LLMConfig
from outpace.load_paged import load_paged
from tests.inject.checks import padded_prompts
from tests.inject.mixtures import build, mixture
from tests.quant.fake import fake_quantized, fake_quantized_experts, rounded, rounded_fp8
from tests.quant.mixtures import RULES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
CASES = ("mixtral", "qwen2", "gpt-oss", "glm4")


@pytest.mark.parametrize("kernels", [{}, {"experts": "torch", "route": "torch"}], ids=["triton", "torch"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", CASES)
def test_tokens_in_fp32(case: str, rule: str, kernels: dict[str, str]) -> None:
    """With CUDA graphs and without, prompts of several tokens and steps of few."""
    quant, fake = RULES[rule]
    inputs = {name: value.cuda() for name, value in padded_prompts(97).items()}
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    model = build(case)
    want = fake_quantized_experts(copy.deepcopy(model).cpu(), **fake).cuda().generate(**inputs, **options)
    for graphs in (False, True):
        engine = outpace.init_inference(
            copy.deepcopy(model),
            dtype="fp32",
            kernel_inject=True,
            enable_cuda_graph=graphs,
            quant=quant,
            kernels=kernels,
        )
        assert torch.equal(engine.generate(**inputs, **options), want), graphs


@pytest.mark.parametrize("rows", [64, 0], ids=["weights", "rows too"])
@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8", "w8a8"])
def test_errors_in_bf16(scheme: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the median token, beside those of the same weights in the model's own experts."""
    monkeypatch.setattr("outpace.kernels.experts.ROUNDED_ROWS", rows)
    how: Any = rounded_fp8 if scheme == "fp8" else rounded
    model, fake = build("mixtral"), build("mixtral").cpu()
    quant: dict[str, Any] = {"scheme": scheme}
    if scheme == "int4":
        quant = {"weight": {"post_init_quant": {".experts.": {"num_bits": 4, "symmetric": True}}}}
        fake = fake_quantized_experts(fake, bits=4).cuda()
    else:
        fake = fake_quantized_experts(fake_quantized(fake, how), how).cuda()
    engine = outpace.init_inference(copy.deepcopy(model), dtype="bf16", kernel_inject=True, quant=quant)
    inputs = {name: value.cuda() for name, value in padded_prompts(97, batch=8).items()}
    keep = inputs["attention_mask"].bool()
    with torch.no_grad():
        want, plain = fake(**inputs).logits[keep].double(), model(**inputs).logits[keep].double()
    error = ((engine(**inputs).logits[keep].double() - want).norm(dim=1) / want.norm(dim=1)).median()
    changed = ((plain - want).norm(dim=1) / want.norm(dim=1)).median()
    assert error <= 0.05 + 2 * changed


@pytest.mark.parametrize("scheme", ["int4", "fp8"])
def test_requests_in_mixed_steps_from_graphs(scheme: str) -> None:
    """Deterministic: alone and together they have the same tokens and the same probabilities."""
    prompts = [row.tolist() for row in torch.randint(3, 97, (6, 19), generator=torch.Generator().manual_seed(0))]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    options: dict[str, Any] = {"quantization": scheme, "deterministic": True, "enable_prefix_caching": False}
    llm = LLM(build("qwen2"), device="cuda", dtype="bf16", max_num_batched_tokens=16, max_num_seqs=8, **options)
    alone = [llm.generate(each, params, use_tqdm=False)[0].outputs[0].logprobs for each in prompts]
    together = llm.generate(prompts, params, use_tqdm=False)
    assert [each.outputs[0].logprobs for each in together] == alone


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("case", ["mixtral", "gpt-oss"])
def test_a_stream_makes_what_it_makes_on_the_host(case: str, scheme: str, tmp_path: Path) -> None:
    """Devices divide differently in the last bit: a value at the border between two steps may go either way."""
    mixture(case).save_pretrained(tmp_path)
    configs = [LLMConfig.of(dtype="fp32", device=device, quantization=scheme) for device in ("cpu", "cuda")]
    there, here = (load_paged(tmp_path, config, tokenizer=False).module for config in configs)
    for (name, want), found in zip(there.named_parameters(), here.parameters(), strict=True):
        if want.dtype.itemsize == 1:
            other = found.cpu().view(torch.uint8) != want.view(torch.uint8)
            assert other.float().mean() <= 0.002, name
        else:
            torch.testing.assert_close(found.cpu(), want, rtol=1e-3, atol=0, msg=name)
