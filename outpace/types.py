"""Types that all layers share: requests, steps and their outputs. No torch here."""

import functools
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from outpace.errors import InputError
from outpace.structured.outputs import StructureCheck, StructuredOutputs

if TYPE_CHECKING:
    from outpace.structured.compile import CompiledGrammar

Pooling = Literal["mean", "last"]
"""The vector of a prompt: the mean or the last of its hidden states in the last layer."""


def check_vocabulary(name: str, vocab_size: int | None, *token_ids: int) -> None:
    """Refuse token ids that are not in a vocabulary of this size; None: its size is unknown."""
    for token in token_ids:
        if vocab_size is not None and not 0 <= token < vocab_size:
            raise InputError(f"{name}: token id {token} is outside the model's vocabulary of {vocab_size}")


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    """The request failed while others continued; `RequestOutput.error` says why."""


Params = TypeVar("Params")


def _with_suggestions(cls: type[Params]) -> type[Params]:
    """Make an unknown name an InputError that says which name was probably meant, instead of a TypeError."""
    init: Any = cls.__init__

    @functools.wraps(init)
    def checked(self: object, *args: object, **given: object) -> None:
        known = cls.__dataclass_fields__  # type: ignore[attr-defined]
        if not given.keys() <= known.keys():
            from outpace.config.nearest import nearest  # imported late: it is only for errors

            name = next(name for name in given if name not in known)
            meant = nearest(name, known)
            said = f"did you mean {meant}?" if meant else f"{cls.__name__} takes {', '.join(known)}"
            raise InputError(f"{name}: unknown parameter; {said}")
        init(self, *args, **given)

    cls.__init__ = checked  # type: ignore[method-assign]
    return cls


