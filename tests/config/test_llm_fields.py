"""Promise 2 for the options that `LLM` has alone: each acts or raises. A new one without an entry here fails."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from outpace.cache.block_pool import BlockPool
from outpace.config import InferenceConfig, LLMConfig
from outpace.config.rules import LATER, LLM_COMPOSITIONS
from outpace.errors import ConfigError, InputError, NotSupportedYet, Overloaded
from outpace.llm_engine import LLMEngine
from outpace.load_paged import load_paged
from outpace.scheduler import Scheduler
from outpace.types import Request, SamplingParams, Step, StepOutput
from tests.config.walk import entry_of, leaves, nested, numbers, other_value
from tests.models import tiny

SHARED, ALL = dict(leaves(InferenceConfig)), dict(leaves(LLMConfig))
FIELDS = {
    path: field
    for path, field in ALL.items()
    if path not in SHARED or SHARED[path].default != field.default or SHARED[path].annotation != field.annotation
}


def of(*config: Any, **options: Any) -> LLMConfig:
    return LLMConfig.of(*config, **{"device": "cpu", **options})


def at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def raises(says: str, **options: Any) -> None:
    with pytest.raises(ConfigError, match=says):
        of(**options)


class Requests:
    """A scheduler made as a config says, and steps that sample the token 1."""

    def __init__(self, **options: Any) -> None:
        cache, chosen = of(**options).cache, of(**options).scheduler
        pool = BlockPool(cache.num_blocks or 64, cache.block_size, enable_prefix_caching=cache.enable_prefix_caching)
        self.scheduler = Scheduler(
            pool,
            max_num_seqs=chosen.max_num_seqs,
            max_num_batched_tokens=chosen.max_num_batched_tokens or 2048,
            max_model_len=1024,
            max_waiting=chosen.max_waiting,
            max_chunk_beside_decodes=chosen.max_chunk_beside_decodes,
            longest_first=chosen.policy == "longest_first",
        )

    def add(self, name: str, length: int, max_tokens: int = 4) -> None:
        prompt = tuple(range(length))
        request = Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(max_tokens=max_tokens))
        self.scheduler.check(request)
        self.scheduler.add(request)

    def step(self) -> Step:
        step = self.scheduler.schedule()
        self.scheduler.update(StepOutput(step.step_id, {each.request_id: 1 for each in step.sequences if each.samples}))
        return step

    def tokens(self) -> dict[str, int]:
        return {each.request_id: each.num_new_tokens for each in self.step().sequences}


def max_num_seqs_acts() -> None:
    for most, expected in ((1, {"a": 5}), (2, {"a": 5, "b": 5})):
        requests = Requests(max_num_seqs=most)
        requests.add("a", 5)
        requests.add("b", 5)
        assert requests.tokens() == expected


def max_num_batched_tokens_acts() -> None:
    requests = Requests(max_num_batched_tokens=8, max_num_seqs=4)
    requests.add("a", 20)
    assert [requests.tokens() for _ in range(3)] == [{"a": 8}, {"a": 8}, {"a": 4}]


def max_chunk_beside_decodes_acts() -> None:
    requests = Requests(max_chunk_beside_decodes=3)
    requests.add("a", 2)
    requests.step()
    requests.add("b", 20)
    assert requests.tokens() == {"a": 1, "b": 3}


def policy_acts() -> None:
    for policy, first in (("arrival", "short"), ("longest_first", "long")):
        requests = Requests(policy=policy, max_num_seqs=1)
        requests.add("short", 5, 2)
        requests.add("long", 5, 9)
        assert list(requests.tokens()) == [first]


def target_step_ms_acts() -> None:
    """Where steps are timed: tests/runner/test_runner.py."""
    raises("scheduler.target_step_ms: steps are timed on a GPU only", target_step_ms=20.0)


def max_waiting_acts() -> None:
    requests = Requests(max_waiting=1)
    requests.add("a", 2)
    with pytest.raises(Overloaded, match="max_waiting=1"):
        requests.add("b", 2)


def block_size_acts() -> None:
    for size, pages in ((16, 2), (32, 1)):
        requests = Requests(block_size=size)
        requests.add("a", 20)
        assert len(requests.step().sequences[0].new_blocks) == pages


def num_blocks_acts() -> None:
    with pytest.raises(InputError, match="do not fit the cache of 16 tokens"):
        Requests(num_blocks=1, block_size=16).add("a", 20)


def enable_prefix_caching_acts() -> None:
    for shared, start in ((True, 16), (False, 0)):
        requests = Requests(enable_prefix_caching=shared, block_size=16)
        requests.add("a", 20)
        requests.step()
        requests.add("b", 20)
        assert {each.request_id: each.start for each in requests.step().sequences}["b"] == start


def gpu_memory_utilization_acts() -> None:
    raises("cache.gpu_memory_utilization: the model runs on a CPU; give cache", gpu_memory_utilization=0.5)
    raises("cache.num_blocks with cache.gpu_memory_utilization", num_blocks=3, gpu_memory_utilization=0.5)


def cpu_cache_space_acts() -> None:
    assert of(cpu_cache_space=3).cache.cpu_cache_space == 3
    raises("cache.num_blocks with .* cache.cpu_cache_space: both say", num_blocks=3, cpu_cache_space=3)


def max_out_tokens_acts() -> None:
    assert (of().max_out_tokens, of(max_out_tokens=12).max_out_tokens) == (None, 12)
    raises("min_out_tokens must be smaller than max_out_tokens", max_model_len=5, min_out_tokens=5)


def max_logprobs_acts() -> None:
    for most, asked, says in ((20, 21, "21 is more than"), (30, -1, "the whole vocabulary is more than"), (-1, -1, "")):
        engine = LLMEngine(load_paged(tiny("llama"), of(device="cpu", max_logprobs=most)))
        with pytest.raises(InputError, match=says) if says else nullcontext():
            engine.make("a", [1, 2], SamplingParams(logprobs=asked))


def arrives(path: str, value: Any) -> Callable[[], None]:
    """A field that the config only carries."""

    def check() -> None:
        assert at(of(nested(path, value)), path) == value != FIELDS[path].default

    return check


NODES: dict[str, Any] = {"nnodes": 2, "master_addr": "10.0.0.1"}


def of_a_node(name: str, value: Any) -> Callable[[], None]:
    """A field that acts when several nodes start, see tests/nodes; alone it is refused."""

    def check() -> None:
        assert at(of(**NODES, node_rank=1, **{name: value}), f"nodes.{name}") == value
        raises("nodes: its fields concern several machines; give nodes.nnodes too", **{name: value})

    return check


EFFECTS: Mapping[str, Callable[[], None]] = {
    "replace_with_kernel_inject": lambda: raises("replace_with_kernel_inject=False: LLM runs", kernel_inject=False),
    "enable_cuda_graph": lambda: raises("enable_cuda_graph: a CPU has no CUDA graphs", enable_cuda_graph=True),
    "enforce_eager": lambda: raises("enforce_eager and enable_cuda", enforce_eager=False, enable_cuda_graph=False),
    "max_out_tokens": max_out_tokens_acts,
    "deterministic": arrives("deterministic", True),
    "generation_config": arrives("generation_config", "none"),
    "max_logprobs": max_logprobs_acts,
    "cache.block_size": block_size_acts,
    "cache.num_blocks": num_blocks_acts,
    "cache.gpu_memory_utilization": gpu_memory_utilization_acts,
    "cache.cpu_cache_space": cpu_cache_space_acts,
    "cache.enable_prefix_caching": enable_prefix_caching_acts,
    "cache.swap_space": arrives("cache.swap_space", 2.5),
    "scheduler.max_num_seqs": max_num_seqs_acts,
    "scheduler.max_num_batched_tokens": max_num_batched_tokens_acts,
    "scheduler.max_chunk_beside_decodes": max_chunk_beside_decodes_acts,
    "scheduler.target_step_ms": target_step_ms_acts,
    "scheduler.policy": policy_acts,
    "scheduler.max_waiting": max_waiting_acts,
    "scheduler.async_scheduling": arrives("scheduler.async_scheduling", False),
    "nodes.nnodes": lambda: raises("nodes.nnodes: every node has the same number of ranks", **NODES),
    "nodes.node_rank": lambda: raises("nodes.node_rank: nodes are counted from 0", **NODES, node_rank=2),
    "nodes.master_addr": lambda: raises("nodes.nnodes > 1 without nodes.master_addr", nnodes=2, node_rank=1),
    "nodes.master_port": of_a_node("master_port", 5000),
    "nodes.interface": of_a_node("interface", "eth0"),
    "nodes.join_timeout": of_a_node("join_timeout", 5.0),
    "nodes.link_timeout": of_a_node("link_timeout", 5.0),
}


def test_every_field_of_llm_has_an_entry() -> None:
    assert EFFECTS.keys() == FIELDS.keys()


@pytest.mark.parametrize("path", EFFECTS)
def test_a_field_of_this_release_acts(path: str) -> None:
    EFFECTS[path]()


@pytest.mark.parametrize("path", [path for path in ALL if entry_of(path, LATER)])
def test_a_field_of_a_later_release_raises(path: str) -> None:
    with pytest.raises(NotSupportedYet) as caught:
        of(nested(path, other_value(ALL[path])))
    assert caught.value.field == entry_of(path, LATER)


@pytest.mark.parametrize("path", [path for path in ALL if "quant" not in path])
def test_the_default_value_may_be_written_out(path: str) -> None:
    assert LLMConfig.of(nested(path, ALL[path].default)) == LLMConfig()


@pytest.mark.parametrize("path", numbers(FIELDS))
def test_a_bool_is_no_number(path: str) -> None:
    with pytest.raises(ConfigError, match=f"^{path}: expected a number, got True$"):
        of(nested(path, True))


def test_every_kind_of_number_is_among_them() -> None:
    assert {"cache.block_size", "cache.swap_space", "scheduler.max_num_seqs", "max_out_tokens"} <= set(numbers(FIELDS))


# For each rule: what triggers it, and the fields and the remedy its message must name.
WRONG_TOGETHER: tuple[tuple[dict[str, Any], tuple[str, ...], str], ...] = (
    ({"kernel_inject": False}, ("replace_with_kernel_inject",), "remove it, or use init_inference"),
    ({"keep_module_on_host": True}, ("keep_module_on_host",), "give device='cpu'"),
    ({"max_cuda_graphs": 4}, ("graph_output", "max_cuda_graphs"), "remove them"),
    ({"graph_output": "static"}, ("graph_output", "max_cuda_graphs"), "remove them"),
    ({"min_out_tokens": 3}, ("min_out_tokens",), "SamplingParams"),
    ({"enforce_eager": False, "enable_cuda_graph": False}, ("enforce_eager", "enable_cuda_graph"), "give one"),
    ({"enforce_eager": True, "enable_cuda_graph": True}, ("enforce_eager", "enable_cuda_graph"), "give one"),
    ({"kernels": {"linear": "tuned"}, "enforce_eager": True}, ("kernels.linear", "enforce_eager"), "remove one"),
    ({"max_num_batched_tokens": 255}, ("max_num_batched_tokens", "max_num_seqs"), "lower max_num_seqs"),
    ({"num_blocks": 4, "cpu_cache_space": 2}, ("cache.num_blocks", "cache.cpu_cache_space"), "give one"),
    ({"gpu_memory_utilization": 0.5}, ("cache.gpu_memory_utilization",), "give cache.cpu_cache_space instead"),
    ({"target_step_ms": 9}, ("scheduler.target_step_ms",), "give scheduler.max_num_batched_tokens instead"),
    ({"save_mp_checkpoint_path": "x"}, ("save_mp_checkpoint_path",), "run `outpace shard`, or use init_inference"),
    ({"offload": {"kv": 5}, "kv_offloading_size": 1}, ("offload.kv", "kv_offloading_size"), "give one"),
    ({"offload": {"kv": 5}, "swap_space": 1}, ("swap_space", "offload.kv"), "remove swap_space"),
    ({"offload": {"kv_files": 5, "nvme": "x"}}, ("offload.kv_files", "offload.kv"), "give offload.kv too"),
    ({"offload": {"kv_files": 5, "kv": 5}}, ("offload.kv_files", "offload.nvme"), "offload.nvme"),
    (
        {"offload": {"kv_files": 5, "kv": 5, "nvme": "x"}, "tensor_parallel_size": 2},
        ("offload.kv_files", "ranks"),
        "remove kv_files",
    ),
    ({"nodes": {"master_port": 4}}, ("nodes", "nodes.nnodes"), "remove them"),
    ({"nnodes": 2, "tensor_parallel_size": 2}, ("nodes.nnodes", "nodes.master_addr"), "give its address"),
    ({**NODES, "node_rank": 3}, ("nodes.node_rank", "nodes.nnodes"), "give one that is smaller"),
    ({**NODES, "tensor_parallel_size": 3}, ("nodes.nnodes", "tensor_parallel_size"), "a multiple of it"),
    (
        {"offload": {"kv_files": 5, "kv": 5, "nvme": "x"}, "enable_prefix_caching": False},
        ("offload.kv_files", "enable_prefix_caching"),
        "remove kv_files",
    ),
)
WRONG_ON_A_GPU: tuple[tuple[dict[str, Any], tuple[str, ...], str], ...] = (
    ({"cpu_cache_space": 2}, ("cache.cpu_cache_space",), "give cache.gpu_memory_utilization instead"),
    ({"num_blocks": 4, "gpu_memory_utilization": 0.5}, ("cache.num_blocks", "gpu_memory_utilization"), "give one"),
)


def said(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        LLMConfig.of(config)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.parametrize(("config", "fields", "remedy"), WRONG_TOGETHER)
def test_a_wrong_combination_names_its_fields_and_a_remedy(
    config: dict[str, Any], fields: tuple[str, ...], remedy: str
) -> None:
    text = said({"device": "cpu", **config})
    assert all(part in text for part in (*fields, remedy))


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize(("config", "fields", "remedy"), WRONG_ON_A_GPU)
def test_a_wrong_combination_on_a_gpu(config: dict[str, Any], fields: tuple[str, ...], remedy: str) -> None:
    text = said(config)
    assert all(part in text for part in (*fields, remedy))


@pytest.mark.usefixtures("a_gpu")
def test_every_rule_is_triggered_by_some_case() -> None:
    texts = [said({"device": "cpu", **config}) for config, _, _ in WRONG_TOGETHER]
    texts += [said(config) for config, _, _ in WRONG_ON_A_GPU]
    assert not [message for message in LLM_COMPOSITIONS if not any(message in text for text in texts)]


def test_a_step_may_hold_just_one_token_for_each_request() -> None:
    assert of(max_num_batched_tokens=256).scheduler.max_num_batched_tokens == 256
    assert of(max_num_batched_tokens=2, max_num_seqs=2).scheduler.max_num_seqs == 2


def test_the_callers_own_policy_needs_no_switch() -> None:
    assert of(injection_policy={torch.nn.Linear: "out"}).replace_with_kernel_inject


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize(
    ("options", "graphs"),
    [
        ({}, True),
        ({"enable_cuda_graph": True}, True),
        ({"enforce_eager": False}, True),
        ({"enforce_eager": False, "enable_cuda_graph": True}, True),
        ({"enforce_eager": True}, False),
        ({"enable_cuda_graph": False}, False),
        ({"enforce_eager": True, "enable_cuda_graph": False}, False),
        ({"device": "cpu"}, False),
        ({"device": "cpu", "enforce_eager": False}, False),
    ],
)
def test_cuda_graphs_are_used_on_a_gpu_unless_turned_off(options: dict[str, Any], graphs: bool) -> None:
    assert LLMConfig.of(options).cuda_graphs is graphs
