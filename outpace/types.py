"""The nouns every layer shares: what is asked for, and what comes back. No torch here."""

from array import array
from collections.abc import Mapping
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
        if 0 < self.temperature < _COLDEST:
            raise InputError(
                f"temperature: {self.temperature!r} is too small; use 0 for greedy, or {_COLDEST:g} or more"
            )
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


_COLDEST = 1e-5  # logits divided by less overflow
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to be generated, as the scheduler takes it; n answers to a prompt are n requests."""

    request_id: str
    """Unique among the requests that have not ended and whose last step has been updated."""
    prompt_token_ids: tuple[int, ...]
    """At least one token."""
    params: SamplingParams = SamplingParams()
    """How tokens are chosen, and when to end."""
    eos_token_ids: tuple[int, ...] = ()
    """The model's own end-of-sequence tokens."""
    priority: int = 0
    """Smaller is sooner; first come, first served among equals."""
    cache_salt: str = ""
    """Prefixes are shared only between requests with the same salt."""

    def __post_init__(self) -> None:
        tokens = self.prompt_token_ids
        try:
            valid = len(array("q", tokens)) > 0 and min(tokens) >= 0
        except (TypeError, ValueError, OverflowError):
            valid = False
        if not valid:
            raise InputError(f"prompt_token_ids: expected one or more token ids, got {str(tokens)[:80]}")
        object.__setattr__(self, "prompt_token_ids", tuple(tokens))


class Preemption(StrEnum):
    """How a running request gave way: its blocks are forgotten, or kept in host memory."""

    RECOMPUTE = "recompute"
    SWAP = "swap"


@dataclass(slots=True)
class ScheduledSequence:
    """What one request does in a step. Its token at a position may be one that the step before samples."""

    request_id: str
    start: int
    """Position of its first new token: so many are in the cache."""
    num_new_tokens: int
    """Tokens to compute, from `start` on."""
    samples: bool
    """All its tokens are computed then, and the next one is chosen."""
    new_blocks: tuple[int, ...] = ()
    """Blocks to append to its table."""
    request: Request | None = None
    """Given when it comes in or comes back: the runner starts afresh with `token_ids` and `new_blocks`."""
    token_ids: tuple[int, ...] = ()
    """With `request`: all its tokens so far, prompt and answer."""


@dataclass(slots=True)
class Step:
    """One forward of the model. The runner works through the fields in this order, and through steps in theirs."""

    step_id: int
    ended: list[str] = field(default_factory=list)
    """Requests that finished or were aborted; the runner forgets them."""
    preempted: dict[str, Preemption] = field(default_factory=dict)
    """Requests that gave way; the runner forgets them until they come back."""
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    """(device block, host block) to copy before anything is written."""
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    """(host block, device block) to copy then."""
    sequences: list[ScheduledSequence] = field(default_factory=list)
    """What to compute, and for whom."""

    @property
    def num_tokens(self) -> int:
        """Tokens this step computes."""
        return sum(sequence.num_new_tokens for sequence in self.sequences)


@dataclass(slots=True)
class StepOutput:
    """What came out of a step."""

    step_id: int
    token_ids: Mapping[str, int]
    """The token chosen for each request whose entry in the step says `samples`."""


@dataclass(slots=True)
class NewToken:
    """A token of an answer, and the reason if it is the last."""

    request_id: str
    token_id: int
    finish_reason: FinishReason | None = None
