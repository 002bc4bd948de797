"""The answers to one prompt as they grow: tokens, text, log-probabilities, and why each ended."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

from transformers import PreTrainedTokenizerBase

from outpace.errors import NO_TOKENIZER, InputError, ModelError
from outpace.structured.compile import CompiledGrammar
from outpace.structured.outputs import StructureCheck
from outpace.tokenizer import Detokenizer, token_texts
from outpace.types import (
    CompletionOutput,
    FinishReason,
    Logprob,
    Pooling,
    Request,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
    WatchLogits,
)


@dataclass(slots=True, eq=False)
class Answer:
    """One of the n answers to a prompt: a request of its own for the scheduler."""

    request: Request
    completion: CompletionOutput
    group: "Group"
    text: Detokenizer | None

    def add(self, token: int, reason: FinishReason | None, logprobs: TokenLogprobs | None) -> FinishReason | None:
        """Append a token. reason: set if the scheduler ends the request here. Returns why the answer ends, or None."""
        completion, params = self.completion, self.request.params
        completion.token_ids.append(token)
        if logprobs is not None and completion.logprobs is not None:
            completion.logprobs.append(with_texts(logprobs, self.group.tokenizer))
            total = completion.cumulative_logprob or 0.0
            completion.cumulative_logprob = total + logprobs[token].logprob
        if self.text is not None:
            self.text.add(token)
            if self.text.stopped:
                completion.stop_reason = self.text.stop_reason
                return FinishReason.STOP
        if reason is FinishReason.STOP and token in params.stop_token_ids:
            completion.stop_reason = token
        return reason

    def end(self, reason: FinishReason) -> None:
        """Set why the answer ended, and complete its text."""
        self.completion.finish_reason = reason
        if self.text is not None:
            self.text.finish()
        if self.group.check is not None and reason is FinishReason.STOP:
            self.completion.structure_check = self.group.check(self.completion.text)
        self.group.output.finished = all(each.completion.finish_reason for each in self.group.answers)


@dataclass(slots=True, eq=False)
class Group:
    """A prompt with its answers."""

    output: RequestOutput
    params: SamplingParams
    tokenizer: PreTrainedTokenizerBase | None
    answers: list[Answer] = field(default_factory=list)
    held: list[Answer] = field(default_factory=list)
    """Answers that start when the first one has computed the prompt, which they share."""
    arrival: int = 0
    """Its place in the queue, which all its answers keep."""
    check: Callable[[str], StructureCheck] | None = None
    """Checks the rules that the grammar does not enforce."""

    def lose(self) -> None:
        """Abort the answers that have not ended, because a step failed."""
        for answer in self.answers:
            if answer.completion.finish_reason is None:
                answer.end(FinishReason.ABORT)

    def add_prompt_logprobs(self, found: Mapping[int, TokenLogprobs]) -> None:
        assert self.output.prompt_logprobs is not None, "asked for"
        for position, entry in found.items():
            self.output.prompt_logprobs[position] = with_texts(entry, self.tokenizer)


def make_group(
    request_id: str,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    eos_token_ids: tuple[int, ...] = (),
    prompt: str | None = None,
    priority: int = 0,
    cache_salt: str = "",
    caller: str = "",
    weight: float = 1.0,
    streamed: bool = True,
    pooling: Pooling | None = None,
    grammar: CompiledGrammar | None = None,
    watch: WatchLogits | None = None,
) -> Group:
    """A prompt with n answers, none of them started."""
    _check_types(request_id, prompt_token_ids, params, priority, cache_salt)
    _check_caller(caller, weight, streamed, pooling)
    if grammar is not None and not (eos_token_ids or params.stop_token_ids):
        raise InputError("structured_outputs: the model has no end-of-sequence token; give stop_token_ids")
    metrics = RequestMetrics(arrival_time=time.perf_counter())
    texts = tokenizer if params.detokenize else None
    group = Group(RequestOutput(request_id, prompt, list(prompt_token_ids), [], False, metrics), params, texts)
    if params.prompt_logprobs is not None:
        group.output.prompt_logprobs = [None] * len(group.output.prompt_token_ids)
    bad_words = _bad_words(params, tokenizer)
    for index in range(params.n):
        request = Request(
            request_id=request_id if params.n == 1 else f"{request_id}\0{index}",
            prompt_token_ids=tuple(prompt_token_ids),
            params=_of_answer(params, index),
            eos_token_ids=eos_token_ids,
            priority=priority,
            cache_salt=cache_salt,
            caller=caller,
            weight=weight,
            streamed=streamed,
            pooling=pooling,
            bad_words=bad_words,
            grammar=grammar,
            watch=watch,
        )
        text = _detokenizer(params, texts, prompt_token_ids)
        completion = CompletionOutput(index, source=text, logprobs=[] if params.wants_logprobs else None)
        group.answers.append(Answer(request, completion, group, text))
    group.output.outputs = [answer.completion for answer in group.answers]
    return group


def _check_types(request_id: object, prompt: object, params: object, priority: object, salt: object) -> None:
    if not isinstance(request_id, str) or "\0" in request_id:
        raise InputError(f"request_id: expected a string without NUL, got {request_id!r:.80}")
    if not isinstance(prompt, list | tuple):
        raise InputError(f"prompt_token_ids: expected a list of token ids, got {prompt!r:.80}")
    if not isinstance(params, SamplingParams):
        raise InputError(f"sampling_params: expected SamplingParams, got {params!r:.80}")
    if type(priority) is not int:
        raise InputError(f"priority: expected an integer, got {priority!r:.80}")
    if not isinstance(salt, str):
        raise InputError(f"cache_salt: expected a string, got {salt!r:.80}")


def _check_caller(caller: object, weight: object, streamed: object, pooling: object) -> None:
    if not isinstance(caller, str):
        raise InputError(f"caller: expected a string, got {caller!r:.80}")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0.01 <= weight <= 100:
        raise InputError(f"weight: expected a number from 0.01 to 100, got {weight!r:.80}")
    if not isinstance(streamed, bool):
        raise InputError(f"streamed: expected True or False, got {streamed!r:.80}")
    if pooling not in (None, *get_args(Pooling)):
        raise InputError(f"pooling: expected one of {', '.join(get_args(Pooling))}, got {pooling!r:.80}")


def with_texts(logprobs: TokenLogprobs, tokenizer: PreTrainedTokenizerBase | None) -> TokenLogprobs:
    """Log-probabilities with the text of each token added."""
    if tokenizer is None:
        return logprobs
    texts = token_texts(tokenizer, list(logprobs))
    entries = zip(logprobs.items(), texts, strict=True)
    return {token: Logprob(found.logprob, found.rank, text) for (token, found), text in entries}


def _of_answer(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of one of n answers: each has its own seed, and only the first returns prompt_logprobs."""
    if params.n == 1:
        return params
    seed = None if params.seed is None else (params.seed + index) % 2**64
    return replace(params, n=1, seed=seed, prompt_logprobs=params.prompt_logprobs if index == 0 else None)


