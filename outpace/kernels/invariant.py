"""Activations on a CPU whose results do not depend on where a number is in its tensor.

Torch computes most of a tensor with vector instructions and the rest, at its end and at the ends of threads' shares,
element by element with another exp, erf or tanh. Here numbers come in whole vectors, in pieces for one thread.
"""

import torch
from torch import Tensor

from outpace.kernels.activation import bias_act_torch
from outpace.kernels.quantize import write_rows

VECTORS = 64  # numbers: a multiple of the vectors of every CPU
PIECE = 16384  # numbers: half of what torch begins to share among threads


def gated_act_invariant(x: Tensor, kind: str, *, out: Tensor | None = None, scales: Tensor | None = None) -> Tensor:
    """gated_act_torch, each row bit for bit as if it were alone. x: [T, 2I] → [T, I]."""
    gate, up = x.chunk(2, dim=1)
    return write_rows((_activate(gate, kind) * up.float()).to(x.dtype), out, scales)


def bias_act_invariant(
    x: Tensor, bias: Tensor | None, kind: str, *, out: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:
    """bias_act_torch, each row bit for bit as if it were alone. x: [T, I], bias: [I]."""
    y = _activate(x.float() if bias is None else x.float() + bias.float(), kind).to(x.dtype)
    return write_rows(y, out, scales)


def _activate(x: Tensor, kind: str) -> Tensor:
    """The activation of x in fp32."""
    size = x.numel()
    flat = torch.zeros(1, -(-size // VECTORS) * VECTORS, device=x.device)
    flat[0, :size] = x.reshape(-1)
    for piece in flat.split(PIECE, dim=1):
        bias_act_torch(piece, None, kind, out=piece)
    return flat[0, :size].view(x.shape)
