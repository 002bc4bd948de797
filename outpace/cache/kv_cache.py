"""Keys and values of every layer, in pages of a fixed number of tokens."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from outpace.errors import ConfigError
from outpace.kernels.kv_quant import LIMITS

_CACHE_LINE = 64  # bytes, to which tensors are aligned
BLOCK_SIZE = 64  # tokens in a page: long enough for whole tiles of the attention kernels
DTYPES: Mapping[str, torch.dtype] = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}
"""Values of `kv_cache_dtype` that quantize."""
FP8_CAPABILITY = (8, 9)  # the first GPUs whose kernels can convert fp8


@dataclass(frozen=True)
class Pages:
    """The pages of all layers; page p of a sequence is page p in every layer."""

    keys: list[Tensor]
    """For each layer [num_blocks, block_size, kv_heads, key_dim]."""
    values: list[Tensor]
    """For each layer [num_blocks, block_size, kv_heads, value_dim]."""
    scales: list[Tensor] = field(default_factory=list)
    """Of quantized pages, for each layer float32 [num_blocks, 2, kv_heads, block_size]: keys', then values'."""

    away: frozenset[int] = frozenset()
    """Layers whose pages are in host memory, where kernels reach them over the link."""
    window: tuple[Tensor, ...] = ()
    """Memory of the device for the pages of one such layer."""

    def layer(self, place: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and scales of one layer."""
        return self.keys[place], self.values[place], self.scales[place] if self.scales else None

    def at_hand(self, place: int, queries: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """The same for a step with at most so many tokens of a sequence.

        Several queries would read a layer in host memory over the link several times: it is brought to the device
        first, and `put_back` takes what the step writes to where it belongs.
        """
        if place not in self.away or queries == 1:
            return self.layer(place)
        for near, far in zip(self.window, self._of(place), strict=True):
            _copy(near, far)
        return self.window[0], self.window[1], self.window[2] if self.scales else None

    def put_back(self, place: int, queries: int, slots: Tensor) -> None:
        """A step with these slots has run through a layer that was `at_hand`; negative ones are padding."""
        if place not in self.away or queries == 1:
            return
        rows = slots.clamp(min=0)  # padding takes along what is in slot 0 anyway
        blocks, offsets = rows // self.block_size, rows % self.block_size
        for kind, (near, far) in enumerate(zip(self.window, self._of(place), strict=True)):
            if kind < 2:
                far[blocks, offsets] = near[blocks, offsets]
            else:
                far[blocks, :, :, offsets] = near[blocks, :, :, offsets]

    def _of(self, place: int) -> tuple[Tensor, ...]:
        return tuple(each for each in self.layer(place) if each is not None)

    def tensors(self) -> Iterator[Tensor]:
        """Everything that belongs to a page, as tensors [num_blocks, ...]."""
        yield from (*self.keys, *self.values, *self.scales)

    @property
    def num_blocks(self) -> int:
        """Pages there are."""
        return self.keys[0].shape[0]

    @property
    def block_size(self) -> int:
        """Tokens in one page."""
        return self.keys[0].shape[1]


def _copy(near: Tensor, far: Tensor) -> None:
    """By a kernel: torch would tell the GPU's copy engine that both are memory of the device."""
    word = torch.int64 if near.shape[-1] * near.element_size() % torch.int64.itemsize == 0 else torch.uint8
    torch.bitwise_or(far.view(word), 0, out=near.view(word))


Make = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]
"""Makes a tensor of zeros for a device."""


def allocate(
    heads: Sequence[tuple[int, int, int]],
    num_blocks: int,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int = BLOCK_SIZE,
    *,
    elsewhere: Mapping[int, Make] | None = None,
) -> Pages:
    """Pages for layers with these (kv heads, size of a key, size of a value); int8 and fp8 ones with scales.

    elsewhere: layers whose pages are not in the device's memory, and what makes those.
    """
    makes = [(elsewhere or {}).get(layer, _zeros) for layer in range(len(heads))]
    keys, values, scales = [], [], []
    for make, (count, key, value) in zip(makes, heads, strict=True):
        keys.append(make((num_blocks, block_size, count, key), dtype, device))
        values.append(make((num_blocks, block_size, count, value), dtype, device))
        if dtype in LIMITS:
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
            f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}; give int8, or leave it out"
        )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU the system makes them when they are first written, so that a large cache costs nothing at start.

    torch.zeros writes them all at once, which took 1.4 s for 4 GiB; numpy asks the system for empty memory.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + _CACHE_LINE, dtype=np.uint8)
    begin = -raw.ctypes.data % _CACHE_LINE
    return torch.from_numpy(raw[begin : begin + size]).view(dtype).view(shape)


def block_bytes(heads: Sequence[tuple[int, int, int]], dtype: torch.dtype, block_size: int = BLOCK_SIZE) -> int:
    """Memory of one page in all layers."""
    scales = 2 * torch.float32.itemsize if dtype in LIMITS else 0  # of a token and head
    return sum(count * ((key + value) * dtype.itemsize + scales) for count, key, value in heads) * block_size


def blocks_for(tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // block_size)
