"""How events are written down: chunks, and the whole that chunks add up to. What routes share, and /v1/completions.

Keys that have no value are null where vLLM has them: whole answers name all of them, chunks only some.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

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
from outpace.server.stream import Event
from outpace.server.tokens import Tokens
from outpace.server.validate import Work
from outpace.structure import StructureCheck
from outpace.types import Logprob, TokenLogprobs

_VOCABULARY = 2**15  # log-probabilities that -1 stands for, about
_LEAST = -9999.0  # JSON has no infinity and no NaN; OpenAI writes this


class AnswerWriter:
    """What both routes share: the head of each chunk, the usage, the names of tokens."""

    def __init__(self, request: SamplingFields, works: Sequence[Work], tokens: Tokens, model: str, name: str) -> None:
        self._request, self._works, self._tokens = request, works, tokens
        self._id, self._model, self._created = name, model, int(time.time())
        self._completion_tokens = 0
        self._cached_tokens: int | None = None
        self._prompt_tokens = sum(len(work.prompt_token_ids) for work in works)
        streamed = request.stream_options
        self._usage_last = bool(streamed and streamed.include_usage)
        self._usage_always = bool(streamed and streamed.continuous_usage_stats)
        self.of_prompt = max(_of_prompt(work) for work in works)
        """Log-probabilities of the prompt that stand in the first chunk of an answer."""

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

    def _count(self, event: Event) -> None:
        self._completion_tokens += len(event.token_ids)
        if event.num_cached_tokens is not None:
            self._cached_tokens = (self._cached_tokens or 0) + event.num_cached_tokens

    def _head(self, kind: str, choices: Sequence[Any]) -> Any:
        chunk: dict[str, Any] = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        chunk["choices"] = choices
        if self._usage_always:
            chunk["usage"] = self.usage
        elif self._usage_last:
            chunk["usage"] = None
        return chunk

    def _whole_head(self, kind: str, choices: Sequence[Any]) -> Any:
        about = {"service_tier": None, "system_fingerprint": None, "kv_transfer_params": None}
        return {**self._head(kind, choices), **about, "usage": self.usage}

    def _usage_chunk(self, kind: str) -> list[Any]:
        return [{**self._head(kind, []), "usage": self.usage}] if self._usage_last else []

    def _name(self, token: int) -> str:
        if self._request.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self._tokens.texts([token])[0]

    def _prompt_logprobs(self, found: Sequence[TokenLogprobs | None]) -> PromptLogprobs:
        """Each entry is encoded at once: 80,000 small objects would keep the garbage collector busy."""
        encode = msgspec.json.encode
        return [None if entry is None else msgspec.Raw(encode(self._by_token(entry))) for entry in found]  # type: ignore[misc]

    def _by_token(self, entry: TokenLogprobs) -> dict[str, PromptLogprob]:
        return {
            str(token): {
                "logprob": finite(each),
                "rank": each.rank,
                "decoded_token": self._tokens.texts([token])[0],
            }
            for token, each in by_rank(entry)
        }


def _of_prompt(work: Work) -> int:
    asked = work.params.prompt_logprobs
    return 0 if asked is None else len(work.prompt_token_ids) * (1 + (asked if asked >= 0 else _VOCABULARY))


def finite(found: Logprob) -> float:
    """A log-probability that JSON can say."""
    return found.logprob if found.logprob > _LEAST else _LEAST


def by_rank(entry: Mapping[int, Logprob]) -> list[tuple[int, Logprob]]:
    """Tokens and their log-probabilities, the likeliest first."""
    return sorted(entry.items(), key=lambda item: (item[1].rank, item[0]))


def check_text(check: StructureCheck) -> StructureCheckText:
    """The check of an answer as it is written."""
    return {"checked": list(check.checked), "valid": check.valid, "problem": check.problem}


class CompletionWriter(AnswerWriter):
    """/v1/completions."""

    def __init__(
        self, request: CompletionRequest, works: Sequence[Work], tokens: Tokens, model: str, name: str
    ) -> None:
        super().__init__(request, works, tokens, model, name)
        self._asked = request
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}
        self._of_prompts: dict[int, Sequence[TokenLogprobs | None]] = {}
        self._shown: dict[int, PromptLogprobs] = {}  # the same as it is written, for the n answers to a prompt

    def chunks(self, event: Event) -> list[Completion]:
        """What an event adds."""
        self._count(event)
        work, first = self._works[event.prompt], event.index not in self._begun
        self._begun.add(event.index)
        if event.prompt_logprobs is not None:
            self._of_prompts[event.prompt] = event.prompt_logprobs
        text = (work.text or "") + event.text if first else event.text
        if not (text or event.finish_reason or event.logprobs or self._request.return_token_ids or first):
            return []
        choice: CompletionChoice = {
            "index": event.index,
            "text": text,
            "logprobs": self._logprobs(event, work, first),
            "finish_reason": event.finish_reason.value if event.finish_reason else None,
            "stop_reason": event.stop_reason,
            "token_ids": None,
            "prompt_token_ids": None,
        }
        if event.check is not None:
            choice["structure_check"] = check_text(event.check)
        if self._request.return_token_ids:
            choice["token_ids"] = event.token_ids
            choice["prompt_token_ids"] = work.prompt_token_ids if first else None
        if first and self._request.prompt_logprobs is not None:
            if event.prompt not in self._shown:
                self._shown[event.prompt] = self._prompt_logprobs(self._of_prompts.get(event.prompt, []))
            choice["prompt_logprobs"] = self._shown[event.prompt]
        return [self._head("text_completion", [choice])]

    def last_chunks(self) -> list[Completion]:
        """The usage, if asked for."""
        return self._usage_chunk("text_completion")

    def whole(self, chunks: Sequence[Completion]) -> Completion:
        """The answer as JSON."""
        parts: dict[int, list[CompletionChoice]] = {}
        for chunk in chunks:
            for choice in chunk["choices"]:
                parts.setdefault(choice["index"], []).append(choice)
        result: Completion = self._whole_head("text_completion", [_joined(parts[index]) for index in sorted(parts)])
        return result

    def _logprobs(self, event: Event, work: Work, first: bool) -> CompletionLogprobs | None:
        if self._asked.logprobs is None:
            return None
        result: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if first and self._asked.echo:
            known = self._of_prompts.get(event.prompt, [None] * len(work.prompt_token_ids))
            for token, entry in zip(work.prompt_token_ids, known, strict=True):
                self._add(result, event.index, token, entry)
        for token, entry in zip(event.token_ids, event.logprobs or (), strict=True):
            self._add(result, event.index, token, entry)
        return result

    def _add(self, result: CompletionLogprobs, index: int, token: int, entry: TokenLogprobs | None) -> None:
        name, offset = self._name(token), self._offsets.get(index, 0)
        result["tokens"].append(name)
        result["text_offset"].append(offset)
        self._offsets[index] = offset + len(name)
        if entry is None:  # nothing stands before the first token of a prompt
            result["token_logprobs"].append(None)
            result["top_logprobs"].append(None)
            return
        result["token_logprobs"].append(finite(entry[token]))
        top: dict[str, float] = {}
        for each, found in by_rank(entry):
            top.setdefault(self._name(each), finite(found))  # of tokens with the same text, the likeliest
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
