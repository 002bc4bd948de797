"""`outpace serve` before its slow imports: checks the options and starts the engine's process.

The engine imports torch while this process imports its HTTP server: both take seconds, and run on different cores.
"""

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from outpace.config import AskedConfig
from outpace.errors import ConfigError, OutpaceError
from outpace.log import logger
from outpace.server.admission import Admission
from outpace.server.checks import check_files, check_model, check_policy, check_replicas
from outpace.server.exit_codes import INTERRUPTED, NOT_STARTED, WRONG_OPTION
from outpace.server.listen import allow_files, bound, bound_unix
from outpace.server.options import ServerConfig
from outpace.server.supervisor import Healing, Supervisor

SPARE_FILES = 256  # open files beside connections


def launch(
    model: str | None, llm_options: Mapping[str, Any], config: ServerConfig, *, unix_path: str | None = None
) -> int:
    """Serve until a signal comes; returns the exit code. `llm_options` are those of LLMConfig, as plain JSON values.

    unix_path: listen on a Unix socket there instead of a port.
    """
    console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
    try:
        asked = AskedConfig.of(dict(llm_options))
        check_files(config)
        check_policy(asked)
        check_replicas(config.replicas, asked.nodes.nnodes)
    except (OutpaceError, OSError) as error:
        console.print(f"error: {error}")
        return WRONG_OPTION
    if asked.nodes.node_rank > 0:
        return _run_node(model, asked, config, console)
    try:
        check_model(model)
        allow_files((2 if config.replicas > 1 else 1) * config.max_connections + SPARE_FILES)
        sock = bound(config) if unix_path is None else bound_unix(unix_path)
    except (OutpaceError, OSError) as error:
        console.print(f"error: {error}")
        return NOT_STARTED
    try:
        with sock:
            if (warning := config.no_key_warning()) is not None:
                console.print(warning, style="bold red")
            return asyncio.run(_serve(model, llm_options, asked, config, sock, console))
    except (OutpaceError, OSError) as error:
        console.print(f"error: {error}")
        return WRONG_OPTION if isinstance(error, ConfigError) else NOT_STARTED  # only the engine can check some options
    except KeyboardInterrupt:
        return INTERRUPTED


def _run_node(model: str | None, asked: AskedConfig, config: ServerConfig, console: Console) -> int:
    """Work for node 0 until it ends; returns the exit code. Options of the HTTP server have no effect here."""
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
    """Start the engine's process before importing the HTTP server, so that both import at the same time."""
    if config.replicas > 1:
        from outpace.replicas.serve_replicas import serve_replicas

        return await serve_replicas(model, llm_options, asked, config, sock, console)
    engine = make_engine(model, llm_options, asked, config)
    try:
        before = process_age()
        await engine.launch()

        from outpace.server.lifetime import serve_http

        return await serve_http(model, engine, config, sock, console, before)
    finally:
        await engine.close()


def make_engine(
    model: str | None, llm_options: Mapping[str, Any], asked: AskedConfig, config: ServerConfig
) -> Supervisor:
    """The engine for these options, not launched yet."""
    admission = Admission(
        max_waiting=asked.scheduler.max_waiting,
        max_waiting_tokens=config.max_waiting_tokens,
        max_sequences_per_caller=config.max_sequences_per_key,
        max_waiting_tokens_per_caller=config.max_waiting_tokens_per_key,
    )
    healing = Healing(stall_timeout=config.stall_timeout, ready_timeout=config.ready_timeout)
    return Supervisor(model, llm_options, admission=admission, healing=healing)


def process_age() -> float:
    """Seconds since the system started this process; on systems other than Linux, since Python started."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return time.perf_counter()
