"""Fused layers with the forward of the Hugging Face layers that they replace: arguments, masks, cache, result."""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outpace.errors import ModelError, NotSupported
from outpace.inject.modules import FusedLayer
from outpace.kernels.rotary import split_qkv

_CACHES = ("past_key_values", "layer_past", "past_key_value")


def hugging_face_layer(layer: type[nn.Module]) -> type[FusedLayer]:
    """Fused layers as a subclass of `layer`: Hugging Face finds layers to record outputs by their class."""
    names = [name for name in inspect.signature(layer.forward).parameters if name not in ("self", "kwargs")]

    def forward(self: FusedLayer, *args: Any, **kwargs: Any) -> Any:
        return _forward(self, {**dict(zip(names, args, strict=False)), **kwargs})

    return type(f"Fused{layer.__name__}", (FusedLayer, layer), {"forward": forward})


def _forward(layer: FusedLayer, call: dict[str, Any]) -> Any:
    if call.get("encoder_hidden_states") is not None:
        raise NotSupported("injection: a fused layer has no cross-attention, and encoder_hidden_states were given")
    if call.get("output_attentions"):
        raise NotSupported(
            "output_attentions: a fused layer keeps no attention weights; run the model without injection"
        )
    hidden: Tensor = call["hidden_states"]  # [B, L, H]
    attend = _DenseAttention(call, *hidden.shape[:2])
    result = layer.run(hidden.reshape(-1, hidden.shape[-1]), attend).view(hidden.shape)
    return (result, None) if layer.policy.returns_tuple else result


