"""A model without its weights: parameters on the meta device, which takes no memory, and buffers real."""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_utils import local_torch_dtype

from outpace.errors import ConfigError
from outpace.log import logger

_MAKING = threading.RLock()  # transformers changes torch's default dtype and torch.nn.init for all threads
_INNERMOST: ContextVar["OnDevice | None"] = ContextVar("OnDevice", default=None)


class OnDevice:
    """Modules that are made inside have their parameters on `device`, and their buffers where they would be.

    With "meta" they take no memory until `init_inference(model, checkpoint=...)` fills them. DeepSpeed's arguments:
    `OnDevice(dtype=torch.float16, device="meta")`; a device alone will do. Only parameters get the dtype: tables of
    positions that are computed in half precision would be wrong. Other threads notice nothing.
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
        self._undo: list[tuple[Any, Token[OnDevice | None]]] = []

    def __enter__(self) -> Self:
        if self._enabled:
            moved: Any = self._moved  # torch's hint forgets that a hook may return a parameter
            hook = register_module_parameter_registration_hook(moved)
            self._undo.append((hook, _INNERMOST.set(self)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._undo:
            hook, outer = self._undo.pop()
            hook.remove()
            _INNERMOST.reset(outer)

    @torch.no_grad()
    def _moved(self, module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        """The parameter that is registered instead; None: this one."""
        if _INNERMOST.get() is not self:
            return None
        dtype = self._dtype if parameter.is_floating_point() else None
        moved = parameter.to(self._device, dtype)
        return None if moved is parameter else nn.Parameter(moved, requires_grad=parameter.requires_grad)


@contextmanager
def outside() -> Iterator[None]:
    """What is made inside stays where it is, though somebody's OnDevice is around it."""
    outer = _INNERMOST.set(None)
    try:
        yield
    finally:
        _INNERMOST.reset(outer)


@contextmanager
def _making(dtype: torch.dtype) -> Iterator[None]:
    """A model is made in `dtype`. What would draw random numbers is left out, and imports of seconds with it."""
    with _MAKING, no_init_weights(), local_torch_dtype(dtype):
        yield


def skeleton(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The causal model of a config without weights, its parameters of `dtype`. Its buffers are computed in float32."""
    with _making(torch.float32), OnDevice(dtype=dtype, device="meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights(recompute_mapping=False)
    return model


def with_buffers(model: nn.Module) -> nn.Module:
    """A module of somebody's without weights, with the buffers that are computed: in float32, by making it anew."""
    if not isinstance(model, PreTrainedModel) or not any(value.is_meta for _, value in _tensors(model)):
        return model
    with OnDevice("meta"):
        made = _made_anew(model, torch.float32)
    buffers = {} if made is None else dict(made.named_buffers(remove_duplicate=False))
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix=path, recurse=False):
            leaf = name.rpartition(".")[2]
            if name in buffers and (buffer.is_meta or leaf in module._non_persistent_buffers_set):
                module._buffers[leaf] = buffers[name]
    return model


def own_dtypes(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtypes of a Hugging Face model's tensors when its class makes it in `dtype`: float32 for rotary frequencies,
    `dtype` for most others. Read off a skeleton without values (55 ms for 30 layers); empty for other models."""
    if not isinstance(model, PreTrainedModel):
        return {}
    with torch.device("meta"):
        made = _made_anew(model, dtype)
    return {} if made is None else {name: value.dtype for name, value in _tensors(made)}


def _made_anew(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel | None:
    """Another model of its class and config; None: its class has a constructor of its own."""
    try:
        config = copy.deepcopy(model.config)
        set_dtype(config, dtype)
        with _making(dtype):
            return type(model)(config)
    except Exception as error:  # somebody's class
        logger.warning("dtype: what %s keeps in another dtype is not known (%s)", type(model).__name__, error)
        return None


def set_dtype(config: Any, dtype: torch.dtype) -> None:
    """Let a config, if it is one of Hugging Face, say the dtype of its model, and its parts too."""
    for each in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        if hasattr(each, "dtype"):
            each.dtype = dtype


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
