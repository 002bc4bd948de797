"""Rounds weights to the nearest values of a scheme, a few rows at a time, so that little extra memory is needed."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.kernels.packed import Packed, pack_nibbles
from outpace.quant.scheme import Scheme

ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 22}  # weights that are rounded at once: more on a GPU, for fewer launches
SIDE = {"int8": 127.0, "int4": 7.5, "fp8": 448.0}  # 7.5: the largest values are half a step from both ends of -8..7
LOWEST = {"int8": -128.0, "int4": 0.0}


def quantized(weight: Tensor, scheme: Scheme) -> dict[str, Tensor]:
    """Quantize a weight [..., N, K]; the result maps suffixes of its name to tensors (see `Scheme.tensors`)."""
    shape = tuple(weight.shape)
    sizes = scheme.tensors(shape).items()
    made = {end: torch.empty(size, dtype=dtype, device=weight.device) for end, (size, dtype) in sizes}
    rows = weight.reshape(-1, shape[-1])
    flat = {end: tensor.view(-1, tensor.shape[-1]) for end, tensor in made.items()}
    block = scheme.block(shape[-2])
    if scheme.per_tensor:
        _put_per_tensor(rows, flat, scheme, shape[-2])
    step = _rows_at_once(rows)
    for start in range(0, len(rows), step):
        chosen = slice(start, min(start + step, len(rows)))
        groups = _groups(rows[chosen].float(), scheme)
        if scheme.per_tensor:
            at = torch.arange(start, chosen.stop, device=weight.device) // block
            scale, zero = flat["_scale"][at].float(), flat["_zero"][at].float() if "_zero" in flat else None
        else:
            scale, zero = _scales(groups.aminmax(dim=2), scheme)
            _put(flat, chosen, {"_scale": scale, "_zero": zero})
        values = nearest(groups, scale[:, :, None], None if zero is None else zero[:, :, None], scheme)
        _put(flat, chosen, {"": values.flatten(1)[:, : shape[-1]]}, scheme)
    return made


def restored(weight: Tensor, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    """Quantize a weight [..., N, K] and dequantize it again, part by part."""
    assert not scheme.per_tensor, "parts are quantized independently"
    rows = weight.reshape(-1, weight.shape[-1])
    made = torch.empty(rows.shape, dtype=dtype, device=weight.device)
    for part, into in zip(_in_parts(rows), _in_parts(made), strict=True):
        into.copy_(as_packed(quantized(part, scheme), scheme, (len(part), part.shape[1])).dequantized(dtype))
    return made.view(weight.shape)


def _in_parts(rows: Tensor) -> tuple[Tensor, ...]:
    return rows.split(_rows_at_once(rows))


def _rows_at_once(rows: Tensor) -> int:
    return max(1, ELEMENTS[rows.device.type] // max(1, rows.shape[1]))


def scales_of(weight: Tensor, scheme: Scheme, share: float = 1.0) -> tuple[Tensor, Tensor | None]:
    """Scales and zeros [N, groups] of a weight [N, K], in float32 but with values that `scheme.kept` can hold.

    share: fraction of each group's range that is represented; values beyond it are clipped.
    """
    low, high = _groups(weight.float(), scheme).aminmax(dim=2)
    return _scales((low * share, high * share), scheme)


def as_packed(tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> Packed:
    """The tensors of `quantized` as a `Packed` for the kernels; shape: (N, K)."""
    rows, columns = shape
    group, block = scheme.group or columns, scheme.block(rows)
    return Packed(tensors[""], tensors["_scale"], tensors.get("_zero"), shape, group=group, block=block)


def _put_per_tensor(rows: Tensor, flat: dict[str, Tensor], scheme: Scheme, count: int) -> None:
    """Compute scales and zeros of weights with `count` rows: one for each weight, or for each tensor that it is made
    of."""
    block, start = scheme.block(count), 0
    while start < len(rows):
        for size in scheme.sources or (count,):
            low, high = rows[start : start + size].aminmax()
            scale, zero = _scales((low.float().view(1, 1), high.float().view(1, 1)), scheme)
            _put(flat, slice(start // block, (start + size) // block), {"_scale": scale, "_zero": zero})
            start += size


def _groups(rows: Tensor, scheme: Scheme) -> Tensor:
    """Rows [n, K] as [n, groups, columns of a group], padded with zeros."""
    group = scheme.group or rows.shape[1]
    return F.pad(rows, (0, -rows.shape[1] % group)).unflatten(1, (-1, group))


def _scales(ends: tuple[Tensor, Tensor], scheme: Scheme) -> tuple[Tensor, Tensor | None]:
    """Scale and zero of groups with these smallest and largest values, representable in `scheme.kept`."""
    low, high = ends[0].clamp(max=0.0), ends[1].clamp(min=0.0)
    if scheme.symmetric:
        return _kept(_divided(torch.maximum(-low, high), SIDE[scheme.values]), scheme), None
    steps = 255.0 if scheme.values == "int8" else 15.0
    scale = _kept(_divided(high - low, steps), scheme)
    return scale, LOWEST[scheme.values] + (-low / scale).round().clamp(max=steps)


def _divided(x: Tensor, by: float) -> Tensor:
    """x / by with the same result on every device: by a Python number, a GPU multiplies by the rounded inverse."""
    return x / torch.full((), by, device=x.device)


def _kept(scale: Tensor, scheme: Scheme) -> Tensor:
    """A scale rounded up to a value of `scheme.kept`, so that nothing is clipped; 1 for groups of zeros."""
    scale = torch.where(scale == 0, 1.0, scale)
    if scheme.kept == torch.float32:
        return scale
    largest = torch.finfo(scheme.kept).max
    near = scale.clamp(max=largest).to(scheme.kept)
    above = (near.view(torch.int16) + 1).view(scheme.kept)
    found = torch.where(near < scale, above, near).float().clamp(max=largest)
    return torch.where(scale.isinf(), scale, found)  # infinity stays, for the check that weights are finite


def nearest(x: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme) -> Tensor:
    """The nearest values of a scheme in the stored format, except that int4 values are not packed yet."""
    found = x / scale
    if scheme.values == "fp8":
        return found.clamp_(-SIDE["fp8"], SIDE["fp8"]).to(torch.float8_e4m3fn)
    middle = 8.0 if scheme.values == "int4" else 0.0
    found = found.round_().add_(middle if zero is None else zero)
    low, high = (0.0, 15.0) if scheme.values == "int4" else (-127.0 if zero is None else -128.0, 127.0)
    return found.clamp_(low, high).to(torch.uint8 if scheme.values == "int4" else torch.int8)


def value_of(values: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme) -> Tensor:
    """The weights that values of `nearest` represent, in float32."""
    middle = 8.0 if scheme.values == "int4" else 0.0
    return (values.float() - (middle if zero is None else zero)) * scale


def _put(flat: dict[str, Tensor], rows: slice, made: dict[str, Tensor | None], scheme: Scheme | None = None) -> None:
    for end, tensor in made.items():
        if tensor is not None:
            flat[end][rows] = pack_nibbles(tensor) if scheme is not None and scheme.values == "int4" else tensor
