"""Chats as prompts: the template runs in a process of its own, under limits of time, memory and size."""

import json
import queue
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from outpace.errors import ModelError
from outpace.server.async_tokenizer import in_threads
from outpace.server.body import parse
from outpace.server.chat_protocol import ChatMessage, ToolSpec
from outpace.server.child import Child
from outpace.server.options import ServerConfig
from outpace.server.problems import ApiError, bad
from outpace.server.render import syntax_error

_SCRIPT = Path(__file__).with_name("render.py")
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize"})
"""Variables that a request may not set through chat_template_kwargs."""


class Renderer:
    """Renders chats with a template, off the event loop. A template that takes too long fails only its own chat."""

    def __init__(self, options: ServerConfig) -> None:
        self._options = options
        self._threads = ThreadPoolExecutor(options.template_processes, thread_name_prefix="chat-template")
        self._idle: queue.LifoQueue[Child] = queue.LifoQueue()
        self.closed = False

    async def render(self, template: str, variables: Callable[[], Mapping[str, Any]]) -> str:
        """The text of a chat; `variables` is called in a thread. ApiError if the template refuses the chat or breaks
        a limit."""
        return await in_threads(self._threads, self._render, template, variables)

    def _render(self, template: str, variables: Callable[[], Mapping[str, Any]]) -> str:
        options = self._options
        job = {"template": template, "variables": variables(), "max_chars": options.template_max_chars}
        data = json.dumps(job, ensure_ascii=False).encode()
        process = self._take()
        begin = time.monotonic()
        said = process.ask(data, options.template_timeout, 16 * options.template_max_chars + 4096)
        if said is None:
            process.close()
            late = time.monotonic() - begin >= options.template_timeout
            raise bad("messages", f"the chat template needs too much {'time' if late else 'memory'}")
        self._give(process)
        answer: dict[str, str] = json.loads(said)
        if "error" in answer:
            raise bad("messages", answer["error"])
        return answer["text"]

    def _take(self) -> Child:
        while not self._idle.empty():
            process = self._idle.get_nowait()
            if process.alive:
                return process
            process.close()
        options = self._options
        process = Child((str(_SCRIPT),), (str(options.template_memory_mb), str(options.template_timeout)))
        if not process.ready():
            process.close()
            raise ApiError(500, "The process for chat templates does not start.", code="internal_error")
        return process

    def _give(self, process: Child) -> None:
        if self.closed:
            process.close()
        else:
            self._idle.put(process)

    def close(self) -> None:
        """End the processes."""
        self.closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)
        while not self._idle.empty():
            self._idle.get_nowait().close()


