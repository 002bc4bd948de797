"""Names, aliases and defaults are DeepSpeed's; written here from its documentation, not from our code."""

import json
from typing import Any

import pytest
import torch

from outpace import ConfigError, InferenceConfig, default_inference_config
from outpace.config.quantization import BaseQuantConfig, QKVQuantConfig, QuantizationConfig, WeightQuantConfig
from outpace.config.sections import CheckpointConfig, MoEConfig, TensorParallelConfig
from tests.config.walk import nested

# DeepSpeed 0.19.6, DeepSpeedInferenceConfig. Ours differs where the comment says so.
DEEPSPEED_DEFAULTS: dict[str, Any] = {
    "replace_with_kernel_inject": False,
    "dtype": None,  # DeepSpeed: float16; ours: float16 on a GPU, float32 on a CPU
    "enable_cuda_graph": False,
    "use_triton": False,
    "triton_autotune": False,
    "triangular_masking": True,
    "keep_module_on_host": False,
    "quant": None,  # DeepSpeed: an enabled section that nothing reads
    "checkpoint": None,
    "base_dir": "",
    "set_empty_params": False,
    "save_mp_checkpoint_path": None,
    "return_tuple": True,
    "training_mp_size": 1,
    "replace_method": "auto",
    "injection_policy": None,
    "injection_policy_tuple": None,
    "config": None,
    "max_out_tokens": 1024,
    "min_out_tokens": 1,
    "transposed_mode": False,
}
DEEPSPEED_SECTIONS: dict[str, dict[str, Any]] = {
    "tensor_parallel": {"enabled": True, "tp_size": 1, "tp_grain_size": 64, "mpu": None, "tp_group": None},
    "moe": {"enabled": True, "ep_size": 1, "type": "standard", "ep_mp_group": None, "ep_group": None},
    "checkpoint_config": {"checkpoint_dir": None, "save_mp_checkpoint_path": None, "base_dir": None},
}
DEEPSPEED_QUANT: dict[str, Any] = {"enabled": True, "num_bits": 8, "q_type": "symmetric", "q_groups": 1}
OUR_OWN = {"device": None, "kernels": None, "max_cuda_graphs": 16, "graph_output": "copy", "seed": None}
OUR_SECTIONS = {"offload", "pipeline_parallel", "zero"}

DEEPSPEED_ALIASES: dict[str, tuple[str, Any]] = {
    "kernel_inject": ("replace_with_kernel_inject", False),
    "tp": ("tensor_parallel", {"enabled": False}),
    "tm": ("triangular_masking", True),
    "ckpt_config": ("checkpoint_config", {}),
    "injection_dict": ("injection_policy", None),
    "args": ("config", {"max_position_embeddings": 7}),
    "max_tokens": ("max_out_tokens", 77),
    "min_tokens": ("min_out_tokens", 3),
}
DEEPSPEED_DEPRECATED: dict[str, tuple[str, Any, Any]] = {
    "mp_size": ("tensor_parallel.tp_size", 1, 2),
    "mpu": ("tensor_parallel.mpu", None, "unit"),
    "ep_size": ("moe.ep_size", 1, 4),
    "ep_group": ("moe.ep_group", None, "group"),
    "expert_group": ("moe.ep_group", None, "group"),
    "ep_mp_group": ("moe.ep_mp_group", None, "group"),
    "expert_mp_group": ("moe.ep_mp_group", None, "group"),
    "moe_experts": ("moe.moe_experts", [1], [8]),
    "moe_type": ("moe.type", "standard", "residual"),
}
DTYPE_NAMES = {
    torch.float16: ("torch.float16", "fp16", "float16", "half", "FP16"),
    torch.float32: ("torch.float32", "fp32", "float32", "float"),
    torch.bfloat16: ("torch.bfloat16", "bf16", "bfloat16", "bfloat"),
}


