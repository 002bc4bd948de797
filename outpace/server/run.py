"""`outpace serve` up to the imports that take seconds: options are checked, and the engine's process is started.

The engine imports torch while this process imports its HTTP server: both take seconds, and a machine has two cores.
"""

import asyncio
import errno
import importlib.util
import os
import resource
import socket
import ssl
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from outpace.config import AskedConfig
from outpace.errors import ConfigError, OutpaceError
from outpace.loading.checkpoint import local_path, open_checkpoint
from outpace.log import logger
from outpace.server.admission import Admission
from outpace.server.options import ServerConfig
from outpace.server.supervisor import Healing, Supervisor

FINISHED = 0
"""Exit code: ended by a signal, and every request was answered."""
NOT_STARTED = 1
"""Exit code: the model or the port cannot be used; standard error says why in one line."""
WRONG_OPTION = 2
"""Exit code: the value of an option cannot work; standard error says why in one line."""
CUT_OFF = 3
"""Exit code: ended by a signal, and requests were cut off."""
INTERRUPTED = 130
"""Exit code: interrupted before it served anything."""

BACKLOG = 2048  # connections that wait to be taken
SPARE_FILES = 256  # open files beside connections
PACKAGES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")


def run(
    model: str | None, llm_options: Mapping[str, Any], config: ServerConfig, *, unix_path: str | None = None
) -> int:
    """Serve until a signal comes; the exit code. `llm_options` are those of LLMConfig, as values that JSON knows.

    unix_path: listen on a Unix socket there instead of a port.
    """
    console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
    try:
        asked = AskedConfig.of(dict(llm_options))
        check_files(config)
        _check_replicas(config.replicas, asked.nodes.nnodes)
    except (OutpaceError, OSError) as error:
        console.print(f"error: {error}")
        return WRONG_OPTION
    if asked.nodes.node_rank > 0:
        return run_node(model, asked, config, console)
    try:
        check_model(model)
        _allow_files((2 if config.replicas > 1 else 1) * config.max_connections + SPARE_FILES)
        sock = _bound(config) if unix_path is None else _bound_unix(unix_path)
    except (OutpaceError, OSError) as error:
        console.print(f"error: {error}")
        return NOT_STARTED
    try:
        with sock:
            if (warning := config.open_door()) is not None:
                console.print(warning, style="bold red")
            return asyncio.run(_serve(model, llm_options, asked, config, sock, console))
    except (OutpaceError, OSError) as error:
        console.print(f"error: {error}")
        return WRONG_OPTION if isinstance(error, ConfigError) else NOT_STARTED  # some only the engine can judge
    except KeyboardInterrupt:
        return INTERRUPTED


def run_node(model: str | None, asked: AskedConfig, config: ServerConfig, console: Console) -> int:
    """Work for node 0 until it ends; the exit code. There is no HTTP here, whatever the options of the server say."""
    from outpace.ranks.agent import run_agent

    if unused := sorted(config.model_fields_set - {"log_json"}):
        logger.info("only node 0 serves HTTP; these options do nothing here: %s", ", ".join(unused))
    try:
        check_model(model)
        return run_agent(model, asked)
    except (OutpaceError, OSError) as error:
        console.print(f"error: {error}")
        return WRONG_OPTION if isinstance(error, ConfigError) else NOT_STARTED


async def _serve(
    model: str | None,
    llm_options: Mapping[str, Any],
    asked: AskedConfig,
    config: ServerConfig,
    sock: socket.socket,
    console: Console,
) -> int:
    """Start the engine's process, and only then import the HTTP server, which the engine need not wait for."""
    if config.replicas > 1:
        from outpace.replicas.serve import serve_replicas

        return await serve_replicas(model, llm_options, asked, config, sock, console)
    engine = make_engine(model, llm_options, asked, config)
    try:
        before = process_age()
        await engine.launch()

        from outpace.server.serve import serve

        return await serve(model, engine, config, sock, console, before)
    finally:
        await engine.close()


def make_engine(
    model: str | None, llm_options: Mapping[str, Any], asked: AskedConfig, config: ServerConfig
) -> Supervisor:
    """The engine that these options ask for; it has not been launched."""
    admission = Admission(
        max_waiting=asked.scheduler.max_waiting,
        max_waiting_tokens=config.max_waiting_tokens,
        max_sequences_per_caller=config.max_sequences_per_key,
        max_waiting_tokens_per_caller=config.max_waiting_tokens_per_key,
    )
    healing = Healing(stall_timeout=config.stall_timeout, ready_timeout=config.ready_timeout)
    return Supervisor(model, llm_options, admission=admission, healing=healing)


def process_age() -> float:
    """Seconds since the system started this process; elsewhere than on Linux, since Python did."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return time.perf_counter()


def _check_replicas(replicas: int, nodes: int) -> None:
    if replicas > 1 and nodes > 1:
        raise ConfigError(
            f"replicas: {replicas} replicas on one machine, and nnodes={nodes} spreads one model over several; give "
            "only one of them"
        )


def check_files(config: ServerConfig) -> None:
    """Read the files that the options name: better now than when the model is loaded."""
    config.all_api_keys()
    config.template_text()
    _check_tracing(config.otlp_traces_endpoint)
    if config.ssl_certfile is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        except OSError as error:
            raise ConfigError(f"ssl_certfile: it and ssl_keyfile cannot be used ({error}); give both as PEM") from None


def check_model(model: str | None) -> None:
    """Look at a folder; a name of a model elsewhere is looked up when it is loaded."""
    path = None if model is None else local_path(model)
    if path is not None and path.suffix.lower() != ".gguf":
        open_checkpoint(path)


def _check_tracing(endpoint: str | None) -> None:
    """Say what is wrong with the option before anything starts."""
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
    except ModuleNotFoundError:  # nor is what it is in
        return False


def _allow_files(count: int) -> None:
    """Raise the limit of open files, as far as the system lets us: usual is 1,024, and connections are files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < count:
        logger.warning("the system allows %d open files; max_connections would need %d", wanted, count)


def _bound(config: ServerConfig) -> socket.socket:
    """The socket to listen on. It listens at once, so that of two servers that start the second is told."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # by name, else asyncio does not know that it is TCP and leaves Nagle's delay on: 40 ms for each answer
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform == "linux":  # no longer is a connection held for a client that does not read
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * config.keep_alive_timeout))
        sock.bind((config.host, config.port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        is_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        name = "host" if is_host else "port"
        remedy = "an address of this machine" if is_host else "another port, or 0 for a free one"
        said = f"{name}: cannot listen on {config.host} port {config.port} ({error.strerror}); give {remedy}"
        raise ConfigError(said) from None
    return sock


def _bound_unix(path: str) -> socket.socket:
    """The socket at a path, for whoever may reach its folder."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock
