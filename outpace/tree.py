"""Nested inputs and outputs of models: find, replace and describe the tensors in them.

Known structures: tensors, dicts (also Hugging Face's ModelOutput and BatchEncoding), lists, tuples, named tuples,
dataclasses and Hugging Face caches. Everything else is a constant.
"""

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in the structure, in a fixed order."""
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for _, item in _children(value):
            yield from tensors(item)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The same structure with every tensor replaced by `function(tensor)`; the classes of its parts are kept."""
    if isinstance(value, torch.Tensor):
        return function(value)
    items = [(key, map_tensors(function, item)) for key, item in _children(value)]
    if type(value) is dict:
        return dict(items)
    if isinstance(value, tuple | list):
        contents = [item for _, item in items]
        return type(value)(*contents) if _is_namedtuple(value) else type(value)(contents)
    if not items:
        return value
    result = copy.copy(value)
    for key, item in items:
        if isinstance(value, MutableMapping):
            result[key] = item
        else:
            object.__setattr__(result, key, item)  # a frozen dataclass too
    return result


def moved(value: Any, device: torch.device) -> Any:
    """The structure with its tensors on `device`; unchanged if they are there: a cache stays the same object."""
    if all(tensor.device == device for tensor in tensors(value)):
        return value
    return map_tensors(lambda tensor: tensor.to(device), value)


def signature(value: Any) -> Hashable | None:
    """A key that is equal for structures with equal constants and tensor shapes and dtypes.

    None: the structure holds an object with state (a cache, an unknown object), so no two calls with it are the same.
    """
    try:
        return _signature(value)
    except _Stateful:
        return None


class _Stateful(Exception):
    pass


def _signature(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return torch.Tensor, tuple(value.shape), value.dtype
    if isinstance(value, _CONSTANTS):
        return type(value), value
    if isinstance(value, Mapping | list | tuple) or _is_dataclass(value):
        return type(value), tuple((key, _signature(item)) for key, item in _children(value))
    raise _Stateful


def _children(value: Any) -> list[tuple[Any, Any]]:
    """The parts of a structure, each with its key; none for a constant."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if _is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, Cache | CacheLayerMixin):
        return list(vars(value).items())
    return []


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_namedtuple(value: list[Any] | tuple[Any, ...]) -> bool:
    """Named tuples are made from separate arguments, tuples and lists from one."""
    return isinstance(value, tuple) and "_fields" in dir(type(value))
