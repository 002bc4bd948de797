"""A model without its weights: parameters on the meta device, which takes no memory, and buffers real."""

import threading
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_utils import local_torch_dtype

from outpace.errors import ConfigError

_PATCHING = threading.RLock()  # torch has one register_parameter for all threads


class OnDevice:
    """Modules that are made inside have their parameters on `device`, and their buffers where they would be.

    With "meta" they take no memory until `init_inference(model, checkpoint=...)` fills them. DeepSpeed's arguments:
    `OnDevice(dtype=torch.float16, device="meta")`; a device alone will do.
    """

    def __init__(
        self,
        dtype: torch.dtype | str | torch.device | None = None,
        device: str | torch.device = "meta",
        enabled: bool = True,
    ) -> None:
        place = dtype if isinstance(dtype, str | torch.device) else device
        self._dtype = None if isinstance(dtype, str | torch.device) else dtype
        if self._dtype is not None and not isinstance(self._dtype, torch.dtype):
            raise ConfigError(f"dtype: expected a torch.dtype, got {dtype!r:.60}")
        try:
            self._device = torch.device(place)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(f"device: {place!r:.60} is no device; give 'meta', 'cpu' or 'cuda'") from error
        self._enabled = enabled
        self._undo: Any = None

    def __enter__(self) -> Self:
        if self._enabled:
            _PATCHING.acquire()
            original, usual, thread = nn.Module.register_parameter, torch.get_default_dtype(), threading.get_ident()

            def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
                if parameter is not None and threading.get_ident() == thread and parameter.device != self._device:
                    parameter = nn.Parameter(parameter.data.to(self._device), requires_grad=parameter.requires_grad)
                original(module, name, parameter)

            nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
            self._undo = original, usual
            if self._dtype is not None:
                torch.set_default_dtype(self._dtype)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._undo is not None:
            nn.Module.register_parameter, usual = self._undo  # type: ignore[method-assign]
            torch.set_default_dtype(usual)
            self._undo = None
            _PATCHING.release()


def skeleton(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The causal model of a config without weights, its buffers in what its class makes them in for `dtype`."""
    with (
        OnDevice("meta"),
        no_init_weights(),
    ):  # what would draw random numbers is left out, and imports of seconds with it
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights(recompute_mapping=False)
    return model


def with_buffers(model: nn.Module) -> nn.Module:
    """A module of somebody's on the meta device, with real buffers: they are computed by making it anew."""
    if not isinstance(model, PreTrainedModel) or not any(buffer.is_meta for buffer in model.buffers()):
        return model
    own = model.dtype if model.dtype.is_floating_point else torch.float32
    with OnDevice("meta"), no_init_weights(), local_torch_dtype(own):
        made = type(model)(model.config)
    for path, module in made.named_modules():
        target = model.get_submodule(path)
        for name, buffer in module.named_buffers(recurse=False):
            target._buffers[name] = buffer
    return model
