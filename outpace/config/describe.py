"""Writes docs/configuration.md from the config classes: `python -m outpace.config.describe > docs/configuration.md`."""

import sys
from collections.abc import Iterable, Iterator, Mapping

from pydantic.fields import FieldInfo

from outpace.config.base import ConfigModel, section_of
from outpace.config.inference import InferenceConfig
from outpace.config.llm import LLMConfig
from outpace.config.rules import COMPOSITIONS, INFERENCE_COMPOSITIONS, LATER, LLM_COMPOSITIONS

_HEAD = """# Options

There are two places to give options, and a config for each:

- `outpace.init_inference(model, config=None, **options)`, with `outpace.InferenceConfig`;
- `outpace.LLM(model, config=None, **options)` and the server, with `outpace.LLMConfig`: the same options, and those of
  the runtime that schedules requests. `init_inference` schedules no requests and refuses these options.

`config` is a dict, the path of a JSON file or such a config; keywords are merged with it. Giving an option twice with
different values, even under two names, is an error. The value "auto" means the default (but `quantization` and
`quant.scheme` refuse it). Names and defaults are DeepSpeed's where it has them, and vLLM's for the runtime.

An option marked *later* is understood and raises `NotSupportedYet` when it is set to anything but its default.
"""
_FLAT = """## Names without a section

`LLM` takes vLLM's names, and the options of `cache`, `scheduler` and `nodes` without their section.
"""


def markdown() -> str:
    """All options, other names and forbidden combinations."""
    shared = InferenceConfig.model_fields
    own = {
        name: field
        for name, field in LLMConfig.model_fields.items()
        if name not in shared or field.default != shared[name].default
    }
    parts = [_HEAD, _table("Options of `init_inference` and `LLM`", InferenceConfig, shared)]
    parts.append(_table("Options and defaults that only `LLM` has", LLMConfig, own))
    for name, field in LLMConfig.model_fields.items():
        parts += _nested(name, field)
    parts += [_FLAT, _names(LLMConfig.flat)]
    parts += ["## Deprecated names", _names(InferenceConfig.deprecated), "## Options that cannot be combined"]
    parts.append(_list(COMPOSITIONS))
    parts += ["Only in `init_inference`:", _list(INFERENCE_COMPOSITIONS)]
    parts += ["Only in `LLM`:", _list(LLM_COMPOSITIONS)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _nested(path: str, field: FieldInfo) -> Iterator[str]:
    section = section_of(field)
    if section is None:
        return
    yield _table(f"`{path}`", section, section.model_fields, path)
    for name, inner in section.model_fields.items():
        yield from _nested(f"{path}.{name}", inner)


def _table(title: str, model: type[ConfigModel], fields: Mapping[str, FieldInfo], path: str = "") -> str:
    lines = [f"## {title}", "", "| option | default | meaning |", "|---|---|---|"]
    for name, field in fields.items():
        others = [f"`{alias}`" for alias, target in model.aliases.items() if target == name]
        also = f" (also {', '.join(others)})" if others else ""
        meaning = " ".join(str(field.description).split())
        lines.append(f"| `{name}`{also} | {_default(field)} | {meaning}{_later(path, name)} |")
    return "\n".join(lines)


def _names(paths: Mapping[str, str]) -> str:
    rows = [f"| `{name}` | `{path}` |" for name, path in paths.items()]
    return "\n".join(["| name | option |", "|---|---|", *rows])


def _list(messages: Iterable[str]) -> str:
    return "\n".join(f"- {message}" for message in messages)


def _default(field: FieldInfo) -> str:
    return "see below" if section_of(field) and field.default is not None else f"`{field.default!r}`"


def _later(path: str, name: str) -> str:
    later = LATER.get(f"{path}.{name}".removeprefix("."))
    return f" *Later: {later}.*" if later else ""


if __name__ == "__main__":
    sys.stdout.write(markdown())
