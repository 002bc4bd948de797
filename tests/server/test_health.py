"""What the health routes say: while the model loads, when the engine is gone, and when it does not answer."""

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import msgspec
import pytest
from starlette.responses import PlainTextResponse
from transformers import PreTrainedTokenizerFast

from outpace.errors import EngineDead, EngineUnavailable
from outpace.server import client as client_module
from outpace.server import supervisor as supervisor_module
from outpace.server.client import EngineClient
from outpace.server.engine import Delta, EngineRequest, EngineStatus, ModelCard, StepRecord
from outpace.server.exit_codes import FINISHED, INTERRUPTED, NOT_STARTED
from outpace.server.messages import Add, Cancel, Failure, Frames, News, Ping, Ready, Start, frame
from outpace.server.placeholder import Placeholder
from outpace.server.routes.health import step_limit_ms
from outpace.server.supervisor import Healing, Supervisor
from outpace.types import FinishReason, SamplingParams
from tests.models import tiny
from tests.patience import PATIENCE
from tests.server.conftest import Serve

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parent.parent.parent
WORKER = """
import os, pathlib, socket, sys, time
from outpace.server.engine import EngineStatus, ModelCard
from outpace.server.messages import News, NotStarted, Ready, Starting, frame
sock, folder = socket.socket(fileno=int(sys.argv[1])), pathlib.Path(sys.argv[2])
sock.recv(1 << 16)
sock.sendall(frame(Starting("loading the weights")))
while not (folder / "go").exists():
    if (folder / "fail").exists():
        sock.sendall(frame(NotStarted("model", "model: there is none")))
        sys.exit(1)
    time.sleep(0.01)
card = ModelCard("tiny", 64, 258, (), "float32", "cpu", 0)
sock.sendall(frame(Ready(card, EngineStatus(startup_seconds={"load": 0.5}, num_blocks=16), 8)))
while sock.recv(1 << 16):
    if not (folder / "deaf").exists():
        sock.sendall(frame(News(pong=True)))
"""
"""A worker without a model. Files in its folder: `go` ends the start well, `fail` badly; `deaf`: no pings answered."""
SERVE = """
import asyncio, sys
from outpace.server import supervisor
from outpace.server.options import ServerConfig
from outpace.server.launch import launch
async def process(sock):
    command = (sys.executable, "-c", sys.argv[3], str(sock.fileno()), sys.argv[2])
    return await asyncio.create_subprocess_exec(*command, pass_fds=(sock.fileno(),))
supervisor._process = process
sys.exit(launch(sys.argv[2], {}, ServerConfig(port=int(sys.argv[1]))))
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def ask(port: int, path: str, body: object = None) -> tuple[int, dict[str, Any], str | None]:
    """Status, body and Retry-After."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        data = None if body is None else json.dumps(body)
        connection.request("GET" if data is None else "POST", path, data, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read()), response.headers["retry-after"]
    finally:
        connection.close()


