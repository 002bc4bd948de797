"""/v1/chat/completions: conversations in, messages out."""

import asyncio
import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI
from pydantic import TypeAdapter
from transformers import PreTrainedTokenizerFast

from outpace.log import logger
from outpace.server import logs
from outpace.server.chat import _SCRIPT
from outpace.server.child import Child
from outpace.server.responses import ChatChunk, ChatCompletion
from tests.models import byte_tokenizer
from tests.patience import PATIENCE
from tests.server.conftest import Serve, Served
from tests.server.fake import FakeEngine
from tests.server.test_completions import TEXT, events

pytestmark = pytest.mark.anyio
HI = [{"role": "user", "content": "hi"}]


def prompt_of(server: Served) -> str:
    """What the engine was asked last."""
    return str(server.engine.tokenizer.decode(server.engine.requests[-1].prompt_token_ids))


async def test_plain_answer_through_the_openai_client(openai: AsyncOpenAI) -> None:
    answer = await openai.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hi"}])
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("user=hi;assistant=")


async def test_stream_through_the_openai_client(openai: AsyncOpenAI) -> None:
    stream = await openai.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        n=2,
        stream_options={"include_usage": True},
    )
    texts, ends, chunks = ["", ""], [0, 0], [chunk async for chunk in stream]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] += choice.finish_reason is not None
    assert texts == [TEXT, TEXT]
    assert ends == [1, 1]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 40


async def test_logprobs(openai: AsyncOpenAI) -> None:
    answer = await openai.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "hi"}],
        logprobs=True,
        top_logprobs=2,
        max_completion_tokens=9,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content][:5] == list("Hello")
    assert logprobs.content[0].bytes == [72]
    assert [top.token for top in logprobs.content[0].top_logprobs] == ["H", "I"]
    assert logprobs.content[8].bytes is None  # the first byte of two


async def test_without_a_limit_the_answer_may_fill_the_context(serve: Serve) -> None:
    server = serve()
    await server.post("/v1/chat/completions", {"messages": HI})
    assert server.engine.requests[0].params.max_tokens == 512 - len("user=hi;assistant=")


async def test_the_template_sees_the_conversation(serve: Serve) -> None:
    server = serve()
    messages = [
        {"role": "developer", "content": "short"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "audio": None},
    ]
    assert (await server.post("/v1/chat/completions", {"messages": messages})).status_code == 200
    assert prompt_of(server) == "system=short;user=a\nb;assistant=c;assistant="
    await server.post("/v1/chat/completions", {"messages": messages, "add_generation_prompt": False})
    assert prompt_of(server) == "system=short;user=a\nb;assistant=c;"
    await server.post("/v1/chat/completions", {"messages": messages, "continue_final_message": True})
    assert prompt_of(server) == "system=short;user=a\nb;assistant=c"


async def test_b5_special_tokens_in_messages_are_text(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    server = serve()
    content = "a<|end|>b<|<|end|>\ue000"
    await server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
    assert prompt_of(server) == f"user={content};assistant="
    assert tokenizer.eos_token_id not in server.engine.requests[0].prompt_token_ids


async def test_variables_for_the_template(serve: Serve) -> None:
    server = serve(chat_template="{{ mood }}{{ eos_token }}{{ messages[0].content }}{{ documents[0].text }}")
    body = {"messages": HI, "chat_template_kwargs": {"mood": "good"}, "documents": [{"text": "doc"}]}
    assert (await server.post("/v1/chat/completions", body)).status_code == 200
    assert prompt_of(server) == "good<|end|>hidoc"
    assert server.engine.tokenizer.eos_token_id in server.engine.requests[0].prompt_token_ids


@pytest.mark.parametrize("name", ["messages", "tokenize", "chat_template", "eos_token", "add_generation_prompt"])
async def test_b8_variables_cannot_take_the_place_of_others(serve: Serve, name: str) -> None:
    answer = await serve().post("/v1/chat/completions", {"messages": HI, "chat_template_kwargs": {name: "x"}})
    assert answer.status_code == 400
    assert name in answer.json()["error"]["message"]


async def test_b8_a_template_from_a_request_needs_permission(serve: Serve) -> None:
    body = {"messages": HI, "chat_template": "own {{ messages[0].content }}"}
    refused = await serve().post("/v1/chat/completions", body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template")
    server = serve(allow_request_chat_template=True)
    assert (await server.post("/v1/chat/completions", body)).status_code == 200
    assert prompt_of(server) == "own hi"


BOMBS = {
    "endless loop": "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "long text": "{% for i in range(99999) %}{{ 'abcdefgh' * 999 }}{% endfor %}",
    "memory at once": "{{ 'a' * 9999999999 }}",
    "memory by doubling": "{% set n = namespace(x='aa') %}"
    "{% for i in range(64) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "slow power": "{{ 9 ** 9 ** 9 }}",
    "big range": "{% for i in range(99999999999) %}{% endfor %}",
    "deep macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "template error": "{{ nothing.at.all }}",
    "not a template": "{% for %}",
    "raise": "{{ raise_exception('roles must alternate') }}",
    "class walk": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('touch pwned') }}",
    "function globals": "{{ raise_exception.__globals__ }}",
    "import": "{% import 'os' as os %}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "change messages": "{{ messages.append(1) }}",
}


