"""Models that no policy knows, over ranks: by Hugging Face's plan, by injection_policy, and people's own experts."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from tests.parallel.world import Case, run_world, title

T5 = {"T5Block": ["SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo"]}
BART = {
    "BartEncoderLayer": ["self_attn.out_proj", ".fc2"],
    "BartDecoderLayer": ["self_attn.out_proj", "encoder_attn.out_proj", "fc2"],
}
EP: Mapping[str, Any] = {"moe": {"ep_size": 2}}


def tp(**more: Any) -> dict[str, Any]:
    """Options of a config with kernel injection."""
    return {"tensor_parallel": {"tp_size": 2}, **more}


def plain(**more: Any) -> dict[str, Any]:
    """The same without it."""
    return tp(replace_with_kernel_inject=False, **more)


def named(policy: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The same with names of linears."""
    return plain(injection_policy=policy, **more)


CASES: tuple[Case, ...] = (
    *(("compare", f"own: {name}", tp()) for name in ("glm4", "exaone4", "ernie", "minimax", "mimo")),
    *(("compare", f"own: {name}", plain()) for name in ("deepseek", "nemotron", "gemma3", "eurobert")),
    ("compare", "moe: mixtral", plain()),
    ("compare", "own: t5", named(T5)),
    ("compare", "own: bart", named(BART)),
    ("compare", "own: electra", named({"ElectraLayer": ["output.dense"]})),
    ("compare", "own: solar", EP),
    ("compare", "own: solar", tp(**EP)),
    ("compare", "own: minimax", {"replace_with_kernel_inject": False, **EP}),
    *(("own_mixture", "own: my experts", options) for options in (tp(), EP, tp(**EP))),
    *(("own_mixture", "own: deepspeed's experts", options) for options in (tp(), EP, tp(**EP))),
    *(("checkpoint", f"own: {name}", tp()) for name in ("exaone4", "mimo")),
    ("refused", "own: t5", plain(says=r"tp_size: nothing says how T5\w+ is split .*injection_policy=")),
    ("refused", "own: doge", plain(says="DogeForCausalLM cannot run with a part of its heads")),
    ("refused", "own: bert", plain(says="nothing says how .*set replace_with_kernel_inject=True")),
    (
        "refused",
        "own: gpt2",
        named({"GPT2Block": ["attn.c_proj", "mlp.c_proj"]}, says=r"h\.0\.attn\.c_attn computes queries, keys"),
    ),
    ("refused", "own: t5", named({"T5Block": ["no_such"]}, says="has no 'no_such'")),
    ("refused", "own: unknown style", tp(says=r"layers\.0\.mlp\.up_proj as 'by_the_moon', which Outpace")),
    ("refused", "own: llama", {**EP, "says": r"moe\.ep_size: LlamaForCausalLM has no experts"}),
    (
        "refused",
        "moe: gpt-oss",
        dict(replace_with_kernel_inject=False, **EP, says=r"moe\.ep_size: .*experts .* has a gate of its own"),
    ),
    ("logged", "own: solar", tp(says=[r"mlp\.gate\.weight: whole on every rank: 1\.02 KB"])),
    ("logged", "own: t5", named(T5, says=["shared.weight: whole on every rank", "injection: .* modules of T5"])),
)


@cache
def ran() -> dict[str, str]:
    """All cases, in one start of two ranks."""
    return run_world(2, CASES)


@pytest.mark.parametrize("case", [pytest.param(case, id=title(*case)) for case in CASES])
def test_own_layers_over_ranks(case: Case) -> None:
    problem = ran()[title(*case)]
    assert not problem, problem
