"""Chooses the implementation of every op, once for a device, with a reason. No other module chooses, and none later.

A table has the implementations of each op by the names that users may give. Where one name means different functions
with and without Triton, the table has both.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from outpace.errors import ConfigError
from outpace.kernels import (
    activation,
    attention,
    attention_torch,
    block_copy,
    draw,
    embedding,
    experts,
    invariant,
    layer_norm,
    likeliest,
    matmul,
    packed_linear,
    quantize,
    ragged,
    rms_norm,
    rotary,
    routing,
    scaled_linear,
)
from outpace.kernels.few_rows import Scratch, linear_few_rows
from outpace.kernels.library import TunedLinear
from outpace.kernels.triton_stub import HAS_TRITON
from outpace.log import chosen

Op = Callable[..., Any]
ByDefault = Mapping[str, Op]
"""An implementation for each default: "torch" and "triton"."""


def _both(torch_op: Op, triton_op: Op, **others: Any) -> Mapping[str, Any]:
    return {"torch": torch_op, "triton": triton_op, **others}


IMPLEMENTATIONS: Mapping[str, Mapping[str, Op | ByDefault | None]] = {
    "rms_norm": _both(rms_norm.rms_norm_torch, rms_norm.rms_norm_triton),
    "layer_norm": _both(layer_norm.layer_norm_torch, layer_norm.layer_norm_triton),
    "gated_act": _both(
        activation.gated_act_torch, activation.gated_act_triton, invariant=invariant.gated_act_invariant
    ),
    "bias_act": _both(activation.bias_act_torch, activation.bias_act_triton, invariant=invariant.bias_act_invariant),
    "rotary": _both(rotary.rope_and_cache_torch, rotary.rope_and_cache_triton),
    "attention": _both(attention_torch.paged_attention_torch, attention.paged_attention),
    "embed": _both(embedding.embed_torch, embedding.embed_triton),
    "linear": {
        "torch": matmul.matmul_torch,
        "invariant": _both(matmul.matmul_invariant_torch, matmul.matmul_invariant_triton),
        "tuned": TunedLinear,
    },
    "gemv": {"torch": None, "triton": linear_few_rows},
    "packed_linear": {
        "torch": packed_linear.packed_linear_torch,
        "tiles": packed_linear.packed_linear_tiles,
        "triton": packed_linear.packed_linear_triton,
        "invariant": _both(packed_linear.packed_linear_invariant_torch, packed_linear.packed_linear_invariant_triton),
    },
    "quantize_rows": _both(quantize.quantize_rows_torch, quantize.quantize_rows_triton),
    "scaled_linear": _both(
        scaled_linear.scaled_linear_torch,
        scaled_linear.scaled_linear_triton,
        invariant=_both(scaled_linear.scaled_linear_invariant_torch, scaled_linear.scaled_linear_invariant_triton),
    ),
    "route": _both(routing.route_torch, routing.route_triton),
    "experts": _both(
        experts.experts_torch,
        experts.experts_triton,
        invariant=_both(experts.experts_invariant_torch, experts.experts_invariant_triton),
    ),
}
"""The ops inside layers. A model has one implementation of each: see `Kernels`."""
OF_STEPS: Mapping[str, ByDefault] = {
    "draw": _both(draw.draw_torch, draw.draw_triton),
    "ragged_inputs": _both(ragged.ragged_inputs_torch, ragged.ragged_inputs_triton),
    "write_likeliest": _both(likeliest.write_likeliest_torch, likeliest.write_likeliest_triton),
    "gather_blocks": _both(block_copy.gather_blocks_torch, block_copy.gather_blocks_triton),
    "scatter_blocks": _both(block_copy.scatter_blocks_torch, block_copy.scatter_blocks_triton),
}
"""The ops of a step outside its layers. The device alone decides."""
VARIANT: Mapping[str, frozenset[str]] = {
    "linear": frozenset({"torch", "tuned"}),
    "gemv": frozenset({"triton"}),
    "packed_linear": frozenset({"torch", "tiles", "triton"}),
    "scaled_linear": frozenset({"torch", "triton"}),
    "gated_act": frozenset({"torch"}),
    "bias_act": frozenset({"torch"}),
    "experts": frozenset({"torch", "triton"}),
}
"""Implementations whose result for a row depends on the number of rows, or on the row's place among them."""


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
    """A linear of few rows with norm, activation and sum in one kernel; None: `linear` takes few rows too."""
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
    """Triton on a GPU, torch elsewhere; `asked` overrides single ops: {"attention": "torch"}.

    `deterministic`: every op computes a token bit for bit as it would alone, whatever is in the batch.
    """
    asked = asked or {}
    default, reason = default_kernels(device)
    _check(asked, device, default, deterministic)
    if deterministic and device.type == "cuda" and default == "torch":
        raise ConfigError(f"deterministic: on a GPU it needs Triton ({reason}); install it, or turn deterministic off")
    for op, name in asked.items():
        chosen(f"kernel {op}", name, "asked for")
    if deterministic:
        chosen("kernels", f"{default}, batch-invariant", f"{reason}; deterministic: no token depends on its batch")
    else:
        chosen("kernels", default, reason)
    names = {op: asked.get(op) or _default(op, default, deterministic) for op in IMPLEMENTATIONS}
    if names["linear"] == "invariant":
        names["gemv"] = "torch"  # otherwise it would compute products of few rows
    ops: dict[str, Any] = {op: _implementation(IMPLEMENTATIONS[op][name], default) for op, name in names.items()}
    if ops["gemv"] is not None:
        ops["gemv"] = partial(ops["gemv"], scratch=Scratch())
    if names["linear"] == "tuned":
        ops["linear"] = TunedLinear()  # a table of its own for each model
    if deterministic:
        ops["attention"] = partial(ops["attention"], invariant=True)
    return Kernels(**ops)


