"""The options of `init_inference`: the top of the config tree. `LLMConfig` adds to it."""

import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from outpace.config.base import ConfigModel
from outpace.config.quantization import QuantizationConfig, WeightQuantConfig, changed
from outpace.config.rules import COMPOSITIONS, INFERENCE_COMPOSITIONS, LATER, is_int8
from outpace.config.sections import (
    CacheConfig,
    CheckpointConfig,
    MoEConfig,
    NodesConfig,
    OffloadConfig,
    PipelineParallelConfig,
    SchedulerConfig,
    TensorParallelConfig,
    ZeroConfig,
)
from outpace.config.values import (
    Device,
    DType,
    NamedPath,
    PathOrDict,
    PathText,
    check_device,
    same_device,
    same_dtype,
)
from outpace.errors import NotSupportedYet

if TYPE_CHECKING:
    import torch

_SCHEDULES = "only outpace.LLM and outpace serve schedule requests; remove it"
ZERO_OPTIMIZATION = "DeepSpeed's name in training configs; give its dictionary as zero, with aio in it"
_STARTS_RANKS = "only outpace.LLM and outpace serve start ranks (here torchrun --nnodes does); remove it"
_KEEPS_PAGES = "only outpace.LLM and outpace serve keep the pages of requests; remove it"
LLM_NAMES: Mapping[str, str] = {
    "tensor_parallel_size": "tensor_parallel.tp_size",
    "expert_parallel_size": "moe.ep_size",
    "pipeline_parallel_size": "pipeline_parallel.pp_size",
    "max_model_len": "max_out_tokens",
    "quantization": "quant.scheme",
    "kv_cache_dtype": "quant.kv_cache_dtype",
    "cpu_offload_gb": "offload.cpu_offload_gb",
    **{
        f"offload_{name}": f"offload.{name}"
        for name in OffloadConfig.model_fields
        if name not in ("cpu_offload_gb", "kv_offloading_size", "slots")
    },
}
"""Names that only `LLM` takes -> the options, which `init_inference` has too."""


