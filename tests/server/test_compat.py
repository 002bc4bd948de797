"""Items 20 and 21: what other clients send beside the question is accepted, unless it would change the answer."""

from typing import Any

import pytest

from tests.server.conftest import Serve
from tests.server.test_openai_client import ECHOED, NEUTRAL, NEUTRAL_IN_CHAT

pytestmark = pytest.mark.anyio
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}
KNOWN_NULLS = (
    "function_call",
    "functions",
    "audio",
    "prediction",
    "web_search_options",
    "logits_processors",
    "moderation",
)


def chat(*history: Any, **fields: Any) -> dict[str, Any]:
    """A conversation that goes on after some history."""
    return {"messages": [USER, *history, USER], **fields}


@pytest.mark.parametrize("name", sorted(ECHOED.keys() - {"role", "content"}))
async def test_item_20_history_with_fields_of_answers(serve: Serve, name: str) -> None:
    server = serve()
    plain, echoed = ({"role": "assistant", "content": "a"}, {"role": "assistant", "content": "a", name: ECHOED[name]})
    for message in (plain, echoed):
        assert (await server.post(CHAT, chat(message))).status_code == 200
    first, second = (request.prompt_token_ids for request in server.engine.requests)
    assert first == second


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "a", "refusal": "no"}, "messages[1].refusal"),
        ({"role": "user", "content": "a", "reasoning": "r"}, "messages[1].reasoning"),
        ({"role": "assistant", "content": "a", "audio": {"id": "x"}}, "messages[1].audio"),
        ({"role": "assistant", "content": "a", "function_call": {"name": "f"}}, "messages[1].function_call"),
        ({"role": "assistant", "content": "a", "surprise": 1}, "messages[1].surprise"),
        ({"role": "assistant", "content": [{"type": "image_url", "image_url": "x"}]}, "messages[1].content"),
    ],
)
async def test_item_20_history_that_would_change_the_answer_is_refused(
    serve: Serve, message: dict[str, Any], param: str
) -> None:
    answer = await serve().post(CHAT, chat(message))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_item_20_our_own_answers_come_back(serve: Serve) -> None:
    server = serve()
    message = (await server.post(CHAT, chat())).json()["choices"][0]["message"]
    litellm = {**message, "provider_specific_fields": {"refusal": None}, "function_call": None, "tool_calls": None}
    for each in (message, litellm):
        assert (await server.post(CHAT, chat(each))).status_code == 200


@pytest.mark.parametrize("name", [*NEUTRAL, *NEUTRAL_IN_CHAT])
async def test_item_21_neutral_values_and_strict_fields(serve: Serve, name: str) -> None:
    body = chat(**{name: {**NEUTRAL, **NEUTRAL_IN_CHAT}[name]})
    assert (await serve().post(CHAT, body)).status_code == 200
    refused = await serve(strict_fields=True).post(CHAT, body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, name), refused.text


async def test_item_21_strict_fields_holds_for_messages_and_long_bodies(serve: Serve) -> None:
    server = serve(strict_fields=True)
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    long = {"role": "user", "content": "a" * 50_000}  # parsed in a thread
    for body, param in (
        (chat({"role": "assistant", "content": "a", "id": "x"}), "messages[1].id"),
        (chat({"role": "user", "content": [part]}), "messages[1].content"),
        (chat(long, metadata={}), "metadata"),
        (chat(long), "messages"),  # too long for the model
    ):
        assert (await server.post(CHAT, body)).json()["error"]["param"] == param
    assert (await server.post(CHAT, chat(store=None))).status_code == 200


async def test_item_21_null_is_no_value_for_anything_known(serve: Serve) -> None:
    server = serve()
    nulls = dict.fromkeys([*NEUTRAL, *NEUTRAL_IN_CHAT, *KNOWN_NULLS, "temperature", "tools", "stream_options"])
    assert (await server.post(CHAT, chat(**nulls))).status_code == 200
    streamed = {"stream": True, "stream_options": {"include_usage": None, "continuous_usage_stats": None}}
    assert (await server.post(COMPLETIONS, {"prompt": "a", "suffix": None, **streamed})).status_code == 200
    embedding = {"input": "a", "encoding_format": None, "pooling": None, "normalize": None, "dimensions": None}
    assert (await server.post("/v1/embeddings", embedding)).status_code == 200
    unknown = await server.post(CHAT, chat(a_field_of_tomorrow=None))
    assert unknown.json()["error"]["param"] == "a_field_of_tomorrow"
    missing = await server.post(CHAT, {"messages": None})
    assert missing.json()["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({"reasoning_effort": "low"}, "low/True/"),
        ({"reasoning_effort": "none"}, "none/False/"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "none/True/"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "low/True/"),
        ({"verbosity": "high"}, "//high"),
    ],
)
async def test_item_21_hints_go_to_the_template(serve: Serve, fields: dict[str, Any], seen: str) -> None:
    template = "{{ reasoning_effort }}/{{ enable_thinking }}/{{ verbosity }}"
    server = serve(chat_template=template)
    assert (await server.post(CHAT, chat(**fields, return_token_ids=True))).status_code == 200
    assert server.engine.tokenizer.decode(server.engine.requests[0].prompt_token_ids) == seen


async def test_item_21_a_prompt_cache_key_is_a_salt(serve: Serve) -> None:
    server = serve()
    for fields in ({"prompt_cache_key": "k"}, {"prompt_cache_key": "k", "cache_salt": "s"}, {}):
        await server.post(CHAT, chat(**fields))
    salts = [request.cache_salt for request in server.engine.requests]
    assert len(set(salts)) == 3