def _detokenizer(
    params: SamplingParams, tokenizer: PreTrainedTokenizerBase | None, prompt: Sequence[int]
) -> Detokenizer | None:
    if tokenizer is None:
        if params.stop:
            raise ModelError(f"stop: stop strings need a tokenizer; {NO_TOKENIZER}, or use stop_token_ids")
        return None
    return Detokenizer(
        tokenizer,
        skip_special_tokens=params.skip_special_tokens,
        stop=params.stop,
        include_stop_str_in_output=params.include_stop_str_in_output,
        prompt_token_ids=prompt,
    )


def _bad_words(params: SamplingParams, tokenizer: PreTrainedTokenizerBase | None) -> tuple[tuple[int, ...], ...]:
    """Each word as tokens, with and without a space before it: both forms occur inside a text."""
    if not params.bad_words:
        return ()
    if tokenizer is None:
        raise ModelError(f"bad_words: they need a tokenizer; {NO_TOKENIZER}")
    forms: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        for text in (word, f" {word.lstrip()}"):
            try:
                ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
            except (TypeError, ValueError) as error:  # a lone surrogate, say
                raise InputError(f"bad_words: the tokenizer cannot read {word!r:.80}") from error
            if not ids:
                raise InputError(f"bad_words: {word!r} has no tokens")
            forms[ids] = None
    return tuple(forms)