@_with_suggestions
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a request ends; names and defaults are vLLM's."""

    n: int = 1
    """Answers to the prompt."""
    max_tokens: int | None = 16
    """Most new tokens; a larger number is cut to the room in the context. None: all of that room. 0: compute only the
    prompt, for its log-probabilities."""
    min_tokens: int = 0
    """No end-of-sequence token before this many new tokens; stop strings still end an answer."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this much probability."""
    top_k: int = 0
    """Sample from this many most likely tokens; 0 is all."""
    min_p: float = 0.0
    """Sample from tokens at least this likely, relative to the likeliest."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens of the prompt and the answer less likely."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that is in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token for each time that it is in the answer."""
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None
    """Added to the logits of these tokens; kept as pairs of token and bias."""
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    """Sample only from these tokens; None: from all."""
    bad_words: tuple[str, ...] | list[str] = ()
    """Strings whose token sequences are banned from the answer."""
    seed: int | None = None
    """Same seed, same text."""
    stop: tuple[str, ...] | list[str] | str = ()
    """End before the first of these strings appears."""
    include_stop_str_in_output: bool = False
    """End after the stop string instead."""
    stop_token_ids: tuple[int, ...] | list[int] = ()
    """End with any of these tokens, in addition to the model's own."""
    ignore_eos: bool = False
    """Continue after the model's end-of-sequence tokens."""
    detokenize: bool = True
    """Return text; False: only token ids, and no stop strings."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    logprobs: int | None = None
    """Return the log-probability of each new token and of this many likeliest ones in its place; -1 is the whole
    vocabulary. The engine's option `max_logprobs` is the limit."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    logprob_token_ids: tuple[int, ...] | list[int] | None = None
    """Return the log-probabilities of exactly these tokens, and of the chosen one, instead of the likeliest."""
    structured_outputs: StructuredOutputs | None = None
    """A JSON schema, regular expression, grammar or list of choices that the answer must match."""

    def __post_init__(self) -> None:
        for name, other, meant in _SAME:  # vLLM's other spellings
            if getattr(self, name) is other or (other == -1 and getattr(self, name) == -1):
                object.__setattr__(self, name, meant)
        self._as_plain_numbers()
        for name, low, high in _RANGES:
            if getattr(self, name) is not None or name not in _MAY_BE_NONE:
                _check_number(name, getattr(self, name), low, high)
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
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InputError(f"min_tokens: {self.min_tokens} is more than max_tokens={self.max_tokens}")
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise InputError(f"structured_outputs: expected StructuredOutputs, got {self.structured_outputs!r:.80}")
        self._freeze()
        if self.stop and not self.detokenize:
            raise InputError("stop: stop strings need the text; remove detokenize=False, or use stop_token_ids")

    def _as_plain_numbers(self) -> None:
        """Replace numbers of other libraries, such as numpy's, by int and float."""
        for name in _NUMBERS:
            value: Any = getattr(self, name)
            if type(value) not in (int, float, bool) and isinstance(value, Real):
                object.__setattr__(self, name, int(value) if isinstance(value, Integral) else float(value))

    def _freeze(self) -> None:
        """Replace lists and mappings by tuples."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _strings("stop", stop))
        object.__setattr__(self, "bad_words", _strings("bad_words", self.bad_words))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise InputError("allowed_token_ids: expected at least one token id; use None to allow all")
            object.__setattr__(self, "allowed_token_ids", allowed)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _pairs("logit_bias", self.logit_bias))
        if self.logprob_token_ids is not None:
            object.__setattr__(self, "logprob_token_ids", self._checked_logprob_token_ids())

    def _checked_logprob_token_ids(self) -> tuple[int, ...]:
        ids = _token_ids("logprob_token_ids", self.logprob_token_ids)
        if not 0 < len(ids) <= MAX_LOGPROB_TOKEN_IDS:
            raise InputError(f"logprob_token_ids: expected 1 to {MAX_LOGPROB_TOKEN_IDS} token ids, got {len(ids)}")
        if self.logprobs not in (None, len(ids)):
            raise InputError(
                f"logprobs: {self.logprobs} with {len(ids)} logprob_token_ids; give one of them: these tokens replace "
                "the likeliest"
            )
        return ids

    @property
    def wants_logprobs(self) -> bool:
        """Whether new tokens come with log-probabilities."""
        return self.logprobs is not None or self.logprob_token_ids is not None

    @property
    def num_logprobs(self) -> int:
        """Number of log-probabilities wanted besides that of the chosen token; -1: all."""
        return self.logprobs or 0 if self.logprob_token_ids is None else len(self.logprob_token_ids)


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        what = "an integer" if name in _INTEGERS else "a number"
        raise InputError(f"{name}: expected {what}, got {value!r:.80}")
    if not low <= value <= high:
        raise InputError(f"{name}: must be from {low:.10g} to {high:.10g}, got {value!r:.80}")


def _strings(name: str, values: object) -> tuple[str, ...]:
    if not isinstance(values, tuple | list) or not all(isinstance(value, str) and value for value in values):
        raise InputError(f"{name}: expected strings that are not empty, got {values!r:.80}")
    return tuple(values)


def _is_token_id(value: object) -> bool:
    return type(value) is not bool and isinstance(value, Integral) and int(value) >= 0


def _token_ids(name: str, values: object) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or not all(map(_is_token_id, values)):
        raise InputError(f"{name}: expected token ids, got {values!r:.80}")
    return tuple(map(int, values))


def _pairs(name: str, values: object) -> tuple[tuple[int, float], ...]:
    """A mapping from token ids as sorted pairs; pairs are accepted too, since `dataclasses.replace` passes them."""
    try:
        biases = dict(values)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise InputError(f"{name}: expected a mapping from token ids to numbers, got {values!r:.80}") from None
    for token, bias in biases.items():
        if not _is_token_id(token):
            raise InputError(f"{name}: expected token ids as keys, got {token!r:.80}")
        if not isinstance(bias, int) and isinstance(bias, Real):
            biases[token] = bias = float(bias)
        _check_number(f"{name}[{token}]", bias, -100, 100)
    return tuple(sorted((int(token), bias) for token, bias in biases.items()))


MAX_LOGPROB_TOKEN_IDS = 128
"""Most entries of `SamplingParams.logprob_token_ids`."""
_SAME: tuple[tuple[str, object, object], ...] = (("top_k", -1, 0), ("stop", None, ()), ("stop_token_ids", None, ()))
_COLDEST = 1e-5  # logits divided by less overflow
_SWITCHES = ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")
_INTEGERS = ("n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs")
_MAY_BE_NONE = ("max_tokens", "logprobs", "prompt_logprobs")
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("n", 1, 128),
    ("max_tokens", 0, 2**31),
    ("min_tokens", 0, 2**31),
    ("temperature", 0, 100),
    ("top_p", 1e-9, 1),
    ("top_k", 0, 2**31),
    ("min_p", 0, 1),
    ("repetition_penalty", 1e-3, 1e3),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("logprobs", -1, 2**31),
    ("prompt_logprobs", -1, 2**31),
)
_NUMBERS = (*(name for name, _, _ in _RANGES), "seed")


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token by the model's own logits, before temperature, penalties and masks."""

    logprob: float
    rank: int
    """1 is the likeliest; tokens with equal logits share the better rank."""
    decoded_token: str | None = None