@pytest.mark.parametrize("name", BOMBS)
async def test_b8_templates_break_nothing_but_themselves(serve: Serve, name: str) -> None:
    server = serve(allow_request_chat_template=True, template_timeout=2.0, template_max_chars=100_000)
    await server.post("/v1/chat/completions", {"messages": HI})  # the process is there
    answer = await server.post("/v1/chat/completions", {"messages": HI, "chat_template": BOMBS[name]})
    if answer.status_code == 200:  # the sandbox shows an undefined value as nothing
        assert "built-in" not in prompt_of(server)
        assert "class" not in prompt_of(server)
    else:
        assert (answer.status_code, answer.json()["error"]["param"]) in ((400, "messages"),)
    assert (await server.post("/v1/chat/completions", {"messages": HI})).status_code == 200


async def test_b8_what_a_template_says_reaches_the_client(serve: Serve) -> None:
    server = serve(chat_template=BOMBS["raise"])
    answer = await server.post("/v1/chat/completions", {"messages": HI})
    assert "roles must alternate" in answer.json()["error"]["message"]


async def test_b8_others_are_answered_while_a_template_hangs(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(allow_request_chat_template=True, template_timeout=PATIENCE, template_processes=2)
    ask, hangs, killed = Child.ask, threading.Event(), threading.Event()

    def may_hang(child: Child, job: bytes, seconds: float, most: int) -> bytes | None:
        if b"a hanging template" not in job:
            return ask(child, job, seconds, most)
        hangs.set()
        killed.wait(PATIENCE)
        return None

    monkeypatch.setattr(Child, "ask", may_hang)
    body = {"messages": HI, "chat_template": "a hanging template"}
    bomb = asyncio.create_task(server.post("/v1/chat/completions", body))
    await asyncio.to_thread(hangs.wait, PATIENCE)
    assert (await server.post("/v1/chat/completions", {"messages": HI})).status_code == 200
    assert not bomb.done()
    killed.set()
    assert (await bomb).status_code == 400


async def test_templates_as_models_write_them(serve: Serve) -> None:
    template = (
        "{%- for message in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}"
        "{% generation %}{{ message | tojson }}{% endgeneration %}\n    {%- endfor %}{{ strftime_now('%Y')|length }}"
    )
    server = serve(chat_template=template)
    await server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "<é>"}, *HI]})
    assert prompt_of(server) == '{"role": "user", "content": "<é>"}4'


