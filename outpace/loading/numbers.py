"""Computes a model's sizes and costs for the planner from its skeleton, without weights."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from outpace.cache.kv_cache import BLOCK_SIZE, block_bytes, page_dtype
from outpace.errors import NotSupported
from outpace.inject.linears import is_linear, is_transposed, role_of
from outpace.inject.policy import READERS
from outpace.loading.inspect import describe, text_config
from outpace.loading.offload import CONTEXT
from outpace.offload.numbers import Experts, Layer, Numbers
from outpace.offload.units import find_layers, unit_bytes
from outpace.quant.asked import NAMED
from outpace.quant.rules import Role, Rules

SCHEMES = ("int8", "int4", "fp8")
_SHORT: Mapping[torch.dtype, str] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def precisions(dtype: torch.dtype) -> tuple[str, ...]:
    """The precisions of a model: its dtype, and the schemes."""
    return (_SHORT[dtype], *SCHEMES)


def numbers_of(model: nn.Module, dtype: torch.dtype) -> Numbers:
    """Sizes and costs of a model that runs in `dtype`."""
    layers = [layer for _, layer in find_layers(model)]
    if not layers:
        raise NotSupported(f"model: {type(model).__name__} has no list of layers, so it cannot be streamed")
    config, names = text_config(model), precisions(dtype)
    inside = {id(weight) for layer in layers for weight in layer.parameters()}
    outside = {name: weight for name, weight in model.named_parameters() if id(weight) not in inside}
    embedding, head = _ends(model)
    tied = head is None or head is embedding
    output = embedding if head is None else head
    rest = sum(weight.numel() for weight in outside.values()) * dtype.itemsize
    heads = {name: _head_bytes(output, name, tied, dtype) for name in names}
    found = [_Weights(model, layer, dtype) for layer in layers]
    made = tuple(weights.layer(names, _attention(config, index, dtype)) for index, weights in enumerate(found))
    width = int(getattr(config, "hidden_size", 0) or 0)
    inner = int(getattr(config, "intermediate_size", 0) or 4 * width)
    vocabulary = 0 if output is None else output.shape[0]
    return Numbers(
        layers=made,
        rest={name: rest + (0 if tied else heads[name] - heads[names[0]]) for name in names},
        head=heads,
        head_flops=0 if output is None else 2 * output.numel(),
        workspace=CONTEXT,
        token_workspace=dtype.itemsize * (2 * inner + 6 * width),  # as loading.offload reserves
        hidden_bytes=2 * dtype.itemsize * width,
        choice_bytes=(dtype.itemsize + 16) * vocabulary,
        page=BLOCK_SIZE,
    )


class _Weights:
    """Sizes of the weights of one layer."""

    def __init__(self, model: nn.Module, layer: nn.Module, dtype: torch.dtype) -> None:
        info = describe(model)
        self._layer, self._dtype = layer, dtype
        self._total, self._per_token = info.num_experts, info.experts_per_token
        self._roles = dict(self._found())

    def _found(self) -> Iterator[tuple[str, tuple[Role, tuple[int, ...]]]]:
        """Name of a weight to which schemes apply -> (role, shape [.., N, K])."""
        for path, module in self._layer.named_modules():
            if is_linear(module):
                weight = module.get_parameter("weight")
                shape = tuple(reversed(weight.shape)) if is_transposed(module) else tuple(weight.shape)
                yield f"{path}.weight", (role_of(path), shape)
        for name, weight in self._layer.named_parameters():
            if self._stacked(weight):
                yield name, ("experts", tuple(weight.shape))

    def _stacked(self, weight: nn.Parameter) -> bool:
        return weight.dim() == 3 and 0 < self._total == len(weight)

    def _parts(self, name: str, weight: nn.Parameter, precision: str) -> list[int]:
        """Bytes of a weight and of its scales."""
        scheme = None
        if precision in SCHEMES and name in self._roles:
            role, shape = self._roles[name]
            scheme = Rules(NAMED[precision], fit=True).of(role, [name], shape)
        if scheme is None:
            return [weight.numel() * self._dtype.itemsize]
        return [math.prod(size) * kind.itemsize for size, kind in scheme.tensors(self._roles[name][1]).values()]

    def _unit(self, weights: Mapping[str, nn.Parameter], precision: str) -> int:
        return unit_bytes(size for path, each in weights.items() for size in self._parts(path, each, precision))

    def layer(self, names: Sequence[str], attention: tuple[int, int, int]) -> Layer:
        """The layer for the planner. attention: bytes of a key and a value, operations, and the window."""
        own = dict(self._layer.named_parameters())
        stacks = {path: weight for path, weight in own.items() if self._stacked(weight)}
        experts = None
        if stacks and self._per_token:
            one = {name: self._unit(stacks, name) // self._total for name in names}
            experts = Experts(self._total, self._per_token, one)
        stacked = sum(weight.numel() for weight in stacks.values())
        dense = sum(weight.numel() for weight in own.values() if weight.dim() > 1) - stacked
        used = stacked if experts is None else stacked * experts.per_token // experts.total
        kv_bytes, operations, window = attention
        return Layer(
            weights={name: self._unit(own, name) for name in names},
            flops=2 * (dense + used),
            kv_bytes=kv_bytes,
            attention_flops=operations,
            window=window,
            experts=experts,
        )


def _attention(config: Any, index: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """(bytes of a key and a value, operations for each token in the context, window) of one layer."""
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    if not heads:
        return 0, 0, 0
    if getattr(config, "qk_nope_head_dim", None):  # latent attention, stored in pages as ordinary keys and values
        key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    else:
        key = value = int(READERS["head_dim"](config, index))
    shape = (int(READERS["num_kv_heads"](config, index)), key, value)
    window = int(READERS["window"](config, index) or 0)
    return block_bytes([shape], page_dtype("auto", dtype), block_size=1), 2 * heads * (key + value), window


def _ends(model: Any) -> tuple[nn.Parameter | None, nn.Parameter | None]:
    """(weight of the embedding, weight of the head); None: the model has none."""
    found = [getattr(model, name, lambda: None)() for name in ("get_input_embeddings", "get_output_embeddings")]
    first, last = (getattr(module, "weight", None) for module in found)
    return first, last


def _head_bytes(weight: nn.Parameter | None, precision: str, tied: bool, dtype: torch.dtype) -> int:
    """Bytes of the head: int8 with any scheme, but not quantized if it is tied to the embedding."""
    if weight is None:
        return 0
    scheme = None if tied or precision not in SCHEMES else Rules(NAMED[precision], fit=True).of(
        "head", ["lm_head.weight"], tuple(weight.shape)
    )  # fmt: skip
    return weight.numel() * dtype.itemsize if scheme is None else scheme.nbytes(tuple(weight.shape))
