"""Paged attention for Hugging Face's own layers: the function that they call, and how they are switched to it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from outpace.cache.kv_cache import Pages
from outpace.errors import NotSupported
from outpace.inject.paged import Batch
from outpace.kernels.attention_torch import causal_attention
from outpace.kernels.decode_plan import DecodePlans
from outpace.kernels.dispatch import Kernels

PAGED = "outpace"
"""Name of our attention in a config. Hugging Face builds no mask for it, because no mask is registered."""
PROBE = "outpace_probe"
"""The same for the probe: its masks are `Mask` objects."""
KEYWORD = "outpace_attend"
"""Keyword argument by which a call of the model hands our attention object to the attention function."""

MaskFunction = Callable[[Any, Any, Any, Any], Any]
"""(batch, head, query position, key position) -> whether the query sees the key."""


@dataclass(frozen=True)
class Mask:
    """Passed instead of a mask tensor: the function that would fill it."""

    function: MaskFunction


@dataclass(frozen=True)
class AttentionLayer:
    """Shapes of the attention of one layer."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int
    """Keys a query sees, itself included; 0: all."""
    dtype: torch.dtype


def register() -> None:
    """Register our names with Hugging Face; safe to repeat. They change nothing until a config names them."""
    for name in (PAGED, PROBE):
        AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(PROBE, _mask)


@contextmanager
def switched(configs: Iterable[Any], name: str, entry: str = "_attn_implementation") -> Iterator[None]:
    """Inside, layers with these configs use the attention of this name; they read it at every call.

    entry: the config entry to set.
    """
    before = [(config, getattr(config, entry)) for config in configs]
    try:
        for config, _ in before:
            setattr(config, entry, name)
        yield
    finally:
        for config, own in before:
            setattr(config, entry, own)


class InterfaceAttention:
    """Attention of a batch over pages, for every layer of a forward."""

    def __init__(self, batch: Batch, pages: Pages, layers: Mapping[int, AttentionLayer], kernels: Kernels) -> None:
        self._batch = batch
        self._pages = pages
        self._layers = layers
        self._kernels = kernels
        self._plans = DecodePlans()

    def __call__(
        self,
        module: Any,
        query: Tensor,  # [1, Hq, T, D]
        key: Tensor,  # [1, Hkv, T, D]
        value: Tensor,  # [1, Hkv, T, Dv]
        mask: object,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """[1, T, Hq, Dv]; writes keys and values to the layer's pages. The window is the one that the probe found."""
        batch, layer = self._batch, self._layers[module.layer_idx]
        keys, values, scales = self._pages.layer(module.layer_idx)
        q, k, v = (_rows(part, layer.dtype) for part in (query, key, value))
        self._kernels.rotary(
            (q, k, v), None, None, None, batch.slots, keys, values,
            num_heads=q.shape[1], num_kv_heads=k.shape[1], head_dim=k.shape[2], rotary_dim=0, scales=scales,
        )  # fmt: skip
        scale = q.shape[2] ** -0.5 if scaling is None else scaling
        if batch.fresh and scales is None and not layer.window and softcap is None and s_aux is None:
            return causal_attention(q, k, v, scale)[None].to(value.dtype)
        attended: Tensor = self._kernels.attention(
            q.contiguous(), keys, values, batch.block_table, batch.seq_lens, batch.cu_q, batch.max_q,
            scale=scale, window=layer.window, softcap=softcap or 0.0, sinks=s_aux, scales=scales,
            max_len=batch.max_len, mixed=batch.mixed, plans=self._plans,
        )  # fmt: skip
        return attended[None].to(value.dtype)


def _rows(part: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, heads, T, D] as [T, heads, D]."""
    rows = part[0].transpose(0, 1).to(dtype)
    return rows if rows.stride(2) == 1 else rows.contiguous()


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **options: Any
) -> tuple[Tensor, None]:
    attend = options.pop(KEYWORD, None)
    if attend is None:
        raise NotSupported(f"{type(module).__name__} does not receive the keyword arguments of the model's call")
    return attend(module, query, key, value, attention_mask, **options), None


def _mask(*_: Any, mask_function: MaskFunction, **__: Any) -> Mask:
    return Mask(mask_function)
