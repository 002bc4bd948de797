"""Messages between the first rank and each of the others: plain data, in frames of msgpack.

A frame is four bytes of length and one msgpack value. A step contains only what the others need to run it: tokens are
sampled by the first rank, which alone has grammars and sampling parameters.
"""

import socket
import struct
import threading
from typing import Any, Generic, TypeVar

import msgspec

from outpace.ranks.network import writable
from outpace.types import Copy, Pooling, Preemption, Request, SamplingParams, ScheduledSequence, Step

Kind = TypeVar("Kind")
_LENGTH = struct.Struct("<I")
_LONGEST = 1 << 30


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first message: the rank's number, and what it loads."""

    rank: int
    size: int
    port: int
    """Port of the store at which ranks find each other."""
    listening: int | None
    """File descriptor of the store's socket, for the rank that hosts it."""
    model: str | None
    config: dict[str, Any]
    threads: int
    """CPU threads; 0: this rank's share of its machine's cores."""
    log_level: int
    host: str | None = "127.0.0.1"
    """Address of the store; None: that of the control connection, at the next port."""
    local: int = 0
    """Ranks on this rank's machine; 0: all are on one machine."""
    link_timeout: float = 0.0
    """Seconds of silence after which the first rank counts as lost; 0: both are on one machine."""


class About(msgspec.Struct, frozen=True, array_like=True):
    """What the other ranks need to know about a request."""

    num_prompt: int
    pooling: Pooling | None
    prompt_only: bool
    reads_logits: bool
    """Whether logits of its whole prompt are needed."""
    plain: bool
    """Whether it is greedy: then each rank computes its tokens itself."""

    def request(self, name: str, token_ids: tuple[int, ...]) -> Request:
        """A request with the same steps. token_ids: prompt and answer so far."""
        params = SamplingParams(
            max_tokens=0 if self.prompt_only else 1,
            temperature=0.0 if self.plain else 1.0,
            prompt_logprobs=0 if self.reads_logits else None,
        )
        prompt = token_ids[: self.num_prompt]
        return Request(request_id=name, prompt_token_ids=prompt, params=params, pooling=self.pooling)


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A `ScheduledSequence`."""

    request_id: str
    start: int
    num_new_tokens: int
    samples: bool
    new_blocks: tuple[int, ...]
    token_ids: tuple[int, ...]
    about: About | None

    def entry(self) -> ScheduledSequence:
        request = None if self.about is None else self.about.request(self.request_id, self.token_ids)
        numbers = self.request_id, self.start, self.num_new_tokens, self.samples
        return ScheduledSequence(*numbers, self.new_blocks, request, self.token_ids)


class Launch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Run this step with the first rank."""

    step_id: int
    ended: list[str]
    preempted: list[str]
    copied: list[int]
    copies: list[Copy]
    after: list[int]
    pieces: list[Piece]
    for_logits: bool = False
    """`Runner.logits` instead of `Runner.launch`: the caller wants the logits and samples itself."""

    def step(self) -> Step:
        """The `Step` for a runner, without how requests were preempted. Only the first rank waits for copies."""
        gone = dict.fromkeys(self.preempted, Preemption.RECOMPUTE)
        entries = [piece.entry() for piece in self.pieces]
        return Step(self.step_id, self.ended, gone, self.copied, self.copies, self.after, sequences=entries)


class Reset(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Forget every request."""


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Heartbeat between machines, sent every few seconds and answered at once."""


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answer to a heartbeat."""


class Here(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The rank has started and found the store."""

    versions: dict[str, str]


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The rank has its part of the model."""

    facts: dict[str, str]
    """See `agree`."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The last message: why the rank ends."""

    kind: str
    """Name of an error class of `outpace.errors`, or empty."""
    message: str
    second_hand: bool
    """A collective failed, probably because another rank has ended: that rank knows the cause."""


ToFollower = Begin | Launch | Reset | Ping
ToLeader = Here | Loaded | Failed | Pong


class Unreadable(ValueError):
    """The bytes are not a valid message, or it is too long."""


def frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames(Generic[Kind]):
    """Decodes messages from a stream of bytes."""

    def __init__(self, kinds: Any, longest: int = _LONGEST) -> None:
        """longest: most bytes of a message; longer ones are an error."""
        self._longest = longest
        self._decoder: msgspec.msgpack.Decoder[Kind] = msgspec.msgpack.Decoder(kinds)
        self._data = bytearray()

    @property
    def wanted(self) -> int:
        """Bytes missing to the end of the current message, as far as its length is known."""
        known = len(self._data) >= _LENGTH.size
        end = _LENGTH.size + (_LENGTH.unpack_from(self._data)[0] if known else 0)
        return end - len(self._data)

    def feed(self, data: bytes) -> list[Kind]:
        """Add bytes; returns the messages they complete. Raises Unreadable."""
        self._data += data
        found: list[Kind] = []
        while len(self._data) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._data)[0]
            if end > self._longest:
                raise Unreadable(f"a message of {end} bytes")
            if len(self._data) < end:
                break
            try:
                found.append(self._decoder.decode(bytes(self._data[_LENGTH.size : end])))
            except msgspec.MsgspecError as error:
                raise Unreadable(str(error)) from None
            del self._data[:end]
        return found


class Sender:
    """Sends messages over a socket from several threads."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._lock = sock, threading.Lock()

    def send(self, data: bytes) -> None:
        """Send a frame; raises OSError if the other side has ended."""
        with self._lock:
            self._socket.sendall(data)

    def send_small(self, data: bytes) -> None:
        """Send a short frame unless it would block: then data is already in flight."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if writable(self._socket):
                self._socket.sendall(data)
        except OSError:  # the other side has ended: the reader will notice
            pass
        finally:
            self._lock.release()
