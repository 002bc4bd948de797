"""Every queue and buffer has a limit; who is over one hears it early, and harms nobody else."""

import asyncio
import contextlib
import logging
import socket
from typing import Any

import pytest
from openai import APIError, APIStatusError, RateLimitError
from transformers import PreTrainedTokenizerFast

from outpace.errors import ConfigError, EngineDead, Overloaded
from outpace.server.listen import bound
from outpace.server.options import ServerConfig
from tests.patience import PATIENCE, skip
from tests.server.asgi import Call
from tests.server.conftest import Serve
from tests.server.fake import FakeEngine, says
from tests.server.live import Live
from tests.server.test_completions import events

pytestmark = pytest.mark.anyio
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("option", "limit", "fields"),
    [
        ("max_n", 2, {"n": 3}),
        ("max_stop", 2, {"stop": ["a", "b", "c"]}),
        ("max_stop", 2, {"stop_token_ids": [1, 2, 3]}),
        ("max_stop_chars", 3, {"stop": ["abcd"]}),
        ("max_logit_bias", 1, {"logit_bias": {"1": 1, "2": 2}}),
        ("max_allowed_tokens", 1, {"allowed_token_ids": [1, 2]}),
        ("max_bad_words", 1, {"bad_words": ["a", "b"]}),
        ("max_prompts", 1, {"prompt": ["a", "b"]}),
        ("max_prompt_tokens", 2, {"prompt": "abc"}),
        ("max_json_depth", 4, {"logit_bias": {"1": [[[[1]]]]}}),
    ],
)
async def test_b2_each_limit_is_an_option(serve: Serve, option: str, limit: int, fields: dict[str, Any]) -> None:
    strict, loose = serve(**{option: limit}), serve()
    refused = await strict.post("/v1/completions", {"prompt": "a", **fields})
    assert refused.status_code == 400
    assert strict.engine.requests == []
    if option != "max_json_depth":
        assert (await loose.post("/v1/completions", {"prompt": "a", **fields})).status_code == 200


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
async def test_b2_the_engine_says_how_many_logprobs(
    serve: Serve, tokenizer: PreTrainedTokenizerFast, field: str
) -> None:
    for most, status in ((2, 400), (20, 200), (40, 200)):
        server = serve(FakeEngine(tokenizer, max_logprobs=most))
        answer = await server.post("/v1/completions", {"prompt": "ab", field: max(3, most)})
        assert answer.status_code == status


async def test_limits_of_chats(serve: Serve) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    server = serve(max_messages=1, max_tools=1)
    assert (await server.post("/v1/chat/completions", {"messages": CHAT["messages"] * 2})).status_code == 400
    assert (await server.post("/v1/chat/completions", {**CHAT, "tools": [tool, tool]})).status_code == 400
    assert (await server.post("/v1/chat/completions", {**CHAT, "tools": [tool]})).status_code == 200


@pytest.mark.parametrize("announced", [True, False])
async def test_b5_ten_megabytes_are_refused_by_size(serve: Serve, announced: bool) -> None:
    pieces = [b'{"prompt": "', *[b"a" * 2**20] * 10, b'"}']
    headers = {"content-length": str(sum(map(len, pieces)))} if announced else {}
    call = Call(serve().app, "/v1/completions", pieces=pieces, headers=headers)
    await call.run()
    assert call.status == 413
    assert "request_too_large" in call.text
    assert call.taken <= (0 if announced else 5), "it went on reading"