class HasText(Protocol):
    """The source of an answer's text, which may be made only when it is read."""

    @property
    def text(self) -> str:
        """The text so far."""


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The token or the string that ended it, if it was not the model's own end."""
    logprobs: "list[TokenLogprobs] | None" = None
    """For each token, if `SamplingParams.logprobs` asks for them."""
    cumulative_logprob: float | None = None
    """Their sum over the tokens of the answer."""
    structure_check: StructureCheck | None = None
    """The check of what the schema asks for and the grammar does not enforce; set when the answer has ended."""
    source: HasText | None = field(default=None, repr=False, compare=False)

    @property
    def text(self) -> str:
        """The answer so far; empty without a tokenizer."""
        return "" if self.source is None else self.source.text

    def __repr__(self) -> str:
        reason = f", finish_reason={self.finish_reason.value!r}" if self.finish_reason else ""
        return f"CompletionOutput(index={self.index}, text={self.text!r}, token_ids={self.token_ids}{reason})"


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
    prompt_logprobs: "list[TokenLogprobs | None] | None" = None
    """For each token of the prompt but the first, if `SamplingParams.prompt_logprobs` asks for them."""
    error: str | None = None
    """Why it ended early, if `finish_reason` is "error"."""
    num_cached_tokens: int | None = None
    """Tokens of the prompt that were in the prefix cache; None: the request has not run yet."""
    pooled: list[float] | None = None
    """The vector of the prompt, if the request is for one instead of an answer."""

    @property
    def num_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens after the first, over the time they took."""
        first, last, count = self.metrics.first_token_time, self.metrics.last_token_time, len(self.outputs[0].token_ids)
        return (count - 1) / (last - first) if first is not None and last is not None and last > first else None


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of a prompt."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A prompt and its vector; names are vLLM's."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True


class WatchLogits(Protocol):
    """Called with the logits of a piece of a prompt while a step runs; a piece may come again after a preemption."""

    def __call__(self, position: int, logits: Any, /) -> None:
        """Row i of logits [T, V], a tensor on the model's device, predicts the token at `position + i`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to be generated, as the scheduler takes it; n answers to a prompt are n requests."""

    request_id: str
    """Unique among requests that have not ended or whose last step has not been updated."""
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
    caller: str = ""
    """Who sent it: steps are shared fairly among callers."""
    weight: float = 1.0
    """The caller's share of steps, relative to other callers."""
    streamed: bool = True
    """A client reads its tokens as they come, or may start to: steps are kept short until the request ends."""
    pooling: Pooling | None = None
    """Return one vector of the prompt's hidden states, and no answer."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the answer must not contain."""
    grammar: "CompiledGrammar | None" = field(default=None, compare=False, repr=False)
    """The compiled `params.structured_outputs`."""
    watch: "WatchLogits | None" = field(default=None, compare=False, repr=False)
    """Gets the logits of every position of the prompt."""

    @property
    def prompt_only(self) -> bool:
        """Whether the prompt is computed and nothing is sampled."""
        return self.pooling is not None or self.params.max_tokens == 0

    @property
    def reads_whole_prompt(self) -> bool:
        """Whether every position of its prompt must be computed, so that cached blocks do not help."""
        return self.watch is not None or self.params.prompt_logprobs is not None or self.pooling == "mean"

    @property
    def max_tokens(self) -> int:
        """Most new tokens, 0 for the prompt alone. None in `params` is resolved before a request is made."""
        if self.prompt_only:
            return 0
        assert self.params.max_tokens is not None, "max_tokens is not resolved"
        return self.params.max_tokens

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer with a grammar: the model's own, or else the caller's."""
        return self.eos_token_ids or tuple(self.params.stop_token_ids)

    def __post_init__(self) -> None:
        tokens = self.prompt_token_ids
        try:
            least = min(array("q", tokens))
        except (TypeError, ValueError, OverflowError):  # ValueError: there are none
            raise InputError(f"prompt_token_ids: expected one or more token ids, got {str(tokens)[:80]}") from None
        if least < 0:
            raise InputError(f"prompt_token_ids: expected one or more token ids, all from 0 on; {least} is negative")
        object.__setattr__(self, "prompt_token_ids", tuple(tokens))


class Preemption(StrEnum):
    """What happens to the blocks of a preempted request: they are dropped, or swapped to host memory."""

    RECOMPUTE = "recompute"
    SWAP = "swap"


@dataclass(slots=True)
class ScheduledSequence:
    """The part of one request in a step. Its input may be the token that the previous step samples."""

    request_id: str
    start: int
    """Position of its first new token, and so the number of its tokens in the cache."""
    num_new_tokens: int
    """Tokens to compute, from `start` on."""
    samples: bool
    """Whether all its tokens are computed after this step. Then the next one is sampled, unless it is prompt-only."""
    new_blocks: tuple[int, ...] = ()
    """Blocks to append to its table."""
    request: Request | None = None
    """Set when it is admitted, also after a preemption: the runner then starts it with `token_ids` and `new_blocks`."""
    token_ids: tuple[int, ...] = ()
    """With `request`: all its tokens so far, prompt and answer. Without: tokens from `start` on, if this runner has not
    sampled them."""


class Way(StrEnum):
    """Source and destination of a copy of blocks."""

    STORE = "store"
    """From the device to host memory."""
    LOAD = "load"
    """From host memory to the device."""
    WRITE = "write"
    """From host memory to files."""
    READ = "read"
    """From files to host memory."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Blocks that are copied while steps go on. Nobody uses or changes them until the copy is reported done."""

    copy_id: int
    way: Way
    pairs: tuple[tuple[int, int], ...]
    """(block to read, block to write)"""


