"""A linear layer with a quantized weight: x stays in 16 or 32 bits, and the weight is dequantized on the way."""

from typing import TypedDict, Unpack

from torch import Tensor

from outpace.kernels.gemv import gemv_ref
from outpace.kernels.packed import Packed


class Options(TypedDict, total=False):
    """The keywords of every implementation, as gemv_ref has them."""

    bias: Tensor | None
    norm_weight: Tensor | None
    eps: float
    weight_offset: float
    round_before_weight: bool
    activation: str | None
    add: Tensor | None
    out: Tensor | None


def packed_linear_ref(x: Tensor, weight: Packed, **options: Unpack[Options]) -> Tensor:
    """gemv_ref with a quantized weight, dequantized to the dtype of x. x: [M, K], weight: [N, K] → [M, N]."""
    return gemv_ref(x, weight.dequantized(x.dtype), **options)
