"""vLLM's names for the options of `LLM`, how they join the tree, and what `init_inference` says to them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace.config import CacheConfig, InferenceConfig, LLMConfig, SchedulerConfig
from outpace.config.sections import NodesConfig, OffloadConfig
from outpace.errors import ConfigError
from tests.config.walk import nested

# Written from vLLM's documentation of its engine arguments; and our own, which go by the same rule.
VLLM_NAMES: dict[str, tuple[str, Any]] = {
    "max_model_len": ("max_out_tokens", 77),
    "num_gpu_blocks_override": ("cache.num_blocks", 9),
    "block_size": ("cache.block_size", 16),
    "enable_prefix_caching": ("cache.enable_prefix_caching", False),
    "swap_space": ("cache.swap_space", 2.5),
    "max_num_seqs": ("scheduler.max_num_seqs", 8),
    "max_num_batched_tokens": ("scheduler.max_num_batched_tokens", 512),
    "kv_cache_dtype": ("quant.kv_cache_dtype", "fp8"),
    "async_scheduling": ("scheduler.async_scheduling", False),
    "gpu_memory_utilization": ("cache.gpu_memory_utilization", 0.5),
    "tensor_parallel_size": ("tensor_parallel.tp_size", 2),
    "pipeline_parallel_size": ("pipeline_parallel.pp_size", 2),
    "quantization": ("quant.scheme", "int4"),
    "cpu_offload_gb": ("offload.cpu_offload_gb", 2.5),
    "kv_offloading_size": ("offload.kv_offloading_size", 2.5),
}
OUR_NAMES: dict[str, tuple[str, Any]] = {
    "expert_parallel_size": ("moe.ep_size", 2),
    "num_blocks": ("cache.num_blocks", 9),
    "cpu_cache_space": ("cache.cpu_cache_space", 2.5),
    "max_waiting": ("scheduler.max_waiting", 3),
    "max_chunk_beside_decodes": ("scheduler.max_chunk_beside_decodes", 5),
    "target_step_ms": ("scheduler.target_step_ms", 20.0),
    "policy": ("scheduler.policy", "longest_first"),
    "offload_auto": ("offload.auto", True),
    "offload_device_memory": ("offload.device_memory", 0.5),
    "offload_host_memory": ("offload.host_memory", 10_000),
    "offload_nvme": ("offload.nvme", "somewhere"),
    "offload_expert_cache": ("offload.expert_cache", 10_000),
    "offload_kv": ("offload.kv", 10_000),
    "offload_host_pages": ("offload.host_pages", 10_000),
    "offload_kv_files": ("offload.kv_files", 10_000),
    **{name: (f"nodes.{name}", None) for name in NodesConfig.model_fields},  # tests/config/test_llm_fields.py
}
FLAT = VLLM_NAMES | OUR_NAMES
NEEDS_MORE = {
    "gpu_memory_utilization",
    "target_step_ms",
    "tensor_parallel_size",
    "offload_kv_files",
    "offload_expert_cache",
}
NEEDS_MORE |= set(NodesConfig.model_fields)
ACCEPTED = {name: row for name, row in FLAT.items() if name not in NEEDS_MORE}
"""Those that a CPU can have, alone."""


def of(*config: Any, **options: Any) -> LLMConfig:
    return LLMConfig.of(*config, **{"device": "cpu", **options})


def at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def raises(says: str, **options: Any) -> None:
    with pytest.raises(ConfigError, match=says):
        of(**options)


def test_every_option_of_the_runtime_goes_without_its_section() -> None:
    assert LLMConfig.flat.keys() == FLAT.keys()
    assert {path for name, (path, _) in FLAT.items() if name != "max_model_len"} == {
        "tensor_parallel.tp_size",
        "pipeline_parallel.pp_size",
        "moe.ep_size",
        "quant.scheme",
        "quant.kv_cache_dtype",
        *(f"cache.{name}" for name in CacheConfig.model_fields),
        *(f"scheduler.{name}" for name in SchedulerConfig.model_fields),
        *(f"nodes.{name}" for name in NodesConfig.model_fields),
        *(f"offload.{name}" for name in OffloadConfig.model_fields if name != "slots"),
    }
    assert not FLAT.keys() & (LLMConfig.model_fields.keys() | InferenceConfig.aliases.keys())


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_flat_name_is_the_option_it_stands_for(name: str, tmp_path: Path) -> None:
    path, value = ACCEPTED[name]
    expected = of(nested(path, value))
    assert at(expected, path) == value
    file = tmp_path / "config.json"
    file.write_text(json.dumps({name: value}))
    for config in (of(**{name: value}), of({name: value}), of(file), of(of(**{name: value}))):
        assert config == expected
    if name != "quantization":  # "auto" there would be taken for quant.auto
        assert of(**{name: "auto"}) == of()


@pytest.mark.usefixtures("a_gpu")
def test_a_flat_name_that_only_a_gpu_has() -> None:
    assert LLMConfig.of(gpu_memory_utilization=0.5).cache == CacheConfig(gpu_memory_utilization=0.5)


def test_tensor_parallel_size() -> None:
    assert of(tensor_parallel_size=1) == of()
    assert of(tensor_parallel_size=2).tensor_parallel.tp_size == 2
    assert of(tensor_parallel=2) == of(tp=2) == of(tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"tensor_parallel"):
        of(tensor_parallel=True)


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_flat_name_and_its_option_must_agree(name: str) -> None:
    path, value = ACCEPTED[name]
    assert of(nested(path, value), **{name: value}) == of(**{name: value})
    for config in (nested(path, value), of(**{name: value})):
        with pytest.raises(ConfigError) as caught:
            of(config, **{name: "another"})
        both = f"{path}={value!r} and {name}='another': these are one option, given twice with different values"
        assert str(caught.value).startswith(both)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_blocks": 3, "num_gpu_blocks_override": 4}, "num_blocks=3 and num_gpu_blocks_override=4: these are one"),
        ({"max_model_len": 8, "max_tokens": 9}, "max_model_len=8 and max_tokens=9: these are one option"),
        ({"tensor_parallel_size": 2, "tp": {"tp_size": 4}}, r"tensor_parallel\.tp_size=4 and tensor_parallel_size=2"),
        ({"max_num_seqs": 0}, "max_num_seqs: input should be greater than or equal to 1, got 0"),
        ({"scheduler": {"max_num_seqs": 0}}, r"scheduler\.max_num_seqs: input should be greater than or equal to 1"),
        ({"max_waiting": "many"}, "max_waiting: .* got 'many'"),
        ({"max_chunk_beside_decodes": 0}, "max_chunk_beside_decodes: .* got 0"),
        ({"async_scheduling": "perhaps"}, "async_scheduling: .* got 'perhaps'"),
        ({"block_size": 48}, "block_size: input should be 16, 32, 64, 128 or 256, got 48"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override: .* got 0"),
        ({"swap_space": -1}, "swap_space: .* got -1"),
        ({"swap_space": float("nan")}, "swap_space: .* got nan"),
        ({"cpu_cache_space": 0}, "cpu_cache_space: .* got 0"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization: .* got 0"),
        ({"max_model_len": 0}, "max_model_len: .* got 0"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: .* got 0"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size: .* got 0"),
        ({"max_num_seqs": 3, "scheduler": 5}, "scheduler: input should be a valid dictionary .* got 5"),
        ({"max_num_seqs": 3, "scheduler": "x.json"}, "scheduler: input should be a valid dictionary .* got 'x.json'"),
        ({"max_num_seq": 3}, "unknown name 'max_num_seq': did you mean 'max_num_seqs'"),
        ({"scheduler": {"swap_space": 3}}, "scheduler: unknown name 'swap_space'"),
    ],
)
def test_what_is_wrong_is_said_by_the_name_the_user_wrote(options: dict[str, Any], says: str) -> None:
    raises(f"^{says}", **options)


def test_two_names_of_one_option_may_agree() -> None:
    assert of(num_blocks=3, num_gpu_blocks_override=3).cache.num_blocks == 3


def test_flat_names_join_sections_and_each_other(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"scheduler": {"max_num_seqs": 8, "max_waiting": "auto"}, "block_size": 32, "seed": 1}))
    config = of(file, max_waiting=3, cache={"swap_space": 2}, async_scheduling=False)
    assert config.scheduler == SchedulerConfig(max_num_seqs=8, max_waiting=3, async_scheduling=False)
    assert config.cache == CacheConfig(block_size=32, swap_space=2)
    assert of(config, num_blocks=5).cache == CacheConfig(block_size=32, swap_space=2, num_blocks=5)


def test_the_callers_dict_is_not_changed() -> None:
    config = {"scheduler": {"max_num_seqs": 8}}
    of(config, max_waiting=3)
    assert config == {"scheduler": {"max_num_seqs": 8}}


def test_both_configs_take_what_they_share(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"dtype": "bf16", "max_tokens": 64, "device": "cpu"}))
    for config in (InferenceConfig.of(file), LLMConfig.of(file), LLMConfig.of(InferenceConfig.of(file))):
        assert (config.dtype, config.max_out_tokens, config.device) == (torch.bfloat16, 64, "cpu")


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "enforce_eager": st.booleans(),
            "deterministic": st.booleans(),
            "max_model_len": st.integers(2, 99),
            "block_size": st.sampled_from([16, 256]),
            "swap_space": st.floats(0, 9),
            "max_num_seqs": st.integers(1, 9),
            "scheduler": st.fixed_dictionaries({}, optional={"max_waiting": st.integers(1, 9)}),
        },
    )
)
def test_a_config_goes_through_json_and_back(options: dict[str, Any]) -> None:
    config = of(options)
    assert LLMConfig.of(json.loads(json.dumps(config.model_dump(mode="json")))) == config
    assert LLMConfig.of(config) == config


def test_init_inference_refuses_what_llm_has_alone() -> None:
    theirs = LLMConfig.model_fields.keys() | LLMConfig.aliases.keys()
    ours = InferenceConfig.model_fields.keys() | InferenceConfig.aliases.keys()
    assert InferenceConfig.elsewhere.keys() == (theirs - ours) | {"zero_optimization"}
    assert LLMConfig.elsewhere.keys() == {"zero_optimization"}
    for name in theirs - ours:
        with pytest.raises(ConfigError, match=f"^{name}: .*outpace.LLM.*; (remove it|use [a-z_.]+)$"):
            InferenceConfig.of({name: None})
    with pytest.raises(ConfigError, match=r"^scheduler: only outpace\.LLM and outpace serve schedule requests"):
        InferenceConfig.of(of(max_num_seqs=3))
