"""The engine process: read messages, take a step, send what came of it. One thread; it dies with its parent.

Nothing here grows with a reader that does not read: there is at most one unsent frame, and the next one is made, of all
that is new by then, when it has left. Until then answers stay in their requests, which `max_tokens` bounds, and the
other side admits a bounded number of requests.
"""

import logging
import os
import socket
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from outpace.answers import Group
from outpace.config import LLMConfig
from outpace.errors import EngineDead, InputError, OutpaceError
from outpace.llm_engine import LLMEngine
from outpace.loading.inspect import embedding_sizes
from outpace.log import logger
from outpace.prepare import PagedParts
from outpace.ranks.leader import load_ranked
from outpace.server.channel import Channel
from outpace.server.engine import STEP_SIZES, ModelCard, StepRecord
from outpace.server.known_grammars import Learned
from outpace.server.messages import (
    Add,
    Cancel,
    Failure,
    Learn,
    Look,
    News,
    NotStarted,
    Numbers,
    Ping,
    Ready,
    Start,
    Starting,
    Tokens,
    ToWorker,
    Unlearn,
    kind_of,
    wire_logprobs,
    wire_prompt_logprobs,
)
from outpace.structure import FIELD
from outpace.types import CompletionOutput, FinishReason, RequestOutput, SamplingParams

NUMBERS_EVERY = 0.1  # seconds
LOAD_EVERY = 2.0  # seconds between counts of the experts that nobody asked for
MAX_FAILURES = 2  # steps that fail one after the other
LAST_WORDS = 1.0  # seconds to send what is left
MAX_LOGPROBS = 1 << 22  # of one prompt; a frame gets no more once it has this many, so it stays below twice as many


@dataclass(slots=True)
class _Live:
    """A request that is being answered, and how much of it has been sent."""

    group: Group
    sent: list[int]  # tokens of each answer
    begun: bool = False
    scheduled_at: float | None = None  # when the first step with it began

    @property
    def output(self) -> RequestOutput:
        """Its answers so far."""
        return self.group.output

    @property
    def scores(self) -> bool:
        """Whether its answers have no tokens: they end when the prompt is computed, and tell of it."""
        return self.group.params.max_tokens == 0 and self.output.pooled is None

    def times(self) -> tuple[float, float] | None:
        """Seconds in the queue, and from its end to the first token."""
        metrics, begin = self.output.metrics, self.scheduled_at
        if begin is None or metrics.first_token_time is None:
            return None
        return max(0.0, begin - metrics.arrival_time), max(0.0, metrics.first_token_time - begin)


