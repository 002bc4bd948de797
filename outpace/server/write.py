"""How /v1/completions and /v1/chat/completions write events down: chunks, and the whole that chunks add up to."""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from outpace.server.protocol import ChatRequest, CompletionRequest, SamplingFields
from outpace.server.responses import (
    AnswerDelta,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FinishText,
    PromptLogprob,
    PromptLogprobs,
    StructureCheckText,
    TokenLogprob,
    ToolCall,
    TopLogprob,
    Usage,
)
from outpace.server.stream import Event
from outpace.server.tokens import Tokens
from outpace.server.tools import Call, Parser, Piece, Style, parser_of
from outpace.server.validate import Work
from outpace.structure import StructureCheck
from outpace.types import Logprob, TokenLogprobs

_VOCABULARY = 2**15  # log-probabilities that -1 stands for, about
_LEAST = -9999.0  # JSON has no infinity and no NaN; OpenAI writes this


class _Writer:
    """What both routes share: the head of each chunk, the usage, the names of tokens."""

    def __init__(self, request: SamplingFields, works: Sequence[Work], tokens: Tokens, model: str, name: str) -> None:
        self._request, self._works, self._tokens = request, works, tokens
        self._id, self._model, self._created = name, model, int(time.time())
        self._completion_tokens = 0
        self._prompt_tokens = sum(len(work.prompt_token_ids) for work in works)
        streamed = request.stream_options
        self._usage_last = bool(streamed and streamed.include_usage)
        self._usage_always = bool(streamed and streamed.continuous_usage_stats)
        self.of_prompt = max(_of_prompt(work) for work in works)
        """Log-probabilities of the prompt that stand in the first chunk of an answer."""

    @property
    def usage(self) -> Usage:
        """Tokens so far; a prompt counts once, however many answers it has."""
        new = self._completion_tokens
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self._prompt_tokens + new,
        }

    def _head(self, kind: str, choices: Sequence[Any]) -> Any:
        chunk: dict[str, Any] = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        chunk["choices"] = choices
        if self._usage_always:
            chunk["usage"] = self.usage
        elif self._usage_last:
            chunk["usage"] = None
        return chunk

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
                "logprob": _finite(each),
                "rank": each.rank,
                "decoded_token": self._tokens.texts([token])[0],
            }
            for token, each in _by_rank(entry)
        }


def _of_prompt(work: Work) -> int:
    asked = work.params.prompt_logprobs
    return 0 if asked is None else len(work.prompt_token_ids) * (1 + (asked if asked >= 0 else _VOCABULARY))


def _finite(found: Logprob) -> float:
    return found.logprob if found.logprob > _LEAST else _LEAST


def _by_rank(entry: Mapping[int, Logprob]) -> list[tuple[int, Logprob]]:
    return sorted(entry.items(), key=lambda item: (item[1].rank, item[0]))


def _check_text(check: StructureCheck) -> StructureCheckText:
    return {"checked": list(check.checked), "valid": check.valid, "problem": check.problem}


class CompletionWriter(_Writer):
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
        self._completion_tokens += len(event.token_ids)
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
        }
        if event.check is not None:
            choice["structure_check"] = _check_text(event.check)
        if self._request.return_token_ids:
            choice["token_ids"] = event.token_ids
            if first:
                choice["prompt_token_ids"] = work.prompt_token_ids
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
        result: Completion = self._head("text_completion", [_joined(parts[index]) for index in sorted(parts)])
        result["usage"] = self.usage
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
        result["token_logprobs"].append(_finite(entry[token]))
        top: dict[str, float] = {}
        for each, found in _by_rank(entry):
            top.setdefault(self._name(each), _finite(found))  # of tokens with the same text, the likeliest
        result["top_logprobs"].append(top)


