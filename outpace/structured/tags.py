"""Structural tags, text with parts that hold JSON by a schema, in the Lark that llguidance reads."""

import json
from collections.abc import Mapping
from typing import Any

from outpace.errors import InputError
from outpace.structured.schema import checked_schema

_FORMATS = ("tags_with_separator", "triggered_tags")


def lark_of_tags(text: str, where: str, max_depth: int, json_options: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The grammar of a structural tag, and the keywords of its schemas that it does not enforce."""
    try:
        given = json.loads(text)
        form = given["format"]
        tags = [(str(tag["begin"]), tag["content"], str(tag["end"])) for tag in form["tags"]]
        kind, once = str(form["type"]), bool(form.get("stop_after_first"))
        triggers = [str(trigger) for trigger in form.get("triggers", ())]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise InputError(f"{where}: it is not a structural tag") from None
    if kind not in _FORMATS or not tags or (kind == "triggered_tags" and len(triggers) != 1):
        raise InputError(f"{where}: expected one of {' and '.join(_FORMATS)}, with tags, and with one trigger")
    bodies: list[str] = []
    lines: list[str] = []
    later: list[str] = []
    trigger = triggers[0] if kind == "triggered_tags" else ""
    for number, (begin, content, end) in enumerate(tags):
        if not begin.startswith(trigger):
            raise InputError(f"{where}: a tag that does not begin with its trigger")
        schema, unheld = _schema(content, f"{where}: tag {number}", max_depth)
        later += unheld
        parts = (_quoted(begin[len(trigger) :]), f"json{number}", _quoted(end))
        bodies.append(f"tag{number}")
        lines.append(f"tag{number}: {' '.join(part for part in parts if part)}")
        lines.append(f"json{number}: %json {json.dumps({'x-guidance': json_options, **schema})}")
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
    return "\n".join(lines) + "\n", tuple(later)


def _schema(content: Any, where: str, max_depth: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    if not isinstance(content, dict) or content.get("type") != "json_schema":
        raise InputError(f"{where}: its content is not of the type json_schema")
    checked = checked_schema(json.dumps(content.get("json_schema")), where, max_depth)
    found = json.loads(checked.text)
    return found if isinstance(found, dict) else {}, checked.later


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
