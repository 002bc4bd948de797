"""Where a config comes from, how keywords are merged with it, and what is a conflict."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import outpace
from outpace import ConfigError, InferenceConfig
from tests.models import tiny

WANTED: dict[str, Any] = {"dtype": "fp32", "device": "cpu", "max_out_tokens": 32}


def as_json(folder: Path, content: str) -> Path:
    path = folder / "config.json"
    path.write_text(content)
    return path


def test_none_dict_json_path_and_config_say_the_same(tmp_path: Path) -> None:
    path = as_json(tmp_path, json.dumps(WANTED))
    expected = InferenceConfig(**WANTED)
    for config in (WANTED, path, str(path), expected):
        assert InferenceConfig.of(config) == expected
        engine = outpace.init_inference(tiny("llama"), config)
        assert engine.inference_config == expected
    assert outpace.init_inference(tiny("llama"), None, **WANTED).inference_config == expected
    assert outpace.init_inference(tiny("llama"), **WANTED).inference_config == expected


def test_keywords_are_merged_with_each_kind_of_config(tmp_path: Path) -> None:
    path = as_json(tmp_path, json.dumps(WANTED))
    for config in (WANTED, path, InferenceConfig(**WANTED)):
        merged = InferenceConfig.of(config, seed=5)
        assert merged.given() == {**InferenceConfig(**WANTED).given(), "seed": 5}


def test_keywords_may_repeat_what_the_config_says() -> None:
    config = InferenceConfig.of({"dtype": "half", "seed": 3}, dtype=torch.float16, seed=3)
    assert (config.dtype, config.seed) == (torch.float16, 3)


def test_a_default_in_a_config_object_is_not_a_value_that_was_given() -> None:
    assert InferenceConfig.of(InferenceConfig(seed=1), max_out_tokens=64).max_out_tokens == 64


@pytest.mark.parametrize("config", [{"seed": 1}, InferenceConfig(seed=1)], ids=["dict", "config"])
def test_different_values_conflict(config: Any) -> None:
    with pytest.raises(ConfigError, match="seed is given twice with different values: 1 in config and 2 as a keyword"):
        InferenceConfig.of(config, seed=2)


def test_different_dtypes_conflict() -> None:
    with pytest.raises(ValueError, match=r"dtype is given twice.*'half'.*'bf16'"):
        InferenceConfig.of({"dtype": "half"}, dtype="bf16")
    with pytest.raises(ConfigError, match=r"dtype is given twice.*'fp17'.*'bf16'"):
        InferenceConfig.of({"dtype": "fp17"}, dtype="bf16")


@pytest.mark.parametrize(
    ("config", "keywords", "both"),
    [
        ({"max_tokens": 9, "max_out_tokens": 8}, {}, "max_out_tokens=8 and max_tokens=9"),
        ({"max_tokens": 9}, {"max_out_tokens": 8}, "max_out_tokens=8 and max_tokens=9"),
        (
            {"kernel_inject": True},
            {"replace_with_kernel_inject": False},
            "replace_.*=False and kernel_inject=True",
        ),
        ({"tp": {}}, {"tensor_parallel": {"tp_size": 1}}, "tensor_parallel={'tp_size': 1} and tp={}"),
        ({"moe": {"num_experts": [1], "moe_experts": [2]}}, {}, r"moe: moe_experts=\[2\] and num_experts=\[1\]"),
    ],
)
def test_an_alias_beside_its_name_conflicts(config: dict[str, Any], keywords: dict[str, Any], both: str) -> None:
    with pytest.raises(ConfigError, match=f"^{both}: these are one option, given twice with different values; give it"):
        InferenceConfig.of(config, **keywords)


def test_an_alias_may_repeat_what_its_name_says() -> None:
    assert InferenceConfig.of({"max_tokens": 9}, max_out_tokens=9) == InferenceConfig(max_out_tokens=9)
    config = InferenceConfig.of({"tp": {"enabled": False}}, tensor_parallel={"enabled": False})
    assert not config.tensor_parallel.enabled


@pytest.mark.parametrize(
    ("config", "keywords", "both"),
    [
        ({"mp_size": 1}, {"tp": {"tp_size": 2}}, r"tensor_parallel\.tp_size=2 and mp_size=1: "),
        ({"mp_size": 1, "tensor_parallel": {"tp_size": 2}}, {}, r"tensor_parallel\.tp_size=2 and mp_size=1: "),
        ({"moe": {"num_experts": [1]}}, {"moe_experts": [2]}, r"moe\.num_experts=\[1\] and moe_experts=\[2\]: "),
        ({"ep_group": None, "expert_group": 1}, {}, "ep_group=None and expert_group=1: "),
    ],
)
@pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning")
def test_a_deprecated_name_beside_the_new_one_conflicts(
    config: dict[str, Any], keywords: dict[str, Any], both: str
) -> None:
    with pytest.raises(ConfigError, match=both):
        InferenceConfig.of(config, **keywords)


def test_a_deprecated_name_joins_the_rest_of_its_section() -> None:
    with pytest.warns(FutureWarning, match="mp_size"):
        assert InferenceConfig.of(tp={"tp_size": 1}, mp_size=1) == InferenceConfig()
    with pytest.warns(FutureWarning, match="ep_size"):
        config = InferenceConfig.of(moe=False, ep_size=1)
    assert not config.moe.enabled
    with pytest.warns(FutureWarning, match="mp_size"):
        config = InferenceConfig.of(tp={"enabled": False}, mp_size=1)
    assert not config.tensor_parallel.enabled


def test_a_key_that_stands_twice_in_a_json_file(tmp_path: Path) -> None:
    path = as_json(tmp_path, '{"seed": 1, "seed": 2}')
    with pytest.raises(ConfigError, match="seed is given twice with different values: 1 and 2"):
        InferenceConfig.of(path)
    path = as_json(tmp_path, '{"tensor_parallel": {"tp_size": 1, "tp_size": 2}}')
    with pytest.raises(ConfigError, match="tp_size is given twice with different values: 1 and 2"):
        InferenceConfig.of(path)


def test_the_callers_dict_is_not_changed() -> None:
    config: dict[str, Any] = {"dtype": "half", "tp": {"tp_size": "auto"}, "args": {"max_position_embeddings": 9}}
    config |= {"replace_method": "auto", "mp_size": 1, "moe": {"enabled": True}, "ep_size": 1}
    before = copy.deepcopy(config)
    with pytest.warns(FutureWarning):
        InferenceConfig.of(config, seed=4, device="cpu")
    assert config == before


@pytest.mark.parametrize(
    ("content", "says"),
    [("[1, 2]", "holds a list"), ("{", "not a valid JSON"), ('"fp16"', "holds a str"), ("\xff", "not a valid JSON")],
)
def test_a_file_that_is_no_json_object(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=f"config: .*wrong.json.*{says}|config: .*wrong.json {says}"):
        InferenceConfig.of(path)


@pytest.mark.parametrize("content", ['{"args": ' * 100_000, "[" * 100_000])
def test_a_file_that_is_nested_too_deep(tmp_path: Path, content: str) -> None:
    with pytest.raises(ConfigError, match=r"config: .*config.json is nested too deep to be a config; check the path"):
        InferenceConfig.of(as_json(tmp_path, content))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config: cannot read .*nothing.json: No such file"):
        InferenceConfig.of(tmp_path / "nothing.json")
    with pytest.raises(ConfigError, match=r"config: cannot read .*: Is a directory"):
        InferenceConfig.of(tmp_path)
