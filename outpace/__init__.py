"""Outpace runs and serves PyTorch models near the speed of the hardware."""

from outpace._version import __version__
from outpace.api import init_inference
from outpace.config import InferenceConfig, default_inference_config
from outpace.engine import InferenceEngine
from outpace.errors import (
    ConfigError,
    DownloadError,
    InputError,
    ModelError,
    NotSupported,
    NotSupportedYet,
    OutpaceError,
    StateError,
)

__all__ = [
    "ConfigError",
    "DownloadError",
    "InferenceConfig",
    "InferenceEngine",
    "InputError",
    "ModelError",
    "NotSupported",
    "NotSupportedYet",
    "OutpaceError",
    "StateError",
    "__version__",
    "default_inference_config",
    "init_inference",
]
