"""Entry point of every rank but the first: runs the steps that it is sent, and ends when the first rank ends.

Usage: python -m outpace.ranks.follower FD PARENT. FD: its socket to the first rank. PARENT: pid of the
process that started it: the first rank, or the agent of another node.
"""

import faulthandler
import logging
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

import msgspec

from outpace.ranks.messages import Begin, Failed, Frames, Here, Launch, Loaded, Ping, Pong, Sender, ToFollower, frame
from outpace.ranks.network import own_sockets, received, watch_over_new
from outpace.ranks.process import versions, watched

if TYPE_CHECKING:
    from outpace.runner.runner import Runner

_PONG = frame(Pong())
Inbox = queue.SimpleQueue[ToFollower]


def main(fd: int, parent: int) -> NoReturn:
    """Run until the first rank ends or something fails."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore Ctrl-C: the first rank decides when to end
    os.set_inheritable(fd, False)
    sock, inbox = socket.socket(fileno=fd), Inbox()
    sender = Sender(sock)
    threading.Thread(target=_read, args=(sock, sender, parent, inbox), daemon=True).start()
    try:
        follow(inbox, lambda message: sender.send(frame(message)))
    except BaseException as error:
        last_words = _failed(error)
        if not last_words.kind:  # our own errors need no traceback; the first rank raises them
            traceback.print_exc()
        with suppress(OSError):
            sender.send(frame(last_words))
    sys.stderr.flush()
    os._exit(1)  # exit at once: another thread may be inside a collective


def _read(sock: socket.socket, sender: Sender, parent: int, inbox: Inbox) -> NoReturn:
    """Read messages, and end the process when the first rank ends, whatever the main thread is doing."""
    news, frames = select.poll(), Frames[ToFollower](ToFollower)
    news.register(sock, select.POLLIN)
    own = watched(parent)
    if own is not None:  # the socket closes too, unless a fork of the first rank holds a copy
        news.register(own, select.POLLIN)
    limit, heard = 0.0, time.monotonic()
    while os.getppid() == parent:
        ready = [number for number, _ in news.poll(1000 if limit else None)]
        if sock.fileno() in ready:
            data = received(sock)
            if not data:
                break
            heard = time.monotonic()
            for message in frames.feed(data):
                if isinstance(message, Ping):
                    sender.send_small(_PONG)
                elif isinstance(message, Begin):
                    limit = message.link_timeout
                    inbox.put(_located(message, sock))
                else:
                    inbox.put(message)
        if limit and time.monotonic() - heard > limit:
            sys.stderr.write(f"no message from the first rank for {limit:g} s: it or the link to it is down\n")
            sys.stderr.flush()
            os._exit(1)
    os._exit(0)


def _located(begin: Begin, sock: socket.socket) -> Begin:
    """Fill in the address of the store, which a rank on another machine takes from its own connection."""
    if begin.host is not None:
        return begin
    host, port = sock.getpeername()[:2]
    return msgspec.structs.replace(begin, host=host, port=port + 1)


def _failed(error: BaseException) -> Failed:
    from outpace.errors import OutpaceError
    from outpace.ranks.world import of_others

    text, name = str(error), type(error).__name__
    if isinstance(error, OutpaceError):
        return Failed(name, text, second_hand=False)
    return Failed("", f"{name}: {text}", second_hand=of_others(error))


def follow(inbox: Inbox, send: Callable[[Here | Loaded], None]) -> NoReturn:
    """Load what the first message says, then run steps."""
    begin = inbox.get()
    assert isinstance(begin, Begin), "the first message says what to load"
    level = begin.log_level if begin.log_level <= logging.DEBUG else max(begin.log_level, logging.WARNING)
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s")  # the first rank logs the same
    runner = start(begin, send)
    while True:
        message = inbox.get()
        if not isinstance(message, Launch):
            runner.reset()
        elif message.for_logits:
            runner.logits(message.step())
        else:
            runner.launch(message.step())


def start(begin: Begin, send: Callable[[Here | Loaded], None]) -> "Runner":
    """Join the others and load this rank's part of the model."""
    import torch  # imported late: this takes seconds, and the watching thread should run first

    from outpace.config import LLMConfig
    from outpace.load_paged import load_paged
    from outpace.ranks import agree, world
    from outpace.runner.start import start_runner
    from outpace.runner.threads import share

    assert begin.host is not None, "located"
    local = begin.local or begin.size
    store = world.meet(begin.size, begin.port, begin.listening, host=begin.host)
    send(Here(versions()))
    config = LLMConfig(**begin.config)
    torch.set_num_threads(begin.threads or share(torch.get_num_threads(), local))
    if config.torch_device.type == "cuda":
        torch.cuda.set_device(config.torch_device)
    before = set(own_sockets().values())
    world.join(store, begin.rank, begin.size, str(config.torch_device), local)
    parts = load_paged(begin.model, config, tokenizer=False)
    if begin.link_timeout:
        watch_over_new(before, begin.link_timeout)
    send(Loaded(agree.facts(parts, begin.model)))
    return start_runner(parts.model, parts.config, parts.max_model_len).runner


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
