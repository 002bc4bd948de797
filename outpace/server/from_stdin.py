"""The process of `outpace.serve`, and of a replica: options are one line of JSON on standard input.

When standard input ends, the parent has ended, and the server ends too.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path

from outpace.server.given import split_options
from outpace.server.launch import launch
from outpace.server.logs import set_up
from outpace.server.options import ServerConfig


def main() -> int:
    """Serve; returns the exit code."""
    received = b""
    while not received.endswith(b"\n") and (more := os.read(0, 1 << 16)):
        received += more
    asked = json.loads(received)

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    _, llm, server = split_options(asked["options"])
    config = ServerConfig(**server)
    path = asked.get("unix_path")  # of a replica behind a router
    set_up(as_json=config.log_json, name=Path(path).stem if path else "")
    return launch(asked["model"], llm, config, unix_path=path)


if __name__ == "__main__":
    sys.exit(main())
