"""Every option of Outpace, its default and its meaning: the only place where a default is written.

Names, defaults and aliases are DeepSpeed's where DeepSpeed has the option, so that its scripts and JSON files work
unchanged. Unlike there, every accepted field acts or raises: what is not in this release yet is listed in `rules.LATER`
and raises `NotSupportedYet`; the release that brings the capability removes the line.
"""

from outpace.config.inference import ConfigLike, InferenceConfig, default_inference_config
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
    "CacheConfig",
    "CheckpointConfig",
    "ConfigLike",
    "InferenceConfig",
    "MoEConfig",
    "OffloadConfig",
    "QuantizationConfig",
    "SchedulerConfig",
    "TensorParallelConfig",
    "ZeroConfig",
    "default_inference_config",
    "parse_dtype",
]
