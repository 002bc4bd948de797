"""Messages on the socket between the HTTP process and the engine process, and their frames.

A frame is four bytes of length and one msgpack value: lists of numbers, strings and bytes, never code or objects.
Requests have numbers here; request ids stay in the HTTP process.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import msgspec

from outpace.errors import ConfigError, EngineDead, InputError, ModelError, NotSupported, OutpaceError, Overloaded
from outpace.server.engine import Delta, EngineRequest, EngineStatus, ModelCard, WireLogprobs
from outpace.structured.wire import Learn as Learn
from outpace.structured.wire import Unlearn as Unlearn
from outpace.types import SamplingParams, TokenLogprobs

MAX_FRAME = 1 << 28  # bytes; a longer one means that the two sides are out of step
_LENGTH = struct.Struct("<I")
_NOT_SENT = (
    *("stop", "include_stop_str_in_output", "bad_words", "detokenize", "skip_special_tokens"),
    "structured_outputs",
)
"""Parameters that are only about text, and those that are sent in another field."""
_DEFAULTS = SamplingParams()


class Start(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first message: what to load."""

    model: str | None
    options: dict[str, Any]
    log_level: int


class Add(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request to answer."""

    number: int
    prompt_token_ids: list[int]
    params: dict[str, Any]
    bad_words: list[list[int]]
    priority: int
    cache_salt: bytes
    grammar: bytes = b""
    """Key of the grammar that its answers must follow."""
    caller: str = ""
    weight: float = 1.0
    pooling: str | None = None
    """How to make one vector of the prompt, instead of an answer."""


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End a request, or one of its answers: nobody waits for it any more."""

    number: int
    index: int | None = None
    """The answer; None: all that are left."""


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Ask for a sign of life; `News.pong` answers."""


class CountExperts(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Ask how many tokens each expert has had; `News.expert_load` answers."""


class Starting(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Which part of the start is running now."""

    part: str


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The model is loaded."""

    card: ModelCard
    status: EngineStatus
    max_num_seqs: int


class NotStarted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The model could not be loaded."""

    kind: str
    message: str


class Failure(msgspec.Struct, array_like=True):
    """A request that failed; others go on."""

    number: int
    kind: str
    message: str


class News(msgspec.Struct, array_like=True, tag=True):
    """Everything that happened since the last frame."""

    deltas: list[Delta] = []
    failures: list[Failure] = []
    vectors: list[tuple[int, list[float]]] = []
    """Vectors of requests with `pooling`, by number."""
    cancelled: list[int] = []
    status: EngineStatus | None = None
    pong: bool = False
    """The answer to a `Ping`."""
    expert_load: list[list[int]] | None = None
    """Tokens of each expert since the start, by layer."""
    last: bool = False
    """The engine is broken, and its process is about to end."""


ToWorker = Start | Add | Learn | Unlearn | Cancel | Ping | CountExperts
FromWorker = Starting | Ready | NotStarted | News


def frame(message: msgspec.Struct) -> bytes:
    """A message with its length before it."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts received bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies of the frames that are complete now."""
        buffer = self._buffer
        buffer += data
        begin = 0
        while len(buffer) - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, begin)
            if length > MAX_FRAME:
                raise EngineDead(f"a message of {length} bytes on the engine's socket: its two ends are out of step")
            end = begin + _LENGTH.size + length
            if len(buffer) < end:
                break
            yield bytes(buffer[begin + _LENGTH.size : end])
            begin = end
        del buffer[:begin]


def add(number: int, request: EngineRequest) -> Add:
    """The message for a request. It has only parameters that differ from their defaults, and none of `_NOT_SENT`."""
    params = {}
    for field in fields(request.params):
        value = getattr(request.params, field.name)
        if field.name not in _NOT_SENT and value != getattr(_DEFAULTS, field.name):
            params[field.name] = value
    salt = request.cache_salt.encode(
        "utf-8", "surrogatepass"
    )  # callers may send any string, even with half a surrogate pair
    words = [list(word) for word in request.bad_words]
    key = request.grammar.key if request.grammar is not None else b""
    caller = request.caller
    return Add(
        *(number, list(request.prompt_token_ids), params, words, request.priority, salt, key),
        *(caller.name, caller.weight, request.pooling),
    )


def wire_logprobs(found: TokenLogprobs) -> WireLogprobs:
    """Log-probabilities as they cross the socket."""
    return [(token, entry.logprob, entry.rank) for token, entry in found.items()]


def wire_prompt_logprobs(found: Sequence[TokenLogprobs | None]) -> list[msgspec.Raw]:
    """Log-probabilities of a prompt as they cross the socket."""
    encode = msgspec.msgpack.encode
    return [msgspec.Raw(encode(None if entry is None else wire_logprobs(entry))) for entry in found]


def prompt_entry(entry: msgspec.Raw) -> WireLogprobs | None:
    """One entry of `Delta.prompt_logprobs`."""
    return msgspec.msgpack.decode(entry, type=WireLogprobs | None)


_KINDS: tuple[tuple[str, type[OutpaceError]], ...] = (
    ("overloaded", Overloaded),
    ("unsupported", NotSupported),
    ("config", ConfigError),
    ("model", ModelError),
    ("input", InputError),
    ("dead", EngineDead),
    ("other", OutpaceError),
)


def kind_of(error: OutpaceError) -> str:
    """The name under which an error crosses the socket."""
    return next(kind for kind, cls in _KINDS if isinstance(error, cls))


def error_of(kind: str, message: str) -> OutpaceError:
    """The error of that name."""
    return dict(_KINDS)[kind](message)
