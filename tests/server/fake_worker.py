"""A worker without a model, for tests of the supervisor: it answers each request with its first prompt token, for ever.

What it does is in its options: `fail` (a file: while it is there the start fails), `silent` (it never gets ready).
"""

import os
import socket
import sys
import time
from dataclasses import replace
from typing import Any

import msgspec

from outpace.server.engine import Delta, EngineStatus, ModelCard
from outpace.server.messages import (
    Add,
    Cancel,
    CountExperts,
    Frames,
    FromWorker,
    News,
    NotStarted,
    Ping,
    Ready,
    Start,
    ToWorker,
    frame,
)

FIXED = EngineStatus(startup_seconds={"load": 0.5}, num_blocks=16, expert_layers=[0])


def main(sock: socket.socket) -> int:
    """Serve until the other side hangs up."""
    frames, decoder = Frames(), msgspec.msgpack.Decoder[Any](ToWorker)
    live: dict[int, int] = {}
    steps = 0

    def send(message: FromWorker) -> None:
        sock.settimeout(None)  # a busy machine may take long to read
        sock.sendall(frame(message))

    while True:
        sock.settimeout(0.005 if live else None)
        try:
            data = sock.recv(1 << 16)
        except TimeoutError:
            data = None
        if data == b"":
            return 0
        for message in (decoder.decode(body) for body in frames.feed(data or b"")):
            if isinstance(message, Start):
                if "fail" in message.options and os.path.exists(message.options["fail"]):  # noqa: PTH110
                    send(NotStarted("model", "model: there is none"))
                    return 1
                if message.options.get("silent"):
                    time.sleep(600)
                card = ModelCard("fake", 64, 97, (), "float32", "cpu", 0)
                send(Ready(card, FIXED, 8))
            elif isinstance(message, Ping):
                send(News(pong=True))
            elif isinstance(message, CountExperts):
                send(News(expert_load=[[3, 4]]))
            elif isinstance(message, Add):
                live[message.number] = message.prompt_token_ids[0]
            elif isinstance(message, Cancel) and live.pop(message.number, None) is not None:
                send(News(cancelled=[message.number]))
        if live:
            steps += 1
            status = replace(FIXED, running=len(live), free_blocks=10, steps=steps, generated_tokens=steps)
            send(News([Delta(0, [token], number=number) for number, token in live.items()], status=status))


if __name__ == "__main__":
    sys.exit(main(socket.socket(fileno=int(sys.argv[1]))))
