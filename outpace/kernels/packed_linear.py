"""A linear layer with a quantized weight: x stays in 16 or 32 bits, and the weight is dequantized on the way."""

from torch import Tensor

from outpace.kernels.gemv import gemv_ref
from outpace.kernels.packed import Packed


def packed_linear_ref(
    x: Tensor,
    weight: Packed,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    weight_offset: float = 0.0,
    round_before_weight: bool = True,
    activation: str | None = None,
    add: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """gemv_ref with a quantized weight, dequantized to the dtype of x. x: [M, K], weight: [N, K] → [M, N]."""
    norm = {"norm_weight": norm_weight, "eps": eps, "weight_offset": weight_offset}
    options = {"bias": bias, "activation": activation, "add": add, "out": out, **norm}
    return gemv_ref(x, weight.dequantized(x.dtype), round_before_weight=round_before_weight, **options)