class Worker:
    """Runs an engine for whoever is at the other end of a channel."""

    def __init__(self, engine: LLMEngine, parts: PagedParts, channel: Channel) -> None:
        self._engine = engine
        self._vocab_size = parts.vocab_size
        self._channel = channel
        self._grammars = Learned()
        self._live: dict[int, _Live] = {}
        self._queued: dict[int, _Live] = {}  # those that no step has had
        self._changed: dict[int, None] = {}  # requests with tokens that have not been sent
        self._news = News()
        self._new_steps: deque[StepRecord] = deque(maxlen=64)
        self._step_sizes = [0] * (len(STEP_SIZES) + 1)
        self._prompt_tokens = self._generated_tokens = 0
        self._failures = 0  # in a row
        self._told_at = 0.0
        self._told_idle = True
        self._told_load_at = 0.0

    @property
    def _busy(self) -> bool:
        return self._engine.has_unfinished_requests

    def run(self) -> int:
        """Work until the other side goes (0) or the engine cannot go on (1)."""
        while not self._channel.closed and self._failures < MAX_FAILURES:
            self.turn()
        self._channel.drain(LAST_WORDS)
        if self._channel.free:
            self._publish()
            self._channel.drain(LAST_WORDS)
        return int(self._failures >= MAX_FAILURES)

    def turn(self) -> None:
        """Take in what was asked, do one step of it, and tell what came of it. Sleeps while there is nothing to do."""
        unsent = self._changed and self._channel.free  # more log-probabilities than one frame holds
        for message in self._channel.receive(wait=not self._busy and not unsent):
            self._handle(message)
        if self._busy:
            self._told_idle = False  # though it may be over in this turn
            self._step()
        if self._channel.free:
            self._publish()

    def _handle(self, message: ToWorker) -> None:
        if isinstance(message, Cancel):
            self._cancel(message.number, message.index)
        elif isinstance(message, Ping):
            self._news.pong = True
        elif isinstance(message, Look):
            self._ask_load()
        elif isinstance(message, Learn | Unlearn):
            self._grammars.take(message)
        elif isinstance(message, Add):
            try:
                self._add(message)
            except OutpaceError as error:
                self._fail(message.number, kind_of(error), str(error))
            except Exception:
                logger.exception("request %d cannot be queued", message.number)
                self._fail(message.number, "dead", "the engine could not take the request")

    def _add(self, message: Add) -> None:
        salt = message.cache_salt.decode("utf-8", "surrogatepass")
        params = SamplingParams(**message.params)
        self._check_prompt_logprobs(len(message.prompt_token_ids), params.prompt_logprobs)
        grammar = self._grammars.get(message.grammar)
        options: dict[str, Any] = {"priority": message.priority, "cache_salt": salt, "pooling": message.pooling}
        options |= {"caller": message.caller, "weight": message.weight}
        group = self._engine.make(str(message.number), message.prompt_token_ids, params, grammar, **options)
        if message.bad_words:
            words = tuple(map(tuple, message.bad_words))
            size = self._vocab_size
            if not all(words) or any(not 0 <= token < (size or token + 1) for word in words for token in word):
                raise InputError("bad_words: expected sequences of token ids of the model")
            for answer in group.answers:
                answer.request = replace(answer.request, bad_words=words)
        self._engine.submit(group, limited=False)  # the other side has admitted it
        self._live[message.number] = self._queued[message.number] = _Live(group, [0] * params.n)

    def _check_prompt_logprobs(self, num_tokens: int, wanted: int | None) -> None:
        """They go in one frame."""
        each = 0 if wanted is None else 1 + (self._engine.max_logprobs if wanted < 0 else wanted)
        if num_tokens * each > MAX_LOGPROBS:
            raise InputError(
                f"prompt_logprobs: {each} for each of {num_tokens} tokens are more than {MAX_LOGPROBS}; ask for fewer, "
                "or shorten the prompt"
            )

    def _cancel(self, number: int, index: int | None) -> None:
        """End a request wherever it is, and say so; one that has ended meanwhile has been told of or will be."""
        if index is not None:
            self._cancel_answer(number, index)
            return
        if number not in self._live:
            return
        self._engine.abort(str(number))
        self._forget(number)
        self._news.cancelled.append(number)

    def _cancel_answer(self, number: int, index: int) -> None:
        """End one answer; the others of its request go on."""
        live = self._live.get(number)
        if live is None or live.output.outputs[index].finish_reason is not None:
            return
        self._engine.end(live.group, index)
        unsent = len(live.output.outputs[index].token_ids) - live.sent[index]
        live.sent[index] += unsent
        self._generated_tokens += unsent
        self._news.tokens.append(Tokens(number, index, [], FinishReason.STOP))
        self._changed[number] = None  # it may have been the last

    def _forget(self, number: int) -> None:
        for requests in (self._live, self._queued, self._changed):
            requests.pop(number, None)

    def _step(self) -> None:
        totals = self._engine.totals
        steps, prefill, decode = totals.steps, totals.prefill_tokens, totals.decode_tokens
        tokens = totals.iteration_tokens
        begin = time.perf_counter()
        self._told_idle = False  # a request may come and end in one turn
        try:
            outputs = self._engine.step()
        except Exception as error:
            logger.exception("a step failed")
            self._lose_all(error)
            return
        for number in [number for number, live in self._queued.items() if not self._engine.is_waiting(live.group)]:
            self._queued.pop(number).scheduled_at = begin
        if totals.steps > steps:
            self._failures = 0
            took = 1e3 * (time.perf_counter() - begin)
            record = StepRecord(totals.steps, totals.prefill_tokens - prefill, totals.decode_tokens - decode, took)
            self._new_steps.append(record)
        if totals.iteration_tokens > tokens:
            self._step_sizes[bisect_left(STEP_SIZES, totals.iteration_tokens - tokens)] += 1
        for output in outputs:
            if output.error is not None:
                kind = "input" if output.error.startswith(FIELD) else "other"
                self._fail(int(output.request_id), kind, output.error)
            else:
                self._changed[int(output.request_id)] = None

    def _lose_all(self, error: Exception) -> None:
        """A step failed: its requests are gone, and the engine has begun afresh.

        A broken device stays broken, and ranks that are gone stay gone.
        """
        broken = isinstance(error, torch.AcceleratorError | EngineDead)
        self._failures = MAX_FAILURES if broken else self._failures + 1
        for number, live in list(self._live.items()):
            if any(answer.finish_reason is FinishReason.ABORT for answer in live.output.outputs):
                self._fail(number, "dead", "the step that computed the request failed; ask again")

    def _fail(self, number: int, kind: str, message: str) -> None:
        self._forget(number)
        self._news.failures.append(Failure(number, kind, message))

    def _publish(self) -> None:
        """Send what is new, if anything is."""
        news, now = self._news, time.monotonic()
        room = MAX_LOGPROBS
        for number in list(self._changed):
            if room > 0:  # the rest goes in the next frame
                room -= self._collect(number, news.tokens, room)
        idle = not self._busy
        if idle and not self._told_idle and now - self._told_load_at > LOAD_EVERY:
            self._ask_load()
        if (load := self._load(wait=idle)) is not None:
            news.expert_load, self._told_load_at = load, now
        if (idle and not self._told_idle) or (not idle and now - self._told_at > NUMBERS_EVERY):
            news.numbers = self._numbers()
            self._told_at, self._told_idle = now, idle
        said = news.tokens or news.failures or news.vectors or news.cancelled or news.numbers or news.pong
        if said or news.expert_load is not None:
            self._news = News()
            self._channel.send(news)

    def _load(self, *, wait: bool) -> list[list[int]] | None:
        """Counts of the experts that were asked for and have arrived."""
        if self._engine.experts is None or self._failures:
            return None
        found = self._engine.experts.arrived(wait=wait)
        return None if found is None else found.tolist()

    def _ask_load(self) -> None:
        """Have the counts of the experts copied; they go in the first frame after they have arrived."""
        if self._engine.experts is not None and not self._failures:  # the device may be broken
            self._engine.experts.ask()

    def _collect(self, number: int, tokens: list[Tokens], room: int) -> int:
        """Tokens of a request that have not been sent, with about `room` log-probabilities; how many those are.

        Those of a prompt go whole, and the numbers of a vector count as well.
        """
        live, taken = self._live[number], 0
        if live.scores and not live.output.finished:
            del self._changed[number]  # others of its n answers are still to end
            return 0
        prompt = times = cached = None
        if not live.begun:
            live.begun, times, cached = True, live.times(), live.output.num_cached_tokens
            self._prompt_tokens += len(live.output.prompt_token_ids)
            prompt = live.output.prompt_logprobs
        for index, completion in enumerate(live.output.outputs):
            sent = live.sent[index]
            if live.scores or (len(completion.token_ids) > sent and taken < room):
                entry = _tokens(number, completion, sent, room - taken)
                taken += sum(map(len, entry.logprobs or ()))
                if prompt is not None:
                    entry.prompt_logprobs, prompt = wire_prompt_logprobs(prompt), None
                    taken += sum(len(found) for found in live.output.prompt_logprobs or () if found)
                entry.times, times = times, None
                entry.num_cached_tokens, cached = cached, None
                live.sent[index] += len(entry.token_ids)
                self._generated_tokens += len(entry.token_ids)
                tokens.append(entry)
        lengths = [len(completion.token_ids) for completion in live.output.outputs]
        if lengths == live.sent:
            del self._changed[number]
            if live.output.finished:
                self._live.pop(number)
                if live.output.pooled is not None:
                    self._news.vectors.append((number, live.output.pooled))
                    taken += len(live.output.pooled)
        return taken

    def _numbers(self) -> Numbers:
        scheduler, totals = self._engine.scheduler, self._engine.totals
        records = list(self._new_steps)
        self._new_steps.clear()
        return Numbers(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            free_blocks=scheduler.pool.num_free,
            steps=totals.steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=totals.preemptions,
            prefix_hits=totals.prefix_hits,
            prefix_queries=totals.prefix_queries,
            new_steps=records,
            step_sizes=self._step_sizes,
            step_tokens=totals.iteration_tokens,
            levels=self._engine.levels,
        )


