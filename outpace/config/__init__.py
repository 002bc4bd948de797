"""Every option of Outpace, its default and its meaning: the only place where a default is written.

`InferenceConfig` is for `init_inference`; `LLMConfig` adds what the runtime of `LLM` and the server needs, and vLLM's
names for it. Other names, defaults and aliases are DeepSpeed's where DeepSpeed has the option, so that its scripts and
JSON files work unchanged. Unlike there, every accepted field acts or raises: what is not in this release yet is listed
in `rules.LATER` and raises `NotSupportedYet`; the release that brings the capability removes the line.
"""

from outpace.config.asked import AskedConfig
from outpace.config.inference import ConfigLike, InferenceConfig, default_inference_config
from outpace.config.llm import LLMConfig
from outpace.config.sections import (
    CacheConfig,
    CheckpointConfig,
    MoEConfig,
    OffloadConfig,
    QuantizationConfig,
    SchedulerConfig,
    TensorParallelConfig,
    ZeroConfig,
)
from outpace.config.values import parse_dtype

__all__ = [
    "AskedConfig",
    "CacheConfig",
    "CheckpointConfig",
    "ConfigLike",
    "InferenceConfig",
    "LLMConfig",
    "MoEConfig",
    "OffloadConfig",
    "QuantizationConfig",
    "SchedulerConfig",
    "TensorParallelConfig",
    "ZeroConfig",
    "default_inference_config",
    "parse_dtype",
]
