"""Kinds of fields that requests have, checked so that a million wrong items cost milliseconds and one error."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from annotated_types import Len
from pydantic import BaseModel, ConfigDict, FailFast, Field, PlainValidator, model_validator


class FirstError(FailFast):
    """Stop at the first wrong item of a list. pydantic's own cannot stand in a union."""

    __hash__ = object.__hash__


def _known(data: object, fields: Mapping[str, Any], refused: Mapping[str, str]) -> object:
    """Refuse the first field that is unknown, or known and not supported. One error, however many there are."""
    if not isinstance(data, Mapping):
        raise ValueError("expected an object")
    for name, value in data.items():
        if name in refused and value is not None:
            raise ValueError(f"{name}: not supported: {refused[name]}")
        if name not in fields and name not in refused:
            raise ValueError(f"{str(name)[:80]}: unknown field; it is refused so that nothing is ignored in silence")
    return {name: value for name, value in data.items() if name not in refused}


class Body(BaseModel):
    """Base of what clients send: exact types, finite numbers, no unknown names."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        frozen=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )
    refused: ClassVar[Mapping[str, str]] = {}
    """Fields that people know from elsewhere -> why they are refused, unless they are null."""

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, data: object) -> object:
        return _known(data, cls.model_fields, cls.refused)


def _strings(value: object) -> list[str]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) and item for item in values):
        raise ValueError("expected a string or a list of strings that are not empty")
    return values


def _some_strings(value: object) -> list[str]:
    if not (values := _strings(value)):
        raise ValueError("expected one string at least")
    return values


def _prompt(value: object) -> object:
    """Checked by types of items alone, so that a million of them cost milliseconds and one error."""
    if isinstance(value, str):
        return value
    kinds = set(map(type, value)) if isinstance(value, list) else set()
    nested = kinds == {list} and all(set(map(type, inner)) == {int} for inner in value)  # type: ignore[attr-defined]
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


TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], FirstError()]
Text = Annotated[str, Field(min_length=1)]
_Ids = Annotated[TokenIds, Len(1)]
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
