"""Tensors without values that remember which stored bytes they are made of.

Hugging Face's own conversion operations run on them as on any tensors; what comes out says where each part is stored.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from outpace.loading import regions
from outpace.loading.regions import Inexpressible
from outpace.loading.weights import Source


class Traced(Tensor):
    """A tensor on the meta device with the source of its values; operations that regions cannot express raise."""

    source: Source

    @staticmethod
    def of(source: Source) -> "Traced":
        """The tensor that a source would give."""
        tensor = torch.empty(source.shape, dtype=source.dtype, device="meta").as_subclass(Traced)
        tensor.source = source
        return tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation on meta tensors, which checks it and gives the shapes, then do the same to the sources."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, list | tuple) else (result,)
        if not any(isinstance(value, Tensor) for value in results):
            return result  # a question about the shape or the dtype
        operation = _OPERATIONS.get(func.__name__)
        if operation is None:
            raise Inexpressible(func.__name__)
        traced = tuple(map(Traced.of, operation(results, *args, **(kwargs or {}))))
        return traced if isinstance(result, list | tuple) else traced[0]


def _same(_: Sequence[Tensor], tensor: Traced) -> list[Source]:
    return [tensor.source]


def _cat(_: Sequence[Tensor], tensors: Sequence[Traced], dim: int = 0) -> list[Source]:
    return [regions.join([tensor.source for tensor in tensors], dim)]


def _stack(_: Sequence[Tensor], tensors: Sequence[Traced], dim: int = 0) -> list[Source]:
    return [regions.stack([tensor.source for tensor in tensors], dim)]


def _transpose(_: Sequence[Tensor], tensor: Traced, dim0: int, dim1: int) -> list[Source]:
    return [regions.transpose(tensor.source, dim0, dim1)]


def _split(results: Sequence[Tensor], tensor: Traced, _: int | Sequence[int], dim: int = 0) -> list[Source]:
    parts, start = [], 0
    for result in results:
        parts.append(regions.cut(tensor.source, dim, start, start + result.shape[dim]))
        start += result.shape[dim]
    return parts


_OPERATIONS: Mapping[str, Callable[..., list[Source]]] = {
    "cat": _cat,
    "stack": _stack,
    "transpose": _transpose,
    "chunk": _split,
    "split": _split,
    "contiguous": _same,
    "detach": _same,
}