@contextmanager
def starting(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server whose port is open and whose model is not loaded."""
    tiny("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    port = free_port()
    command = [sys.executable, "-c", SERVE, str(port), str(folder), WORKER]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            while True:
                try:
                    status, *_ = ask(port, "/health/live")
                    break
                except ConnectionRefusedError:
                    assert process.poll() is None
                    time.sleep(0.02)
            assert status == 200
            yield process, port
        finally:
            process.kill()


@pytest.mark.slow
def test_the_port_is_open_while_the_model_loads(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    with starting(tmp_path, tokenizer) as (process, port):
        while "loading the weights" not in ask(port, "/health/ready")[1]["error"]["message"]:
            pass
        for path, body in (("/health", None), ("/v1/models", None), ("/v1/completions", {"prompt": "a"})):
            status, answer, retry = ask(port, path, body)
            assert (status, retry, answer["error"]["code"]) == (503, "1", "starting")
            assert "The server is starting: " in answer["error"]["message"]
        (tmp_path / "go").touch()
        while ask(port, "/health/ready")[0] != 200:
            pass
        assert ask(port, "/v1/models")[1]["data"][0]["id"] == "tiny"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == FINISHED
        assert process.stderr is not None
        assert re.search(
            r"tiny is ready \(start [\d.]+ s, .*load 0.50 s, http [\d.]+ s, all [\d.]+ s\)", process.stderr.read()
        )


@pytest.mark.slow
def test_f11_a_model_that_cannot_be_loaded_ends_the_server(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    with starting(tmp_path, tokenizer) as (process, _):
        (tmp_path / "fail").touch()
        assert process.wait(PATIENCE) == NOT_STARTED
        assert process.stderr is not None
        assert process.stderr.read().splitlines() == ["error: model: there is none"]


@pytest.mark.slow
def test_a_signal_while_the_model_loads_ends_the_server(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    with starting(tmp_path, tokenizer) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == INTERRUPTED


async def test_the_front_hands_everything_on_once_there_is_a_server() -> None:
    front = Placeholder(lambda: "reading", 7)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(front), base_url="http://server") as client:
        assert (await client.get("/health/live")).json() == {"status": "ok"}
        early = await client.get("/version")
        assert (early.status_code, early.headers["retry-after"]) == (503, "7")
        assert "reading" in early.json()["error"]["message"]
        front.app = PlainTextResponse("the server")
        assert (await client.get("/health/live")).text == "the server"


@pytest.mark.parametrize("why", ["the engine is being restarted", "the server is shutting down"])
async def test_ready_says_why_it_is_not(serve: Serve, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    server = serve()
    monkeypatch.setattr(server.engine, "status", lambda: EngineStatus(why=why))
    answer = await server.get("/health/ready")
    assert answer.status_code == 503
    assert why in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/healthz"])
async def test_item_19_probes_may_ask_with_head(serve: Serve, path: str) -> None:
    server = serve()
    async with server.http() as client:
        assert (await client.head(path)).status_code == 200
        server.engine.ready = False
        assert (await client.head(path)).status_code == (200 if path == "/health/live" else 503)


# An engine process with nothing to do


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of workers that get ready at once."""

    async def process(sock: socket.socket) -> asyncio.subprocess.Process:
        command = (sys.executable, "-c", WORKER, str(sock.fileno()), str(tmp_path))
        return await asyncio.create_subprocess_exec(*command, pass_fds=(sock.fileno(),), cwd=ROOT)

    monkeypatch.setattr(supervisor_module, "_process", process)
    (tmp_path / "go").touch()
    return tmp_path


class Clock:
    """The clock of the supervisor, which a test can move on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        for module in (supervisor_module, client_module):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + self.ahead))


async def test_f6_an_idle_engine_that_does_not_answer_is_replaced(
    worker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, limit = Clock(monkeypatch), PATIENCE
    engine = Supervisor(None, healing=Healing(stall_timeout=limit, ready_timeout=limit, first_delay=0.05))
    await engine.start()
    try:
        pid = engine.pid
        assert pid is not None
        for _ in range(3):  # together longer than the limit: it answers
            clock.ahead += 0.6 * limit
            heard = engine._client().heard_at
            async with asyncio.timeout(PATIENCE):
                while engine._client().heard_at == heard:
                    await asyncio.sleep(0.01)
        assert (engine.status().ready, engine.pid) == (True, pid)
        os.kill(pid, signal.SIGSTOP)
        clock.ahead += 2 * limit
        async with asyncio.timeout(PATIENCE):
            while "restarted" not in engine.status().why:
                await asyncio.sleep(0.01)
            assert not engine.status().ready
            while not engine.status().ready:
                await asyncio.sleep(0.01)
        assert engine.pid != pid
        assert engine.status().restarts == 1
        engine.drain()
        assert "shutting down" in engine.status().why
    finally:
        await engine.close()


async def test_item_12_an_idle_engine_that_was_stopped_is_not_ready_until_it_goes_on(worker: Path) -> None:
    engine = Supervisor(None, healing=Healing(ready_timeout=0.2))
    await engine.start()
    try:
        pid = engine.pid
        assert pid is not None
        for number, ready in ((signal.SIGSTOP, False), (signal.SIGCONT, True)):
            os.kill(pid, number)
            while engine.status().ready is not ready:
                await asyncio.sleep(0.01)
            assert engine.status().why == ("" if ready else "the engine shows no sign of life")
        assert (engine.pid, engine.status().restarts) == (pid, 0)
    finally:
        await engine.close()


async def test_restarting_and_draining_are_told_apart(worker: Path) -> None:
    engine = Supervisor(None, healing=Healing(first_delay=60))
    await engine.start()
    try:
        os.kill(engine.pid or 0, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE):
            while engine.status().ready:
                await asyncio.sleep(0.01)
        assert engine.status().why == "the engine is being restarted"
        engine.drain()
        assert engine.status().why == "the server is shutting down"
    finally:
        await engine.close()


# An answer that is not needed any more


class Told:
    """The other end of a client's socket, where the test is the worker."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket, self._reader, self._sent = sock, Frames(), list[Any]()

    async def read(self, kind: Any) -> Any:
        """The next message of this kind."""
        loop = asyncio.get_running_loop()
        while True:
            for body in self._reader.feed(await loop.sock_recv(self._socket, 1 << 16)):
                self._sent.append(msgspec.msgpack.decode(body, type=Start | Add | Cancel | Ping))
            if self._sent and isinstance(self._sent[-1], kind):
                return self._sent[-1]

    async def say(self, message: Any) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, frame(message))


