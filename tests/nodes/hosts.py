"""Machines for tests: processes on this one, joined by a proxy that delays, or in network namespaces of their own."""

import contextlib
import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx

from tests.nodes.proxy import Proxy
from tests.patience import PATIENCE

CLONE_NEWNET = 0x40000000
OPTIONS = ("--device", "cpu", "--pp", "2", "--nnodes", "2")
"""Of every node."""


class Process:
    """A program, and the lines that it has written."""

    def __init__(self, command: Sequence[str]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "1000"}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
            errors="replace",
        )
        self.lines: list[str] = []
        self._changed, self._ended = threading.Condition(), False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(PATIENCE)
        assert self.process.stdin is not None, "it is a pipe"
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        if error[0] is not None:
            sys.stderr.write(f"{self.text}\n---\n")

    @property
    def text(self) -> str:
        """All that it has written."""
        return "".join(self.lines)

    def wait_for(self, text: str, after: int = 0) -> str:
        """The first line with this text, of those that come after the first `after`."""

        def found() -> str | None:
            return next((line for line in self.lines[after:] if text in line), None)

        with self._changed:
            self._changed.wait_for(lambda: found() is not None or self._ended, PATIENCE)
        line = found()
        assert line is not None, f"{text!r} is not in:\n{self.text}"
        return line

    def say(self, text: str) -> None:
        """Write to it."""
        assert self.process.stdin is not None, "it is a pipe"
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def pause(self) -> None:
        """A moment, or until it writes something."""
        with self._changed:
            self._changed.wait(0.2)

    def code(self) -> int:
        """Its exit code."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended, PATIENCE)
        return self.process.wait(PATIENCE)

    def _read(self) -> None:
        assert self.process.stdout is not None, "it is a pipe"
        with self.process.stdout as lines:
            for line in lines:
                with self._changed:
                    self.lines.append(line)
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def serve(*arguments: object, prefix: Sequence[str] = ()) -> Process:
    """`outpace serve`."""
    return Process([*prefix, sys.executable, "-m", "outpace", "-v", "serve", *map(str, arguments)])


def free_ports(count: int = 2) -> int:
    """The first of several ports in a row that are free."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for port in range(first + 1, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return int(first)


@dataclass
class Cluster:
    """Two nodes and the link between them."""

    folder: Path
    master: str
    """Address of node 0 as it knows itself."""
    port: int
    seen: tuple[str, int]
    """Address and port of node 0 as node 1 sees it."""
    cut: Callable[[], None]
    mend: Callable[[], None]
    prefix: tuple[str, ...] = ()
    """Of commands of node 1."""
    options: tuple[object, ...] = ("--join-timeout", PATIENCE, "--link-timeout", 8)
    http_port: int = field(default_factory=lambda: free_ports(1))

    def node_0(self) -> Process:
        """The first node, with HTTP."""
        place = "--master-addr", self.master, "--master-port", self.port
        http = "--port", self.http_port, "--template-processes", 1, "--no-access-log"
        return serve(self.folder, *OPTIONS, *place, *self.options, *http)

    def node_1(self, *options: object) -> Process:
        """The other one."""
        place = "--master-addr", self.seen[0], "--master-port", self.seen[1], "--node-rank", 1
        return serve(self.folder, *OPTIONS, *place, *self.options, *options, prefix=self.prefix)

    @contextlib.contextmanager
    def client(self) -> Iterator[httpx.Client]:
        """To ask node 0."""
        with httpx.Client(base_url=f"http://127.0.0.1:{self.http_port}", timeout=PATIENCE) as http:
            yield http

    def wait_ready(self, http: httpx.Client, node_0: Process) -> None:
        """Until requests can be answered."""
        while not self._is_ready(http):
            node_0.pause()
            assert node_0.process.poll() is None, node_0.text

    def _is_ready(self, http: httpx.Client) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return http.get("/health/ready").status_code == 200
        return False


def answer(http: httpx.Client) -> str:
    """What the model says."""
    body = {"prompt": "hello", "max_tokens": 8, "temperature": 0}
    return str(http.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["text"])


def lose(http: httpx.Client, happens: Callable[[], None]) -> dict[str, Any]:
    """The error that a client gets who is being answered when something happens."""
    endless = {"prompt": "hello", "max_tokens": 1000, "stream": True, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json=endless) as response:
        events = response.iter_lines()
        assert next(events).startswith("data: ")
        happens()
        text = next(event for event in events if '"error"' in event)
    return dict(json.loads(text.removeprefix("data: "))["error"])


@contextlib.contextmanager
def over_a_proxy(folder: Path) -> Iterator[Cluster]:
    """Two nodes on this machine; all that node 1 says to node 0 goes through a proxy, gloo's tensors alone do not."""
    port, seen = free_ports(), free_ports()
    with Proxy(seen, port) as proxy:
        yield Cluster(folder, "127.0.0.1", port, ("127.0.0.1", seen), proxy.cut, proxy.mend)


def why_no_namespaces() -> str | None:
    """Why this machine cannot have network namespaces; None: it can."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "needs Linux and the command ip"
    name = f"outpace-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces are not permitted here: {made.stderr.strip()}"
    tried = _ip(
        "-n", name, "link", "add", f"{name[-5:]}0", "type", "veth", "peer", "name", f"{name[-5:]}1", check=False
    )
    _ip("netns", "del", name)
    return None if tried.returncode == 0 else "veth pairs are not permitted here"


@contextlib.contextmanager
def in_namespaces(folder: Path) -> Iterator[Cluster]:
    """Two nodes in namespaces that a veth pair joins. For a thread that is in the first one: see `inside`."""
    first, second = names()
    link = ["ip", "-n", first, "link", "set", "veth0"]
    yield Cluster(
        folder,
        "10.77.0.1",
        29500,
        ("10.77.0.1", 29500),
        lambda: _run([*link, "down"]),
        lambda: _run([*link, "up"]),
        ("ip", "netns", "exec", second),
    )


def names() -> tuple[str, str]:
    """Of the namespaces of this process."""
    return f"outpace-{os.getpid()}-a", f"outpace-{os.getpid()}-b"


def inside(act: Callable[[], None]) -> None:
    """Do something in the first of two new namespaces."""
    first, second = names()
    problems: list[BaseException] = []

    def run() -> None:
        try:
            with Path(f"/var/run/netns/{first}").open() as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            act()
        except BaseException as error:
            problems.append(error)

    try:
        for name in (first, second):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", first, "link", "add", "veth0", "type", "veth", "peer", "name", "veth1", "netns", second)
        for number, name in enumerate((first, second)):
            _ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", f"veth{number}")
            _ip("-n", name, "link", "set", f"veth{number}", "up")
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        for name in (first, second):
            _ip("netns", "del", name, check=False)
    if problems:
        raise problems[0]


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True)


def _ip(*arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)


REASON = why_no_namespaces()
