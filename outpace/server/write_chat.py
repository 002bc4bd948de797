"""How /v1/chat/completions writes events down."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outpace.server.protocol import ChatRequest
from outpace.server.responses import (
    AnswerDelta,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    FinishText,
    TokenLogprob,
    ToolCall,
    TopLogprob,
)
from outpace.server.stream import Event
from outpace.server.tokens import Tokens
from outpace.server.tools import Call, Parser, Piece, Style, parser_of
from outpace.server.validate import Work
from outpace.server.write import AnswerWriter, by_rank, check_text, finite
from outpace.types import Logprob, TokenLogprobs


@dataclass(slots=True)
class _Message:
    """One answer of a chat as it grows."""

    parser: Parser | None
    begun: bool = False
    calls: int = 0


class ChatWriter(AnswerWriter):
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
        """What an event adds. The first chunk of an answer has its role alone; calls come whole, each in a chunk."""
        message, chunks = self._messages[event.index], []
        if not message.begun:
            message.begun = True
            chunks.append(self._first(event))
        self._count(event)
        deltas = [delta for piece in self._pieces(message, event) if (delta := self._delta(message, piece))]
        if not deltas and (event.finish_reason or event.logprobs or self._request.return_token_ids):
            deltas = [{}]
        return chunks + [
            self._chunk(message, event, delta, begins=number == 0, ends=number == len(deltas) - 1)
            for number, delta in enumerate(deltas)
        ]

    def _first(self, event: Event) -> ChatChunk:
        """The chunk before any tokens of an answer; what is known of the prompt stands in the first of all."""
        delta: AnswerDelta = {"role": self._role, "content": ""}
        choice: ChatChunkChoice = {"index": event.index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk: ChatChunk = self._head("chat.completion.chunk", [choice])
        if not self._told:
            self._told = True
            chunk["prompt_token_ids"] = self._works[0].prompt_token_ids if self._request.return_token_ids else None
            if self._request.prompt_logprobs is not None:
                chunk["prompt_logprobs"] = self._prompt_logprobs(event.prompt_logprobs or [])
        return chunk

    def last_chunks(self) -> list[ChatChunk]:
        """The usage, if asked for."""
        return self._usage_chunk("chat.completion.chunk")

    def whole(self, chunks: Sequence[ChatChunk]) -> ChatCompletion:
        """The answer as JSON."""
        parts: dict[int, list[ChatChunkChoice]] = {}
        for chunk in chunks:
            for choice in chunk["choices"]:
                parts.setdefault(choice["index"], []).append(choice)
        result: ChatCompletion = self._whole_head(
            "chat.completion", [_message(parts[index]) for index in sorted(parts)]
        )
        result["prompt_logprobs"] = chunks[0].get("prompt_logprobs")
        result["prompt_token_ids"] = chunks[0].get("prompt_token_ids")
        return result

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
            "token_ids": None,
        }
        if reason is not None:
            choice["stop_reason"] = event.stop_reason
            if event.check is not None:
                choice["structure_check"] = check_text(event.check)
        if self._request.return_token_ids:
            choice["token_ids"] = event.token_ids if begins else []
        return self._head("chat.completion.chunk", [choice])

    def _logprobs(self, event: Event) -> ChatLogprobs | None:
        if not self._asked.logprobs or event.logprobs is None:
            return None
        pairs = zip(event.token_ids, event.logprobs, strict=True)
        return {"content": [self._token(token, entry) for token, entry in pairs], "refusal": None}

    def _token(self, token: int, entry: TokenLogprobs) -> TokenLogprob:
        top = self._asked.top_logprobs or 0
        shown = by_rank(entry) if self._asked.logprob_token_ids or top < 0 else by_rank(entry)[:top]
        return {**self._top(token, entry[token]), "top_logprobs": [self._top(*each) for each in shown]}

    def _top(self, token: int, found: Logprob) -> TopLogprob:
        text = self._tokens.texts([token])[0]
        data = None if "\ufffd" in text else list(text.encode())  # a part of a character has bytes we cannot tell
        return {"token": self._name(token), "logprob": finite(found), "bytes": data}


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
    message: dict[str, Any] = {"role": parts[0]["delta"].get("role", ""), "content": text}
    message |= dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
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
        "token_ids": None,
    }
    if "structure_check" in parts[-1]:
        choice["structure_check"] = parts[-1]["structure_check"]
    if parts[-1].get("token_ids") is not None:
        choice["token_ids"] = [token for part in parts for token in part.get("token_ids") or ()]
    return choice
