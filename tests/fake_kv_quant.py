"""What a quantized cache gives back, computed apart from the package: by numpy, from lists of all numbers there are."""

import numpy as np
import torch
from torch import Tensor

KINDS = ("int8", "fp8")
DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def _e4m3() -> np.ndarray:
    """Every number of e4m3 that is not negative, in ascending order: 4 bits of exponent, 3 of mantissa."""
    codes = range(0x7F)  # the last one is NaN
    small = [code * 2.0**-9 for code in codes if code < 8]
    return np.array(small + [(1 + code % 8 / 8) * 2.0 ** (code // 8 - 7) for code in codes if code >= 8])


def _nearest(x: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The nearest of these numbers to each x >= 0; of two as near the one in an even place."""
    above = np.clip(np.searchsorted(numbers, x), 1, len(numbers) - 1)
    low, high = numbers[above - 1], numbers[above]
    even = np.where(above % 2 == 0, high, low)
    return np.where(x - low < high - x, low, np.where(x - low > high - x, high, even))


def scale_of(x: Tensor, kind: str) -> Tensor:
    """The scale of each vector [..., D] in single precision: [...]."""
    largest = np.abs(x.detach().cpu().float().numpy()).max(-1)
    scale = (largest / np.float32(127 if kind == "int8" else 448)).astype(np.float32)
    return torch.from_numpy(np.where(scale < np.finfo(np.float32).tiny, np.float32(1), scale))


def stored(x: Tensor, kind: str) -> Tensor:
    """The numbers that stand for vectors [..., D], in double precision."""
    numbers = np.arange(128.0) if kind == "int8" else _e4m3()
    found = x.detach().cpu().float().numpy() / scale_of(x, kind).numpy()[..., None]  # rounded to single precision
    return torch.from_numpy(np.sign(found) * _nearest(np.abs(found).astype(np.float64), numbers))


def fake_quantized(x: Tensor, kind: str) -> Tensor:
    """Vectors [..., D] as they come out of the cache, in their own dtype."""
    found = stored(x, kind) * scale_of(x, kind).double()[..., None]
    return found.to(x.device, x.dtype)