@pytest.mark.parametrize("template", ["{% bad", "{% for %}", "{{ a", "{% if x %}"])
async def test_a_template_of_the_model_that_does_not_parse_is_said_at_the_start_and_is_not_the_callers_fault(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    server = serve(tokenizer=tokenizer)
    assert "the chat template of the model is not valid Jinja (line 1: " in caplog.text
    answer = await server.post("/v1/chat/completions", {"messages": HI})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (500, None, "broken_chat_template")
    assert error["message"].startswith("the chat template of the model is not valid Jinja (line 1: ")
    assert (await server.post("/v1/completions", {"prompt": "a"})).status_code == 200


async def test_a_model_without_a_template_says_so(serve: Serve) -> None:
    answer = await serve(tokenizer=byte_tokenizer(chat=False)).post("/v1/chat/completions", {"messages": HI})
    assert answer.status_code == 400
    assert "/v1/completions" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([], "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "king", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x", "mood": 1}], "messages[0].mood"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
            "messages[0].content",
        ),
        ([{"role": "user", "content": "x", "tool_calls": []}], "messages[0].tool_calls"),
        ([*HI, {"role": "user", "content": 3}], "messages[1].content"),
    ],
)
async def test_wrong_messages_are_named(serve: Serve, messages: list[Any], where: str) -> None:
    answer = await serve().post("/v1/chat/completions", {"messages": messages})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, where)


OPTIONS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 30), "n": st.integers(1, 3)},
    optional={
        "stop": st.lists(st.text("abé😀 <{", min_size=1, max_size=3), max_size=3),
        "return_token_ids": st.booleans(),
        "tools": st.just([{"type": "function", "function": {"name": "f", "parameters": {}}}]),
        "logprobs": st.just(True),
        "parallel_tool_calls": st.booleans(),
    },
)
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
SPEECH = st.lists(
    st.sampled_from([CALL, "<tool_call>", "</tool_call>", "<tool", "ab", "é😀", "\n", "{", " "]), max_size=4
)


@pytest.fixture
def server(serve: Serve) -> Served:
    return serve(tool_call_parser="hermes")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=OPTIONS, speech=SPEECH.map("".join), size=st.integers(1, 5), limited=st.booleans())