def at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def test_defaults_are_deepspeeds() -> None:
    config = InferenceConfig()
    assert {name: getattr(config, name) for name in DEEPSPEED_DEFAULTS} == DEEPSPEED_DEFAULTS
    for section, fields in DEEPSPEED_SECTIONS.items():
        assert {name: at(config, f"{section}.{name}") for name in fields} == fields
    assert list(config.moe.moe_experts) == [1]
    quant = QuantizationConfig()
    for kind in (BaseQuantConfig(), quant.weight):
        assert {name: getattr(kind, name) for name in DEEPSPEED_QUANT} == DEEPSPEED_QUANT
    assert quant.activation is None  # DeepSpeed: enabled, and nothing reads it; ours quantizes what it is told to
    assert (quant.enabled, quant.qkv) == (True, QKVQuantConfig(enabled=True))


def test_every_field_is_deepspeeds_or_known_to_be_ours() -> None:
    known = DEEPSPEED_DEFAULTS.keys() | DEEPSPEED_SECTIONS.keys() | OUR_OWN.keys() | OUR_SECTIONS
    assert InferenceConfig.model_fields.keys() == known
    config = InferenceConfig()
    assert {name: getattr(config, name) for name in OUR_OWN} == OUR_OWN
    assert TensorParallelConfig.model_fields.keys() == DEEPSPEED_SECTIONS["tensor_parallel"].keys()
    assert MoEConfig.model_fields.keys() == DEEPSPEED_SECTIONS["moe"].keys() | {
        "moe_experts", "hot_experts", "expert_load",
    }  # fmt: skip
    assert CheckpointConfig.model_fields.keys() == DEEPSPEED_SECTIONS["checkpoint_config"].keys()
    assert WeightQuantConfig.model_fields.keys() == DEEPSPEED_QUANT.keys() | {
        "quantized_initialization",
        "post_init_quant",
        "group_size",  # ours, as the next
        "per_tensor",
    }


@pytest.mark.parametrize(("alias", "name", "value"), [(key, *pair) for key, pair in DEEPSPEED_ALIASES.items()])
def test_aliases_are_deepspeeds(alias: str, name: str, value: Any) -> None:
    by_alias, by_name = InferenceConfig.of(**{alias: value}), InferenceConfig.of(**{name: value})
    assert by_alias == by_name
    assert by_alias.given().keys() == {name}


def test_there_are_no_other_aliases() -> None:
    assert InferenceConfig.aliases.keys() == DEEPSPEED_ALIASES.keys() | {"pp"}
    assert InferenceConfig.deprecated.keys() == DEEPSPEED_DEPRECATED.keys()


@pytest.mark.parametrize(
    ("alias", "name"),
    [("num_experts", "moe_experts"), ("expert_group", "ep_group"), ("expert_mp_group", "ep_mp_group")],
)
def test_aliases_of_the_moe_section(alias: str, name: str) -> None:
    value = (4,) if name == "moe_experts" else "group"
    assert getattr(MoEConfig(**{alias: value}), name) == value


@pytest.mark.parametrize(("old", "path", "default", "_"), [(key, *row) for key, row in DEEPSPEED_DEPRECATED.items()])
def test_deprecated_names_warn_and_move_their_value(old: str, path: str, default: Any, _: Any) -> None:
    with pytest.warns(FutureWarning, match=f"{old} is deprecated: use {path}"):
        config = InferenceConfig.of(**{old: default})
    assert config == InferenceConfig()
    section, _, name = path.partition(".")
    assert at(config, section).model_fields_set == {name}


@pytest.mark.parametrize("old", DEEPSPEED_DEPRECATED)
def test_deprecated_names_that_act_set_the_new_ones(old: str) -> None:
    path, _, value = DEEPSPEED_DEPRECATED[old]
    with pytest.warns(FutureWarning):
        config = InferenceConfig.of(replace_with_kernel_inject=True, **{old: value})
    assert config == InferenceConfig.of(nested(path, value), replace_with_kernel_inject=True)
    assert config != InferenceConfig(replace_with_kernel_inject=True)


@pytest.mark.parametrize(
    ("dtype", "name"), [(dtype, name) for dtype, names in DTYPE_NAMES.items() for name in (dtype, *names)], ids=str
)
def test_a_dtype_by_any_of_its_names(dtype: torch.dtype, name: str | torch.dtype) -> None:
    assert InferenceConfig.of(dtype=name).dtype is dtype


@pytest.mark.parametrize("name", ["int8", "torch.int8", torch.int8], ids=str)
def test_int8_asks_for_quantized_weights(name: object) -> None:
    config = InferenceConfig.of(dtype=name)
    assert config.asked_quant == QuantizationConfig()
    assert config.compute_dtype is None


