"""LLMEngine: requests in, answers out, a step at a time. The only file that knows both the scheduler and the runner."""

import contextlib
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from outpace.answers import Answer, Group, make_group
from outpace.cache.block_pool import BlockPool
from outpace.cache.tiers import Tiers
from outpace.errors import NO_TOKENIZER, EngineDead, InputError, ModelError, NotSupported
from outpace.load_paged import PagedParts
from outpace.log import logger
from outpace.offload.streaming import Streaming
from outpace.ranks.leader import Ranks, let_go, starting
from outpace.runner.expert_load import ExpertLoad
from outpace.runner.start import start_runner
from outpace.runner.step_graphs import CHUNK_SIZES
from outpace.runner.threads import for_engine
from outpace.scheduler import Scheduler
from outpace.step_plan import Totals
from outpace.structured.check import SchemaCheck
from outpace.structured.compile import CompiledGrammar, Compiler
from outpace.structured.outputs import FIELD, StructuredOutputs
from outpace.structured.vocabulary import TokenVocabulary
from outpace.types import FinishReason, RequestOutput, SamplingParams, Step, StepOutput, check_vocabulary


class LLMEngine:
    """Continuous batching over one model. For one thread at a time."""

    def __init__(
        self, parts: PagedParts, tokenizer: PreTrainedTokenizerBase | None = None, ranks: Ranks | None = None
    ) -> None:
        """ranks: the other ranks, see `load_ranked`; the engine ends them when it ends."""
        self.tokenizer = tokenizer
        self.ranks = ranks or Ranks(parts.config)
        self._parts = parts
        self._config = parts.config
        whole = parts.model.stage.count == 1
        self.experts = ExpertLoad.of(parts.module, parts.device) if whole else None
        """Tokens of each expert; None: the model has no experts, or several stages, which count their own."""
        with starting(self.ranks, parts.streaming):
            self._started = start_runner(parts.model, parts.config, parts.max_model_len, secrets.randbits(63))
        self.close = weakref.finalize(self, let_go, self.ranks, parts.streaming)
        """Ends the other ranks and the streaming of layers; so does garbage collection of the engine."""
        if self.experts is not None:
            self.experts.clear()
        self._runner = self._started.runner
        self._threads = for_engine(parts.device, deterministic=parts.config.deterministic, ranks=self.ranks.size)
        asked = parts.config.scheduler.async_scheduling
        self._compiler: Compiler | None = None
        self._compiling = threading.Lock()
        self._overlap = parts.device.type == "cuda" if asked is None else asked
        self.totals = Totals()
        """Counters of what was scheduled; an error does not reset them."""
        self.epoch = 0
        """Number of failed steps: requests of an earlier epoch are lost."""
        self._begin()

    @property
    def startup_seconds(self) -> dict[str, float]:
        return self._started.seconds

    @property
    def streaming(self) -> Streaming | None:
        """Layers that are streamed to the device; None: all layers stay there."""
        return self._parts.streaming

    @property
    def step_seconds(self) -> float | None:
        """Most seconds of a step while a request is streamed; None: the step size was not chosen by time."""
        return self._started.budget.step_seconds

    @property
    def max_model_len(self) -> int:
        return self._started.limits.max_model_len

    @property
    def vocab_size(self) -> int | None:
        """Size of the vocabulary; None: unknown."""
        return self._parts.vocab_size

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of running and waiting requests."""
        return self._scheduler

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """The SamplingParams that the model's generation config sets, see the option `generation_config`."""
        return self._parts.sampling

    @property
    def default_sampling_params(self) -> SamplingParams:
        """Parameters of a request that has none."""
        return SamplingParams(**self.sampling_defaults)

    @property
    def levels(self) -> dict[str, int]:
        """Numbers of the levels of the prefix cache, by name; empty: the device's pages are the only one.

        Blocks of "host" and "file" and those in use, blocks on their way up; then totals: tokens looked for and found
        on each level, bytes by the way they were copied, blocks of files that failed.
        """
        tiers, started, totals = self._scheduler.tiers, self._started, self.totals
        if not started.num_host_blocks:
            return {}
        found, size = totals.tiers, started.host_block_bytes * self.ranks.size
        return {
            "host_blocks": tiers.host.num_blocks,
            "host_used": tiers.host.num_used,
            "file_blocks": tiers.files.num_blocks,
            "file_used": tiers.files.num_used,
            "loading": tiers.num_loading,
            "device_queries": totals.prefix_queries,
            "device_hits": totals.prefix_hits - found.host_hits - found.file_hits,
            "host_queries": found.host_queries,
            "host_hits": found.host_hits,
            "file_queries": found.file_queries,
            "file_hits": found.file_hits,
            **{f"{way.value}_bytes": blocks * size for way, blocks in found.copied.items()},
            "failed": found.failed,
        }

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return self._scheduler.has_work

    @property
    def has_room(self) -> bool:
        """Whether one more request may wait."""
        return self._scheduler.num_waiting < self._scheduler.max_waiting

    @property
    def is_behind(self) -> bool:
        """Whether `catch_up` has anything to do."""
        return bool(self._runner.deferred)

    def catch_up(self) -> None:
        """Do a part of the deferred start-up work, at most a tenth of a second. Call it while there are no requests."""
        self._runner.catch_up(idle=True)

    def make(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        grammar: CompiledGrammar | None = None,
        **options: Any,
    ) -> Group:
        """Check a request and make it, without queueing it. Options are those of `make_group`.

        grammar: the compiled `params.structured_outputs`; None: it is compiled here.
        """
        check = None
        if grammar is None and isinstance(params, SamplingParams) and params.structured_outputs is not None:
            grammar, check = self._compile(params.structured_outputs)
        if isinstance(params, SamplingParams) and params.seed is None and self._config.seed is not None:
            params = replace(params, seed=self._config.seed)
        if isinstance(params, SamplingParams) and isinstance(prompt_token_ids, list | tuple):
            params = self._fitted(params, len(prompt_token_ids))
        ends = self._parts.eos_token_ids
        group = make_group(
            request_id, prompt_token_ids, params, self.tokenizer, eos_token_ids=ends, grammar=grammar, **options
        )
        group.check = check
        self._check_vocabulary(group.answers[0].request.prompt_token_ids, params)
        self._check_logprobs(params)
        if group.answers[0].request.pooling is not None and not self._parts.model.gives_hidden:
            raise NotSupported(f"embeddings: {self._parts.name} does not give its hidden states")
        self._scheduler.check(group.answers[0].request)
        return group

    def submit(self, group: Group, *, limited: bool = True) -> RequestOutput:
        """Queue a request, `limited` by max_waiting; its output is updated in place."""
        name, first = group.output.request_id, group.answers[0]
        if name in self._groups:
            raise InputError(f"request_id: {name!r} is in use")
        group.arrival = self._scheduler.add(first.request, limited=limited)
        self._groups[name] = group
        self._answers[first.request.request_id] = first
        group.held = group.answers[1:]
        return group.output

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> RequestOutput:
        """Make and queue a request; its output is updated in place."""
        given = self.default_sampling_params if params is None else params
        return self.submit(self.make(request_id, prompt_token_ids, given, **options))

    def abort(self, request_id: str) -> bool:
        """End a request in any state; False: there is none with this id."""
        group = self._groups.get(request_id)
        return group is not None and self.leave(group)

    def leave(self, group: Group) -> bool:
        """Abort a request; False: it is not queued or running."""
        if self._groups.get(group.output.request_id) is not group:
            return False
        for answer in group.answers:
            if answer.completion.finish_reason is None:
                self._end(answer, FinishReason.ABORT)
        return True

    def end(self, group: Group, index: int) -> None:
        """End one answer of a request as if a stop string had appeared; its other answers continue."""
        answer = group.answers[index]
        if answer.completion.finish_reason is None:
            self._end(answer, FinishReason.STOP)
            if index == 0 and group.held:
                self._add_held(group)

    def is_waiting(self, group: Group) -> bool:
        """Whether a request waits for its first step: its first answer waits, and the others wait for that one."""
        return self._scheduler.is_waiting(group.answers[0].request.request_id)

    def step(self) -> list[RequestOutput]:
        """Launch the next step, then read the result of the previous one; returns the outputs that changed.

        After an error all requests are lost, and the engine is ready for new ones.
        """
        try:
            if self._threads is not None:
                self._threads.before_step()
            step = self._scheduler.schedule()
            with self.ranks.together():
                self.ranks.launch(step)
                self._sent.append(step)
                self._launch_next(step)
            if self.experts is not None:
                self.experts.keep_up(self.totals.prefill_tokens + self.totals.decode_tokens)
            ahead = 1 if self._overlap and step.sequences else 0
            changed: dict[str, RequestOutput] = {}
            while len(self._in_flight) > ahead:
                output = self._in_flight.popleft()()
                self.ranks.check()  # a collective that was given up leaves numbers that mean nothing
                self._take(output, changed)
            if self._threads is not None and not self.has_unfinished_requests:
                self._threads.idle()
            return list(changed.values())
        except BaseException as error:
            self.epoch += 1
            lost = list(self._groups.values())
            self._drain(error)
            self._begin()
            for group in lost:
                group.lose()
            if not isinstance(error, EngineDead) and (cause := self.ranks.cause_of(error)) is not None:
                raise cause from error
            raise

    def _drain(self, error: BaseException) -> None:
        """After an error: receive what other stages have sent, unless these have ended."""
        with contextlib.suppress(Exception):
            while self._sent and not isinstance(error, EngineDead):
                self.ranks.check()
                self._runner.launch(self._sent.popleft())

    def _launch_next(self, step: Step) -> None:
        """Launch steps that were sent to all stages. This rank has the last stage, so earlier stages run newer steps.

        If the newest step is empty, all work is in flight, so wait for the oldest step that is not.
        """
        before, waits = self._parts.model.stage.count - 1, not step.sequences
        while self._sent and (len(self._sent) > before or waits):
            self._in_flight.append(self._runner.launch(launched := self._sent.popleft()))
            waits = waits and not launched.sequences

    def _begin(self) -> None:
        cache, scheduler, started = self._config.cache, self._config.scheduler, self._started
        limits = started.limits
        pool = BlockPool(started.num_blocks, cache.block_size, enable_prefix_caching=cache.enable_prefix_caching)
        tiers = Tiers(
            pool,
            started.num_host_blocks,
            started.num_file_blocks,
            keep_prefixes=self._config.cache.swap_space == 0,
            totals=self.totals.tiers,
        )
        self._scheduler = Scheduler(
            pool,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            max_waiting=scheduler.max_waiting,
            max_chunk_beside_decodes=scheduler.max_chunk_beside_decodes,
            max_streamed_tokens=started.budget.streamed_tokens,
            streamed_chunk=started.budget.streamed_chunk,
            longest_first=scheduler.policy == "longest_first",
            padded_sizes=CHUNK_SIZES if self._config.cuda_graphs else (),
            tiers=tiers,
            depth=self._parts.model.stage.count,
            model=self._parts.name,
            totals=self.totals,
        )
        self.ranks.reset()
        self._runner.reset()
        self._groups: dict[str, Group] = {}
        self._answers: dict[str, Answer] = {}
        self._sent: deque[Step] = deque()
        """Steps that other stages have, and this one has not launched yet."""
        self._in_flight: deque[Callable[[], StepOutput]] = deque()

    def _take(self, output: StepOutput, changed: dict[str, RequestOutput]) -> None:
        """Hand the tokens of a step to their answers."""
        now = time.perf_counter()
        for name, problem in output.failed.items():
            if name in self._answers:
                group = self._answers[name].group
                self._fail(group, problem)
                changed[group.output.request_id] = group.output
        for name, found in output.prompt_logprobs.items():
            if name in self._answers:
                self._answers[name].group.add_prompt_logprobs(found)
        for name, vector in output.pooled.items():
            if name in self._answers:
                self._answers[name].group.output.pooled = vector
        for sequence, reason in self._scheduler.update(output):
            name = sequence.request.request_id
            answer = self._answers[name]
            group, metrics = answer.group, answer.group.output.metrics
            metrics.first_token_time = metrics.first_token_time or now
            metrics.last_token_time = now
            if group.output.num_cached_tokens is None:
                group.output.num_cached_tokens = sequence.num_cached or 0
            if not sequence.prompt_only:
                reason = answer.add(output.token_ids[name], reason, output.logprobs.get(name))
            if reason is not None:
                self._end(answer, reason)
            if group.held:
                self._add_held(group)
            changed[group.output.request_id] = group.output

    def _add_held(self, group: Group) -> None:
        """The first answer has computed the prompt: the others share its pages."""
        for answer in group.held:
            self._answers[answer.request.request_id] = answer
            self._scheduler.add(answer.request, arrival=group.arrival)
        group.held = []

    def _end(self, answer: Answer, reason: FinishReason) -> None:
        name, group = answer.request.request_id, answer.group
        self._scheduler.abort(name)
        self._answers.pop(name, None)
        group.held = [held for held in group.held if held is not answer]
        answer.end(reason)
        if group.output.finished:
            del self._groups[group.output.request_id]

    def _fail(self, group: Group, problem: str) -> None:
        """End a request with an error; other requests continue."""
        logger.warning("request %s failed: %s", group.output.request_id, problem)
        group.output.error = problem
        for answer in group.answers:
            if answer.completion.finish_reason is None:
                self._end(answer, FinishReason.ERROR)

    def _compile(self, asked: StructuredOutputs) -> tuple[CompiledGrammar, SchemaCheck | None]:
        """The grammar of an answer, and a check of what the grammar does not enforce."""
        if self.tokenizer is None:
            raise ModelError(f"structured_outputs: they need a tokenizer; {NO_TOKENIZER}")
        with self._compiling:
            if self._compiler is None:
                parts = self._parts
                self._compiler = Compiler(TokenVocabulary.of(self.tokenizer, parts.vocab_size, parts.eos_token_ids))
        grammar = self._compiler.compile(asked)
        if not grammar.later or not isinstance(asked.json, str):
            return grammar, None
        return grammar, SchemaCheck(asked.json, grammar.later, f"{FIELD}.json")

    @property
    def max_logprobs(self) -> int:
        """Most log-probabilities of a token that a request may ask for."""
        most, size = self._config.max_logprobs, self._parts.vocab_size or 2**31
        return size if most < 0 else min(most, size)

    def _fitted(self, params: SamplingParams, num_prompt: int) -> SamplingParams:
        """The parameters with no more new tokens than there is room for; a prompt that leaves none is refused later."""
        room, pool = max(1, self.max_model_len - num_prompt), self._scheduler.pool
        if params.max_tokens is None:
            room = max(1, min(room, pool.num_blocks * pool.block_size + 1 - num_prompt))
        elif params.max_tokens <= room:
            return params
        return replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))

    def _check_logprobs(self, params: SamplingParams) -> None:
        size = self._parts.vocab_size or 2**31
        counts = (("logprobs", None if params.logprob_token_ids else params.logprobs),)
        for name, asked in (*counts, ("prompt_logprobs", params.prompt_logprobs)):
            if asked is not None and (size if asked < 0 else min(asked, size)) > self.max_logprobs:
                raise InputError(
                    f"{name}: {asked if asked >= 0 else 'the whole vocabulary'} is more than "
                    f"max_logprobs={self.max_logprobs}; ask for fewer, or start with a larger max_logprobs (-1: all)"
                )

    def _check_vocabulary(self, prompt: Sequence[int], params: SamplingParams) -> None:
        named: dict[str, Sequence[int]] = {
            "prompt_token_ids": prompt,
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": list(dict(params.logit_bias or ())),
            "allowed_token_ids": params.allowed_token_ids or (),
            "logprob_token_ids": params.logprob_token_ids or (),
        }
        for name, ids in named.items():
            if ids:
                check_vocabulary(name, self._parts.vocab_size, max(ids))
