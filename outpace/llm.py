"""LLM: prompts in, answers out. Each request runs by itself on the engine; the ragged runtime will batch them."""

import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jinja2 import TemplateError
from rich.console import Console
from rich.progress import Progress
from torch import nn
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from outpace.config import ConfigLike, InferenceConfig
from outpace.engine import InferenceEngine
from outpace.errors import InputError, ModelError
from outpace.loading.build import Loaded, load
from outpace.loading.inspect import describe
from outpace.tokenizer import Detokenizer
from outpace.types import CompletionOutput, FinishReason, RequestMetrics, RequestOutput, SamplingParams

Prompt = str | list[int]
Message = dict[str, Any]


class LLM:
    """A model with its tokenizer: a name, a folder, a .gguf file, a live module, or nothing for the default model."""

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
        asked = InferenceConfig.of(config, **options)
        loaded = _live(model, asked) if isinstance(model, nn.Module) else _load(model, asked)
        self.name = loaded.name
        self.dtype_reason = loaded.dtype_reason
        self.tokenizer = tokenizer or loaded.tokenizer
        self.engine = InferenceEngine(loaded.model, _for_model(asked, loaded))
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # one request at a time

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer each prompt (text or token ids), with the same parameters or one for each."""
        work = _pair(_as_prompts(prompts), sampling_params)
        outputs = []
        with Progress(console=Console(stderr=True), disable=not use_tqdm or len(work) < 2) as progress:
            task = progress.add_task("Generating", total=len(work))
            for item in work:
                outputs.append(_last(self.stream(*item)))
                progress.advance(task)
        return outputs

    def chat(
        self, messages: list[Message], sampling_params: SamplingParams | None = None, **template: Any
    ) -> list[RequestOutput]:
        """Answer a conversation, written out with the model's chat template."""
        return [_last(self.stream(self.apply_chat_template(messages, **template), sampling_params))]

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
        options = {"add_generation_prompt": True, **template, "tokenize": True, "return_dict": True}
        try:
            encoded: Any = tokenizer.apply_chat_template(messages, **options)
        except (TemplateError, TypeError) as error:
            raise InputError(f"messages: the model's chat template refuses them ({error})") from error
        return [int(token) for token in encoded["input_ids"]]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Answer one prompt, yielding the answer so far after each token. Stop early by leaving the loop."""
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise InputError(f"sampling_params: expected SamplingParams, got {params!r:.80}")
        ids = self._tokenize(prompt)
        output = RequestOutput(
            request_id=str(next(self._numbers)),
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=ids,
            outputs=[CompletionOutput()],
            finished=False,
            metrics=RequestMetrics(arrival_time=time.perf_counter()),
        )
        run = _Run(output, params, self.tokenizer, self._end_tokens(params))
        return run.outputs(lambda: self._run(run))

    def _run(self, run: "_Run") -> None:
        """Let the engine produce every token of a request."""
        params = run.params
        ids = torch.tensor([run.output.prompt_token_ids], device=self.engine.device)
        with self._lock:
            self.engine.generate(
                ids,
                seed=params.seed,
                attention_mask=torch.ones_like(ids),
                streamer=run,
                stopping_criteria=StoppingCriteriaList([run]),
                **_settings(params, run.end_tokens),
            )

    def _tokenize(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            prompt = list(self._need_tokenizer("generate")(prompt)["input_ids"])
        if not isinstance(prompt, list | tuple) or not prompt or not all(type(token) is int for token in prompt):
            raise InputError(f"prompt: expected text or token ids that are not empty, got {prompt!r:.80}")
        return list(prompt)

    def _need_tokenizer(self, what: str) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise ModelError(f"{what}: the model has no tokenizer; pass LLM(tokenizer=...), or prompts as token ids")
        return self.tokenizer

    def _end_tokens(self, params: SamplingParams) -> set[int]:
        own = self.engine.generation_config.eos_token_id if not params.ignore_eos else None
        return {*params.stop_token_ids, *(own if isinstance(own, list) else [own] if own is not None else [])}


class _Run(BaseStreamer, StoppingCriteria):
    """One request: takes its tokens from Hugging Face's loop in one thread, and makes its output in another."""

    def __init__(
        self, output: RequestOutput, params: SamplingParams, tokenizer: PreTrainedTokenizerBase | None, end: set[int]
    ) -> None:
        self.output = output
        self.params = params
        self.end_tokens = end
        self._arrived: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()  # at most max_tokens
        self._text = _detokenizer(tokenizer, params)
        self._cancelled = False
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Called by the loop with the prompt, then with each token."""
        if self._prompt_seen:
            self._arrived.put(int(value.reshape(-1)[0]))
        self._prompt_seen = True

    def end(self) -> None:
        """Called by the loop when it ends."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Called by the loop after each token: is that all?"""
        return torch.full((input_ids.shape[0],), self._cancelled, device=input_ids.device)

    def outputs(self, work: Callable[[], None]) -> Iterator[RequestOutput]:
        """The output after each token, while `work` produces them in a thread."""
        thread = threading.Thread(target=self._produce, args=(work,), daemon=True)
        thread.start()
        try:
            while not self.output.finished:
                arrived = self._arrived.get()
                if isinstance(arrived, BaseException):
                    raise arrived
                self._add(arrived)
                yield self.output
        finally:
            self._cancelled = True
            thread.join()

    def _produce(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._arrived.put(error)
        else:
            self._arrived.put(None)

    def _add(self, token: int | None) -> None:
        answer, metrics, text = self.output.outputs[0], self.output.metrics, self._text
        if token is not None:
            answer.token_ids.append(token)
            metrics.last_token_time = time.perf_counter()
            metrics.first_token_time = metrics.first_token_time or metrics.last_token_time
            if text is not None:
                text.add(token)
        answer.finish_reason = self._why_finished(token)
        self.output.finished = answer.finish_reason is not None
        if text is not None:
            if self.output.finished:
                text.finish()
            answer.text = text.text

    def _why_finished(self, token: int | None) -> FinishReason | None:
        if token in self.end_tokens or (self._text is not None and self._text.stopped):
            return FinishReason.STOP
        full = len(self.output.outputs[0].token_ids) >= self.params.max_tokens
        return FinishReason.LENGTH if full or token is None else None


def _detokenizer(tokenizer: PreTrainedTokenizerBase | None, params: SamplingParams) -> Detokenizer | None:
    if tokenizer is None:
        if params.stop:
            raise ModelError("stop: stop strings need a tokenizer; pass LLM(tokenizer=...), or use stop_token_ids")
        return None
    return Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens, stop=params.stop)


