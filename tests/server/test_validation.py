"""What is wrong with a request is said with the name of the field, before the engine hears of it."""

import gzip
import json
import math
import time
from collections.abc import Sequence
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from transformers import PreTrainedTokenizerFast

from outpace.server.engine import EngineRequest
from outpace.types import SamplingParams
from tests.server.asgi import Call
from tests.server.conftest import Serve
from tests.server.fake import FakeEngine

pytestmark = pytest.mark.anyio
ROUTES = ("/v1/completions", "/v1/chat/completions")


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    """A right body, and these fields."""
    start: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    return {**start, **fields}


WRONG: dict[str, list[Any]] = {
    "temperature": [-1, 101, "1", True, [], 10**400],
    "top_p": [0, -0.0, 1.5, "x"],
    "top_k": [-2, 2**31, 1.5],
    "min_p": [-0.1, 2],
    "n": [0, -1, 10**18, 1.5, True, "2"],
    "max_tokens": [0, -5, 2**31, 2**63, 1.5],
    "min_tokens": [-1, 17, 2**63],
    "seed": [2**64, -(2**63) - 1, 0.5],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-3, 3],
    "repetition_penalty": [0, -1, 1e300],
    "logit_bias": [{"x": 1}, {"-1": 1}, {"5": 101}, {"5": "1"}, {"257": 1}, {"9" * 11: 1}, []],
    "stop": ["", [""], [1], 5, {"a": 1}],
    "stop_token_ids": [[-1], [257], [2**31], [2**63], ["a"], 5],
    "allowed_token_ids": [[], [257], [-1]],
    "bad_words": [[""], "word", [1]],
    "stream": [1, "yes"],
    "prompt_logprobs": [-1, 21],
    "truncate_prompt_tokens": [0, -1],
    "cache_salt": ["", 5, "s" * 257],
    "priority": [2**31, "high"],
    "user": [5, "u" * 257],
    "stream_options": [{"include_usage": True}, {"x": 1}, 5],
    "spaces_between_special_tokens": [False],
    "best_of": [2, 0, "1"],
    "length_penalty": [0.5, 1.5, "1"],
    "early_stopping": [True, "never"],
    "store": [True, 0],
    "metadata": ["x", []],
    "service_tier": ["flex", "priority", True],
    "safety_identifier": [5, "u" * 257],
    "prompt_cache_key": [5, "u" * 257],
    "prompt_cache_retention": ["forever"],
    "prompt_embeds": ["AAAA"],
    "use_beam_search": [True],
    "response_format": [{"type": "regex"}, {"type": "json_schema"}, {"type": "text", "json_schema": {}}, "json_object"],
    "structured_outputs": [{}, {"regex": 5}, {"regex": "a", "json_object": True}, {"no_such": "a"}, "a"],
    "guided_json": [5, "{"],
    "guided_regex": ["(", 5],
    "guided_choice": [[], [""], "a"],
    "guided_grammar": ["nonsense", 5],
    "a_field_of_tomorrow": [None, 1],
}


@pytest.mark.parametrize("path", ROUTES)
async def test_b4_every_wrong_value_is_named(serve: Serve, path: str) -> None:
    server = serve(access_log=False)
    async with server.http() as client:
        for name, value in ((name, value) for name, values in WRONG.items() for value in values):
            fields = {"max_tokens": 16, name: value} if name == "min_tokens" else {name: value}
            answer = await client.post(path, json=body_of(path, **fields))
            error = answer.json()["error"]
            assert answer.status_code == 400, (name, value, answer.text)
            assert str(error["param"]).startswith(name), (name, value, error)
            assert name in error["message"]
            assert error["type"] == "invalid_request_error"
    assert server.engine.requests == []


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "repetition_penalty", "max_tokens"])
async def test_b4_numbers_that_are_none(serve: Serve, literal: str, field: str) -> None:
    call = Call(serve().app, "/v1/completions", pieces=[f'{{"prompt": "a", "{field}": {literal}}}'.encode()])
    await call.run()
    assert call.status == 400, call.text
    error = json.loads(call.text)["error"]
    assert (error["param"], error["code"]) == (field, "invalid_value")
    wrong = "is not JSON; use a finite number" if "N" in literal or "I" in literal else "is out of range"
    assert error["message"] == f"{field}: {literal} {wrong}"


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ('{"prompt": "NaN", "logit_bias": {"5": NaN}}', "logit_bias", "logit_bias: NaN is not JSON"),
        ('{"prompt": [1, 1e999]}', "prompt", "prompt: 1e999 is out of range"),
        (
            f'{{"prompt": "a", "seed": {"1" * 5000}}}',
            "seed",
            f"seed: {'1' * 20}... (5000 characters) is out of range",
        ),
        ("[NaN]", None, "The body is not valid JSON: NaN is not JSON"),
        ('{"\\ud800": NaN}', None, "The body is not valid JSON: NaN is not JSON"),
        ('{"prompt": "a", "n": NaN', None, "The body is not valid JSON: JSON is malformed"),
        (f'{{"prompt": "{"a" * 300_000}", "n": NaN}}', "n", "n: NaN is not JSON"),
    ],
    ids=range(7),
)
async def test_b4_odd_numbers_are_named_with_their_field(serve: Serve, body: str, param: str | None, said: str) -> None:
    call = Call(serve().app, "/v1/completions", pieces=[body.encode()])
    await call.run()
    error = json.loads(call.text)["error"]
    assert (call.status, error["param"]) == (400, param)
    assert error["message"].startswith(said)


