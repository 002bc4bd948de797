"""`outpace deploy --ray`: connect to a cluster or start one, deploy, and wait or leave."""

import contextlib
import importlib.util
import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from outpace.config import AskedConfig
from outpace.deploy import plan
from outpace.deploy.options import DeployConfig
from outpace.errors import ConfigError, ModelError, NotSupported, StateError
from outpace.server.checks import check_files, check_model, check_policy
from outpace.server.options import ServerConfig, local_url

LOCAL = "local"
OBJECT_STORE = 200 * 2**20  # bytes: requests and answers pass through it only if they are long


def deploy(
    model: str | None,
    llm_options: Mapping[str, Any],
    server: ServerConfig,
    config: DeployConfig,
    *,
    wait: bool | None,
    console: Console,
) -> None:
    """Deploy a model, or update the application of that name. wait: stay until a signal, then drain it.

    A cluster that was started here ends with this process; for it, waiting is the default.
    """
    asked = AskedConfig.of(dict(llm_options))
    check_files(server)
    check_policy(asked)
    plan.check(server, asked)
    require_ray()
    with connected(config.address) as started:
        if started:
            check_model(model)  # in another cluster, the nodes have it
            if wait is False:
                raise ConfigError("detach: a cluster that this command starts ends with it; give --address of another")
        url = _deployed(_absolute(model), llm_options, server, config, asked)
        console.print(f"{config.name} is ready")
        console.print(url)
        if warning := server.no_key_warning():
            console.print(warning, style="bold red")
        if wait or started:
            _until_signal()
            console.print(f"draining {config.name}")
            stop(config.name)


def _deployed(
    model: str | None,
    llm_options: Mapping[str, Any],
    server: ServerConfig,
    config: DeployConfig,
    asked: AskedConfig,
) -> str:
    """Deploy and wait until the application is healthy; its URL on the head node."""
    import ray
    from ray import serve

    from outpace.deploy.application import application

    cluster = ray.cluster_resources()
    plan.check_room(plan.bundle(config, asked, cluster), [node["Resources"] for node in ray.nodes() if node["Alive"]])
    app = application(
        *(model, llm_options, plan.sent_options(server, os.environ)),
        threads=max(1, int(config.cpus_per_rank)),
        replica=plan.replica_options(config, server, asked, cluster),
        ingress=plan.ingress_options(config, server),
    )
    _start_http(server)
    try:
        serve.run(app, name=config.name, route_prefix=server.root_path or "/")
    except RuntimeError as error:
        raise ModelError(f"{config.name}: cannot be deployed: {_reason(config.name, error)}") from None
    return local_url(server.host, server.port, tls=server.ssl_certfile is not None) + server.root_path


def _absolute(model: str | None) -> str | None:
    """An absolute path, if there is such a path here; another may be on the nodes of the cluster."""
    here = model is not None and Path(model).expanduser().exists()
    return str(Path(str(model)).expanduser().resolve()) if here else model


def _start_http(server: ServerConfig) -> None:
    """Start Ray's proxies, or check that running ones have the options that were asked for."""
    from ray import serve
    from ray.serve.context import _get_global_client

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    asked = plan.http_options(server)
    serve.start(http_options=asked)
    client = _get_global_client()
    running = client.http_config.model_dump()
    for name in ("host", "port", "ssl_certfile", "ssl_keyfile"):
        if running[name] != asked[name]:
            raise ConfigError(
                f"{name}: Ray Serve already listens with {name}={running[name]!r} in this cluster, which all its "
                f"applications share, got {asked[name]!r}; give the same, and --root-path for a second application"
            )


def _reason(name: str, error: Exception) -> str:
    """Why an application is not healthy: the last line of a replica's error, else Ray's message."""
    from ray import serve

    found = serve.status().applications.get(name)
    said = [each.message for each in found.deployments.values() if each.message] if found else []
    lines = [line.strip() for text in (*said, str(error)) for line in text.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("outpace.errors.")]
    return (ours or lines)[-1] if lines else str(error)


def status(name: str | None) -> dict[str, Any]:
    """The status of one application, or of all, from Ray Serve."""
    from ray import serve

    found = serve.status().applications
    if name is not None and name not in found:
        raise ConfigError(f"status: no application {name!r} in this cluster; there are {sorted(found) or 'none'}")
    return {each: _shown(found[each]) for each in ([name] if name is not None else sorted(found))}


def _shown(application: Any) -> dict[str, Any]:
    deployments = {
        name: {"status": each.status.value, "replicas": dict(each.replica_states), "message": each.message}
        for name, each in application.deployments.items()
    }
    return {"status": application.status.value, "message": application.message, "deployments": deployments}


def stop(name: str) -> None:
    """Drain an application and wait for its end."""
    from ray import serve

    if name not in serve.status().applications:
        raise ConfigError(f"stop: no application {name!r} in this cluster; `outpace deploy --ray --status` lists them")
    serve.delete(name)


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[bool]:
    """Connect to a cluster or start one. Yields whether it was started here and ends with the context."""
    import ray

    def start() -> None:
        ray.init(
            LOCAL,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE,
            log_to_driver=False,
            logging_level="WARNING",
        )

    started = address == LOCAL
    try:
        if started:
            start()
        else:
            ray.init(address or "auto", log_to_driver=False, logging_level="WARNING")
    except (ConnectionError, ValueError, RuntimeError) as error:
        if address is not None or os.environ.get("RAY_ADDRESS"):
            where = f"address: cannot connect to the Ray cluster at {address or 'auto'} ({error})"
            raise StateError(f"{where}; if it asks for a token, set RAY_AUTH_MODE=token") from None
        started = True
        start()
    try:
        yield started
    finally:
        ray.shutdown()


def require_ray() -> None:
    """Raise an error if Ray, which is an extra, is not installed."""
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("ray.serve") is None:
        raise NotSupported("ray: Ray Serve is not installed; pip install 'outpace[ray]'")


def _until_signal() -> None:
    """Wait for SIGTERM or SIGINT."""
    came = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        came.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    came.wait()
