"""A worker without a model, for tests of the supervisor: it answers each request with its first prompt token, for ever.

What it does is in its options: `fail` (a file: while it is there the start fails), `silent` (it never gets ready).
"""

import os
import socket
import sys
import time
from typing import Any

import msgspec

from outpace.server.engine import ModelCard
from outpace.server.messages import (
    Add,
    Cancel,
    Frames,
    FromWorker,
    Look,
    News,
    NotStarted,
    Numbers,
    Ready,
    Start,
    Tokens,
    ToWorker,
    frame,
)


def main(sock: socket.socket) -> int:
    """Serve until the other side hangs up."""
    frames, decoder = Frames(), msgspec.msgpack.Decoder[Any](ToWorker)
    live: dict[int, int] = {}
    steps = 0

    def send(message: FromWorker) -> None:
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
                send(Ready(card, {"load": 0.5}, 8, 16, expert_layers=[0]))
            elif isinstance(message, Look):
                send(News(expert_load=[[3, 4]]))
            elif isinstance(message, Add):
                live[message.number] = message.prompt_token_ids[0]
            elif isinstance(message, Cancel) and live.pop(message.number, None) is not None:
                send(News(cancelled=[message.number]))
        if live:
            steps += 1
            numbers = Numbers(len(live), 0, 10, steps, steps, steps, 0, 0, 0, [])
            send(News(tokens=[Tokens(number, 0, [token]) for number, token in live.items()], numbers=numbers))


if __name__ == "__main__":
    sys.exit(main(socket.socket(fileno=int(sys.argv[1]))))
