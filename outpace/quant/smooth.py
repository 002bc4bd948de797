"""SmoothQuant: outliers of activations are moved into weights, where they cost less, and the model stays the same.

Channel j of the inputs of some linears is divided by s[j], and column j of their weights is multiplied by it. The
division is folded into what makes these inputs: the weight of a norm, or rows of another linear.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

NORMS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("input_layernorm",), ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    (("pre_feedforward_layernorm", "post_attention_layernorm"), ("mlp.gate_proj", "mlp.up_proj")),
)
"""Names in a layer: norms, of which the first that exists counts, and the linears that read what it writes."""
LINEARS = (("mlp.up_proj", "mlp.down_proj"), ("self_attn.v_proj", "self_attn.o_proj"))
"""A linear whose rows are columns of another. Query heads share the values of a group."""


@dataclass(frozen=True)
class Maxima:
    """The largest absolute values of each input channel of a linear, [K], and how many outputs it has."""

    inputs: Tensor
    weight: Tensor
    rows: int


@dataclass
class Folds:
    """What is divided and multiplied, by the paths of modules."""

    norms: dict[str, Tensor] = field(default_factory=dict)
    """Divides weight and bias of a norm."""
    rows: dict[str, Tensor] = field(default_factory=dict)
    """Divides rows of a linear's weight, and its bias."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """Multiplies columns of a linear's weight."""

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
    """s [K] of linears that have the same inputs: inputs^alpha / weights^(1 - alpha), 1 where either is zero."""
    inputs = torch.stack([each.inputs for each in maxima]).amax(dim=0)
    weight = torch.stack([each.weight for each in maxima]).amax(dim=0)
    found = inputs.pow(alpha) / weight.pow(1 - alpha)
    return torch.where((inputs > 0) & (weight > 0), found, 1.0)


def folds(
    layers: Iterable[str], exists: Callable[[str], bool], maxima: Mapping[str, Maxima], head_dim: int, alpha: float
) -> Folds:
    """What is folded in a model.

    layers: paths of layers; exists: whether there is a module of a path; maxima: of the linears that may be changed.
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
    """Factors of the rows of one linear and of the columns of the next, where several heads may read the same rows."""
    if len(factor) == rows:
        return factor, factor
    heads = factor.view(rows // head_dim, -1, head_dim)  # [KV heads, query heads of each, D]
    most = heads.amax(dim=1, keepdim=True)
    return most.reshape(-1), most.expand_as(heads).reshape(-1)
