"""GPTQ: rounds the columns of a weight one after the other; the remaining columns compensate each rounding error.

It minimizes the change of the outputs for calibration inputs X: tr(E H E^T) for a weight error E, with H = X^T X.
Scales are chosen before any column is rounded, so columns can be rounded in any order (largest inputs first) while
groups remain neighbouring columns.
"""

import torch
from torch import Tensor

from outpace.errors import ModelError
from outpace.kernels.packed import pack_nibbles
from outpace.quant.rounding import nearest, scales_of, value_of
from outpace.quant.scheme import Scheme

DAMPING = 0.2  # fraction of the mean diagonal that is added to it; large, because calibration texts are short
SHARES = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Fractions of a 4-bit group's range that are tried: a smaller range has smaller steps, but clips."""
BLOCK = 128  # columns whose corrections are applied to all later columns at once


class Inputs:
    """X^T X of the inputs X [rows, K] of a linear, with its column order and factorization."""

    def __init__(self, x: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1]).float()
        self._products = rows.t() @ rows
        self._made: tuple[Tensor, Tensor] | None = None

    @property
    def sizes(self) -> Tensor:
        """The squared norm of each column [K]."""
        return self._products.diagonal()

    @property
    def order(self) -> Tensor:
        """The column numbers, largest inputs first."""
        return self._factors[0]

    @property
    def upper(self) -> Tensor:
        """The upper Cholesky factor of the inverse of X^T X, with columns in `order`."""
        return self._factors[1]

    @property
    def _factors(self) -> tuple[Tensor, Tensor]:
        if self._made is None:
            diagonal = self._products.diagonal()
            order = diagonal.argsort(descending=True, stable=True)
            self._made = order, _upper(self._products[order][:, order])
        return self._made


def gptq(weight: Tensor, inputs: Inputs, scheme: Scheme) -> dict[str, Tensor]:
    """Quantize a weight [N, K]; the result is that of `rounding.quantized`."""
    assert not scheme.per_tensor, "GPTQ supports scales for rows or groups only"
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
    """Scales and zeros [N, groups]; for 4 bits those with the least squared error, weighted by the inputs' size."""
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
    """The error of rounding to nearest, for each group [N, groups]."""
    group = torch.arange(weight.shape[1], device=weight.device) // (scheme.group or weight.shape[1])
    spread, middle = scale[:, group], None if zero is None else zero[:, group]
    change = value_of(nearest(weight, spread, middle, scheme), spread, middle, scheme).sub_(weight)
    return torch.zeros_like(scale).index_add_(1, group, change.square_().mul_(sizes))


def _upper(products: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse, with more damping until there is one. Columns without inputs are
    ignored."""
    diagonal = products.diagonal()
    diagonal[diagonal == 0] = 1.0
    mean, damping = float(diagonal.mean()), DAMPING
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
