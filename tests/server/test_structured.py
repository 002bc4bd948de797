"""Answers held to a structure through HTTP: what is asked in which field, what is refused, and what bombs cost."""

import asyncio
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from transformers import PreTrainedTokenizerFast

from outpace.errors import InputError
from outpace.server.app import create_app
from outpace.server.child import Child
from outpace.server.compiling import CompileJob, compiled
from outpace.server.engine import EngineRequest
from outpace.server.grammars import GrammarService
from outpace.server.messages import Learn, Unlearn
from outpace.server.options import ServerConfig
from outpace.server.problems import ApiError
from outpace.structured.compile import CompiledGrammar, memory_of
from outpace.structured.outputs import StructuredOutputs
from outpace.structured.vocabulary import TokenVocabulary
from outpace.structured.wire import ReceivedGrammars, SentGrammars, WireGrammar
from outpace.types import SamplingParams
from tests.models import tiny
from tests.patience import PATIENCE
from tests.server.conftest import Serve, Served
from tests.server.fake import FakeEngine, says
from tests.server.test_worker import answers, engine

pytestmark = pytest.mark.anyio

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "pattern": "^[a-z]{3,6}$"}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
MESSAGES: Any = [{"role": "user", "content": "Weather?"}]
OTHER: Any = {"type": "function", "function": {"name": "g"}}
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def tool(name: str, parameters: Any = None, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters or CITY, **more}}


@pytest.fixture(scope="module")
def grammars(tokenizer: PreTrainedTokenizerFast) -> Iterator[GrammarService]:
    """One process for all tests that leave it alive."""
    made = GrammarService(tokenizer, FakeEngine(tokenizer).card, ServerConfig())
    yield made
    made.close()


class Kept(GrammarService):
    """The grammars of all tests, which a server does not close."""

    def __init__(self, shared: GrammarService) -> None:
        self.shared = shared

    async def compile(self, where: str, asked: StructuredOutputs, make: Any = None) -> WireGrammar:
        return await self.shared.compile(where, asked, make)

    def close(self) -> None:
        pass


