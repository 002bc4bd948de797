"""Tool calls in the text of an answer, found as the text comes: Hermes' tags and Llama 3's JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from outpace.structured.check import SchemaCheck
from outpace.structured.outputs import StructureCheck
from outpace.structured.schema import no_constant

Style = Literal["hermes", "llama3_json", "none"]
_BEGIN, _END = "<tool_call>", "</tool_call>"
_TAG = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class Call:
    """A function call that the model asks for."""

    name: str
    arguments: str
    """JSON object as text."""


Piece = str | Call
"""Text of the answer, or a call."""


class Parser(Protocol):
    """Divides an answer into text and calls. What may become a call is held back."""

    def feed(self, text: str) -> list[Piece]:
        """Add text; returns the pieces that are certain now."""

    def finish(self) -> list[Piece]:
        """What is left when the answer has ended."""


def style_of(template: str, asked: str) -> Style:
    """How the model writes its calls, by what its chat template shows."""
    if asked in ("hermes", "llama3_json"):
        return asked  # type: ignore[return-value]
    if asked == "auto" and _BEGIN in template:
        return "hermes"
    if asked == "auto" and _TAG in template:
        return "llama3_json"
    return "none"


def parser_of(style: Style) -> Parser | None:
    """A parser for one answer; None: all of it is text."""
    if style == "hermes":
        return Hermes()
    return LlamaJson() if style == "llama3_json" else None


def call_format(style: Style, tools: Mapping[str, Any], *, required: bool, several: bool) -> dict[str, Any] | None:
    """A structural tag for calls of these tools (name -> schema of the arguments); None: the style has no such form.

    required: the answer is only calls, at least one; otherwise it is text, and what begins like a call must be one.
    several: there may be more than one call.
    """
    if style == "none" or (style == "llama3_json" and not required):
        return None
    key = "arguments" if style == "hermes" else "parameters"
    before, after = (f"{_BEGIN}\n", f"\n{_END}") if style == "hermes" else ("", "")
    tags = [
        {
            "type": "tag",
            "begin": f'{before}{{"name": {json.dumps(name)}, "{key}": ',
            "content": {"type": "json_schema", "json_schema": schema},
            "end": f"}}{after}",
        }
        for name, schema in tools.items()
    ]
    if required:
        separator = "\n" if style == "hermes" else "; "
        calls = {"type": "tags_with_separator", "tags": tags, "separator": separator, "at_least_one": True}
    else:
        calls = {"type": "triggered_tags", "triggers": [_BEGIN], "tags": tags}
    return {"type": "structural_tag", "format": {**calls, "stop_after_first": not several}}


class CallCheck:
    """Checks the calls of a finished answer for rules that their grammar does not enforce."""

    def __init__(self, style: Style, checks: Mapping[str, SchemaCheck]) -> None:
        """checks: by the name of the tool."""
        self._style, self._checks = style, checks

    def __call__(self, text: str) -> StructureCheck:
        """Check the text of an answer."""
        checked = tuple(f"{name}: {place}" for name, check in self._checks.items() for place in check.later)
        parser = parser_of(self._style)
        for piece in (*parser.feed(text), *parser.finish()) if parser is not None else ():
            if isinstance(piece, Call) and piece.name in self._checks:
                found = self._checks[piece.name](piece.arguments)
                if found.problem is not None:
                    return StructureCheck(checked, f"{piece.name}: {found.problem}")
        return StructureCheck(checked, None)


class Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, with text around.

    Text is scanned once. Held back are the beginning of a tag, and a call that is not closed.
    """

    def __init__(self) -> None:
        self._held: list[str] = []  # inside a call: its text; outside: at most the beginning of a tag
        self._tail = ""  # the end of what is held, where a tag may have begun
        self._inside = False
        self._called = False

    def feed(self, text: str) -> list[Piece]:
        """Add text; returns the pieces that are certain now."""
        pieces: list[Piece] = []
        while True:
            tag = _END if self._inside else _BEGIN
            text = self._tail + text
            before, found, after = text.partition(tag)
            if not found:
                keep = _begun(text, tag)
                self._tail = text[len(text) - keep :]
                self._pass(text[: len(text) - keep], pieces)
                return pieces
            self._pass(before, pieces)
            if self._inside:
                inner = "".join(self._held)
                self._held.clear()
                call = _call(_object(inner), "arguments")
                pieces.append(f"{_BEGIN}{inner}{_END}" if call is None else call)
                self._called = self._called or call is not None
            self._inside, self._tail, text = not self._inside, "", after

    def finish(self) -> list[Piece]:
        """What is left. A call that was never closed counts if it is complete."""
        text = "".join(self._held) + self._tail
        self._held, self._tail = [], ""
        if not self._inside:
            return [text] if text and not (self._called and text.isspace()) else []
        call = _call(_object(text), "arguments")
        return [f"{_BEGIN}{text}" if call is None else call]

    def _pass(self, text: str, pieces: list[Piece]) -> None:
        if self._inside:
            self._held.append(text)
        elif text and not (self._called and text.isspace()):  # line ends between calls are not text
            pieces.append(text)


class LlamaJson:
    """`{"name": ..., "parameters": {...}}` and nothing else, or several separated by semicolons."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self._text = False  # the answer is text for certain

    def feed(self, text: str) -> list[Piece]:
        """Return text at once, if the answer does not begin like a call."""
        if self._text:
            return [text] if text else []
        self._held.append(text)
        begin = "".join(self._held[:8]).lstrip().removeprefix(_TAG).lstrip()
        if begin and begin[0] != "{" and not _TAG.startswith(begin[: len(_TAG)]):
            self._text = True
            held, self._held = "".join(self._held), []
            return [held]
        return []

    def finish(self) -> list[Piece]:
        """The calls, or all of it as text."""
        text = "".join(self._held)
        self._held = []
        calls = _several(text.strip().removeprefix(_TAG))
        return list(calls) if calls else [text] if text else []


def _several(text: str) -> list[Call] | None:
    decoder, place, calls = json.JSONDecoder(parse_constant=no_constant), 0, []
    while place < len(text):
        if text[place] in "; \n\t\r":
            place += 1
            continue
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            return None
        call = _call(value, "parameters") or _call(value, "arguments")
        if call is None:
            return None
        calls.append(call)
    return calls or None


def _object(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=no_constant)
    except (ValueError, RecursionError):
        return None


def _call(value: Any, arguments: str) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = value.get(arguments, {} if value.keys() == {"name"} else None)
    if not isinstance(given, dict):
        return None
    name = value["name"].encode(errors="replace").decode()  # escapes in JSON can spell invalid characters
    return Call(name, json.dumps(given, ensure_ascii=False).encode(errors="replace").decode())


def _begun(text: str, tag: str) -> int:
    """Number of characters at the end of the text that begin the tag."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0
