"""The mechanics of the config tree: names, aliases, deprecated names, "auto", merging, one-line errors."""

import difflib
import json
import operator
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator, model_validator

from outpace.errors import ConfigError


class ConfigModel(BaseModel):
    """Base of every config: frozen, strict about names, understands aliases, deprecated names and the value "auto"."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )
    aliases: ClassVar[Mapping[str, str]] = {}
    """Other names of fields."""
    deprecated: ClassVar[Mapping[str, str]] = {}
    """Old name -> dotted path of the field that replaced it."""
    same_value: ClassVar[Mapping[str, Callable[[Any, Any], bool]]] = {}
    """How two ways of writing a field's value are compared, where == is not enough."""
    keeps_auto: ClassVar[frozenset[str]] = frozenset()
    """Fields for which "auto" is a value of its own and not "take the default"."""

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError(_one_line(error)) from None

    # pydantic must not call this __init__ for nested models: their errors belong to the outermost one.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="before")
    @classmethod
    def _canonical(cls, data: object) -> object:
        """The same data by field names alone; what is wrong with the names is said here."""
        if not isinstance(data, Mapping):
            return data
        names = [*cls.model_fields, *cls.aliases, *cls.deprecated]
        for key in data:
            if key not in names:
                raise ValueError(f"unknown name {key!r}{_nearest(key, names)}")
        current = {
            key: value
            for key, value in data.items()
            if key not in cls.deprecated and (not _is_auto(value) or key in cls.keeps_auto)
        }
        result: dict[str, Any] = {}
        for key, value in current.items():
            name = cls.aliases.get(key, key)
            if name != key and name in current:
                raise ValueError(f"{key} is another name of {name}: give only one of them")
            result[name] = value
        for old in (key for key in cls.deprecated if key in data and not _is_auto(data[key])):
            _move(result, old, cls.deprecated[old], data[old], cls)
        return result

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """pydantic takes True for 1."""
        items = value if isinstance(value, list | tuple) else (value,)
        field = cls.model_fields[str(info.field_name)]
        if any(isinstance(item, bool) for item in items) and _is_number(field.annotation):
            raise ValueError(f"expected a number, got {value!r}")
        return value

    def given(self) -> dict[str, Any]:
        """The fields that were set, by name."""
        return {name: getattr(self, name) for name in self.model_fields_set}

    @classmethod
    def of(cls, config: object = None, /, **kwargs: Any) -> Self:
        """The config from None, a mapping, a JSON path or another config, merged with keywords; neither is changed."""
        base = _as_mapping(config)
        for key in base.keys() & kwargs.keys():
            same = cls.same_value.get(key, operator.eq)
            if not same(base[key], kwargs[key]):
                raise ConfigError(
                    f"{key} is given twice with different values: {base[key]!r} in config and {kwargs[key]!r} as a "
                    "keyword; give it once"
                )
        return cls(**{**base, **kwargs})


def _as_mapping(config: object) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, ConfigModel):
        return config.given()
    if isinstance(config, Mapping):
        return {str(key): value for key, value in config.items()}
    if isinstance(config, str | os.PathLike):
        return _read_json(Path(config))
    raise ConfigError(
        f"config: expected None, a dict, the path of a JSON file or an InferenceConfig, got {type(config).__name__}"
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except OSError as error:
        raise ConfigError(f"config: cannot read {path}: {error.strerror}; give the path of a JSON file") from None
    except RecursionError:
        raise ConfigError(f"config: {path} is nested too deep to be a config; check the path") from None
    except ValueError as error:
        raise ConfigError(f"config: {path} is not a valid JSON config: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"config: {path} holds a {type(content).__name__}; it must hold one JSON object")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result and result[key] != value:
            raise ValueError(f"{key} is given twice with different values: {result[key]!r} and {value!r}")
        result[key] = value
    return result


def _move(data: dict[str, Any], old: str, path: str, value: object, owner: type[ConfigModel]) -> None:
    """Put the value of a deprecated name where it belongs now."""
    section, _, name = path.partition(".")
    warnings.warn(f"{old} is deprecated: use {path}", FutureWarning, stacklevel=2)
    inner = data.get(section, {})
    inner = {"enabled": inner} if isinstance(inner, bool) else _as_mapping(inner)
    inner = {key: given for key, given in inner.items() if not _is_auto(given)}
    names = {name, *(alias for alias, target in _section(owner, section).aliases.items() if target == name)}
    taken = sorted(names & inner.keys())
    if taken:
        raise ValueError(f"{old} is the deprecated name of {path}, and {section}.{taken[0]} is given too: drop {old}")
    data[section] = {**inner, name: value}


def _section(owner: type[ConfigModel], name: str) -> type[ConfigModel]:
    annotation = owner.model_fields[name].annotation
    assert isinstance(annotation, type), f"{name} must be a section"
    assert issubclass(annotation, ConfigModel)
    return annotation


def _is_number(annotation: object) -> bool:
    """Whether a field holds numbers: int, float | None, tuple[int, ...], Literal[0, 1]."""
    parts = {part if isinstance(part, type) else type(part) for part in (annotation, *get_args(annotation))}
    return bool not in parts and not parts.isdisjoint((int, float))


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == "auto"


def _nearest(key: object, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(key), list(names), n=1, cutoff=0.6)
    return f": did you mean {close[0]!r}?" if close else ""


def _one_line(error: ValidationError) -> str:
    """pydantic's report as one line: field, what is wrong, what was given."""
    parts = []
    for item in error.errors(include_url=False):
        where = ".".join(str(step) for step in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "value_error":
            parts.append(f"{where}: {message}" if where else message)
        else:
            parts.append(f"{where}: {message[:1].lower()}{message[1:]}, got {item['input']!r}")
    return "; ".join(dict.fromkeys(parts))
