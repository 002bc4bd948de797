"""Which implementation of each op runs: decided once, for a device, with a reason; never changed behind one's back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from outpace.errors import ConfigError
from outpace.kernels.activation import bias_act_ref, bias_act_triton, gated_act_ref, gated_act_triton
from outpace.kernels.attention import paged_attention, paged_attention_ref
from outpace.kernels.embedding import embed_ref, embed_triton
from outpace.kernels.gemv import gemv_triton
from outpace.kernels.layer_norm import layer_norm_ref, layer_norm_triton
from outpace.kernels.rms_norm import rms_norm_ref, rms_norm_triton
from outpace.kernels.rotary import rope_and_cache_ref, rope_and_cache_triton
from outpace.kernels.triton_stub import HAS_TRITON
from outpace.log import chosen

Op = Callable[..., Any]


def _attention_ref(*args: Any, max_len: int = 0, **options: Any) -> torch.Tensor:
    """The reference needs no bound on the lengths: it reads them."""
    return paged_attention_ref(*args, **options)


IMPLEMENTATIONS: Mapping[str, Mapping[str, Op | None]] = {
    "rms_norm": {"torch": rms_norm_ref, "triton": rms_norm_triton},
    "layer_norm": {"torch": layer_norm_ref, "triton": layer_norm_triton},
    "gated_act": {"torch": gated_act_ref, "triton": gated_act_triton},
    "bias_act": {"torch": bias_act_ref, "triton": bias_act_triton},
    "rotary": {"torch": rope_and_cache_ref, "triton": rope_and_cache_triton},
    "attention": {"torch": _attention_ref, "triton": paged_attention},
    "embed": {"torch": embed_ref, "triton": embed_triton},
    "gemv": {"torch": None, "triton": gemv_triton},
}


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
    gemv: Op | None
    """A linear of few rows with norm, activation and sum in one kernel; None: torch's product does them all."""


def choose_kernels(device: torch.device, asked: Mapping[str, str] | None = None) -> Kernels:
    """Triton on a GPU, torch elsewhere, and what `asked` says for single ops: {"attention": "torch"}."""
    asked = asked or {}
    for op, name in asked.items():
        if op not in IMPLEMENTATIONS:
            raise ConfigError(f"kernels: no op is called {op!r}; there are {', '.join(IMPLEMENTATIONS)}")
        if name not in IMPLEMENTATIONS[op]:
            raise ConfigError(f"kernels.{op}: {name!r} is not one of {', '.join(IMPLEMENTATIONS[op])}")
        if name == "triton" and default_kernels(device)[0] != "triton":
            raise ConfigError(f"kernels.{op}: Triton kernels need a GPU and Triton; leave it out, or give 'torch'")
    default, reason = default_kernels(device)
    for op, name in asked.items():
        chosen(f"kernel {op}", name, "asked for")
    chosen("kernels", default, reason)
    ops: dict[str, Any] = {op: found[asked.get(op, default)] for op, found in IMPLEMENTATIONS.items()}
    return Kernels(**ops)


def default_kernels(device: torch.device) -> tuple[str, str]:
    """The implementation that ops get on a device, and why."""
    if device.type != "cuda":
        return "torch", "a CPU runs the torch implementations"
    if not HAS_TRITON:
        return "torch", "Triton is not installed"
    return "triton", "a GPU with Triton"
