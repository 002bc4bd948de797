"""`outpace serve`: an OpenAI-compatible server; its flags are the fields of its two configs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli.model import Model, SameModel, one_model
from outpace.cli.suggest import Command, nearest
from outpace.errors import ConfigError

if TYPE_CHECKING:
    from outpace.server.options import ServerConfig

NAMES_FLAG = "--served-model-name"
CONTEXT: Mapping[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}
"""How the command is registered: it reads its own arguments, once the configs with their torch are imported."""


def command(ctx: typer.Context) -> None:
    """Serve a model over HTTP, with OpenAI's API."""
    # no rich tables: they would cut long names off
    inner = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    inner.command(cls=Command)(make_command())
    inner(args=spread_names(ctx.args), prog_name=ctx.command_path)


def spread_names(args: Sequence[str]) -> list[str]:
    """`MODEL --served-model-name a b` as vLLM takes it, with the flag before each name.

    After a model, which comes first, or with --model, a word can only be a name. Otherwise it could be the model.
    """
    is_named = any(arg.partition("=")[0] in ("--model", "-m") for arg in args)
    if not args or (args[0].startswith("-") and not is_named):
        return list(args)
    spread: list[str] = []
    names = 0  # of the flag that the last words belong to; 0: they are not names
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

    Names are vLLM's where they mean the same. A config file may hold every option, also the sections of
    docs/configuration.md.
    """
    model = one_model(model, same_model)
    name, llm, server = options_of({} if config is None else read_config(config), flags)

    from outpace.server.logs import set_up  # seconds of imports, which a wrong option need not wait for
    from outpace.server.run import run

    set_up(as_json=server.log_json)
    raise typer.Exit(run(model or name, llm, server))


def options_of(
    given: Mapping[str, Any], flags: Mapping[str, Any] = MappingProxyType({})
) -> "tuple[str | None, dict[str, Any], ServerConfig]":
    """Model, options of the engine and options of the server; flags, by field names, win over what else is given."""
    from outpace.cli.flags import config_flags, llm_flags, without
    from outpace.config import LLMConfig
    from outpace.server.options import ServerConfig

    model = given.get("model")
    if not isinstance(model, str | None):
        raise ConfigError(f"model: expected a name or a path, got {model!r}")
    of_server = {*ServerConfig.model_fields, *ServerConfig.aliases}
    of_engine = {*LLMConfig.model_fields, *LLMConfig.aliases, *LLMConfig.deprecated}
    _refuse_unknown(given, {"model", *of_server, *of_engine})
    server = {name: value for name, value in given.items() if name in of_server}
    llm = {name: value for name, value in given.items() if name not in of_server and name != "model"}
    for flag in llm_flags():
        if flag.name in flags:
            llm = {**without(llm, flag.path, LLMConfig), flag.name: flags[flag.name]}
    for flag in config_flags(ServerConfig):
        if flag.name in flags:
            server = {**without(server, flag.path, ServerConfig), flag.name: flags[flag.name]}
    return model, llm, ServerConfig(**server)


def read_config(path: Path) -> dict[str, Any]:
    """The options in a file, with underscores in their names."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: cannot read {path} ({error}); give a .yaml or .json file") from None
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise ConfigError(f"config: {path} is neither .yaml nor .json; rename it to what it is")
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
        return yaml.load(text, Loader)  # a safe one: it makes no objects
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _refuse_unknown(given: Mapping[str, Any], known: set[str]) -> None:
    for name in given:
        if name not in known:
            near = nearest(name, known)
            hint = f": did you mean {near!r}?" if near else "; `outpace serve --help` lists the options"
            raise ConfigError(f"unknown name {name!r}{hint}")
