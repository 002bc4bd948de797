"""Records what clients send to a server, for the tests that replay it: `python -m tests.server.record NAME PROGRAM`.

    python -m venv /somewhere && /somewhere/bin/pip install litellm
    python -m tests.server.record litellm /somewhere/bin/python
    npm install --prefix /somewhere openai
    NODE_PATH=/somewhere/node_modules python -m tests.server.record openai-node node

It starts a server with the model of the tests, runs a flow of `clients.py` (or `clients.cjs`) against it with a proxy
between, and writes method, path and body of every request to `transcripts/NAME.json`.
"""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from tests.server.live import started

HERE = Path(__file__).parent
TRANSCRIPTS = HERE / "transcripts"
NODE = "openai-node"


def command(name: str, program: str, url: str, folder: str) -> list[str]:
    """How to run the flow of a client."""
    if name == NODE:
        return [program, str(HERE / "clients.cjs"), url]
    return [program, str(HERE / "clients.py"), name, url, folder]


@contextmanager
def proxy(target: str, seen: list[dict[str, Any]]) -> Iterator[str]:
    """A server that hands requests on, and remembers them; its URL."""
    client = httpx.Client(base_url=target, timeout=120)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.pass_on(None)

        def do_POST(self) -> None:
            self.pass_on(self.rfile.read(int(self.headers["content-length"])))

        def pass_on(self, body: bytes | None) -> None:
            seen.append({"method": self.command, "path": self.path, "body": json.loads(body) if body else None})
            headers = {"content-type": "application/json"} if body else {}
            answer = client.request(self.command, self.path, content=body, headers=headers)
            self.send_response(answer.status_code)
            self.send_header("content-type", answer.headers.get("content-type", ""))
            self.send_header("content-length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        client.close()


def main(name: str, program: str) -> None:
    """Record one client."""
    seen: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        with started(Path(folder)) as live, proxy(live.url, seen) as url:
            done = subprocess.run(command(name, program, url, folder), stdout=subprocess.PIPE, text=True)
        requests = [each for number, each in enumerate(seen) if each not in seen[:number]]
        if done.returncode:
            print(*map(json.dumps, requests[-3:]), sep="\n")
            sys.exit(f"{name} failed after {len(seen)} requests; the last ones are above")
    version = done.stdout.strip().splitlines()[-1]
    lines = ",\n".join(json.dumps(each, ensure_ascii=False) for each in requests)
    TRANSCRIPTS.mkdir(exist_ok=True)
    (TRANSCRIPTS / f"{name}.json").write_text(f'{{"client": {json.dumps(version)}, "requests": [\n{lines}\n]}}\n')
    print(f"{version}: {len(requests)} requests")


if __name__ == "__main__":
    main(*sys.argv[1:])
