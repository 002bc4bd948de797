"""`outpace bench serve`: what it sends, when, and the figures it makes of what comes back."""

import asyncio
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace import InputError, OutpaceError
from outpace.bench.figures import Run, Trace
from outpace.bench.http import Response
from outpace.bench.load import Pace, Reader, Request, Target, load, make_request
from outpace.bench.serve import figures_of, find, meets_fastgen, moving_average, parse_goodput
from tests.cli.command import run
from tests.cli.fake_openai import FakeOpenAI, served


@pytest.fixture
def fake() -> Iterator[FakeOpenAI]:
    with served(FakeOpenAI()) as server:
        yield server


def bench(fake: FakeOpenAI, *args: str | Path) -> Any:
    lengths = () if "--dataset" in args else ("--input-len", "12", "--output-len", "3")
    return run("bench", "serve", "--url", fake.url, "--num-prompts", "6", *lengths, *args)


# the command


def test_one_run(fake: FakeOpenAI, tmp_path: Path) -> None:
    files = ("--output-json", tmp_path / "a.json", "--plot", tmp_path / "a.png")
    result = bench(fake, "--max-concurrency", "2", "--goodput", "ttft:60000", "tpot:60000", *files)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "fake: 12 prompt and 3 new tokens, all at once, 2 at a time" in result.stdout
    assert re.search(r"requests that succeeded +│ +6 │", result.stdout)
    assert re.search(r"requests/s within ttft:60000 tpot:60000 ms +│ +[\d.,]+ │", result.stdout)
    found = json.loads((tmp_path / "a.json").read_text())
    assert (found["completed"], found["failed"], found["max_concurrent_requests"]) == (6, 0, 2)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (42, 18)  # as the server counts
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert found["output_throughput"] == pytest.approx(18 / found["duration"])
    assert found["request_rate"] == "inf"
    spreads = {
        f"{kind}_{what}_ms" for kind in ("mean", "median", "std", "p99") for what in ("ttft", "tpot", "itl", "e2el")
    }
    assert spreads <= found.keys()
    assert found["effective_throughput"].keys() == {"2", "4", "6"}
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert fake.most <= 2
    sent = fake.bodies[-1]
    assert {type(token) for token in sent["prompt"]} == {int}
    assert len(sent["prompt"]) == 12
    assert (sent["max_tokens"], sent["ignore_eos"], sent["stream_options"]) == (3, True, {"include_usage": True})


def test_a_sweep(fake: FakeOpenAI, tmp_path: Path) -> None:
    files = ("--output-json", tmp_path / "a.json", "--plot", tmp_path / "a.svg")
    result = bench(fake, "--sweep", "200,400,inf", "--arrival", "fixed", *files)
    assert result.exit_code == 0, (result.output, result.exception)
    assert re.findall(r"^│ (\w+) +│ +[\d.,]+ │", result.stdout, re.MULTILINE) == ["200", "400", "inf"]
    points = json.loads((tmp_path / "a.json").read_text())["points"]
    assert [point["request_rate"] for point in points] == [200, 400, "inf"]
    starts = points[0]["start_times"]
    assert starts == sorted(starts)  # when they were meant to start is another test's: a busy machine starts them late
    drawn = (tmp_path / "a.svg").read_text()
    assert all(words in drawn for words in ("latency against throughput", "time to the first token"))
    prompts = [tuple(body["prompt"]) for body in fake.bodies]
    assert len(prompts) == len(set(prompts))  # no cache knows a prompt from another run


def test_words_where_ids_are_not_taken(fake: FakeOpenAI) -> None:
    fake.takes_ids = False
    assert bench(fake, "--num-warmups", "0", "--no-ignore-eos").exit_code == 0
    sent = fake.bodies[-1]
    assert len(sent["prompt"].split()) == 12
    assert "ignore_eos" not in sent


def test_chats(fake: FakeOpenAI) -> None:
    result = bench(fake, "--endpoint", "chat")
    assert result.exit_code == 0, (result.output, result.exception)
    assert len(fake.bodies[0]["messages"][0]["content"].split()) == 12
    assert re.search(r"output tokens +│ +18 │", result.stdout)


