"""A quantization plan: the scheme of each weight of a model and why, stored as JSON."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from outpace.config.base import ConfigModel
from outpace.errors import ConfigError
from outpace.log import size_text
from outpace.quant.rules import Rules
from outpace.quant.scheme import Activations, Scheme, Values

FIELD = "quant.plan"


class PlannedScheme(ConfigModel):
    """A `Scheme` in a plan."""

    values: Values
    group: int | None = Field(default=None, ge=8)
    symmetric: bool = True
    activations: Activations | None = None

    @model_validator(mode="after")
    def _runs(self) -> Self:
        if self.values == "fp8" and not (self.symmetric and self.group is None):
            raise ValueError("fp8 has one scale for each row and no zeros; remove group and symmetric")
        if self.activations is not None and (self.activations == "fp8") != (self.values == "fp8"):
            raise ValueError(f"activations {self.activations} do not go with {self.values} values; remove them")
        return self

    @classmethod
    def written(cls, scheme: Scheme) -> "PlannedScheme":
        """A scheme as a plan stores it."""
        return cls(values=scheme.values, group=scheme.group, symmetric=scheme.symmetric, activations=scheme.activations)

    @property
    def scheme(self) -> Scheme:
        return Scheme(self.values, self.group, symmetric=self.symmetric, activations=self.activations)


class PlannedWeight(ConfigModel):
    """The scheme of one weight, or of several that a fused layer joins."""

    names: tuple[str, ...] = Field(min_length=1)
    """Names of their tensors in the model."""
    shape: tuple[PositiveInt, ...] = Field(min_length=2, max_length=3)
    """[N, K] of the joined weight; [E, N, K] for experts."""
    scheme: PlannedScheme | None
    """None: not quantized."""
    nbytes: int = Field(ge=0)
    why: str = ""
    estimates: dict[str, float] = Field(default_factory=dict)
    """Scheme -> its estimated increase of the loss per token, in nats."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        group = None if self.scheme is None else self.scheme.group
        if group is not None and self.shape[-1] % group:
            raise ValueError(f"scheme.group {group} does not divide the {self.shape[-1]} columns; give a divisor")
        return self

    @property
    def title(self) -> str:
        """The names, shortened."""
        first, *others = (name.removesuffix(".weight") for name in self.names)
        shown = [other.rpartition(".")[2] for other in others]
        return ", ".join([first, *(shown if len(shown) < 4 else [f"and {len(shown)} more"])])

    @property
    def got(self) -> str:
        """The scheme in words."""
        return "as it is" if self.scheme is None else str(self.scheme.scheme)


class Measured(ConfigModel):
    """Perplexity on a text before and after."""

    text: str
    tokens: int
    """Number of predicted tokens."""
    before: float
    after: float

    @property
    def increase(self) -> float:
        return self.after / self.before - 1

    def __str__(self) -> str:
        change = f"{self.before:,.3f} became {self.after:,.3f} ({100 * self.increase:+.2f} %)"
        return f"perplexity {change} over {self.tokens:,} tokens of {self.text}"


class QuantPlan(ConfigModel):
    """A plan for all linears of a model."""

    version: Literal[1]
    model: str
    """Class of the model."""
    dtype: str
    """dtype of weights that are not quantized."""
    asked: dict[str, Any] = Field(default_factory=dict)
    """The options of quant.auto that it was made with."""
    weights: tuple[PlannedWeight, ...] = Field(min_length=1)
    calibration: Measured | None = None
    """Perplexity on the text that the plan was made with."""
    evaluation: Measured | None = None
    """Perplexity on another text."""

    @classmethod
    def read(cls, source: str | Mapping[str, Any]) -> "QuantPlan":
        """Read a plan from a JSON file or its content; errors name the field."""
        given = dict(source) if isinstance(source, Mapping) else _read(Path(source))
        try:
            found = cls(**given)
        except ConfigError as error:
            joint = ": " if str(error).startswith("unknown name") else "."
            raise ConfigError(f"{FIELD}{joint}{error}; correct it, or make a new plan with quant.auto") from None
        names = [name for weight in found.weights for name in weight.names]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"{FIELD}.weights: {twice[0]} is named twice; remove one")
        return found

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")

    @property
    def rules(self) -> Rules:
        """Quantization rules with the plan's scheme for each weight."""
        kept = {
            name: (None if weight.scheme is None else weight.scheme.scheme, weight.shape[-1])
            for weight in self.weights
            for name in weight.names
        }
        return Rules(None, exact=kept, kind=self.model)

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    @property
    def bits_per_weight(self) -> float:
        """Average bits of a weight, including scales."""
        return 8 * self.nbytes / max(1, sum(math.prod(weight.shape) for weight in self.weights))

    @property
    def measured(self) -> tuple[str, ...]:
        """Lines about the perplexity before and after, for the calibration text and another."""
        kinds = (("calibration", self.calibration), ("evaluation", self.evaluation))
        return tuple(f"{kind}: {found}" for kind, found in kinds if found is not None)

    @property
    def summary(self) -> str:
        """How many weights get which scheme, and the total size, in one line."""
        counts: dict[str, int] = {}
        for weight in self.weights:
            kind = "as they are" if weight.scheme is None else weight.scheme.values
            counts[kind] = counts.get(kind, 0) + 1
        shares = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        return f"{shares}: {size_text(self.nbytes)}, {self.bits_per_weight:.2f} bits a weight"

    @property
    def table(self) -> str:
        """A Markdown table of each weight's scheme and the reason."""
        rows = [("weight", "shape", "becomes", "size", "why"), ("---",) * 5]
        for weight in self.weights:
            shape = " x ".join(map(str, weight.shape))
            rows.append((weight.title, shape, weight.got, size_text(weight.nbytes), weight.why))
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        return "\n".join([self.summary, *self.measured, "", *lines]) + "\n"


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{FIELD}: cannot read {path} ({error.strerror}); give a file that quant.auto wrote"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{FIELD}: {path} is not JSON ({error}); give a file that quant.auto wrote") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{FIELD}: {path} holds a {type(found).__name__}; give a file that quant.auto wrote")
    return found
