"""Inputs that lie among NaNs, and outputs that know what was written: inside all of it, outside nothing."""

from dataclasses import dataclass

import torch

GUARD = -77.0  # exact in every dtype; a number, so that a NaN written out of bounds shows too


def _inside(base: torch.Tensor, shape: tuple[int, ...], gap: int) -> torch.Tensor:
    """The view of this shape in the middle of base."""
    for dim, size in enumerate(shape):
        base = base.narrow(dim, gap // 2 if dim == len(shape) - 1 else 1, size)
    return base


def _around(shape: tuple[int, ...], gap: int, fill: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((*(n + 2 for n in shape[:-1]), shape[-1] + gap), fill, dtype=dtype, device=device)


def poisoned(values: torch.Tensor, gap: int) -> torch.Tensor:
    """A copy of values whose rows lie `gap` numbers apart, with NaN before, between and behind them."""
    base = _around(tuple(values.shape), gap, float("nan"), values.dtype, values.device)
    return _inside(base, tuple(values.shape), gap).copy_(values)


def random_rows(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, gap: int = 5) -> torch.Tensor:
    """Random numbers whose rows lie `gap` apart among NaNs."""
    return poisoned(torch.randn(shape, device=device).to(dtype), gap)


@dataclass(frozen=True)
class Output:
    """A view to be written, NaN until then, and the guard numbers around it."""

    base: torch.Tensor
    view: torch.Tensor

    @classmethod
    def like(cls, values: torch.Tensor, gap: int = 5) -> "Output":
        """An unwritten output of the shape and dtype of values."""
        shape = tuple(values.shape)
        base = _around(shape, gap, GUARD, values.dtype, values.device)
        return cls(base, _inside(base, shape, gap).fill_(float("nan")))

    def checked(self) -> torch.Tensor:
        """What was written, after a look at what must not have been."""
        written = self.view.clone()
        assert not written.isnan().any(), "an element was not written"
        self.view.fill_(GUARD)
        assert (self.base == GUARD).all(), "written out of bounds"
        self.view.copy_(written)
        return written
