"""The loop of the engine process: read messages, run a step, send the results. One thread.

Memory does not grow while the server reads slowly: there is at most one unsent frame. When it has been sent, the next
one is made of everything that is new by then. Until then answers stay in their requests, which `max_tokens` bounds, and
the server admits a bounded number of requests.
"""

import time
from bisect import bisect_left
from collections import deque
from dataclasses import replace
from typing import Any

import torch

from outpace.errors import EngineDead, InputError, OutpaceError
from outpace.llm_engine import LLMEngine
from outpace.load_paged import PagedParts
from outpace.log import logger
from outpace.server.channel import Channel
from outpace.server.engine import STEP_SIZES, EngineStatus, StepRecord
from outpace.server.messages import Add, Cancel, CountExperts, Learn, News, Ping, Ready, ToWorker, Unlearn, kind_of
from outpace.server.model_card import fixed_status, model_card
from outpace.server.unsent import MAX_LOGPROBS, Live, Unsent
from outpace.structured.outputs import FIELD
from outpace.structured.wire import ReceivedGrammars
from outpace.types import FinishReason, SamplingParams

STATUS_EVERY = 0.1  # seconds
LOAD_EVERY = 2.0  # seconds between counts of the experts that were not requested
MAX_FAILURES = 2  # failed steps in a row
LAST_WORDS = 1.0  # seconds to send the last frames


