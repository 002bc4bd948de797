"""Tool calls: found in the text as it comes, written as OpenAI writes them."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from outpace.server.tools import Call, Hermes, LlamaJson, Parser, Piece, parser_of, style_of
from tests.server.conftest import Serve
from tests.server.fake import FakeEngine, says
from tests.server.test_chat import prompt_of

TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TWO = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city": "Köln"}}'


def parse(parser: Parser, pieces: list[str]) -> tuple[str, list[Call]]:
    """All text and all calls of an answer that comes in pieces."""
    found: list[Piece] = [each for piece in pieces for each in parser.feed(piece)] + parser.finish()
    text = "".join(each for each in found if isinstance(each, str))
    return text, [each for each in found if isinstance(each, Call)]


@pytest.mark.parametrize(
    ("answer", "text", "names"),
    [
        ("just text", "just text", []),
        (ONE, "", ["weather"]),
        (f"I look.\n{ONE}\n{TWO}\n", "I look.\n", ["weather", "weather"]),
        ("a < b <tool", "a < b <tool", []),
        ("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
        ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
        ('<tool_call>{"name": "weather"', '<tool_call>{"name": "weather"', []),
        ('<tool_call>{"name": "weather"}', "", ["weather"]),
        ('<tool_call>{"name": "x", "arguments": {"a": NaN}}</tool_call>', None, []),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "", ["?"]),
        ("</tool_call>", "</tool_call>", []),
    ],
)
def test_hermes(answer: str, text: str | None, names: list[str]) -> None:
    for pieces in ([answer], list(answer)):
        shown, calls = parse(Hermes(), pieces)
        assert shown == (answer if text is None else text)
        assert [call.name for call in calls] == names


@pytest.mark.parametrize(
    ("answer", "text", "count"),
    [
        ("just text", "just text", 0),
        (LLAMA, "", 1),
        (f"<|python_tag|>{LLAMA}; {LLAMA}", "", 2),
        ('{"a": 1}', '{"a": 1}', 0),
        ("{not json", "{not json", 0),
        (f"{LLAMA} and more", f"{LLAMA} and more", 0),
        ("<b>bold</b>", "<b>bold</b>", 0),
        ("", "", 0),
    ],
)
def test_llama3_json(answer: str, text: str, count: int) -> None:
    for pieces in ([answer], list(answer)):
        shown, calls = parse(LlamaJson(), pieces)
        assert (shown, len(calls)) == (text, count)
        assert all(json.loads(call.arguments) == {"city": "Köln"} for call in calls)


@given(
    parts=st.lists(
        st.sampled_from([ONE, TWO, LLAMA, "<tool_call>", "</tool_call>", "<", "a", "{", '"', "\n"]), max_size=6
    ),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    style=st.sampled_from(["hermes", "llama3_json"]),
)
def test_where_the_pieces_are_cut_changes_nothing(parts: list[str], cuts: list[int], style: Any) -> None:
    answer = "".join(parts)
    places = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    pieces = [answer[start:end] for start, end in pairwise(places)]
    whole, cut = parser_of(style), parser_of(style)
    assert whole is not None
    assert cut is not None
    assert parse(whole, [answer]) == parse(cut, pieces)


def test_b2_a_long_answer_takes_time_in_proportion() -> None:
    parser = Hermes()
    for _ in range(50_000):
        parser.feed("<tool_call>{")
    assert len(parser.finish()) == 1


def test_the_style_comes_from_the_template() -> None:
    assert style_of("... <tool_call> ...", "auto") == "hermes"
    assert style_of("... <|python_tag|> ...", "auto") == "llama3_json"
    assert style_of("...", "auto") == "none"
    assert style_of("... <tool_call> ...", "none") == "none"
    assert style_of("", "llama3_json") == "llama3_json"


@pytest.mark.anyio
async def test_calls_through_the_openai_client(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    engine = FakeEngine(tokenizer, says(f"I look. {ONE}{TWO}"), tokens_per_delta=3)
    async with serve(engine, tool_call_parser="hermes").openai() as client:
        messages: Any = [{"role": "user", "content": "Weather?"}]
        answer = await client.chat.completions.create(model="fake", messages=messages, tools=[TOOL])
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look. "
        assert choice.message.tool_calls is not None
        calls: Any = choice.message.tool_calls
        assert [call.function.name for call in calls] == ["weather", "weather"]
        assert json.loads(calls[0].function.arguments) == {"city": "Köln"}
        assert len({call.id for call in calls}) == 2

        stream = await client.chat.completions.create(model="fake", messages=messages, tools=[TOOL], stream=True)
        deltas = [chunk.choices[0] async for chunk in stream]
        streamed: Any = [call for delta in deltas for call in delta.delta.tool_calls or []]
        assert [(call.index, call.function.name) for call in streamed] == [(0, "weather"), (1, "weather")]
        assert deltas[-1].finish_reason == "tool_calls"

        one = await client.chat.completions.create(
            model="fake", messages=messages, tools=[TOOL], parallel_tool_calls=False
        )
        assert len(one.choices[0].message.tool_calls or []) == 1
        none = await client.chat.completions.create(model="fake", messages=messages, tools=[TOOL], tool_choice="none")
        assert "<tool_call>" in (none.choices[0].message.content or "")
        assert none.choices[0].finish_reason == "stop"


@pytest.mark.anyio
async def test_an_answer_cut_by_length_says_so(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    server = serve(FakeEngine(tokenizer, says(ONE)), tool_call_parser="hermes")
    body = {"messages": [{"role": "user", "content": "?"}], "tools": [TOOL], "max_tokens": 20}
    choice = (await server.post("/v1/chat/completions", body)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == ONE[:20]


@pytest.mark.anyio
async def test_tools_and_their_results_reach_the_template(serve: Serve) -> None:
    template = (
        "{{ tools[0].function.name }}|{% for m in messages %}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}{{ m.content }};{% endfor %}"
    )
    server = serve(chat_template=template)
    function = {"name": "weather", "arguments": '{"city": "Köln"}'}
    messages: list[Any] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    assert (await server.post("/v1/chat/completions", {"messages": messages, "tools": [TOOL]})).status_code == 200
    assert prompt_of(server) == "weather|?;Köln;rain;"
    function["arguments"] = "rain"
    answer = await server.post("/v1/chat/completions", {"messages": messages, "tools": [TOOL]})
    assert answer.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.anyio
async def test_tools_that_the_template_does_not_show_are_refused(serve: Serve) -> None:
    server = serve(chat_template="{% for message in messages %}{{ message.content }}{% endfor %}")
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    for name, value in (("tools", tools), ("documents", [{"text": "a"}])):
        answer = await server.post("/v1/chat/completions", {**chat, name: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert (
        await server.post("/v1/chat/completions", {**chat, "tools": tools, "tool_choice": "none"})
    ).status_code == 200
