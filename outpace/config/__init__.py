"""The options of Outpace, with their defaults and meanings. Each default is written only here.

`InferenceConfig` is for `init_inference`; `LLMConfig` adds what the runtime of `LLM` and the server needs, and vLLM's
names for it. Where DeepSpeed has an option, its name, default and aliases are used, so that DeepSpeed scripts and JSON
files work unchanged. Unlike in DeepSpeed, every accepted field acts or raises: capabilities that this release lacks are
listed in `rules.LATER` and raise `NotSupportedYet`.
"""

from outpace.config.inference import ConfigLike, InferenceConfig, default_inference_config
from outpace.config.llm import AskedConfig, LLMConfig
from outpace.config.sections import CacheConfig, SchedulerConfig

__all__ = [
    "AskedConfig",
    "CacheConfig",
    "ConfigLike",
    "InferenceConfig",
    "LLMConfig",
    "SchedulerConfig",
    "default_inference_config",
]
