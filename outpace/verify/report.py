"""The results of `verify`, as plain data."""

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Compared:
    """One place in the model: its error, and the allowed error."""

    name: str
    error: float
    """Relative error of a token's vector: the worst in float32, the root of the mean square in 16 bits."""
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether the error is allowed; an infinite one never is."""
        return math.isfinite(self.error) and self.error <= self.allowed


@dataclass(frozen=True)
class PromptReport:
    """The results for one set of prompts."""

    name: str
    lengths: tuple[int, ...]
    """Tokens of each prompt."""
    layers: tuple[Compared, ...]
    """The embedding, then each layer; the state of the last one is after the final norm."""
    logits: Compared | None
    """None: the model has none."""
    new_tokens: int
    """Greedy tokens of plain Hugging Face; 0: the model does not generate."""
    first_difference: tuple[int, int] | None
    """Prompt and new token, both counted from 0, where the greedy tokens first differ."""

    @property
    def places(self) -> tuple[Compared, ...]:
        """The layers, and the logits if there are any."""
        return self.layers if self.logits is None else (*self.layers, self.logits)

    @property
    def first_divergence(self) -> Compared | None:
        """The first place with an error that is not allowed."""
        return next((place for place in self.places if not place.passed), None)


@dataclass(frozen=True)
class Report:
    """The result of `verify`."""

    model: str
    dtype: str
    device: str
    fused_layers: int
    """0: the model has no policy, and its own layers run over pages."""
    rule: str
    """The reference of the errors, and the allowed error, in words."""
    tokens_count: bool
    """Whether greedy tokens must be equal; not in 16 bits, where rounding may decide between two tokens."""
    prompts: tuple[PromptReport, ...]

    @property
    def passed(self) -> bool:
        """Whether injection changed nothing beyond the allowed errors."""
        same = all(report.first_difference is None for report in self.prompts)
        return (same or not self.tokens_count) and all(report.first_divergence is None for report in self.prompts)

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON, which has no infinity: such an error is None."""
        return {"passed": self.passed, **asdict(self, dict_factory=_finite)}


def _finite(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: None if value == math.inf else value for name, value in fields}
