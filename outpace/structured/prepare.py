"""What is asked for, checked and written as a grammar of llguidance."""

import json
import re
from dataclasses import dataclass
from typing import Any

from outpace.errors import InputError
from outpace.structure import StructuredOutputs
from outpace.structured.ebnf import lark_of_ebnf
from outpace.structured.regex import checked_regex
from outpace.structured.schema import MAX_DEPTH, checked_schema
from outpace.structured.tags import lark_of_tags
from outpace.structured.vocabulary import llguidance

MAX_WHITESPACE = 40  # characters in a row between the parts of JSON: room to indent, but not to go on for ever
_ANY_OBJECT = '{"type": "object"}'
_HEAD = "%llguidance {}\n"
_LARK = re.compile(r"^\s*start\s*:", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A grammar that has not been compiled yet."""

    grammar: str
    later: tuple[str, ...] = ()
    """Keywords of the schema that the grammar does not enforce, with their places."""


def prepare(asked: StructuredOutputs, name: str, max_depth: int = MAX_DEPTH) -> Prepared:
    """The grammar of what is asked. name: what the caller calls it; InputError: it cannot be kept to, and why."""
    for text in (asked.json, asked.regex, asked.grammar, asked.structural_tag, *(asked.choice or ())):
        if isinstance(text, str) and not _is_text(text):
            raise InputError(f"{name}: it holds a surrogate, which is not a character")
    if asked.choice is not None:
        return Prepared(f"{_HEAD}start: CHOICE\nCHOICE: {' | '.join(map(quoted, asked.choice))}\n")
    if asked.regex is not None:
        library = llguidance()
        return Prepared(str(library.LLMatcher.grammar_from_regex(checked_regex(asked.regex, name))))
    if asked.grammar is not None:
        is_lark = "::=" not in asked.grammar and _LARK.search(asked.grammar) is not None
        return Prepared(_HEAD + (asked.grammar if is_lark else lark_of_ebnf(asked.grammar, name)))
    if asked.structural_tag is not None:
        lark, later = lark_of_tags(asked.structural_tag, name, max_depth, json_options())
        return Prepared(_HEAD + lark, later)
    given = asked.json if isinstance(asked.json, str) else _ANY_OBJECT
    schema = checked_schema(given, name, max_depth)
    options = json_options(compact=asked.disable_any_whitespace)
    return Prepared(str(llguidance().LLMatcher.grammar_from_json_schema(schema.text, overrides=options)), schema.later)


def json_options(*, compact: bool = False) -> dict[str, Any]:
    """How JSON is written."""
    space = {"whitespace_flexible": False} if compact else {"whitespace_pattern": rf"[ \n\r\t]{{1,{MAX_WHITESPACE}}}"}
    return {**space, "coerce_one_of": True}


def quoted(text: str) -> str:
    """A text as a string of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
