"""Item 7: large bodies and large answers are handled beside the event loop, in turns."""

import asyncio
import gc
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from outpace.errors import Overloaded
from outpace.server.big_jobs import BigJobs
from outpace.server.body import parse
from outpace.server.caller import CALLER
from outpace.server.options import ServerConfig
from tests.patience import PATIENCE
from tests.server.asgi import Call
from tests.server.conftest import Serve
from tests.server.fake import FakeEngine

pytestmark = pytest.mark.anyio
OPTIONS = ServerConfig()
TEXT = st.text(st.sampled_from('ab[]{}:,"\\é😀\n'), max_size=6)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(value=VALUES, ascii=st.booleans())
def test_item_7_json_is_read_as_it_was_written(value: Any, ascii: bool) -> None:
    data = json.dumps(value, ensure_ascii=ascii).encode()
    assert parse(data, OPTIONS) == value
    assert parse(b"\xef\xbb\xbf" + data, OPTIONS) == value


@pytest.mark.parametrize("size", [20_000, 300_000, 300_001])
@pytest.mark.parametrize("gap", ["", " ", "\n  "])
def test_item_7_long_lists_are_read_in_pieces_as_in_one(size: int, gap: str) -> None:
    numbers = [number * 7919 % 100_003 - 5 for number in range(size)]
    numbers[1], numbers[-1] = 2.5, None  # type: ignore[call-overload]
    text = json.dumps({"a": numbers, "b": [numbers], "c": "[1,2" * 10}, separators=("," + gap, ":"))
    assert parse(text.encode(), OPTIONS) == json.loads(text)


@pytest.mark.parametrize("around", ['{"a": [1%s]}', '{"a": [%s1]}', '{"a": [1%s1]}', '{"a": [1,%s]}', '{"a": [%s]}'])
@pytest.mark.parametrize(
    "middle",
    ["," * 300_000, ",1" * 150_000, ",1" * 150_000 + ",", "1," * 150_000 + " \n ", ",,1" * 99_000, "1 1," * 80_000],
)
def test_item_7_a_value_that_is_missing_in_a_long_list_is_found(around: str, middle: str) -> None:
    for text in (around.replace("%s", middle), around.replace("%s", " " * 300_000)):
        try:
            value = json.loads(text)
        except ValueError:
            with pytest.raises(ValueError, match=r"."):
                parse(text.encode(), OPTIONS)
        else:
            assert parse(text.encode(), OPTIONS) == value


@given(value=VALUES, name=TEXT, around=st.sampled_from(["%s", "[%s]", '{"x": %s}', '[1, {"a": "\\"{"}, %s]']))
def test_item_7_a_name_that_is_given_twice_is_found_anywhere(value: Any, name: str, around: str) -> None:
    key, inner = json.dumps(name), json.dumps(value)
    text = around.replace("%s", f"{{{key}: 1, {key}: {inner}}}")
    with pytest.raises(ValueError, match="given twice"):
        parse(text.encode(), OPTIONS)


@given(value=VALUES.map(lambda value: [value, *([[]] * 20)]))  # so many that its strings are few
def test_item_7_arrays_and_objects_are_counted(value: Any) -> None:
    def count(each: Any) -> int:
        inner = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        return isinstance(each, dict | list) + sum(map(count, inner))

    strict = OPTIONS.model_copy(update={"max_json_containers": count(value)})
    assert parse(json.dumps(value).encode(), strict) == value
    with pytest.raises(ValueError, match="arrays and objects"):
        parse(json.dumps(value).encode(), strict.model_copy(update={"max_json_containers": count(value) - 1}))


@pytest.mark.parametrize(
    ("path", "field", "item"),
    [
        ("/v1/completions", "prompt", [1]),
        ("/v1/embeddings", "input", [1]),
        ("/v1/completions", "stop", "a"),
        ("/v1/chat/completions", "documents", {}),
        ("/v1/chat/completions", "messages", {"role": "user", "content": "a"}),
    ],
)
async def test_item_7_many_small_objects_are_refused_by_the_name_of_their_field(
    serve: Serve, path: str, field: str, item: object
) -> None:
    answer = await serve().post(path, {"user": "[[[", field: [item] * (140_000 if item == "a" else 40_000)})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert answer.json()["error"]["code"] == "limit_exceeded"


