"""The form that a request asks of its answer, and the result of the final check. Needs no llguidance."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outpace.errors import InputError

FIELD = "structured_outputs"
"""Prefix of errors that the request caused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The form of an answer: exactly one of these; the names are vLLM's."""

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, kept as text. Properties come in the order of the schema. Keywords that a grammar cannot enforce
    (such as `uniqueItems`) are checked when the answer is finished: `CompletionOutput.structure_check`."""
    regex: str | None = None
    """The whole answer matches it."""
    choice: tuple[str, ...] | list[str] | None = None
    """The answer is one of these."""
    grammar: str | None = None
    """EBNF with a rule called root, or Lark with a rule called start."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: str | None = None
    """Text with tagged parts of JSON, each by a schema. xgrammar's format: triggered_tags or tags_with_separator."""
    disable_any_whitespace: bool = False
    """No white space between the parts of the JSON; only with `json` and `json_object`."""

    def __post_init__(self) -> None:
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = [name for name in STRUCTURES if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise InputError(f"structured_outputs: expected exactly one of {', '.join(STRUCTURES)}; got {found}")
        if isinstance(self.json, Mapping):
            object.__setattr__(self, "json", _as_json(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _strings(self.choice))
        if self.json_object not in (None, True):
            raise InputError(f"structured_outputs.json_object: expected True, got {self.json_object!r:.80}")
        if not isinstance(self.disable_any_whitespace, bool):
            raise InputError("structured_outputs.disable_any_whitespace: expected true or false")
        if self.disable_any_whitespace and given[0] not in ("json", "json_object"):
            raise InputError(f"structured_outputs.disable_any_whitespace: not with {given[0]}; only with json")
        for name in ("json", "regex", "grammar", "structural_tag"):
            if not isinstance(getattr(self, name), str | None):
                what = "an object or text" if name == "json" else "text"
                raise InputError(f"structured_outputs.{name}: expected {what}, got {getattr(self, name)!r:.80}")

    @property
    def kind(self) -> str:
        """The name of the form that is given."""
        return next(name for name in STRUCTURES if getattr(self, name) is not None)


STRUCTURES = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def is_text(text: str) -> bool:
    """Whether a string has only characters: JSON can also contain half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _as_json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"structured_outputs.json: not a JSON schema ({error})") from None


@dataclass(frozen=True, slots=True)
class StructureCheck:
    """The check of a finished answer against the parts of its schema that no grammar can enforce."""

    checked: tuple[str, ...]
    """The keywords that were checked, with their places in the schema."""
    problem: str | None
    """What is wrong with the answer; None: it is valid by the whole schema."""

    @property
    def valid(self) -> bool:
        """Whether the answer is valid by the whole schema."""
        return self.problem is None


def _strings(values: object) -> tuple[str, ...]:
    valid = isinstance(values, tuple | list) and values and all(isinstance(each, str) and each for each in values)
    if not valid:
        raise InputError(f"structured_outputs.choice: expected strings that are not empty, got {values!r:.80}")
    return tuple(values)  # type: ignore[arg-type]
