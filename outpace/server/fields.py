"""Types of request fields. Checking a million wrong items takes milliseconds and gives one error."""

from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Annotated, Any, ClassVar, TypeVar

from annotated_types import Len
from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from outpace.config.nearest import nearest

Item = TypeVar("Item")


class FirstError(FailFast):
    """Stop at the first wrong item of a list. pydantic's own class is not hashable, which a union needs."""

    __hash__ = object.__hash__


STRICT: ContextVar[bool] = ContextVar("STRICT", default=False)
"""The option `strict_fields`: refuse fields that are accepted only because other clients send them."""


def because(reason: str) -> WrapValidator:
    """Refuses values outside the field's type, with this reason in one line."""

    def check(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            found: object = handler(value)
        except ValidationError:
            found = NotImplemented
        if found is NotImplemented or isinstance(found, bool) != isinstance(value, bool):  # a Literal takes 0 for false
            raise ValueError(f"not supported: {reason}")
        return found

    return WrapValidator(check)


def _nullable(schema: dict[str, Any]) -> None:
    """Allow null for optional fields in a JSON schema: it means the same as no value."""
    for name, field in schema.get("properties", {}).items():
        forms = field.get("anyOf", [])
        if name not in schema.get("required", ()) and {"type": "null"} not in forms:
            about = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
            schema["properties"][name] = {**about, "anyOf": [*(forms or [field]), {"type": "null"}]}


class Body(BaseModel):
    """Base of what clients send: exact types, finite numbers, no unknown names. Null is the same as no value."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        frozen=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
        json_schema_extra=_nullable,
    )
    refused: ClassVar[Mapping[str, str]] = {}
    """Fields of other APIs -> why they are refused, unless they are null."""
    lenient: ClassVar[frozenset[str]] = frozenset()
    """Fields that other clients send, accepted at values that change nothing; refused with `strict_fields`."""

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, data: object) -> object:
        """Refuse the first field that is unknown, or known and not supported. One error, however many there are."""
        if isinstance(data, cls):
            return data
        if not isinstance(data, Mapping):
            raise ValueError("expected an object")
        strict, fields = STRICT.get(), cls.model_fields
        for name, value in data.items():
            if name in cls.refused and value is not None:
                raise ValueError(f"{name}: not supported: {cls.refused[name]}")
            if name not in fields and name not in cls.refused:
                shown = str(name)[:80]
                meant = nearest(shown, fields)
                hint = f"did you mean {meant}?" if meant else "it is refused so that nothing is silently ignored"
                raise ValueError(f"{shown}: unknown field; {hint}")
            if strict and name in cls.lenient and value is not None:
                raise ValueError(f"{name}: refused by this server (strict_fields); remove it")
        return {
            name: value
            for name, value in data.items()
            if name in fields and (value is not None or fields[name].is_required())
        }


def _strings(value: object) -> list[str]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) and item for item in values):
        raise ValueError("expected a string or a list of strings that are not empty")
    return values


def _some_strings(value: object) -> list[str]:
    if not (values := _strings(value)):
        raise ValueError("expected at least one string")
    return values


_PIECE = 2**15  # items


def pieces(values: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """A long list in parts: one call of C code for all of it would hold the GIL and block the event loop."""
    return (values[at : at + _PIECE] for at in range(0, len(values), _PIECE))


def within(ids: Sequence[int], most: int) -> bool:
    """Whether all are from 0 to `most`."""
    return all(0 <= min(piece) <= max(piece) <= most for piece in pieces(ids))


def _types(values: list[object]) -> set[type]:
    return {kind for piece in pieces(values) for kind in set(map(type, piece))}


def _prompt(value: object) -> object:
    """Checks only the types of items: a million of them take milliseconds and give one error."""
    if isinstance(value, str):
        return value
    kinds = _types(value) if isinstance(value, list) else set()
    nested = kinds == {list} and all(_types(inner) == {int} for inner in value)  # type: ignore[attr-defined]
    if kinds not in ({str}, {int}) and not nested:
        raise ValueError("expected text, token ids, or a list of texts or of lists of token ids, not empty")
    return value


def _biases(value: object) -> object:
    if value is None:
        return None
    if not isinstance(value, dict) or not all(
        isinstance(bias, int | float) and not isinstance(bias, bool) and -100 <= bias <= 100 for bias in value.values()
    ):
        raise ValueError("expected an object of token ids and numbers from -100 to 100")
    if not all(key.isascii() and key.isdigit() and len(key) <= 10 for key in value):
        raise ValueError("expected token ids as names")
    return {int(key): float(bias) for key, bias in value.items()}


def _token_ids(value: object) -> object:
    """Checked in pieces: pydantic would hold the GIL for all of a million items."""
    if not isinstance(value, list) or not _types(value) <= {int}:
        raise ValueError("expected a list of token ids")
    if not within(value, 2**31 - 1):
        raise ValueError("expected token ids from 0 to 2147483647")
    return value


def _some_token_ids(value: object) -> object:
    if value == []:
        raise ValueError("expected at least one token id")
    return _token_ids(value)


_IdsForm = list[Annotated[int, Field(ge=0, lt=2**31)]]
_Ids = Annotated[_IdsForm, Len(1)]
TokenIds = Annotated[list[int], PlainValidator(_token_ids, json_schema_input_type=_IdsForm)]
SomeTokenIds = Annotated[list[int], PlainValidator(_some_token_ids, json_schema_input_type=_Ids)]
Text = Annotated[str, Field(min_length=1)]
PromptForm = str | Annotated[list[str], Len(1)] | _Ids | Annotated[list[_Ids], Len(1)]
Prompt = Annotated[PromptForm, PlainValidator(_prompt, json_schema_input_type=PromptForm)]
Strings = Annotated[list[str], PlainValidator(_strings, json_schema_input_type=Text | list[Text])]
Prompts = Annotated[
    list[str], PlainValidator(_some_strings, json_schema_input_type=Text | Annotated[list[Text], Len(1)])
]
_BiasForm = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(json_schema_extra={"additionalProperties": False}),
]
Biases = Annotated[dict[int, float] | None, PlainValidator(_biases, json_schema_input_type=_BiasForm | None)]