class _DenseAttention:
    """Attention of a padded batch [B, L], with Hugging Face's mask, rotary embeddings and cache."""

    slots = None

    def __init__(self, call: dict[str, Any], batch: int, length: int) -> None:
        self._call = call
        self._mask: Tensor | None = call.get("attention_mask")
        self._alibi: Tensor | None = call.get("alibi")
        self._rotary = call.get("position_embeddings")
        self._position_ids: Tensor | None = call.get("position_ids")
        self._cache = next((call[name] for name in _CACHES if call.get(name) is not None), None)
        self._shape = batch, length

    def __call__(self, layer: FusedLayer, qkv: Tensor) -> Tensor:
        q, k, v = (part.view(*self._shape, *part.shape[1:]).transpose(1, 2) for part in self._rotated(layer, qkv))
        if self._cache is not None:
            k, v = self._cache.update(k, v, layer.index)
        attended = _attend(layer, q, k, v, self._seen(layer, q, k), self._biases(layer, k))  # [B, Hq, L, D]
        return attended.transpose(1, 2).reshape(qkv.shape[0], -1)

    def _seen(self, layer: FusedLayer, q: Tensor, k: Tensor) -> Tensor | None:
        """Hugging Face's mask, plus the causality and the window that it leaves to the layer."""
        mask = ~self._mask if self._mask is not None and layer.policy.mask_forbids else self._mask
        if mask is not None and mask.dim() == 4 and mask.shape[1] > 1:  # it contains a bias for each head
            mask = _of_heads(layer, mask)
        causal = self._call.get("is_causal")
        if mask is None and causal is not None and causal != layer.policy.causal:  # set in this call or in the config
            full = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
            mask = full.tril() if causal and q.shape[2] > 1 else full
        return _within_window(layer, mask, q, k) if layer.policy.own_window else mask

    def _biases(self, layer: FusedLayer, k: Tensor) -> Tensor | None:
        """ALiBi's biases [B * Hq or Hq, 1, S]; None: no ALiBi, or the mask contains it."""
        if not layer.settings.alibi or layer.policy.alibi_in_mask:
            return None
        biases = self._alibi if self._alibi is not None else self._call["position_bias"][..., -k.shape[2] :]
        return _of_heads(layer, biases.reshape(-1, layer.whole.num_heads, *biases.shape[1:])).flatten(0, 1)

    def _rotated(self, layer: FusedLayer, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [T, heads, D], normed and rotated."""
        settings = layer.settings
        q, k, v = split_qkv(qkv, settings.num_heads, settings.num_kv_heads, settings.head_dim)
        if layer.q_norm is not None and layer.policy.qk_norm_over == "head":
            q = layer.q_norm(q)
        if layer.k_norm is not None and layer.policy.qk_norm_over == "head":
            k = layer.k_norm(k)
        if not settings.rotary:
            return q, k, v
        cos, sin, positions = self._table(layer)
        return layer.kernels.rotary(
            (q, k, v), cos, sin, positions, None, None, None,
            num_heads=settings.num_heads, num_kv_heads=settings.num_kv_heads, head_dim=settings.head_dim,
            rotary_dim=2 * cos.shape[1], interleaved=layer.policy.interleaved,
        )  # fmt: skip

    def _table(self, layer: FusedLayer) -> tuple[Tensor, Tensor, Tensor]:
        """cos and sin [rows, R / 2], and the row of each token."""
        batch, length = self._shape
        if layer.cos is not None and layer.sin is not None:
            assert self._position_ids is not None, "a layer with its own table gets position_ids"
            return layer.cos, layer.sin, self._position_ids.expand(batch, length).reshape(-1).contiguous()
        if self._rotary is None:
            raise ModelError("injection: the model calls its layer without position_embeddings")
        cos, sin = (self._rows(layer.policy.once(table)) for table in self._rotary)
        return cos, sin, torch.arange(batch * length, device=cos.device)

    def _rows(self, table: Tensor) -> Tensor:
        """cos or sin [1 or B, L, R / 2] as [T, R / 2]."""
        half = table.shape[-1]
        return table.expand(*self._shape, half).reshape(-1, half).float().contiguous()


def _attend(layer: FusedLayer, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, alibi: Tensor | None) -> Tensor:
    settings = layer.settings
    if settings.softcap or layer.sinks is not None:
        return _attend_in_full(layer, q, k, v, mask)
    if alibi is not None:
        mask = _with_alibi(alibi, mask, q, k)
    causal = mask is None and layer.policy.causal and q.shape[2] > 1
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    groups = settings.num_heads != settings.num_kv_heads
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=_cut(mask, k), is_causal=causal, scale=settings.scale, enable_gqa=groups
    )


def _attend_in_full(layer: FusedLayer, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention without torch's fused kernels, which have no softcap and no sinks."""
    settings = layer.settings
    repeats = settings.num_heads // settings.num_kv_heads
    k, v = (part.repeat_interleave(repeats, dim=1) for part in (k, v))
    scores = (q @ k.transpose(2, 3)).float() * settings.scale
    if settings.softcap:
        scores = settings.softcap * torch.tanh(scores / settings.softcap)
    mask = _cut(mask, k)
    if mask is None and layer.policy.causal and q.shape[2] > 1:  # later keys are empty slots of a static cache
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    if layer.sinks is not None:
        sinks = layer.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return (torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1].to(v.dtype)) @ v
    return scores.softmax(-1).to(v.dtype) @ v


def _of_heads(layer: FusedLayer, of_all: Tensor) -> Tensor:
    return of_all.narrow(1, layer.first_head, layer.settings.num_heads)


def _cut(mask: Tensor | None, k: Tensor) -> Tensor | None:
    """The mask without columns beyond the keys."""
    return None if mask is None else mask[..., : k.shape[2]]


def _within_window(layer: FusedLayer, mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask, also hiding keys beyond the layer's window."""
    window, before = layer.settings.window, k.shape[2] - q.shape[2]
    if not window:
        return mask
    sees = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(before).triu(before - window + 1)
    if mask is None:
        return sees
    return mask & sees if mask.dtype == torch.bool else mask.masked_fill(~sees, torch.finfo(mask.dtype).min)


def _with_alibi(alibi: Tensor, mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor:
    """Biases of ALiBi [B * Hq or Hq, 1, S] and the mask in one."""
    bias = alibi.reshape(-1, q.shape[1], 1, alibi.shape[-1])[..., : k.shape[2]].to(q.dtype)
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    mask = _cut(mask, k)
    assert mask is not None, "made above"
    if mask.dtype == torch.bool:
        return bias.expand(q.shape[0], -1, q.shape[2], -1).masked_fill(~mask, torch.finfo(q.dtype).min)
    return bias + mask.to(q.dtype)
