"""`init_inference` for a module, and `pipeline` with the API of DeepSpeed-MII."""

import os
from typing import Any

from torch import nn

from outpace.config import ConfigLike, InferenceConfig
from outpace.engine import InferenceEngine
from outpace.llm import LLM
from outpace.mii import Pipeline


def init_inference(model: nn.Module, config: ConfigLike = None, **kwargs: Any) -> InferenceEngine:
    """Prepare `model` to run, as DeepSpeed's call of the same name does.

    `config` is None, a dict, the path of a JSON file or an InferenceConfig; keywords are merged with it. Options and
    their defaults: `outpace.InferenceConfig`. The model is converted and moved in place.
    """
    return InferenceEngine(model, InferenceConfig.of(config, **kwargs))


def pipeline(model_name_or_path: str | os.PathLike[str] | nn.Module | None = None, **options: Any) -> Pipeline:
    """MII's pipeline: `pipe(prompts, max_new_tokens=...)` returns responses. Options are those of `LLM`."""
    return Pipeline(LLM(model_name_or_path, **options))