@pytest.fixture
def served(serve: Serve, grammars: GrammarService, monkeypatch: pytest.MonkeyPatch) -> Serve:
    monkeypatch.setattr("outpace.server.services.GrammarService", lambda *parts: Kept(grammars))
    return serve


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A model of random weights that says bytes."""
    path = tmp_path_factory.mktemp("models") / "bytes"
    end = tokenizer.eos_token_id
    tiny("llama", vocab_size=len(tokenizer), eos_token_id=end, max_position_embeddings=512).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@asynccontextmanager
async def live(
    folder: Path, tokenizer: PreTrainedTokenizerFast, served: Serve, **options: Any
) -> AsyncIterator[Served]:
    """A server over an engine that a thread serves. `served` has put the shared grammars in their place."""
    async with engine(folder) as client:
        app = create_app(client, ServerConfig(**options), tokenizer)
        fake: Any = client
        try:
            yield Served(app, fake)
        finally:
            app.state.services.close()


def grammar_of(server: Served) -> CompiledGrammar:
    """What the engine was last told to keep to."""
    sent = server.engine.requests[-1].grammar
    assert sent is not None
    return CompiledGrammar(sent.data.decode(), TokenVocabulary.of_bytes(sent.vocabulary))


def accepts(grammar: CompiledGrammar, tokenizer: PreTrainedTokenizerFast, text: str) -> bool:
    matcher = grammar.matcher([tokenizer.eos_token_id])
    return all(matcher.accept(token) for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id])


# With an engine


async def test_response_format_through_the_openai_client(
    folder: Path, tokenizer: PreTrainedTokenizerFast, served: Serve
) -> None:
    async with live(folder, tokenizer, served) as server, server.openai() as client:
        asked: Any = {"model": "bytes", "messages": MESSAGES, "max_tokens": 200, "temperature": 0}
        answer = await client.chat.completions.create(**asked, response_format=FORMAT)
        text = answer.choices[0].message.content or ""
        jsonschema_rs.validator_for(CITY).validate(json.loads(text))
        assert answer.choices[0].finish_reason == "stop"
        stream = await client.chat.completions.create(**asked, response_format=FORMAT, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == text
        three = await client.chat.completions.create(
            **{**asked, "temperature": 1.5}, response_format=FORMAT, n=3, seed=1
        )
        for choice in three.choices:
            jsonschema_rs.validator_for(CITY).validate(json.loads(choice.message.content or ""))
        plain = await client.chat.completions.create(**asked, response_format={"type": "json_object"})
        assert (plain.choices[0].message.content or "").startswith("{")
        for field, value, pattern in (
            ("guided_regex", "[a-c]{4}", "[a-c]{4}"),
            ("guided_choice", ["left", "right"], "left|right"),
            ("guided_grammar", 'root ::= "x" [0-9]', r"x\d"),
            ("guided_json", {"type": "boolean"}, "true|false"),
            ("structured_outputs", {"regex": "[a-c]{4}"}, "[a-c]{4}"),
        ):
            options: Any = {"model": "bytes", "prompt": ["a", "b"], "temperature": 0, "extra_body": {field: value}}
            made = await client.completions.create(**options)
            assert all(re.fullmatch(pattern, choice.text) for choice in made.choices), field


@pytest.mark.parametrize("style", ["hermes", "llama3_json"])
async def test_tools_that_have_to_be_called(
    folder: Path, tokenizer: PreTrainedTokenizerFast, served: Serve, style: str
) -> None:
    async with live(folder, tokenizer, served, tool_call_parser=style) as server, server.openai() as client:
        tools = [tool("weather"), tool("clock", {"type": "object", "properties": {"utc": {"type": "boolean"}}})]
        asked: Any = {"model": "bytes", "messages": MESSAGES, "max_tokens": 300, "temperature": 0, "tools": tools}
        named: Any = {"type": "function", "function": {"name": "weather"}}
        schemas = {each["function"]["name"]: each["function"]["parameters"] for each in tools}
        forced: list[tuple[Any, bool]] = [("required", False), (named, True)]
        for choice, several in forced:
            answer = await client.chat.completions.create(**asked, tool_choice=choice, parallel_tool_calls=several)
            (call,) = answer.choices[0].message.tool_calls or []
            assert answer.choices[0].finish_reason == "tool_calls"
            assert not answer.choices[0].message.content
            function: Any = call
            function = function.function
            assert choice == "required" or function.name == "weather"
            jsonschema_rs.validator_for(schemas[function.name]).validate(json.loads(function.arguments))
            stream: Any = await client.chat.completions.create(
                **asked, tool_choice=choice, parallel_tool_calls=several, stream=True
            )
            chunks = [chunk.choices[0] async for chunk in stream]
            streamed: Any = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
            assert [call.function.name for call in streamed] == [function.name]
            assert streamed[0].function.arguments == function.arguments
            assert chunks[-1].finish_reason == "tool_calls"


async def test_cve_2026_105757_a_dead_end_costs_its_own_request(
    folder: Path, tokenizer: PreTrainedTokenizerFast, served: Serve
) -> None:
    async with live(folder, tokenizer, served) as server:
        body: dict[str, Any] = {"prompt": "a", "temperature": 0, "guided_regex": "[a-c]{3}7"}
        allowed = tokenizer("abc")["input_ids"]
        refused = await server.post(COMPLETIONS, {**body, "allowed_token_ids": allowed})
        assert refused.status_code == 400
        assert "no token" in refused.json()["error"]["message"]
        assert re.fullmatch("[a-c]{3}7", (await server.post(COMPLETIONS, body)).json()["choices"][0]["text"])


async def test_a_new_engine_is_taught_again(
    folder: Path, tokenizer: PreTrainedTokenizerFast, grammars: GrammarService
) -> None:
    grammar = await grammars.compile("guided_regex", StructuredOutputs(regex="[a-c]{3}"))
    params = SamplingParams(max_tokens=9, temperature=0.0)
    for _ in range(2):
        async with engine(folder) as client:
            for _ in range(2):
                asked = EngineRequest(request_id="r", prompt_token_ids=[5, 6], params=params, grammar=grammar)
                (ids,) = await answers(client, asked)
                assert re.fullmatch("[a-c]{3}", str(tokenizer.decode(ids, skip_special_tokens=True)))


async def test_a_grammar_that_cannot_be_read_fails_its_request(folder: Path) -> None:
    params = SamplingParams(max_tokens=2, temperature=0.0)
    broken = WireGrammar(b"key", b"{}", b"{}")
    async with engine(folder) as client:
        with pytest.raises(InputError, match="structured_outputs"):
            await answers(client, EngineRequest(request_id="r", prompt_token_ids=[5], params=params, grammar=broken))
        assert await answers(client, EngineRequest(request_id="r", prompt_token_ids=[5], params=params))


def test_cve_2025_29770_an_engine_forgets_as_it_is_told(tokenizer: PreTrainedTokenizerFast) -> None:
    taught = SentGrammars(max_bytes=2 * memory_of(b"0123456789") + 5)
    known: set[bytes] = set()
    for number in [*range(6), 5, 0]:
        grammar = WireGrammar(b"%d" % number, b"0123456789", b"words")
        messages = list(taught.before(grammar))
        for message in messages:
            if isinstance(message, Learn):
                assert bool(message.vocabulary) == (number == 0 and not known)
                known.add(message.key)
            else:
                known.remove(message.key)
        assert grammar.key in known
        assert len(known) <= 2
    assert list(taught.before(None)) == []
    learned = ReceivedGrammars()
    learned.take(Learn(b"a", b"broken", b"broken"))
    assert len(learned) == 1
    learned.take(Unlearn(b"a"))
    assert len(learned) == 0
    assert learned.get(b"") is None


# Fields


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"response_format": FORMAT}),
        (CHAT, {"guided_json": CITY}),
        (CHAT, {"guided_json": json.dumps(CITY)}),
        (COMPLETIONS, {"structured_outputs": {"json": CITY}}),
        (COMPLETIONS, {"response_format": FORMAT, "stream": True}),
    ],
)
async def test_a_schema_in_any_field_is_the_same(
    served: Serve, tokenizer: PreTrainedTokenizerFast, path: str, fields: dict[str, Any]
) -> None:
    server = served()
    assert (await server.post(path, body_of(path, **fields))).status_code == 200
    grammar = grammar_of(server)
    assert accepts(grammar, tokenizer, '{"city": "bonn", "days": 2}')
    assert not accepts(grammar, tokenizer, '{"city": "BONN", "days": 2}')


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    return {**({"messages": MESSAGES} if path == CHAT else {"prompt": "a"}), **fields}


async def test_text_is_not_held_to_anything(served: Serve) -> None:
    server = served()
    for path in (CHAT, COMPLETIONS):
        await server.post(path, body_of(path, response_format={"type": "text"}, guided_json=None))
        assert server.engine.requests[-1].grammar is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": FORMAT, "guided_regex": "a"}, "response_format.json_schema.schema"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"x": 1}}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
        ({"structured_outputs": {"banana": 1}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"guided_json": {"type": "object", "properties": {"a": {"type": "no"}}}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "(?=a)b"}, "guided_regex"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": {"$ref": "#/$defs/missing"}}, "guided_json"),
    ],
)
async def test_what_cannot_be_kept_to_is_refused_by_its_field(
    served: Serve, fields: dict[str, Any], param: str
) -> None:
    server = served()
    for path in (CHAT, COMPLETIONS):
        answer = await server.post(path, body_of(path, **fields))
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
        assert param in answer.json()["error"]["message"]
    assert server.engine.requests == []


@pytest.mark.parametrize(
    ("option", "limit", "fields"),
    [
        ("max_schema_bytes", 20, {"guided_json": {"type": "object", "description": "long"}}),
        ("max_schema_bytes", 20, {"guided_choice": ["a" * 11, "b" * 11]}),
        ("max_regex_chars", 3, {"guided_regex": "abcd"}),
        ("max_grammar_bytes", 10, {"guided_grammar": 'root ::= "a"'}),
        ("max_choices", 1, {"guided_choice": ["a", "b"]}),
    ],
)
async def test_each_limit_is_an_option(served: Serve, option: str, limit: int, fields: dict[str, Any]) -> None:
    (name,) = fields
    refused = await served(**{option: limit}).post(COMPLETIONS, {"prompt": "a", **fields})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == name
    assert (await served().post(COMPLETIONS, {"prompt": "a", **fields})).status_code == 200


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"guided_regex": "a"}, "guided_regex"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"guided_json": {}}, "guided_json"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}},
            "response_format.json_schema.schema",
        ),
    ],
    ids=str,
)
async def test_item_18_without_llguidance_the_answer_names_the_extra(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], field: str
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    server = serve()
    answer = await server.post(COMPLETIONS, {"prompt": "a", **asked})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert answer.json()["error"]["message"] == f"{field}: llguidance is missing; pip install 'outpace[structured]'"
    assert "tokenizer" not in answer.json()["error"]["message"]
    assert (await server.post(COMPLETIONS, {"prompt": "a"})).status_code == 200


# Tools


async def test_strict_tools_are_kept_to_where_the_model_is_free(
    served: Serve, tokenizer: PreTrainedTokenizerFast
) -> None:
    server = served(tool_call_parser="hermes")
    tools = [tool("weather", strict=True), tool("clock", {"not": {}})]
    assert (await server.post(CHAT, {"messages": MESSAGES, "tools": tools})).status_code == 200
    grammar = grammar_of(server)
    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    right = '{"city": "bonn", "days": 2}'
    assert accepts(grammar, tokenizer, "It rains. <b>")
    assert accepts(grammar, tokenizer, "I look. " + call % ("weather", right))
    assert accepts(grammar, tokenizer, call % ("weather", right) + "\n" + call % ("clock", '{"any": ["thing"]}'))
    assert not accepts(grammar, tokenizer, call % ("weather", '{"city": 5}'))
    assert not accepts(grammar, tokenizer, call % ("other", right))
    await server.post(CHAT, {"messages": MESSAGES, "tools": tools, "tool_choice": "none"})
    assert server.engine.requests[-1].grammar is None
    loose = [tool("weather"), tool("clock", {"not": {}})]
    await server.post(CHAT, {"messages": MESSAGES, "tools": loose})
    assert server.engine.requests[-1].grammar is None


async def test_a_call_that_is_required_is_all_there_is(served: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    server = served(tool_call_parser="hermes")
    tools = [tool("weather"), tool("none", {})]
    await server.post(CHAT, {"messages": MESSAGES, "tools": tools, "tool_choice": "required"})
    grammar = grammar_of(server)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "bonn", "days": 2}}\n</tool_call>'
    assert accepts(grammar, tokenizer, call)
    assert accepts(grammar, tokenizer, f"{call}\n{call}")
    assert not accepts(grammar, tokenizer, f"Well. {call}")
    assert not accepts(grammar, tokenizer, "")
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    await server.post(CHAT, body)
    assert accepts(grammar_of(server), tokenizer, call)
    assert not accepts(grammar_of(server), tokenizer, f"{call}\n{call}")


@pytest.mark.parametrize(
    ("style", "fields", "param"),
    [
        ("none", {"tools": [tool("f")], "tool_choice": "required"}, "tool_choice"),
        ("none", {"tools": [tool("f", strict=True)]}, "tools[0].function.strict"),
        ("llama3_json", {"tools": [tool("g"), tool("f", strict=True)]}, "tools[1].function.strict"),
        (
            "hermes",
            {"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
        ),
        ("hermes", {"tool_choice": "required"}, "tool_choice"),
        ("hermes", {"tools": [tool("f")], "tool_choice": "always"}, None),
        ("hermes", {"tools": [tool("f")], "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
        ("hermes", {"tools": [tool("f")], "response_format": FORMAT}, "response_format.json_schema.schema"),
        (
            "hermes",
            {"tools": [tool("f", {"type": "string"})], "tool_choice": "required"},
            "tools[0].function.parameters",
        ),
    ],
)
async def test_calls_that_cannot_be_held_are_refused(
    served: Serve, style: str, fields: dict[str, Any], param: str | None
) -> None:
    server = served(tool_call_parser=style)
    answer = await server.post(CHAT, {"messages": MESSAGES, **fields})
    assert answer.status_code == 400
    found = answer.json()["error"]["param"]
    assert found == param or (param is None and found.startswith("tool_choice"))
    assert server.engine.requests == []


@pytest.mark.parametrize("parameters", [{"type": "something"}, {"type": ["object"]}, {"properties": {"a": 5}}])
@pytest.mark.parametrize("pattern", [None, "(", "\\", "a)(b"])
async def test_cve_2025_48944_a_tool_of_a_wrong_type_or_pattern(
    served: Serve, parameters: dict[str, Any], pattern: str | None
) -> None:
    if pattern is not None:
        parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
    server = served(tool_call_parser="hermes")
    body = {"messages": MESSAGES, "tools": [tool("f", parameters)], "tool_choice": "required"}
    answer = await server.post(CHAT, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools[0].function.parameters"
    assert (await server.post(CHAT, {"messages": MESSAGES})).status_code == 200


# Bombs


def nested_optional(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": dict.fromkeys("abc", schema)}
    return schema


def many(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"property {number}": {"type": "string"} for number in range(count)}}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


BOMBS: dict[str, dict[str, Any]] = {
    "pysec_2026_2304_nested_quantifiers": {"guided_regex": "(a+)+$"},
    "alternations": {"guided_regex": "|".join(f"a{number}" for number in range(10_000))},
    "alternations_as_choice": {"guided_choice": [f"choice {number}" for number in range(10_000)]},
    "alternations_as_grammar": {"guided_grammar": "root ::= " + " | ".join(f'"a{n}"' for n in range(1000))},
    "repetitions": {"guided_regex": "((((a{99}){99}){99}){99}){99}"},
    "optional_repetitions": {"guided_regex": "((((.{0,99}){0,99}){0,99}){0,99}){0,99}"},
    "ambiguous": {"guided_regex": "(.{0,500}x){0,500}"},
    "cve_2025_57809_recursive_grammar": {"guided_grammar": 'root ::= root root | root | "a" | ""'},
    "recursive_ref": {"guided_json": {"$ref": "#"}},
    "recursive_refs": {
        "guided_json": {
            "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}},
            "$ref": "#/$defs/a",
        }
    },
    "cve_2025_58446_nested_optional": {"guided_json": nested_optional(6)},
    "long_strings": {"guided_json": {"type": "string", "minLength": 10_000, "maxLength": 2**31}},
    "long_arrays": {"guided_json": {"type": "array", "items": {"type": "array"}, "minItems": 10**9}},
    "deep_schema": {"guided_json": deep(60)},
    "big_schema": {"guided_json": many(3000)},
    "large_schema": {"guided_json": many(500)},
    "large_multiples": {"guided_json": {"type": "integer", "multipleOf": 10**9}},
}


@pytest.mark.parametrize("name", BOMBS)
async def test_b7_a_bomb_is_refused_or_answered_soon(served: Serve, grammars: GrammarService, name: str) -> None:
    await grammars.compile("warm", StructuredOutputs(regex="warm"))
    await grammars.compile("ready", StructuredOutputs(regex=f"process for {name}"))  # not from the cache
    server = served()
    begin = time.process_time()
    answer = await server.post(COMPLETIONS, {"prompt": "a", **BOMBS[name]})
    assert time.process_time() - begin < 3, "what the server itself does for it; a compiler is killed"
    assert answer.status_code in (200, 400)
    if answer.status_code == 400:
        assert answer.json()["error"]["param"].startswith("guided_")
    assert (await server.post(COMPLETIONS, {"prompt": "a"})).status_code == 200
    assert (await server.post(COMPLETIONS, {"prompt": "a", "guided_regex": f"after {name}"})).status_code == 200


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process knows a grammar that never ends, and one that eats memory."""
    monkeypatch.setattr("outpace.server.grammars._PROGRAM", (str(Path(__file__).with_name("stuck.py")),))