async def share_of_the_loop(run: Callable[[], Any]) -> float:
    """How much of the computing that a request takes is done by the event loop's thread. No clock on the wall.

    Python's collector would look at whatever other tests have left, in whichever thread it comes to run.
    """
    gc.collect()
    gc.disable()
    try:
        loop, everything = time.thread_time(), time.process_time()
        await run()
        return (time.thread_time() - loop) / (time.process_time() - everything)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [1] * 500_000}),
        ("/v1/completions", {"prompt": ["a"] * 120_000}),
        ("/v1/completions", {"prompt": "a", "stop": ["a"] * 120_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", "name": "b"}] * 2000}),
        ("/detokenize", {"tokens": [65] * 400_000}),
    ],
    ids=["token ids", "texts", "stop strings", "messages", "detokenize"],
)
async def test_item_7_large_bodies_are_read_beside_the_loop(serve: Serve, path: str, body: dict[str, Any]) -> None:
    server = serve(access_log=False)
    await server.post(path, {**body, **{name: value[:1] for name, value in body.items() if len(value) > 1}})
    call = Call(server.app, path, pieces=[json.dumps(body).encode()])
    share = await share_of_the_loop(call.run)
    assert share < 0.5
    assert call.status in (200, 400)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt_logprobs": 20}),
        ("/v1/completions", {"prompt_logprobs": 20, "stream": True}),
        ("/v1/completions", {"echo": True, "logprobs": 20, "n": 2}),
        ("/v1/chat/completions", {"prompt_logprobs": 20}),
        ("/tokenize", {"return_token_strs": True}),
        ("/v1/embeddings", {}),
    ],
)
async def test_item_7_large_answers_are_written_beside_the_loop(
    serve: Serve, tokenizer: PreTrainedTokenizerFast, path: str, body: dict[str, Any]
) -> None:
    engine = FakeEngine(tokenizer, max_model_len=8192)
    server = serve(engine, access_log=False)
    text: dict[str, Any] = {"prompt": "a" * 4000, "max_tokens": 1}
    if path == "/tokenize":
        text = {"prompt": "ab" * 200_000}
    elif path == "/v1/embeddings":
        text, engine.width = {"input": ["a"] * 32}, 4096
    elif path == "/v1/chat/completions":
        text = {"messages": [{"role": "user", "content": "a" * 4000}], "max_tokens": 1}
    await Call(server.app, path, {**text, **body}).run()  # the first one makes what is kept
    call = Call(server.app, path, {**text, **body})
    share = await share_of_the_loop(call.run)
    assert call.status == 200
    assert len(call.text) > 500_000
    assert share < 0.5


async def test_item_7_log_probabilities_of_a_prompt_are_the_same_for_each_answer(
    serve: Serve, tokenizer: PreTrainedTokenizerFast
) -> None:
    server = serve(FakeEngine(tokenizer, max_model_len=8192))
    long, short = "a" * 1500, "a" * 5  # written beside the loop, and on it
    for prompt in (long, short):
        body = {"prompt": prompt, "prompt_logprobs": 2, "n": 2, "max_tokens": 2}
        found = (await server.post("/v1/completions", body)).json()["choices"]
        entries = found[0]["prompt_logprobs"]
        assert entries == found[1]["prompt_logprobs"]
        assert entries[0] is None
        assert len(entries) == len(prompt)
        assert entries[1] == {
            "64": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
            "65": {"logprob": -2.0, "rank": 2, "decoded_token": "b"},
        }


async def test_item_7_big_jobs_run_one_at_a_time_and_keys_take_turns() -> None:
    jobs, order, inside = BigJobs("jobs", 8), [], []
    queued = threading.Event()

    def work(name: str) -> None:
        assert queued.wait(PATIENCE)
        inside.append(name)
        assert len(inside) == 1
        order.append(name)
        inside.pop()

    async def ask(key: int, name: str) -> None:
        CALLER.set(key)
        await jobs.run(work, name)

    names = [(1, "a1"), (1, "a2"), (1, "a3"), (1, "a4"), (2, "b1"), (2, "b2"), (3, "c1")]
    asked = [asyncio.create_task(ask(*each)) for each in names]
    await asyncio.sleep(0)
    queued.set()
    await asyncio.gather(*asked)
    assert order == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]
    jobs.close()


async def test_item_7_too_many_big_jobs_of_a_key_are_refused_and_those_that_leave_make_room() -> None:
    jobs, go = BigJobs("big things", 1), asyncio.Event()
    loop = asyncio.get_running_loop()

    def work() -> None:
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result()

    first, second = asyncio.create_task(jobs.run(work)), asyncio.create_task(jobs.run(int))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="1 big things are waiting"):
        await jobs.run(int)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    third = asyncio.create_task(jobs.run(int))
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(first, third)
    assert await jobs.run(str, 5) == "5"
    jobs.close()
