"""What the HTTP side knows of an engine: requests of token ids in, deltas of token ids out, a status to show."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from outpace.structured.outputs import StructureCheck
from outpace.structured.wire import WireGrammar
from outpace.types import FinishReason, Pooling, SamplingParams


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: the engine shares its steps fairly among callers."""

    name: str = ""
    weight: float = 1.0


ANYBODY = Caller()
"""The one caller of a server without API keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One checked prompt, and how to answer it. Parameters about text stay on the HTTP side, see `messages.add`."""

    request_id: str = ""
    """Unique among the requests that have not ended; given when it is submitted."""
    prompt_token_ids: list[int]
    params: SamplingParams
    """The HTTP side finds the stop strings: it cuts the text and cancels. `bad_words` in here are ignored."""
    text: str | None = None
    """The prompt as text, if the answer repeats it."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that no answer may contain."""
    priority: int = 0
    cache_salt: str = ""
    caller: Caller = ANYBODY
    pooling: Pooling | None = None
    """Give one vector of the hidden states of the prompt, and no answer."""
    grammar: WireGrammar | None = None
    """The grammar that answers must follow."""
    structure: str = ""
    """The field of the HTTP request that asks for the grammar."""
    unwanted: set[int] = field(default_factory=set, compare=False)
    """Indices of answers that need no more deltas: their reader adds them here, and the engine ends only those."""


WireLogprobs = list[tuple[int, float, int]]
"""The log-probabilities of one token: (token, log-probability, rank), the token itself first."""


class Delta(msgspec.Struct, array_like=True):
    """New tokens of one answer, from one or more steps: sent by the engine process, then given its text, then written.

    Deltas of one answer that wait for their reader are merged into one.
    """

    index: int
    """Which of the n answers to its prompt; once it has its text, which of all answers to the HTTP request."""
    token_ids: list[int]
    logprobs: list[WireLogprobs] | None = None
    """One for each token, when asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None: it ended otherwise, or by the model's own end token."""
    prompt_logprobs: list[msgspec.Raw] | None = None
    """Once, with the first delta, when asked for: `WireLogprobs` of each token of the prompt, None for the first.
    `messages.prompt_entry` decodes one when it is written: all at once would block the event loop."""
    times: tuple[float, float] | None = None
    """Once, with the first delta: seconds in the queue, and from its end to the first token."""
    num_cached_tokens: int | None = None
    """Once, with the first delta of the request: tokens of the prompt that were in the prefix cache."""
    number: int = 0
    """The number of its request on the socket."""
    text: str = ""
    """What its tokens add to the text of the answer; set on the HTTP side, as is `check`."""
    check: StructureCheck | None = None
    """In the last delta of an answer whose grammar does not enforce everything that was asked for."""

    def merge(self, newer: "Delta") -> None:
        """Append a newer delta of the same answer."""
        self.token_ids += newer.token_ids
        if self.logprobs is not None and newer.logprobs is not None:
            self.logprobs += newer.logprobs
        self.finish_reason, self.stop_reason = newer.finish_reason, newer.stop_reason
        self.times = self.times or newer.times


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The loaded model."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    created: int
    """When it was loaded, in seconds since 1970."""
    sampling: dict[str, int | float] = field(default_factory=dict)
    """Defaults for requests, by names of SamplingParams, from the model's generation config."""
    max_logprobs: int = 20
    """Most log-probabilities of a token that a request may ask for; at most the vocabulary."""
    embedding_sizes: tuple[int, ...] = ()
    """Widths that embeddings may be cut to; empty: only the model's own."""
    weight_bytes: int = 0
    """Bytes that were read to load it."""
    quantization: str | None = None
    """Schemes of its quantized weights; None: there are none."""


STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Buckets of the histogram of tokens per step, as upper bounds."""


class StepRecord(NamedTuple):
    """One step: what it computed and how long it took."""

    step_id: int
    prefill_tokens: int
    decode_tokens: int
    milliseconds: float


LEVEL_TOTALS = ("_queries", "_hits", "_bytes", "failed")
"""Endings of the names in `EngineStatus.levels` that are totals."""


@dataclass(slots=True)
class EngineStatus:
    """Numbers of the engine. The worker sends all of it with `Ready`, then several times a second while there is work;
    the client and the supervisor fill in what only they know, and routes and metrics read it."""

    ready: bool = False
    """Whether the engine takes requests. The client fills it in, and `running`, `waiting`, `last_steps`,
    `startup_seconds` and `expert_load`."""
    running: int = 0
    """Sequences in its steps."""
    waiting: int = 0
    """Sequences that have not been in a step yet, on either side of the socket."""
    free_blocks: int = 0
    num_blocks: int = 0
    steps: int = 0
    restarts: int = 0
    """Set by the supervisor, as is `why`."""
    prompt_tokens: int = 0
    """This and the next four are totals since the server started, over all restarts of the engine."""
    generated_tokens: int = 0
    preemptions: int = 0
    prefix_hits: int = 0
    """Tokens of prompts that were in the cache."""
    prefix_queries: int = 0
    """Tokens of prompts that were looked for in it."""
    last_steps: list[StepRecord] = field(default_factory=list)
    """The last 64, oldest first; on the socket, only those since the last message."""
    startup_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each part of the last start."""
    why: str = ""
    """Why it is not ready."""
    step_limit_ms: float | None = None
    """The time that a step should take at most, if the token budget was chosen for a time."""
    cache_config: dict[str, str] = field(default_factory=dict)
    """Options of the cache, under vLLM's names."""
    step_sizes: list[int] = field(default_factory=list)
    """Number of steps in each bucket of `STEP_SIZES`, and above the last, by prefill and new tokens as vLLM counts."""
    step_tokens: int = 0
    """Tokens of all these steps."""
    levels: dict[str, int] = field(default_factory=dict)
    """Numbers of the levels of the prefix cache, see `LLMEngine.levels`; empty: the device's pages are the only one."""
    expert_layers: list[int] = field(default_factory=list)
    """Numbers of the layers that have experts; empty: the model has no experts that are counted."""
    expert_load: list[list[int]] = field(default_factory=list)
    """For each of these layers the tokens that each expert has had so far; at most a few seconds old while it is asked
    for. Empty: not known yet."""
    nodes: list[str] = field(default_factory=list)
    """Machines that the ranks of the engine are on, with their addresses and ranks; empty: only this one."""


class Engine(Protocol):
    """An engine that may live in another process."""

    @property
    def card(self) -> ModelCard:
        """The loaded model."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[Delta, None]:
        """Deltas of all answers until each has a finish reason; closing the generator cancels the request.

        InputError: the request is wrong. Overloaded: the queue is full. EngineDead: the engine died; try again later.
        """

    def room(self, requests: Sequence[EngineRequest]) -> AbstractContextManager[None]:
        """Reserve room for several requests of one caller, before the first is submitted. Overloaded: too little."""

    async def embed(self, requests: Sequence[EngineRequest]) -> list[list[float]]:
        """The vector that each request asks for by its `pooling`."""

    def status(self) -> EngineStatus:
        """The newest numbers."""
