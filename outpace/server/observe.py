"""Measures each request, for metrics and traces."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from outpace.server.engine import Delta, EngineRequest
from outpace.types import FinishReason, SamplingParams


@dataclass(slots=True)
class Ended:
    """Measurements of a request that has ended. Times are in seconds; None: there was no such token."""

    prompt_tokens: int
    output_tokens: int = 0
    longest: int = 0
    """Tokens of its longest answer."""
    finish_reason: str = "abort"
    e2e: float = 0.0
    ttft: float | None = None
    tpot: float | None = None
    queue: float | None = None
    """Time in the engine's queue."""
    prefill: float | None = None
    """From the end of the queue to the first token."""
    decode: float | None = None
    """From the first token to the last."""
    params: SamplingParams | None = None
    """None: it got no token."""

    @property
    def n(self) -> int | None:
        """Answers that were asked for."""
        return None if self.params is None else self.params.n

    @property
    def max_tokens(self) -> int | None:
        """Tokens that an answer could have."""
        return None if self.params is None else self.params.max_tokens

    @property
    def inference(self) -> float | None:
        """From the end of the queue to the last token."""
        return None if self.prefill is None or self.decode is None else self.prefill + self.decode


class Observer(Protocol):
    """Counts requests, see `metrics.Metrics`."""

    def observe_request(self, ended: Ended) -> None:
        """Count a request that has ended."""

    def observe_gap(self, seconds: float) -> None:
        """Count the time between two pieces of an answer."""


WATCHED: ContextVar[list[Ended] | None] = ContextVar("WATCHED", default=None)
"""Set by the tracing middleware around a request: a list to which its `Ended` is appended."""


class _Observed:
    """One request: counted while its answers grow."""

    def __init__(self, prompts: Sequence[EngineRequest], observer: Observer) -> None:
        self.ended = Ended(sum(len(each.prompt_token_ids) for each in prompts))
        self.reason: FinishReason | None = None
        self._prompts, self._observer = prompts, observer
        self._begin, self._first, self._now = time.perf_counter(), 0.0, 0.0
        self._last: dict[int, float] = {}  # when each answer last grew
        self._counts: dict[int, int] = {}

    def add(self, delta: Delta) -> None:
        """Count a delta of the request."""
        now, index, ended = time.perf_counter(), delta.index, self.ended
        if index in self._last:
            self._observer.observe_gap(now - self._last[index])
            self._counts[index] += len(delta.token_ids)
        else:
            self._first = self._first or now
            self._counts[index] = len(delta.token_ids)
            ended.params = self._prompts[index // self._prompts[0].params.n].params
        self._last[index] = self._now = now
        self.reason = delta.finish_reason
        if delta.times is not None:
            ended.queue, ended.prefill = delta.times

    def finish(self) -> None:
        """Count the request."""
        ended, counts = self.ended, self._counts
        ended.e2e = time.perf_counter() - self._begin
        if counts:
            ended.output_tokens, ended.longest = sum(counts.values()), max(counts.values())
            ended.ttft, ended.decode = self._first - self._begin, self._now - self._first
            if ended.output_tokens > 1:
                ended.tpot = ended.decode / (ended.output_tokens - 1)
        self._observer.observe_request(ended)


@contextmanager
def observed(prompts: Sequence[EngineRequest], observer: Observer) -> Iterator[Callable[[Delta], None]]:
    """A context for a request. Call the yielded function with each delta; the end of the context counts the request."""
    request, watched = _Observed(prompts, observer), WATCHED.get()
    try:
        yield request.add
        request.ended.finish_reason = request.reason.value if request.reason else "stop"
    except Exception:
        request.ended.finish_reason = "error"
        raise
    finally:
        request.finish()
        if watched is not None:
            watched.append(request.ended)
