"""The results of an evaluation, as plain data."""

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class WindowLoss:
    """The loss in one window of the text."""

    tokens: int
    """Tokens that were predicted."""
    nats: float
    """Mean of -log p of those tokens."""


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts a text."""

    model: str
    dtype: str
    device: str
    options: str
    """Other options of the run: `cache.block_size=32, ...`."""
    tokens: int
    """Tokens that were predicted."""
    nats: float
    """Mean of -log p of those tokens."""
    tokens_per_byte: float | None
    """Tokens per byte of the text in UTF-8; None: the text was given as token ids."""
    windows: tuple[WindowLoss, ...]

    @property
    def perplexity(self) -> float:
        """e to the mean loss."""
        return math.exp(self.nats) if self.nats < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Mean loss per byte of the text, in bits: comparable between tokenizers."""
        return None if self.tokens_per_byte is None else self.nats / math.log(2) * self.tokens_per_byte


@dataclass(frozen=True)
class Agreement:
    """How close the next-token distributions of a model are to those of a reference, for the same tokens."""

    tokens: int
    """Number of positions compared."""
    top1: float
    """Share of positions where both have the same likeliest token."""
    mean_kl: float
    """Mean KL divergence from the reference, in nats."""
    max_kl: float
    kept: int
    """Tokens per position, the reference's likeliest, that the KL divergence was computed from."""
    exact: bool
    """Whether that is the whole vocabulary. If not, all other tokens count as one, and KL is a lower bound."""
    nats_error: float
    """Standard error of the difference of the mean losses, from the differences at single tokens."""


@dataclass(frozen=True)
class Evaluation:
    """A model's perplexity, and that of a reference if there is one."""

    text: str
    """Where the text came from."""
    window: int
    """Most tokens of a window."""
    stride: int
    """Tokens from the beginning of one window to that of the next."""
    model: Perplexity
    against: Perplexity | None = None
    agreement: Agreement | None = None

    @property
    def increase(self) -> float | None:
        """Perplexity relative to that of the reference, minus 1."""
        return None if self.against is None else math.expm1(min(self.model.nats - self.against.nats, 700))

    @property
    def summary(self) -> str:
        """The main result, in one sentence."""
        own = f"perplexity {number(self.model.perplexity)}"
        if self.against is None or self.increase is None:
            return f"{own} over {self.model.tokens:,} tokens"
        error = "" if self.agreement is None else f" (standard error {100 * self.agreement.nats_error:.2f} %)"
        return f"{own} against {number(self.against.perplexity)}: {percent(self.increase)}{error}"

    @property
    def sentences(self) -> tuple[str, ...]:
        """The results, for people."""
        close = self.agreement
        if close is None:
            return (self.summary,)
        least = "" if close.exact else f", both at least: only the {close.kept:,} likeliest tokens were kept"
        return (
            self.summary,
            f"the likeliest token is the same at {100 * close.top1:.2f} % of positions; KL divergence "
            f"{close.mean_kl:.3g} nats on average, {close.max_kl:.3g} at most{least}",
        )

    def as_dict(self) -> dict[str, Any]:
        """All results for JSON, which has no infinity: such a value is None."""
        found = asdict(self, dict_factory=_finite)
        for name, part in (("model", self.model), ("against", self.against)):
            if part is not None:
                found[name] |= _finite([("perplexity", part.perplexity), ("bits_per_byte", part.bits_per_byte)])
        return {"summary": self.summary, "increase": self.increase, **found}


def number(value: float) -> str:
    """A perplexity for people."""
    return f"{value:,.2f}" if value < 1e6 else f"{value:.3g}"


def percent(change: float) -> str:
    """A relative change with its sign; no sign where it rounds to nothing."""
    shown = f"{100 * change:+,.2f}" if abs(change) < 1000 else f"{100 * change:+.3g}"
    return f"{shown[1:] if float(shown.replace(',', '')) == 0 else shown} %"


def _finite(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: None if value == math.inf else value for name, value in fields}
