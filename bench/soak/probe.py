"""`python -m bench.soak.probe PORT SECONDS`: asks /health repeatedly, and prints the seconds of each answer.

It is a separate process, because a client that is busy with sending bodies would measure itself.
"""

import http.client
import json
import sys
import time

EVERY = 0.01  # seconds between requests


def main(port: int, seconds: float) -> list[float]:
    """The time of each answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    end, times = time.monotonic() + seconds, []
    while time.monotonic() < end:
        begin = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        times.append(time.perf_counter() - begin)
        time.sleep(EVERY)
    return times


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), float(sys.argv[2]))))
