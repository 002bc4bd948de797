"""GPTQ: columns are rounded one after the other, and those that are left make up for what each rounding changed.

What counts is the change of the outputs for calibration inputs X: the error of a weight is tr(E H E^T) with H = X^T X.
Scales are chosen before the first column is rounded. So the order of columns is free, the heaviest inputs come first,
and groups stay groups of neighbouring columns.
"""

import torch
from torch import Tensor

from outpace.errors import ModelError
from outpace.kernels.packed import pack_nibbles
from outpace.quant.rounding import nearest, scales_of, value_of
from outpace.quant.scheme import Scheme

DAMPING = 0.2  # of the mean of the diagonal, added to it: much, since calibration texts are short
SHARES = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # of the range of a group of 4-bit values: clipping makes steps finer
BLOCK = 128  # columns whose corrections are applied to all later columns together


class Inputs:
    """What is remembered of the inputs [rows, K] of a linear: X^T X, and what follows from it."""

    def __init__(self, x: Tensor, damping: float = DAMPING) -> None:
        rows = x.reshape(-1, x.shape[-1]).float()
        self._products = rows.t() @ rows
        self._damping = damping
        self._made: tuple[Tensor, Tensor] | None = None

    @property
    def sizes(self) -> Tensor:
        """The squared norm of each column [K]."""
        return self._products.diagonal()

    @property
    def order(self) -> Tensor:
        """The columns, those with the largest inputs first."""
        return self._factors[0]

    @property
    def upper(self) -> Tensor:
        """The upper Cholesky factor of the inverse of X^T X, its columns in `order`."""
        return self._factors[1]

    @property
    def _factors(self) -> tuple[Tensor, Tensor]:
        if self._made is None:
            diagonal = self._products.diagonal()
            order = diagonal.argsort(descending=True, stable=True)
            self._made = order, _upper(self._products[order][:, order], self._damping)
        return self._made


def gptq(weight: Tensor, inputs: Inputs, scheme: Scheme) -> dict[str, Tensor]:
    """What a weight [N, K] becomes, as `rounding.quantized` returns it."""
    assert not scheme.per_tensor, "scales are those of rows or groups"
    scale, zero = _scales(weight.float(), inputs.sizes, scheme)
    order, upper = inputs.order, inputs.upper
    columns, group = weight.shape[1], scheme.group or weight.shape[1]
    left = weight.float()[:, order].t().contiguous()  # [K, N]: a column at a time
    scales, zeros = (None if each is None else each.t()[order // group] for each in (scale, zero))  # [K, N]
    assert scales is not None
    values = torch.empty_like(left, dtype=nearest(left[:1, :1], scales[:1, :1], None, scheme).dtype)
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        errors = torch.empty_like(left[start:stop])
        for place in range(start, stop):
            middle = None if zeros is None else zeros[place]
            values[place] = nearest(left[place], scales[place], middle, scheme)
            change = left[place] - value_of(values[place], scales[place], middle, scheme)
            errors[place - start] = change.div_(upper[place, place])
            left[place + 1 : stop].addr_(upper[place, place + 1 : stop], errors[place - start], alpha=-1)
        left[stop:].addmm_(upper[start:stop, stop:].t(), errors, alpha=-1)
    kept = torch.empty_like(values)
    kept[order] = values
    made = {"": kept.t().contiguous(), "_scale": scale.to(scheme.kept)}
    if scheme.values == "int4":
        made[""] = pack_nibbles(made[""])
    return made if zero is None else {**made, "_zero": zero.to(scheme.kept)}


def _scales(weight: Tensor, sizes: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor | None]:
    """Scales and zeros [N, groups]. Of 4 bits, those with the least squared error, weighted by the size of inputs."""
    scale, zero = scales_of(weight, scheme)
    if scheme.values != "int4":
        return scale, zero
    least = _error(weight, sizes, scale, zero, scheme)
    for share in SHARES:
        other, middle = scales_of(weight, scheme, share)
        error = _error(weight, sizes, other, middle, scheme)
        better = error < least
        least, scale = torch.where(better, error, least), torch.where(better, other, scale)
        zero = None if zero is None or middle is None else torch.where(better, middle, zero)
    return scale, zero


def _error(weight: Tensor, sizes: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme) -> Tensor:
    """Of each group [N, groups], of rounding to nearest."""
    group = torch.arange(weight.shape[1], device=weight.device) // (scheme.group or weight.shape[1])
    spread, middle = scale[:, group], None if zero is None else zero[:, group]
    change = value_of(nearest(weight, spread, middle, scheme), spread, middle, scheme).sub_(weight)
    return torch.zeros_like(scale).index_add_(1, group, change.square_().mul_(sizes))


def _upper(products: Tensor, damping: float) -> Tensor:
    """Of the inverse; products that have none are damped more, until they do. Columns without inputs change nothing."""
    diagonal = products.diagonal()
    diagonal[diagonal == 0] = 1.0
    mean = float(diagonal.mean())
    while True:
        damped = products.clone()
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            found, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return found
        if not damped.isfinite().all():
            raise ModelError("model: it computes NaN or infinity on the calibration text; check its weights")
        damping *= 10
