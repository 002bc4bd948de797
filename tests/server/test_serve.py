"""`run.run` as a process: it greets, answers, drains on a signal, and says with its exit code how it ended."""

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from transformers import PreTrainedTokenizerFast

import outpace
from outpace.server.connection import limited, network_of
from outpace.server.exit_codes import CUT_OFF, FINISHED, NOT_STARTED, WRONG_OPTION
from outpace.server.http_server import DRAIN_TICK, drained
from outpace.server.launch import launch
from outpace.server.options import ServerConfig
from tests.models import tiny
from tests.patience import PATIENCE

SERVE = """
import json, sys
from outpace.server.options import ServerConfig
from outpace.server.launch import launch
sys.exit(launch(sys.argv[1], {"device": "cpu"}, ServerConfig(port=0, **json.loads(sys.argv[2]))))
"""
pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> str:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=20_000).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@contextmanager
def served(folder: str, **options: Any) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server's process and its port."""
    command = [sys.executable, "-c", SERVE, folder, json.dumps(options)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # more gain nothing, and spin on a busy machine
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
        try:
            assert process.stderr is not None
            lines: list[str] = []
            while not (lines and lines[-1].startswith("curl ")):
                lines.append(process.stderr.readline())
                assert lines[-1], "".join(lines)
            assert "is ready (start" in lines[-3]
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield process, int(lines[-2].rpartition(":")[2])
        finally:
            process.kill()


def begin(port: int, max_tokens: int) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """A stream whose first event has come."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    body = {"model": "tiny", "prompt": "hello", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200
    assert response.readline().startswith(b"data: ")
    return connection, response


def status_of(port: int, path: str, body: object = None) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        data = None if body is None else json.dumps(body)
        connection.request("GET" if data is None else "POST", path, data, {"content-type": "application/json"})
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.slow
def test_f7_a_signal_drains_new_requests_get_503_and_running_ones_finish(folder: str) -> None:
    with served(folder, shutdown_timeout=PATIENCE) as (process, port):
        assert status_of(port, "/health/ready") == 200
        connection, response = begin(port, 1000)
        process.send_signal(signal.SIGTERM)
        while status_of(port, "/health/ready") != 503:
            pass
        assert status_of(port, "/v1/completions", {"model": "tiny", "prompt": "x"}) == 503
        events = response.read()
        assert b'"finish_reason":"length"' in events.replace(b": ", b":")
        assert events.rstrip().endswith(b"data: [DONE]")
        connection.close()
        assert process.wait(PATIENCE) == FINISHED


@pytest.mark.slow
@pytest.mark.parametrize("timeout", [0.0, 60.0])
def test_f7b_what_runs_too_long_or_past_a_second_signal_is_cut_off_with_an_error(folder: str, timeout: float) -> None:
    with served(folder, shutdown_timeout=timeout) as (process, port):
        connection, response = begin(port, 15_000)
        process.send_signal(signal.SIGTERM)
        if timeout:
            while status_of(port, "/health/ready") != 503:
                pass
            process.send_signal(signal.SIGTERM)
        assert b'"error"' in response.read()
        connection.close()
        assert process.wait(PATIENCE) == CUT_OFF


def test_f11_what_cannot_be_served_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert launch(None, {}, ServerConfig(port=port)) == NOT_STARTED
    assert launch(None, {"no_such_option": 1}, ServerConfig(port=0)) == WRONG_OPTION
    assert launch(None, {}, ServerConfig(port=0, chat_template="a\n{% bad")) == WRONG_OPTION
    assert launch(None, {"policy": "longest_first"}, ServerConfig(port=0)) == WRONG_OPTION
    assert launch(None, {}, ServerConfig(port=0, api_key_file=str(tmp_path / "none"))) == WRONG_OPTION
    (tmp_path / "cert.pem").write_text("no certificate")
    cert = str(tmp_path / "cert.pem")
    assert launch(None, {}, ServerConfig(port=0, ssl_certfile=cert, ssl_keyfile=cert)) == WRONG_OPTION
    first, second, template, policy, third, fourth = capsys.readouterr().err.strip().splitlines()
    assert first.startswith(f"error: port: cannot listen on 127.0.0.1 port {port}")
    assert "no_such_option" in second
    assert template.startswith("error: chat_template: not valid Jinja (line 2: ")
    assert template.endswith("--chat-template")
    assert "scheduler.policy='longest_first': it is for offline work" in policy
    assert "api_key_file" in third
    assert "ssl_certfile" in fourth


async def test_f7_a_drain_waits_for_answers_that_are_not_read() -> None:
    """The engine may have ended them long ago."""

    class Ended:
        in_flight = 0

    engine: Any = Ended()
    running: Counter[int | None] = Counter({None: 1})
    waiting = asyncio.create_task(drained(engine, running))
    await asyncio.sleep(3 * DRAIN_TICK)
    assert not waiting.done()
    running[None] -= 1
    await asyncio.wait_for(waiting, PATIENCE)


async def test_a_connection_too_many_is_closed() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(app, http=limited(60, 10**6, 2, 2), lifespan="off", log_config=None)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        streams = [await asyncio.open_connection(*sock.getsockname()) for _ in range(3)]
        for index, (reader, writer) in enumerate(streams):
            with contextlib.suppress(ConnectionError):
                writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                assert (await reader.read(12) == b"HTTP/1.1 204") == (index < 2)
        for _, writer in streams:
            writer.close()
        server.should_exit = True
        await asyncio.wait_for(serving, PATIENCE)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
async def test_item_10_one_address_cannot_hold_all_connections() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def answered(address: str) -> tuple[bool, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*sock.getsockname(), local_addr=(address, 0))
        with contextlib.suppress(ConnectionError):
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            return await reader.read(12) == b"HTTP/1.1 204", writer
        return False, writer

    config = uvicorn.Config(app, http=limited(60, 10**6, 10, 2), lifespan="off", log_config=None)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        found = [await answered(address) for address in ["127.0.0.2"] * 4 + ["127.0.0.3"]]
        assert [good for good, _ in found] == [True, True, False, False, True]
        found[0][1].close()  # one that ends makes room for one
        while not (again := await answered("127.0.0.2"))[0]:
            again[1].close()
        for _, writer in (*found, again):
            writer.close()
        server.should_exit = True
        await asyncio.wait_for(serving, PATIENCE)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("192.0.2.1", "::ffff:192.0.2.1", True),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("", "::1", False),
    ],
)
def test_item_10_an_ipv6_network_counts_as_one_address(one: str, other: str, same: bool) -> None:
    assert (network_of(one) == network_of(other)) == same


@pytest.mark.parametrize(
    ("options", "limit"), [({}, 2048), ({"max_connections": 1}, 1), ({"max_connections_per_address": 5}, 5)]
)
def test_item_10_half_of_the_connections_unless_told(options: dict[str, Any], limit: int) -> None:
    assert ServerConfig(**options).connections_per_address == limit


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "::"}, True),
        ({"host": "192.0.2.1"}, True),
        ({"host": "0.0.0.0", "api_keys": "k"}, False),
        ({"host": "127.0.0.1"}, False),
        ({"host": "localhost"}, False),
    ],
)
def test_item_19_a_server_without_a_key_that_others_can_reach_warns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: dict[str, Any], warns: bool
) -> None:
    monkeypatch.delenv("OUTPACE_API_KEYS", raising=False)

    async def serve(*arguments: object) -> int:
        return FINISHED

    monkeypatch.setattr("outpace.server.lifetime.serve_http", serve)
    monkeypatch.setattr("outpace.server.launch.bound", lambda config: contextlib.nullcontext())
    assert launch(None, {}, ServerConfig(port=0, **options)) == FINISHED
    assert ("WARNING" in capsys.readouterr().err) == warns


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_tls_and_a_path_of_a_proxy(folder: str, tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    command = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, *names)
    subprocess.run(command, check=True, capture_output=True)
    with outpace.serve(
        folder, device="cpu", ssl_certfile=certificate, ssl_keyfile=key, root_path="/llm", max_model_len=512
    ) as server:
        assert server.url.startswith("https://")
        (response,) = server.generate(["hello"], max_new_tokens=4, do_sample=False, ignore_eos=True)
        assert response.generated_length == 4
        for path in ("/health", "/llm/health", "/v1/models", "/llm/v1/models"):  # item 24
            assert (
                httpx.get(server.url + path, verify=ssl.create_default_context(cafile=certificate)).status_code == 200
            )
        assert server.process.poll() is None
    assert server.process.returncode == FINISHED