async def test_a_compressed_body_is_refused_by_its_header(serve: Serve) -> None:
    packed = gzip.compress(b'{"prompt": "a"}')
    call = Call(serve().app, "/v1/completions", pieces=[packed], headers={"content-encoding": "gzip"})
    await call.run()
    assert call.status == 415
    assert "Content-Encoding: gzip is not supported" in call.text
    plain = Call(serve().app, "/v1/completions", body={"prompt": "a"}, headers={"content-encoding": "identity"})
    await plain.run()
    assert plain.status == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"functions": []}, "functions"),
        ({"store": True}, "store"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"verbosity": "chatty"}, "verbosity"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"echo": True}, "echo"),
        ({"include_reasoning": False}, "include_reasoning"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools[0].function.strict"),
        ({"tools": [{"type": "browser"}]}, "tools[0].type"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
async def test_fields_of_chats_alone(serve: Serve, fields: dict[str, Any], param: str) -> None:
    answer = await serve().post("/v1/chat/completions", body_of("chat", **fields))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], [""], None, 5, {"a": 1}, [1, "a"], [[1], "a"], [-1], [257], [2**63], [1.5], [True]]
)
async def test_b2_b5_wrong_prompts(serve: Serve, prompt: Any) -> None:
    server = serve()
    answer = await server.post("/v1/completions", {"prompt": prompt})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert server.engine.requests == []


async def test_missing_prompt_and_suffix(serve: Serve) -> None:
    missing = (await serve().post("/v1/completions", {})).json()["error"]
    assert (missing["param"], missing["code"]) == ("prompt", "missing_required_parameter")
    suffix = (await serve().post("/v1/completions", {"prompt": "a", "suffix": "b"})).json()["error"]
    assert suffix["param"] == "suffix"


@pytest.mark.parametrize(("length", "new", "fits"), [(1, 1, True), (511, 1, True), (512, 1, False), (500, 13, False)])
async def test_b5_context_length(serve: Serve, length: int, new: int, fits: bool) -> None:
    answer = await serve().post("/v1/completions", {"prompt": "a" * length, "max_tokens": new})
    assert (answer.status_code == 200) == fits
    if not fits:
        assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        ("/v1/completions", {"prompt": "a" * 513, "max_tokens": 2}, "requested 515 tokens (513 in the prompt, 2 in"),
        ("/v1/completions", {"prompt": "a" * 513, "max_tokens": 7, "echo": True}, "(513 in the prompt, 7 in"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a" * 512}], "max_tokens": 3},
            "(528 in the messages, 3 in the completion)",
        ),
    ],
)
async def test_b5_the_error_of_length_has_the_numbers_of_the_request(
    serve: Serve, path: str, fields: dict[str, Any], said: str
) -> None:
    error = (await serve().post(path, fields)).json()["error"]
    assert said in error["message"]
    assert error["param"] in fields


async def test_small_mistakes_are_said_in_the_words_of_the_caller(serve: Serve) -> None:
    async def said(path: str, **fields: Any) -> str:
        return str((await serve().post(path, body_of(path, **fields))).json()["error"]["message"])

    completions, chat = ROUTES
    assert await said(completions, temprature=0) == "temprature: unknown field; did you mean temperature?"
    assert await said(chat, max_new_tokens=5) == "max_new_tokens: unknown field; did you mean max_tokens?"
    assert await said(completions, qqq=1) == "qqq: unknown field; it is refused so that nothing is silently ignored"
    every = "-1 is the whole vocabulary (257 tokens); this server takes at most 20 (its option --max-logprobs)"
    assert await said(completions, logprobs=-1) == f"logprobs: {every}"
    assert await said(chat, logprobs=True, top_logprobs=-1) == f"top_logprobs: {every}"
    many = "21 is too many; this server takes at most 20 (its option --max-logprobs)"
    assert await said(completions, prompt_logprobs=21) == f"prompt_logprobs: {many}"
    assert await said(chat, messages=[]) == "messages: list should have at least 1 item, not 0"


