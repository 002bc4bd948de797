"""JSON schemas that can be kept to exactly. xgrammar passes over keywords that it does not know; here they are refused.

What is accepted may be narrowed, never widened: every answer is valid by the schema as it was given.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from outpace.errors import InputError
from outpace.structured.regex import checked_regex

Schema = dict[str, Any]

MAX_DEPTH = 32
MAX_QUICK = 128  # repetitions of a character class that xgrammar works out beforehand
_NOTES = frozenset(
    {"title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"}
    | {"$schema", "$id", "$comment"}
)
_DEFINITIONS = ("$defs", "definitions")
_FORMS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
    ),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "boolean": (),
    "null": (),
}
_KNOWN = frozenset(_NOTES.union(_DEFINITIONS, _FORMS, {"type"}, *_KEYWORDS.values()))
_FORMATS = frozenset(
    {"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "uri-reference"}
    | {"uri-template"}
)
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def checked_schema(text: str, where: str, max_depth: int = MAX_DEPTH) -> str:
    """The schema as xgrammar understands it. InputError names what cannot be kept to."""
    try:
        schema = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: it is not JSON ({str(error)[:80]})") from None
    return json.dumps(_Check(schema, where, max_depth).schema("#", schema), ensure_ascii=False)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name[:20]} is not a number of JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _no_constant(digits)


class _Check:
    """One schema with its definitions."""

    def __init__(self, root: Any, where: str, max_depth: int) -> None:
        self._root, self._where, self._max_depth = root, where, max_depth

    def refused(self, at: str, problem: str) -> InputError:
        """The error for something at a place in the schema."""
        place = at.removeprefix("#").removeprefix("/").replace("/", ".")
        return InputError(f"{self._where}: {place[:200] + ': ' if place else ''}{problem}")

    def schema(self, at: str, schema: Any, depth: int = 0) -> Any:
        """A schema or a part of one, checked; where it leaves a choice, the choice is made."""
        if depth > self._max_depth:
            raise self.refused(at, f"nested more than {self._max_depth} deep")
        if schema is True:
            return True
        if not isinstance(schema, dict):
            raise self.refused(at, f"expected a schema, got {json.dumps(schema)[:40]}")
        for name in schema:
            if name not in _KNOWN:
                raise self.refused(at, f"the keyword {name[:40]!r} is not supported, and it is not ignored in silence")
        found: Schema = {name: value for name, value in schema.items() if name not in _NOTES}
        for name in _DEFINITIONS:
            if name in found:
                found[name] = self._each(f"{at}/{name}", found[name], depth)
        forms = [name for name in _FORMS if name in found]
        if forms:
            return self._form(at, found, forms, depth)
        return self._typed(at, found, depth)

    def _each(self, at: str, schemas: Any, depth: int) -> Schema:
        if not isinstance(schemas, dict):
            raise self.refused(at, "expected an object of schemas")
        return {name: self.schema(f"{at}/{name}", part, depth + 1) for name, part in schemas.items()}

    def _several(self, at: str, schemas: Any, depth: int) -> list[Any]:
        if not isinstance(schemas, list) or not schemas:
            raise self.refused(at, "expected a list of schemas that is not empty")
        return [self.schema(f"{at}/{index}", part, depth + 1) for index, part in enumerate(schemas)]

    def _form(self, at: str, found: Schema, forms: list[str], depth: int) -> Schema:
        """A schema that is given by one keyword."""
        form = forms[0]
        beside = [name for name in found if name != form and name not in _DEFINITIONS]
        if form in ("const", "enum") and beside == ["type"]:
            beside = []
        if beside:
            raise self.refused(at, f"{form} and {beside[0]} in one schema are not supported together")
        if form == "$ref":
            self._resolve(at, found["$ref"])
        elif form in ("const", "enum"):
            self._values(at, found)
            found.pop("type", None)
        else:
            parts = self._several(f"{at}/{form}", found[form], depth)
            if form == "allOf" and len(parts) > 1:
                raise self.refused(at, "allOf of several schemas is not supported; write them as one")
            if form == "oneOf":
                self._check_disjoint(at, parts)
                del found["oneOf"]
                form = "anyOf"
            found[form] = parts
        return found

    def _values(self, at: str, found: Schema) -> None:
        values = [found["const"]] if "const" in found else found["enum"]
        if not isinstance(values, list) or not values:
            raise self.refused(at, "enum: expected a list of values that is not empty")
        if "type" in found:
            types = self._types(at, found["type"])
            for value in values:
                if not any(_is(value, kind) for kind in types):
                    raise self.refused(at, f"enum: {json.dumps(value)[:40]} is not of type {found['type']}")

    def _resolve(self, at: str, reference: Any) -> Any:
        """What a reference stands for. One that leads to itself alone stands for nothing."""
        seen: set[str] = set()
        while True:
            if not isinstance(reference, str) or reference in seen:
                raise self.refused(at, f"$ref: {str(reference)[:80]!r} leads to itself alone")
            if len(seen) > self._max_depth:
                raise self.refused(at, f"$ref: more than {self._max_depth} references in a row")
            seen.add(reference)
            target = self._target(at, reference)
            if not isinstance(target, dict) or "$ref" not in target:
                return target
            reference = target["$ref"]

    def _target(self, at: str, reference: str) -> Any:
        kind, _, name = reference.removeprefix("#/").partition("/")
        if reference == "#":
            return self._root
        definitions = self._root.get(kind) if isinstance(self._root, dict) and kind in _DEFINITIONS else None
        plain = name and not any(letter in name for letter in "/~%")
        if not reference.startswith("#/") or not plain or not isinstance(definitions, dict) or name not in definitions:
            raise self.refused(at, f"$ref: {reference[:80]!r} is not one of #, #/$defs/NAME and #/definitions/NAME")
        return definitions[name]

    def _check_disjoint(self, at: str, parts: list[Any]) -> None:
        """oneOf is anyOf if no value fits two of them."""
        seen: set[str] = set()
        tagged: list[dict[str, set[str]]] = []
        for part in parts:
            branch = self._resolve(at, part["$ref"]) if isinstance(part, dict) and "$ref" in part else part
            kind = branch.get("type") if isinstance(branch, dict) else None
            if kind == "object":
                tagged.append(_tags(branch))
                continue
            kinds = {kind} if isinstance(kind, str) else set(map(str, kind)) if isinstance(kind, list) else {"?"}
            kinds = kinds | {"integer", "number"} if kinds & {"integer", "number"} else kinds
            if "?" in kinds or seen & kinds or "object" in kinds:
                raise self.refused(at, "oneOf: two of its schemas may fit one value; use anyOf")
            seen |= kinds
        if len(tagged) > 1 and not any(_tells_apart(name, tagged) for name in tagged[0]):
            raise self.refused(
                at, "oneOf: two of its schemas may fit one value; give one required property other values in each"
            )

    def _types(self, at: str, given: Any) -> list[str]:
        types = [given] if isinstance(given, str) else given
        if not isinstance(types, list) or not types or not all(kind in _KEYWORDS for kind in map(str, types)):
            raise self.refused(at, f"type: {json.dumps(given)[:60]} is not one of {', '.join(_KEYWORDS)}, or a list")
        return types

    def _typed(self, at: str, found: Schema, depth: int) -> Any:
        """A schema that is given by a type and its keywords."""
        used = [name for name in found if name not in _DEFINITIONS and name != "type"]
        if "type" not in found:
            if not used:
                return found or True
            fitting = [kind for kind, names in _KEYWORDS.items() if set(used) <= set(names)]
            if not fitting:
                raise self.refused(at, f"type: missing beside {used[0]}")
            found["type"] = "number" if "number" in fitting else fitting[0]
        types = self._types(at, found["type"])
        for name in _COUNTS:
            if name in found and (type(found[name]) is not int or found[name] < 0):
                raise self.refused(at, f"{name}: expected a count")
        if {"integer", "number"} & set(types):
            self._check_number(at, found, types)
        if "string" in types:
            self._check_string(at, found)
        if "object" in types:
            self._object(at, found, depth)
        if "array" in types:
            self._array(at, found, depth)
        return found

    def _check_number(self, at: str, found: Schema, types: list[str]) -> None:
        bounds = [name for name in _BOUNDS if name in found]
        for name in bounds:
            if type(found[name]) not in (int, float):
                raise self.refused(at, f"{name}: expected a number")
        if "multipleOf" in found:
            if "number" in types or type(found["multipleOf"]) is not int or not 1 <= found["multipleOf"] <= 1024:
                raise self.refused(at, "multipleOf: only 1 to 1024, of type integer, is supported")
            if bounds:
                raise self.refused(at, f"multipleOf and {bounds[0]} are not supported together")

    def _check_string(self, at: str, found: Schema) -> None:
        length = "minLength" if "minLength" in found else "maxLength"
        given = [name for name in ("pattern", "format", length) if name in found]
        if len(given) > 1:
            raise self.refused(at, f"{given[0]} and {given[1]} are not supported together")
        if "format" in found and (not isinstance(found["format"], str) or found["format"] not in _FORMATS):
            raise self.refused(at, f"format: {str(found['format'])[:40]!r} is not one of {', '.join(sorted(_FORMATS))}")
        if "pattern" in found:
            self._pattern(f"{at}/pattern", found["pattern"])
        if length in found:
            self._length(at, found)

    def _length(self, at: str, found: Schema) -> None:
        """Bounds of a string's length. Short ones become a pattern, which is compiled sooner.

        Long ones stay, for xgrammar's own form: a pattern would take milliseconds for each token. Neither has escapes.
        """
        least, most = found.get("minLength", 0), found.get("maxLength")
        if most is not None and most < least:
            raise self.refused(at, f"maxLength: {most} is less than minLength, {least}")
        if max(least, most or 0) <= MAX_QUICK:
            found["pattern"] = f".{{{least},{'' if most is None else most}}}"
            found.pop("minLength", None)
            found.pop("maxLength", None)

    def _pattern(self, at: str, pattern: Any) -> None:
        if not isinstance(pattern, str):
            raise self.refused(at, "expected a regular expression")
        checked_regex(pattern, str(self.refused(at, "")).removesuffix(": "), in_json=True)

    def _object(self, at: str, found: Schema, depth: int) -> None:
        properties = found["properties"] = self._each(f"{at}/properties", found.get("properties", {}), depth)
        required = found.get("required", [])
        if not isinstance(required, list):
            raise self.refused(at, "required: expected a list of names")
        for name in required:
            if not isinstance(name, str) or name not in properties:
                raise self.refused(at, f"required: {str(name)[:40]!r} is not among the properties")
        patterns = self._each(f"{at}/patternProperties", found.get("patternProperties", {}), depth)
        for pattern in patterns:
            self._pattern(f"{at}/patternProperties/{pattern}", pattern)
            found["patternProperties"] = patterns
        if len(patterns) > 1 or (patterns and properties):
            raise self.refused(at, "patternProperties: only one, and without properties, is supported")
        more = found.get("additionalProperties", not properties and not patterns)
        if more is not False:
            more = self.schema(f"{at}/additionalProperties", more, depth + 1)
        found["additionalProperties"] = more
        if "minProperties" in found and (patterns or more is not False):
            raise self.refused(at, "minProperties: only with properties and additionalProperties=false is supported")

    def _array(self, at: str, found: Schema, depth: int) -> None:
        if "prefixItems" in found:
            found["prefixItems"] = self._several(f"{at}/prefixItems", found["prefixItems"], depth)
        items = found.get("items", "prefixItems" not in found)
        found["items"] = False if items is False else self.schema(f"{at}/items", items, depth + 1)


def _tells_apart(name: str, tagged: list[dict[str, set[str]]]) -> bool:
    """Whether a property has values in each that it has in no other."""
    seen: set[str] = set()
    for tags in tagged:
        values = tags.get(name)
        if not values or seen & values:
            return False
        seen |= values
    return True


def _tags(schema: Schema) -> dict[str, set[str]]:
    """The required properties that have one of a few values."""
    found = {}
    required, properties = schema.get("required"), schema.get("properties")
    if not isinstance(required, list) or not isinstance(properties, dict):
        return {}
    for name, part in properties.items():
        values = part.get("enum", [part["const"]] if "const" in part else None) if isinstance(part, dict) else None
        if name in required and isinstance(values, list):
            found[name] = {json.dumps(value, sort_keys=True) for value in values}
    return found


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if isinstance(value, int | float):
        return kind == "number" or (kind == "integer" and value == int(value))
    return kind == ("string" if isinstance(value, str) else "object" if isinstance(value, dict) else "array")
