"""Promise 2: every accepted option acts or raises. A new field of `init_inference` without an entry here fails."""

import json
import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import outpace
from outpace import ConfigError, InferenceConfig, InputError, ModelError, NotSupported, NotSupportedYet
from outpace.cache.kv_cache import allocate
from outpace.config.rules import COMPOSITIONS, INFERENCE_COMPOSITIONS, LATER
from outpace.config.sections import AioConfig, ZeroConfig
from outpace.inject.quantized import PackedLinear
from outpace.inject.split import split_model
from outpace.offload import asked
from outpace.offload.asked import Layers
from outpace.offload.store_read import ReadOptions
from outpace.offload.streaming import Streaming
from outpace.offload.units import Form
from tests.config.walk import entry_of, leaves, nested, numbers, other_value
from tests.models import prompts, tiny
from tests.offload.placed import deep, offload_at

IDS = prompts(6)[0][None]


FIELDS = dict(leaves(InferenceConfig))


def engine(family: str = "llama", **config: Any) -> outpace.InferenceEngine:
    return outpace.init_inference(tiny(family), **{"device": "cpu", **config})


def raises(says: str, **config: Any) -> None:
    with pytest.raises(ConfigError, match=says):
        InferenceConfig.of(**{"device": "cpu", **config})


def refused(says: str, **config: Any) -> None:
    """Not by the config alone: by the engine."""
    with pytest.raises(ConfigError, match=says):
        engine(replace_with_kernel_inject=True, **config)


def dtype_acts() -> None:
    assert {weight.dtype for weight in engine(dtype="bf16").parameters()} == {torch.bfloat16}
    assert {weight.dtype for weight in engine().parameters()} == {torch.float32}


def device_acts() -> None:
    assert engine(device="cpu").device == torch.device("cpu")
    raises("device: 'cuda:99' does not exist", device="cuda:99")


def tensor_parallel_enabled_acts() -> None:
    raises("tensor_parallel.enabled=False", tp={"enabled": False, "tp_size": 2})
    assert InferenceConfig.of(tp={"enabled": True, "tp_size": 2}).tensor_parallel.tp_size == 2


def expert_load_acts() -> None:
    raises("moe.expert_load: .*expected the tokens of each expert", moe={"hot_experts": 1, "expert_load": [[1, -1]]})
    raises("moe.expert_load: .*cannot read 'nowhere.json'", moe={"hot_experts": 1, "expert_load": "nowhere.json"})
    raises("moe.hot_experts: copies are for ranks", moe={"hot_experts": 1, "expert_load": [[1, 2]]})
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "load.json").write_text('{"layers": [0], "tokens": [[3, 4]]}')
        for given in (str(Path(folder, "load.json")), torch.tensor([[3, 4]]), ((3, 4),)):
            asked = {"ep_size": 2, "hot_experts": 1, "expert_load": given}
            assert InferenceConfig.of(moe=asked).moe.expert_load == ((3.0, 4.0),)


def tp_grain_size_acts() -> None:
    model = tiny("llama")
    found = [split_model(model, 2, grain=grain)["model.layers.0.mlp.down_proj.weight"] for grain in (1, 16)]
    assert found[0] != found[1]
    assert InferenceConfig.of(tp={"tp_grain_size": 32}).tensor_parallel.tp_grain_size == 32


def moe_enabled_acts() -> None:
    assert engine("mixtral").info.num_experts == 4
    assert engine("mixtral", moe={"enabled": False}).info.num_experts == 0


def moe_experts_act() -> None:
    engine("mixtral", kernel_inject=True, moe={"moe_experts": [4]})
    with pytest.raises(ConfigError, match=r"moe\.moe_experts: \[8\] was given, and MixtralForCausalLM has \[4, 4\]"):
        engine("mixtral", kernel_inject=True, moe={"moe_experts": [8]})


def moe_type_acts() -> None:
    engine("mixtral", kernel_inject=True, moe={"type": "standard"})
    with pytest.raises(ConfigError, match=r"moe\.type: 'residual' was given, and MixtralForCausalLM has standard"):
        engine("mixtral", kernel_inject=True, moe={"type": "residual"})


def keep_module_on_host_acts() -> None:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("outpace")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        engine(keep_module_on_host=True)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    assert "device: cpu (keep_module_on_host)" in seen


def config_acts() -> None:
    own = engine(dtype="fp32")
    assert own.generate(IDS, max_new_tokens=10, do_sample=False).shape == (1, 16)
    with pytest.raises(InputError, match="more than the 12 positions"):
        engine(config={"args": {"max_position_embeddings": 12}}).generate(IDS, max_new_tokens=10)


def max_out_tokens_acts() -> None:
    assert engine(max_out_tokens=16).generate(IDS, max_new_tokens=10).shape == (1, 16)
    with pytest.raises(InputError, match="max_out_tokens=15"):
        engine(max_out_tokens=15).generate(IDS, max_new_tokens=10)


def min_out_tokens_acts() -> None:
    assert engine(max_out_tokens=16, min_out_tokens=10).generate(IDS, max_new_tokens=2).shape == (1, 8)
    with pytest.raises(InputError, match="leaves no room for 11"):
        engine(max_out_tokens=16, min_out_tokens=11).generate(IDS, max_new_tokens=2)


def seed_acts() -> None:
    seeded, other, free = engine(seed=1), engine(seed=2), engine()
    state = torch.get_rng_state()
    first, second, third = (one.generate(IDS, do_sample=True, max_new_tokens=16) for one in (seeded, seeded, other))
    assert torch.equal(torch.get_rng_state(), state), "the global generator was touched"
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    assert not torch.equal(*(free.generate(IDS, do_sample=True, max_new_tokens=16) for _ in range(2)))