def test_a_dataset_is_tokenized_by_the_server(fake: FakeOpenAI, tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": "a b c d"[: 2 * n + 1], "output_len": 2}) for n in range(4)]
    (tmp_path / "work.jsonl").write_text("\n".join(lines))
    result = bench(fake, "--dataset", tmp_path / "work.jsonl", "--num-prompts", "4", "--num-warmups", "0")
    assert result.exit_code == 0, (result.output, result.exception)
    assert sorted(len(body["prompt"]) for body in fake.bodies[1:]) == [1, 2, 3, 4]


def test_requests_that_fail_are_counted_and_shown(fake: FakeOpenAI) -> None:
    server = find(Target(f"{fake.url}/v1"), None, {})
    fake.busy = 2
    requests = [make_request("completions", server.model, [20], 3, {}) for _ in range(5)]
    found = figures_of(asyncio.run(load(server.target, requests, Pace(max_concurrency=1), 0)))
    assert (found["completed"], found["failed"]) == (3, 2)
    assert found["errors"][0].startswith("503: ")
    assert "not now" in found["errors"][0]
    fake.breaks = True
    result = bench(fake)
    assert isinstance(result.exception, OutpaceError)
    assert "every request failed; the first: {'message': 'the engine died'}" in str(result.exception)


def test_a_request_that_takes_too_long(fake: FakeOpenAI) -> None:
    fake.delay = 30.0
    target = Target(f"{fake.url}/v1", timeout=0.05)
    (trace,) = asyncio.run(load(target, [make_request("completions", "m", [20], 3, {})], Pace(), 0)).traces
    assert trace.error == "no answer within 0.05 s"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--sweep", "1,x"), "sweep: expected rates like 1,2,4,8, got '1,x'"),
        (("--sweep", "0"), "sweep: a rate must be above 0"),
        (("--request-rate", "-1"), "request-rate: a rate must be above 0"),
        (("--goodput", "ttft"), "goodput: expected ttft:MS, tpot:MS or e2el:MS, got 'ttft'"),
        (("what",), "what: this command takes only options"),
        (("--output-json", "/no/where.json"), "there is no folder"),
    ],
)
def test_what_is_refused(args: tuple[str, ...], said: str) -> None:
    result = run("bench", "serve", "--url", "http://127.0.0.1:9", *args)
    assert isinstance(result.exception, InputError)
    assert said in str(result.exception)


def test_a_server_that_is_not_there() -> None:
    assert "url: http://127.0.0.1:9/v1: " in str(run("bench", "serve", "--url", "http://127.0.0.1:9").exception)


def test_the_key_is_sent() -> None:
    with served(FakeOpenAI(key="secret")) as fake:
        assert "api-key: the server refuses it" in str(bench(fake).exception)
        assert bench(fake, "--api-key", "secret").exit_code == 0


# its parts


def test_arrivals() -> None:
    assert list(Pace().times(3, 0)) == [0.0, 0.0, 0.0]
    assert list(Pace(rate=4, arrival="fixed").times(3, 0)) == [0.0, 0.25, 0.5]
    due = list(Pace(rate=50).times(4000, 1))
    assert due == sorted(due)
    assert np.diff(due).mean() == pytest.approx(1 / 50, rel=0.1)
    assert np.diff(due).std() == pytest.approx(1 / 50, rel=0.1)  # as large as the mean: Poisson
    assert due == list(Pace(rate=50).times(4000, 1))


def trace(times: list[float], prompt: int = 100, tokens: int | None = None) -> Trace:
    return Trace(0.0, prompt, times[-1], times, len(times) if tokens is None else tokens)


def test_figures() -> None:
    found = figures_of(
        Run([trace([0.1, 0.2, 0.4], 10), trace([0.3], 20), Trace(0.1, 5, 0.2, error="no")], 2.0), {"ttft": 200}
    )
    assert (found["completed"], found["failed"], found["request_goodput"]) == (2, 1, 0.5)
    assert found["mean_ttft_ms"] == pytest.approx(200)
    assert found["mean_tpot_ms"] == pytest.approx(150)  # of the one request that has more than one token
    assert found["median_itl_ms"] == pytest.approx(150)
    assert found["mean_e2el_ms"] == pytest.approx(350)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 4)
    assert found["max_output_tokens_per_s"] == 4
    assert found["max_concurrent_requests"] == 3


