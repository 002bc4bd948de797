"""The options as a document: `python -m outpace.config.describe > docs/configuration.md`."""

import sys
from collections.abc import Iterator
from typing import get_args

from pydantic.fields import FieldInfo

from outpace.config.base import ConfigModel
from outpace.config.inference import InferenceConfig
from outpace.config.rules import COMPOSITIONS, LATER

_HEAD = """# Options

Options of `outpace.init_inference(model, config=None, **options)` and `outpace.LLM(model, **options)`. `config` is a
dict, the path of a JSON file or an `outpace.InferenceConfig`; keywords are merged with it, and a key given twice with
different values is an error. The value "auto" means the default. Names and defaults are DeepSpeed's where it has them.

An option marked *later* is understood and raises `NotSupportedYet` when it is set to anything but its default.
"""


def markdown() -> str:
    """All options, old names and forbidden combinations."""
    parts = [_HEAD, "\n".join(_section("Top level", InferenceConfig, ""))]
    for name, field in InferenceConfig.model_fields.items():
        parts += ["\n".join(lines) for lines in _nested(name, field)]
    old = [f"| `{old}` | `{new}` |" for old, new in InferenceConfig.deprecated.items()]
    parts.append("\n".join(["## Deprecated names", "", "| old | now |", "|---|---|", *old]))
    parts.append("\n".join(["## What cannot be combined", "", *(f"- {message}" for _, message in COMPOSITIONS)]))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _nested(path: str, field: FieldInfo) -> Iterator[list[str]]:
    section = section_of(field)
    if section is None:
        return
    yield _section(f"`{path}`", section, path)
    for name, inner in section.model_fields.items():
        yield from _nested(f"{path}.{name}", inner)


def section_of(field: FieldInfo) -> type[ConfigModel] | None:
    """The config class of a field that is a section of its own."""
    annotation = field.annotation
    candidates = [annotation, *get_args(annotation)]
    return next((item for item in candidates if isinstance(item, type) and issubclass(item, ConfigModel)), None)


def _section(title: str, model: type[ConfigModel], path: str) -> list[str]:
    lines = [f"## {title}", "", "| option | default | meaning |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        others = [f"`{alias}`" for alias, target in model.aliases.items() if target == name]
        also = f" (also {', '.join(others)})" if others else ""
        lines.append(f"| `{name}`{also} | {_default(field)} | {field.description}{_later(path, name)} |")
    return lines


def _default(field: FieldInfo) -> str:
    return "see below" if section_of(field) and field.default is not None else f"`{field.default!r}`"


def _later(path: str, name: str) -> str:
    full = f"{path}.{name}".removeprefix(".")
    later = next((what for start, what in LATER.items() if f"{full}.".startswith(f"{start}.")), None)
    return f" *Later: {later}.*" if later else ""


if __name__ == "__main__":
    sys.stdout.write(markdown())
