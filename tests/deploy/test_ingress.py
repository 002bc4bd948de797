"""The ingress over replicas that die, fail, break off or hang: what a client gets."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.types import Message

from outpace.deploy import ingress
from outpace.deploy.ingress import ATTEMPTS, ReplicaLost, make_ingress
from outpace.server.options import ServerConfig
from tests.server.asgi import Call

pytestmark = pytest.mark.anyio
SSE = "text/event-stream; charset=utf-8"
PATH = "/v1/completions"
Script = Callable[[], AsyncGenerator[list[Message], None]]


def start(name: str, status: int = 200, kind: str = "application/json") -> Message:
    headers = [(b"content-type", kind.encode()), (b"x-request-id", b"theirs"), (b"x-content-type-options", b"nosniff")]
    return {"type": "http.response.start", "status": status, "headers": headers, "replica": name}


def piece(data: bytes, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def plain(name: str, status: int = 200, body: object = "fine") -> Script:
    async def answer() -> AsyncGenerator[list[Message], None]:
        yield [start(name, status), piece(json.dumps(body).encode())]

    return answer


def failing(name: str, code: str) -> Script:
    return plain(name, 503, {"error": {"message": "m", "type": "t", "param": None, "code": code}})


def dies(*before: list[Message]) -> Script:
    async def answer() -> AsyncGenerator[list[Message], None]:
        for messages in before:
            yield messages
        raise ReplicaLost("its process ended")

    return answer


def breaks_off(*before: list[Message]) -> Script:
    async def answer() -> AsyncGenerator[list[Message], None]:
        for messages in before:
            yield messages

    return answer


@dataclass
class Scripted:
    """Replicas that do what the script says, one entry for each attempt."""

    script: list[Script]
    asked: list[tuple[Mapping[str, Any], bytes, list[str]]] = field(default_factory=list)
    closed: int = 0

    async def ask(
        self, head: Mapping[str, Any], body: bytes, avoid: Sequence[str]
    ) -> AsyncGenerator[list[Message], None]:
        """The next of the script."""
        self.asked.append((head, body, list(avoid)))
        try:
            async for messages in self.script[len(self.asked) - 1]():
                yield messages
        finally:
            self.closed += 1

    async def ask_all(self, head: Mapping[str, Any]) -> list[list[Message]]:
        """All of the script."""
        self.asked.append((head, b"", []))
        return [[message async for messages in each() for message in messages] for each in self.script]


def call_of(replicas: Scripted, headers: Mapping[str, str] | None = None, **options: Any) -> Call:
    app: Any = make_ingress(replicas, ServerConfig(allowed_hosts=("*",), access_log=False, **options))
    return Call(app, PATH, {"prompt": "hi"}, headers=dict(headers or {}))


async def answered(replicas: Scripted, headers: Mapping[str, str] | None = None, **options: Any) -> Call:
    call = call_of(replicas, headers, **options)
    await call.run()
    return call


async def until_sent(call: Call, count: int) -> None:
    while len(call.sent) < count:
        call.changed.clear()
        await call.changed.wait()


def text_of(call: Call) -> str:
    return b"".join(message.get("body", b"") for message in call.sent[1:]).decode()


async def test_an_answer_is_passed_on_with_the_name_of_its_replica() -> None:
    replicas = Scripted([plain("r1", 201)])
    call = await answered(replicas)
    assert (call.sent[0]["status"], text_of(call)) == (201, '"fine"')
    headers = call.sent[0]["headers"]
    assert dict(headers)[b"x-outpace-replica"] == b"r1"
    assert [name for name, _ in headers].count(b"x-content-type-options") == 1
    assert b"x-request-id" not in dict(headers), "Ray's proxy adds it"
    ((head, body, avoid),) = replicas.asked
    assert (head["path"], json.loads(body), avoid) == (PATH, {"prompt": "hi"}, [])


async def test_the_replica_gets_the_id_that_the_ingress_logs() -> None:
    replicas = Scripted([plain("r1")])
    await answered(replicas, {"x-request-id": "mine"})
    assert (b"x-request-id", b"mine") in replicas.asked[0][0]["headers"]


@pytest.mark.parametrize(
    "first",
    [
        dies(),
        dies([start("r1")]),
        dies([start("r1"), piece(b'"fi', more=True)]),
        breaks_off(),
        breaks_off([start("r1"), piece(b'"fi', more=True)]),
        failing("r1", "engine_failed"),
        failing("r1", "engine_unavailable"),
    ],
)
async def test_a_plain_request_is_asked_again(first: Script) -> None:
    replicas = Scripted([first, plain("r2")])
    call = await answered(replicas)
    assert (call.sent[0]["status"], text_of(call)) == (200, '"fine"')
    assert replicas.closed == 2


async def test_a_replica_that_failed_a_request_is_not_asked_again() -> None:
    replicas = Scripted([failing("r1", "engine_failed"), failing("r2", "engine_failed"), plain("r3")])
    await answered(replicas)
    assert [avoid for _, _, avoid in replicas.asked] == [[], ["r1"], ["r1", "r2"]]


async def test_the_only_replica_is_asked_again_after_longer_and_longer_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(ingress, "sleep", pause)
    replicas = Scripted([failing("r1", "engine_unavailable")] * (ATTEMPTS - 1) + [plain("r1")])
    call = await answered(replicas)
    assert call.sent[0]["status"] == 200
    assert pauses == sorted(set(pauses))
    assert len(pauses) == ATTEMPTS - 2


@pytest.mark.parametrize("code", ["not_ready", "overloaded"])
async def test_other_errors_are_the_answer(code: str) -> None:
    call = await answered(Scripted([failing("r1", code)]))
    assert call.sent[0]["status"] == 503
    assert json.loads(text_of(call))["error"]["code"] == code


async def test_a_request_that_kills_every_replica_is_given_up() -> None:
    replicas = Scripted([dies()] * ATTEMPTS)
    call = await answered(replicas)
    assert len(replicas.asked) == ATTEMPTS
    assert call.sent[0]["status"] == 503
    assert dict(call.sent[0]["headers"])[b"retry-after"] == b"1"
    assert json.loads(text_of(call))["error"]["code"] == "engine_failed"


async def test_a_stream_goes_to_the_client_as_it_comes() -> None:
    go_on = asyncio.Event()

    async def slow() -> AsyncGenerator[list[Message], None]:
        yield [start("r1", kind=SSE), piece(b"data: 1\n\n", more=True)]
        await go_on.wait()
        yield [piece(b"data: [DONE]\n\n", more=True), piece(b"")]

    call = call_of(Scripted([slow]))
    task = asyncio.create_task(call.run())
    await until_sent(call, 2)
    assert call.sent[1]["body"] == b"data: 1\n\n"
    go_on.set()
    await task
    assert text_of(call) == "data: 1\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("ends", [dies, breaks_off])
async def test_a_stream_that_has_begun_ends_with_an_error_of_its_own(ends: Callable[..., Script]) -> None:
    begun = [start("r1", kind=SSE), piece(b"data: 1\n\n", more=True)]
    replicas = Scripted([ends(begun), plain("r2")])
    call = await answered(replicas)
    assert len(replicas.asked) == 1
    one, error, done, end = text_of(call).split("\n\n")
    assert (one, done, end) == ("data: 1", "data: [DONE]", "")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_failed"
    assert not call.sent[-1].get("more_body", False)


@pytest.mark.parametrize("how", ["cancel", "disconnect"])
async def test_a_client_that_leaves_frees_the_replica(how: str) -> None:
    async def endless() -> AsyncGenerator[list[Message], None]:
        yield [start("r1", kind=SSE), piece(b"data: 1\n\n", more=True)]
        await asyncio.get_running_loop().create_future()

    replicas = Scripted([endless])
    call = call_of(replicas)
    task = asyncio.create_task(call.run())
    await until_sent(call, 2)
    if how == "cancel":
        task.cancel()
    else:
        call.leave.set()
    await asyncio.gather(task, return_exceptions=True)
    assert replicas.closed == 1


async def test_a_key_is_asked_for_and_a_body_is_limited_before_any_replica_hears_of_it() -> None:
    replicas = Scripted([])
    assert (await answered(replicas, api_keys=("k",))).sent[0]["status"] == 401
    call = call_of(replicas, max_body_bytes=1024)
    call.body = {"prompt": "hi" * 1024}
    await call.run()
    assert call.sent[0]["status"] == 413
    assert replicas.asked == []


async def get(replicas: Scripted, path: str) -> Call:
    call = call_of(replicas)
    call.path, call.method = path, "GET"
    await call.run()
    return call


async def test_metrics_are_those_of_all_replicas_that_tell_them() -> None:
    async def told() -> AsyncGenerator[list[Message], None]:
        text = b'# HELP outpace:a_total t\n# TYPE outpace:a_total counter\noutpace:a_total{m="x"} 2.0\n'
        yield [start("r1", kind="text/plain"), piece(text)]

    call = await get(Scripted([told, failing("r2", "not_ready"), told]), "/metrics")
    assert call.sent[0]["status"] == 200
    assert dict(call.sent[0]["headers"])[b"content-length"] == str(len(text_of(call))).encode()
    assert text_of(call).count("# TYPE outpace:a_total counter") == 1
    assert (
        sum(float(line.split()[-1]) for line in text_of(call).splitlines() if line.startswith("outpace:a_total")) == 4
    )


async def test_metrics_of_no_replica_are_an_error() -> None:
    assert (await get(Scripted([]), "/metrics")).sent[0]["status"] == 503
    assert (await get(Scripted([failing("r2", "not_ready")]), "/metrics")).sent[0]["status"] == 503


async def test_the_status_adds_up_what_the_replicas_say() -> None:
    told = {"model": "m", "ready": True, "in_flight": 2, "restarts": 1, "running": 3, "step_sizes": [1], "levels": {}}
    call = await get(Scripted([plain("r1", body=told), plain("r2", body=told)]), "/status")
    found = json.loads(text_of(call))
    assert (found["model"], found["in_flight"], found["running"], found["step_sizes"]) == ("m", 4, 6, [2])
    assert [each["replica"] for each in found["replicas"]] == ["r1", "r2"]


async def test_other_pages_are_those_of_one_replica() -> None:
    replicas = Scripted([plain("r1", body={"version": "1"}), plain("r2")])
    assert text_of(await get(replicas, "/version")) == '{"version": "1"}'
    assert len(replicas.asked) == 1
