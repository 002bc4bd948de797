"""Writes deltas as chunks, or as one answer joined from chunks: what routes share, and /v1/completions.

Keys without a value are null where vLLM has them: whole answers name all of them, chunks only some.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from outpace.server.async_tokenizer import AsyncTokenizer
from outpace.server.engine import Delta, EngineRequest, WireLogprobs
from outpace.server.messages import prompt_entry
from outpace.server.protocol import CompletionRequest, SamplingFields
from outpace.server.responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    StructureCheckText,
    Usage,
)
from outpace.structured.outputs import StructureCheck

_VOCABULARY = 2**15  # about as many log-probabilities as -1 stands for
_LEAST = -9999.0  # JSON has no infinity and no NaN; OpenAI writes this


class AnswerWriter(ABC):
    """How a route writes its answers: chunks are sent one by one, or joined to one answer. Holds what routes share."""

    chunk_kind: ClassVar[str]
    """`object` of each chunk."""

    def __init__(
        self,
        request: SamplingFields,
        prompts: Sequence[EngineRequest],
        tokenizer: AsyncTokenizer,
        model: str,
        name: str,
    ) -> None:
        self._request, self._prompts, self._tokenizer = request, prompts, tokenizer
        self._id, self._model, self._created = name, model, int(time.time())
        self._completion_tokens = 0
        self._cached_tokens: int | None = None
        self._prompt_tokens = sum(len(each.prompt_token_ids) for each in prompts)
        streamed = request.stream_options
        self._usage_last = bool(streamed and streamed.include_usage)
        self._usage_always = bool(streamed and streamed.continuous_usage_stats)
        self.of_prompt = max(_of_prompt(each) for each in prompts)
        """Log-probabilities of the prompt in the first chunk of an answer."""

    @property
    def usage(self) -> Usage:
        """Tokens so far; a prompt counts once, however many answers it has."""
        new, cached = self._completion_tokens, self._cached_tokens
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self._prompt_tokens + new,
            "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
            "completion_tokens_details": None,
        }

    def _count(self, delta: Delta) -> None:
        self._completion_tokens += len(delta.token_ids)
        if delta.num_cached_tokens is not None:
            self._cached_tokens = (self._cached_tokens or 0) + delta.num_cached_tokens

    @abstractmethod
    def chunks(self, delta: Delta) -> list[Any]:
        """The chunks of a delta; none if it shows nothing yet."""

    @abstractmethod
    def whole(self, chunks: Sequence[Any]) -> Any:
        """The answer that these chunks add up to."""

    def last_chunks(self) -> list[Any]:
        """The chunks at the end of a stream: the usage, if asked for."""
        return [{**self._head([]), "usage": self.usage}] if self._usage_last else []

    def _head(self, choices: Sequence[Any]) -> Any:
        chunk: dict[str, Any] = {"id": self._id, "object": self.chunk_kind, "created": self._created}
        chunk |= {"model": self._model, "choices": choices}
        if self._usage_always:
            chunk["usage"] = self.usage
        elif self._usage_last:
            chunk["usage"] = None
        return chunk

    def _whole_head(self, kind: str, choices: Sequence[Any]) -> Any:
        about = {"service_tier": None, "system_fingerprint": None, "kv_transfer_params": None}
        return {**self._head(choices), "object": kind, **about, "usage": self.usage}

    @staticmethod
    def _by_answer(chunks: Sequence[Any]) -> list[list[Any]]:
        """The choices of all chunks, those of each answer together."""
        parts: dict[int, list[Any]] = {}
        for chunk in chunks:
            for choice in chunk["choices"]:
                parts.setdefault(choice["index"], []).append(choice)
        return [parts[index] for index in sorted(parts)]

    def _name(self, token: int) -> str:
        if self._request.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self._tokenizer.texts([token])[0]

    def _prompt_logprobs(self, found: Sequence[msgspec.Raw]) -> PromptLogprobs:
        """Each entry is encoded at once: 80,000 small objects would keep the garbage collector busy."""
        encode, entries = msgspec.json.encode, map(prompt_entry, found)
        return [None if entry is None else msgspec.Raw(encode(self._by_token(entry))) for entry in entries]  # type: ignore[misc]

    def _by_token(self, entry: WireLogprobs) -> dict[str, PromptLogprob]:
        texts = self._tokenizer.texts
        return {
            str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": texts([token])[0]}
            for token, logprob, rank in by_rank(entry)
        }


def _of_prompt(prompt: EngineRequest) -> int:
    asked = prompt.params.prompt_logprobs
    return 0 if asked is None else len(prompt.prompt_token_ids) * (1 + (asked if asked >= 0 else _VOCABULARY))


def finite(logprob: float) -> float:
    """A log-probability that JSON can express."""
    return logprob if logprob > _LEAST else _LEAST


def by_rank(entry: WireLogprobs) -> WireLogprobs:
    """The same entry, the likeliest token first."""
    return sorted(entry, key=lambda each: (each[2], each[0]))


def check_text(check: StructureCheck) -> StructureCheckText:
    """The check of an answer in JSON."""
    return {"checked": list(check.checked), "valid": check.valid, "problem": check.problem}


class CompletionWriter(AnswerWriter):
    """/v1/completions."""

    chunk_kind = "text_completion"

    def __init__(
        self,
        request: CompletionRequest,
        prompts: Sequence[EngineRequest],
        tokenizer: AsyncTokenizer,
        model: str,
        name: str,
    ) -> None:
        super().__init__(request, prompts, tokenizer, model, name)
        self._asked = request
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}
        self._of_prompts: dict[int, Sequence[msgspec.Raw]] = {}
        self._shown: dict[int, PromptLogprobs] = {}  # the same, encoded once for the n answers to a prompt

    def chunks(self, delta: Delta) -> list[Completion]:
        self._count(delta)
        prompt, first = delta.index // self._prompts[0].params.n, delta.index not in self._begun
        asked = self._prompts[prompt]
        self._begun.add(delta.index)
        if delta.prompt_logprobs is not None:
            self._of_prompts[prompt] = delta.prompt_logprobs
        text = (asked.text or "") + delta.text if first else delta.text
        if not (text or delta.finish_reason or delta.logprobs or self._request.return_token_ids or first):
            return []
        choice: CompletionChoice = {
            "index": delta.index,
            "text": text,
            "logprobs": self._logprobs(delta, prompt if first else None),
            "finish_reason": delta.finish_reason.value if delta.finish_reason else None,
            "stop_reason": delta.stop_reason,
            "token_ids": None,
            "prompt_token_ids": None,
        }
        if delta.check is not None:
            choice["structure_check"] = check_text(delta.check)
        if self._request.return_token_ids:
            choice["token_ids"] = delta.token_ids
            choice["prompt_token_ids"] = asked.prompt_token_ids if first else None
        if first and self._request.prompt_logprobs is not None:
            if prompt not in self._shown:
                self._shown[prompt] = self._prompt_logprobs(self._of_prompts.get(prompt, []))
            choice["prompt_logprobs"] = self._shown[prompt]
        return [self._head([choice])]

    def whole(self, chunks: Sequence[Completion]) -> Completion:
        result: Completion = self._whole_head(self.chunk_kind, list(map(_joined, self._by_answer(chunks))))
        return result

    def _logprobs(self, delta: Delta, begins: int | None) -> CompletionLogprobs | None:
        """begins: the number of the prompt, in the first delta of an answer."""
        if self._asked.logprobs is None:
            return None
        result: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if begins is not None and self._asked.echo:
            ids, known = self._prompts[begins].prompt_token_ids, self._of_prompts.get(begins)
            entries = [None] * len(ids) if known is None else map(prompt_entry, known)
            for token, found in zip(ids, entries, strict=True):
                self._add(result, delta.index, token, found)
        for token, entry in zip(delta.token_ids, delta.logprobs or (), strict=True):
            self._add(result, delta.index, token, entry)
        return result

    def _add(self, result: CompletionLogprobs, index: int, token: int, entry: WireLogprobs | None) -> None:
        name, offset = self._name(token), self._offsets.get(index, 0)
        result["tokens"].append(name)
        result["text_offset"].append(offset)
        self._offsets[index] = offset + len(name)
        if entry is None:  # the first token of a prompt has none
            result["token_logprobs"].append(None)
            result["top_logprobs"].append(None)
            return
        result["token_logprobs"].append(finite(entry[0][1]))
        top: dict[str, float] = {}
        for each, logprob, _ in by_rank(entry):
            top.setdefault(self._name(each), finite(logprob))  # of tokens with the same text, the likeliest
        result["top_logprobs"].append(top)


def _joined(parts: Sequence[CompletionChoice]) -> CompletionChoice:
    last = parts[-1]
    result: CompletionChoice = {
        "index": last["index"],
        "text": "".join(part["text"] for part in parts),
        "logprobs": None,
        "finish_reason": last["finish_reason"],
        "stop_reason": last["stop_reason"],
        "token_ids": None,
        "prompt_token_ids": parts[0]["prompt_token_ids"],
        "prompt_logprobs": parts[0].get("prompt_logprobs"),
    }
    if parts[0]["logprobs"] is not None:
        given = [part["logprobs"] for part in parts if part["logprobs"] is not None]
        result["logprobs"] = {
            "tokens": [item for each in given for item in each["tokens"]],
            "token_logprobs": [item for each in given for item in each["token_logprobs"]],
            "top_logprobs": [item for each in given for item in each["top_logprobs"]],
            "text_offset": [item for each in given for item in each["text_offset"]],
        }
    if "structure_check" in last:
        result["structure_check"] = last["structure_check"]
    if parts[0]["token_ids"] is not None:
        result["token_ids"] = [token for part in parts for token in part["token_ids"] or ()]
    return result
