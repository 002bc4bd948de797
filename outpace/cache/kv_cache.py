"""Keys and values of every layer, in pages of a fixed number of tokens: their tensors, dtypes and sizes."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from outpace.errors import ConfigError
from outpace.kernels.quantize import LARGEST
from outpace.quant.fast import FP8_CAPABILITY

_CACHE_LINE = 64  # bytes, to which tensors are aligned
BLOCK_SIZE = 64  # tokens per page: whole tiles of the attention kernels
DTYPES: Mapping[str, torch.dtype] = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}
"""Values of `kv_cache_dtype` that quantize the cache."""


@dataclass(frozen=True)
class Pages:
    """The pages of all layers; a block id names the same page in every layer."""

    keys: list[Tensor]
    """For each layer [num_blocks, block_size, kv_heads, key_dim]."""
    values: list[Tensor]
    """For each layer [num_blocks, block_size, kv_heads, value_dim]."""
    scales: list[Tensor] = field(default_factory=list)
    """Scales of quantized pages: keys', then values', for each layer [num_blocks, 2, kv_heads, block_size]."""

    away: frozenset[int] = frozenset()
    """Layers whose pages are in host memory; kernels read them over the link."""
    window: tuple[Tensor, ...] = ()
    """Device memory for the pages of one such layer."""

    def layer(self, place: int) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.keys[place], self.values[place], self.scales[place] if self.scales else None

    def at_hand(self, place: int, queries: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """The same, for a step with at most `queries` tokens of a sequence.

        Several queries would read a layer in host memory several times over the link, so it is copied to the device
        first; `put_back` copies what the step wrote back to host memory.
        """
        if place not in self.away or queries == 1:
            return self.layer(place)
        for near, far in zip(self.window, self._of(place), strict=True):
            _copy(near, far)
        return self.window[0], self.window[1], self.window[2] if self.scales else None

    def put_back(self, place: int, queries: int, slots: Tensor) -> None:
        """Copy what a step wrote into a layer that was `at_hand` back to host memory. Negative slots are padding."""
        if place not in self.away or queries == 1:
            return
        rows = slots.clamp(min=0)  # padding copies slot 0, unchanged
        blocks, offsets = rows // self.block_size, rows % self.block_size
        for kind, (near, far) in enumerate(zip(self.window, self._of(place), strict=True)):
            if kind < 2:
                far[blocks, offsets] = near[blocks, offsets]
            else:
                far[blocks, :, :, offsets] = near[blocks, :, :, offsets]

    def _of(self, place: int) -> tuple[Tensor, ...]:
        return tuple(each for each in self.layer(place) if each is not None)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of the pages, each [num_blocks, ...]."""
        yield from (*self.keys, *self.values, *self.scales)

    @property
    def block_size(self) -> int:
        """Tokens per page."""
        return self.keys[0].shape[1]


def _copy(near: Tensor, far: Tensor) -> None:
    """Copy by a kernel: torch's copy would assume that both are device memory."""
    word = torch.int64 if near.shape[-1] * near.element_size() % torch.int64.itemsize == 0 else torch.uint8
    torch.bitwise_or(far.view(word), 0, out=near.view(word))


Make = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]
"""Makes a tensor of zeros on a device."""


def allocate(
    heads: Sequence[tuple[int, int, int]],
    num_blocks: int,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int = BLOCK_SIZE,
    *,
    elsewhere: Mapping[int, Make] | None = None,
) -> Pages:
    """Pages for layers given as (kv heads, key size, value size); int8 and fp8 pages have scales.

    elsewhere: layers whose pages are not in device memory, and the function that allocates these.
    """
    makes = [(elsewhere or {}).get(layer, _zeros) for layer in range(len(heads))]
    keys, values, scales = [], [], []
    for make, (count, key, value) in zip(makes, heads, strict=True):
        keys.append(make((num_blocks, block_size, count, key), dtype, device))
        values.append(make((num_blocks, block_size, count, value), dtype, device))
        if dtype in LARGEST:
            scales.append(make((num_blocks, 2, count, block_size), torch.float32, device))
    away = frozenset(elsewhere or ())
    largest = max(away, key=lambda layer: keys[layer].nbytes + values[layer].nbytes, default=0)
    like = [kind[largest] for kind in (keys, values, scales) if away and kind]
    window = tuple(torch.empty(each.shape, dtype=each.dtype, device=device) for each in like)
    return Pages(keys, values, scales, away, window)


def page_dtype(asked: str, own: torch.dtype) -> torch.dtype:
    """The dtype of pages under a `kv_cache_dtype`, for a model with keys and values of dtype `own`."""
    return DTYPES.get(asked, own)


def check_page_dtype(asked: str, device: torch.device) -> None:
    """Refuse a `kv_cache_dtype` that the device cannot run."""
    if device.type != "cuda" or DTYPES.get(asked) != torch.float8_e4m3fn:
        return
    if (found := torch.cuda.get_device_capability(device)) < FP8_CAPABILITY:
        raise ConfigError(
            f"kv_cache_dtype: {asked} needs a GPU of compute capability 8.9 or higher, and "
            f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}; give int8, or remove it"
        )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU the system allocates them on first write, so that a large cache does not slow the start.

    torch.zeros writes them at once, which took 1.4 s for 4 GiB; numpy requests zeroed memory from the system.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + _CACHE_LINE, dtype=np.uint8)
    begin = -raw.ctypes.data % _CACHE_LINE
    return torch.from_numpy(raw[begin : begin + size]).view(dtype).view(shape)


def block_bytes(heads: Sequence[tuple[int, int, int]], dtype: torch.dtype, block_size: int = BLOCK_SIZE) -> int:
    """Bytes of one page in all layers."""
    scales = 2 * torch.float32.itemsize if dtype in LARGEST else 0  # of a token and head
    return sum(count * ((key + value) * dtype.itemsize + scales) for count, key, value in heads) * block_size


def blocks_for(tokens: int) -> int:
    """Number of pages for `tokens` tokens."""
    return -(-tokens // BLOCK_SIZE)
