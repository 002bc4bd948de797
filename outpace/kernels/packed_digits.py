"""Products of 16- or 32-bit rows with int8 weights on a CPU, by integer products that are exact.

A row is written as digits: x = unit * (d0 + d1 / 254 + d2 / 254²), each an int8 of at most 127. The digits are rows of
their own in one product of int8 by int8, which a CPU computes four times as fast as one in fp32, and from weights of a
quarter of the bytes. Three digits leave an error of 2**-24 of the largest number of the row, as fp32 itself does.
"""

import torch
from torch import Tensor

from outpace.kernels.packed import Packed
from outpace.kernels.quantize import LARGEST

STEP = 2 * LARGEST[torch.int8]  # what is left of a digit is at most a half
SMALLEST = 2.0**-126  # of a unit: its reciprocal is a number
MOST_COLUMNS = 1 << 17  # of which the sums stay below 2**31


def takes_digits(x: Tensor, weight: Packed) -> bool:
    """Whether `digits_linear` computes this product: int8 weights with one scale for a row, or for all of them."""
    rows, depth = weight.shape
    whole = weight.group >= depth and (weight.block == 1 or weight.block >= rows)
    return whole and weight.values.dtype == torch.int8 and not x.is_cuda and x.numel() > 0 and depth <= MOST_COLUMNS


def digits_linear(x: Tensor, weight: Packed, count: int | None = None) -> Tensor:
    """x @ weight.T in fp32. x: [M, K] → [M, N]. count: digits of a row; None: 3 for fp32, 2 for 16 bits."""
    count = count or (3 if x.dtype.itemsize > 2 else 2)
    x = x.float()
    unit = (x.abs().amax(dim=1, keepdim=True) / LARGEST[torch.int8]).clamp_(min=SMALLEST)
    sums = torch._int_mm(_digits(x * unit.reciprocal(), count), weight.values.t()).view(count, len(x), -1).float()
    y = sums[-1]
    for more in range(count - 2, -1, -1):
        y = y.div_(STEP).add_(sums[more])
    y.mul_(unit)
    if weight.zero is not None:
        y.addcmul_(x.sum(dim=1, keepdim=True), weight.zero.float().t(), value=-1)
    return y.mul_(weight.scale.t())


def _digits(rest: Tensor, count: int) -> Tensor:
    """Rows of at most 127, overwritten, as int8 [count * M, K]: all first digits, then all second ones, ..."""
    found = torch.empty((count, *rest.shape), dtype=torch.int8)
    for place in range(count):
        digit = rest.round()
        found[place].copy_(digit)
        rest = rest.sub_(digit).mul_(STEP)
    return found.view(-1, rest.shape[1])
