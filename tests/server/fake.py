"""An engine in memory: it says what it is told to, and remembers what was asked and what was given up."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache

from transformers import PreTrainedTokenizerFast

from outpace.server.engine import Delta, EngineRequest, EngineStatus, ModelCard, StepRecord
from outpace.server.messages import wire_logprobs, wire_prompt_logprobs
from outpace.types import FinishReason, Logprob, TokenLogprobs

Speech = Callable[[EngineRequest, int], str]


def says(text: str) -> Speech:
    """The same answer to everything."""
    return lambda request, index: text


@dataclass
class FakeEngine:
    """Answers are texts of one token for each byte, ended by the end token."""

    tokenizer: PreTrainedTokenizerFast
    speech: Speech = lambda request, index: "Hello, wörld! 😀"
    tokens_per_delta: int = 1
    error: Exception | None = None
    """Raised before the delta of this number."""
    error_at: int = 0
    hold: asyncio.Event | None = None
    """Waited for before the delta of this number."""
    hold_at: int = 0
    max_model_len: int = 512
    max_logprobs: int = 20
    embedding_sizes: tuple[int, ...] = ()
    sampling: dict[str, int | float] = field(default_factory=dict)
    """What the model's generation config says."""
    num_cached_tokens: int = 0
    """What it says was in the prefix cache."""
    ready: bool = True
    width: int = 3
    """Of vectors."""
    requests: list[EngineRequest] = field(default_factory=list)
    rooms: list[int] = field(default_factory=list)
    """For how many requests at a time room was asked for."""
    open: set[str] = field(default_factory=set)
    closed_early: list[str] = field(default_factory=list)
    waits: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a request waits for `hold`."""

    @property
    def card(self) -> ModelCard:
        """A model of bytes."""
        end = self.tokenizer.eos_token_id
        about = ("fake", self.max_model_len, len(self.tokenizer), (end,), "float32", "cpu", 1_700_000_000)
        return ModelCard(
            *about, sampling=self.sampling, max_logprobs=self.max_logprobs, embedding_sizes=self.embedding_sizes
        )

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Delta, None]:
        """One answer after the other, a few tokens at a time."""
        self.requests.append(request)
        self.open.add(request.request_id)
        finished, left = False, set(range(request.params.n))
        try:
            for number, delta in enumerate(self._deltas(request)):
                if self.hold is not None and number == self.hold_at:
                    self.waits.set()
                    await self.hold.wait()
                if self.error is not None and number == self.error_at:
                    raise self.error
                left.discard(delta.index if delta.finish_reason else -1)
                finished = not left
                yield delta
        finally:
            self.open.remove(request.request_id)
            if not finished:
                self.closed_early.append(request.request_id)

    def answer(self, request: EngineRequest, index: int) -> tuple[list[int], FinishReason]:
        """The tokens of an answer and why it ends."""
        ids = [*self.tokenizer(self.speech(request, index))["input_ids"], self.tokenizer.eos_token_id]
        most = request.params.max_tokens
        assert most is not None, "the HTTP side says how many"
        return ids[:most], FinishReason.STOP if len(ids) <= most else FinishReason.LENGTH

    def _deltas(self, request: EngineRequest) -> Iterator[Delta]:
        answers = [self.answer(request, index) for index in range(request.params.n)]
        first = True
        for begin in range(0, max(len(ids) for ids, _ in answers), self.tokens_per_delta):
            for index, (ids, reason) in enumerate(answers):
                part = ids[begin : begin + self.tokens_per_delta]
                if not part:
                    continue
                delta = Delta(index, part, finish_reason=reason if begin + len(part) == len(ids) else None)
                if request.params.logprob_token_ids is not None:
                    asked = {token: Logprob(-3.0, 3) for token in request.params.logprob_token_ids}
                    delta.logprobs = [wire_logprobs({token: Logprob(-0.5, 1), **asked}) for token in part]
                elif request.params.logprobs is not None:
                    delta.logprobs = [wire_logprobs(likely(token, request.params.logprobs)) for token in part]
                delta.num_cached_tokens = self.num_cached_tokens if first else None
                if first and request.params.prompt_logprobs is not None:
                    rest = request.prompt_token_ids[1:]
                    known = [None, *(likely(token, request.params.prompt_logprobs) for token in rest)]
                    delta.prompt_logprobs = wire_prompt_logprobs(known)
                first = False
                yield delta

    def room(self, requests: Sequence[EngineRequest]) -> AbstractContextManager[None]:
        """There is room for everything."""
        self.rooms.append(len(requests))
        return nullcontext()

    async def embed(self, requests: Sequence[EngineRequest]) -> list[list[float]]:
        """Vectors (length, 1 for mean, 0, ...)."""
        self.requests += requests
        if self.error is not None:
            raise self.error
        rest = [0.0] * (self.width - 2)
        return [[float(len(each.prompt_token_ids)), float(each.pooling == "mean"), *rest] for each in requests]

    def status(self) -> EngineStatus:
        """Some numbers."""
        steps = [StepRecord(1, 5, 2, 0.5)]
        return EngineStatus(ready=self.ready, running=len(self.open), num_blocks=8, free_blocks=7, last_steps=steps)

    async def close(self) -> None:
        """Nothing to end."""


@lru_cache
def likely(token: int, top: int) -> TokenLogprobs:
    """The token as the likeliest, and the ones behind it."""
    others = {(token + number) % 256: Logprob(-1.0 - number, number + 1) for number in range(1, top % 256)}
    return {token: Logprob(-0.5, 1), **others}
