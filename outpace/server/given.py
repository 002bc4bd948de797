"""Splits options as people give them, in one mapping, into those of the engine and those of the server."""

from collections.abc import Mapping
from typing import Any

from outpace.config import LLMConfig
from outpace.config.nearest import did_you_mean
from outpace.errors import ConfigError
from outpace.server.options import ServerConfig


def split_options(given: Mapping[str, Any]) -> tuple[str | None, dict[str, Any], dict[str, Any]]:
    """The model, the options of LLMConfig and the options of ServerConfig. Values are not checked; names are."""
    model = given.get("model")
    if not isinstance(model, str | None):
        raise ConfigError(f"model: expected a name or a path, got {model!r}")
    of_server = {*ServerConfig.model_fields, *ServerConfig.aliases}
    of_engine = {*LLMConfig.model_fields, *LLMConfig.aliases, *LLMConfig.deprecated}
    known = {"model", *of_server, *of_engine}
    for name in (each for each in given if each not in known):
        hint = did_you_mean(name, known) or "; `outpace serve --help` lists the options"
        raise ConfigError(f"unknown name {name!r}{hint}")
    server = {name: value for name, value in given.items() if name in of_server}
    llm = {name: value for name, value in given.items() if name not in of_server and name != "model"}
    return model, llm, server
