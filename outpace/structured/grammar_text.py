"""Checks a request's `structured_outputs`, and writes it as a grammar for llguidance."""

import json
import re
from dataclasses import dataclass
from typing import Any

from outpace.errors import InputError
from outpace.structured.ebnf import lark_of_ebnf
from outpace.structured.outputs import StructuredOutputs, is_text
from outpace.structured.regex import checked_regex
from outpace.structured.schema import MAX_DEPTH, checked_schema
from outpace.structured.vocabulary import llguidance

MAX_WHITESPACE = 40  # characters in a row between the parts of JSON: enough to indent, but not endless
_TAG_FORMATS = ("tags_with_separator", "triggered_tags")
_ANY_OBJECT = '{"type": "object"}'
_HEAD = "%llguidance {}\n"
_LARK = re.compile(r"^\s*start\s*:", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class GrammarText:
    """A grammar that has not been compiled yet."""

    text: str
    later: tuple[str, ...] = ()
    """Keywords of the schema that the grammar does not enforce, with their places."""


def grammar_text(asked: StructuredOutputs, name: str, max_depth: int = MAX_DEPTH) -> GrammarText:
    """The grammar for `asked`. name: of the field, for errors. InputError says why it cannot be enforced."""
    for text in (asked.json, asked.regex, asked.grammar, asked.structural_tag, *(asked.choice or ())):
        if isinstance(text, str) and not is_text(text):
            raise InputError(f"{name}: it holds a surrogate, which is not a character")
    if asked.choice is not None:
        return GrammarText(f"{_HEAD}start: CHOICE\nCHOICE: {' | '.join(map(_quoted, asked.choice))}\n")
    if asked.regex is not None:
        library = llguidance()
        return GrammarText(str(library.LLMatcher.grammar_from_regex(checked_regex(asked.regex, name))))
    if asked.grammar is not None:
        is_lark = "::=" not in asked.grammar and _LARK.search(asked.grammar) is not None
        return GrammarText(_HEAD + (asked.grammar if is_lark else lark_of_ebnf(asked.grammar, name)))
    if asked.structural_tag is not None:
        return _of_tags(asked.structural_tag, name, max_depth)
    given = asked.json if isinstance(asked.json, str) else _ANY_OBJECT
    schema = checked_schema(given, name, max_depth)
    options = _json_options(compact=asked.disable_any_whitespace)
    return GrammarText(
        str(llguidance().LLMatcher.grammar_from_json_schema(schema.text, overrides=options)), schema.later
    )


def _of_tags(text: str, where: str, max_depth: int) -> GrammarText:
    """The grammar of a structural tag: text with parts that hold JSON by a schema."""
    try:
        given = json.loads(text)
        form = given["format"]
        tags = [(str(tag["begin"]), tag["content"], str(tag["end"])) for tag in form["tags"]]
        kind, once = str(form["type"]), bool(form.get("stop_after_first"))
        triggers = [str(trigger) for trigger in form.get("triggers", ())]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise InputError(f"{where}: it is not a structural tag") from None
    if kind not in _TAG_FORMATS or not tags or (kind == "triggered_tags" and len(triggers) != 1):
        raise InputError(f"{where}: expected one of {' and '.join(_TAG_FORMATS)}, with tags, and with one trigger")
    bodies: list[str] = []
    lines: list[str] = []
    later: list[str] = []
    trigger = triggers[0] if kind == "triggered_tags" else ""
    for number, (begin, content, end) in enumerate(tags):
        if not begin.startswith(trigger):
            raise InputError(f"{where}: a tag that does not begin with its trigger")
        schema, unenforced = _schema(content, f"{where}: tag {number}", max_depth)
        later += unenforced
        parts = (_quoted(begin[len(trigger) :]), f"json{number}", _quoted(end))
        bodies.append(f"tag{number}")
        lines.append(f"tag{number}: {' '.join(part for part in parts if part)}")
        lines.append(f"json{number}: %json {json.dumps({'x-guidance': _json_options(), **schema})}")
    tag = " | ".join(bodies)
    if kind == "triggered_tags":
        start = "call | text" if once else "call* text"
        lines = [f"start: {start}", f"call: head ({tag})", "text: TEXT", "TEXT: /(?s:.)*/", *lines]
        lines.append(f"head[lazy]: TEXT {_quoted(trigger)}")
    else:
        separator = _quoted(str(form.get("separator", "")))
        more = "" if once else f" ({separator} tag)*"
        least = "" if form.get("at_least_one") else " | "
        lines = [f"start: tag{more}{least}", f"tag: {tag}", *lines]
    return GrammarText(_HEAD + "\n".join(lines) + "\n", tuple(later))


def _schema(content: Any, where: str, max_depth: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    if not isinstance(content, dict) or content.get("type") != "json_schema":
        raise InputError(f"{where}: its content is not of the type json_schema")
    checked = checked_schema(json.dumps(content.get("json_schema")), where, max_depth)
    found = json.loads(checked.text)
    return found if isinstance(found, dict) else {}, checked.later


def _json_options(*, compact: bool = False) -> dict[str, Any]:
    """llguidance's options of JSON."""
    space = {"whitespace_flexible": False} if compact else {"whitespace_pattern": rf"[ \n\r\t]{{1,{MAX_WHITESPACE}}}"}
    return {**space, "coerce_one_of": True}


def _quoted(text: str) -> str:
    """A text as a string of Lark; "" for an empty text, which Lark needs no string for."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""
