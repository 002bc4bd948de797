"""What crosses the socket between the first rank and each of the others: plain data, in frames of msgpack.

A frame is four bytes of length and one msgpack value. A step has what the others need to run it, and no more: tokens
are chosen by the first rank, which alone has grammars, parameters and whoever watches.
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
    """First of all: who the rank is, and what it loads."""

    rank: int
    size: int
    port: int
    """Of the store at which ranks find each other."""
    listening: int | None
    """The number of that store's socket, for the rank that keeps it."""
    model: str | None
    config: dict[str, Any]
    threads: int
    """Of a CPU; 0: this rank's share of what its machine has."""
    log_level: int
    host: str | None = "127.0.0.1"
    """Where the store is; None: where the control connection leads to, at the next port."""
    local: int = 0
    """Ranks on the machine of this one; 0: all are on one."""
    link_timeout: float = 0.0
    """Seconds without a sign of life of the first rank until it counts as lost; 0: they are on one machine."""


class About(msgspec.Struct, frozen=True, array_like=True):
    """What the other ranks need to know of a request."""

    num_prompt: int
    pooling: Pooling | None
    prompt_only: bool
    reads_logits: bool
    """Somebody wants the logits of its whole prompt."""
    plain: bool
    """Its tokens are the likeliest ones: each rank finds them by itself."""

    def request(self, name: str, token_ids: tuple[int, ...]) -> Request:
        """A request that has the same steps. token_ids: of the prompt, and of what has been answered."""
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
        """The same for a runner."""
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
    """`Runner.run` instead of `Runner.launch`: somebody wants the logits and chooses tokens himself."""

    def step(self) -> Step:
        """The same for a runner, which does not ask how a request gave way. The first rank alone waits for copies."""
        gone = dict.fromkeys(self.preempted, Preemption.RECOMPUTE)
        entries = [piece.entry() for piece in self.pieces]
        return Step(self.step_id, self.ended, gone, self.copied, self.copies, self.after, sequences=entries)


class Reset(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Forget every request."""


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Is anybody there? Between machines, every few seconds, and answered at once."""


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Yes."""


class Here(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The rank has begun, and found the store."""

    versions: dict[str, str]


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The rank has its part of the model."""

    facts: dict[str, str]
    """See `agree`."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Last of all: why the rank ends."""

    kind: str
    """Of `outpace.errors`, or empty."""
    message: str
    second_hand: bool
    """A collective failed, as it does when another rank has ended: that one knows the cause."""


ToFollower = Begin | Launch | Reset | Ping
ToLeader = Here | Loaded | Failed | Pong


class Unreadable(ValueError):
    """What came is no message, or longer than it may be."""


def frame(message: msgspec.Struct) -> bytes:
    """A message as it crosses the socket."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames(Generic[Kind]):
    """Messages from bytes as they come."""

    def __init__(self, kinds: Any, longest: int = _LONGEST) -> None:
        """longest: bytes of a message; a longer one is not waited for."""
        self._longest = longest
        self._decoder: msgspec.msgpack.Decoder[Kind] = msgspec.msgpack.Decoder(kinds)
        self._data = bytearray()

    @property
    def wanted(self) -> int:
        """Bytes to the end of the message that comes, as far as its length is known."""
        known = len(self._data) >= _LENGTH.size
        end = _LENGTH.size + (_LENGTH.unpack_from(self._data)[0] if known else 0)
        return end - len(self._data)

    def feed(self, data: bytes) -> list[Kind]:
        """The messages that are complete with these bytes. Raises Unreadable."""
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
    """One end of a socket, for messages of several threads."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._lock = sock, threading.Lock()

    def send(self, data: bytes) -> None:
        """Send a frame; OSError if nobody is there any more."""
        with self._lock:
            self._socket.sendall(data)

    def send_small(self, data: bytes) -> None:
        """Send a short frame if that takes no waiting; otherwise something is on its way already."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if writable(self._socket):
                self._socket.sendall(data)
        except OSError:  # nobody is there: whoever reads is told
            pass
        finally:
            self._lock.release()
