"""Pipelines of two, three and four stages, alone and beside every other kind of ranks: what one process gives."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import pytest

import outpace
from outpace import ConfigError
from tests.models import tiny
from tests.parallel.world import Case, run_world, title

PLAIN: Mapping[str, Any] = {"replace_with_kernel_inject": False}
FAMILIES = ("llama", "gpt2", "opt", "bloom", "mixtral")
DEEP = tuple(f"five layers: {family}" for family in FAMILIES)
"""Layers that no number of stages divides evenly."""
LEVEL_0 = "own: glm4"


def pp(size: int, *, layers: Sequence[int] | None = None, micro_batches: int | None = None, **more: Any) -> Any:
    """Options of a config."""
    asked = {"pp_size": size, "layers": layers, "micro_batches": micro_batches}
    return {"pipeline_parallel": {name: value for name, value in asked.items() if value is not None}, **more}


def tp(size: int) -> dict[str, Any]:
    """Options of a config."""
    return {"tensor_parallel": {"tp_size": size, "tp_grain_size": 1}}


def cases(kind: str, names: Sequence[str], options: Mapping[str, Any]) -> Iterator[Case]:
    """The same for several models."""
    yield from ((kind, name, options) for name in names)


CROWDED: Mapping[str, Any] = {"pipeline_parallel_size": 2, "async_scheduling": True}
BESIDE: tuple[dict[str, Any], ...] = (
    {"deterministic": True},
    {"quantization": "int8"},
    {"kv_cache_dtype": "int8"},
    {"offload": {"host_pages": "1MB"}},
    {"offload": {"cpu_offload_gb": 1.0, "kv": "1MB"}},
)
"""What acts over stages as it does over none."""
CASES: Mapping[int, tuple[Case, ...]] = {
    2: (
        *cases("compare", (*FAMILIES, "tied", "bert", LEVEL_0), pp(2)),
        *cases("compare", ("five layers: gemma3", "own: deepseek", "own: electra"), pp(2)),
        *cases("compare", ("llama", "bert"), pp(2, **PLAIN)),
        *cases("forwards", DEEP[:1], pp(2)),
        *cases("forwards", DEEP[:1], pp(2, micro_batches=1)),
        *cases("forwards", DEEP[1:2], pp(2, micro_batches=3, **PLAIN)),
        *cases("fails", DEEP[:1], pp(2)),
        *cases("fails", DEEP[:1], pp(2, **PLAIN)),
        *cases("generates", DEEP[:1], pp(2)),
        *cases("generates", DEEP[2:3], pp(2, **PLAIN)),
        *cases("calls", ("llama",), pp(2)),
        *cases("held", DEEP[:1], pp(2)),
        *cases("held", DEEP[1:2], pp(2, layers=[1, 4], **PLAIN)),
        *cases("checkpoint", ("moe: mixtral",), pp(2)),
        *cases("quantized", ("llama",), pp(2, quant={"scheme": "int8"})),
        *cases("streamed", ("llama",), pp(2)),
        *cases("streamed_badly", ("llama",), pp(2)),
        *cases("llm", (*FAMILIES, "tied", LEVEL_0), {"pipeline_parallel_size": 2}),
        *(("llm", "llama", {"pipeline_parallel_size": 2, **more}) for more in BESIDE),
        *cases("crowd", ("llama",), CROWDED),
        *cases("crowd", ("llama",), {**CROWDED, "swap_space": 1e-4}),
        *cases("crowd", ("gpt2",), {**CROWDED, "kv_offloading_size": 1e-4, "async_scheduling": False}),
        *cases("in_flight", ("llama",), {"pipeline_parallel_size": 2}),
        *cases("in_flight", ("llama",), CROWDED),
        *cases("refused", ("own: t5", "own: bart"), pp(2, says=r"^pipeline_parallel\.pp_size: .* 2 lists of layers")),
        *cases("refused", ("llama",), pp(2, layers=[1, 2], says=r"layers: \(1, 2\) are 3 layers, and the model has 2")),
        *cases("refused", ("llama",), pp(2, **tp(2), says=r"tp_size: 1 ranks of each of 2 stages cannot be divided")),
        *cases("refused", ("own: my experts",), pp(2, says="has no lists of layers")),
    ),
    3: (
        *cases("compare", DEEP, pp(3)),
        *cases("forwards", DEEP[:1], pp(3)),
        *cases("fails", DEEP[:1], pp(3)),
        *cases("generates", DEEP[:1], pp(3)),
        *cases("held", DEEP[:1], pp(3, layers=[2, 2, 1])),
        *cases("llm", DEEP[:1], {"pipeline_parallel_size": 3}),
        *cases("in_flight", DEEP[:1], {**CROWDED, "pipeline_parallel_size": 3}),
        *cases("refused", ("llama",), pp(3, says=r"pp_size: 3 stages, and the model has 2 layers; ask for fewer")),
        *cases("refused", ("llama",), pp(2, says="3 ranks cannot be divided into 2 stages; start a multiple of 2")),
    ),
    4: (
        *cases("compare", (DEEP[0], DEEP[3]), pp(4)),
        *cases("compare", ("llama", "gpt2", LEVEL_0), pp(2, **tp(2))),
        *cases("compare", ("moe: mixtral",), pp(2, moe={"ep_size": 2})),
        *cases("compare", ("moe: mixtral",), pp(2, moe={"ep_size": 2}, **tp(2))),
        *cases("copies", ("llama",), pp(2)),
        *cases("copies", ("moe: mixtral",), pp(2, moe={"ep_size": 2})),
        *cases("llm", ("llama",), {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
        *cases("llm", ("moe: mixtral",), {"pipeline_parallel_size": 2, "moe": {"ep_size": 2}}),
        *cases("crowd", DEEP[:1], {**CROWDED, "pipeline_parallel_size": 4}),
        *cases("crowd", ("llama",), {**CROWDED, "tensor_parallel_size": 2, "swap_space": 1e-4}),
        *cases("in_flight", DEEP[:1], {**CROWDED, "pipeline_parallel_size": 4}),
        *cases("streamed", ("mixtral",), pp(2, moe={"ep_size": 2})),
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
def test_stages_together_are_one_process(size: int, case: Case) -> None:
    problem = ran(size)[title(*case)]
    assert not problem, problem


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (pp(2), r"pipeline_parallel\.pp_size=2, .*this process is alone.*torchrun"),
        (pp(0), r"pipeline_parallel\.pp_size: .*greater than or equal to 1"),
        (pp(2, layers=[2]), r"layers: \(2,\) must be a number of layers, at least 1, for each of pp_size=2"),
        (pp(2, layers=[2, 0]), r"layers: \(2, 0\) must be a number of layers"),
        (pp(2, micro_batches=0), r"pipeline_parallel\.micro_batches: .*greater than or equal to 1"),
        (pp(2, tensor_parallel={"mpu": object()}), r"pp_size with tensor_parallel\.mpu or tp_group"),
        (pp(2, moe={"ep_group": object()}), r"pp_size with moe\.ep_group or ep_mp_group"),
        (pp(2, enable_cuda_graph=True), r"enable_cuda_graph with pipeline_parallel\.pp_size > 1"),
        ({"pipeline_parallel_size": 2}, r"pipeline_parallel_size: a name of outpace\.LLM alone"),
    ],
)
def test_what_cannot_be_is_said_before_anybody_is_waited_for(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        outpace.init_inference(tiny("llama"), replace_with_kernel_inject=True, device="cpu", **options)