async def test_context_length_of_a_chat(openai: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        await openai.chat.completions.create(model="fake", messages=[{"role": "user", "content": "a" * 512}])
    assert caught.value.code == "context_length_exceeded"


async def test_an_unknown_model_is_not_found(openai: AsyncOpenAI) -> None:
    with pytest.raises(NotFoundError) as caught:
        await openai.completions.create(model="gpt-9", prompt="a")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("text", ["\0", "a\0b", "‮rtl", "👨‍👩‍👧‍👦", "\ufeff", "<|end|>", " ", "\r\n\t"])
async def test_b5_odd_texts_are_answered(serve: Serve, text: str) -> None:
    server = serve()
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        assert (await server.post(path, body)).status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"prompt": "a"',
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "a", "stream_options": {"x": 1, "x": 2}}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "logit_bias": {"\\udc00": 1}}',
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 100 + b"1" + b"]" * 100 + b"}",
        b'{"a":' * 50_000,
        b"{" + b",".join(b'"k%d":1' % number for number in range(5000)) + b"}",
        b'{"prompt": "a", "n": ' + b"9" * 10_000 + b"}",
    ],
    ids=range(14),
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/tokenize", "/mii/fake"])
async def test_b6_bodies_that_are_not_json_objects(serve: Serve, data: bytes, path: str) -> None:
    call = Call(serve().app, path, pieces=[data])
    begin = time.process_time()
    await call.run()
    assert call.status == 400, call.text
    assert time.process_time() - begin < 10


async def test_b6_a_million_numbers(serve: Serve) -> None:
    data = b'{"prompt": [' + b",".join([b"1"] * 1_000_000) + b"]}"
    call = Call(serve().app, "/v1/completions", pieces=[data])
    begin = time.process_time()
    await call.run()
    assert call.status == 400
    assert "context_length_exceeded" in call.text
    assert time.process_time() - begin < 2


async def test_b6_many_wrong_things_cost_one_error(serve: Serve) -> None:
    messages = b",".join([b'{"a":1,"b":2,"c":3}'] * 50_000)
    app = serve(max_messages=50_000, max_json_containers=2**17).app
    call = Call(app, "/v1/chat/completions", pieces=[b'{"messages": [' + messages + b"]}"])
    begin = time.process_time()
    await call.run()
    assert call.status == 400
    assert "messages[0].a" in call.text
    assert time.process_time() - begin < 2


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_other_sites_cannot_post_through_a_browser(serve: Serve, kind: str) -> None:
    call = Call(serve().app, "/v1/completions", {"prompt": "a"}, headers={"content-type": kind})
    await call.run()
    assert call.status == 415


@pytest.mark.parametrize("value", [math.inf, math.nan])
async def test_what_json_cannot_say_never_reaches_an_answer(serve: Serve, value: float) -> None:
    server = serve()
    vectors = [[value, 1.0]]

    async def embed(requests: Sequence[EngineRequest]) -> list[list[float]]:
        return vectors

    server.engine.embed = embed  # type: ignore[method-assign]
    answer = await server.post("/v1/embeddings", {"input": "a"})
    assert answer.status_code == 500


async def test_item_17_the_server_takes_the_values_of_the_model(
    serve: Serve, tokenizer: PreTrainedTokenizerFast
) -> None:
    values: dict[str, int | float] = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 7}
    server = serve(FakeEngine(tokenizer, sampling=values))
    for path in reversed(ROUTES):
        assert (await server.post(path, body_of(path))).status_code == 200
        explicit = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0.5, "max_tokens": 9}
        assert (await server.post(path, body_of(path, **explicit))).status_code == 200
    params = [request.params for request in server.engine.requests]
    usual = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, max_tokens=7)
    asked = SamplingParams(temperature=1, top_p=1, top_k=0, min_p=0.5, max_tokens=9)
    assert params[0] == usual
    assert params[2].max_tokens == 16  # that is the default of /v1/completions, as with OpenAI and vLLM
    assert params[1] == params[3] == asked
    assert (await server.get("/status")).json()["sampling"] == values
