"""JSON schemas in the form that llguidance takes. Annotations are dropped. Keywords that no grammar can enforce are
dropped too, and checked when an answer is finished. Kept keywords may allow fewer answers than before, never more.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from outpace.errors import InputError
from outpace.structured.regex import for_rust, not_regular

Schema = dict[str, Any]

MAX_DEPTH = 32
_LEVELS = 4  # levels of JSON for one level of schemas: lists of objects with objects of properties
_DEFINITIONS = ("$defs", "definitions")
_APPLIED = ("$ref", "anyOf", "oneOf", "allOf")
_KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
    ),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "boolean": (),
    "null": (),
}
_TYPED = frozenset().union(*_KEYWORDS.values())
_KEPT = frozenset({*_DEFINITIONS, *_APPLIED, *_TYPED, "const", "enum", "type"})
_LATER: Mapping[str, tuple[Any, ...]] = {
    "not": (),
    "if": (),
    "uniqueItems": (False,),
    "contains": (),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "propertyNames": (True, {}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
}
"""Keywords that no grammar can enforce, and their values without effect."""
_REFUSED = ("$dynamicRef", "$recursiveRef")
_FORMATS = frozenset(
    {"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"},
)
"""Formats that are enforced; JSON Schema treats others as annotations."""
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_MOST_OF = 10**6  # multipleOf: larger values take too many states


@dataclass(frozen=True, slots=True)
class CheckedSchema:
    """A schema for llguidance, as text."""

    text: str
    later: tuple[str, ...]
    """The keywords that it leaves out, with their places, to be checked when an answer is finished."""


def checked_schema(text: str, where: str, max_depth: int = MAX_DEPTH) -> CheckedSchema:
    """The schema in llguidance's form. InputError names the problem."""
    try:
        schema = json.loads(text, parse_constant=no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: it is not JSON ({str(error)[:80]})") from None
    check = _Check(schema, where, max_depth)
    if schema is False or _is_deeper(schema, _LEVELS * max_depth):
        raise check.refused("", "no answer fits it" if schema is False else f"nested more than {max_depth} deep")
    made = check.schema("#", schema)
    return CheckedSchema(json.dumps(made, ensure_ascii=False), tuple(check.later))


def no_constant(name: str) -> NoReturn:
    """Refuse NaN and Infinity, which Python's parser accepts."""
    raise ValueError(f"{name[:20]} is not a number of JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else no_constant(digits)


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether JSON is nested deeper than this, including keywords that are only checked later."""
    layer = [value]
    for _ in range(levels + 1):
        layer = [
            inner
            for each in layer
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not layer:
            return False
    return True


class _Check:
    """One schema with its definitions."""

    def __init__(self, root: Any, where: str, max_depth: int) -> None:
        self._root, self._where, self._max_depth = root, where, max_depth
        self._merged = _merges(root)
        self.later: dict[str, None] = {}
        """Keywords to check later, in the order of the schema."""

    def refused(self, at: str, problem: str) -> InputError:
        """The error for a place in the schema."""
        return InputError(f"{self._named_place(at)}: {problem}")

    def _named_place(self, at: str) -> str:
        """A place in the schema, as errors write it."""
        place = _place(at)[:200]
        return f"{self._where}: {place}" if place else self._where

    def schema(self, at: str, schema: Any, depth: int = 0) -> Any:
        """A schema or a part of one, checked and normalised."""
        if depth > self._max_depth:
            raise self.refused(at, f"nested more than {self._max_depth} deep")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise self.refused(at, f"expected a schema, got {json.dumps(schema)[:40]}")
        for name in _REFUSED:
            if name in schema:
                raise self.refused(at, f"{name} is not supported; use $ref")
        given = _without_lists(schema)
        found: Schema = {name: value for name, value in given.items() if name in _KEPT}
        if "propertyNames" in given and self._named(found, given["propertyNames"]):
            given = {name: value for name, value in given.items() if name != "propertyNames"}
        for name, nothing in _LATER.items():
            if name in given and given[name] not in nothing:
                self._leave(at, name)
        for name in _DEFINITIONS:
            if name in found:
                found[name] = self._each(f"{at}/{name}", found[name], depth)
        self._apply(at, found, depth)
        self._type(at, found, depth)
        return found

    def _leave(self, at: str, keyword: str) -> None:
        """Note a keyword to be checked later."""
        place = _place(at)
        self.later[f"{place}.{keyword}" if place else keyword] = None

    def _each(self, at: str, schemas: Any, depth: int) -> Schema:
        if not isinstance(schemas, dict):
            raise self.refused(at, "expected an object of schemas")
        return {name: self.schema(f"{at}/{name}", part, depth + 1) for name, part in schemas.items()}

    def _several(self, at: str, schemas: Any, depth: int) -> list[Any]:
        if not isinstance(schemas, list) or not schemas:
            raise self.refused(at, "expected a list of schemas that is not empty")
        return [self.schema(f"{at}/{index}", part, depth + 1) for index, part in enumerate(schemas)]

    def _apply(self, at: str, found: Schema, depth: int) -> None:
        """Check keywords that refer to other schemas or list values."""
        if "$ref" in found:
            self._resolve(at, found["$ref"])
        for name in ("anyOf", "allOf", "oneOf"):
            if name in found:
                found[name] = self._several(f"{at}/{name}", found[name], depth)
        if "oneOf" in found:
            if not self._is_disjoint(at, found["oneOf"]):
                self._leave(at, "oneOf")
            if "anyOf" not in found:
                found["anyOf"] = found.pop("oneOf")
        if "enum" in found and (not isinstance(found["enum"], list) or not found["enum"]):
            raise self.refused(at, "enum: expected a list of values that is not empty")

    def _resolve(self, at: str, reference: Any) -> Any:
        """The schema that a reference points to. Raises for one that only leads to itself."""
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

    def _is_disjoint(self, at: str, parts: list[Any]) -> bool:
        """Whether no value can match two of the schemas: then oneOf means anyOf."""
        seen: set[str] = set()
        tagged: list[dict[str, set[str]]] = []
        for part in parts:
            branch = self._resolve(at, part["$ref"]) if isinstance(part, dict) and "$ref" in part else part
            kinds = _kinds(branch)
            if kinds == {"object"}:
                tagged.append(_tags(branch))
            elif not kinds or seen & kinds or "object" in kinds:
                return False
            else:
                seen |= kinds
        return len(tagged) < 2 or any(_tells_apart(name, tagged) for name in tagged[0])

    def _check_types(self, at: str, given: Any) -> None:
        types = [given] if isinstance(given, str) else given
        if not isinstance(types, list) or not types or not all(kind in _KEYWORDS for kind in map(str, types)):
            raise self.refused(at, f"type: {json.dumps(given)[:60]} is not one of {', '.join(_KEYWORDS)}, or a list")

    def _type(self, at: str, found: Schema, depth: int) -> None:
        """Check the type and its keywords. A missing type is inferred from the keywords."""
        used = [name for name in found if name in _TYPED]
        if "type" not in found and used and not any(name in found for name in (*_APPLIED, "const", "enum")):
            fitting = [kind for kind, names in _KEYWORDS.items() if set(used) <= set(names)]
            if fitting:
                found["type"] = "number" if "number" in fitting else fitting[0]
        if "type" in found:
            self._check_types(at, found["type"])
        for name in _COUNTS:
            if name in found and (type(found[name]) is not int or found[name] < 0):
                raise self.refused(at, f"{name}: expected a count")
        if "format" in found and (not isinstance(found["format"], str) or found["format"] not in _FORMATS):
            del found["format"]
        if "pattern" in found:
            self._pattern(at, found)
        if "multipleOf" in found:
            self._multiple(at, found)
        if any(name in found for name in _KEYWORDS["object"]) or found.get("type") == "object":
            self._object(at, found, depth)
        if any(name in found for name in _KEYWORDS["array"]):
            self._array(at, found, depth)

    def _pattern(self, at: str, found: Schema) -> None:
        pattern, place = found["pattern"], f"{at}/pattern"
        if not isinstance(pattern, str):
            raise self.refused(place, "expected a regular expression")
        found["pattern"] = for_rust(pattern, self._named_place(place))
        if not_regular(pattern) is not None:
            del found["pattern"]
            self._leave(at, "pattern")

    def _multiple(self, at: str, found: Schema) -> None:
        of = found["multipleOf"]
        if type(of) not in (int, float) or of <= 0:
            raise self.refused(at, "multipleOf: expected a number above 0")
        if of > _MOST_OF:
            del found["multipleOf"]
            self._leave(at, "multipleOf")

    def _named(self, found: Schema, names: Any) -> bool:
        """Rewrite propertyNames if it is a list of names or one pattern, as of Pydantic's dict[Enum, ...]."""
        branch = self._resolve("", names["$ref"]) if isinstance(names, dict) and "$ref" in names else names
        if not isinstance(branch, dict) or any(name in found for name in ("properties", "patternProperties")):
            return False
        value = found.get("additionalProperties", True)
        asserted = {name for name in branch if name in _KEPT or name in _LATER} - {"type", *_DEFINITIONS}
        listed = _values(branch)
        if asserted in ({"enum"}, {"const"}) and isinstance(listed, list):
            found["properties"] = {name: value for name in listed if isinstance(name, str)}
        elif asserted == {"pattern"} and isinstance(branch["pattern"], str) and not_regular(branch["pattern"]) is None:
            found["patternProperties"] = {branch["pattern"]: value}
        else:
            return False
        found["additionalProperties"] = False
        return True

    def _object(self, at: str, found: Schema, depth: int) -> None:
        properties = found["properties"] = self._each(f"{at}/properties", found.get("properties", {}), depth)
        required = found.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise self.refused(at, "required: expected a list of names")
        patterns = found.get("patternProperties", {})
        if isinstance(patterns, dict) and any(not_regular(pattern) for pattern in patterns):
            del found["patternProperties"]
            patterns, found["additionalProperties"] = {}, True
            self._leave(at, "patternProperties")
        if patterns:
            parts = self._each(f"{at}/patternProperties", patterns, depth)
            place = self._named_place(f"{at}/patternProperties")
            found["patternProperties"] = {for_rust(pattern, place): part for pattern, part in parts.items()}
        if "additionalProperties" in found:
            more = found["additionalProperties"]
            found["additionalProperties"] = self.schema(f"{at}/additionalProperties", more, depth + 1)
        elif (properties or patterns) and not self._merged:
            properties.update({name: True for name in required if name not in properties and not patterns})
            found["additionalProperties"] = False
        for name in ("minProperties", "maxProperties"):
            if found.get(name, 0) > 1 and set(properties) - set(required):
                del found[name]
                self._leave(at, name)

    def _array(self, at: str, found: Schema, depth: int) -> None:
        if "prefixItems" in found:
            found["prefixItems"] = self._several(f"{at}/prefixItems", found["prefixItems"], depth)
        if "items" in found:
            found["items"] = self.schema(f"{at}/items", found["items"], depth + 1)
        elif "prefixItems" in found and not self._merged:
            found["items"] = False


def _place(at: str) -> str:
    return at.removeprefix("#").removeprefix("/").replace("/", ".")


def _without_lists(schema: Schema) -> Schema:
    """The same schema with prefixItems, if it is of an older draft with a list in items."""
    if not isinstance(schema.get("items"), list):
        return {name: value for name, value in schema.items() if name != "additionalItems"}
    given = {name: value for name, value in schema.items() if name not in ("items", "additionalItems")}
    more = {"items": schema["additionalItems"]} if "additionalItems" in schema else {}
    return {**given, **({"prefixItems": schema["items"]} if schema["items"] else {}), **more}


def _merges(root: Any) -> bool:
    """Whether some schemas combine. Then additionalProperties cannot be closed in each of them."""
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            applied = [name for name in _APPLIED if name in value]
            several = isinstance(value.get("allOf"), list) and len(value["allOf"]) > 1
            beside = len(applied) > 1 or any(name in value for name in _TYPED)
            if several or (applied and beside):
                return True
            waiting += value.values()
    return False


def _values(schema: Schema) -> Any:
    """The values that a schema lists in enum or const; None: it lists none."""
    return schema.get("enum", [schema["const"]] if "const" in schema else None)


def _kinds(branch: Any) -> set[str]:
    """The types of values that match a schema; empty: unknown."""
    if not isinstance(branch, dict):
        return set()
    given, values = branch.get("type"), _values(branch)
    if given is None and isinstance(values, list) and all(isinstance(value, bool | None) for value in values):
        given = ["null" if value is None else "boolean" for value in values]
    kinds = {given} if isinstance(given, str) else set(map(str, given)) if isinstance(given, list) else set()
    return kinds | {"integer", "number"} if kinds & {"integer", "number"} else kinds


def _tells_apart(name: str, tagged: list[dict[str, set[str]]]) -> bool:
    """Whether a property has other values in each of the schemas."""
    seen: set[str] = set()
    for tags in tagged:
        values = tags.get(name)
        if not values or seen & values:
            return False
        seen |= values
    return True


def _tags(schema: Schema) -> dict[str, set[str]]:
    """The required properties with an enum or const."""
    found = {}
    required, properties = schema.get("required"), schema.get("properties")
    if not isinstance(required, list) or not isinstance(properties, dict):
        return {}
    for name, part in properties.items():
        values = _values(part) if isinstance(part, dict) else None
        if name in required and isinstance(values, list):
            found[name] = {json.dumps(value, sort_keys=True) for value in values}
    return found
