"""The nouns every layer shares: what is asked for, and what comes back. No torch here."""

from dataclasses import dataclass, field
from enum import StrEnum

from outpace.errors import InputError


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a request ends; names and defaults are vLLM's."""

    max_tokens: int = 16
    """Most new tokens."""
    min_tokens: int = 0
    """No end-of-sequence token before this many new tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this much probability."""
    top_k: int = 0
    """Sample from this many most likely tokens; 0 is all."""
    min_p: float = 0.0
    """Sample from tokens at least this likely, relative to the likeliest."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens that have occurred less likely."""
    seed: int | None = None
    """Same seed, same text."""
    stop: tuple[str, ...] | list[str] | str = ()
    """End before the first of these strings appears."""
    stop_token_ids: tuple[int, ...] | list[int] = ()
    """End with any of these tokens, beside the model's own."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InputError(f"{name}: expected a number, got {value!r}")
            if not low <= value <= high:
                raise InputError(f"{name}: must be from {low:g} to {high:g}, got {value!r}")
        for name in _INTEGERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | None):
                raise InputError(f"{name}: expected an integer, got {value!r}")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise InputError(f"seed: expected an integer of 64 bits, got {self.seed}")
        if self.min_tokens > self.max_tokens:
            raise InputError(f"min_tokens: {self.min_tokens} is more than max_tokens={self.max_tokens}")
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, tuple | list) or not all(isinstance(stop, str) and stop for stop in stops):
            raise InputError(f"stop: expected strings that are not empty, got {self.stop!r}")
        object.__setattr__(self, "stop", tuple(stops))
        tokens = self.stop_token_ids
        if not isinstance(tokens, tuple | list) or not all(isinstance(token, int) and token >= 0 for token in tokens):
            raise InputError(f"stop_token_ids: expected token ids, got {tokens!r}")
        object.__setattr__(self, "stop_token_ids", tuple(tokens))


_SWITCHES = ("ignore_eos", "skip_special_tokens")
_INTEGERS = ("max_tokens", "min_tokens", "top_k", "seed")
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 1, 2**31),
    ("min_tokens", 0, 2**31),
    ("temperature", 0, 100),
    ("top_p", 1e-9, 1),
    ("top_k", 0, 2**31),
    ("min_p", 0, 1),
    ("repetition_penalty", 1e-3, 1e3),
)


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened, in seconds of a monotonic clock."""

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its answers so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens after the first, over the time they took."""
        first, last, count = self.metrics.first_token_time, self.metrics.last_token_time, len(self.outputs[0].token_ids)
        return (count - 1) / (last - first) if first is not None and last is not None and last > first else None
