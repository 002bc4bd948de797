"""Structures on a GPU: masks go with steps that are under way, from graphs or not, and change no other answer."""

import json
import re
from typing import Any

import pytest
import torch

from outpace import LLM, SamplingParams, StructuredOutputs
from tests.models import byte_tokenizer, tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

CITY = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "big": {"type": "boolean"}},
    "required": ["name", "big"],
    "additionalProperties": False,
}
HELD: list[dict[str, Any]] = [{"json": CITY}, {"regex": "[a-c]{3,5}x"}, {"choice": ["yes", "no"]}]


def make(device: str, **options: Any) -> LLM:
    """A model of random weights that says bytes."""
    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token_id
    model = tiny("llama", vocab_size=len(tokenizer), eos_token_id=end, max_position_embeddings=512)
    given: dict[str, Any] = {"dtype": "fp32", "num_blocks": 200, "max_num_seqs": 16}
    return LLM(model, tokenizer=tokenizer, device=device, **given, **options)


def answers(llm: LLM) -> list[str]:
    """Of requests that are held to something, each beside one that is not."""
    params = []
    for number, each in enumerate(HELD * 3):
        heat: dict[str, Any] = {"temperature": 0.0} if number % 2 else {"temperature": 1.2, "seed": number}
        params.append(SamplingParams(max_tokens=150, structured_outputs=StructuredOutputs(**each), **heat))
        params.append(SamplingParams(max_tokens=40, temperature=0.0))
    with llm:
        found = llm.generate([f"prompt {number}" for number in range(len(params))], params, use_tqdm=False)
    assert all(output.outputs[0].finish_reason == "stop" for output in found[::2])
    return [output.outputs[0].text for output in found]


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"async_scheduling": False}], ids=str)
def test_answers_keep_to_their_structures(options: dict[str, Any]) -> None:
    found = answers(make("cuda", **options))
    for number, text in enumerate(found[::2]):
        if number % 3 == 0:
            assert json.loads(text).keys() == {"name", "big"}
        else:
            assert re.fullmatch("[a-c]{3,5}x" if number % 3 == 1 else "yes|no", text), text
    same = [at for at in range(len(found)) if at % 2 or (at // 2) % 2]  # what was not drawn
    plain = answers(make("cpu"))
    assert [found[at] for at in same] == [plain[at] for at in same]