@pytest.mark.usefixtures("stuck")
async def test_b7_what_takes_too_long_is_killed(tokenizer: PreTrainedTokenizerFast) -> None:
    grammars = GrammarService(tokenizer, FakeEngine(tokenizer).card, ServerConfig(grammar_timeout=2.0))
    try:
        kept = await grammars.compile("a", StructuredOutputs(regex="ab"))
        with pytest.raises(Exception, match="field: it takes too much time") as caught:
            await grammars.compile("field", StructuredOutputs(regex="stuck"))
        assert getattr(caught.value, "param") == "field"  # noqa: B009 - an ApiError
        assert await grammars.compile("a", StructuredOutputs(regex="ab")) is kept, "the cache is not the process's"
        assert await grammars.compile("a", StructuredOutputs(regex="cd"))
        child = grammars._child
        assert child is not None
    finally:
        grammars.close()
    assert not child.alive


@pytest.mark.usefixtures("stuck")
async def test_b7_memory_is_limited(tokenizer: PreTrainedTokenizerFast) -> None:
    options = ServerConfig(grammar_timeout=PATIENCE, grammar_memory_mb=64)
    grammars = GrammarService(tokenizer, FakeEngine(tokenizer).card, options)
    try:
        with pytest.raises(Exception, match="field: it takes too much memory"):
            await grammars.compile("field", StructuredOutputs(regex="hungry"))
        assert await grammars.compile("a", StructuredOutputs(regex="cd"))
    finally:
        grammars.close()


