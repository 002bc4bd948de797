"""Package indexes for tests: of files, and over HTTP."""

import base64
import hashlib
import http.server
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest


def tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what pip, uv and proxies are told on this machine."""
    import os

    for name in os.environ:
        if name.startswith(("PIP_", "UV_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("UV_CONFIG_FILE", os.devnull)


def folder_index(root: Path, project: str, file: Path) -> Path:
    """An index of one file, as folders."""
    (root / project).mkdir(parents=True)
    (root / project / "index.html").write_text(f'<a href="{file.as_uri()}">{file.name}</a>')
    return root


@dataclass
class HttpIndex:
    """Pages by their paths, and the paths that were asked for."""

    pages: Mapping[str, bytes]
    password: str | None = None
    asked: list[str] = field(default_factory=list)
    url: str = ""

    @contextmanager
    def running(self) -> Iterator["HttpIndex"]:
        """Serve in a thread."""
        index = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                index.asked.append(self.path)
                wanted = index.password and f"Basic {base64.b64encode(f'me:{index.password}'.encode()).decode()}"
                page = index.pages.get(self.path)
                if index.password and self.headers.get("authorization") != wanted:
                    self.send_response(401)
                    page = b""
                else:
                    self.send_response(404 if page is None else 200)
                self.send_header("content-length", str(len(page or b"")))
                self.end_headers()
                self.wfile.write(page or b"")

            def log_message(self, *_: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def sha256(data: bytes) -> str:
    """The digest that indexes name."""
    return hashlib.sha256(data).hexdigest()
