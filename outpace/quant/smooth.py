"""SmoothQuant: moves outliers of activations into the weights, where quantizing them loses less.

Channel j of a linear's inputs is divided by s[j], and column j of its weight is multiplied by s[j], so the model
computes the same. The division is folded into the weight of the norm, or the rows of the linear, that computes these
inputs.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

NORMS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("input_layernorm",), ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    (("pre_feedforward_layernorm", "post_attention_layernorm"), ("mlp.gate_proj", "mlp.up_proj")),
)
"""(names of norms in a layer, of which the first that exists is used; names of the linears that read its output)."""
LINEARS = (("mlp.up_proj", "mlp.down_proj"), ("self_attn.v_proj", "self_attn.o_proj"))
"""(a linear, the linear that reads its output). Query heads share the values of their group."""


@dataclass(frozen=True)
class Maxima:
    """Largest absolute inputs and weights of each input channel of a linear [K], and its number of outputs."""

    inputs: Tensor
    weight: Tensor
    rows: int


@dataclass
class Folds:
    """Path of a module -> the factors that are folded into it."""

    norms: dict[str, Tensor] = field(default_factory=dict)
    """Divide the weight and bias of a norm."""
    rows: dict[str, Tensor] = field(default_factory=dict)
    """Divide the rows of a linear's weight, and its bias."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """Multiply the columns of a linear's weight."""

    def __bool__(self) -> bool:
        return bool(self.columns)

    def weight(self, path: str, weight: Tensor) -> Tensor:
        """The weight of a linear after folding."""
        if path in self.columns:
            weight = weight * self.columns[path]
        return weight / self.rows[path][:, None] if path in self.rows else weight

    def bias(self, path: str, bias: Tensor | None) -> Tensor | None:
        """The bias of a linear after folding."""
        return bias if bias is None or path not in self.rows else bias / self.rows[path]


def factors(maxima: list[Maxima], alpha: float) -> Tensor:
    """s [K] for linears with the same inputs: inputs^alpha / weights^(1 - alpha), or 1 where either is zero."""
    inputs = torch.stack([each.inputs for each in maxima]).amax(dim=0)
    weight = torch.stack([each.weight for each in maxima]).amax(dim=0)
    found = inputs.pow(alpha) / weight.pow(1 - alpha)
    return torch.where((inputs > 0) & (weight > 0), found, 1.0)


def folds(
    layers: Iterable[str], exists: Callable[[str], bool], maxima: Mapping[str, Maxima], head_dim: int, alpha: float
) -> Folds:
    """All factors for a model.

    layers: paths of layers; exists: whether a path is a module; maxima: of the linears that may be changed.
    """
    found = Folds()
    for layer in layers:
        for norms, names in NORMS:
            norm = next((path for name in norms if exists(path := f"{layer}.{name}")), None)
            paths = [path for name in names if (path := f"{layer}.{name}") in maxima]
            if norm is not None and len(paths) == len(names):
                found.norms[norm] = factors([maxima[path] for path in paths], alpha)
                found.columns.update(dict.fromkeys(paths, found.norms[norm]))
        for first, second in LINEARS:
            writer, reader = f"{layer}.{first}", f"{layer}.{second}"
            if writer in maxima and reader in maxima:
                divided, multiplied = _shared(factors([maxima[reader]], alpha), maxima[writer].rows, head_dim)
                found.rows[writer], found.columns[reader] = divided, multiplied
    return found


def _shared(factor: Tensor, rows: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Factors for the rows of one linear and the columns of the next, where several heads may read the same rows."""
    if len(factor) == rows:
        return factor, factor
    heads = factor.view(rows // head_dim, -1, head_dim)  # [KV heads, query heads of each, D]
    most = heads.amax(dim=1, keepdim=True)
    return most.reshape(-1), most.expand_as(heads).reshape(-1)
