"""init_inference, and the engine of LLM, over ranks: every family has the logits and tokens of one process."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import pytest

import outpace
from outpace import ConfigError
from tests import sharded_models
from tests.inject.mixtures import MIXTURES
from tests.models import tiny
from tests.parallel.world import Case, run_world, title, tp

MOE = tuple(f"moe: {case}" for case in {family: case for case, (family, _) in MIXTURES.items()}.values())
"""One of each family of experts."""
SPARSE = ("mixtral", "qwen2 moe", "gpt-oss", "granite moe", "dots1", "phi moe", "granite moe shared")
"""Of `sharded_models`: families that `MOE` has too."""
DENSE = tuple(name for name in sharded_models.NAMES if name not in SPARSE)
UNEVEN = ("llama", "five key heads", "falcon 40b", "gpt_neox", "bloom", "codegen", "moe: olmoe", "moe: gpt-oss", "bert")
SHARED_HEADS = ("llama", "qwen3", "falcon 7b", "falcon 40b", "bigcode", "gpt-oss", "tied", "opt")

BY_NAMES = {
    "replace_with_kernel_inject": False,
    "injection_policy": {"LlamaDecoderLayer": ["o_proj", "down_proj"]},
}


HOT: Mapping[str, Any] = {"hot_experts": 1, "expert_load": [[5, 1, 1, 9], [1, 1, 1, 1], [9, 9, 0, 0]]}
"""A copy of the busiest expert of each layer on the rank that lacks it."""


def cases(kind: str, names: Sequence[str], options: Mapping[str, Any]) -> Iterator[Case]:
    """The same for several models."""
    yield from ((kind, name, options) for name in names)


CASES: Mapping[int, tuple[Case, ...]] = {
    2: (
        *cases("compare", DENSE, tp(2)),
        *cases("compare", MOE, tp(2)),
        *cases("compare", MOE, {"moe": {"ep_size": 2}}),
        *cases("compare", MOE, tp(2, moe={"ep_size": 2})),
        *cases("llm", [name for name in DENSE if name != "bert"], {"tensor_parallel_size": 2}),
        *cases("llm", MOE, {"tensor_parallel_size": 2}),
        *cases("llm", MOE[:3], {"moe": {"ep_size": 2}}),
        *cases("llm", MOE[:3], {"tensor_parallel_size": 2, "moe": {"ep_size": 2}}),
        *cases("quantized", ("llama", "moe: mixtral"), tp(2, quant={"scheme": "int8"})),
        *cases("grain", ("llama",), {"tensor_parallel": {"tp_size": 2, "tp_grain_size": 16}}),
        *cases("own_groups", ("llama",), {}),
        *cases("calls", ("llama",), tp(2)),
        *cases("checkpoint", ("llama", "moe: mixtral"), tp(2)),
        *cases("streamed", ("llama", "gpt2", "mixtral"), tp(2)),
        *cases("streamed", ("mixtral",), {"moe": {"ep_size": 2}}),
        *cases("streamed", ("mixtral",), tp(2, moe={"ep_size": 2})),
        *cases("streamed_badly", ("llama",), tp(2)),
    ),
    3: (
        *cases("compare", (*UNEVEN, "hugging face's plan"), tp(3)),
        *cases("llm", ("five key heads", "bloom", "moe: gpt-oss"), {"tensor_parallel_size": 3}),
    ),
    4: (
        *cases("compare", SHARED_HEADS, tp(4)),
        *cases("llm", ("llama", "falcon 40b", "moe: mixtral"), {"tensor_parallel_size": 4}),
        *cases("copies", ("llama",), tp(2)),
        *cases("copies", ("moe: mixtral",), {"moe": {"ep_size": 4}}),
        *cases("refused", ("five key heads",), tp(4, moe={"ep_size": 2}, says=r"^moe\.ep_size: .*no experts")),
        *cases("compare", MOE[:4], {"moe": {"ep_size": 4}}),
        *cases("compare", MOE[:4], tp(2, moe={"ep_size": 2})),
        *cases("compare", MOE[:4], tp(2, moe={"ep_size": 4})),
        *cases("compare", ("moe: mixtral", "moe: gpt-oss"), {"moe": {"ep_size": 2, **HOT}}),
        *cases("compare", ("moe: mixtral", "moe: gpt-oss"), tp(2, moe={"ep_size": 2, **HOT})),
        *cases("sliced_experts", ("moe: mixtral", "moe: gpt-oss", "own: solar"), tp(2)),
        *cases("compare", ("own: solar",), tp(2, moe={"ep_size": 4})),
        *cases("refused", ("own: ernie",), tp(4, says="num_key_value_heads=2 of Ernie4_5ForCausalLM does not divide")),
        *cases("refused", ("own: llama",), tp(4, **BY_NAMES, says=r"2 heads of model\.layers\.0\.self_attn do not")),
    ),
}


@cache
def ran(size: int) -> dict[str, str]:
    """All cases of a world, in one start."""
    return run_world(size, CASES[size])


@pytest.mark.parametrize(
    ("size", "case"),
    [pytest.param(size, case, id=f"{size} ranks, {title(*case)}") for size, some in CASES.items() for case in some],
)
def test_ranks_together_are_one_process(size: int, case: Case) -> None:
    problem = ran(size)[title(*case)]
    assert not problem, problem


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (tp(2), r"tensor_parallel\.tp_size=2.*this process is alone.*torchrun"),
        ({"moe": {"ep_size": 2}}, r"moe\.ep_size=2: this process is alone"),
        ({"tensor_parallel": {"mpu": object()}}, r"tensor_parallel\.mpu: expected an object with get_tensor_model"),
        ({"tensor_parallel": {"tp_group": 3}}, r"tensor_parallel\.tp_group: expected a process group of torch"),
        ({"moe": {"ep_group": "all"}}, r"moe\.ep_group: expected a process group of torch"),
        ({"moe": {"ep_mp_group": "all"}}, r"moe\.ep_mp_group: expected a process group of torch"),
    ],
)
def test_what_cannot_be_is_said_before_anybody_is_waited_for(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        outpace.init_inference(tiny("llama"), replace_with_kernel_inject=True, device="cpu", **options)
