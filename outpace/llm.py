"""LLM: prompts in, answers out."""

import itertools
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from jinja2 import TemplateError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from transformers import PreTrainedTokenizerBase

from outpace.answers import Group
from outpace.config import ConfigLike, LLMConfig
from outpace.errors import NO_TOKENIZER, InputError, ModelError, NotSupported, StateError
from outpace.llm_engine import LLMEngine
from outpace.log import by_part, logger
from outpace.ranks.leader import load_ranked
from outpace.turns import Turns
from outpace.types import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    FinishReason,
    Pooling,
    RequestOutput,
    SamplingParams,
)

Prompt = str | list[int] | Mapping[str, Any]
"""Text, token ids, or vLLM's {"prompt": text} or {"prompt_token_ids": [...]}, perhaps with a "cache_salt"."""
Message = dict[str, Any]

LOST = "the request was lost, because a step failed in another thread; send it again"


class LLM:
    """A model with its tokenizer: a name, a folder, a .gguf file, a live module, or nothing for the default model.

    Requests of several threads run together in the same steps.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | nn.Module | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: ConfigLike = None,
        **options: Any,
    ) -> None:
        if not isinstance(tokenizer, PreTrainedTokenizerBase | None):
            raise InputError(f"tokenizer: expected a Hugging Face tokenizer, got {type(tokenizer).__name__}")
        begin = time.perf_counter()
        parts, ranks = load_ranked(model, LLMConfig.of(config, **options), tokenizer=tokenizer or True)
        self.config, self.name = parts.config, parts.name
        self.dtype, self.dtype_reason, self.device = parts.dtype, parts.dtype_reason, parts.device
        self.quantized = parts.quantized
        """The quantized weights, and how; None: no weights are quantized."""
        self.tokenizer = parts.tokenizer
        self._engine: LLMEngine | None = LLMEngine(parts, self.tokenizer, ranks)
        self.startup_seconds = parts.seconds | self._engine.startup_seconds | {"all": time.perf_counter() - begin}
        """Seconds of each part of the start."""
        self._numbers = itertools.count()
        self._lock = Turns()  # one thread runs the next step, for the requests of all threads
        self._tokenizing = threading.Lock()  # steps do not wait while a long prompt is tokenized
        logger.info("ready: %s", by_part(self.startup_seconds, parts.weight_bytes))

    @property
    def engine(self) -> LLMEngine:
        """The engine that runs the requests, for callers of `add_request`, `step` and `abort`."""
        if self._engine is None:
            raise StateError("the LLM is shut down; make a new one")
        return self._engine

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and answer together."""
        return self.engine.max_model_len

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer each prompt (text, token ids or a dict of either), with the same parameters or one for each.

        priority: one for all prompts, or one for each; smaller is sooner. If the grammar of an answer fails, its
        `finish_reason` is "error", and the other answers continue.
        """
        work = _pair(_as_prompts(prompts), sampling_params or self.get_default_sampling_params())
        ranks = _priorities(priority, len(work))
        # all requests are made before one runs, so that a bad one is an error at once
        groups = [self._make(*each, priority=rank, streamed=False) for each, rank in zip(work, ranks, strict=True)]
        return self._run(groups, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one or several conversations, formatted by the model's chat template."""
        many = isinstance(messages, list) and messages and isinstance(messages[0], list)
        conversations: Any = messages if many else [messages]
        prompts = [self.apply_chat_template(conversation, **template) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, priority=priority)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "mean",
        normalize: bool = True,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """One vector for each prompt: the mean or the last of its hidden states, scaled to length 1 if `normalize`."""
        params, groups = SamplingParams(max_tokens=0), []
        for prompt in _as_prompts(prompts):
            groups.append(self._make(prompt, params, pooling=pooling, streamed=False))
        outputs = self._run(groups, use_tqdm=use_tqdm)
        return [_embedding(output, normalize) for output in outputs]

    def prompt_logits(
        self, prompts: Sequence[list[int]], watch: Callable[[int, int, torch.Tensor], None], *, use_tqdm: bool = True
    ) -> None:
        """Compute prompts of token ids, and pass the logits of every position to `watch`; they are not stored.

        `watch(prompt, position, logits)` is called while the steps run: row i of logits [T, V], on the model's device,
        predicts the token at `position + i` of that prompt. A piece comes again if its request was preempted.
        """
        params = SamplingParams(max_tokens=0, detokenize=False)
        groups = [
            self._make(ids, params, watch=partial(watch, index), streamed=False) for index, ids in enumerate(prompts)
        ]
        self._run(groups, use_tqdm=use_tqdm)

    def apply_chat_template(self, messages: list[Message], **template: Any) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins."""
        tokenizer = self._need_tokenizer("chat")
        if tokenizer.chat_template is None and "chat_template" not in template:
            raise ModelError("chat: the tokenizer has no chat template; use generate, or pass chat_template=")
        if not isinstance(messages, Sequence) or not messages:
            raise InputError(f"messages: expected a list of dicts with role and content, got {messages!r:.80}")
        for position, message in enumerate(messages):
            if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
                raise InputError(f"messages[{position}]: expected a dict with role and content, got {message!r}")
        if refused := {"tokenize", "return_dict", "return_tensors"} & template.keys():
            raise InputError(f"{min(refused)}: token ids are returned as a list; remove it")
        options = {"add_generation_prompt": True, **template, "tokenize": True, "return_dict": True}
        try:
            encoded: Any = tokenizer.apply_chat_template(messages, **options)
        except (TemplateError, TypeError) as error:
            raise InputError(f"messages: the model's chat template refuses them ({error})") from error
        return [int(token) for token in encoded["input_ids"]]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Answer one prompt, yielding its output, always the same object, whenever it has grown.

        Stop early by leaving the loop.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        return self._follow(self._make(prompt, params))

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of requests without any: the model's generation config, see `generation_config`."""
        return self.engine.default_sampling_params

    def expert_load(self) -> torch.Tensor:
        """Tokens of each expert since the start, [layers with experts, experts], int64.

        [0, 0] for a model without experts. Waits for the running step.
        """
        if (stages := self.engine.ranks.config.pipeline_parallel.pp_size) > 1:
            raise NotSupported(
                f"expert_load: each of {stages} stages counts only the experts of its own layers; use one stage"
            )
        with self._lock:
            experts = self.engine.experts
            return torch.zeros(0, 0, dtype=torch.int64) if experts is None else experts.read()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        return self._need_tokenizer("get_tokenizer")

    def shutdown(self) -> None:
        """Free the model, the pages and the graphs, and end the other ranks. Running requests are lost."""
        with self._lock:
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.close()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _make(self, prompt: Prompt, params: SamplingParams, **options: Any) -> Group:
        if not isinstance(params, SamplingParams):
            raise InputError(f"sampling_params: expected SamplingParams, got {params!r:.80}")
        given = _as_dict(prompt)
        ids = self.tokenize(given.get("prompt_token_ids", given.get("prompt")))
        more = {"prompt": given.get("prompt"), "cache_salt": given.get("cache_salt", ""), **options}
        return self.engine.make(f"llm-{next(self._numbers)}", ids, params, **more)

    def _run(self, groups: list[Group], *, use_tqdm: bool) -> list[RequestOutput]:
        """Run requests to their ends; each is queued as soon as there is room."""
        todo, epoch = deque(self._in_order(groups)), self.engine.epoch
        try:
            with _progress(len(groups), shown=use_tqdm) as advance:
                while not all(group.output.finished for group in groups):
                    with self._lock:
                        while todo and self.engine.has_room:
                            self.engine.submit(todo.popleft())
                        self._step(epoch)
                    advance(groups)
        finally:
            self._leave(groups)
        self._check_kept(groups)
        return [group.output for group in groups]

    def _in_order(self, groups: list[Group]) -> list[Group]:
        """The requests in the scheduler's order, because its queue may have no room for all of them."""
        if self.config.scheduler.policy == "arrival":
            return groups
        firsts = [(group.answers[0].request, group) for group in groups]
        firsts.sort(key=lambda each: (each[0].priority, -each[0].max_tokens))
        return [group for _, group in firsts]

    def _follow(self, group: Group) -> Iterator[RequestOutput]:
        """Yield the output of a request whenever it has grown; other threads may run the steps."""
        output, seen, epoch = group.output, 0, self.engine.epoch
        try:
            with self._lock:
                self.engine.submit(group)
            while not output.finished or output.num_tokens > seen:  # other threads may have run its last steps
                with self._lock:
                    if output.num_tokens == seen:
                        self._step(epoch)
                if output.num_tokens > seen:
                    seen = output.num_tokens
                    yield output
            self._check_kept([group])
            if output.error is not None:
                raise InputError(output.error)
        finally:
            self._leave([group])

    def _step(self, epoch: int) -> None:
        if self.engine.epoch != epoch:
            self.engine.ranks.check()
            raise StateError(LOST)
        self.engine.step()

    def _check_kept(self, groups: list[Group]) -> None:
        """Raise if a request was aborted: no caller aborts a request that it waits for, so a failed step lost it."""
        if any(each.finish_reason is FinishReason.ABORT for group in groups for each in group.output.outputs):
            self.engine.ranks.check()
            raise StateError(LOST)

    def _leave(self, groups: list[Group]) -> None:
        """Abort the requests that have not finished."""
        with self._lock:
            if self._engine is not None:
                for group in groups:
                    self._engine.leave(group)

    def tokenize(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a prompt: text is tokenized, a list is checked."""
        if isinstance(prompt, str):
            tokenizer = self._need_tokenizer("generate")
            try:
                with self._tokenizing:
                    prompt = list(tokenizer(prompt)["input_ids"])
            except (TypeError, ValueError) as error:
                half = any("\ud800" <= character <= "\udfff" for character in str(prompt))
                why = "it has half of a surrogate pair; remove it" if half else str(error)
                raise InputError(f"prompt: the tokenizer cannot read it ({why})") from error
        if not isinstance(prompt, list | tuple) or not prompt or not all(type(token) is int for token in prompt):
            raise InputError(f"prompt: expected text or token ids that are not empty, got {prompt!r:.80}")
        return list(prompt)

    def _need_tokenizer(self, what: str) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise ModelError(f"{what}: the model has no tokenizer; {NO_TOKENIZER}, or prompts as token ids")
        return self.tokenizer


@contextmanager
def _progress(total: int, *, shown: bool) -> Iterator[Callable[[list[Group]], None]]:
    """A progress bar with tokens/s for two or more requests, only on terminals and in notebooks."""
    console = Console(stderr=True)
    if not shown or total < 2 or not (console.is_terminal or console.is_jupyter):
        yield lambda groups: None
        return
    columns = (
        *(TextColumn("Generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
    )
    begin = last = time.perf_counter()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("Generating", total=total, speed=0.0)

        def advance(groups: list[Group]) -> None:
            nonlocal last
            now = time.perf_counter()
            if now - last > 0.1:
                last = now
                done = sum(group.output.finished for group in groups)
                tokens = sum(group.output.num_tokens for group in groups)
                bar.update(task, completed=done, speed=tokens / (now - begin))

        yield advance
        bar.update(task, completed=total)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, list | tuple) or not prompts:
        raise InputError(f"prompts: expected text, token ids or a list of them, got {prompts!r:.80}")
    if isinstance(prompts[0], int):
        return [list(prompts)]  # one prompt as token ids
    return list(prompts)


def _embedding(output: RequestOutput, normalize: bool) -> EmbeddingRequestOutput:
    assert output.pooled is not None, "a request for a vector ends with one"
    length = math.sqrt(math.fsum(value * value for value in output.pooled)) if normalize else 1.0
    vector = [value / (length or 1.0) for value in output.pooled]
    return EmbeddingRequestOutput(output.request_id, output.prompt_token_ids, EmbeddingOutput(vector))


def _as_dict(prompt: Prompt) -> Mapping[str, Any]:
    """A prompt as vLLM's dict."""
    if not isinstance(prompt, Mapping):
        return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    if unknown := sorted(map(str, prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"})):
        raise InputError(f"prompt: {unknown[0]!r} is unknown; a dict has prompt or prompt_token_ids, and cache_salt")
    if not isinstance(prompt.get("prompt", ""), str):
        raise InputError(f"prompt: expected text in the dict's prompt, got {prompt['prompt']!r:.80}")
    if isinstance(ids := prompt.get("prompt_token_ids"), str):
        raise InputError(f"prompt_token_ids: expected a list of token ids, got {ids!r:.80}")
    return prompt


def _priorities(priority: int | Sequence[int] | None, count: int) -> list[int]:
    if priority is None or type(priority) is int:
        return [priority or 0] * count
    if not isinstance(priority, list | tuple) or len(priority) != count:
        raise InputError(f"priority: expected an integer, or one for each of {count} prompts, got {priority!r:.80}")
    return list(priority)


def _pair(
    prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams]
) -> list[tuple[Prompt, SamplingParams]]:
    if isinstance(params, SamplingParams):
        return [(prompt, params) for prompt in prompts]
    if not isinstance(params, Sequence):
        raise InputError(f"sampling_params: expected SamplingParams, or a list of them, got {params!r:.80}")
    if len(params) != len(prompts):
        raise InputError(
            f"sampling_params: {len(params)} of them for {len(prompts)} prompts; give one, or one for each"
        )
    return list(zip(prompts, params, strict=True))