class ChatPrompts:
    """Turns chats into pieces of text, with the tokenizer's own template or the operator's."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: ServerConfig, renderer: Renderer) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._renderer = renderer
        self._own = options.template_text()
        self._specials = _special_strings(tokenizer)
        self._tokens = {
            name: str(value) for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)
        }

    def template(self, tools: bool) -> str:
        """The text of the template that chats are written with."""
        if self._own is not None:
            return self._own
        try:
            return str(self._tokenizer.get_chat_template(tools=[{}] if tools else None))
        except ValueError:
            raise bad("messages", "the model has no chat template; use /v1/completions") from None

    def error(self, tools: bool) -> str | None:
        """Why no chat can be written with the template, whatever its messages are: it does not parse."""
        wrong = syntax_error(self.template(tools))
        whose = "the model" if self._own is None else "the option chat_template"
        return f"the chat template of {whose} is not valid Jinja ({wrong})" if wrong else None

    async def write(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        documents: Sequence[Mapping[str, str]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """The text in pieces; tokenize each piece separately. So special tokens come only from the template: where a
        message spells one out, the text is cut inside it."""
        if chat_template is not None and not self._options.allow_request_chat_template:
            raise bad("chat_template", "requests may not set it; start the server with allow_request_chat_template")
        if wrong := _RESERVED.intersection(variables or ()) | self._tokens.keys() & (variables or {}).keys():
            raise bad("chat_template_kwargs", f"{sorted(wrong)[0]} cannot be set here")
        template = chat_template or self.template(bool(tools))
        if not chat_template and (broken := self.error(bool(tools))):
            raise ApiError(
                500, f"{broken}; the server needs another one (--chat-template)", code="broken_chat_template"
            )
        called = next((number for number, message in enumerate(messages) if message.tool_calls), None)
        for name, field, given in (
            ("tools", "tools", tools),
            ("documents", "documents", documents),
            ("tool_calls", f"messages[{called}].tool_calls", called is not None),
        ):
            if given and not re.search(rf"\b{name}\b", template):
                raise bad(field, "the chat template of this model does not show them; remove them")
        cut, end = f"\ue000{secrets.token_hex(8)}\ue001", f"\ue000{secrets.token_hex(8)}\ue002"

        def shown() -> dict[str, Any]:
            chat = self._guarded([self._as_template_sees(message, at) for at, message in enumerate(messages)], cut)
            if continue_final_message:
                chat[-1]["content"] += end
            return {
                **self._guarded(variables or {}, cut),
                **self._tokens,
                "messages": chat,
                "tools": self._guarded([tool.model_dump(exclude_none=True) for tool in tools], cut) or None,
                "documents": self._guarded(list(documents or ()), cut) or None,
                "add_generation_prompt": add_generation_prompt and not continue_final_message,
            }

        text = await self._renderer.render(template, shown)
        if continue_final_message:
            text, found, _ = text.rpartition(end)
            if not found:
                raise bad("continue_final_message", "the chat template does not show the last message")
        return [piece for piece in text.split(cut) if piece]

    def _guarded(self, value: Any, cut: str) -> Any:
        """The value with a cut inside every special token that its strings spell out, in names of objects too."""
        if isinstance(value, str):
            return (
                value
                if self._specials is None
                else self._specials.sub(lambda found: found[0][:1] + cut + found[0][1:], value)
            )
        if isinstance(value, Mapping):
            return {self._guarded(name, cut): self._guarded(item, cut) for name, item in value.items()}
        return [self._guarded(item, cut) for item in value] if isinstance(value, list) else value

    def _as_template_sees(self, message: ChatMessage, position: int) -> dict[str, Any]:
        """A message as templates expect it: the role developer becomes system, and arguments become an object."""
        shown: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            "content": message.text or "",
        }
        shown |= {name: value for name in ("name", "tool_call_id") if (value := getattr(message, name)) is not None}
        if reasoning := message.reasoning_content or message.reasoning:
            shown |= {"reasoning_content": reasoning, "reasoning": reasoning}  # templates know one or the other
        if message.tool_calls:
            shown["tool_calls"] = [
                {
                    "id": call.id or f"call_{number}",
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": self._arguments(
                            call.function.arguments, f"messages[{position}].tool_calls[{number}].function.arguments"
                        ),
                    },
                }
                for number, call in enumerate(message.tool_calls)
            ]
        return shown

    def _arguments(self, text: str, where: str) -> dict[str, Any]:
        """The arguments of a call as an object, within the limits of bodies."""
        try:
            found = parse(text.encode() or b"{}", self._options)
        except ValueError as error:
            raise bad(where, f"expected a JSON object as text: {error}") from None
        if not isinstance(found, dict):
            raise bad(where, "expected a JSON object as text")
        return found


def _special_strings(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """A pattern for the special tokens that a text spells out; of those that begin alike, it finds the longest."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    strings = {text for text in (*tokenizer.all_special_tokens, *added) if len(text) > 1}
    return re.compile("|".join(re.escape(text) for text in sorted(strings, key=len, reverse=True))) if strings else None


def need_tokenizer(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    """The tokenizer, or an error at start-up: the server cannot work without one."""
    if tokenizer is None:
        raise ModelError("tokenizer: the model has none, and the server needs one; put it beside the model")
    return tokenizer
