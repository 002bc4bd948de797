"""LLMs with streamed layers, and what they answer."""

import copy
from pathlib import Path
from typing import Any

from torch import nn

from outpace import LLM, SamplingParams
from outpace.offload.streaming import Streaming
from tests.inject.mixtures import mixture
from tests.models import prompts
from tests.offload.placed import LAYERS, offload_at

PARAMS = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, logprobs=3)
TEXTS = [prompt.tolist() for prompt in prompts(5, 12, 3)]


def answers(llm: LLM) -> list[Any]:
    """Tokens and the log-probabilities of each, which tell one bit from another."""
    outputs = llm.generate(TEXTS, PARAMS, use_tqdm=False)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]


def llm_of(model: Any, **options: Any) -> LLM:
    return LLM(copy.deepcopy(model) if isinstance(model, nn.Module) else model, device="cpu", num_blocks=32, **options)


def streaming_of(llm: LLM) -> Streaming:
    found = llm.engine.streaming
    assert found is not None
    return found


CASES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3": {"num_experts": 16},
    "gpt-oss": {"layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"]},
    "glm4": {"n_routed_experts": 12},
}
"""Few experts, many, ones with biases, and ones beside an expert for every token, behind a layer that has none."""


def model_of(case: str, **changes: Any) -> Any:
    return mixture(case, num_hidden_layers=LAYERS, **{**CASES[case], **changes})


def some(model: Any, place: str, folder: Path, layers: int) -> dict[str, Any]:
    """Room for the experts of so many of the layers."""
    given = offload_at(place, model, folder)
    room = layers * (offload_at("host", model, folder)["host_memory"] // LAYERS)
    return {**given, "device_memory": given["device_memory"] + room, "expert_cache": room}


EVERYTHING = {"cpu_offload_gb": 1.0, "expert_cache": "1GB"}


def offload_of(how: str, model: Any, folder: Path) -> dict[str, Any]:
    place, cache = how.split(", ")
    return EVERYTHING if cache == "all" else some(model, place, folder, {"none": 0, "some": 2}[cache])


def run(llm: LLM, length: int, new: int, seed: int = 0) -> None:
    (prompt,) = prompts(length, seed=seed)
    llm.generate([prompt.tolist()], SamplingParams(max_tokens=new, temperature=0, ignore_eos=True), use_tqdm=False)
