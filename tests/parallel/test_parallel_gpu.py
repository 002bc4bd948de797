"""Ranks that share one GPU, over gloo: what each computes there is its part of what one process computes."""

from functools import cache

import pytest
import torch

from tests.parallel.test_init_inference import tp
from tests.parallel.world import Case, run_world, title

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
NAMES = ("llama", "qwen3", "gpt_neox", "falcon 40b", "bloom", "moe: qwen3", "moe: gpt-oss", "moe: olmoe")
CASES: tuple[Case, ...] = (
    *(("on_a_gpu", name, tp(2)) for name in NAMES),
    ("on_a_gpu", "moe: mixtral", {"moe": {"ep_size": 2}}),
    ("on_a_gpu", "moe: mixtral", tp(2, moe={"ep_size": 2})),
)


@cache
def ran() -> dict[str, str]:
    """All cases, in one start."""
    return run_world(2, CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: title(*case))
def test_two_ranks_on_one_gpu(case: Case) -> None:
    problem = ran()[title(*case)]
    assert not problem, problem
