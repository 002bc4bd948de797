"""The router in front of replicas that answer, break and hang as they are told."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from outpace.replicas.relay import HOLD
from outpace.replicas.router import LOSSES
from outpace.server.problems import DONE
from tests.patience import PATIENCE
from tests.replicas.fakes import Behaviour, Got, hello, routed
from tests.server.asgi import Call

pytestmark = pytest.mark.anyio
EVENT = b'data: {"n": 1}\n\n'


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def dies(got: Got) -> None:
    """Reads the request, and is gone."""


async def dies_after_head(got: Got) -> None:
    got.head(200, content_type="application/json", content_length="100")
    got.data(b"half of it")
    await got.die()


async def dies_before_an_event(got: Got) -> None:
    got.stream(b'data: {"half')
    await got.die()


def refuses(status: int, code: str) -> Behaviour:
    async def answer(got: Got) -> None:
        got.error(status, code)

    return answer


def error_in(call: Call) -> dict[str, Any]:
    """The error that a call was answered with."""
    return dict(json.loads(call.text)["error"])


async def test_a_request_and_its_answer_pass_unchanged(tmp_path: Path) -> None:
    async def answer(got: Got) -> None:
        got.json({"a": 1}, 201, x_request_id="other", server_timing="x;dur=1", connection="keep-alive")

    headers = {"traceparent": "00-1-2-01", "x-request-id": "mine", "authorization": "Bearer x", "te": "trailers"}
    async with routed(tmp_path, answer) as router:
        call = await router.ask("/v1/a%20b", {"prompt": "ä"}, headers=headers, query=b"x=1&y=%2F")
        (got,) = router.fakes[0].got
    assert (got.method, got.target) == ("POST", "/v1/a%20b?x=1&y=%2F")
    assert json.loads(got.body) == {"prompt": "ä"}
    assert got.headers["traceparent"] == "00-1-2-01"
    assert got.headers["x-request-id"] == "mine"
    assert got.headers["authorization"] == "Bearer x"
    assert "te" not in got.headers
    assert (call.status, call.text) == (201, '{"a":1}')
    assert call.answer_headers["x-request-id"] == "mine"
    assert call.answer_headers["server-timing"] == "x;dur=1"
    assert "connection" not in call.answer_headers
    names = [name for name, _ in call.sent[0]["headers"]]
    assert len(names) == len(set(names))


async def test_a_request_without_an_id_gets_the_one_that_the_replica_gets(tmp_path: Path) -> None:
    async with routed(tmp_path, hello) as router:
        call = await router.ask()
        assert router.fakes[0].got[0].headers["x-request-id"] == call.answer_headers["x-request-id"]


async def test_a_stream_comes_event_by_event_and_byte_for_byte(tmp_path: Path) -> None:
    seen: asyncio.Queue[None] = asyncio.Queue()
    pieces = [EVENT, b": ping\n\n", b'data: {"long": "' + b"x" * 10**5, b'"}\n\n' + EVENT, DONE]

    async def answer(got: Got) -> None:
        got.stream()
        for piece in pieces:
            got.data(piece)
            if piece.endswith(b"\n\n"):
                await seen.get()
        got.end()

    async with routed(tmp_path, answer) as router:
        call = router.call(body={"prompt": "a", "stream": True})
        running = asyncio.create_task(call.run())
        whole = b""
        for piece in pieces:
            whole += piece
            while piece.endswith(b"\n\n") and call.text.encode() != whole:
                call.changed.clear()
                await asyncio.wait_for(call.changed.wait(), PATIENCE)
            if piece.endswith(b"\n\n"):
                seen.put_nowait(None)
        await asyncio.wait_for(running, PATIENCE)
    assert call.ended
    assert call.answer_headers["content-type"] == "text/event-stream; charset=utf-8"


@pytest.mark.parametrize(
    "behaviour",
    [
        dies,
        dies_after_head,
        dies_before_an_event,
        refuses(503, "engine_failed"),
        refuses(503, "engine_unavailable"),
        refuses(503, "starting"),
    ],
)
async def test_a_request_that_nothing_was_answered_to_begins_again_elsewhere(
    tmp_path: Path, behaviour: Behaviour
) -> None:
    async with routed(tmp_path, behaviour, hello) as router:
        call = await router.ask(body={"prompt": "b"})
        assert (call.status, json.loads(call.text)) == (200, {"said": '{"prompt": "b"}'})
        assert [len(fake.got) for fake in router.fakes] == [1, 1]
        assert [each.ready for each in router.fleet.replicas] == [False, True]
        await router.ask()
        assert [len(fake.got) for fake in router.fakes] == [1, 2], "it has not said that it is ready again"
        assert router.fleet.in_flight == 0
        assert dict(router.pages.outcomes) == {"done": 2}


async def test_a_replica_that_cannot_be_reached_is_passed_over(tmp_path: Path) -> None:
    async with routed(tmp_path, hello, hello) as router:
        router.fleet.replicas[0].path = str(tmp_path / "none")
        assert (await router.ask()).status == 200


async def test_a_stream_under_way_ends_with_an_error_of_its_own(tmp_path: Path) -> None:
    async def breaks(got: Got) -> None:
        got.stream(EVENT, b'data: {"half')
        await got.die()

    async with routed(tmp_path, breaks, hello) as router:
        call = await router.ask(body={"prompt": "a", "stream": True})
        assert [len(fake.got) for fake in router.fakes] == [1, 0]
        assert dict(router.pages.outcomes) == {"failed": 1}
    first, error, done, rest = call.text.encode().split(b"\n\n")
    assert (first + b"\n\n", done + b"\n\n", rest) == (EVENT, DONE, b"")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "engine_failed"
    assert call.ended


async def test_a_request_that_kills_what_it_reaches_does_not_reach_all(tmp_path: Path) -> None:
    async with routed(tmp_path, *[dies] * (LOSSES + 2)) as router:
        call = await router.ask()
        assert (call.status, error_in(call)["code"]) == (503, "engine_failed")
        assert sum(len(fake.got) for fake in router.fakes) == LOSSES
        assert router.fleet.num_ready == 2


async def test_what_was_begun_waits_for_a_replica_and_what_is_new_does_not(tmp_path: Path) -> None:
    async with routed(tmp_path, dies) as router:
        replica = router.fleet.replicas[0]
        waiting = router.call()
        running = asyncio.create_task(waiting.run())
        while replica.ready:
            await router.fleet.changed()
        refused = await router.ask()
        assert (refused.status, error_in(refused)["code"]) == (503, "not_ready")
        assert refused.answer_headers["retry-after"] == "1"
        router.fakes[0].answer = hello
        router.fleet.set_ready(replica, True)
        await asyncio.wait_for(running, PATIENCE)
        assert waiting.status == 200


async def test_what_waits_for_a_replica_is_told_when_none_will_come(tmp_path: Path) -> None:
    async with routed(tmp_path, dies) as router:
        waiting = router.call()
        running = asyncio.create_task(waiting.run())
        while router.fleet.replicas[0].ready:
            await router.fleet.changed()
        router.fleet.closed = True
        router.fleet.wake()
        await asyncio.wait_for(running, PATIENCE)
        assert (waiting.status, error_in(waiting)["code"]) == (503, "engine_failed")


async def test_a_full_replica_passes_a_request_to_one_that_is_not(tmp_path: Path) -> None:
    async with routed(tmp_path, refuses(429, "overloaded"), hello) as router:
        assert (await router.ask()).status == 200
        assert router.fleet.num_ready == 2
    (tmp_path / "2").mkdir()
    async with routed(tmp_path / "2", *[refuses(429, "overloaded")] * 2) as router:
        call = await router.ask()
        assert (call.status, error_in(call)["message"]) == (429, "it is overloaded")
        assert "retry-after" in call.answer_headers
        assert [len(fake.got) for fake in router.fakes] == [1, 1]


@pytest.mark.parametrize(("status", "code"), [(429, "key_limit"), (503, "other"), (400, "engine_failed")])
async def test_other_errors_are_the_answer(tmp_path: Path, status: int, code: str) -> None:
    async with routed(tmp_path, refuses(status, code), hello) as router:
        call = await router.ask()
        assert (call.status, error_in(call)["code"]) == (status, code)
        assert [len(fake.got) for fake in router.fakes] == [1, 0]


async def test_a_client_that_leaves_ends_its_request_at_the_replica(tmp_path: Path) -> None:
    left = asyncio.Event()

    async def waits(got: Got) -> None:
        got.stream(EVENT)
        await got.left()
        left.set()

    async with routed(tmp_path, waits) as router:
        call = router.call()
        running = asyncio.create_task(call.run())
        while not call.text:
            await asyncio.wait_for(call.changed.wait(), PATIENCE)
        assert router.fleet.in_flight == 1
        call.leave.set()
        await asyncio.wait_for(running, PATIENCE)
        await asyncio.wait_for(left.wait(), PATIENCE)
        assert router.fleet.in_flight == 0
        assert dict(router.pages.outcomes) == {"cancelled": 1}


async def test_a_long_answer_is_not_held_whole(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def long(got: Got) -> None:
        got.head(200, content_type="application/json", content_length=str(3 * HOLD))
        got.data(b"x" * 2 * HOLD)
        await asyncio.wait_for(go_on.wait(), PATIENCE)
        got.data(b"y" * HOLD)
        got.end()
        await got.writer.drain()

    async with routed(tmp_path, long) as router:
        call = router.call()
        running = asyncio.create_task(call.run())
        while len(call.text) <= HOLD:
            call.changed.clear()
            await asyncio.wait_for(call.changed.wait(), PATIENCE)
        go_on.set()
        await asyncio.wait_for(running, PATIENCE)
    assert call.text == "x" * 2 * HOLD + "y" * HOLD


async def test_a_long_answer_that_breaks_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    async def breaks(got: Got) -> None:
        got.head(200, content_type="application/json", content_length=str(3 * HOLD))
        got.data(b"x" * 2 * HOLD)
        await got.die()

    async with routed(tmp_path, breaks, hello) as router:
        call = await router.ask()
    assert call.status == 200
    assert not call.ended


async def test_draining_refuses_new_requests_and_ends_what_runs(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def slow(got: Got) -> None:
        await asyncio.wait_for(go_on.wait(), PATIENCE)
        await hello(got)

    async with routed(tmp_path, slow, retry_after=7) as router:
        assert (await router.get("/health/ready")).status == 200
        call = router.call()
        running = asyncio.create_task(call.run())
        while not router.fakes[0].got:
            await asyncio.sleep(0)
        router.fleet.drain()
        refused = await router.ask()
        assert (refused.status, refused.answer_headers["retry-after"]) == (503, "7")
        assert (await router.get("/health/ready")).status == 503
        assert (await router.get("/health/live")).status == 200
        assert router.fleet.in_flight == 1
        go_on.set()
        await asyncio.wait_for(running, PATIENCE)
        assert router.fleet.in_flight == 0
        assert call.status == 200


async def test_what_the_guard_refuses_reaches_no_replica(tmp_path: Path) -> None:
    async with routed(tmp_path, hello, api_keys=["secret"], max_body_bytes=2048, max_headers=3) as router:
        key = {"authorization": "Bearer secret"}
        assert (await router.ask()).status == 401
        assert (await router.ask(body={"prompt": "x" * 3000}, headers=key)).status == 413
        assert (await router.ask(headers={**key, "a": "b", "c": "d"})).status == 431
        assert not router.fakes[0].got
        assert (await router.ask(headers=key)).status == 200


async def test_requests_above_the_limit_are_refused(tmp_path: Path) -> None:
    async def waits(got: Got) -> None:
        await got.left()

    async with routed(tmp_path, waits, waits, max_concurrent_requests=1) as router:
        call = router.call()
        running = asyncio.create_task(call.run())
        while not any(fake.got for fake in router.fakes):
            await asyncio.sleep(0)
        assert (await router.ask()).status == 429
        assert dict(router.pages.rejected) == {"max_concurrent_requests": 1}
        call.leave.set()
        await asyncio.wait_for(running, PATIENCE)


async def test_prompts_with_the_same_beginning_go_to_the_same_replica(tmp_path: Path) -> None:
    async with routed(tmp_path, hello, hello, hello) as router:
        for turn in range(5):
            await router.ask(body={"prompt": "same " * 100 + str(turn)})
        assert sorted(len(fake.got) for fake in router.fakes) == [0, 0, 5]
        for turn in range(6):
            await router.ask(body={"prompt": f"other {turn} " * 100})
        assert all(fake.got for fake in router.fakes)


async def test_what_is_only_read_comes_from_one_replica(tmp_path: Path) -> None:
    async with routed(tmp_path, hello, hello) as router:
        for _ in range(3):
            assert (await router.get("/v1/models")).status == 200
        assert [len(fake.got) for fake in router.fakes] == [3, 0]
        router.fleet.set_ready(router.fleet.replicas[0], False)
        assert (await router.get("/v1/models")).status == 200
        assert router.fakes[1].got[0].method == "GET"
        assert "content-length" not in router.fakes[1].got[0].headers


async def test_a_proxy_may_show_the_server_under_a_path(tmp_path: Path) -> None:
    async with routed(tmp_path, hello, root_path="/llm") as router:
        assert (await router.get("/llm/health/live")).status == 200
        assert (await router.get("/health/live")).status == 200
        await router.ask("/llm/v1/completions")
        assert router.fakes[0].got[0].target == "/llm/v1/completions"
