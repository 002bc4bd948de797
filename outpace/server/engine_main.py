"""The engine process: loads the model, reports to the server, and works until the server is gone."""

import logging
import os
import socket
import time
from collections.abc import Callable

from outpace.config import LLMConfig
from outpace.errors import OutpaceError
from outpace.llm_engine import LLMEngine
from outpace.load_paged import PagedParts
from outpace.log import logger
from outpace.ranks.leader import load_ranked
from outpace.server.channel import Channel
from outpace.server.messages import NotStarted, Start, Starting, ToWorker, kind_of
from outpace.server.worker import LAST_WORDS, Worker


def run_engine(fd: int) -> int:
    """Work for the process at the other end of the socket `fd`; returns the exit code."""
    with socket.socket(fileno=fd) as sock:
        return load_and_work(Channel(sock))


def load_and_work(channel: Channel) -> int:
    """Load the model that the first message asks for, then work; returns the exit code."""
    messages: list[ToWorker] = []
    while not messages and not channel.closed:
        messages = channel.receive(wait=True)
    if channel.closed:
        return 0
    (start,) = messages  # the server sends no other before `Ready`
    assert isinstance(start, Start), "the first message says what to load"
    logging.basicConfig(level=start.log_level, format="%(asctime)s engine %(levelname)s %(message)s")

    def tell(part: str) -> None:
        channel.send(Starting(part))  # short enough to be sent at once

    try:
        engine, parts, seconds = load(start, tell)
    except Exception as error:
        channel.send(_why(error))
        channel.drain(LAST_WORDS)
        return 1
    worker = Worker(engine, parts, channel)
    channel.send(worker.ready(seconds))
    code = worker.run()
    if code == 0:
        engine.ranks.say_end()
    return code


def load(start: Start, tell: Callable[[str], None]) -> tuple[LLMEngine, PagedParts, dict[str, float]]:
    """The engine that was asked for, and the seconds of each part of its start. It has no tokenizer."""
    tell("loading the weights")
    parts, ranks = load_ranked(start.model, LLMConfig.of(start.options), tokenizer=False, tell=tell)
    tell("compiling kernels, measuring memory, capturing graphs")
    engine = LLMEngine(parts, ranks=ranks)
    ranks.on_lost = _end_soon
    return engine, parts, parts.seconds | engine.startup_seconds


def _why(error: Exception) -> NotStarted:
    if isinstance(error, OutpaceError):
        return NotStarted(kind_of(error), str(error))
    logger.exception("the model cannot be loaded")
    return NotStarted("other", f"{type(error).__name__}: {error}")


def _end_soon(cause: str) -> None:
    """End this process, busy or idle, even if it hangs: the other ranks are gone, and it is useless without them.

    It first waits, so that a step that fails can still send errors. Called in its own thread.
    """
    time.sleep(LAST_WORDS)
    logging.shutdown()
    os._exit(1)