async def test_what_breaks_the_compiler_is_no_fault_of_the_request(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def compile(self, asked: StructuredOutputs, where: str, max_depth: int) -> None:
            raise IndexError("a defect")

    broken: Any = Broken()
    answer = compiled(broken, msgspec.msgpack.encode(CompileJob("field", {"regex": "a"}, 32)))
    grammars = GrammarService(tokenizer, FakeEngine(tokenizer).card, ServerConfig())
    monkeypatch.setattr(Child, "ask", lambda *arguments: answer)
    try:
        with pytest.raises(ApiError) as caught:
            await grammars.compile("field", StructuredOutputs(regex="a"))
        assert caught.value.status == 500
        assert "defect" not in caught.value.message
    finally:
        grammars.close()


@pytest.mark.usefixtures("stuck")
async def test_what_was_refused_is_not_compiled_again(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = GrammarService(tokenizer, FakeEngine(tokenizer).card, ServerConfig(grammar_timeout=2.0))
    slow = StructuredOutputs(regex="stuck")
    try:
        for asked in (StructuredOutputs(grammar="nonsense"), slow):
            with pytest.raises(ApiError, match="field: "):
                await grammars.compile("field", asked)
            with monkeypatch.context() as patch:
                patch.setattr(Child, "ask", lambda *arguments: pytest.fail("it is known"))
                with pytest.raises(ApiError, match="field: ") as caught:
                    await grammars.compile("field", asked)
                assert caught.value.param == "field"
            with pytest.raises(ApiError, match="other: "):
                await grammars.compile("other", asked)
    finally:
        grammars.close()


@pytest.mark.usefixtures("stuck")
async def test_closing_waits_for_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    grammars = GrammarService(tokenizer, FakeEngine(tokenizer).card, ServerConfig(grammar_timeout=PATIENCE))
    await grammars.compile("a", StructuredOutputs(regex="ab"))
    waiting = asyncio.create_task(grammars.compile("b", StructuredOutputs(regex="stuck")))
    await asyncio.sleep(0.2)
    grammars.close()
    with pytest.raises(ApiError) as caught:
        await waiting
    assert "time" not in caught.value.message, "it waited until the compiler was killed"


@pytest.mark.parametrize("depth", [32, 64])
async def test_the_depth_of_schemas_is_an_option(tokenizer: PreTrainedTokenizerFast, depth: int) -> None:
    schema: Any = {"type": "boolean"}
    for _ in range(40):
        schema = {"type": "array", "items": schema, "maxItems": 1}
    grammars = GrammarService(
        tokenizer, FakeEngine(tokenizer).card, ServerConfig(max_schema_depth=depth, grammar_timeout=PATIENCE)
    )
    try:
        if depth == 64:
            assert await grammars.compile("field", StructuredOutputs(json=schema))
        else:
            with pytest.raises(ApiError, match="nested more than 32 deep"):
                await grammars.compile("field", StructuredOutputs(json=schema))
    finally:
        grammars.close()


async def test_long_schemas_of_tools_are_refused_before_they_are_looked_at(served: Serve) -> None:
    branch = {"type": "object", "properties": {"t": {"const": 1}}, "required": ["t"]}
    tools = [tool("f", {"type": "object", "properties": {"a": {"oneOf": [branch] * 3000}}})]
    begin = time.process_time()
    answer = await served(tool_call_parser="hermes").post(
        CHAT, {"messages": MESSAGES, "tools": tools, "tool_choice": "required", "truncate_prompt_tokens": 5}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    assert time.process_time() - begin < 2
    same = await served(tool_call_parser="hermes").post(
        CHAT, {"messages": MESSAGES, "tools": [tool("f"), tool("f")], "tool_choice": "required"}
    )
    assert same.json()["error"]["param"] == "tools[1].function.name"


# What no grammar enforces, and what was cut off


UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}


@pytest.mark.parametrize(("said", "valid"), [("[1, 2]", True), ("[1, 1]", False)])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_item_22_an_answer_says_what_was_checked(
    served: Serve, tokenizer: PreTrainedTokenizerFast, path: str, said: str, valid: bool
) -> None:
    server = served(FakeEngine(tokenizer, says(said)))
    body = body_of(path, guided_json=UNIQUE, n=2)
    for choice in (await server.post(path, body)).json()["choices"]:
        check = choice["structure_check"]
        assert (check["checked"], check["valid"]) == (["uniqueItems"], valid)
        assert (check["problem"] is None) == valid
    chunks = events(await server.post(path, {**body, "stream": True}))
    found = [choice for chunk in chunks for choice in chunk["choices"] if "structure_check" in choice]
    assert [choice["structure_check"]["valid"] for choice in found] == [valid, valid]
    assert all(choice["finish_reason"] == "stop" for choice in found), "it stands where the answer ends"
    cut = await server.post(path, {**body, "max_tokens": 2})
    held = await server.post(path, body_of(path, guided_json={"type": "array"}))
    assert all("structure_check" not in choice for each in (cut, held) for choice in each.json()["choices"])


async def test_item_22_calls_are_checked(served: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    call = '<tool_call>\n{"name": "sum", "arguments": {"of": %s}}\n</tool_call>'
    tools = [tool("sum", {"type": "object", "properties": {"of": UNIQUE}, "required": ["of"]}), tool("weather")]
    for said, valid in (("[1, 2]", True), ("[2, 2]", False)):
        server = served(FakeEngine(tokenizer, says(call % said)), tool_call_parser="hermes")
        answer = await server.post(CHAT, {"messages": MESSAGES, "tools": tools, "tool_choice": "required"})
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["structure_check"]["checked"] == ["sum: properties.of.uniqueItems"]
        assert choice["structure_check"]["valid"] == valid
        assert valid or choice["structure_check"]["problem"].startswith("sum: of: ")


async def test_item_22_white_space_can_be_turned_off(served: Serve, tokenizer: PreTrainedTokenizerFast) -> None:
    server = served()
    asked = {"json": CITY, "disable_any_whitespace": True}
    assert (await server.post(COMPLETIONS, {"prompt": "a", "structured_outputs": asked})).status_code == 200
    assert accepts(grammar_of(server), tokenizer, '{"city":"bonn","days":2}')
    assert not accepts(grammar_of(server), tokenizer, '{"city": "bonn","days":2}')
    wrong = {"choice": ["a"], "disable_any_whitespace": True}
    refused = await server.post(COMPLETIONS, {"prompt": "a", "structured_outputs": wrong})
    assert (refused.status_code, "disable_any_whitespace" in refused.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize("style", ["hermes", "llama3_json"])
@pytest.mark.parametrize("max_tokens", [5, 14, 40])
async def test_item_22_a_forced_call_that_is_cut_off_is_no_text(
    served: Serve, tokenizer: PreTrainedTokenizerFast, style: str, max_tokens: int
) -> None:
    call = '{"name": "weather", "%s": {"city": "bonn", "days": 2}}'
    said = f"<tool_call>\n{call % 'arguments'}\n</tool_call>" if style == "hermes" else call % "parameters"
    server = served(FakeEngine(tokenizer, says(said)), tool_call_parser=style)
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        body = {"messages": MESSAGES, "tools": [tool("weather")], "tool_choice": choice, "max_tokens": max_tokens}
        (found,) = (await server.post(CHAT, body)).json()["choices"]
        assert (found["finish_reason"], found["message"].get("tool_calls")) == ("length", None)
        assert not found["message"]["content"]
        streamed = events(await server.post(CHAT, {**body, "stream": True}))
        chunks = [choice for chunk in streamed for choice in chunk["choices"]]
        assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == ""
        assert chunks[-1]["finish_reason"] == "length"


def events(answer: Any) -> list[Any]:
    """The chunks of a stream."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
