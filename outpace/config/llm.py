"""The options of `LLM` and the server: those of `init_inference`, plus those of the runtime that schedules requests."""

import re
from collections.abc import Iterator, Mapping
from typing import ClassVar

from pydantic import Field, field_validator

from outpace.config.inference import LLM_NAMES, ZERO_OPTIMIZATION, InferenceConfig
from outpace.config.rules import COMPOSITIONS, LLM_COMPOSITIONS
from outpace.config.sections import CacheConfig, NodesConfig, SchedulerConfig
from outpace.config.values import DTypeName

_DEVICE = re.compile(r"(cpu|cuda)(:\d+)?")


class LLMConfig(InferenceConfig):
    """Options of `outpace.LLM` and `outpace serve`. vLLM's names work too."""

    flat: ClassVar[Mapping[str, str]] = {
        **LLM_NAMES,
        "kv_offloading_size": "offload.kv_offloading_size",
        "num_gpu_blocks_override": "cache.num_blocks",
        **{name: f"cache.{name}" for name in CacheConfig.model_fields},
        **{name: f"scheduler.{name}" for name in SchedulerConfig.model_fields},
        **{name: f"nodes.{name}" for name in NodesConfig.model_fields},
    }
    """vLLM's names, and the options of the runtime without their section."""
    aliases: ClassVar[Mapping[str, str]] = {**InferenceConfig.aliases, **flat}
    elsewhere: ClassVar[Mapping[str, str]] = {"zero_optimization": ZERO_OPTIMIZATION}
    keeps_auto = InferenceConfig.keeps_auto | {"quantization"}

    replace_with_kernel_inject: bool = True
    """Only True is accepted: `LLM` runs fused layers over pages."""
    enable_cuda_graph: bool | None = None  # type: ignore[assignment]
    """Capture steps as CUDA graphs; None: on a GPU, unless `enforce_eager`."""
    max_out_tokens: int | None = Field(default=None, ge=1)  # type: ignore[assignment]
    """Maximum tokens of a request, prompt and new tokens together; None: the model's number of positions."""
    cache: CacheConfig = CacheConfig()
    """The paged key-value cache."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """Continuous batching."""
    nodes: NodesConfig = NodesConfig()
    """One model over several machines."""
    deterministic: bool = False
    """A request gets bitwise the same tokens whatever other requests share its batch."""
    enforce_eager: bool | None = None
    """True, like enable_cuda_graph=False: no CUDA graphs."""
    generation_config: str = "auto"
    """Sampling defaults: auto, the model's generation_config.json; none, neutral values; or another folder or file."""
    max_logprobs: int = Field(default=20, ge=-1)
    """Maximum number of log-probabilities for each token that a request may ask for; -1: the whole vocabulary."""

    @property
    def cuda_graphs(self) -> bool:
        """Whether steps are captured as CUDA graphs: on a GPU, unless that is turned off."""
        return self.torch_device.type == "cuda" and self.enable_cuda_graph is not False and not self.enforce_eager

    def _problems(self) -> Iterator[str]:
        yield from (message for message, wrong in (*COMPOSITIONS.items(), *LLM_COMPOSITIONS.items()) if wrong(self))


class AskedConfig(LLMConfig):
    """LLMConfig for a process that does not import torch. The engine checks what depends on the machine."""

    dtype: DTypeName | None = None  # type: ignore[assignment]
    """torch's name of the dtype."""

    @field_validator("device")
    @classmethod
    def _device_exists(cls, value: str | None) -> str | None:
        if value is not None and not _DEVICE.fullmatch(value):
            raise ValueError(f"{value!r} is not a device Outpace runs on; use 'cpu', 'cuda' or 'cuda:N'")
        return value

    @property
    def device_type(self) -> str:
        """ "cpu" or "cuda" as it was asked for; empty: the engine decides."""
        return (self.device or "").partition(":")[0]
