"""Outpace runs and serves PyTorch models near the speed of the hardware.

Names are imported when they are first used, so that `import outpace` and `outpace --help` do not wait for torch.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from outpace._version import __version__
from outpace.process_wide import COLLECTOR

if TYPE_CHECKING:
    from outpace.api import init_inference as init_inference
    from outpace.api import pipeline as pipeline
    from outpace.config import InferenceConfig as InferenceConfig
    from outpace.config import LLMConfig as LLMConfig
    from outpace.config import default_inference_config as default_inference_config
    from outpace.engine import InferenceEngine as InferenceEngine
    from outpace.errors import ConfigError as ConfigError
    from outpace.errors import DownloadError as DownloadError
    from outpace.errors import InputError as InputError
    from outpace.errors import ModelError as ModelError
    from outpace.errors import NotSupported as NotSupported
    from outpace.errors import NotSupportedYet as NotSupportedYet
    from outpace.errors import OutpaceError as OutpaceError
    from outpace.errors import Overloaded as Overloaded
    from outpace.errors import StateError as StateError
    from outpace.inject.policies import register_policy as register_policy
    from outpace.inject.policy import ModelRoles as ModelRoles
    from outpace.inject.policy import MoERoles as MoERoles
    from outpace.inject.policy import Policy as Policy
    from outpace.kernels.routing import Routing as Routing
    from outpace.llm import LLM as LLM
    from outpace.loading.skeleton import OnDevice as OnDevice
    from outpace.mii import Pipeline as Pipeline
    from outpace.mii import Response as Response
    from outpace.quality import evaluate as evaluate
    from outpace.ragged import RaggedEngine as RaggedEngine
    from outpace.ragged import SchedulingError as SchedulingError
    from outpace.ragged import SchedulingResult as SchedulingResult
    from outpace.server.python_api import client as client
    from outpace.server.python_api import serve as serve
    from outpace.structured.outputs import StructuredOutputs as StructuredOutputs
    from outpace.types import CompletionOutput as CompletionOutput
    from outpace.types import FinishReason as FinishReason
    from outpace.types import Logprob as Logprob
    from outpace.types import RequestOutput as RequestOutput
    from outpace.types import SamplingParams as SamplingParams

_WHERE = {
    "outpace.api": ("init_inference", "pipeline"),
    "outpace.config": ("InferenceConfig", "LLMConfig", "default_inference_config"),
    "outpace.engine": ("InferenceEngine",),
    "outpace.errors": (
        *("ConfigError", "DownloadError", "InputError", "ModelError"),
        *("NotSupported", "NotSupportedYet", "OutpaceError", "Overloaded", "StateError"),
    ),
    "outpace.inject.policies": ("register_policy",),
    "outpace.inject.policy": ("ModelRoles", "MoERoles", "Policy"),
    "outpace.kernels.routing": ("Routing",),
    "outpace.llm": ("LLM",),
    "outpace.loading.skeleton": ("OnDevice",),
    "outpace.mii": ("Pipeline", "Response"),
    "outpace.quality": ("evaluate",),
    "outpace.ragged": ("RaggedEngine", "SchedulingError", "SchedulingResult"),
    "outpace.server.python_api": ("client", "serve"),
    "outpace.structured.outputs": ("StructuredOutputs",),
    "outpace.types": ("CompletionOutput", "FinishReason", "Logprob", "RequestOutput", "SamplingParams"),
}

__all__ = ["__version__", *(name for names in _WHERE.values() for name in names)]


def __getattr__(name: str) -> Any:
    for module, names in _WHERE.items():
        if name in names:
            return getattr(_imported(module), name)
    raise AttributeError(f"module 'outpace' has no attribute {name!r}")


def _imported(module: str) -> ModuleType:
    """Import a module without garbage collection, which takes a fifth of the time and finds nothing."""
    with COLLECTOR.off():
        return import_module(module)


def __dir__() -> list[str]:
    return sorted(__all__)