def _joined(parts: Sequence[CompletionChoice]) -> CompletionChoice:
    last = parts[-1]
    result: CompletionChoice = {
        "index": last["index"],
        "text": "".join(part["text"] for part in parts),
        "logprobs": None,
        "finish_reason": last["finish_reason"],
        "stop_reason": last["stop_reason"],
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
    if "token_ids" in parts[0]:
        result["token_ids"] = [token for part in parts for token in part["token_ids"]]
        result["prompt_token_ids"] = parts[0]["prompt_token_ids"]
    if "prompt_logprobs" in parts[0]:
        result["prompt_logprobs"] = parts[0]["prompt_logprobs"]
    return result


@dataclass(slots=True)
class _Message:
    """One answer of a chat as it grows."""

    parser: Parser | None
    begun: bool = False
    calls: int = 0


class ChatWriter(_Writer):
    """/v1/chat/completions."""

    def __init__(
        self, request: ChatRequest, work: Work, tokens: Tokens, model: str, name: str, *, role: str, style: Style
    ) -> None:
        super().__init__(request, [work], tokens, model, name)
        self._asked, self._role = request, role
        self._only_calls = work.structure == "tool_choice"  # what is no whole call was cut off, and is no text
        self._messages = [_Message(parser_of(style)) for _ in range(work.params.n)]
        self._told = False  # what is known of the prompt stands in the first chunk

    def chunks(self, event: Event) -> list[ChatChunk]:
        """What an event adds. Calls come whole, each in a chunk of its own."""
        self._completion_tokens += len(event.token_ids)
        message = self._messages[event.index]
        deltas = [self._delta(message, piece) for piece in self._pieces(message, event)]
        deltas = [delta for delta in deltas if delta]
        if not message.begun:
            message.begun = True
            deltas.insert(0, {"role": self._role, "content": ""})
        if not deltas and (event.finish_reason or event.logprobs or self._request.return_token_ids):
            deltas = [{}]
        chunks = [
            self._chunk(message, event, delta, begins=number == 0, ends=number == len(deltas) - 1)
            for number, delta in enumerate(deltas)
        ]
        if not self._told:
            self._told = True
            self._tell(chunks[0], event)
        return chunks

    def last_chunks(self) -> list[ChatChunk]:
        """The usage, if asked for."""
        return self._usage_chunk("chat.completion.chunk")

    def whole(self, chunks: Sequence[ChatChunk]) -> ChatCompletion:
        """The answer as JSON."""
        parts: dict[int, list[ChatChunkChoice]] = {}
        for chunk in chunks:
            for choice in chunk["choices"]:
                parts.setdefault(choice["index"], []).append(choice)
        result: ChatCompletion = self._head("chat.completion", [_message(parts[index]) for index in sorted(parts)])
        result["usage"] = self.usage
        first = chunks[0]
        if "prompt_logprobs" in first:
            result["prompt_logprobs"] = first["prompt_logprobs"]
        if "prompt_token_ids" in first:
            result["prompt_token_ids"] = first["prompt_token_ids"]
        return result

    def _tell(self, chunk: ChatChunk, event: Event) -> None:
        if self._request.prompt_logprobs is not None:
            chunk["prompt_logprobs"] = self._prompt_logprobs(event.prompt_logprobs or [])
        if self._request.return_token_ids:
            chunk["prompt_token_ids"] = self._works[0].prompt_token_ids

    def _pieces(self, message: _Message, event: Event) -> list[Piece]:
        if message.parser is None:
            return [event.text]
        pieces = message.parser.feed(event.text)
        return [*pieces, *message.parser.finish()] if event.finish_reason else pieces

    def _delta(self, message: _Message, piece: Piece) -> AnswerDelta:
        if isinstance(piece, str):
            return {"content": piece} if piece and not self._only_calls else {}
        if message.calls and self._asked.parallel_tool_calls is False:
            return {}
        call: ToolCall = _tool_call(piece, message.calls)
        message.calls += 1
        return {"tool_calls": [call]}

    def _chunk(self, message: _Message, event: Event, delta: AnswerDelta, *, begins: bool, ends: bool) -> ChatChunk:
        """Log-probabilities stand in the first chunk of an event, its end in the last."""
        reason: FinishText | None = event.finish_reason.value if ends and event.finish_reason else None
        choice: ChatChunkChoice = {
            "index": event.index,
            "delta": delta,
            "logprobs": self._logprobs(event) if begins else None,
            "finish_reason": "tool_calls" if reason == "stop" and message.calls else reason,
        }
        if reason is not None:
            choice["stop_reason"] = event.stop_reason
            if event.check is not None:
                choice["structure_check"] = _check_text(event.check)
        if self._request.return_token_ids:
            choice["token_ids"] = event.token_ids if begins else []
        return self._head("chat.completion.chunk", [choice])

    def _logprobs(self, event: Event) -> ChatLogprobs | None:
        if not self._asked.logprobs or event.logprobs is None:
            return None
        pairs = zip(event.token_ids, event.logprobs, strict=True)
        return {"content": [self._token(token, entry) for token, entry in pairs], "refusal": None}

    def _token(self, token: int, entry: TokenLogprobs) -> TokenLogprob:
        likeliest = _by_rank(entry)[: self._asked.top_logprobs or 0]
        return {**self._top(token, entry[token]), "top_logprobs": [self._top(*each) for each in likeliest]}

    def _top(self, token: int, found: Logprob) -> TopLogprob:
        text = self._tokens.texts([token])[0]
        data = None if "\ufffd" in text else list(text.encode())  # a part of a character has bytes we cannot tell
        return {"token": self._name(token), "logprob": _finite(found), "bytes": data}


def _tool_call(call: Call, index: int) -> ToolCall:
    return {
        "index": index,
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _message(parts: Sequence[ChatChunkChoice]) -> Any:
    """The choice that chunks add up to."""
    text = "".join(part["delta"].get("content", "") for part in parts)
    calls = [call for part in parts for call in part["delta"].get("tool_calls", [])]
    message: dict[str, Any] = {"role": parts[0]["delta"].get("role", ""), "content": text, "refusal": None}
    if calls:
        message["content"] = text or None
        message["tool_calls"] = [{name: value for name, value in call.items() if name != "index"} for call in calls]
    given = [part["logprobs"] for part in parts if part["logprobs"] is not None]
    choice: dict[str, Any] = {
        "index": parts[0]["index"],
        "message": message,
        "logprobs": {"content": [item for each in given for item in each["content"]], "refusal": None}
        if given
        else None,
        "finish_reason": parts[-1]["finish_reason"],
        "stop_reason": parts[-1].get("stop_reason"),
    }
    if "structure_check" in parts[-1]:
        choice["structure_check"] = parts[-1]["structure_check"]
    if "token_ids" in parts[0]:
        choice["token_ids"] = [token for part in parts for token in part["token_ids"]]
    return choice
