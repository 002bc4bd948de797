"""A plan: which weights of a model are kept as what, and why. It is made by measuring, written and read as JSON."""

import json
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
    """See `Scheme`."""

    values: Values
    group: int | None = Field(default=None, ge=8)
    symmetric: bool = True
    activations: Activations | None = None

    @model_validator(mode="after")
    def _runs(self) -> Self:
        if self.values == "fp8" and not (self.symmetric and self.group is None):
            raise ValueError("fp8 has one scale for each row and no zeros; leave group and symmetric out")
        if self.activations is not None and (self.activations == "fp8") != (self.values == "fp8"):
            raise ValueError(f"activations {self.activations} do not go with {self.values} values; leave them out")
        return self

    @classmethod
    def written(cls, scheme: Scheme) -> "PlannedScheme":
        """As it is written."""
        return cls(values=scheme.values, group=scheme.group, symmetric=scheme.symmetric, activations=scheme.activations)

    @property
    def scheme(self) -> Scheme:
        """As it is used."""
        return Scheme(self.values, self.group, symmetric=self.symmetric, activations=self.activations)


class PlannedWeight(ConfigModel):
    """What becomes of weights that are one in a fused layer, or of one alone."""

    names: tuple[str, ...] = Field(min_length=1)
    """Of their tensors in the model."""
    shape: tuple[PositiveInt, ...] = Field(min_length=2, max_length=3)
    """[N, K] of all together; of experts [E, N, K]."""
    scheme: PlannedScheme | None
    """None: they stay as they are."""
    nbytes: int = Field(ge=0)
    why: str = ""
    estimates: dict[str, float] = Field(default_factory=dict)
    """What each scheme adds to the loss of a token, in nats, by estimate."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        group = None if self.scheme is None else self.scheme.group
        if group is not None and self.shape[-1] % group:
            raise ValueError(f"scheme.group {group} does not divide the {self.shape[-1]} columns; give a divisor")
        return self

    @property
    def title(self) -> str:
        """Their names, short."""
        first, *others = (name.removesuffix(".weight") for name in self.names)
        shown = [other.rpartition(".")[2] for other in others]
        return ", ".join([first, *(shown if len(shown) < 4 else [f"and {len(shown)} more"])])

    @property
    def got(self) -> str:
        """What they become, in words."""
        return "as it is" if self.scheme is None else str(self.scheme.scheme)


class Measured(ConfigModel):
    """Perplexity on a text before and after."""

    text: str
    tokens: int
    """That were predicted."""
    before: float
    after: float

    @property
    def increase(self) -> float:
        """Relative."""
        return self.after / self.before - 1

    def __str__(self) -> str:
        change = f"{self.before:,.3f} became {self.after:,.3f} ({100 * self.increase:+.2f} %)"
        return f"perplexity {change} over {self.tokens:,} tokens of {self.text}"


class QuantPlan(ConfigModel):
    """A plan for all linears of a model."""

    version: Literal[1]
    model: str
    """The class of the model that it was made for."""
    dtype: str
    """Of what stays as it is."""
    asked: dict[str, Any] = Field(default_factory=dict)
    """The bound that it was made for."""
    weights: tuple[PlannedWeight, ...] = Field(min_length=1)
    calibration: Measured | None = None
    """On the text that the plan was made with."""
    evaluation: Measured | None = None
    """On a text that had no part in it."""

    @classmethod
    def read(cls, source: str | Mapping[str, Any]) -> "QuantPlan":
        """From a JSON file, or what such a file holds; errors name the field."""
        given = dict(source) if isinstance(source, Mapping) else _read(Path(source))
        try:
            found = cls(**given)
        except ConfigError as error:
            joint = ": " if str(error).startswith("unknown name") else "."
            raise ConfigError(f"{FIELD}{joint}{error}; correct it, or make the plan anew with quant.auto") from None
        names = [name for weight in found.weights for name in weight.names]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"{FIELD}.weights: {twice[0]} is named twice; remove one")
        return found

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(self.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")

    @property
    def rules(self) -> Rules:
        """The schemes by the names of weights."""
        kept = {
            name: (None if weight.scheme is None else weight.scheme.scheme, weight.shape[-1])
            for weight in self.weights
            for name in weight.names
        }
        return Rules(None, exact=kept, kind=self.model)

    @property
    def nbytes(self) -> int:
        """Of all weights in it."""
        return sum(weight.nbytes for weight in self.weights)

    @property
    def bits_per_weight(self) -> float:
        """Of these weights, scales among them."""
        return 8 * self.nbytes / max(1, sum(_count(weight) for weight in self.weights))

    @property
    def measured(self) -> tuple[str, ...]:
        """What it costs, for people: on the text that it was made with, and on another."""
        kinds = (("calibration", self.calibration), ("evaluation", self.evaluation))
        return tuple(f"{kind}: {found}" for kind, found in kinds if found is not None)

    @property
    def summary(self) -> str:
        """What it does, in one sentence."""
        counts: dict[str, int] = {}
        for weight in self.weights:
            kind = "as they are" if weight.scheme is None else weight.scheme.values
            counts[kind] = counts.get(kind, 0) + 1
        shares = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        return f"{shares}: {size_text(self.nbytes)}, {self.bits_per_weight:.2f} bits a weight"

    @property
    def table(self) -> str:
        """What each weight got and why, as a table in Markdown."""
        rows = [("weight", "shape", "becomes", "size", "why"), ("---",) * 5]
        for weight in self.weights:
            shape = " x ".join(map(str, weight.shape))
            rows.append((weight.title, shape, weight.got, size_text(weight.nbytes), weight.why))
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        return "\n".join([self.summary, *self.measured, "", *lines]) + "\n"


def _count(weight: PlannedWeight) -> int:
    count = 1
    for size in weight.shape:
        count *= size
    return count


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{FIELD}: cannot read {path} ({error.strerror}); give what quant.auto wrote") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{FIELD}: {path} is no JSON ({error}); give what quant.auto wrote") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{FIELD}: {path} holds a {type(found).__name__}; give what quant.auto wrote")
    return found
