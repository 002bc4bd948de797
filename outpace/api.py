"""The calls people make: `init_inference` for a module."""

from typing import Any

from torch import nn

from outpace.config import ConfigLike, InferenceConfig
from outpace.engine import InferenceEngine


def init_inference(model: nn.Module, config: ConfigLike = None, **kwargs: Any) -> InferenceEngine:
    """Make `model` ready to run, as DeepSpeed's call of the same name does.

    `config` is None, a dict, the path of a JSON file or an InferenceConfig; keywords are merged with it. Options and
    their defaults: `outpace.InferenceConfig`. The model is converted and moved in place.
    """
    return InferenceEngine(model, InferenceConfig.of(config, **kwargs))
