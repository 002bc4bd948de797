"""`outpace deploy`: the server of `outpace serve`, replicated over a Ray cluster."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from outpace.cli import serve
from outpace.cli.model import Model, SameModel, one_model
from outpace.cli.suggest import run_command
from outpace.errors import ConfigError

_ALL = "all"


def command(ctx: typer.Context) -> None:
    """Serve a model from a Ray cluster, with replicas."""
    run_command(make_command(), ctx, serve.spread_names(ctx.args))


def make_command() -> Any:
    """The command with the flags of `outpace serve` and the deployment's own, which win if names are equal."""
    from outpace.cli.flags import config_flags, llm_flags, with_flags
    from outpace.deploy.options import DeployConfig
    from outpace.server.options import ServerConfig

    own = config_flags(DeployConfig)
    others = [flag for flag in config_flags(ServerConfig) if flag.name not in DeployConfig.model_fields]
    return with_flags(_deploy, [*llm_flags(), *others, *own])


def _deploy(
    model: Model = None,
    same_model: SameModel = None,
    config: Annotated[
        Path | None, typer.Option(help="A .yaml or .json file with any of these options; flags win over it.")
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Deploy to Ray Serve (the only target).")] = False,
    wait: Annotated[
        bool | None,
        typer.Option(
            "--wait/--detach",
            help="Stay until a signal, then drain the application; or leave it running. Default: stay only if this "
            "command started the cluster.",
        ),
    ] = None,
    status: Annotated[
        str | None, typer.Option(metavar="NAME", help="Print the state of an application, or of all, and end.")
    ] = None,
    stop: Annotated[str | None, typer.Option(metavar="NAME", help="Drain an application and end it.")] = None,
    *,
    flags: Mapping[str, Any],
) -> None:
    """Serve a model from a Ray cluster, with replicas.

    Takes every option of `outpace serve`. Deploying a name again replaces its replicas one after the other.
    """
    if not ray:
        raise ConfigError("ray: add --ray, the only target; for a server without a cluster use `outpace serve`")
    model = one_model(model, same_model)
    name, llm, server, deployment = options_of({} if config is None else serve.read_config(config), flags)

    from rich.console import Console

    from outpace.deploy import run

    console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
    if status is None and stop is None:
        run.deploy(model or name, llm, server, deployment, wait=wait, console=console)
        return
    if model or (status is not None and stop is not None):
        raise ConfigError("status, stop: give one of them, without a model")
    run.require_ray()
    with run.connected(deployment.address or "auto"):
        if status is not None:
            typer.echo(json.dumps(run.status(None if status == _ALL else status), indent=2))
        else:
            assert stop is not None
            run.stop(stop)


def options_of(given: Mapping[str, Any], flags: Mapping[str, Any]) -> Any:
    """Model, and options of engine, server and deployment; flags win over the config file."""
    from outpace.deploy.options import DeployConfig

    own = DeployConfig.model_fields
    mine = {name: value for name, value in {**given, **flags}.items() if name in own}
    rest = {name: value for name, value in given.items() if name not in own}
    name, llm, server = serve.options_of(rest, {name: value for name, value in flags.items() if name not in own})
    return name, llm, server, DeployConfig(**mine)