class Worker:
    """Runs an engine for the server at the other end of a channel."""

    def __init__(self, engine: LLMEngine, parts: PagedParts, channel: Channel) -> None:
        self._engine = engine
        self._parts = parts
        self._channel = channel
        self._grammars = ReceivedGrammars()
        self._queued: dict[int, Live] = {}  # not in any step yet
        self._unsent = Unsent()
        self._fixed = fixed_status(engine, parts)
        self._new_steps: deque[StepRecord] = deque(maxlen=64)
        self._step_sizes = [0] * (len(STEP_SIZES) + 1)
        self._failures = 0  # in a row
        self._status_at = self._load_at = 0.0  # when they were last sent
        self._idle_sent = True  # the last status that was sent says that the engine is idle
        self._last_sent = False

    @property
    def _busy(self) -> bool:
        return self._engine.has_unfinished_requests

    @property
    def _broken(self) -> bool:
        return self._failures >= MAX_FAILURES

    def ready(self, startup_seconds: dict[str, float]) -> Ready:
        """The message that the model is loaded."""
        status = replace(self._fixed, startup_seconds=startup_seconds)
        card = model_card(self._engine, self._parts)
        return Ready(card, status, self._engine.scheduler.max_num_seqs)

    def run(self) -> int:
        """Work until the server is gone (returns 0) or the engine is broken (returns 1)."""
        while not self._channel.closed and not self._broken:
            try:
                self.turn()
            except Exception:
                logger.exception("the engine cannot go on")
                self._failures = MAX_FAILURES
        self._send_rest()
        return int(self._broken)

    def _send_rest(self) -> None:
        """Send everything that is left, in several frames if one is too small."""
        more = True
        while more and not self._channel.closed:
            self._channel.drain(LAST_WORDS)
            more = self._channel.free and self._publish()

    def turn(self) -> None:
        """Read messages, run one step, send what is new. Sleeps while there is nothing to do."""
        unsent = self._unsent.changed and self._channel.free  # more log-probabilities than fit into one frame
        idle = not self._busy and not unsent
        for message in self._channel.receive(wait=idle and not self._engine.is_behind):
            self._handle(message)
        if self._busy:
            self._idle_sent = False  # a request may come and end in this turn
            self._step()
        elif idle and self._engine.is_behind:
            self._engine.catch_up()
        if self._channel.free and not self._broken:  # `run` sends the last frames
            self._publish()

    def _handle(self, message: ToWorker) -> None:
        if isinstance(message, Cancel):
            self._cancel(message.number, message.index)
        elif isinstance(message, Ping):
            self._unsent.news.pong = True
        elif isinstance(message, CountExperts):
            self._count_experts()
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
            size = self._parts.vocab_size
            if not all(words) or any(not 0 <= token < (size or token + 1) for word in words for token in word):
                raise InputError("bad_words: expected sequences of token ids of the model")
            for answer in group.answers:
                answer.request = replace(answer.request, bad_words=words)
        self._engine.submit(group, limited=False)  # the server has admitted it
        self._unsent.live[message.number] = self._queued[message.number] = Live(group, [0] * params.n)

    def _check_prompt_logprobs(self, num_tokens: int, wanted: int | None) -> None:
        """Refuse more log-probabilities than fit into one frame."""
        each = 0 if wanted is None else 1 + (self._engine.max_logprobs if wanted < 0 else wanted)
        if num_tokens * each > MAX_LOGPROBS:
            raise InputError(
                f"prompt_logprobs: {each} for each of {num_tokens} tokens are more than {MAX_LOGPROBS}; ask for fewer, "
                "or shorten the prompt"
            )

    def _cancel(self, number: int, index: int | None) -> None:
        """End a request, queued or running, and confirm it. Nothing is to do if it has already ended."""
        if index is not None:
            self._cancel_answer(number, index)
            return
        if number not in self._unsent.live:
            return
        self._engine.abort(str(number))
        self._queued.pop(number, None)
        self._unsent.forget(number)
        self._unsent.news.cancelled.append(number)

    def _cancel_answer(self, number: int, index: int) -> None:
        """End one answer; the others of its request go on."""
        live = self._unsent.live.get(number)
        if live is None or live.output.outputs[index].finish_reason is not None:
            return
        self._engine.end(live.group, index)
        self._unsent.drop_answer(number, index)

    def _step(self) -> None:
        totals = self._engine.totals
        steps, prefill, decode = totals.steps, totals.prefill_tokens, totals.decode_tokens
        tokens = totals.iteration_tokens
        begin = time.perf_counter()
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
                self._unsent.changed[int(output.request_id)] = None

    def _lose_all(self, error: Exception) -> None:
        """Fail all requests after a failed step: the engine has dropped them.

        There is no retry if the device is broken or other ranks are gone.
        """
        broken = isinstance(error, torch.AcceleratorError | EngineDead)
        self._failures = MAX_FAILURES if broken else self._failures + 1
        for number, live in list(self._unsent.live.items()):
            if any(answer.finish_reason is FinishReason.ABORT for answer in live.output.outputs):
                self._fail(number, "dead", "the step that computed the request failed; ask again")

    def _fail(self, number: int, kind: str, message: str) -> None:
        self._queued.pop(number, None)
        self._unsent.fail(number, kind, message)

    def _publish(self) -> bool:
        """Send what is new; returns whether there was anything."""
        news, now = self._unsent.collect(), time.monotonic()
        idle = not self._busy
        if idle and not self._idle_sent and now - self._load_at > LOAD_EVERY:
            self._count_experts()
        if (load := self._expert_load(wait=idle)) is not None:
            news.expert_load, self._load_at = load, now
        if (idle and not self._idle_sent) or (not idle and now - self._status_at > STATUS_EVERY):
            news.status = self._status()
            self._status_at, self._idle_sent = now, idle
        rest = News()
        if self._broken and self._unsent.changed:  # errors wait for the last frame: until then the server seems ready
            rest.failures, news.failures = news.failures, []
        news.last = self._broken and not self._last_sent and not self._unsent.changed
        self._last_sent |= news.last
        if is_new := news != News():
            self._unsent.news = rest
            self._channel.send(news)
        return is_new

    def _expert_load(self, *, wait: bool) -> list[list[int]] | None:
        """Counts of the experts, if they were asked for and have arrived."""
        if self._engine.experts is None or self._failures:
            return None
        found = self._engine.experts.arrived(wait=wait)
        return None if found is None else found.tolist()

    def _count_experts(self) -> None:
        """Start copying the counts of the experts; they go in the first frame after they have arrived."""
        if self._engine.experts is not None and not self._failures:  # the device may be broken
            self._engine.experts.ask()

    def _status(self) -> EngineStatus:
        scheduler, totals = self._engine.scheduler, self._engine.totals
        records = list(self._new_steps)
        self._new_steps.clear()
        return replace(
            self._fixed,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            free_blocks=scheduler.pool.num_free,
            steps=totals.steps,
            prompt_tokens=self._unsent.prompt_tokens,
            generated_tokens=self._unsent.generated_tokens,
            preemptions=totals.preemptions,
            prefix_hits=totals.prefix_hits,
            prefix_queries=totals.prefix_queries,
            last_steps=records,
            step_sizes=self._step_sizes,
            step_tokens=totals.iteration_tokens,
            levels=self._engine.levels,
        )
