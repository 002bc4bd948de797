"""`outpace serve`: an OpenAI-compatible server; flags are the fields of its two configs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli.model import Model, SameModel, one_model
from outpace.cli.suggest import run_command
from outpace.errors import ConfigError

if TYPE_CHECKING:
    from outpace.server.options import ServerConfig

NAMES_FLAG = "--served-model-name"
CONTEXT: Mapping[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Registration of the command: it parses its own arguments after importing the configs, which import torch."""


def command(ctx: typer.Context) -> None:
    """Serve a model over HTTP, with OpenAI's API."""
    run_command(make_command(), ctx, spread_names(ctx.args))


def spread_names(args: Sequence[str]) -> list[str]:
    """Repeat the flag before each name, since vLLM accepts `MODEL --served-model-name a b`.

    Only if the model comes first or is given by --model; otherwise a word could be the model.
    """
    is_named = any(arg.partition("=")[0] in ("--model", "-m") for arg in args)
    if not args or (args[0].startswith("-") and not is_named):
        return list(args)
    spread: list[str] = []
    names = 0  # values of the flag so far; 0: words are not names
    for arg in args:
        names = 1 if arg == NAMES_FLAG else 0 if arg.startswith("-") else names and names + 1
        spread += [NAMES_FLAG, arg] if names > 2 else [arg]
    return spread


def make_command() -> Any:
    """The command with all its flags."""
    from outpace.cli.flags import config_flags, llm_flags, with_flags
    from outpace.server.options import ServerConfig

    return with_flags(_serve, [*llm_flags(), *config_flags(ServerConfig)])


def _serve(
    model: Model = None,
    same_model: SameModel = None,
    config: Annotated[
        Path | None, typer.Option(help="A .yaml or .json file with any of these options; flags win over it.")
    ] = None,
    *,
    flags: Mapping[str, Any],
) -> None:
    """Serve a model over HTTP, with OpenAI's API.

    Option names are vLLM's if they mean the same. A config file may have every option, also the sections of
    docs/configuration.md.
    """
    model = one_model(model, same_model)
    name, llm, server = options_of({} if config is None else read_config(config), flags)

    from outpace.server.launch import launch  # imported late: this takes seconds, and bad options should fail first
    from outpace.server.logs import set_up

    set_up(as_json=server.log_json)
    raise typer.Exit(launch(model or name, llm, server))


def options_of(
    given: Mapping[str, Any], flags: Mapping[str, Any] = MappingProxyType({})
) -> "tuple[str | None, dict[str, Any], ServerConfig]":
    """Model, options of the engine and options of the server; flags, by field names, win over other options."""
    from outpace.cli.flags import config_flags, llm_flags, override
    from outpace.config import LLMConfig
    from outpace.server.given import split_options
    from outpace.server.options import ServerConfig

    model, llm, server = split_options(given)
    server = override(server, flags, config_flags(ServerConfig), ServerConfig)
    return model, override(llm, flags, llm_flags(), LLMConfig), ServerConfig(**server)


def read_config(path: Path) -> dict[str, Any]:
    """Read options from a file, with underscores in their names."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: cannot read {path} ({error}); give a .yaml or .json file") from None
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise ConfigError(f"config: {path} is neither .yaml nor .json; rename it")
    try:
        content = json.loads(text, object_pairs_hook=_unique) if path.suffix == ".json" else _read_yaml(text)
    except ValueError as error:
        raise ConfigError(f"config: {path} cannot be read: {str(error).removeprefix('config: ')}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"config: {path} must hold names and values, not {type(content).__name__}")
    return _unique([(str(name).replace("-", "_"), value) for name, value in content.items()])


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"config: {twice[0]} is given twice; give it once")
    return dict(pairs)


def _read_yaml(text: str) -> Any:
    import yaml  # type: ignore[import-untyped]

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            _unique([(str(key.value), None) for key, _ in node.value])
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)  # SafeLoader: it creates no arbitrary objects
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
