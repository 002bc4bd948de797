"""The plan of a model that keeps its own layers over ranks: what is cut, and how."""

from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from outpace.errors import NotSupported
from outpace.parallel.spans import Split

Kind = Literal["column", "packed", "row", "vocabulary", "features"]
"""A linear by outputs, by outputs in both halves (gate and up), or by inputs; an embedding by tokens or by columns."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a linear or an embedding is cut over ranks."""

    kind: Kind
    whole: bool = False
    """The model passes the inputs of all ranks, or expects their outputs: inputs are cut, outputs are gathered."""


@dataclass
class RankPlan:
    """The cuts, by paths and names before anything is changed."""

    modules: dict[str, Cut] = field(default_factory=dict)
    values: list[str] = field(default_factory=list)
    """Vectors with a value for each head."""
    stacks: list[str] = field(default_factory=list)
    """Stacked experts of Hugging Face."""
    numbers: list[tuple[str, str, int]] = field(default_factory=list)
    """Attributes of modules that count something cut, such as heads: path, name, new value."""
    splits: dict[str, Split | None] = field(default_factory=dict)


def no_linear(path: str, module: nn.Module) -> NotSupported:
    """The error for a module that should be cut but is not a linear."""
    kind = type(module)
    return NotSupported(
        f"tensor parallelism: {path} is a {kind.__module__}.{kind.__name__}, and only linears and embeddings can be "
        "split; merge adapters into the weights first, or run the model on one rank"
    )