def test_goodput_words() -> None:
    assert parse_goodput([]) is None
    assert parse_goodput(["ttft:200,tpot:50", "e2el:1e3"]) == {"ttft": 200.0, "tpot": 50.0, "e2el": 1000.0}


def test_fastgens_agreement() -> None:
    assert meets_fastgen(trace([0.19], prompt=100), 4)  # 100 / 512 = 0.195 s
    assert not meets_fastgen(trace([0.20], prompt=100), 4)
    steady = [0.1 + 0.2 * number for number in range(10)]  # 5 tokens/s
    assert meets_fastgen(trace(steady), 4)
    assert not meets_fastgen(trace(steady), 6)
    late = [*steady, steady[-1] + 1.0]  # one token of a second raises the average above 1/4 s
    assert not meets_fastgen(trace(late), 4)
    assert meets_fastgen(trace(late), 2)
    assert meets_fastgen(trace(steady, tokens=28), 14)  # three tokens in a piece


@given(st.lists(st.floats(0, 10), min_size=1, max_size=40), st.integers(1, 32))
def test_the_moving_average_is_the_weighted_mean(values: list[float], span: int) -> None:
    keep = 1 - 2 / (span + 1)
    for place, average in enumerate(moving_average(values, span)):
        weights = [keep ** (place - other) for other in range(place + 1)]
        assert average == pytest.approx(np.average(values[: place + 1], weights=weights), abs=1e-9)


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@given(st.lists(st.binary(min_size=1, max_size=9), max_size=6), st.lists(st.integers(0, 120), max_size=8))
def test_chunks_come_out_whole_however_they_are_cut(parts: list[bytes], cuts: list[int]) -> None:
    data = HEAD + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    seen: list[bytes] = []
    response = Response(seen.append)
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    for begin, end in pairwise(edges):
        assert not response.done
        response.feed(data[begin:end])
    assert (response.done, response.status, seen) == (True, 200, parts)


def test_bodies_with_a_length_and_without() -> None:
    seen: list[bytes] = []
    response = Response(seen.append)
    response.feed(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 No\r\ncontent-length: 4\r\n\r\nab")
    assert not response.done
    response.feed(b"cd")
    assert (response.done, response.keeps_alive, response.status, b"".join(seen)) == (True, True, 404, b"abcd")
    response = Response(seen.append)
    response.feed(b"HTTP/1.0 200 OK\r\n\r\nrest")
    assert (response.done, response.keeps_alive) == (False, False)
    assert response.end()
    cut = Response(seen.append)
    cut.feed(HEAD + b"5\r\nab")
    assert not cut.end()


EVENTS = b'data: {"choices":[{"text":"a"}]}\r\n\r\n: ping\n\ndata:{"choices":[{"delta":{"role":"x","content":""}}]}\n\n'
LAST = b'data: {"choices":[{"delta":{"content":"b"}}]}\n\ndata: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":9}}\n\ndata: [DONE]\n\n'  # noqa: E501


@given(st.integers(1, 60))
def test_events_are_read_however_they_are_cut(size: int) -> None:
    found = Trace(0.0, 1)
    reader = Reader(found)
    data = EVENTS + LAST
    for begin in range(0, len(data), size):
        reader.receive(data[begin : begin + size])
    assert (len(found.times), found.prompt_tokens, found.output_tokens, found.error) == (2, 3, 9, "")


def test_an_event_that_is_no_json() -> None:
    found = Trace(0.0, 1)
    Reader(found).receive(b"data: {oops\n\n")
    assert "an event does not have OpenAI's format" in found.error


def test_connections_are_used_again(fake: FakeOpenAI) -> None:
    made: list[int] = []

    async def count() -> None:
        loop = asyncio.get_running_loop()
        create = loop.create_connection

        async def counted(*args: Any, **options: Any) -> Any:
            made.append(1)
            return await create(*args, **options)

        loop.create_connection = counted  # type: ignore[method-assign]
        requests = [Request(b'{"prompt":[20],"stream":true}', 1)] * 5
        found = await load(Target(f"{fake.url}/v1"), requests, Pace(max_concurrency=1), 0)
        assert [trace.error for trace in found.traces] == [""] * 5

    asyncio.run(count())
    assert len(made) == 1
