"""How /v1/chat/completions writes deltas."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outpace.server.async_tokenizer import AsyncTokenizer
from outpace.server.engine import Delta, EngineRequest, WireLogprobs
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
from outpace.server.tools import Call, Parser, Piece, Style, parser_of
from outpace.server.write import AnswerWriter, by_rank, check_text, finite


@dataclass(slots=True)
class _Message:
    """One answer of a chat as it grows."""

    parser: Parser | None
    begun: bool = False
    calls: int = 0


class ChatWriter(AnswerWriter):
    """/v1/chat/completions."""

    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        request: ChatRequest,
        prompt: EngineRequest,
        tokenizer: AsyncTokenizer,
        model: str,
        name: str,
        *,
        role: str,
        style: Style,
    ) -> None:
        super().__init__(request, [prompt], tokenizer, model, name)
        self._asked, self._role = request, role
        self._only_calls = prompt.structure == "tool_choice"  # an incomplete call was cut off, and is not text
        self._messages = [_Message(parser_of(style)) for _ in range(prompt.params.n)]
        self._prompt_shown = False  # by the first chunk of all

    def chunks(self, delta: Delta) -> list[ChatChunk]:
        """What a delta adds. The first chunk of an answer has only its role; each call is one whole chunk."""
        message, chunks = self._messages[delta.index], []
        if not message.begun:
            message.begun = True
            chunks.append(self._first(delta))
        self._count(delta)
        parts = [part for piece in self._pieces(message, delta) if (part := self._part(message, piece))]
        if not parts and (delta.finish_reason or delta.logprobs or self._request.return_token_ids):
            parts = [{}]
        return chunks + [
            self._chunk(message, delta, part, begins=number == 0, ends=number == len(parts) - 1)
            for number, part in enumerate(parts)
        ]

    def _first(self, delta: Delta) -> ChatChunk:
        """The first chunk of an answer, without tokens; the very first one also describes the prompt."""
        part: AnswerDelta = {"role": self._role, "content": ""}
        choice: ChatChunkChoice = {"index": delta.index, "delta": part, "logprobs": None, "finish_reason": None}
        chunk: ChatChunk = self._head([choice])
        if not self._prompt_shown:
            self._prompt_shown = True
            chunk["prompt_token_ids"] = self._prompts[0].prompt_token_ids if self._request.return_token_ids else None
            if self._request.prompt_logprobs is not None:
                chunk["prompt_logprobs"] = self._prompt_logprobs(delta.prompt_logprobs or [])
        return chunk

    def whole(self, chunks: Sequence[ChatChunk]) -> ChatCompletion:
        result: ChatCompletion = self._whole_head("chat.completion", list(map(_message, self._by_answer(chunks))))
        result["prompt_logprobs"] = chunks[0].get("prompt_logprobs")
        result["prompt_token_ids"] = chunks[0].get("prompt_token_ids")
        return result

    def _pieces(self, message: _Message, delta: Delta) -> list[Piece]:
        if message.parser is None:
            return [delta.text]
        pieces = message.parser.feed(delta.text)
        return [*pieces, *message.parser.finish()] if delta.finish_reason else pieces

    def _part(self, message: _Message, piece: Piece) -> AnswerDelta:
        if isinstance(piece, str):
            return {"content": piece} if piece and not self._only_calls else {}
        if message.calls and self._asked.parallel_tool_calls is False:
            return {}
        call: ToolCall = _tool_call(piece, message.calls)
        message.calls += 1
        return {"tool_calls": [call]}

    def _chunk(self, message: _Message, delta: Delta, part: AnswerDelta, *, begins: bool, ends: bool) -> ChatChunk:
        """Log-probabilities are in the first chunk of a delta, the finish reason in its last."""
        reason: FinishText | None = delta.finish_reason.value if ends and delta.finish_reason else None
        choice: ChatChunkChoice = {
            "index": delta.index,
            "delta": part,
            "logprobs": self._logprobs(delta) if begins else None,
            "finish_reason": "tool_calls" if reason == "stop" and message.calls else reason,
            "token_ids": None,
        }
        if reason is not None:
            choice["stop_reason"] = delta.stop_reason
            if delta.check is not None:
                choice["structure_check"] = check_text(delta.check)
        if self._request.return_token_ids:
            choice["token_ids"] = delta.token_ids if begins else []
        return self._head([choice])

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self._asked.logprobs or delta.logprobs is None:
            return None
        return {"content": [self._token(entry) for entry in delta.logprobs], "refusal": None}

    def _token(self, entry: WireLogprobs) -> TokenLogprob:
        top = self._asked.top_logprobs or 0
        shown = by_rank(entry) if self._asked.logprob_token_ids or top < 0 else by_rank(entry)[:top]
        return {**self._top(*entry[0]), "top_logprobs": [self._top(*each) for each in shown]}

    def _top(self, token: int, logprob: float, rank: int) -> TopLogprob:
        text = self._tokenizer.texts([token])[0]
        data = None if "\ufffd" in text else list(text.encode())  # the bytes of a part of a character are not known
        return {"token": self._name(token), "logprob": finite(logprob), "bytes": data}


def _tool_call(call: Call, index: int) -> ToolCall:
    return {
        "index": index,
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _message(parts: Sequence[ChatChunkChoice]) -> Any:
    """One choice, joined from its chunks."""
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
