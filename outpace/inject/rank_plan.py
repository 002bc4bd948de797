"""What of a model that keeps its own layers is cut over ranks, and how."""

from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from outpace.errors import NotSupported
from outpace.parallel.spans import Split

Kind = Literal["column", "packed", "row", "vocabulary", "features"]
"""Of a linear: by its outputs, by those of both halves (gate and up), or by its inputs. Of a table: by tokens, or by
columns."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a linear or a table is cut over ranks."""

    kind: Kind
    whole: bool = False
    """Whether the model around it has the inputs and outputs of all ranks: outputs are gathered, an input is cut."""


@dataclass
class RankPlan:
    """What of a model is cut over ranks, everything by its path or name before anything is changed."""

    modules: dict[str, Cut] = field(default_factory=dict)
    values: list[str] = field(default_factory=list)
    """Vectors with a value for each head."""
    stacks: list[str] = field(default_factory=list)
    """Stacks of experts of Hugging Face's."""
    numbers: list[tuple[str, str, int]] = field(default_factory=list)
    """Attributes of modules that count what each rank has a part of: path, name, what it becomes."""
    splits: dict[str, Split | None] = field(default_factory=dict)


def no_linear(path: str, module: nn.Module) -> NotSupported:
    """The error for a module that should be cut, and that nobody knows how to."""
    kind = type(module)
    return NotSupported(
        f"tensor parallelism: {path} is a {kind.__module__}.{kind.__name__}, and only linears and embeddings can be "
        "split; merge adapters into the weights first, or run the model on one rank"
    )
