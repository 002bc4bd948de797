"""Ranks that share one GPU, over gloo: what each computes there is its part of what one process computes."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace import LLM, SamplingParams
from tests.parallel.world import Case, run_world, title, tp
from tests.sharded_models import make

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
NAMES = ("llama", "qwen3", "gpt_neox", "falcon 40b", "bloom", "moe: qwen3", "moe: gpt-oss", "moe: olmoe")
STAGED = ("llama", "gpt2", "bloom", "gemma3", "moe: mixtral", "own: glm4")
CASES: tuple[Case, ...] = (
    *(("on_a_gpu", name, tp(2)) for name in NAMES),
    ("on_a_gpu", "moe: mixtral", {"moe": {"ep_size": 2}}),
    ("on_a_gpu", "moe: mixtral", tp(2, moe={"ep_size": 2})),
    *(("on_a_gpu", name, {"pipeline_parallel": {"pp_size": 2}}) for name in STAGED),
)


@cache
def ran() -> dict[str, str]:
    """All cases, in one start."""
    return run_world(2, CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: title(*case))
def test_two_ranks_on_one_gpu(case: Case) -> None:
    problem = ran()[title(*case)]
    assert not problem, problem


@pytest.mark.parametrize(
    "options",
    [{}, {"quantization": "int8"}, {"moe": {"ep_size": 2}}, {"pp": 2}, {"pp": 2, "enforce_eager": True}],
    ids=str,
)
def test_llm_on_two_ranks_of_one_gpu(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_RANKS_SHARE_DEVICE", "1")
    make("mixtral" if "moe" in options else "llama").save_pretrained(tmp_path)
    prompts = [[5, 6, 7, 8, 9], [11, 12, 13]]
    kinds = (SamplingParams(temperature=0, max_tokens=12), SamplingParams(temperature=0.8, seed=3, max_tokens=12))
    found = []
    for ranks in (1, 2):
        given = {**options, **({} if ranks == 1 or "pp" in options else {"tensor_parallel_size": ranks})}
        for name in ("moe", "pp") if ranks == 1 else ():
            given.pop(name, None)
        with LLM(str(tmp_path), device="cuda", dtype="fp32", num_blocks=64, max_model_len=64, **given) as llm:
            answers = [llm.generate(prompts, params, use_tqdm=False) for params in kinds]
            found.append([[each.outputs[0].token_ids for each in some] for some in answers])
    if "quantization" not in options:  # each rank has scales of its own: some tokens differ
        assert found[0] == found[1]
    assert all(len(tokens) == 12 for some in found[1] for tokens in some)
