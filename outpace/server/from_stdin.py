"""The process behind `outpace.serve`: options are the first line of standard input, whose end is the end of the parent.

It imports as little as `outpace serve`, which the module of `outpace.serve` itself does not.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path

from outpace.cli.serve import options_of
from outpace.server.logs import set_up
from outpace.server.run import run


def main() -> int:
    """Serve; the exit code."""
    received = b""
    while not received.endswith(b"\n") and (more := os.read(0, 1 << 16)):
        received += more
    asked = json.loads(received)

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    _, llm, config = options_of(asked["options"])
    path = asked.get("unix_path")  # of one of several servers behind another
    set_up(as_json=config.log_json, name=Path(path).stem if path else "")
    return run(asked["model"], llm, config, unix_path=path)


if __name__ == "__main__":
    sys.exit(main())
