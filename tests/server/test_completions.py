"""/v1/completions: what comes back, plain and streamed."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI
from pydantic import TypeAdapter
from transformers import PreTrainedTokenizerFast

from outpace.server.responses import Completion
from tests.server.conftest import Serve, Served
from tests.server.fake import FakeEngine, says

pytestmark = pytest.mark.anyio
TEXT = "Hello, wörld! 😀"


def events(text: str) -> list[Any]:
    """The chunks of a stream; [DONE] must be the last thing in it."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_plain_answer_through_the_openai_client(openai: AsyncOpenAI) -> None:
    answer = await openai.completions.create(model="fake", prompt="Say", max_tokens=64)
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 20, 23)
    assert answer.object == "text_completion"


async def test_default_length_is_16(openai: AsyncOpenAI) -> None:
    answer = await openai.completions.create(model="fake", prompt="Say")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


async def test_stream_through_the_openai_client(openai: AsyncOpenAI) -> None:
    stream = await openai.completions.create(
        model="fake", prompt="Say", max_tokens=64, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == TEXT
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20


async def test_several_prompts_with_several_answers(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    engine = FakeEngine(tokenizer, lambda request, index: f"{tokenizer.decode(request.prompt_token_ids)}{index}")
    answer = (await serve(engine).post("/v1/completions", {"prompt": ["a", "bc"], "n": 2})).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(
        enumerate(["a0", "a1", "bc0", "bc1"])
    )
    usage = answer["usage"]
    assert [usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")] == [3, 3 + 3 + 4 + 4, 17]


@pytest.mark.parametrize("prompt", [[64, 65], [[64, 65]]])
async def test_prompts_of_token_ids(serve: Serve, prompt: Any) -> None:
    server = serve()
    assert (await server.post("/v1/completions", {"prompt": prompt})).status_code == 200
    assert server.engine.requests[0].prompt_token_ids == [64, 65]


async def test_echo_and_logprobs(serve: Serve) -> None:
    body = {"prompt": "ab", "max_tokens": 2, "echo": True, "logprobs": 2}
    choice = (await serve().post("/v1/completions", body)).json()["choices"][0]
    assert choice["text"] == "abHe"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "H", "e"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["top_logprobs"][0] is None
    assert set(logprobs["top_logprobs"][2]) == {"H", "I"}


async def test_token_ids_and_prompt_logprobs(serve: Serve) -> None:
    body = {"prompt": "ab", "max_tokens": 1, "return_token_ids": True, "prompt_logprobs": 1, "logprobs": 0}
    body["return_tokens_as_token_ids"] = True
    choice = (await serve().post("/v1/completions", body)).json()["choices"][0]
    assert choice["prompt_token_ids"] == [64, 65]
    assert choice["token_ids"] == [39]
    assert choice["logprobs"]["tokens"] == ["token_id:39"]
    assert choice["prompt_logprobs"] == [None, {"65": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}]


@pytest.mark.parametrize("tokens_per_delta", [1, 3, 50])
@pytest.mark.parametrize("include", [False, True])
async def test_stop_strings_end_the_answer_and_the_engine(
    serve: Serve, tokenizer: PreTrainedTokenizerFast, tokens_per_delta: int, include: bool
) -> None:
    engine = FakeEngine(tokenizer, tokens_per_delta=tokens_per_delta)
    body = {"prompt": "a", "max_tokens": 64, "stop": ["never", "wö"], "include_stop_str_in_output": include}
    answer = (await serve(engine).post("/v1/completions", body)).json()
    choice = answer["choices"][0]
    assert choice["text"] == ("Hello, wö" if include else "Hello, ")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "wö")
    assert answer["usage"]["completion_tokens"] == 10
    assert engine.open == set()
    assert bool(engine.closed_early) == (tokens_per_delta < 50)


async def test_parameters_reach_the_engine(serve: Serve) -> None:
    server = serve(allow_priority=True)
    asked = {"prompt": "a", "n": 2, "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "seed": 3, "top_k": -1}
    penalties = {"presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1, "logit_bias": {"5": 1}}
    ends = {
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [9],
        "allowed_token_ids": [1, 2],
        "bad_words": ["zz"],
    }
    others = {"min_p": 0.1, "priority": 4, "cache_salt": "s", "skip_special_tokens": False, "logprobs": 3}
    body = asked | penalties | ends | others
    assert (await server.post("/v1/completions", body)).status_code == 200
    sent = server.engine.requests[0]
    params = sent.params
    assert (params.n, params.max_tokens, params.temperature, params.top_p, params.seed, params.top_k) == (
        *(2, 7, 0.5, 0.9, 3, 0),
    )
    assert (params.presence_penalty, params.frequency_penalty, params.logit_bias) == (0.1, 0.2, ((5, 1.0),))
    assert (params.min_p, params.min_tokens, params.repetition_penalty, params.ignore_eos) == (0.1, 2, 1.1, True)
    assert (params.stop_token_ids, params.allowed_token_ids, params.logprobs) == ((9,), (1, 2), 3)
    assert (sent.priority, sent.cache_salt, len(sent.bad_words)) == (4, "s", 2)


async def test_truncated_prompt(serve: Serve) -> None:
    server = serve()
    await server.post("/v1/completions", {"prompt": "abc", "truncate_prompt_tokens": 2})
    assert server.engine.requests[0].prompt_token_ids == [65, 66]


async def test_concurrent_requests_have_ids_of_their_own(serve: Serve) -> None:
    server = serve(FakeEngine(serve().engine.tokenizer, says("x")), access_log=False)
    async with server.http() as client:
        for _ in range(20):
            calls = [client.post("/v1/completions", json={"prompt": "a"}) for _ in range(10)]
            assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}
    names = [request.request_id for request in server.engine.requests]
    assert len(set(names)) == len(names) == 200


OPTIONS = st.fixed_dictionaries(
    {
        "prompt": st.one_of(
            st.text(min_size=1, max_size=5), st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3)
        ),
        "max_tokens": st.integers(1, 30),
        "n": st.integers(1, 3),
    },
    optional={
        "echo": st.booleans(),
        "logprobs": st.integers(0, 3),
        "stop": st.lists(st.text("abé😀 \n", min_size=1, max_size=3), max_size=3),
        "include_stop_str_in_output": st.booleans(),
        "return_token_ids": st.booleans(),
        "prompt_logprobs": st.integers(0, 2),
    },
)


@pytest.fixture
def server(serve: Serve) -> Served:
    return serve()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=OPTIONS, speech=st.text("abé😀 \n", max_size=20), size=st.integers(1, 5), continuous=st.booleans())
def test_n2_a_stream_is_the_plain_answer_in_pieces(
    server: Served, body: dict[str, Any], speech: str, size: int, continuous: bool
) -> None:
    server.engine.speech = lambda request, index: speech[index:] + speech[:index]
    server.engine.tokens_per_delta = size

    async def both() -> tuple[Any, list[Any]]:
        plain = await server.post("/v1/completions", body)
        options = {"include_usage": True, "continuous_usage_stats": continuous}
        streamed = await server.post("/v1/completions", {**body, "stream": True, "stream_options": options})
        assert plain.status_code == streamed.status_code == 200, plain.text
        return plain.json(), events(streamed.text)

    plain, chunks = asyncio.run(both())
    TypeAdapter(Completion).validate_python(plain)
    for chunk in chunks:
        TypeAdapter(Completion).validate_python(chunk)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == plain["usage"]
    assert plain["usage"]["total_tokens"] == plain["usage"]["prompt_tokens"] + plain["usage"]["completion_tokens"]
    assert all((chunk["usage"] is not None) == continuous for chunk in chunks[:-1])
    for choice in plain["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
        assert parts[-1]["finish_reason"] is not None
        assert parts[-1]["stop_reason"] == choice["stop_reason"]
        if choice["logprobs"] is not None:
            for name, values in choice["logprobs"].items():
                assert [value for part in parts for value in part["logprobs"][name]] == values
        if choice["token_ids"] is not None:
            assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
    assert server.engine.open == set()
