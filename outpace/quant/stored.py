"""Weights that a checkpoint stores quantized: the schemes that hold them unchanged, alone or fused with others."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from outpace.kernels.packed import Packed, unpack_nibbles
from outpace.quant.scheme import Activations, Scheme, Values

LEAST = 8  # columns of the smallest group: with fewer, scales take as much memory as a converted weight


@dataclass(frozen=True)
class StoredForms:
    """The tensors of a model that can run as its checkpoint stores them."""

    schemes: Mapping[str, Scheme] = field(default_factory=dict)
    """Name in the model -> scheme."""
    dtype: torch.dtype = torch.float32
    """dtype of the model."""


def scheme_of(packed: Packed, activations: Activations | None = None) -> Scheme | None:
    """The scheme of a stored weight, which may be on the meta device; None: no scheme holds it.

    One scale for the whole weight becomes one for each row: the numbers are the same, and all kernels support it.
    """
    rows, columns = packed.shape
    group = None if packed.group >= columns else packed.group
    if group is not None and group < LEAST:
        return None
    kinds: Mapping[str, Values] = {"int8": "int8", "int4": "int4", "fp8": "fp8"}
    symmetric, block = packed.zero is None, 1 if packed.block >= rows else packed.block
    taken = symmetric and kinds[packed.kind] == activations and (group is None or group % 32 == 0)
    rows_kind = activations if taken else None
    scales = packed.scale.dtype
    return Scheme(kinds[packed.kind], group, False, symmetric, rows_kind, scales, block_rows=block, stored=True)


def common(schemes: Sequence[Scheme], rows: Sequence[int], columns: int, *, ordered: bool) -> Scheme | None:
    """A scheme that holds several weights, stacked by rows, without changing any number; None: there is none.

    ordered: rows are reordered, so rows cannot share a scale.
    """
    first = schemes[0]
    whole = all(count % first.block_rows == 0 for count in rows[:-1]) and not ordered
    if len(set(schemes)) == 1 and (first.block_rows == 1 or whole):
        return first
    kinds = {scheme.values for scheme in schemes}
    if len({scheme.activations for scheme in schemes}) > 1 or ("fp8" in kinds and len(kinds) > 1):
        return None
    groups = [columns if scheme.group is None else scheme.group for scheme in schemes]
    group = math.gcd(*groups)
    if group < LEAST:
        return None
    scales = torch.float32 if len({scheme.kept for scheme in schemes}) > 1 else first.kept
    return replace(
        first,
        values=kinds.pop() if len(kinds) == 1 else "int8",
        group=None if group >= columns else group,
        symmetric=all(scheme.symmetric for scheme in schemes),
        scales=scales,
        block_rows=1,
    )


def fitted(packed: Packed, scheme: Scheme) -> dict[str, Tensor]:
    """A stored weight in a scheme that holds its numbers: suffix of the name -> tensor."""
    columns, values, zero = packed.shape[1], packed.values, packed.zero
    if scheme.values == "int8" and packed.kind == "int4":
        values = unpack_nibbles(values, columns).view(torch.int8)
        if zero is None:
            values = values - packed.default_zero
    elif zero is None and not scheme.symmetric:
        zero = torch.full_like(packed.scale, packed.default_zero)
    if zero is None and not scheme.symmetric:
        zero = torch.zeros_like(packed.scale)
    made = {"": values, "_scale": _spread(packed, packed.scale, scheme)}
    if zero is not None:
        made["_zero"] = _spread(packed, zero, scheme)
    return made


def _spread(packed: Packed, per_block: Tensor, scheme: Scheme) -> Tensor:
    """Scales or zeros for each block of the scheme, repeated where the stored blocks are larger."""
    rows, columns = packed.shape
    group = scheme.group or columns
    if scheme.block_rows == 1 and packed.block > 1:
        per_block = per_block.repeat_interleave(min(packed.block, max(1, rows)), dim=0)[:rows]
    if (own := min(packed.group, columns)) != group:
        per_block = per_block.repeat_interleave(own // group, dim=1)[:, : -(-columns // group)]
    return per_block.to(scheme.kept)