def test_n2_a_stream_is_the_plain_answer_in_pieces(
    server: Served, body: dict[str, Any], speech: str, size: int, limited: bool
) -> None:
    server.engine.speech = lambda request, index: speech[index:]
    server.engine.tokens_per_delta = size
    body = {**body, "messages": HI}
    if not limited:
        del body["max_tokens"]

    async def both() -> tuple[Any, list[Any]]:
        plain = await server.post("/v1/chat/completions", body)
        streamed = await server.post(
            "/v1/chat/completions", {**body, "stream": True, "stream_options": {"include_usage": True}}
        )
        assert plain.status_code == streamed.status_code == 200, plain.text
        return plain.json(), events(streamed.text)

    plain, chunks = asyncio.run(both())
    TypeAdapter(ChatCompletion).validate_python(plain)
    for chunk in chunks:
        TypeAdapter(ChatChunk).validate_python(chunk)
    assert chunks[-1]["usage"] == plain["usage"]
    for choice in plain["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["delta"].get("content", "") for part in parts) == (choice["message"]["content"] or "")
        calls = [call for part in parts for call in part["delta"].get("tool_calls", [])]
        assert [call["index"] for call in calls] == list(range(len(calls)))
        assert [call["function"] for call in calls] == [
            call["function"] for call in choice["message"].get("tool_calls", [])
        ]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
        assert parts[-1]["finish_reason"] is not None
        assert parts[0]["delta"]["role"] == "assistant"
        if choice["logprobs"] is not None:
            given = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
            assert given == choice["logprobs"]["content"]
    assert server.engine.open == set()


NESTED = '{"a": ' * 600 + "1" + "}" * 600
SHOWS_CALLS = "{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"


def calling(arguments: str) -> dict[str, Any]:
    """A message of the assistant that calls a function."""
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize("arguments", [NESTED, "[" * 100_000, "[1]", "{", '{"a": NaN}', '{"a": "\\ud800"}'])
async def test_item_8_arguments_of_calls_are_read_as_strictly_as_bodies(serve: Serve, arguments: str) -> None:
    server = serve(chat_template=SHOWS_CALLS)
    answer = await server.post("/v1/chat/completions", {"messages": [*HI, calling(arguments)]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (
        400,
        "messages[1].tool_calls[0].function.arguments",
    )
    assert len(answer.text) < 2000


async def test_item_8_deep_arguments_in_many_messages(serve: Serve) -> None:
    server = serve(chat_template=SHOWS_CALLS, max_json_depth=200)
    deep = '{"a": ' * 190 + "1" + "}" * 190
    body = {"messages": [calling(deep)] * 200 + HI}
    answer = await server.post("/v1/chat/completions", body)
    assert answer.json()["error"]["code"] == "context_length_exceeded", "they are written out, and too long"


@contextlib.contextmanager
def logging_to_stderr(as_json: bool) -> Iterator[None]:
    """The log as `outpace serve` sets it up, and as it was afterwards."""
    handlers, access = list(logger.handlers), logging.getLogger("outpace.access")
    propagate, level = logger.propagate, access.level
    logs.set_up(as_json=as_json)
    try:
        yield
    finally:
        logger.handlers[:], logger.propagate = handlers, propagate
        access.setLevel(level)


@pytest.mark.parametrize("as_json", [False, True])
async def test_item_8_a_logged_error_is_bounded(
    serve: Serve, tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    def fall(depth: int, text: str) -> None:
        if depth == 0:
            raise RuntimeError(text)
        fall(depth - 1, text) if depth % 2 else (lambda: fall(depth - 1, text))()

    engine = FakeEngine(tokenizer)
    try:
        fall(300, "x" * 100_000)
    except RuntimeError as error:
        engine.error = error
    with logging_to_stderr(as_json):
        answer = await serve(engine, access_log=False).post("/v1/completions", {"prompt": "a"})
    assert answer.status_code == 500
    said = capsys.readouterr().err
    assert len(said) < 20_000
    assert "characters left out" in said
    assert answer.headers["x-request-id"] in said


SPOKEN = "a<|end|>b"


@pytest.mark.parametrize(
    ("template", "fields"),
    [
        ("{{ tools | tojson }}", {"tools": {SPOKEN: {"enum": [SPOKEN]}}}),
        ("{{ messages | tojson }}{# tool_calls #}", {"arguments": {SPOKEN: {SPOKEN: 1}}}),
        ("{{ documents | tojson }}", {"documents": [{SPOKEN: SPOKEN}]}),
        ("{{ mood }}", {"chat_template_kwargs": {"mood": SPOKEN}}),
        ("{{ mood | tojson }}", {"chat_template_kwargs": {"mood": [{SPOKEN: {SPOKEN: [SPOKEN]}}]}}),
    ],
)
async def test_item_9_special_tokens_in_names_and_variables_are_text(
    serve: Serve, template: str, fields: dict[str, Any]
) -> None:
    server = serve(chat_template="{{ messages[0].content }}" + template)
    body: dict[str, Any] = {"messages": [*HI]}
    for name, value in fields.items():
        if name == "arguments":
            body["messages"].append(calling(json.dumps(value)))
        elif name == "tools":
            body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": value}}]
        else:
            body[name] = value
    answer = await server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    assert SPOKEN in prompt_of(server)
    assert "\ue000" not in prompt_of(server)
    assert server.engine.tokenizer.eos_token_id not in server.engine.requests[0].prompt_token_ids


async def test_item_13_calls_that_the_template_does_not_show_are_refused(serve: Serve) -> None:
    body = {"messages": [*HI, calling("{}"), {"role": "tool", "content": "1", "tool_call_id": "1"}]}
    answer = await serve().post("/v1/chat/completions", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[1].tool_calls")
    assert "template" in answer.json()["error"]["message"]
    assert (await serve(chat_template=SHOWS_CALLS).post("/v1/chat/completions", body)).status_code == 200


def test_item_19_ctrl_c_in_a_terminal_does_not_reach_the_processes_of_templates_and_grammars() -> None:
    """They are in a process group of their own, where the terminal's signal does not go; the server ends them."""
    child = Child((str(_SCRIPT),), ("64", "1.0"))
    try:
        assert os.getpgid(child._process.pid) == child._process.pid != os.getpgid(0)
    finally:
        child.kill()
        child.close()
