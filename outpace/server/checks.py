"""Checks of `outpace serve` before anything starts: options about the machine, files and packages."""

import importlib.util
import ssl

from outpace.config import AskedConfig
from outpace.errors import ConfigError
from outpace.loading.checkpoint import local_path, open_checkpoint
from outpace.server.options import ServerConfig

PACKAGES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")


def check_policy(asked: AskedConfig) -> None:
    """Refuse scheduling policies that are for offline work."""
    if asked.scheduler.policy != "arrival":
        raise ConfigError(
            f"scheduler.policy={asked.scheduler.policy!r}: it is for offline work with LLM.generate; a server would "
            "have short answers wait for long ones; remove it, or give requests a priority"
        )


def check_replicas(replicas: int, nodes: int) -> None:
    """Refuse replicas of an engine that spans machines."""
    if replicas > 1 and nodes > 1:
        raise ConfigError(
            f"replicas: {replicas} replicas on one machine, and nnodes={nodes} spreads one model over several; give "
            "only one of them"
        )


def check_files(config: ServerConfig) -> None:
    """Read the files that the options name, so that errors come before the model is loaded."""
    config.all_api_keys()
    _check_template(config.template_text())
    _check_tracing(config.otlp_traces_endpoint)
    if config.ssl_certfile is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        except OSError as error:
            raise ConfigError(f"ssl_certfile: it and ssl_keyfile cannot be used ({error}); give both as PEM") from None


def _check_template(text: str | None) -> None:
    if text is None:
        return

    from outpace.server.render import syntax_error  # imported late: it imports Jinja

    if wrong := syntax_error(text):
        raise ConfigError(f"chat_template: not valid Jinja ({wrong}); correct the template given with --chat-template")


def check_model(model: str | None) -> None:
    """Check a model folder; the name of a model that is not here is looked up when it is loaded."""
    path = None if model is None else local_path(model)
    if path is not None and path.suffix.lower() != ".gguf":
        open_checkpoint(path)


def _check_tracing(endpoint: str | None) -> None:
    if endpoint is None:
        return
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"otlp_traces_endpoint: expected a URL of OTLP over HTTP, as http://host:4318/v1/traces, got {endpoint!r}"
        )
    if not all(map(_is_there, PACKAGES)):
        raise ConfigError("otlp_traces_endpoint: OpenTelemetry is not installed; pip install 'outpace[tracing]'")


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of its parent package
        return False