def _settings(params: SamplingParams, end_tokens: set[int]) -> dict[str, Any]:
    """The parameters as keywords of `generate`: unlike in a GenerationConfig, None there is not filled in from the
    model's own, which would bring back the end tokens that are to be ignored."""
    sample = params.temperature > 0
    return {
        "max_new_tokens": params.max_tokens,
        "max_length": None,
        "min_new_tokens": params.min_tokens or None,
        "do_sample": sample,
        "temperature": params.temperature if sample else None,
        "top_p": params.top_p if sample else None,
        "top_k": params.top_k if sample else None,
        "min_p": (params.min_p or None) if sample else None,
        "repetition_penalty": params.repetition_penalty,
        "eos_token_id": list(end_tokens) or None,
        "pad_token_id": 0,
    }


def _load(model: str | os.PathLike[str] | None, config: InferenceConfig) -> Loaded:
    if not isinstance(model, str | os.PathLike | None):
        raise ModelError(f"model: expected a name, a path or a torch.nn.Module, got {type(model).__name__}")
    source = None if model is None else os.fspath(model)
    return load(source, dtype=config.dtype, device=config.torch_device)


def _live(model: nn.Module, config: InferenceConfig) -> Loaded:
    """A module the caller made: its own dtype, unless another is asked for."""
    own = next((tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()), torch.float32)
    dtype, reason = (config.dtype, "asked for") if config.dtype else (own, "the module's own")
    return Loaded(model, None, type(model).__name__, None, dtype, reason)


def _for_model(asked: InferenceConfig, loaded: Loaded) -> InferenceConfig:
    """The engine's config: the dtype that was decided, and the model's own length unless one is asked for."""
    given = {**asked.given(), "dtype": loaded.dtype}
    info = describe(loaded.model, asked.config)
    if not info.can_generate:
        raise ModelError(f"model: {loaded.name} is not a generative model; call it with outpace.init_inference")
    if "max_out_tokens" not in given and info.max_positions is not None:
        given["max_out_tokens"] = info.max_positions
    return InferenceConfig(**given)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list | tuple) or not prompts:
        raise InputError(f"prompts: expected text, token ids or a list of them, got {prompts!r:.80}")
    if isinstance(prompts[0], int):
        return [list(prompts)]  # one prompt as token ids
    return list(prompts)


def _pair(
    prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[Prompt, SamplingParams]]:
    if params is None or isinstance(params, SamplingParams):
        return [(prompt, params or SamplingParams()) for prompt in prompts]
    if not isinstance(params, Sequence):
        raise InputError(f"sampling_params: expected SamplingParams, or a list of them, got {params!r:.80}")
    if len(params) != len(prompts):
        raise InputError(
            f"sampling_params: {len(params)} of them for {len(prompts)} prompts; give one, or one for each"
        )
    return list(zip(prompts, params, strict=True))


def _last(outputs: Iterator[RequestOutput]) -> RequestOutput:
    return list(outputs)[-1]