def kernel_inject_acts() -> None:
    assert {type(layer).__name__ for layer in engine().module.get_submodule("model.layers").children()} == {
        "LlamaDecoderLayer"
    }
    fused = engine(kernel_inject=True).module.get_submodule("model.layers")
    assert {type(layer).__name__ for layer in fused.children()} == {"FusedLlamaDecoderLayer"}
    with pytest.raises(NotSupported, match="replace_with_kernel_inject: no policy for the layers of Linear"):
        outpace.init_inference(torch.nn.Linear(1, 1), device="cpu", kernel_inject=True)


def injection_policy_acts() -> None:
    layer = type(tiny("llama").model.layers[0])
    engine(injection_policy={layer: ("self_attn.o_proj", "mlp.down_proj")})
    with pytest.raises(ModelError, match=r"LlamaDecoderLayer has no 'mlp\.nope'"):
        engine(injection_policy={layer: "mlp.nope"})
    with pytest.raises(ConfigError, match="injection_policy: LlamaForCausalLM has no Conv1d"):
        engine(injection_policy={torch.nn.Conv1d: "out"})


def kernels_act() -> None:
    raises("kernels: they run in fused layers; give replace_with_kernel_inject=True", kernels={"attention": "torch"})
    with pytest.raises(ConfigError, match=r"kernels\.attention: 'magic' is not one of torch, triton"):
        engine(kernel_inject=True, kernels={"attention": "magic"})
    with pytest.raises(ConfigError, match="kernels: no op is called 'magic'"):
        engine(kernel_inject=True, kernels={"magic": "torch"})


def triangular_masking_acts() -> None:
    raises("triangular_masking: it concerns fused layers", triangular_masking=False)
    with pytest.raises(ConfigError, match="triangular_masking=False: LlamaForCausalLM is a causal model"):
        engine(kernel_inject=True, triangular_masking=False)


HEAD = "int8 per channel"
"""What the head becomes where other weights have 4 bits."""


def schemes(**quant: Any) -> set[str]:
    """What the linears of a small model become."""
    modules = engine(quant=quant).module.modules()
    return {str(module.scheme) for module in modules if isinstance(module, PackedLinear)}


def quant_enabled_acts() -> None:
    assert InferenceConfig.of(quant={"enabled": False, "weight": {"num_bits": 4}}).quant is None
    assert schemes(enabled=False) == set()
    raises("enabled=False with scheme", quant={"enabled": False, "scheme": "int8"})
    assert schemes(enabled=True) == {"int8 per channel"}


def quant_scheme_acts() -> None:
    assert schemes(scheme="int8") == {"int8 per channel"}
    assert schemes(scheme="int4") == {"int4 per channel", HEAD}
    assert schemes(scheme="fp8") == {"fp8 per channel, activations fp8", HEAD}
    assert schemes(scheme="w8a8") == {"int8 per channel, activations int8"}


def quant_activation_acts() -> None:
    assert schemes(activation={"enabled": False}) == {"int8 per channel"}
    assert schemes(activation={}) == {"int8 per channel, activations int8"}
    assert schemes(activation={}, weight={"group_size": 16}) == {"int8 in groups of 16, activations int8"}


def quant_weight_acts(expected: str, *head: str, **weight: Any) -> Callable[[], None]:
    def check() -> None:
        assert schemes(weight=weight) == ({expected, *head} if expected else set())

    return check


def initialized(expected: str, *head: str, **rule: Any) -> Callable[[], None]:
    return quant_weight_acts(expected, *head, quantized_initialization={"group_size": 16, **rule})


def group_dim_acts() -> None:
    assert schemes(weight={"quantized_initialization": {"group_dim": -1}}) == {"int8 per channel, asymmetric"}
    raises("quantized_initialization.group_dim", quant={"weight": {"quantized_initialization": {"group_dim": 0}}})


def q_groups_act() -> None:
    assert schemes(weight={"q_groups": 2}) == {"int8 in groups of 16", "int8 in groups of 24"}


def quant_activation_refuses(**activation: Any) -> Callable[[], None]:
    return lambda: raises("quant.activation: activations are quantized to 8 bits", quant={"activation": activation})


CALIBRATION = {"text": [int(token) for token in prompts(64)[0]], "tokens": 32}