@dataclass(slots=True)
class Step:
    """One forward of the model. The runner processes the fields in this order, and the steps in their order."""

    step_id: int
    ended: list[str] = field(default_factory=list)
    """Requests that finished or were aborted; the runner forgets them."""
    preempted: dict[str, Preemption] = field(default_factory=dict)
    """Preempted requests; the runner forgets them until they are admitted again."""
    copied: list[int] = field(default_factory=list)
    """Copies that were reported done. Other ranks may not be done: each first waits for its own copies of these."""
    copies: list[Copy] = field(default_factory=list)
    """Copies to start. STORE copies read what earlier steps have written."""
    after: list[int] = field(default_factory=list)
    """Copies to wait for before this step writes or its LOAD copies start, since they read blocks that it reuses."""
    waits: bool = False
    """Nothing can be computed before a copy is done: wait for one."""
    sequences: list[ScheduledSequence] = field(default_factory=list)
    """The requests to compute."""

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_new_tokens for sequence in self.sequences)


TokenLogprobs = dict[int, "Logprob"]
"""A token and the likeliest ones in its place, each with its log-probability."""


@dataclass(slots=True)
class StepOutput:
    """The results of a step."""

    step_id: int
    token_ids: Mapping[str, int]
    """The token sampled for each request with `samples` in the step."""
    logprobs: Mapping[str, TokenLogprobs] = field(default_factory=dict)
    """Log-probabilities of the sampled and the likeliest tokens, for requests that want them."""
    prompt_logprobs: Mapping[str, Mapping[int, TokenLogprobs]] = field(default_factory=dict)
    """Log-probabilities of prompt tokens that this step computed, by position."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Failed requests, and why; ignore their tokens. Other requests continue."""
    pooled: Mapping[str, list[float]] = field(default_factory=dict)
    """Vectors of the prompts that this step completed, for requests that want one."""
    copied: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Copies that were done since the last output, with the indices of pairs that failed."""
