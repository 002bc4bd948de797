"""Which implementation of each op runs: decided once, for a device, with a reason; never changed behind one's back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from outpace.errors import ConfigError
from outpace.kernels.activation import bias_act_ref, bias_act_triton, gated_act_ref, gated_act_triton
from outpace.kernels.attention import paged_attention, paged_attention_ref
from outpace.kernels.embedding import embed_ref, embed_triton
from outpace.kernels.experts import experts_invariant, experts_torch, experts_triton
from outpace.kernels.gemv import gemv_triton
from outpace.kernels.invariant import bias_act_invariant, gated_act_invariant
from outpace.kernels.layer_norm import layer_norm_ref, layer_norm_triton
from outpace.kernels.matmul import matmul_invariant, matmul_torch
from outpace.kernels.packed_linear import (
    packed_linear_invariant,
    packed_linear_tiles,
    packed_linear_torch,
    packed_linear_triton,
)
from outpace.kernels.quantize import quantize_rows_ref, quantize_rows_triton
from outpace.kernels.rms_norm import rms_norm_ref, rms_norm_triton
from outpace.kernels.rotary import rope_and_cache_ref, rope_and_cache_triton
from outpace.kernels.routing import route_ref, route_triton
from outpace.kernels.scaled_linear import scaled_linear_invariant, scaled_linear_torch, scaled_linear_triton
from outpace.kernels.triton_stub import HAS_TRITON
from outpace.log import chosen

Op = Callable[..., Any]


def _attention_ref(*args: Any, max_len: int = 0, **options: Any) -> torch.Tensor:
    """The reference needs no bound on the lengths: it reads them."""
    return paged_attention_ref(*args, **options)


IMPLEMENTATIONS: Mapping[str, Mapping[str, Op | None]] = {
    "rms_norm": {"torch": rms_norm_ref, "triton": rms_norm_triton},
    "layer_norm": {"torch": layer_norm_ref, "triton": layer_norm_triton},
    "gated_act": {"torch": gated_act_ref, "triton": gated_act_triton, "invariant": gated_act_invariant},
    "bias_act": {"torch": bias_act_ref, "triton": bias_act_triton, "invariant": bias_act_invariant},
    "rotary": {"torch": rope_and_cache_ref, "triton": rope_and_cache_triton},
    "attention": {"torch": _attention_ref, "triton": paged_attention},
    "embed": {"torch": embed_ref, "triton": embed_triton},
    "linear": {"torch": matmul_torch, "invariant": matmul_invariant},
    "gemv": {"torch": None, "triton": gemv_triton},
    "packed_linear": {
        "torch": packed_linear_torch,
        "tiles": packed_linear_tiles,
        "triton": packed_linear_triton,
        "invariant": packed_linear_invariant,
    },
    "quantize_rows": {"torch": quantize_rows_ref, "triton": quantize_rows_triton},
    "scaled_linear": {
        "torch": scaled_linear_torch,
        "triton": scaled_linear_triton,
        "invariant": scaled_linear_invariant,
    },
    "route": {"torch": route_ref, "triton": route_triton},
    "experts": {"torch": experts_torch, "triton": experts_triton, "invariant": experts_invariant},
}
VARIANT = frozenset(
    {
        ("linear", "torch"),
        ("gemv", "triton"),
        ("packed_linear", "torch"),
        ("packed_linear", "tiles"),
        ("packed_linear", "triton"),
        ("scaled_linear", "torch"),
        ("scaled_linear", "triton"),
        ("gated_act", "torch"),
        ("bias_act", "torch"),
        ("experts", "torch"),
        ("experts", "triton"),
    }
)
"""(op, name) of what computes a row in a way that depends on the number of rows or on its place among them."""


@dataclass(frozen=True)
class Kernels:
    """The implementation of every op."""

    rms_norm: Op
    layer_norm: Op
    gated_act: Op
    bias_act: Op
    rotary: Op
    attention: Op
    embed: Op
    linear: Op
    """The product of every linear layer that no other kernel computes."""
    gemv: Op | None
    """A linear of few rows with norm, activation and sum in one kernel; None: torch's product does them all."""
    packed_linear: Op
    """The product of a linear layer with a quantized weight, with norm, activation and sum."""
    quantize_rows: Op
    """Rows as int8 or fp8 values and a scale each; norms and activations write them too (`scales=`)."""
    scaled_linear: Op
    """The product of such rows with a quantized weight."""
    route: Op
    """Experts and weights of each token from the router's logits."""
    experts: Op
    """Each token through its experts."""


def choose_kernels(
    device: torch.device, asked: Mapping[str, str] | None = None, deterministic: bool = False
) -> Kernels:
    """Triton on a GPU, torch elsewhere, and what `asked` says for single ops: {"attention": "torch"}.

    `deterministic`: every op computes a token bit for bit as it would alone, whatever is in the batch.
    """
    asked = asked or {}
    default, reason = default_kernels(device)
    _check(asked, default, deterministic)
    if deterministic and device.type == "cuda" and default == "torch":
        raise ConfigError(f"deterministic: on a GPU it needs Triton ({reason}); install it, or leave it off")
    for op, name in asked.items():
        chosen(f"kernel {op}", name, "asked for")
    if deterministic:
        chosen("kernels", f"{default}, batch-invariant", f"{reason}; deterministic: no token depends on its batch")
    else:
        chosen("kernels", default, reason)
    names = {op: asked.get(op) or _default(op, default, deterministic) for op in IMPLEMENTATIONS}
    if names["linear"] == "invariant":
        names["gemv"] = "torch"  # it would take few rows away
    ops: dict[str, Any] = {op: IMPLEMENTATIONS[op][name] for op, name in names.items()}
    if deterministic:
        ops["attention"] = partial(ops["attention"], invariant=True)
    return Kernels(**ops)


def _default(op: str, default: str, deterministic: bool) -> str:
    """The implementation of an op that nothing was asked for."""
    name = default if default in IMPLEMENTATIONS[op] else "torch"
    if (op, name) == ("packed_linear", "torch"):
        name = "tiles"
    return "invariant" if deterministic and (op, name) in VARIANT and op != "gemv" else name


def _check(asked: Mapping[str, str], default: str, deterministic: bool) -> None:
    """Refuses what is not there, and what cannot be combined."""
    for op, name in asked.items():
        if op not in IMPLEMENTATIONS:
            raise ConfigError(f"kernels: no op is called {op!r}; there are {', '.join(IMPLEMENTATIONS)}")
        if name not in IMPLEMENTATIONS[op]:
            raise ConfigError(f"kernels.{op}: {name!r} is not one of {', '.join(IMPLEMENTATIONS[op])}")
        if name == "triton" and default != "triton":
            raise ConfigError(f"kernels.{op}: Triton kernels need a GPU and Triton; leave it out, or give 'torch'")
        if deterministic and (op, name) in VARIANT:
            raise ConfigError(f"kernels.{op}: {name!r} is not deterministic; leave it out, or leave that off")
    if asked.get("linear") == "invariant" and asked.get("gemv") == "triton":
        raise ConfigError("kernels.gemv: 'triton' would take few rows from the invariant linear; leave out one of them")


def default_kernels(device: torch.device) -> tuple[str, str]:
    """The implementation that ops get on a device, and why."""
    if device.type != "cuda":
        return "torch", "a CPU runs the torch implementations"
    if not HAS_TRITON:
        return "torch", "Triton is not installed"
    return "triton", "a GPU with Triton"
