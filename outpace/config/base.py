"""The base class of all configs: aliases, deprecated names, "auto", merging, one-line errors."""

import json
import operator
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from outpace.config.nearest import did_you_mean
from outpace.errors import ConfigError, NotSupportedYet

LONGEST = 200
"""Maximum characters of a value in an error."""
MOST = 8
"""Maximum number of fields that an error names."""


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
    """Another name -> the field, or the dotted path of a section's field."""
    deprecated: ClassVar[Mapping[str, str]] = {}
    """The same for deprecated names, which work and warn."""
    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Name that only another config takes -> why it is refused here, and what to do."""
    switches: ClassVar[frozenset[str]] = frozenset()
    """Sections that can be given as a bool, which sets `enabled`."""
    sizes: ClassVar[Mapping[str, str]] = {}
    """Section that can be given as a number -> the field that the number sets."""
    same_value: ClassVar[Mapping[str, Callable[[Any, Any], bool]]] = {}
    """Field -> how two spellings of its value are compared, where == is not enough."""
    keeps_auto: ClassVar[frozenset[str]] = frozenset()
    """Fields for which "auto" is a value and does not mean "take the default"."""

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError(_one_line(error, self._given_as(data))) from None
        except NotSupportedYet as error:
            raise NotSupportedYet(_written(error.field, self._given_as(data)), error.capability) from None

    # pydantic must not call this __init__ for nested models: the outermost model reports their errors.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="before")
    @classmethod
    def _canonical(cls, data: object) -> object:
        """The same data under field names only; unknown and refused names are an error."""
        if not isinstance(data, Mapping):
            return data
        others = {**cls.aliases, **cls.deprecated}
        for key in data:
            if key in cls.elsewhere:
                raise ValueError(f"{key}: {cls.elsewhere[key]}")
            if key not in cls.model_fields and key not in others:
                raise ValueError(f"unknown name {key!r}{did_you_mean(key, [*cls.model_fields, *others])}")
        given = {key: cls._section(key, value) for key, value in data.items() if cls._counts(key, value)}
        result = {key: value for key, value in given.items() if key in cls.model_fields}
        named: dict[str, str] = {}
        # Whole sections come before fields of sections.
        for key in sorted(given.keys() - result.keys(), key=lambda key: (others[key].count("."), key)):
            if key in cls.deprecated:
                warnings.warn(f"{key} is deprecated: use {others[key]}", FutureWarning, stacklevel=2)
            _put(result, key, given[key], named, cls)
            named[others[key]] = key
        return result

    @classmethod
    def _section(cls, key: str, value: object) -> object:
        """The section that a bool or a number stands for."""
        if isinstance(value, bool) and key in cls.switches:
            return {"enabled": value}
        name = cls.aliases.get(key, key)
        return {cls.sizes[name]: value} if isinstance(value, int) and name in cls.sizes else value

    @classmethod
    def _counts(cls, key: str, value: object) -> bool:
        """Whether a value was given: "auto" counts only where it is a value."""
        return not _is_auto(value) or key in cls.keeps_auto

    @classmethod
    def _given_as(cls, data: Mapping[str, Any]) -> dict[str, str]:
        """Path of a field -> the other name under which it was given."""
        others = {**cls.aliases, **cls.deprecated}
        return {path: key for key, path in others.items() if key in data and cls._counts(key, data[key])}

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """Refuse bools for numbers: pydantic would take True as 1."""
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
        """The config from None, a mapping, a JSON path or another config, merged with keywords."""
        base = _as_mapping(config, cls)
        for key in base.keys() & kwargs.keys():
            same = cls.same_value.get(key, operator.eq)
            if not same(base[key], kwargs[key]):
                raise ConfigError(
                    f"{key} is given twice with different values: {base[key]!r} in config and {kwargs[key]!r} as a "
                    "keyword; give it once"
                )
        return cls(**{**base, **kwargs})


def _as_mapping(config: object, wanted: type[ConfigModel]) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, ConfigModel):
        return config.given()
    if isinstance(config, Mapping):
        return {str(key): value for key, value in config.items()}
    if isinstance(config, str | os.PathLike):
        return _read_json(Path(config))
    raise ConfigError(
        f"config: expected None, a dict, the path of a JSON file or an {wanted.__name__}, got {type(config).__name__}"
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


def _put(data: dict[str, Any], key: str, value: object, named: Mapping[str, str], owner: type[ConfigModel]) -> None:
    """Set the field that another name stands for. `named`: other names of the fields that are set already."""
    path = owner.aliases.get(key) or owner.deprecated[key]
    section, _, name = path.rpartition(".")
    inner, taken = data, [name] if name in data else []
    if section:
        held = data.get(section, {})
        if held is None or (value is None and section not in data and owner.model_fields[section].default is None):
            if value is None:
                return  # the section stays off
            held = {}
        if not isinstance(held, Mapping | ConfigModel):
            return  # the section's own validation reports what is wrong with it
        model = section_of(owner.model_fields[section])
        assert model is not None, "paths of other names lead to sections"
        inner = {field: given for field, given in _as_mapping(held, model).items() if model._counts(field, given)}
        taken = [other for other in inner if model.aliases.get(other, other) == name]
        data[section] = inner
    same = owner.same_value.get(path, operator.eq)
    for other in taken:
        if not same(inner[other], value):
            there = named.get(path) or f"{section}.{other}".removeprefix(".")
            raise ValueError(
                f"{there}={inner[other]!r} and {key}={value!r}: these are one option, given twice with different "
                "values; give it once"
            )
    if not taken:
        inner[name] = value


def section_of(field: FieldInfo) -> type[ConfigModel] | None:
    """The config class of a field that is a section; None: it is a plain value."""
    candidates = (field.annotation, *get_args(field.annotation))
    return next((item for item in candidates if isinstance(item, type) and issubclass(item, ConfigModel)), None)


def _is_number(annotation: object) -> bool:
    """Whether a field holds numbers: int, float | None, tuple[int, ...] | None, Literal[0, 1]."""
    inside = get_args(annotation)
    every = (annotation, *inside, *(each for part in inside for each in get_args(part)))
    parts = {part if isinstance(part, type) else type(part) for part in every}
    return bool not in parts and not parts.isdisjoint((int, float))


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == "auto"


def _written(path: str, given_as: Mapping[str, str]) -> str:
    """The path of a field as the user wrote it, in case that was another name."""
    known = [start for start in given_as if f"{path}.".startswith(f"{start}.")]
    start = max(known, key=len, default="")
    return given_as.get(start, "") + path.removeprefix(start)


def _one_line(error: ValidationError, given_as: Mapping[str, str]) -> str:
    """pydantic's report as one line: field, what is wrong, what was given."""
    parts = []
    for item in error.errors(include_url=False):
        where = _written(".".join(str(step) for step in item["loc"]), given_as)
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "value_error":
            parts.append(f"{where}: {message}" if where else message)
        else:
            got = "" if item["type"] == "missing" else f", got {_shown(item['input'])}"
            parts.append(f"{where}: {message[:1].lower()}{message[1:]}{got}")
    parts = list(dict.fromkeys(parts))
    more = [f"and {len(parts) - MOST} more"] if len(parts) > MOST else []
    return "; ".join([*parts[:MOST], *more])


def _shown(value: object) -> str:
    """A value for an error message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}.."