def _tokens(number: int, completion: CompletionOutput, sent: int, room: int) -> Tokens:
    """What has not been sent, or as many tokens as have this many log-probabilities."""
    end = len(completion.token_ids)
    if completion.logprobs:
        end = min(end, sent + max(1, room // max(1, len(completion.logprobs[sent]))))
    entry = Tokens(number, completion.index, completion.token_ids[sent:end])
    if end == len(completion.token_ids):
        entry.finish_reason = completion.finish_reason
        entry.stop_reason = completion.stop_reason if isinstance(completion.stop_reason, int) else None
    if completion.logprobs is not None:
        entry.logprobs = [wire_logprobs(found) for found in completion.logprobs[sent:end]]
        completion.logprobs[sent:end] = [{}] * (end - sent)  # nobody here needs them again
    return entry


def load(start: Start, tell: Callable[[str], None]) -> tuple[LLMEngine, PagedParts, dict[str, float]]:
    """The engine that was asked for, and what its start took by part. It sees token ids alone: no tokenizer."""
    tell("loading the weights")
    parts, ranks = load_ranked(start.model, LLMConfig.of(start.options), tokenizer=False, tell=tell)
    tell("compiling kernels, measuring memory, capturing graphs")
    engine = LLMEngine(parts, ranks=ranks)
    ranks.on_lost = _end_soon
    return engine, parts, parts.seconds | engine.startup_seconds


def _end_soon(cause: str) -> None:
    """The other ranks are gone, and this process is of no use without them: it ends, busy or idle, even if it hangs.

    A step that fails has this long to tell its requests. Called in a thread of its own.
    """
    time.sleep(LAST_WORDS)
    logging.shutdown()
    os._exit(1)


def ready(engine: LLMEngine, parts: PagedParts, seconds: dict[str, float]) -> Ready:
    """What the other side is told of it."""
    card = ModelCard(
        name=parts.name,
        max_model_len=engine.max_model_len,
        vocab_size=parts.vocab_size or 0,
        eos_token_ids=parts.eos_token_ids,
        dtype=str(parts.dtype).removeprefix("torch."),
        quantization=None if parts.quantized is None else "; ".join(parts.quantized.schemes),
        device=str(parts.device),
        created=int(time.time()),
        sampling=dict(parts.sampling),
        max_logprobs=engine.max_logprobs,
        embedding_sizes=embedding_sizes(parts.module),
        weight_bytes=parts.weight_bytes,
    )
    scheduler, cache = engine.scheduler, parts.config.cache
    tokens = scheduler.pool.num_blocks * cache.block_size
    about = {
        "kv_cache_size_tokens": str(tokens),
        "kv_cache_max_concurrency": f"{tokens / engine.max_model_len:.2f}",
        "block_size": str(cache.block_size),
        "cache_dtype": parts.config.kv_cache_dtype,
        "num_gpu_blocks": str(scheduler.pool.num_blocks),
        "enable_prefix_caching": str(cache.enable_prefix_caching),
        "gpu_memory_utilization": str(cache.gpu_memory_utilization),
    }
    limit = None if engine.step_seconds is None else 1e3 * engine.step_seconds
    layers = [] if engine.experts is None else list(engine.experts.layers)
    sizes = scheduler.max_num_seqs, scheduler.pool.num_blocks
    return Ready(
        card, seconds, *sizes, limit, about, answers_pings=True, expert_layers=layers, nodes=engine.ranks.nodes
    )


def serve(channel: Channel) -> int:
    """Load what the first message asks for, then work; the exit code."""
    messages: list[ToWorker] = []
    while not messages and not channel.closed:
        messages = channel.receive(wait=True)
    if channel.closed:
        return 0
    (start,) = messages  # others wait for `Ready`
    assert isinstance(start, Start), "the first message says what to load"
    logging.basicConfig(level=start.log_level, format="%(asctime)s engine %(levelname)s %(message)s")

    def tell(part: str) -> None:
        channel.send(Starting(part))  # so short that it leaves at once

    try:
        engine, parts, seconds = load(start, tell)
    except Exception as error:
        known = isinstance(error, OutpaceError)
        if not known:
            logger.exception("the model cannot be loaded")
        message = str(error) if known else f"{type(error).__name__}: {error}"
        channel.send(NotStarted(kind_of(error) if isinstance(error, OutpaceError) else "other", message))
        channel.drain(LAST_WORDS)
        return 1
    channel.send(ready(engine, parts, seconds))
    code = Worker(engine, parts, channel).run()
    if code == 0:
        engine.ranks.part()
    return code


def run(fd: int) -> int:
    """Work for the process at the other end of the socket `fd`; the exit code."""
    with socket.socket(fileno=fd) as sock:
        return serve(Channel(sock))
