"""Messages and tools of chats, as clients send them, also in history that they send back unchanged."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from outpace.server.fields import STRICT, Body, FirstError, Text


def _as_text(value: object) -> object:
    """Join content that is given in parts."""
    if not isinstance(value, list):
        return value
    known = {"type", "text"} if STRICT.get() else {"type", "text", "cache_control"}
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not part.keys() <= known:
            raise ValueError('expected text, or only parts {"type": "text", "text": ...}: no images, audio or files')
        if not isinstance(part.get("text"), str):
            raise ValueError("expected a string as the text of a part")
        texts.append(part["text"])
    return "\n".join(texts)


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str
    cache_control: Any = None
    """Of other servers' caches; ignored."""


Content = Annotated[str, BeforeValidator(_as_text, json_schema_input_type=str | list[TextPart])]


class CalledFunction(Body):
    """The function that an assistant called."""

    name: Text
    arguments: str
    """JSON object as text."""


class CalledTool(Body):
    """A call in an assistant's message."""

    lenient: ClassVar[frozenset[str]] = frozenset({"provider_specific_fields"})

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    provider_specific_fields: dict[str, Any] | None = None
    """Ignored, as in messages."""


_ECHOED = frozenset({"refusal", "annotations", "reasoning", "reasoning_content"})
"""Fields of answers, which clients send back in messages of the assistant."""


class ChatMessage(Body):
    """One message of a conversation."""

    refused: ClassVar[Mapping[str, str]] = {
        "audio": "this server takes only text",
        "function_call": "use tool_calls",
    }
    lenient: ClassVar[frozenset[str]] = _ECHOED | {"id", "provider_specific_fields", "cache_control"}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[CalledTool], FirstError()] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    """Used as the content if that is null; otherwise ignored."""
    reasoning: str | None = None
    """Shown to the template, which decides what to do with it; also under its older name."""
    reasoning_content: str | None = None
    annotations: list[Any] | None = None
    """Ignored, as are the fields below: they change nothing that the model sees."""
    id: str | None = None
    provider_specific_fields: dict[str, Any] | None = None
    cache_control: Any = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> "ChatMessage":
        if self.role != "assistant" and (wrong := sorted(_ECHOED & self.model_fields_set)):
            raise ValueError(f"{wrong[0]}: only in messages of the assistant")
        if self.text is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content: missing; only an assistant's message with tool_calls needs none")
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError("tool_calls: only in messages of the assistant")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError("tool_call_id: only in messages of a tool")
        return self

    @property
    def text(self) -> str | None:
        """The text of the message."""
        return self.refusal if self.content is None else self.content


def check_continuation(messages: Sequence[ChatMessage], add_generation_prompt: bool | None) -> None:
    """Refuse `continue_final_message` where there is nothing to continue."""
    if add_generation_prompt:
        raise ValueError("continue_final_message: not with add_generation_prompt=true")
    if not messages or messages[-1].role != "assistant" or not messages[-1].text:
        raise ValueError("continue_final_message: the last message must be the assistant's, with content")


class FunctionSpec(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments."""
    strict: bool | None = None
    """Enforce the schema of the arguments also when the model may choose whether to call."""


class ToolSpec(Body):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Body):
    """The name of a function."""

    name: Text


class NamedTool(Body):
    """The tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction
