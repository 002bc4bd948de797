"""Reads fp8 weights with scales for blocks, rows or the whole tensor: DeepSeek, `fp8` and `fbgemm_fp8` of transformers.

weight float8_e4m3fn [N, K] is multiplied by weight_scale_inv or weight_scale (despite the name):
[ceil(N / 128), ceil(K / 128)], [N, 1] or one number.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.kernels.packed import Packed
from outpace.loading.foreign.format import CHANNEL, FLOATS, TENSOR, ForeignWeight, PackedFormat, Parts, Span, scale_of
from outpace.quant.scheme import Activations

_SCALES = ("_scale_inv", "_scale")
_SCALE_DTYPES = (*FLOATS, torch.float8_e8m0fnu)


@dataclass(frozen=True)
class Fp8(PackedFormat):
    """Settings of `quant_method: fp8` and `fbgemm_fp8`."""

    blocks: tuple[int, int] | None
    """(rows, columns) that share a scale; None: a row or the whole tensor, by the shape of the scales."""

    activations: Activations | None = None

    label = "fp8"
    endings = ("", *_SCALES)
    makes = ""

    def shape(self, parts: Parts) -> tuple[int, int]:
        rows, columns = parts.take("", [(None, None)], torch.float8_e4m3fn).shape
        self._scale(parts, (rows, columns))
        return rows, columns

    def packed(self, parts: Parts) -> ForeignWeight:
        shape = self.shape(parts)
        scale, span = self._scale(parts, shape)
        block, group = span.of(parts, shape)
        scale = scale.float() if scale.dtype == torch.float8_e8m0fnu else scale
        return ForeignWeight(Packed(parts.tensors[""], scale, None, shape, group, block))

    def _scale(self, parts: Parts, shape: tuple[int, int]) -> tuple[Tensor, Span]:
        ending = next((ending for ending in _SCALES if ending in parts.tensors), _SCALES[0])
        span = self._span(parts.tensors.get(ending))
        return scale_of(parts, ending, span, shape, *_SCALE_DTYPES), span

    def _span(self, found: Tensor | None) -> Span:
        if self.blocks is not None:
            return Span(self.blocks[0], self.blocks[1], whole_groups=False)
        if found is None or found.numel() == 1:
            return TENSOR
        columns = found.dim() == 2 and found.shape[0] == 1  # experts that are stored as [K, N]
        return Span(None, 1) if columns else CHANNEL
