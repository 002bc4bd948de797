"""The fields of a config tree, one by one, with values to try on them."""

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from outpace.config.base import ConfigModel


def leaves(owner: type[ConfigModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field of the tree that is not a section itself, with its dotted path."""
    for name, field in owner.model_fields.items():
        section = next((part for part in _parts(field.annotation) if _is_section(part)), None)
        if section is None:
            yield prefix + name, field
        else:
            yield from leaves(section, f"{prefix}{name}.")


def _parts(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, ConfigModel)


def entry_of(path: str, later: Mapping[str, str]) -> str | None:
    """The entry of `later` that covers a field: itself or a section above it."""
    steps = path.split(".")
    return next((entry for n in range(len(steps)) if (entry := ".".join(steps[: n + 1])) in later), None)


def other_value(field: FieldInfo) -> Any:
    """A valid value that is not the default."""
    for part in _parts(field.annotation):
        if get_origin(part) is Literal:
            return next(value for value in get_args(part) if value != field.default)
        if part is bool:
            return not field.default
        if part is int:
            return (field.default or 0) - 1 if field.default == 2**63 - 1 else (field.default or 0) + 1
        if part is float:
            return 0.5
        if part is str:
            return "somewhere"
        if get_origin(part) is dict:
            return {"key": "value"}
        if get_origin(part) is tuple:
            return (7,)
        if part is Any:
            return "an object"
    raise AssertionError(f"no value for {field}")


def nested(path: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} for "a.b"."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)


def numbers(fields: Mapping[str, FieldInfo]) -> list[str]:
    """The fields that hold numbers."""
    return [path for path, field in fields.items() if _holds_numbers(field)]


def _holds_numbers(field: FieldInfo) -> bool:
    parts = [part for whole in _parts(field.annotation) for part in (whole, *get_args(whole))]
    return any(part in (int, float) or type(part) is int for part in parts)