@asynccontextmanager
async def told() -> AsyncIterator[tuple[EngineClient, Told]]:
    """A client that is open, and its worker."""
    ours, theirs = socket.socketpair()
    client, worker = EngineClient(), Told(theirs)
    opening = asyncio.create_task(client.open(ours, Start(None, {}, 30), since=time.monotonic()))
    await worker.read(Start)
    await worker.say(Ready(ModelCard("fake", 64, 97, (), "float32", "cpu", 0), EngineStatus(num_blocks=16), 8))
    await opening
    yield client, worker
    client.lose("the test ends")
    theirs.close()


async def test_nobody_finds_an_engine_ready_whose_last_error_came() -> None:
    async with told() as (client, worker):
        asked = EngineRequest(request_id="r", prompt_token_ids=[5], params=SamplingParams())
        first = asyncio.create_task(anext(client.generate(asked)))
        number = (await worker.read(Add)).number
        await worker.say(News(failures=[Failure(number, "dead", "the step failed")], last=True))
        with pytest.raises(EngineDead, match="the step failed"):
            await first
        assert not client.status().ready
        with pytest.raises(EngineUnavailable, match="not running"):
            await anext(client.generate(asked))


async def test_an_unwanted_answer_is_cancelled_alone() -> None:
    async with told() as (client, worker):
        read, say = worker.read, worker.say
        asked = EngineRequest(request_id="r", prompt_token_ids=[5], params=SamplingParams(n=2))
        deltas = client.generate(asked)
        first = asyncio.create_task(anext(deltas))
        number = (await read(Add)).number
        await say(News([Delta(0, [7], times=(0.5, 0.25), number=number), Delta(1, [8], number=number)]))
        assert (await first).times == (0.5, 0.25)
        asked.unwanted.add(0)
        assert (await anext(deltas)).index == 1
        assert await read(Cancel) == Cancel(number, 0)
        rest = asyncio.create_task(anext(deltas))
        await say(News([Delta(0, [], finish_reason=FinishReason.STOP, number=number), Delta(1, [9], number=number)]))
        assert (await rest).token_ids == [9]
        end = asyncio.create_task(anext(deltas, None))
        await say(News([Delta(1, [3], finish_reason=FinishReason.LENGTH, number=number)]))
        last = await end
        assert last is not None
        assert last.finish_reason is FinishReason.LENGTH
        assert await anext(deltas, None) is None
        assert client.in_flight == 0


# The limit of a step


def test_the_limit_of_a_step() -> None:
    steps = [StepRecord(1, 64, 0, 90.0), StepRecord(2, 0, 8, 4.0), StepRecord(3, 16, 8, 9.0), StepRecord(4, 0, 8, 6.0)]
    assert step_limit_ms(EngineStatus()) is None
    assert step_limit_ms(EngineStatus(last_steps=steps[:1])) is None
    assert step_limit_ms(EngineStatus(last_steps=steps)) == 12.5
    assert step_limit_ms(EngineStatus(last_steps=steps, step_limit_ms=50.0)) == 50.0
