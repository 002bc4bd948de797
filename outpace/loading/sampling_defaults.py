"""Reads the sampling defaults that a model recommends from generation_config.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.errors import ConfigError, InputError
from outpace.log import chosen
from outpace.types import SamplingParams

FILE = "generation_config.json"
OFF = ("none", "vllm")
"""Values of the option `generation_config` that turn recommended values off; the second is vLLM's."""
_NAMES = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
"""Name in generation_config.json -> name in SamplingParams. Like vLLM, `do_sample` is ignored."""


def sampling_defaults(asked: str, own: Any, recommended: Mapping[str, float]) -> dict[str, float]:
    """The default sampling values of requests, by names of SamplingParams.

    asked: the option `generation_config`; own: the model's config, or None; recommended: other known values.
    """
    if asked in OFF:
        return {}
    values = _read(Path(asked)) if asked != "auto" else {} if own is None else own.to_dict()
    found = {meant: values[name] for name, meant in _NAMES.items() if values.get(name) is not None}
    if asked == "auto":
        found = {**recommended, **found}
    try:
        SamplingParams(**found)
    except InputError as error:
        raise ConfigError(
            f"generation_config: {error} (in {FILE}); correct the file, or set generation_config=none"
        ) from None
    if found:
        source = "the model's generation config" if asked == "auto" else asked
        shown = ", ".join(f"{name} {value}" for name, value in found.items())
        chosen("sampling defaults", shown, f"{source}; generation_config=none turns them off")
    return found


def _read(path: Path) -> dict[str, Any]:
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"generation_config: there is no {file}; give auto, none, or a folder that has a {FILE}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"generation_config: cannot read {file} ({error}); give a JSON file") from None
    if not isinstance(content, dict):
        raise ConfigError(f"generation_config: {file} holds a {type(content).__name__}; it must hold a JSON object")
    return content
