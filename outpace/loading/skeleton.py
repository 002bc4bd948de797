"""Makes models without weights: parameters on the meta device, which takes no memory; buffers with values."""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_utils import local_torch_dtype

from outpace.errors import ConfigError
from outpace.log import logger

_MAKING = threading.RLock()  # because transformers changes torch's default dtype and torch.nn.init for all threads
_INNERMOST: ContextVar["OnDevice | None"] = ContextVar("OnDevice", default=None)


class OnDevice:
    """A context in which modules get their parameters on `device`; buffers are not moved.

    With "meta" parameters take no memory until `init_inference(model, checkpoint=...)` fills them. Takes DeepSpeed's
    arguments, `OnDevice(dtype=torch.float16, device="meta")`, or only a device. Only parameters get the dtype: position
    tables computed in half precision would be wrong. Other threads are not affected.
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
            raise ConfigError(f"device: {place!r:.60} is not a device; give 'meta', 'cpu' or 'cuda'") from error
        self._enabled = enabled
        self._undo: list[tuple[Any, Token[OnDevice | None]]] = []

    def __enter__(self) -> Self:
        if self._enabled:
            moved: Any = self._moved  # torch's type hint does not allow a hook to return a parameter
            hook = register_module_parameter_registration_hook(moved)
            self._undo.append((hook, _INNERMOST.set(self)))
        return self

    def __exit__(self, *_: object) -> None:
        if self._undo:
            hook, outer = self._undo.pop()
            hook.remove()
            _INNERMOST.reset(outer)

    @torch.no_grad()
    def _moved(self, module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        """The parameter to register instead; None: keep this one."""
        if _INNERMOST.get() is not self:
            return None
        dtype = self._dtype if parameter.is_floating_point() else None
        moved = parameter.to(self._device, dtype)
        return None if moved is parameter else nn.Parameter(moved, requires_grad=parameter.requires_grad)


@contextmanager
def outside() -> Iterator[None]:
    """Disable a surrounding OnDevice of the caller."""
    outer = _INNERMOST.set(None)
    try:
        yield
    finally:
        _INNERMOST.reset(outer)


@contextmanager
def _making(dtype: torch.dtype) -> Iterator[None]:
    """Make a model in `dtype` without random initialization, which would also import slow modules."""
    with _MAKING, no_init_weights(), local_torch_dtype(dtype):
        yield


def skeleton(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The causal model of a config without weights, with parameters of `dtype` and buffers computed in float32."""
    with _making(torch.float32), OnDevice(dtype=dtype, device="meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights(recompute_mapping=False)
    return model


def with_buffers(model: nn.Module) -> nn.Module:
    """Give a module without weights its computed buffers, in float32, by making another instance."""
    if not isinstance(model, PreTrainedModel) or not any(value.is_meta for _, value in _tensors(model)):
        return model
    with OnDevice("meta"):
        made = _another(model, torch.float32)
    buffers = {} if made is None else dict(made.named_buffers(remove_duplicate=False))
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix=path, recurse=False):
            leaf = name.rpartition(".")[2]
            if name in buffers and (buffer.is_meta or leaf in module._non_persistent_buffers_set):
                module._buffers[leaf] = buffers[name]
    return model


def own_dtypes(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtypes that a Hugging Face class gives its tensors in `dtype`: float32 for rotary frequencies, `dtype` for
    most. Taken from a skeleton (55 ms for 30 layers); empty for other models."""
    if not isinstance(model, PreTrainedModel):
        return {}
    with torch.device("meta"):
        made = _another(model, dtype)
    return {} if made is None else {name: value.dtype for name, value in _tensors(made)}


def _another(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel | None:
    """Another instance with its class and config; None: its constructor takes other arguments."""
    try:
        config = copy.deepcopy(model.config)
        set_dtype(config, dtype)
        with _making(dtype):
            return type(model)(config)
    except Exception as error:  # a user's class
        logger.warning(
            "dtype: it is not known which tensors %s keeps in another dtype (%s)", type(model).__name__, error
        )
        return None


def set_dtype(config: Any, dtype: torch.dtype) -> None:
    """Set the dtype in a Hugging Face config and its sub-configs."""
    for each in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        if hasattr(each, "dtype"):
            each.dtype = dtype


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