def for_device(op: str, device: torch.device) -> Op:
    """The implementation of one of `OF_STEPS` on a device."""
    return OF_STEPS[op][default_kernels(device)[0]]


def _implementation(found: Op | ByDefault | None, default: str) -> Op | None:
    return found[default] if isinstance(found, Mapping) else found


def _default(op: str, default: str, deterministic: bool) -> str:
    """The name of an op's implementation if the user gave none."""
    name = default if default in IMPLEMENTATIONS[op] else "torch"
    if (op, name) == ("packed_linear", "torch"):
        name = "tiles"
    return "invariant" if deterministic and name in VARIANT.get(op, ()) and op != "gemv" else name


def _check(asked: Mapping[str, str], device: torch.device, default: str, deterministic: bool) -> None:
    """Raise for implementations that do not exist, or that cannot be combined."""
    for op, name in asked.items():
        if op not in IMPLEMENTATIONS:
            raise ConfigError(f"kernels: no op is called {op!r}; there are {', '.join(IMPLEMENTATIONS)}")
        if name not in IMPLEMENTATIONS[op]:
            raise ConfigError(f"kernels.{op}: {name!r} is not one of {', '.join(IMPLEMENTATIONS[op])}")
        if name == "triton" and default != "triton":
            raise ConfigError(f"kernels.{op}: Triton kernels need a GPU and Triton; remove it, or give 'torch'")
        if name == "tuned" and device.type != "cuda":
            raise ConfigError(f"kernels.{op}: 'tuned' chooses among the algorithms of a GPU's library; remove it")
        if deterministic and name in VARIANT.get(op, ()):
            raise ConfigError(f"kernels.{op}: {name!r} is not deterministic; remove it, or turn deterministic off")
    if asked.get("linear") == "invariant" and asked.get("gemv") == "triton":
        raise ConfigError("kernels.gemv: 'triton' would take few rows from the invariant linear; remove one of them")


def default_kernels(device: torch.device) -> tuple[str, str]:
    """The implementation that ops get on a device, and why."""
    if device.type != "cuda":
        return "torch", "a CPU runs the torch implementations"
    if not HAS_TRITON:
        return "torch", "Triton is not installed"
    return "triton", "a GPU with Triton"
