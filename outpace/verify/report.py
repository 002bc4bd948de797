"""What `verify` found, as plain data."""

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Compared:
    """One place in the model: how far it is off, and how far it may be."""

    name: str
    error: float
    """Relative error of a token's vector: the worst in float32, the root of the mean square in 16 bits."""
    allowed: float

    @property
    def passed(self) -> bool:
        """A value that is not finite never passes."""
        return math.isfinite(self.error) and self.error <= self.allowed


@dataclass(frozen=True)
class PromptReport:
    """What was found with one set of prompts."""

    name: str
    lengths: tuple[int, ...]
    """Tokens of each prompt."""
    layers: tuple[Compared, ...]
    """The embedding, then each layer; the norm that follows the last layer is in its state."""
    logits: Compared | None
    """None: the model has none."""
    new_tokens: int
    """Greedy tokens of plain Hugging Face; 0: the model does not generate."""
    first_difference: tuple[int, int] | None
    """Prompt and new token, both counted from 0, where the greedy tokens first differ."""

    @property
    def places(self) -> tuple[Compared, ...]:
        """The layers, and the logits where there are any."""
        return self.layers if self.logits is None else (*self.layers, self.logits)

    @property
    def first_divergence(self) -> Compared | None:
        """The first place that is further off than it may be."""
        return next((place for place in self.places if not place.passed), None)


@dataclass(frozen=True)
class Report:
    """What `verify` found."""

    model: str
    dtype: str
    device: str
    fused_layers: int
    """0: no policy knows the model, and its own layers run over pages."""
    rule: str
    """What the errors are taken against, and how large they may be."""
    tokens_count: bool
    """Whether greedy tokens must be equal: in 16 bits a tie may fall either way."""
    prompts: tuple[PromptReport, ...]

    @property
    def passed(self) -> bool:
        """Whether the injected model is the model it was."""
        same = all(report.first_difference is None for report in self.prompts)
        return (same or not self.tokens_count) and all(report.first_divergence is None for report in self.prompts)

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON, which has no infinity: such an error is None."""
        return {"passed": self.passed, **asdict(self, dict_factory=_finite)}


def _finite(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: None if value == math.inf else value for name, value in fields}
