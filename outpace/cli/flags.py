"""Flags generated from config fields: name, type, default and help of each field."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from outpace.config.base import ConfigModel, section_of
from outpace.config.inference import InferenceConfig
from outpace.config.llm import LLMConfig
from outpace.config.rules import LATER

SHARED = ("dtype", "device", "seed")
"""Options of `init_inference` that are flags too; the others are only for config files."""
SHORT: Mapping[str, tuple[str, ...]] = {
    "tensor_parallel.tp_size": ("--tp", "-tp"),
    "pipeline_parallel.pp_size": ("--pp", "-pp"),
    "moe.ep_size": ("--ep",),
}
"""More names of flags, by the path of the field."""


@dataclass(frozen=True)
class Flag:
    """One field as a flag."""

    path: str
    """The field, with its section: cache.block_size."""
    names: tuple[str, ...]
    """Names that its config accepts; the value is passed on by the first."""
    field: FieldInfo

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.names[0]

    @property
    def kind(self) -> Any:
        """Type on the command line: bool, int, float, str or list[str]."""
        return _kind(self.field.annotation)

    def option(self) -> Any:
        """The annotation of its parameter."""
        dashed = [name.replace("_", "-") for name in self.names]
        if self.kind is bool:
            declared = [f"--{name}/--no-{name}" for name in dashed]
        else:
            declared = [*(f"--{name}" for name in dashed), *SHORT.get(self.path, ())]
        default, choices = self.field.default, "|".join(map(str, _literals(self.field.annotation)))
        shown: dict[str, Any] = {
            "show_default": False if default in (None, (), "") else str(default),
            "metavar": choices or None,
        }
        return Annotated[self.kind | None, typer.Option(*declared, help=self._help(), **shown)]

    def value(self, given: Any) -> Any:
        """The value for the config: one of the field's literals, if it has any."""
        return {str(each): each for each in _literals(self.field.annotation)}.get(str(given), given)

    def _help(self) -> str:
        text = " ".join((self.field.description or "").split())
        later = LATER.get(self.path)
        several = " May be given several times." if self.kind == list[str] else ""
        return text + (f" Later: {later}." if later else "") + several


def llm_flags() -> list[Flag]:
    """The options of the runtime by their flat names, and those that `LLMConfig` has of its own."""
    names: dict[str, list[str]] = {name: [name] for name in SHARED}
    for name, path in LLMConfig.flat.items():
        names.setdefault(path, []).append(name)
    for name, field in LLMConfig.model_fields.items():
        if name not in InferenceConfig.model_fields and section_of(field) is None:
            names.setdefault(name, []).append(name)
    return [Flag(path, tuple(given), _field(LLMConfig, path)) for path, given in names.items()]


def config_flags(config: type[ConfigModel]) -> list[Flag]:
    """Every field of a config without sections, with its aliases."""
    return [
        Flag(name, (name, *(other for other, path in config.aliases.items() if path == name)), field)
        for name, field in config.model_fields.items()
    ]


def with_flags(function: Callable[..., None], flags: list[Flag]) -> Callable[..., None]:
    """A command with the parameters of a function, and one for each flag, passed to it as `flags`.

    `flags` has field names as keys, and only flags that were given.
    """
    known = {flag.name: flag for flag in flags}

    def command(**values: Any) -> None:
        given = {name: values.pop(name) for name in known}
        chosen = {name: known[name].value(value) for name, value in given.items() if value is not None and value != []}
        function(**values, flags=chosen)

    own = [each for name, each in inspect.signature(function).parameters.items() if name != "flags"]
    more = [
        inspect.Parameter(flag.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=flag.option())
        for flag in flags
    ]
    signature = inspect.Signature([each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own] + more)
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in signature.parameters.values()}
    command.__doc__ = function.__doc__
    return command


def override(
    given: Mapping[str, Any], flags: Mapping[str, Any], known: Iterable[Flag], owner: type[ConfigModel]
) -> dict[str, Any]:
    """Options of a config with the given flags in place of what sets the same fields."""
    found = dict(given)
    for flag in known:
        if flag.name in flags:
            found = {**_without(found, flag.path, owner), flag.name: flags[flag.name]}
    return found


def _without(given: Mapping[str, Any], path: str, owner: type[ConfigModel]) -> dict[str, Any]:
    """Options without those that set the field at `path`, by any of its names."""
    section, _, name = path.rpartition(".")
    others = {**owner.aliases, **owner.deprecated}
    left = {key: value for key, value in given.items() if others.get(key, key) != path}
    for key, value in left.items():
        model = section_of(owner.model_fields[section]) if section and others.get(key, key) == section else None
        if model is not None and isinstance(value, Mapping):
            left[key] = {inner: each for inner, each in value.items() if model.aliases.get(inner, inner) != name}
    return left


def _field(owner: type[ConfigModel], path: str) -> FieldInfo:
    first, _, rest = path.partition(".")
    field = owner.model_fields[first]
    if not rest:
        return field
    section = section_of(field)
    assert section is not None, f"{first} must be a section"
    return _field(section, rest)


def _parts(annotation: Any) -> Iterator[Any]:
    """The types of a union except None, without Annotated."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _parts(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for part in get_args(annotation):
            yield from _parts(part)
    elif annotation is not type(None):
        yield annotation


def _kind(annotation: Any) -> Any:
    parts = list(_parts(annotation))
    if any(get_origin(part) is tuple for part in parts):
        return list[str]
    return next((kind for kind in (bool, int, float) if kind in parts), str)


def _literals(annotation: Any) -> list[Any]:
    return [value for part in _parts(annotation) if get_origin(part) is Literal for value in get_args(part)]
