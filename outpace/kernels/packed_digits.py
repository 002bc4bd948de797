"""Products of 16- or 32-bit rows with int8 weights on a CPU, by integer products that are exact.

A row becomes a unit times integers of 24 bits, and each integer becomes digits of int8: x = unit * (d0 + 256 d1 +
65536 d2). The digits are separate rows in one product of int8 by int8, which a CPU computes four times as fast as one
in fp32, from weights of a quarter of the bytes. The error is 2**-24 of the largest number of the row, that of fp32.
"""

import torch
from torch import Tensor

from outpace.kernels.packed import Packed

MIDDLE = {2: 0x8080, 3: 0x808080}  # added to an integer, it gives bytes 0..255; flipped back, digits of -128..127
LARGEST = {2: 0x7F70, 3: 0x7F7F70}  # the integer of the largest number of a row, with room for rounding
SMALLEST = 2.0**-126  # the smallest unit: its reciprocal is finite
MOST_COLUMNS = 1 << 17  # up to here the sums stay below 2**31


def takes_digits(x: Tensor, weight: Packed) -> bool:
    """Whether `digits_linear` computes this product: int8 weights with one scale for a row, or for all of them."""
    rows, depth = weight.shape
    whole = weight.group >= depth and (weight.block == 1 or weight.block >= rows)
    return whole and weight.values.dtype == torch.int8 and not x.is_cuda and x.numel() > 0 and depth <= MOST_COLUMNS


def digits_linear(x: Tensor, weight: Packed) -> Tensor:
    """x @ weight.T in fp32, by three digits of fp32 and by two of 16 bits. x: [M, K] → [M, N]."""
    count = 3 if x.dtype.itemsize > 2 else 2
    x = x.float()
    size = x.abs()
    unit: Tensor | float
    if len(x) == 1:  # a Python float saves several calls
        unit = size.max().item() / LARGEST[count]
        unit = SMALLEST if unit < SMALLEST else unit  # max() would drop NaN
    else:
        unit = (size.amax(dim=1, keepdim=True) / LARGEST[count]).clamp_(min=SMALLEST)
    sums = torch._int_mm(_digits(x / unit, count), weight.values.t()).float().view(count, len(x), -1)
    y = sums[-1]
    for more in range(count - 2, -1, -1):
        y = torch.add(sums[more], y, alpha=256)
    y.mul_(unit)
    if weight.zero is not None:
        y.addcmul_(x.sum(dim=1, keepdim=True), weight.zero.float().t(), value=-1)
    return y.mul_(weight.scale.t())


def _digits(numbers: Tensor, count: int) -> Tensor:
    """The nearest integers of numbers [M, K], which are overwritten, as int8 [count * M, K]: all first digits first."""
    middle = MIDDLE[count]
    whole = numbers.round_().to(torch.int32).add_(middle).bitwise_xor_(middle)
    return whole.view(torch.int8).view(*numbers.shape, 4)[..., :count].permute(2, 0, 1).reshape(-1, numbers.shape[1])