def test_a_device_by_name_or_as_torch_has_it() -> None:
    config = InferenceConfig.of({"device": "cpu"}, device=torch.device("cpu"))
    assert config.device == "cpu"
    assert config == InferenceConfig(device=torch.device("cpu"))
    assert InferenceConfig.of(json.loads(json.dumps(config.model_dump(mode="json")))) == config
    with pytest.raises(ConfigError, match="device: 'meta': Outpace runs on"):
        InferenceConfig.of(device=torch.device("meta"))
    with pytest.raises(ConfigError, match="device: input should be a valid string, got 0"):
        InferenceConfig.of(device=0)


@pytest.mark.parametrize("name", sorted(InferenceConfig.model_fields.keys() - {"offload"}))
def test_auto_means_the_default(name: str) -> None:
    config = InferenceConfig.of({name: "auto"})
    assert config == InferenceConfig()
    assert config.given() == ({"replace_method": "auto"} if name == "replace_method" else {})


def test_auto_inside_a_section_and_under_other_names() -> None:
    assert InferenceConfig.of({"tp": {"tp_size": "auto"}, "mp_size": "auto", "max_tokens": "auto"}) == InferenceConfig()
    assert InferenceConfig.of(max_tokens="auto", max_out_tokens=9).max_out_tokens == 9
    with pytest.warns(FutureWarning, match="mp_size"):
        InferenceConfig.of(tp={"tp_size": "auto"}, mp_size=1)


def test_moe_by_a_bool() -> None:
    assert InferenceConfig.of(moe=False).moe == MoEConfig(enabled=False)
    assert InferenceConfig.of(moe=True) == InferenceConfig()


def test_the_default_config_goes_through_json_and_back() -> None:
    plain = default_inference_config()
    text = json.dumps(plain)
    assert InferenceConfig.of(json.loads(text)) == InferenceConfig()
    assert InferenceConfig.of(plain) == InferenceConfig()
    assert plain["max_out_tokens"] == 1024


def test_a_chosen_dtype_goes_through_json_and_back() -> None:
    config = InferenceConfig.of(dtype=torch.bfloat16, seed=3, tp={"enabled": False})
    assert InferenceConfig.of(json.loads(json.dumps(config.model_dump(mode="json")))) == config


def test_a_config_is_frozen() -> None:
    config = InferenceConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        config.tensor_parallel.tp_size = 2  # type: ignore[misc]
    assert config == InferenceConfig()


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("max_out_token", "max_out_tokens"),
        ("kernel_injct", "kernel_inject"),
        ("mp_sise", "mp_size"),
        ("enable_cuda_graphs", "enable_cuda_graph"),
        ("Dtype", "dtype"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(wrong: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown name '{wrong}': did you mean '{near}'"):
        InferenceConfig.of({wrong: 1})


def test_an_unknown_name_without_a_near_one_and_in_a_section() -> None:
    with pytest.raises(ConfigError, match=r"unknown name 'quantization_setting'$"):
        InferenceConfig.of(quantization_setting=(True, 8))
    with pytest.raises(ConfigError, match="tensor_parallel: unknown name 'tp_sice': did you mean 'tp_size'"):
        InferenceConfig.of(tensor_parallel={"tp_sice": 2})


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"max_tokens": 0}, "max_tokens: .* got 0"),
        ({"tp": {"tp_size": 0}}, r"tp\.tp_size: .* got 0"),
        ({"tp": {"tp_sice": 2}}, "tp: unknown name 'tp_sice'"),
        ({"mp_size": 0}, "mp_size: .* got 0"),
        ({"mp_size": 0, "tp": {"enabled": True}}, "mp_size: .* got 0"),
        ({"mp_size": 2, "tensor_parallel": "2"}, "tensor_parallel: input should be a valid dictionary .* got '2'"),
        ({"moe_experts": [1, "x"]}, r"moe_experts\.1: .* got 'x'"),
        ({"max_tokens": "auto", "max_out_tokens": 0}, "max_out_tokens: .* got 0"),
    ],
)
@pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning")
def test_a_wrong_value_is_reported_by_the_name_it_was_given_by(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{says}"):
        InferenceConfig.of(wrong)
