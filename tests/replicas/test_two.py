"""`outpace serve --replicas 2` with a real, tiny model: it answers as one does, survives what kills one, and drains."""

import asyncio
import contextlib
import json
import os
import re
import signal
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.patience import PATIENCE
from tests.server import test_openai_client as suite
from tests.server.live import NAMES, Live, family, started

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(os.name != "posix", reason="needs Unix sockets")]
LONG = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "temperature": 0}
STREAM = {**LONG, "stream": True}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The server, with both replicas ready."""
    with started(tmp_path_factory.mktemp("two") / "model", replicas=2, shutdown_timeout=PATIENCE) as made:
        asyncio.run(until(made, all_ready))
        yield made


async def until(two: Live, wanted: Any) -> dict[str, Any]:
    """Wait until /status is as wanted."""
    async with httpx.AsyncClient(base_url=two.url, timeout=PATIENCE) as client, asyncio.timeout(PATIENCE):
        while True:
            reply = await client.get("/status")
            if reply.status_code == 200 and wanted(status := reply.json()):
                return dict(status)
            await asyncio.sleep(0.01)


def all_ready(status: dict[str, Any]) -> bool:
    """Whether /status says that every replica is ready."""
    return all(each["ready"] for each in status["replicas"])


def processes(two: Live, what: str) -> list[int]:
    """Those of its processes that run a module, oldest first."""
    found = []
    for pid in family(two.server.process.pid):
        with contextlib.suppress(OSError):
            if what in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
    return sorted(found)


def replicas_of(two: Live) -> list[int]:
    """The processes of its replicas."""
    return [pid for pid in processes(two, "outpace.server.from_stdin") if pid != two.server.process.pid]


async def metrics(two: Live) -> dict[str, float]:
    """The numbers of /metrics that have no label or one of a replica."""
    async with httpx.AsyncClient(base_url=two.url, timeout=PATIENCE) as client:
        text = (await client.get("/metrics")).text
    assert len(re.findall(r"^# TYPE (\S+)", text, re.M)) == len(set(re.findall(r"^# TYPE (\S+)", text, re.M)))
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name.replace('{model_name="tiny"}', ""): float(value) for name, _, value in lines}


def test_the_openai_suite(two: Live) -> None:
    with two.openai() as client:
        bases = {route: suite.Asked(two, client, route).ask(suite.BASE) for route in suite.ROUTES}
        for route, cases in suite.ROUTES.items():
            for name in list(cases)[::3]:  # all: OUTPACE_TEST_REPLICAS=2 with tests/server
                suite.test_each_option_has_its_effect(two, client, bases, route, name)
        suite.test_several_prompts_with_several_answers(two, client)
        suite.test_models(client)
        suite.test_mii_stop(two)
        for name in suite.EMBEDDINGS:
            suite.test_embeddings(client, name)
        for body, wanted in suite.TOKENIZE:
            suite.test_tokenize_and_back(two, body, wanted)
        _others(two, client)
    asyncio.run(suite.test_the_client_for_asyncio(two, bases))
    numbers = asyncio.run(metrics(two))
    counts = [numbers[f'outpace:replica_requests_total{{replica="{index}"}}'] for index in range(2)]
    assert min(counts) > 0.2 * max(counts)
    assert numbers["outpace:generation_tokens_total"] > 100
    assert numbers["outpace:replicas_ready"] == 2


def _others(two: Live, client: OpenAI) -> None:
    """Pages, probes and errors."""
    with two.http() as http:
        assert "<html" in http.get("/").text
        assert http.get("/docs").status_code == http.get("/openapi.json").status_code == 200
        assert http.head("/health/ready").status_code == 200
        assert http.get("/version").json()["version"]
        assert http.get("/nothing").status_code == 404
        named = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"x-request-id": "mine"})
        assert named.headers["x-request-id"] == "mine"
        wrong = http.post("/v1/completions", json={"prompt": "a", "temperature": "hot"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "temperature")
    assert client.models.list().data[0].id == NAMES[0]


def test_the_router_has_no_torch_and_opens_one_port(two: Live) -> None:
    pid = two.server.process.pid
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "tokenizers" not in maps, "nor transformers"
    inodes = set()
    for each in family(pid):
        links = [str(link.readlink()) for link in Path(f"/proc/{each}/fd").iterdir()]
        inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    assert [row[1] for row in rows if row[9] in inodes and row[3] == "0A"] == [f"0100007F:{two.port:04X}"]
    names = [
        line.split()[7] for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:] if "outpace-" in line
    ]
    for folder in {Path(name).parent for name in names}:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@contextlib.asynccontextmanager
async def stream_of(client: httpx.AsyncClient) -> AsyncIterator[AsyncIterator[bytes]]:
    """A stream whose first event has come."""
    async with client.stream("POST", "/v1/completions", json=STREAM) as reply:
        assert reply.status_code == 200
        events = reply.aiter_bytes()
        assert (await anext(events)).startswith(b"data: ")
        yield events


async def test_a_client_that_leaves_is_forgotten_by_router_and_replica(two: Live) -> None:
    async with httpx.AsyncClient(base_url=two.url, timeout=PATIENCE) as client:
        async with stream_of(client):
            await until(two, lambda status: status["running"] == 1)
        await until(two, lambda status: not status["running"] and not status["in_flight"])


@pytest.mark.parametrize("victim", ["engine", "replica"])
async def test_kill_9_under_load_loses_no_request_and_streams_end_with_an_error(two: Live, victim: str) -> None:
    await until(two, all_ready)
    before = await metrics(two)
    is_replica = victim == "replica"
    (pid, _) = replicas_of(two) if is_replica else processes(two, "outpace.server.engine_process")
    async with httpx.AsyncClient(base_url=two.url, timeout=PATIENCE) as client, contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(stream_of(client)) for _ in range(2)]
        plain = [asyncio.create_task(client.post("/v1/completions", json=LONG)) for _ in range(6)]
        await until(two, lambda status: all(each["in_flight"] > 2 for each in status["replicas"]))
        os.kill(pid, signal.SIGKILL)
        replies = await asyncio.gather(*plain)
        assert [reply.status_code for reply in replies] == [200] * 6
        assert len({reply.json()["choices"][0]["text"] for reply in replies}) == 1
        ends = [b"".join([piece async for piece in stream]) for stream in streams]
    assert all(end.endswith(b"data: [DONE]\n\n") for end in ends)
    errors = [end for end in ends if b'"error"' in end]
    (broken,) = errors
    event = json.loads(broken.split(b"\n\n")[-3].removeprefix(b"data: "))
    assert event["error"]["code"] == "engine_failed"
    await until(two, all_ready)
    after = await metrics(two)
    assert _total(after, "outpace:retried_requests_total") >= _total(before, "outpace:retried_requests_total") + 2
    name = "outpace:replica_restarts_total" if is_replica else "outpace:engine_restarts_total"
    assert _total(after, name) == _total(before, name) + 1
    assert after["outpace:generation_tokens_total"] >= before["outpace:generation_tokens_total"], "totals never fall"


def _total(numbers: dict[str, float], name: str) -> float:
    return sum(value for key, value in numbers.items() if key.startswith(name))


async def test_a_signal_drains_under_load_without_a_failed_request(two: Live) -> None:
    """The last test: the server ends."""
    async with httpx.AsyncClient(base_url=two.url, timeout=PATIENCE) as client, contextlib.AsyncExitStack() as stack:
        stream = await stack.enter_async_context(stream_of(client))
        plain = [asyncio.create_task(client.post("/v1/completions", json=LONG)) for _ in range(6)]
        await until(two, lambda status: sum(each["in_flight"] for each in status["replicas"]) == 7)
        two.server.process.send_signal(signal.SIGTERM)
        while (await client.get("/health/ready")).status_code != 503:
            pass
        refused = await client.post("/v1/completions", json=LONG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        assert "retry-after" in refused.headers
        assert [reply.status_code for reply in await asyncio.gather(*plain)] == [200] * 6
        events = b"".join([piece async for piece in stream])
        assert b'"finish_reason":"length"' in events
        assert events.endswith(b"data: [DONE]\n\n")
    assert await asyncio.to_thread(two.server.process.wait, PATIENCE) == 0