def plan_of(auto: dict[str, Any], **quant: Any) -> dict[str, Any]:
    """What was chosen for a small model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        engine(quant={"calibration": CALIBRATION, "auto": {"out": str(path), **auto}, **quant})
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def bits_of(plan: dict[str, Any]) -> float:
    size = sum(weight["nbytes"] for weight in plan["weights"])
    return float(8 * size / sum(math.prod(weight["shape"]) for weight in plan["weights"]))


def auto_acts(**bound: Any) -> Callable[[], None]:
    """A bound gives a plan in which some weights are quantized."""
    return lambda: _assert(any(weight["scheme"] is not None for weight in plan_of(bound)["weights"]))


def bits_per_weight_acts() -> None:
    assert bits_of(plan_of({"bits_per_weight": 12})) <= 12
    assert bits_of(plan_of({"bits_per_weight": 7})) <= 7


def auto_schemes_act() -> None:
    plan = plan_of({"bits_per_weight": 12, "schemes": ["fp8"]})
    assert {weight["scheme"]["values"] for weight in plan["weights"] if weight["scheme"]} == {"fp8", "int8"}


def plan_acts() -> None:
    plan = plan_of({"bits_per_weight": 7})
    assert schemes(plan=plan) == {HEAD, "int4 per channel"}
    raises("quant.plan: expected a path or a dict", quant={"plan": 7})


def calibration_acts() -> None:
    assert plan_of({"bits_per_weight": 9})["calibration"]["tokens"] == 31
    short = plan_of({"bits_per_weight": 9}, calibration={**CALIBRATION, "tokens": 16})
    assert short["calibration"]["tokens"] == 15
    raises("quant.calibration: nothing that was asked for", quant={"calibration": CALIBRATION})
    raises("quant.calibration.text: expected token ids", quant={"calibration": {"text": [-1]}})


def _assert(fact: bool) -> None:
    assert fact


def post_init_quant_acts() -> None:
    model = engine(quant={"weight": {"post_init_quant": {"mlp": {"group_size": 16}}}}).module
    packed = {name for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    assert len(packed) == 6
    assert all("mlp" in name for name in packed)


def quant_qkv_acts() -> None:
    model = engine(quant={"qkv": {"enabled": False}}).module
    packed = {name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, PackedLinear)}
    assert packed == {"o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}


def kv_cache_dtype_acts() -> None:
    wanted = {"auto": torch.float32, "int8": torch.int8, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}
    for name, dtype in wanted.items():
        with mock.patch("outpace.runner.decode.allocate", side_effect=allocate) as allocated:
            engine(kernel_inject=True, quant={"kv_cache_dtype": name}).generate(IDS, max_new_tokens=2)
        assert {call.args[2] for call in allocated.call_args_list} == {dtype}
    raises("quant.kv_cache_dtype: only fused layers keep", quant={"kv_cache_dtype": "int8"})
    raises("quant.kv_cache_dtype: input should be 'auto', 'int8'", kernel_inject=True, quant={"kv_cache_dtype": "int4"})
    raises("kv_cache_dtype: a name of outpace.LLM alone; use quant", kv_cache_dtype="int8")
    raises("enabled=False with kv_cache_dtype 'int8'", quant={"kv_cache_dtype": "int8", "enabled": False})
    asked: tuple[dict[str, Any], ...] = ({}, {"scheme": None}, {"scheme": "int8"}, {"weight": {"num_bits": 8}})
    for more, packed in zip(asked, (False, False, True, True), strict=True):
        module = engine(kernel_inject=True, quant={"kv_cache_dtype": "int8", **more}).module
        assert any(isinstance(each, PackedLinear) for each in module.modules()) is packed
    both = InferenceConfig.of(dtype="int8", kernel_inject=True, quant={"kv_cache_dtype": "fp8"})
    assert both.asked_quant is not None
    assert (both.asked_quant.kv_cache_dtype, both.asked_quant.only_cache) == ("fp8", False)


@contextmanager
def saved() -> Iterator[tuple[Any, Path]]:
    """A model with other weights than `engine` begins with, and the file that holds them."""
    with tempfile.TemporaryDirectory() as folder:
        other = tiny("llama", weights_seed=5)
        torch.save({"module": other.state_dict()}, Path(folder) / "mp_rank_00_model_states.pt")
        yield other, Path(folder) / "mp_rank_00_model_states.pt"


def filled_by(other: Any, **options: Any) -> None:
    """These options give a model the weights of another."""
    assert not torch.equal(tiny("llama").lm_head.weight, other.lm_head.weight)
    assert torch.equal(engine(dtype="fp32", **options).module.get_parameter("lm_head.weight"), other.lm_head.weight)


def checkpoint_acts() -> None:
    with saved() as (other, path):
        filled_by(other, checkpoint=path)
        with pytest.raises(ModelError, match="no such file or folder"):
            engine(checkpoint=f"{path}x")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("checkpoint", 5, "expected a path or a dict, got 5"),
        ("checkpoint", b"x", "expected a path or a dict, got b'x'"),
        ("checkpoint", "", "the path is empty"),
        ("save_mp_checkpoint_path", "", "the path is empty"),
        ("save_mp_checkpoint_path", b"x", "expected a path, got b'x'"),
        ("base_dir", 5, "expected a path, got 5"),
    ],
)
def test_what_is_no_path(field: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: {words}"):
        InferenceConfig(**{field: value})


def test_paths_may_be_of_pathlib() -> None:
    path = Path("a/b")
    config = InferenceConfig(checkpoint=path, base_dir=path, save_mp_checkpoint_path=path)
    assert (config.checkpoint, config.base_dir, config.save_mp_checkpoint_path) == ("a/b",) * 3
    section = {"checkpoint_dir": path, "base_dir": path, "save_mp_checkpoint_path": path}
    assert set(InferenceConfig(checkpoint_config=section).checkpoint_config.given().values()) == {"a/b"}


def checkpoint_dir_acts() -> None:
    with saved() as (other, path):
        filled_by(other, checkpoint_config={"checkpoint_dir": str(path)})


def base_dir_acts(*, nested: bool) -> None:
    with saved() as (other, path):
        described = {"type": "ds_model", "version": 1.0, "checkpoints": [path.name]}
        base: dict[str, Any] = {"base_dir": str(path.parent)}
        filled_by(other, checkpoint=described, **({"checkpoint_config": base} if nested else base))
        with pytest.raises(ModelError):
            engine(checkpoint=described, base_dir=str(path.parent / "nowhere"))


def training_mp_size_acts() -> None:
    with saved() as (other, path):
        filled_by(other, checkpoint=path, training_mp_size=1)
        with pytest.raises(ModelError, match="2"):
            engine(checkpoint=path, training_mp_size=2)


def set_empty_params_acts() -> None:
    raises("set_empty_params .*concern a checkpoint", set_empty_params=True)
    with saved() as (other, path), mock.patch("outpace.prepare.drop") as dropped:
        filled_by(other, checkpoint=path)
        assert dropped.call_count == 0
        filled_by(other, checkpoint=path, set_empty_params=True)
        assert dropped.call_count == 1
    with saved() as (other, path):
        filled_by(other, checkpoint=path, set_empty_params=True)


def save_mp_checkpoint_path_acts() -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine(save_mp_checkpoint_path=f"{folder}/a", dtype="bf16")
        engine(ckpt_config={"save_mp_checkpoint_path": f"{folder}/b"})
        for name, dtype in {"a": "bfloat16", "b": "float32"}.items():
            found = json.loads((Path(folder) / name / "ds_inference_config.json").read_text())
            assert (found["tp_size"], found["dtype"]) == (1, dtype)


ZERO = {"stage": 3, "offload_param": {"device": "cpu"}, "param_persistence_threshold": 0}


def streamed(**config: Any) -> Streaming | None:
    made = outpace.init_inference(deep("llama"), device="cpu", **config)
    made(IDS)
    return made.streaming


def zero_streams(**more: Any) -> Streaming:
    """With everything away, unless told otherwise."""
    zero = {**ZERO, "max_live_parameters": 0, **more}
    found = streamed(zero=zero)
    assert found is not None
    return found


def zero_nvme(aio: Mapping[str, Any] | None = None, **more: Any) -> Streaming:
    with tempfile.TemporaryDirectory() as folder:
        param = {"device": "nvme", "nvme_path": folder, **more}
        return zero_streams(offload_param=param, **({} if aio is None else {"aio": dict(aio)}))


def zero_acts() -> None:
    assert streamed(zero={"stage": 0}) is None
    assert set(zero_streams().placement.tiers) == {"host"}
    raises("zero.stage: 1 and 2", zero={"stage": 2})
    raises("zero.offload_param: device nvme and nvme_path", zero={"stage": 3, "offload_param": {"device": "nvme"}})
    assert set(zero_nvme(max_in_cpu=0).placement.tiers) == {"disk"}
    assert set(zero_nvme(max_in_cpu=20_000).placement.tiers) == {"disk", "host"}
    assert zero_streams(offload_param={"device": "cpu", "pin_memory": False}).counts.loads


def zero_buffers_act() -> None:
    with a_gpu():
        config = InferenceConfig.of(zero={"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "x"}})
    layers = Layers((Form(1000),) * 100, 100_000, 0)
    few = config.zero.offload_param.model_copy(update={"buffer_count": 3, "buffer_size": 4000})
    changed = config.model_copy(update={"zero": config.zero.model_copy(update={"offload_param": few})})
    with mock.patch.object(InferenceConfig, "device_type", "cuda"):
        assert asked._zero_room(changed, layers, 10**9).buffers == 12
        assert asked._zero_room(config, layers, 10**9).buffers == 50
    raises("zero.offload_param: buffer_count", zero={**ZERO, "offload_param": {"device": "cpu", "buffer_count": 2}})
    raises("zero.offload_param: .*buffer_size", zero={**ZERO, "offload_param": {"device": "cpu", "buffer_size": 2}})


def zero_aio_acts() -> None:
    aio = {"thread_count": 5, "queue_depth": 3, "block_size": 8192}
    reads = ReadOptions.of_aio(**aio)
    assert (reads.threads, reads.block) == (3, 8192)
    with mock.patch("outpace.loading.offload.ReadOptions.of_aio", return_value=reads) as made:
        zero_nvme(aio, max_in_cpu=0)
    assert made.call_args.args == (5, 8192, 3)
    raises("zero.aio: it concerns", zero={**ZERO, "aio": aio})
    for name in ("single_submit", "use_gds"):
        raises(f"zero.aio: .*{name}", zero={**ZERO, "aio": {name: True}})
    raises("zero.aio: .*overlap_events", zero={**ZERO, "aio": {"overlap_events": False}})


def zero_counts_act() -> None:
    assert zero_streams(prefetch_bucket_size=0).placement.slots == 1
    assert zero_streams(prefetch_bucket_size=1).placement.slots == 2
    few = zero_streams(param_persistence_threshold=0), zero_streams(param_persistence_threshold=100)
    assert len(few[0].units[0].held) > len(few[1].units[0].held)
    kept = zero_streams(param_persistence_threshold=100, model_persistence_threshold=0)
    assert len(kept.units[0].held) == len(few[0].units[0].held)
    assert streamed(zero={**ZERO, "max_live_parameters": 10**9}) is None
    assert streamed(zero={**ZERO, "max_live_parameters": 0, "param_persistence_threshold": 10**6}) is None
    assert streamed(zero={**ZERO, "max_live_parameters": 10**9, "max_reuse_distance": 5}) is not None


def offload_acts() -> None:
    assert streamed(offload="auto") is None
    assert streamed(offload={"auto": True}) is None
    whole = streamed(offload={"cpu_offload_gb": 1.0})
    assert whole is not None
    assert set(whole.placement.tiers) == {"host"}
    raises("offload.slots and offload.expert_cache concern", offload={"slots": 3})
    slots = streamed(offload={"cpu_offload_gb": 1.0, "slots": 3})
    assert slots is not None
    assert slots.placement.slots == 3


def expert_cache_acts() -> None:
    kept = []
    for expert_cache in (0, 100_000):
        offload = {"cpu_offload_gb": 1.0, "expert_cache": expert_cache}
        made = outpace.init_inference(deep("mixtral"), device="cpu", replace_with_kernel_inject=True, offload=offload)
        assert made.streaming is not None
        kept.append(made.streaming.tier_bytes()["experts"])
    assert kept[0] == 0 < kept[1] <= 100_000
    raises("offload.slots and offload.expert_cache concern", offload={"expert_cache": 0.5})
    refused("offload.expert_cache: no layer", offload={"cpu_offload_gb": 1.0, "expert_cache": 0.5})


def offload_budgets_act() -> None:
    refused("offload.device_memory: .* are left", offload={"device_memory": 1000})
    with pytest.raises(ConfigError, match="host memory takes 0 bytes"):
        streamed(offload=offload_at("host", deep("llama"), Path()) | {"host_memory": 0})
    with tempfile.TemporaryDirectory() as folder:
        found = streamed(offload=offload_at("disk", deep("llama"), Path(folder)))
    assert found is not None
    assert set(found.placement.tiers) == {"disk"}


def pages_are_llms() -> None:
    for name in ("kv", "kv_files", "kv_offloading_size", "host_pages"):
        raises("offload.kv, kv_files, .* concern the pages of LLM", offload={name: 1})


@contextmanager
def a_gpu() -> Iterator[None]:
    with mock.patch("torch.cuda.is_available", return_value=True):
        yield


EFFECTS: Mapping[str, Callable[[], None]] = {
    **{f"offload.{name}": offload_acts for name in ("auto", "cpu_offload_gb", "slots")},
    "offload.expert_cache": expert_cache_acts,
    **{f"offload.{name}": offload_budgets_act for name in ("device_memory", "host_memory", "nvme")},
    **{f"offload.{name}": pages_are_llms for name in ("kv", "kv_files", "kv_offloading_size", "host_pages")},
    "zero.stage": zero_acts,
    **{f"zero.offload_param.{name}": zero_acts for name in ("device", "nvme_path", "pin_memory", "max_in_cpu")},
    **{f"zero.offload_param.{name}": zero_buffers_act for name in ("buffer_count", "buffer_size")},
    **{f"zero.aio.{name}": zero_aio_acts for name in AioConfig.model_fields},
    **{
        f"zero.{name}": zero_counts_act
        for name in ZeroConfig.model_fields
        if name not in ("stage", "offload_param", "aio")
    },
    "checkpoint": checkpoint_acts,
    "base_dir": lambda: base_dir_acts(nested=False),
    "checkpoint_config.base_dir": lambda: base_dir_acts(nested=True),
    "checkpoint_config.checkpoint_dir": checkpoint_dir_acts,
    "set_empty_params": set_empty_params_acts,
    "training_mp_size": training_mp_size_acts,
    "dtype": dtype_acts,
    "device": device_acts,
    "tensor_parallel.enabled": tensor_parallel_enabled_acts,
    "tensor_parallel.tp_size": lambda: refused("tensor_parallel.tp_size=2.*this process is alone", tp={"tp_size": 2}),
    "tensor_parallel.tp_grain_size": tp_grain_size_acts,
    "tensor_parallel.mpu": lambda: refused("tensor_parallel.mpu: expected an object with", tp={"mpu": object()}),
    "tensor_parallel.tp_group": lambda: refused("tensor_parallel.tp_group: expected a process", tp={"tp_group": 1}),
    "pipeline_parallel.pp_size": lambda: refused("pipeline_parallel.pp_size=2.*alone", pp={"pp_size": 2}),
    "pipeline_parallel.layers": lambda: raises("a number of layers", pp={"pp_size": 2, "layers": [1]}),
    "pipeline_parallel.micro_batches": lambda: raises("micro_batches: .*got 0", pp={"micro_batches": 0}),
    "moe.ep_size": lambda: refused("moe.ep_size=2: this process is alone", moe={"ep_size": 2}),
    "moe.hot_experts": lambda: raises("moe.hot_experts and moe.expert_load go together", moe={"hot_experts": 1}),
    "moe.expert_load": expert_load_acts,
    "moe.ep_group": lambda: refused("moe.ep_group: expected a process group", moe={"ep_group": 1}),
    "moe.ep_mp_group": lambda: refused("moe.ep_mp_group: expected a process group", moe={"ep_mp_group": 1}),
    "enable_cuda_graph": lambda: raises("enable_cuda_graph: a CPU has no CUDA graphs", enable_cuda_graph=True),
    "max_cuda_graphs": lambda: raises("max_cuda_graphs concern CUDA graphs", max_cuda_graphs=4),
    "graph_output": lambda: raises("graph_output and .* concern CUDA graphs", graph_output="static"),
    "moe.enabled": moe_enabled_acts,
    "moe.moe_experts": moe_experts_act,
    "moe.type": moe_type_acts,
    "keep_module_on_host": keep_module_on_host_acts,
    "replace_method": lambda: raises("replace_method: 'pipeline' has no meaning any more", replace_method="pipeline"),
    "injection_policy_tuple": lambda: raises("injection_policy_tuple: .*internal", injection_policy_tuple=("a",)),
    "config": config_acts,
    "max_out_tokens": max_out_tokens_acts,
    "min_out_tokens": min_out_tokens_acts,
    "seed": seed_acts,
    "replace_with_kernel_inject": kernel_inject_acts,
    "injection_policy": injection_policy_acts,
    "kernels": kernels_act,
    "use_triton": lambda: raises("use_triton: Triton kernels run in fused layers on a GPU", use_triton=True),
    "triangular_masking": triangular_masking_acts,
    "return_tuple": lambda: raises("return_tuple=False: a fused layer returns what", return_tuple=False),
    "transposed_mode": lambda: raises("transposed_mode: the layout of fused weights", transposed_mode=True),
    "quant.enabled": quant_enabled_acts,
    "quant.scheme": quant_scheme_acts,
    "quant.activation.enabled": quant_activation_acts,
    "quant.activation.num_bits": quant_activation_refuses(num_bits=4),
    "quant.activation.q_type": quant_activation_refuses(q_type="asymmetric"),
    "quant.activation.q_groups": quant_activation_refuses(q_groups=2),
    "quant.weight.enabled": quant_weight_acts("", enabled=False),
    "quant.weight.num_bits": quant_weight_acts("int4 in groups of 8", HEAD, num_bits=4, group_size=8),
    "quant.weight.q_type": quant_weight_acts("int8 per channel, asymmetric", q_type="asymmetric"),
    "quant.weight.q_groups": q_groups_act,
    "quant.weight.group_size": quant_weight_acts("int8 in groups of 16", group_size=16),
    "quant.weight.per_tensor": quant_weight_acts("int8 per tensor", per_tensor=True),
    "quant.weight.quantized_initialization.num_bits": initialized("int4 in groups of 16, asymmetric", HEAD, num_bits=4),
    "quant.weight.quantized_initialization.group_size": initialized("int8 in groups of 8, asymmetric", group_size=8),
    "quant.weight.quantized_initialization.group_dim": group_dim_acts,
    "quant.weight.quantized_initialization.symmetric": initialized("int8 in groups of 16", symmetric=True),
    "quant.weight.post_init_quant": post_init_quant_acts,
    "quant.qkv.enabled": quant_qkv_acts,
    "quant.kv_cache_dtype": kv_cache_dtype_acts,
    "quant.method": lambda: raises("outpace quantize", quant={"scheme": "int4", "method": "gptq"}),
    "quant.smooth": lambda: raises("outpace quantize", quant={"scheme": "w8a8", "smooth": 0.5}),
    "quant.calibration.text": calibration_acts,
    "quant.calibration.tokens": calibration_acts,
    "quant.auto.max_perplexity_increase": auto_acts(max_perplexity_increase=0.5),
    "quant.auto.max_bytes": auto_acts(max_bytes="60KB"),
    "quant.auto.bits_per_weight": bits_per_weight_acts,
    "quant.auto.schemes": auto_schemes_act,
    "quant.auto.out": auto_acts(bits_per_weight=9),
    "quant.plan": plan_acts,
    "save_mp_checkpoint_path": save_mp_checkpoint_path_acts,
    "checkpoint_config.save_mp_checkpoint_path": save_mp_checkpoint_path_acts,
}
"""Fields that work in this release, each with the proof."""


def test_every_field_has_an_entry() -> None:
    missing = [path for path in FIELDS if entry_of(path, LATER) is None and path not in EFFECTS]
    assert not missing, f"nothing shows that these fields act or raise: {missing}"
    assert EFFECTS.keys() <= FIELDS.keys(), "EFFECTS names a field that is gone"
    sections = {path.rpartition(".")[0] for path in FIELDS} | set(InferenceConfig.model_fields)
    assert LATER.keys() <= FIELDS.keys() | sections, "LATER names a field that is gone"


def test_the_walk_sees_the_whole_tree() -> None:
    deep = {"seed", "moe.type", "quant.weight.num_bits", "quant.qkv.enabled", "zero.offload_param.device"}
    assert deep <= FIELDS.keys()
    assert not FIELDS.keys() & {"moe", "quant", "quant.weight", "zero"}


@pytest.mark.parametrize("path", EFFECTS)
def test_a_field_of_this_release_acts(path: str) -> None:
    EFFECTS[path]()


@pytest.mark.parametrize("path", [path for path in FIELDS if entry_of(path, LATER) is not None and path not in EFFECTS])
def test_a_field_of_a_later_release_raises(path: str) -> None:
    entry = entry_of(path, LATER)
    assert entry is not None
    with pytest.raises(NotSupportedYet) as caught:
        InferenceConfig.of(nested(path, other_value(FIELDS[path])))
    assert caught.value.capability == LATER[entry]
    assert caught.value.field == entry
    assert str(caught.value).startswith(f"{entry}: {LATER[entry]} is not in this release yet")
    assert isinstance(caught.value, NotImplementedError)


@pytest.mark.parametrize("more", [{}, {"use_triton": True}])
def test_triton_autotune_is_told_first_on_any_device(more: dict[str, Any]) -> None:
    with pytest.raises(NotSupportedYet, match=r"^triton_autotune: .* is not in this release yet"):
        InferenceConfig.of(device="cpu", triton_autotune=True, **more)


@pytest.mark.parametrize("path", [path for path in FIELDS if path not in {"quant.enabled"} and "quant" not in path])
def test_the_default_value_may_be_written_out(path: str) -> None:
    assert InferenceConfig.of(nested(path, FIELDS[path].default)) == InferenceConfig()


NUMBERS = numbers(FIELDS)


@pytest.mark.parametrize("path", NUMBERS)
def test_a_bool_is_no_number(path: str) -> None:
    value = [True] if path in ("moe.moe_experts", "pipeline_parallel.layers") else True
    with pytest.raises(ConfigError, match=rf"^{path}: expected a number, got \[?True\]?$"):
        InferenceConfig.of(nested(path, value))


def test_every_kind_of_number_is_among_them() -> None:
    kinds = {"max_out_tokens", "seed", "moe.moe_experts", "zero.stage"}
    assert kinds <= set(NUMBERS)
    assert not {"moe.enabled", "device", "config"} & set(NUMBERS)


# For each rule: what triggers it, and the fields and the remedy its message must name.
WRONG_TOGETHER: tuple[tuple[dict[str, Any], tuple[str, ...], str], ...] = (
    (
        {"quant": {"kv_cache_dtype": "int8"}},
        ("quant.kv_cache_dtype",),
        "give replace_with_kernel_inject=True, or remove it",
    ),
    (
        {"checkpoint": "a", "checkpoint_config": {"checkpoint_dir": "b"}},
        ("checkpoint", "checkpoint_config.checkpoint_dir"),
        "give one",
    ),
    (
        {"checkpoint": "a", "base_dir": "b", "checkpoint_config": {"base_dir": "c"}},
        ("base_dir", "checkpoint_config.base_dir"),
        "give one",
    ),
    ({"base_dir": "b"}, ("base_dir", "set_empty_params", "training_mp_size"), "name it with checkpoint"),
    ({"checkpoint_config": {"base_dir": "b"}}, ("checkpoint_config.base_dir",), "name it with checkpoint"),
    (
        {"enable_cuda_graph": True, "tp": {"tp_size": 2}},
        ("enable_cuda_graph", "tensor_parallel.tp_size > 1"),
        "turn one of them off",
    ),
    (
        {"enable_cuda_graph": True, "pp": 2},
        ("enable_cuda_graph", "pipeline_parallel.pp_size > 1"),
        "turn one of them off",
    ),
    ({"pp": 2, "tp": {"tp_group": 1}}, ("pipeline_parallel.pp_size", "tp_group"), "give tp_size instead"),
    ({"pp": 2, "moe": {"ep_group": 1}}, ("pipeline_parallel.pp_size", "moe.ep_group"), "give moe.ep_size instead"),
    ({"enable_cuda_graph": True}, ("enable_cuda_graph", "device"), "leave it off"),
    (
        {"enable_cuda_graph": True, "keep_module_on_host": True},
        ("enable_cuda_graph", "keep_module_on_host"),
        "a graph needs the module on the GPU; turn one of them off",
    ),
    ({"graph_output": "static"}, ("graph_output", "max_cuda_graphs"), "give enable_cuda_graph=True"),
    (
        {"injection_policy": {torch.nn.Linear: "out"}, "kernel_inject": True},
        ("injection_policy", "replace_with_kernel_inject"),
        "give one",
    ),
    ({"use_triton": True}, ("use_triton",), "give replace_with_kernel_inject=True on a machine with a GPU"),
    ({"kernels": {"embed": "torch"}}, ("kernels",), "give replace_with_kernel_inject=True"),
    ({"triangular_masking": False}, ("triangular_masking",), "give replace_with_kernel_inject=True"),
    ({"return_tuple": False}, ("return_tuple",), "remove it"),
    ({"transposed_mode": True}, ("transposed_mode",), "remove it"),
    *(
        (
            {"dtype": "int8", "quant": {"scheme": scheme}},
            ("dtype='int8'", f"quant.scheme='{scheme}' (quantization)"),
            "both choose the weights; give one",
        )
        for scheme in ("int4", "fp8", "stored", "none")
    ),
    (
        {"dtype": "int8", "quant": {"weight": {"quantized_initialization": {"num_bits": 4}}}},
        ("dtype='int8'", "quant.weight", "bits"),
        "both choose the weights; give one",
    ),
    ({"dtype": "int8", "quant": {"plan": "x"}}, ("dtype='int8'", "quant.plan"), "both choose the weights; give one"),
    (
        {"quant": {"scheme": "int8", "weight": {"group_size": 64}}},
        ("quant.scheme", "quant.weight"),
        "how weights are quantized; give one",
    ),
    ({"quant": {"calibration": {"tokens": 64}}}, ("quant.calibration",), "remove it"),
    ({"quant": {"method": "gptq"}}, ("quant.method", "quant.smooth"), "load DIR"),
    ({"quant": {"auto": {"bits_per_weight": 8}, "scheme": "int8"}}, ("quant.auto", "quant.scheme"), "give one"),
    ({"quant": {"plan": "x", "qkv": {"enabled": False}}}, ("quant.plan", "quant.qkv"), "remove quant.qkv"),
    ({"quant": {"auto": {"bits_per_weight": 8, "max_bytes": 9}}}, ("quant.auto.max_bytes",), "it needs one bound"),
    ({"quant": {"auto": {"bits_per_weight": 8, "schemes": []}}}, ("quant.auto.schemes",), "or remove it"),
    ({"quant": {"auto": {"bits_per_weight": 8, "out": "x.txt"}}}, ("quant.auto.out",), "ends in .json"),
    (
        {"quant": {"weight": {"q_groups": 2, "group_size": 64}}},
        ("quant.weight.q_groups", "quant.weight.group_size"),
        "how many scales a weight has; give one",
    ),
    (
        {"quant": {"weight": {"quantized_initialization": {}, "num_bits": 4}}},
        ("quant.weight.quantized_initialization",),
        "a complete rule; give one",
    ),
    ({"quant": {"weight": {"post_init_quant": {}}}}, ("quant.weight.post_init_quant",), "give some, or remove it"),
    (
        {"quant": {"scheme": "none", "qkv": {"enabled": False}}},
        ("quant.qkv.enabled=False", "quant.scheme stored or none"),
        "remove quant.qkv",
    ),
    (
        {"quant": {"weight": {"post_init_quant": {"mlp": {}}}, "qkv": {"enabled": False}}},
        ("quant.qkv.enabled=False", "quant.weight.post_init_quant"),
        "remove quant.qkv",
    ),
    (
        {"quant": {"weight": {"enabled": False}, "activation": {}}},
        ("quant.weight.enabled=False", "quant.activation"),
        "enable quant.weight",
    ),
    ({"quant": {"activation": {"num_bits": 4}}}, ("quant.activation",), "remove num_bits, q_type and q_groups"),
    (
        {"tp": {"enabled": False, "tp_size": 2}},
        ("tensor_parallel.enabled", "tensor_parallel.tp_size"),
        "leave tp_size at 1",
    ),
    ({"moe": {"type": "residual"}}, ("moe.moe_experts", "moe.type"), "give replace_with_kernel_inject=True"),
    ({"moe": {"enabled": False, "ep_size": 2}}, ("moe.enabled", "moe.ep_size"), "leave ep_size at 1"),
    ({"moe": {"hot_experts": 2, "ep_size": 2}}, ("moe.hot_experts", "moe.expert_load"), "give both, or neither"),
    (
        {"moe": {"hot_experts": 2, "expert_load": [[1, 2]]}},
        ("moe.hot_experts", "moe.ep_size"),
        "give moe.ep_size too, or remove it",
    ),
    ({"min_out_tokens": 9, "max_out_tokens": 9}, ("min_out_tokens", "max_out_tokens"), "raise max_out_tokens"),
    (
        {"offload": {"auto": True}, "zero": {"stage": 3, "offload_param": {"device": "cpu"}}},
        ("offload", "zero"),
        "where weights live; give one",
    ),
    ({"zero": {"stage": 1}}, ("zero.stage",), "give 3, or remove it"),
    ({"zero": {"stage": 3}}, ("zero.stage", "zero.offload_param.device"), "give cpu or nvme"),
    ({"zero": {"offload_param": {"device": "cpu"}}}, ("zero",), "give stage 3, or remove them"),
    ({"zero": {"stage": 3, "offload_param": {"device": "nvme"}}}, ("zero.offload_param",), "give both, or neither"),
    (
        {"zero": {"stage": 3, "offload_param": {"device": "cpu", "max_in_cpu": 1}}},
        ("zero.offload_param", "max_in_cpu"),
        "remove them",
    ),
    (
        {"zero": {"stage": 3, "offload_param": {"device": "cpu"}, "aio": {"thread_count": 1}}},
        ("zero.aio",),
        "remove it",
    ),
    (
        {
            "zero": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "x"},
                "aio": {"use_gds": True},
            }
        },
        ("zero.aio", "use_gds"),
        "remove them",
    ),
    (
        {"offload": {"cpu_offload_gb": 1, "host_memory": 5}},
        ("offload.cpu_offload_gb", "offload.host_memory"),
        "give one",
    ),
    ({"offload": {"slots": 2}}, ("offload.slots", "offload.device_memory"), "remove them"),
    (
        {"kernel_inject": True, "kernels": {"linear": "tuned"}},
        ("kernels.linear", "enable_cuda_graph"),
        "give enable_cuda_graph=True",
    ),
    (
        {"kernel_inject": True, "kernels": {"linear": "tuned"}, "offload": "auto"},
        ("kernels.linear", "offload"),
        "remove one",
    ),
    ({"offload": "auto", "keep_module_on_host": True}, ("keep_module_on_host", "offload"), "give one"),
    ({"offload": {"kv": "1GB"}}, ("offload.kv", "kv_files"), "use LLM"),
    (
        {"save_mp_checkpoint_path": "a", "ckpt_config": {"save_mp_checkpoint_path": "a"}},
        ("save_mp_checkpoint_path", "checkpoint_config.save_mp_checkpoint_path"),
        "give one",
    ),
)


@pytest.mark.parametrize(("config", "fields", "remedy"), WRONG_TOGETHER)
def test_a_wrong_combination_names_its_fields_and_a_remedy(
    config: dict[str, Any], fields: tuple[str, ...], remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        InferenceConfig.of(device="cpu", **config)
    for said in (*fields, remedy):
        assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("weight", [{"num_bits": 4}, {"post_init_quant": {"mlp": {"num_bits": 4}}}, {"enabled": False}])
def test_dtype_int8_with_weights_of_another_kind(weight: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"dtype='int8' and quant\.weight"):
        InferenceConfig.of(device="cpu", dtype="int8", quant={"weight": weight})


def test_every_rule_is_triggered_by_some_case() -> None:
    said = []
    for config, _, _ in WRONG_TOGETHER:
        with pytest.raises(ConfigError) as caught:
            InferenceConfig.of(device="cpu", **config)
        said.append(str(caught.value))
    rules = [*COMPOSITIONS, *INFERENCE_COMPOSITIONS]
    assert not [message for message in rules if not any(message in text for text in said)]
    assert len(WRONG_TOGETHER) == len(rules)


@pytest.mark.parametrize("longest", [1, 2, 5])
def test_min_out_tokens_above_max_out_tokens(longest: int) -> None:
    with pytest.raises(ConfigError, match="min_out_tokens must be smaller than max_out_tokens"):
        InferenceConfig.of(max_out_tokens=longest, min_out_tokens=longest + 1)


def test_max_out_tokens_of_one_is_allowed_for_models_that_do_not_generate() -> None:
    assert InferenceConfig.of(max_out_tokens=1).max_out_tokens == 1


def test_two_problems_are_said_together() -> None:
    with pytest.raises(ConfigError, match=r"use_triton.*; .*min_out_tokens"):
        InferenceConfig.of(device="cpu", use_triton=True, max_out_tokens=5, min_out_tokens=5)