async def test_b5_a_long_prompt_delays_nobody(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    server = serve(FakeEngine(tokenizer, says("x")), max_body_bytes=16 * 2**20, access_log=False)
    answered = 0
    async with server.http() as client:
        await client.post("/v1/completions", json={"prompt": "a"})
        long = asyncio.create_task(client.post("/v1/completions", json={"prompt": "ab " * 700_000}))
        while not long.done():
            assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
            answered += 1
    assert (await long).json()["error"]["code"] == "context_length_exceeded"
    assert answered > 5, "others waited for the long prompt"


async def test_b2_headers(serve: Serve) -> None:
    server = serve()
    many = {f"x-{number}": "1" for number in range(70)}
    for headers in (many, {"x-long": "a" * 20_000}):
        answer = await server.get("/version", headers=headers)
        assert answer.status_code == 431


async def test_a_body_that_never_comes(serve: Serve) -> None:
    call = Call(serve(body_timeout=0.05).app, "/v1/completions", pieces=[])
    await call.run()
    assert call.status == 408


async def test_l2_overload_says_when_to_come_back(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    server = serve(FakeEngine(tokenizer, error=Overloaded("5 requests are waiting; try later")), retry_after=7)
    async with server.openai() as client:
        for stream in (False, True):
            with pytest.raises(RateLimitError) as caught:
                await client.completions.create(model="fake", prompt="a", stream=stream)
            assert caught.value.response.headers["retry-after"] == "7"
            assert caught.value.code == "overloaded"
    metrics = (await server.get("/metrics")).text
    assert 'outpace:admission_rejections_total{model_name="fake",reason="overloaded"} 2.0' in metrics


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("completions", {"prompt": ["abcd"] * 5, "prompt_logprobs": 9}, "prompt_logprobs"),
        ("completions", {"prompt": "abcd", "echo": True, "logprobs": 4, "max_tokens": 1, "n": 11}, "prompt_logprobs"),
        ("completions", {"prompt": "a", "logprobs": 9, "max_tokens": 21}, "logprobs"),
        ("completions", {"prompt": "a", "logprobs": 1, "logprob_token_ids": [1, 2, 3], "max_tokens": 60}, "logprobs"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 4, "n": 3, "max_tokens": 14}, "top_logprobs"),
    ],
)
async def test_item_1_log_probabilities_of_a_request_are_bounded(
    serve: Serve, path: str, body: dict[str, Any], field: str
) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]} if path.startswith("chat") else {}
    answer = await serve(max_logprobs_per_request=199).post(f"/v1/{path}", body | chat)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field
    assert "max_logprobs_per_request=199" in answer.json()["error"]["message"]
    assert (await serve(max_logprobs_per_request=1000).post(f"/v1/{path}", body | chat)).status_code == 200


async def test_item_1_a_chat_without_max_tokens_fits_the_limit_of_log_probabilities(serve: Serve) -> None:
    server = serve(max_logprobs_per_request=100)
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 4, "n": 4}
    assert (await server.post("/v1/chat/completions", body)).status_code == 200
    assert server.engine.requests[-1].params.max_tokens == 5


