"""The default model with its layers in host memory and on disk: the bits of the resident one."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

import outpace
from outpace import LLM, SamplingParams
from outpace.offload.units import find_layers
from tests.offload.placed import offload_at

TEXTS = ["The capital of France is", "Two and two make", "Once upon a time there was a lighthouse"]
PARAMS = SamplingParams(max_tokens=8, temperature=0, logprobs=2, ignore_eos=True)


def answers(folder: Path, **options: Any) -> Any:
    with LLM(folder, device="cpu", dtype="fp32", num_blocks=8, **options) as llm:
        outputs = llm.generate(TEXTS, PARAMS, use_tqdm=False)
        streaming = llm.engine.streaming
        if options:
            assert streaming is not None
            assert streaming.counts.loads >= 8 * len(streaming.units), "every step fetches all of them"
        found = () if streaming is None else set(streaming.placement.tiers)
        return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs], found


@pytest.mark.real
def test_n8_every_placement_gives_the_bits_of_the_resident_model(default_model_folder: Path, tmp_path: Path) -> None:
    wanted, _ = answers(default_model_folder)
    with outpace.OnDevice("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(default_model_folder))
    assert len(find_layers(empty)) == 30
    for place, tiers in (("host", {"host"}), ("disk", {"disk"}), ("some stay", {"device", "host", "disk"})):
        found = answers(default_model_folder, offload=offload_at(place, empty, tmp_path))
        assert found == (wanted, tiers), place
