"""Structured outputs: the form that a request asks for is read from its fields, checked, and compiled."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outpace.errors import InputError
from outpace.server.chat_protocol import NamedTool
from outpace.server.grammars import Check, GrammarService, Make
from outpace.server.options import ServerConfig
from outpace.server.problems import ApiError, bad
from outpace.server.protocol import ChatRequest, SamplingFields
from outpace.server.tools import CallCheck, Style, call_format
from outpace.structured.check import SchemaCheck
from outpace.structured.outputs import STRUCTURES, StructuredOutputs
from outpace.structured.schema import checked_schema
from outpace.structured.wire import WireGrammar

_NO_FORM: Mapping[Style, str] = {
    "none": "the chat template shows no known format of tool calls; name one with the option tool_call_parser",
    "llama3_json": "calls in the style of Llama 3 can follow a schema only if a call is required",
}
_GUIDED = ("json", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True)
class Structure:
    """The form of an answer, and the field that asks for it."""

    field: str
    asked: StructuredOutputs
    make: Make | None = None
    """If given, it returns the checked form, in milliseconds; `asked` is then only the key of the cache."""


class Structures:
    """Knows the limits, and how the model writes tool calls."""

    def __init__(self, options: ServerConfig, style: Style, grammars: GrammarService) -> None:
        self._options, self._style, self._grammars = options, style, grammars

    async def grammar(self, request: SamplingFields) -> tuple[WireGrammar | None, str]:
        """The grammar that a request asks for, and in which field; None if it asks for none."""
        try:
            found = self.find(request)
            if found is None:
                return None, ""
            return await self._grammars.compile(found.field, found.asked, found.make), found.field
        except InputError as error:
            raise ApiError(400, str(error), param=str(error).partition(":")[0]) from None

    def find(self, request: SamplingFields) -> Structure | None:
        """The form that a request asks for, in at most one field, within the limits. Only compiling it shows whether
        it can be enforced."""
        found = [Structure(name, asked) for name, asked in _fields(request).items()]
        for structure in found:
            self._check_size(structure)
        if isinstance(request, ChatRequest) and (calls := self._calls(request)) is not None:
            found.append(calls)
        if len(found) > 1:
            raise bad(found[0].field, f"not together with {found[1].field}; give one of them")
        if not found:
            return None
        tools = isinstance(request, ChatRequest) and request.tools and request.tool_choice != "none"
        if tools and self._style != "none" and not found[0].field.startswith("tool"):
            raise bad(found[0].field, "not together with tools that may be called; set tool_choice to none")
        return found[0]

    def _check_size(self, structure: Structure) -> None:
        options, asked = self._options, structure.asked
        sizes = (
            (len(str(asked.json or "").encode(errors="replace")), options.max_schema_bytes, "bytes"),
            (len(asked.regex or ""), options.max_regex_chars, "characters"),
            (len((asked.grammar or "").encode(errors="replace")), options.max_grammar_bytes, "bytes"),
            (len(asked.choice or ()), options.max_choices, "texts"),
            (sum(len(text) for text in asked.choice or ()), options.max_schema_bytes, "characters"),
        )
        for size, most, what in sizes:
            if size > most:
                raise bad(structure.field, f"{size} {what} are more than this server takes: {most}", "limit_exceeded")

    def _calls(self, request: ChatRequest) -> Structure | None:
        """The form of required or strict tool calls."""
        tools, choice = request.tools or [], request.tool_choice
        strict = [number for number, tool in enumerate(tools) if tool.function.strict]
        required = choice == "required" or isinstance(choice, NamedTool)
        if choice == "none" or not (required or strict):
            return None
        field = "tool_choice" if required else f"tools[{strict[0]}].function.strict"
        given: dict[str, tuple[str, Any]] = {}  # name -> place of its schema, the schema
        for number, tool in enumerate(tools):
            function = tool.function
            if function.name in given:
                raise bad(f"tools[{number}].function.name", "another tool has this name")
            if not isinstance(choice, NamedTool) or function.name == choice.function.name:
                kept = function.parameters if required or function.strict else None
                given[function.name] = f"tools[{number}].function.parameters", {} if kept is None else kept
        if len(json.dumps(given)) > self._options.max_schema_bytes:
            raise bad(
                "tools", f"their schemas are longer than {self._options.max_schema_bytes} bytes", "limit_exceeded"
            )
        several = request.parallel_tool_calls is not False and not isinstance(choice, NamedTool)

        def calls(schemas: Mapping[str, Any]) -> StructuredOutputs:
            found = call_format(self._style, schemas, required=required, several=several)
            if found is None:
                raise bad(field, _NO_FORM[self._style])
            return StructuredOutputs(structural_tag=json.dumps(found))

        def checked() -> tuple[StructuredOutputs, Check | None]:
            schemas: dict[str, Any] = {}
            checks: dict[str, SchemaCheck] = {}
            for name, (where, schema) in given.items():
                schemas[name], check = self._arguments(where, schema)
                if check is not None:
                    checks[name] = check
            return calls(schemas), CallCheck(self._style, checks) if checks else None

        return Structure(field, calls({name: schema for name, (_, schema) in given.items()}), checked)

    def _arguments(self, where: str, schema: Mapping[str, Any]) -> tuple[Any, SchemaCheck | None]:
        """The schema of arguments in the form to compile, and the check of rules that the grammar does not enforce."""
        if schema and schema.get("type", "object") != "object":
            raise bad(where, "expected the schema of an object")
        text = json.dumps({"type": "object", **schema})
        found = checked_schema(text, where, self._options.max_schema_depth)
        return json.loads(found.text), SchemaCheck(text, found.later, where) if found.later else None


def _fields(request: SamplingFields) -> dict[str, StructuredOutputs]:
    """The fields that ask for a form."""
    found: dict[str, StructuredOutputs] = {}
    format = request.response_format
    if format is not None and format.type == "json_object":
        found["response_format"] = StructuredOutputs(json_object=True)
    elif format is not None and format.json_schema is not None:
        found["response_format.json_schema.schema"] = StructuredOutputs(json=format.json_schema["schema"])
    for name in _GUIDED:
        if (value := getattr(request, f"guided_{name}")) is not None:
            found[f"guided_{name}"] = StructuredOutputs(**{name: value})
    given = request.structured_outputs
    if given is not None:
        known = [name for name in STRUCTURES if name != "structural_tag"]
        if unknown := given.keys() - {*known, "disable_any_whitespace"}:
            raise bad("structured_outputs", f"{min(unknown)[:80]!r} is unknown; it takes one of {', '.join(known)}")
        made = StructuredOutputs(**given)
        found[f"structured_outputs.{made.kind}"] = made
    return found