async def test_l3_requests_beyond_the_limit_get_429(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    engine = FakeEngine(tokenizer, hold=asyncio.Event())
    server = serve(engine, max_concurrent_requests=3)
    async with server.http() as client:
        held = [asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"})) for _ in range(3)]
        while len(engine.open) < 3:
            await asyncio.sleep(0)
        refused = await client.post("/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert (await client.get("/status")).status_code == 200
        assert engine.hold is not None
        engine.hold.set()
        assert [(await each).status_code for each in held] == [200] * 3
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200


async def test_each_key_has_its_share(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    engine = FakeEngine(tokenizer, hold=asyncio.Event())
    server = serve(engine, api_keys=["one", "two"], max_requests_per_key=1)
    async with server.http() as client:

        async def ask(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return (await client.post("/v1/completions", json={"prompt": "a"}, headers=headers)).status_code

        first = asyncio.create_task(ask("one"))
        await engine.waits.wait()
        assert await ask("one") == 429
        second = asyncio.create_task(ask("two"))
        while len(engine.open) < 2:
            await asyncio.sleep(0)
        assert engine.hold is not None
        engine.hold.set()
        assert (await first, await second) == (200, 200)
        assert await ask("one") == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/mii/fake"])
async def test_f1_a_dead_engine_is_a_clean_503(serve: Serve, tokenizer: PreTrainedTokenizerFast, path: str) -> None:
    server = serve(FakeEngine(tokenizer, error=EngineDead("the engine is being restarted; try again later")))
    body = {"/v1/completions": {"prompt": "a"}, "/mii/fake": {"prompts": "a"}}.get(path, CHAT)
    answer = await server.post(path, body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_failed")
    assert answer.headers["retry-after"] == "1"


async def test_f1_a_stream_that_breaks_ends_with_an_error(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    server = serve(FakeEngine(tokenizer, error=EngineDead("the engine died"), error_at=3))
    answer = await server.post("/v1/completions", {"prompt": "a", "stream": True})
    chunks = events(answer.text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "Hel"
    assert chunks[-1]["error"]["code"] == "engine_failed"
    async with server.openai() as client:
        stream = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "a"}], stream=True
        )
        with pytest.raises(APIError, match="the engine died"):
            async for _ in stream:
                pass


async def test_an_engine_that_ends_early_is_an_error(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    class Silent(FakeEngine):
        async def generate(self, request: Any) -> Any:
            return
            yield

    assert (await serve(Silent(tokenizer)).post("/v1/completions", {"prompt": "a"})).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at", [0, 2])
async def test_errors_carry_no_paths(
    serve: Serve, tokenizer: PreTrainedTokenizerFast, stream: bool, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(FakeEngine(tokenizer, error=RuntimeError("/secret/path"), error_at=at))
    with caplog.at_level(logging.ERROR, "outpace"):
        answer = await server.post(
            "/v1/completions", {"prompt": "a", "stream": stream}, headers={"x-request-id": "my-id"}
        )
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text
    assert "my-id" in answer.text
    assert answer.status_code == (200 if stream and at else 500)
    assert answer.headers["x-request-id"] == "my-id"
    assert "/secret/path" in caplog.text
    assert "my-id" in caplog.text
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("path", ["/v1/embeddings", "/mii/fake"])
async def test_errors_of_other_routes_carry_no_paths(
    serve: Serve, tokenizer: PreTrainedTokenizerFast, path: str
) -> None:
    server = serve(FakeEngine(tokenizer, error=RuntimeError("/secret/path")))
    answer = await server.post(path, {"input": "a"} if "emb" in path else {"prompts": "a"})
    assert answer.status_code == 500
    assert "secret" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at", [0, 2])
async def test_a_request_has_a_deadline(
    serve: Serve, tokenizer: PreTrainedTokenizerFast, stream: bool, at: int
) -> None:
    engine = FakeEngine(tokenizer, hold=asyncio.Event(), hold_at=at)
    server = serve(engine, request_timeout=100)
    asking = asyncio.create_task(server.post("/v1/completions", {"prompt": "a", "stream": stream}))
    await engine.waits.wait()
    skip(101)
    answer = await asking
    assert engine.open == set()
    if stream and at:
        assert events(answer.text)[-1]["error"]["code"] == "timeout"
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 5, 15])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/mii/fake"])
async def test_f8_a_client_that_leaves_frees_the_engine(
    serve: Serve, tokenizer: PreTrainedTokenizerFast, stage: int, stream: bool, path: str
) -> None:
    engine = FakeEngine(tokenizer, hold=asyncio.Event(), hold_at=stage)
    bodies: dict[str, Any] = {"/v1/completions": {"prompt": ["a", "b"]}, "/mii/fake": {"prompts": "a"}}
    body = bodies.get(path, CHAT)
    if "mii" not in path:
        body = {**body, "stream": stream}
    call = Call(serve(engine).app, path, body)
    running = asyncio.create_task(call.run())
    await engine.waits.wait()
    assert engine.open
    call.leave.set()
    await asyncio.wait_for(running, PATIENCE)
    assert engine.open == set()
    assert len(engine.closed_early) == len(engine.requests)
    assert call.status == (200 if stream and stage and "mii" not in path else 0)


async def test_f8_a_cancelled_server_task_frees_the_engine(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    engine = FakeEngine(tokenizer, hold=asyncio.Event(), hold_at=1)
    running = asyncio.create_task(Call(serve(engine).app, "/v1/completions", {"prompt": ["a", "b"]}).run())
    await engine.waits.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert engine.open == set()


async def test_the_log_has_a_line_for_each_request(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server = serve(api_keys=["k"])
    server.headers = {"authorization": "Bearer k", "x-request-id": "r-1"}
    with caplog.at_level(logging.INFO, "outpace.access"):
        await server.post("/v1/completions", {"prompt": "a", "user": "eve\nfake line"})
        await server.get("/no%0Asuch")
    first, second = caplog.messages
    assert "POST /v1/completions 200" in first
    assert "r-1 key=0" in first
    assert "eve%0Afake" in first
    assert "/no%0Asuch 404" in second
    assert caplog.records[0].__dict__["request_id"] == "r-1"


@pytest.mark.parametrize("probes", [False, True])
async def test_item_19_probes_are_not_in_the_log_unless_asked_for(
    serve: Serve, caplog: pytest.LogCaptureFixture, probes: bool
) -> None:
    server = serve(api_keys=["k"], access_log_probes=probes)
    paths = ["/health", "/health/live", "/health/ready", "/healthz", "/metrics", "/status"]
    with caplog.at_level(logging.INFO, "outpace.access"):
        await server.get("/status")
        server.headers = {"authorization": "Bearer k"}
        for path in (*paths, "/version"):
            await server.get(path)
    logged = [record.__dict__["path"] for record in caplog.records]
    assert logged == ["/status", *(paths if probes else []), "/version"], "one that fails is always there"


async def test_item_13_a_client_that_leaves_in_the_middle_of_its_body_has_cancelled(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve()
    call = Call(server.app, "/v1/completions", pieces=[b'{"prompt"'], whole=False)
    call.leave.set()
    with caplog.at_level(logging.INFO, "outpace.access"):
        await call.run()
    assert call.sent == []
    assert [record.__dict__["status"] for record in caplog.records] == [499]
    metrics = (await server.get("/metrics")).text
    assert 'outpace:http_requests_total{model_name="fake",outcome="cancelled"} 1.0' in metrics
    assert 'outcome="invalid"' not in metrics


async def test_item_13_status_counts_requests_that_have_not_been_answered(
    serve: Serve, tokenizer: PreTrainedTokenizerFast
) -> None:
    engine = FakeEngine(tokenizer, hold=asyncio.Event())
    server = serve(engine)
    calls = [Call(server.app, "/v1/completions", {"prompt": "a"}) for _ in range(3)]
    calls.append(Call(server.app, "/v1/completions", pieces=[]))  # its body has not come
    running = [asyncio.create_task(call.run()) for call in calls]
    while len(engine.open) < 3:
        await asyncio.sleep(0)
    assert (await server.get("/status")).json()["in_flight"] == 4
    for call in calls:
        call.leave.set()
    await asyncio.gather(*running)
    assert (await server.get("/status")).json()["in_flight"] == 0


@pytest.mark.parametrize("given", ["", "a b", "x" * 200, "é"])
async def test_odd_request_ids_are_replaced(serve: Serve, given: str) -> None:
    answer = await serve().get("/version", headers=[(b"x-request-id", given.encode())])
    assert answer.headers["x-request-id"] not in ("", given)
    assert len(answer.headers["x-request-id"]) == 32


async def test_status_codes_through_the_openai_client(serve: Serve) -> None:
    async with serve(max_body_bytes=1024).openai() as client:
        with pytest.raises(APIStatusError) as caught:
            await client.completions.create(model="fake", prompt="a" * 2000)
    assert caught.value.status_code == 413


def test_options_are_checked() -> None:
    for wrong in ({"port": -1}, {"max_n": 0}, {"ssl_certfile": "x"}, {"tool_call_parser": "mine"}, {"cors": True}):
        with pytest.raises(ConfigError):
            ServerConfig(**wrong)
    assert "secret" not in repr(ServerConfig(api_keys=["secret"]))


def sent(live: Live, data: bytes, *, end: bool = True) -> bytes:
    """What a connection gets for these bytes, until the server closes it or has nothing more to say."""
    with socket.create_connection(("127.0.0.1", live.port), timeout=PATIENCE) as connection:
        with contextlib.suppress(OSError):  # it may have heard enough
            connection.sendall(data)
        if end:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        got = b""
        with contextlib.suppress(ConnectionError):
            while more := connection.recv(1 << 16):
                got += more
        return got


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n"
BODY = b'{"prompt": "a", "max_tokens": 1}'
BYTES: dict[str, tuple[bytes, set[int]]] = {
    "no request": (b"\x16\x03\x01\x02\x00\x01" * 50, {400}),
    "no version": (b"GET /version\r\n\r\n", {400}),
    "no host": (b"GET /version HTTP/1.1\r\n\r\n", {400}),
    "a header without a colon": (b"GET /version HTTP/1.1\r\nhost: x\r\nnonsense\r\n\r\n", {400}),
    "a space before the colon": (b"GET /version HTTP/1.1\r\nhost : x\r\n\r\n", {400}),
    "NUL in a header": (b"GET /version HTTP/1.1\r\nhost: x\r\na: \x00\r\n\r\n", {400}),
    "NUL in the path": (b"GET /ver\x00sion HTTP/1.1\r\nhost: x\r\n\r\n", {400, 404}),
    "a megabyte of header": (b"GET /version HTTP/1.1\r\nhost: x\r\na: " + b"a" * 2**20 + b"\r\n\r\n", {400, 431}),
    "a megabyte of path": (b"GET /" + b"a" * 2**20 + b" HTTP/1.1\r\nhost: x\r\n\r\n", {400, 414, 431}),
    "10,000 headers": (b"GET /version HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 10_000 + b"\r\n", {400, 431}),
    "a length that is none": (HEAD + b"content-length: ten\r\n\r\n" + BODY, {400}),
    "a negative length": (HEAD + b"content-length: -1\r\n\r\n" + BODY, {400}),
    "a length of many digits": (HEAD + b"content-length: " + b"9" * 100 + b"\r\n\r\n" + BODY, {400, 413}),
    "two lengths": (HEAD + b"content-length: 5\r\ncontent-length: 32\r\n\r\n" + BODY, {400}),
    "length and chunks": (CHUNKED + b"content-length: 5\r\n\r\n0\r\n\r\n", {400}),
    "chunks and length": (HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", {400}),
    "chunks in disguise": (HEAD + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n", {400, 501}),
    "chunks twice": (HEAD + b"transfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n", {400, 501}),
    "a chunk of no size": (CHUNKED + b"\r\nzz\r\nab\r\n0\r\n\r\n", {400}),
    "a chunk of negative size": (CHUNKED + b"\r\n-1\r\nab\r\n0\r\n\r\n", {400}),
    "a chunk of great size": (CHUNKED + b"\r\n" + b"f" * 30 + b"\r\nab\r\n0\r\n\r\n", {400}),
    "a chunk shorter than it says": (CHUNKED + b"\r\nff\r\nab\r\n0\r\n\r\n", set()),
    "a body cut off": (HEAD + b"content-length: 1000\r\n\r\n" + BODY, set()),
}


@pytest.mark.parametrize("name", BYTES)
def test_b3_bytes_that_are_no_request(live: Live, name: str) -> None:
    """They get an error, or, where the client has gone before the end of its body, nothing; and nobody else suffers."""
    data, wanted = BYTES[name]
    before, answers = live.rss(), sent(live, data)
    statuses = [int(line.split()[1]) for line in answers.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    assert len(statuses) == min(1, len(wanted)), answers[:300]
    assert set(statuses) <= wanted, answers[:300]
    assert b"Traceback" not in answers
    assert live.rss()[live.server.process.pid] - before[live.server.process.pid] < 20 * 2**20
    with live.http() as client:
        assert client.get("/version").status_code == 200


def test_b3_a_request_cannot_hide_in_the_body_of_another(live: Live) -> None:
    hidden = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    for lengths in (
        b"content-length: 5\r\ntransfer-encoding: chunked",
        b"transfer-encoding: chunked\r\ncontent-length: 5",
    ):
        answers = sent(live, HEAD + lengths + b"\r\n\r\n0\r\n\r\n" + hidden)
        assert answers.count(b"HTTP/1.1 ") == 1
        assert answers.startswith(b"HTTP/1.1 400")


def test_b3_three_megabytes_of_single_bytes(live: Live) -> None:
    pid, before, begin = live.server.process.pid, live.rss(), live.cpu_seconds()
    answers = sent(live, CHUNKED + b"\r\n" + b"1\r\na\r\n" * 3 * 2**20 + b"0\r\n\r\n")
    assert answers == b"" or answers.startswith((b"HTTP/1.1 408", b"HTTP/1.1 413"))
    assert live.rss()[pid] - before[pid] < 50 * 2**20
    assert live.cpu_seconds() - begin < 12  # all of them would take 30
    with live.http() as client:
        assert client.get("/version").status_code == 200


@pytest.mark.parametrize(
    ("data", "answered"),
    [
        (b"", False),
        (b"POST /v1/comp", False),
        (b"GET /version HTTP/1.1\r\nhost: x\r\na: ", False),
        (HEAD + b"content-length: 100\r\n\r\n{", True),
        (CHUNKED + b"\r\n1\r\n{\r\n", True),
    ],
)
def test_b3_who_never_ends_is_cut_off(live: Live, data: bytes, answered: bool) -> None:
    answers = sent(live, data, end=False)  # it ends when the server closes the connection
    assert bool(answers) == answered, answers[:300]


async def test_an_answer_does_not_wait_for_the_network() -> None:
    """Nagle's algorithm would hold the second half of each answer back for 40 ms."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        at_once = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.write(b"at once" if at_once else b"later")
        writer.close()

    with bound(ServerConfig(port=0)) as sock:
        async with await asyncio.start_server(answer, sock=sock):
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            assert await reader.read() == b"at once"
            writer.close()
            await writer.wait_closed()