class InferenceConfig(ConfigModel):
    """Options of `outpace.init_inference`."""

    aliases: ClassVar[Mapping[str, str]] = {
        "kernel_inject": "replace_with_kernel_inject",
        "tp": "tensor_parallel",
        "pp": "pipeline_parallel",
        "tm": "triangular_masking",
        "ckpt_config": "checkpoint_config",
        "injection_dict": "injection_policy",
        "args": "config",
        "max_tokens": "max_out_tokens",
        "min_tokens": "min_out_tokens",
    }
    elsewhere: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("scheduler", *SchedulerConfig.model_fields, "deterministic"), _SCHEDULES),
        **dict.fromkeys(("cache", *CacheConfig.model_fields, "num_gpu_blocks_override"), _KEEPS_PAGES),
        **dict.fromkeys(("nodes", *NodesConfig.model_fields), _STARTS_RANKS),
        **{
            name: f"a name of outpace.LLM alone; use {option}"
            for name, option in {"enforce_eager": "enable_cuda_graph", **LLM_NAMES}.items()
        },
        "generation_config": "only outpace.LLM takes it; generate uses the module's own generation_config; remove it",
        "max_logprobs": "only outpace.LLM and outpace serve return log-probabilities; remove it",
        "kv_offloading_size": _KEEPS_PAGES,
        "zero_optimization": ZERO_OPTIMIZATION,
    }
    keeps_auto = frozenset({"replace_method", "offload"})
    switches = frozenset({"moe"})
    sizes: ClassVar[Mapping[str, str]] = {"tensor_parallel": "tp_size", "pipeline_parallel": "pp_size"}  # as in MII
    same_value: ClassVar[Mapping[str, Callable[[Any, Any], bool]]] = {"dtype": same_dtype, "device": same_device}
    deprecated: ClassVar[Mapping[str, str]] = {
        "mp_size": "tensor_parallel.tp_size",
        "mpu": "tensor_parallel.mpu",
        "ep_size": "moe.ep_size",
        "ep_group": "moe.ep_group",
        "expert_group": "moe.ep_group",
        "ep_mp_group": "moe.ep_mp_group",
        "expert_mp_group": "moe.ep_mp_group",
        "moe_experts": "moe.moe_experts",
        "moe_type": "moe.type",
    }

    replace_with_kernel_inject: bool = False
    """Replace every transformer layer by a fused one."""
    dtype: DType | None = None
    """fp32, fp16, bf16, int8. None: `init_inference` takes fp16 on a GPU, fp32 on a CPU; `LLM` the checkpoint's own."""
    device: Device | None = None
    """"cpu", "cuda" or "cuda:N". None: the first GPU if there is one."""
    tensor_parallel: TensorParallelConfig = TensorParallelConfig()
    """Tensor parallelism."""
    pipeline_parallel: PipelineParallelConfig = PipelineParallelConfig()
    """Pipeline parallelism."""
    enable_cuda_graph: bool = False
    """Capture `forward` as CUDA graphs, one for each input signature."""
    max_cuda_graphs: int = Field(default=16, ge=1)
    """Maximum number of graphs kept; the least recently used one is dropped first."""
    graph_output: Literal["copy", "static"] = "copy"
    """copy: each call returns new outputs. static: the next call overwrites the outputs, which saves the copy."""
    kernels: dict[str, str] | None = None
    """Implementations of single ops in fused layers: {"attention": "torch"}. {"linear": "tuned"}: at the start, search
    the fastest algorithms of the GPU's library for products of 17 to 4,096 rows. None: chosen for the device."""
    use_triton: bool = False
    """DeepSpeed's switch for Triton kernels in fused layers, which are used on a GPU anyway."""
    triton_autotune: bool = False
    """Tune Triton kernels at the first use."""
    zero: ZeroConfig = ZeroConfig()
    """ZeRO-Inference with DeepSpeed's options: layers are streamed from host memory or NVMe."""
    triangular_masking: bool = True
    """False: the fused layers are not causal. A causal model is then refused."""
    moe: MoEConfig = MoEConfig()
    """Mixture of experts; a bool sets `enabled`."""
    keep_module_on_host: bool = False
    """Leave the module where it is in host memory instead of moving it to the device."""
    quant: QuantizationConfig | None = None
    """Quantization; None is off."""
    checkpoint: PathOrDict | None = None
    """Weights that the module is filled with: a folder, a file, or DeepSpeed's description (docs/checkpoints.md)."""
    base_dir: PathText = ""
    """Folder the names in the checkpoint description are relative to."""
    set_empty_params: bool = False
    """Free the module's own weights before those of `checkpoint` are read."""
    save_mp_checkpoint_path: NamedPath | None = None
    """Folder to which the module's weights are written, as shards for `tensor_parallel.tp_size` ranks."""
    checkpoint_config: CheckpointConfig = CheckpointConfig()
    """Where checkpoints are read and written."""
    return_tuple: bool = True
    """Only True is accepted: a fused layer returns what the model around it expects."""
    training_mp_size: int = Field(default=1, ge=1)
    """Number of ranks that saved `checkpoint`; 1: as many as it has files for."""
    replace_method: str = "auto"
    """Deprecated and without effect: only "auto" is accepted."""
    injection_policy: dict[Any, Any] | None = None
    """{layer class: names of the linears whose outputs are all-reduced} or {layer class: policy}."""
    injection_policy_tuple: tuple[Any, ...] | None = None
    """Always refused: an internal field of DeepSpeed."""
    config: dict[str, Any] | None = None
    """Values that replace entries of the model's config when the engine reads it."""
    max_out_tokens: int = Field(default=1024, ge=1)
    """Maximum tokens of a sequence in `generate`, prompt and new tokens together."""
    min_out_tokens: int = Field(default=1, ge=1)
    """`generate` refuses a prompt that leaves room for fewer new tokens than this."""
    transposed_mode: bool = False
    """Only False is accepted: the layout of fused weights is Outpace's own."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    """Seed of each `generate` call, and of each `LLM` request without one; None: torch's global generator."""
    offload: OffloadConfig = OffloadConfig()
    """Layers that live in host memory or on NVMe and are streamed; "auto": those that do not fit (docs/offload.md)."""

    @field_validator("offload", mode="before")
    @classmethod
    def _offload_auto(cls, value: object) -> object:
        if isinstance(value, str | bool | None):
            if value not in ("auto", True, False, None):
                raise ValueError(f'expected "auto" or a dictionary of its fields, got {value!r:.80}')
            return {"auto": bool(value)}
        return value

    @field_validator("quant", mode="after")
    @classmethod
    def _quant_off(cls, value: QuantizationConfig | None) -> QuantizationConfig | None:
        if value is not None and not value.enabled and value.scheme is not None:
            raise ValueError(f"enabled=False with scheme (or quantization=) {value.scheme!r}; remove one of them")
        if value is not None and not value.enabled and value.kv_cache_dtype != "auto":
            raise ValueError(f"enabled=False with kv_cache_dtype {value.kv_cache_dtype!r}; remove one of them")
        return value if value is not None and value.enabled else None

    @field_validator("replace_method")
    @classmethod
    def _replace_method(cls, value: str) -> str:
        if value != "auto":
            raise ValueError(f"{value!r} has no meaning any more; remove replace_method")
        return value

    @field_validator("injection_policy_tuple")
    @classmethod
    def _injection_policy_tuple(cls, value: object) -> None:
        if value is not None:
            raise ValueError("this is an internal field of DeepSpeed's engine; use injection_policy")

    @field_validator("device")
    @classmethod
    def _device_exists(cls, value: str | None) -> str | None:
        if value is not None:
            check_device(value)
        return value

    @model_validator(mode="after")
    def _check(self) -> "InferenceConfig":
        for name, capability in LATER.items():
            if changed(self, name):
                raise NotSupportedYet(name, capability)
        problems = list(self._problems())
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def asked_quant(self) -> QuantizationConfig | None:
        """How weights are quantized; None: not at all. dtype int8 asks for it too."""
        if self.quant is not None and not self.quant.only_cache:
            return self.quant
        asked = QuantizationConfig(weight=WeightQuantConfig(), kv_cache_dtype=self.kv_cache_dtype)
        return asked if is_int8(self) else None

    @property
    def compute_dtype(self) -> "torch.dtype | None":
        """The dtype to compute in, if one was asked for."""
        return None if is_int8(self) else self.dtype

    def _problems(self) -> Iterator[str]:
        """Errors for options that cannot be combined."""
        rules = (*COMPOSITIONS.items(), *INFERENCE_COMPOSITIONS.items())
        yield from (message for message, wrong in rules if wrong(self))

    @property
    def kv_cache_dtype(self) -> str:
        """`quant.kv_cache_dtype`; auto without `quant`."""
        return "auto" if self.quant is None else self.quant.kv_cache_dtype

    @property
    def device_type(self) -> str:
        """ "cpu" or "cuda"."""
        return self.torch_device.type

    @property
    def torch_device(self) -> "torch.device":
        """The device the engine runs on."""
        import torch

        return torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))


ConfigLike = None | Mapping[str, Any] | str | os.PathLike[str] | InferenceConfig
"""Types of the argument `config`."""


def default_inference_config() -> dict[str, Any]:
    """Every option with its default, as a dict that `init_inference(config=...)` accepts."""
    return InferenceConfig().model_dump()
