"""Answers held to a structure: they keep to it, whatever the model wants, and nobody else notices."""

import json
import random
import re
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from outpace import LLM, FinishReason, InputError, ModelError, NotSupported, RequestOutput, SamplingParams
from outpace import StructuredOutputs as Structure
from outpace.structured.compile import CompiledGrammar, Compiler, memory_of
from outpace.structured.regex import checked_regex
from outpace.structured.schema import checked_schema
from outpace.structured.sized_cache import SizedCache
from outpace.structured.vocabulary import TokenVocabulary
from tests.models import byte_tokenizer, tiny

GREEDY: dict[str, Any] = {"temperature": 0.0}
HOT: dict[str, Any] = {"temperature": 1.5, "seed": 3}


def make(**options: Any) -> LLM:
    """A model of random weights that says bytes."""
    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token_id
    model = tiny("llama", vocab_size=len(tokenizer), eos_token_id=end, max_position_embeddings=512)
    return LLM(model, tokenizer=tokenizer, **{"device": "cpu", "num_blocks": 200, "max_num_seqs": 16, **options})


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make()


def held(max_tokens: int = 120, options: dict[str, Any] | None = None, **structure: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, structured_outputs=Structure(**structure), **(options or GREEDY))


TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(TokenVocabulary.of(TOKENIZER, len(TOKENIZER), [TOKENIZER.eos_token_id]))


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    """Whether a text is an answer by the grammar."""
    matcher = grammar.matcher([TOKENIZER.eos_token_id])
    return all(matcher.accept(token) for token in [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id])


def ask(llm: LLM, prompts: Any, params: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def texts(output: RequestOutput) -> list[str]:
    return [answer.text for answer in output.outputs]


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of what is supported, with bounds, so that answers end."""
    kinds = ["string", "integer", "number", "boolean", "enum", "const", "pattern", "format", "any"]
    kind = rng.choice([*kinds, "ref"] if depth > 1 else [*kinds, "object", "object", "array", "array"])
    if kind == "object":
        names = rng.sample(["a", "bc", "d e", "ü", 'f"'], rng.randint(0, 3))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: random_schema(rng, depth + 1) for name in names},
            "required": [name for name in names if rng.random() < 0.6],
        }
        return schema | ({"additionalProperties": False} if rng.random() < 0.5 else {})
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": rng.randint(0, 1), "maxItems": 2}
    if kind == "any":
        parts = [random_schema(rng, 2) for _ in range(2)]
        return {"anyOf": parts} if rng.random() < 0.5 else {"oneOf": [{"type": "null"}, {"type": "boolean"}]}
    low = rng.randint(-20, 20)
    leaves: dict[str, dict[str, Any]] = {
        "string": {"type": ["string", "null"], "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 5)},
        "integer": {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 99)},
        "number": {"type": "number", "exclusiveMinimum": low, "maximum": low + rng.randint(1, 9)},
        "boolean": {"type": "boolean", "description": "yes or no"},
        "enum": {"enum": ["x", 'y"\n', None, 3, {"z": [1]}]},
        "const": {"const": rng.choice(["é😀", 5, True])},
        "pattern": {"type": "string", "pattern": rng.choice(["^[a-c]{2,4}$", r"\d+-[^x]", "(ab|cd)?e"])},
        "format": {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])},
        "ref": {"$ref": "#/$defs/leaf"},
    }
    return leaves[kind]


# What answers look like


@pytest.mark.parametrize("block", range(5))
def test_answers_are_valid_by_their_random_schemas(llm: LLM, block: int) -> None:
    leaf = {"$defs": {"leaf": {"type": "boolean"}}}
    schemas = [{**random_schema(random.Random(10 * block + number)), **leaf} for number in range(10)]
    params = [held(400, GREEDY if number % 2 else HOT, json=schema) for number, schema in enumerate(schemas)]
    ended = 0
    for schema, output in zip(schemas, ask(llm, ["hi"] * 10, params), strict=True):
        answer = output.outputs[0]
        assert answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), output.error
        if answer.finish_reason is FinishReason.STOP:
            ended += 1
            jsonschema_rs.validator_for(schema).validate(json.loads(answer.text))
    assert ended >= 8, "the others went on until max_tokens"


@pytest.mark.parametrize("options", [GREEDY, HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize(
    ("structure", "pattern"),
    [
        ({"regex": "[a-c]{3,5}x"}, "[a-c]{3,5}x"),
        ({"regex": r"(foo|bar)\d\d-[^0-9]"}, r"(foo|bar)\d\d-[^0-9]"),
        ({"choice": ["yes", "nö", 'j"a\n']}, 'yes|nö|j"a\n'),
        ({"choice": ["one"]}, "one"),
        ({"grammar": 'root ::= "a" root | "b"'}, "a*b"),
        ({"grammar": 'root ::= item ("," item)*\nitem ::= [0-9] [0-9]'}, r"\d\d(,\d\d)*"),
    ],
)
def test_answers_match(llm: LLM, structure: dict[str, Any], pattern: str, options: dict[str, Any]) -> None:
    (output,) = ask(llm, "hi", held(60, options, **structure))
    answer = output.outputs[0]
    if answer.finish_reason is FinishReason.STOP:
        assert re.fullmatch(pattern, answer.text)
    else:
        assert answer.finish_reason is FinishReason.LENGTH, output.error
        assert "grammar" in structure, "the others have an end"


def test_a_json_object_is_one(llm: LLM) -> None:
    outputs = ask(llm, ["a", "b", "c"], held(400, HOT, json_object=True))
    ended = [each.outputs[0].text for each in outputs if each.outputs[0].finish_reason is FinishReason.STOP]
    assert ended
    assert all(isinstance(json.loads(text), dict) for text in ended)


def test_an_open_schema_allows_more_than_the_empty_object(llm: LLM) -> None:
    rng = random.Random(0)
    for schema, wanted in (({"type": "object"}, b'{"a": [1]}'), ({"type": "array"}, b'[1, "x", {}]')):
        matcher = llm.engine._compile(Structure(json=schema))[0].matcher([llm.tokenizer.eos_token_id])  # type: ignore[union-attr]
        ids = llm.tokenize(wanted.decode())
        assert all(matcher.accept(token) for token in ids)
        assert not matcher.accept(rng.choice(ids))


def test_n_answers_are_held_each(llm: LLM) -> None:
    (output,) = ask(llm, "hi", held(30, {**HOT, "n": 3}, regex="[a-z]{8}"))
    assert all(re.fullmatch("[a-z]{8}", text) for text in texts(output))
    assert len(set(texts(output))) > 1


def test_logprobs_are_the_models_own(llm: LLM) -> None:
    params = held(4, {**GREEDY, "logprobs": 2}, regex="zzz")
    (output,) = ask(llm, "hi", params)
    (free,) = ask(llm, "hi", SamplingParams(max_tokens=1, logprobs=2, **GREEDY))
    first, alone = output.outputs[0].logprobs, free.outputs[0].logprobs
    assert first is not None
    assert alone is not None
    assert list(first[0])[1:] == list(alone[0])[:2]
    assert first[0][output.outputs[0].token_ids[0]].rank > 1


def test_other_parameters_hold_beside_the_grammar(llm: LLM) -> None:
    encode = llm.tokenize
    few = {**GREEDY, "allowed_token_ids": [*encode("ab"), llm.tokenizer.eos_token_id]}  # type: ignore[union-attr]
    assert set(texts(ask(llm, "hi", held(30, few, regex="[a-z]{4}"))[0])[0]) <= {"a", "b"}
    biased = {**GREEDY, "logit_bias": {encode("q")[0]: 100.0, encode("7")[0]: 100.0}}
    assert texts(ask(llm, "hi", held(30, biased, regex="[a-z]{4}"))[0]) == ["qqqq"]
    longer = ask(llm, "hi", held(30, {**GREEDY, "min_tokens": 6}, regex="ab"))[0]
    assert texts(longer) == ["ab"]
    assert len(longer.outputs[0].token_ids) == 7, "what must go on says nothing more"
    ignoring = ask(llm, "hi", held(9, {**GREEDY, "ignore_eos": True}, regex="ab"))[0]
    assert (texts(ignoring), len(ignoring.outputs[0].token_ids)) == (["ab"], 9)


# Nobody else notices


@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "in-turn"])
def test_others_say_what_they_say_alone(llm: LLM, overlap: bool) -> None:
    free = [SamplingParams(max_tokens=20, **GREEDY), SamplingParams(max_tokens=20, **HOT)]
    bound = [held(40, GREEDY, regex="[a-z]{20}"), held(40, HOT, json={"type": "array", "items": {"type": "integer"}})]
    params = [free[0], bound[0], free[1], bound[1], free[0], bound[0]]
    prompts = [f"prompt {number}" for number in range(6)]
    alone = [ask(llm, prompt, each)[0].outputs[0].token_ids for prompt, each in zip(prompts, params, strict=True)]
    with make(async_scheduling=overlap) as other:
        together = ask(other, prompts, params)
    assert [output.outputs[0].token_ids for output in together] == alone


@pytest.mark.parametrize(
    "host", [{}, {"swap_space": 0.001}, {"kv_offloading_size": 0.001}], ids=["recompute", "swap", "tier"]
)
@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "in-turn"])
def test_a_request_that_gave_way_goes_on(llm: LLM, host: dict[str, Any], overlap: bool) -> None:
    prompts = [f"number {number} of several" for number in range(6)]
    params = held(70, HOT, regex="([a-z]{3}[0-9]){15}")
    expected = [output.outputs[0].token_ids for output in ask(llm, prompts, params)]
    with make(num_blocks=16, block_size=16, **host, async_scheduling=overlap, max_model_len=128) as small:
        found = ask(small, prompts, params)
        assert small.engine.totals.preemptions > 0
    assert [output.outputs[0].token_ids for output in found] == expected
    assert all(re.fullmatch("([a-z]{3}[0-9]){15}", texts(output)[0]) for output in found)


def test_prompts_in_chunks_are_no_answers(llm: LLM) -> None:
    params = held(12, GREEDY, regex="[a-z]{9}")
    prompts = ["x" * 200, "y" * 150]
    with make(max_num_batched_tokens=32) as chunked:
        found = [texts(output) for output in ask(chunked, prompts, params)]
    assert found == [texts(output) for output in ask(llm, prompts, params)]


class Breaking:
    """A grammar whose matcher allows all, and fails at a token of its answer."""

    vocab_size = 257

    def __init__(self, error: Exception | None, at: int) -> None:
        self._error, self._at = error, at

    def matcher(self, stop_token_ids: Sequence[int]) -> "Breaking":
        return Breaking(self._error, self._at)

    def accept(self, token_id: int) -> bool:
        self._at -= 1
        if self._at == 0 and self._error is not None:
            raise self._error
        return self._at != 0

    def fill(self, masks: "np.ndarray[Any, np.dtype[np.int32]]", row: int) -> None:
        masks[row] = -1


@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "in-turn"])
@pytest.mark.parametrize("error", [RuntimeError("boom"), None], ids=["raises", "refuses"])
def test_cve_2026_105757_a_matcher_that_fails_costs_its_own_request(
    llm: LLM, error: Exception | None, overlap: bool
) -> None:
    params = SamplingParams(max_tokens=8, **GREEDY)
    alone = ask(llm, "fine", params)[0].outputs[0].token_ids
    with make(async_scheduling=overlap) as other:
        engine = other.engine
        fine = engine.add_request("fine", other.tokenize("fine"), params)
        broken = engine.add_request("broken", other.tokenize("broken"), params, grammar=Breaking(error, 3))
        several = SamplingParams(max_tokens=8, n=3, **GREEDY)
        three = engine.add_request("three", other.tokenize("three"), several, grammar=Breaking(error, 2))
        while engine.has_unfinished_requests:
            engine.step()
        assert fine.outputs[0].token_ids == alone
        assert broken.error is not None
        assert ("structured_outputs" in broken.error) == (error is None), "otherwise the request is not to blame"
        assert broken.outputs[0].finish_reason is FinishReason.ERROR
        assert len(broken.outputs[0].token_ids) == 3
        assert three.finished
        assert three.error is not None
        engine.scheduler.assert_consistent()
        assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
        assert ask(other, "fine", params)[0].outputs[0].token_ids == alone


def test_what_takes_too_long_for_each_token_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.structured.compile.MAX_SECONDS", 1e-9)
    with pytest.raises(InputError, match=r"structured_outputs.regex: choosing each token takes [0-9.]+ ms"):
        ask(llm, "hi", held(regex="[a-z]{3}8"))


def test_a_grammar_that_was_slow_once_is_not_tried_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for many answers by it, or asks again, does not get the same patience again."""
    monkeypatch.setattr("outpace.structured.masks.PATIENCE", 0.0)
    monkeypatch.setattr("outpace.structured.masks.MAX_SECONDS", 0.0)
    params = held(regex="[a-y]{9}")
    (first,) = ask(llm, "hi", params)
    assert first.error is not None
    filled: list[int] = []
    monkeypatch.setattr("outpace.structured.compile.Matcher.fill", lambda *arguments: filled.append(1))
    (second,) = ask(llm, "hi", params)
    assert second.error == first.error
    assert not filled


def test_an_answer_that_takes_too_long_ends_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.structured.masks.MAX_SECONDS", 0.0)
    monkeypatch.setattr("outpace.structured.masks.PATIENCE", 0.0)
    plain = SamplingParams(max_tokens=8, **GREEDY)
    slow, fine = ask(llm, ["hi", "hi"], [held(regex="[a-z]{9}"), plain])
    assert slow.error is not None
    assert "takes too long" in slow.error
    assert fine.outputs[0].token_ids == ask(llm, "hi", plain)[0].outputs[0].token_ids


@pytest.mark.parametrize("bounds", [{"maxLength": 300}, {"minLength": 150}, {"minLength": 130, "maxLength": 200}])
def test_long_strings_keep_to_their_bounds(llm: LLM, bounds: dict[str, int]) -> None:
    """Also where escapes and control characters could get in between."""
    schema = {"type": "string", **bounds}
    ended = 0
    for seed in range(8):
        (output,) = ask(llm, "hi", held(500, {"temperature": 2.0, "seed": seed}, json=schema))
        text = output.outputs[0].text
        assert not any(letter < " " for letter in text)
        if output.outputs[0].finish_reason is FinishReason.STOP:
            ended += 1
            assert bounds.get("minLength", 0) <= len(json.loads(text)) <= bounds.get("maxLength", 500)
    assert ended or "maxLength" not in bounds


def test_a_dead_end_is_an_error_of_its_request(llm: LLM) -> None:
    never = held(20, {**GREEDY, "allowed_token_ids": llm.tokenize("abc")}, regex="[a-z]{3}7")
    bad, good = ask(llm, ["x", "y"], [never, held(20, regex="ok")])
    assert bad.outputs[0].finish_reason is FinishReason.ERROR
    assert "no token" in (bad.error or "")
    assert texts(good) == ["ok"]
    with pytest.raises(InputError, match="no token"):
        list(llm.stream("x", never))


# What is refused


@pytest.mark.parametrize(
    ("structure", "name"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "choice": ["b"]}, "exactly one.*regex and choice"),
        ({"json_object": False}, "exactly one"),
        ({"choice": []}, "choice"),
        ({"choice": ["a", ""]}, "choice"),
        ({"choice": "abc"}, "choice"),
        ({"regex": 5}, "regex"),
        ({"json": 5}, "json"),
        ({"json": {"a": {1, 2}}}, "json"),
        ({"json_object": "yes"}, "json_object"),
    ],
)
def test_a_structure_is_one_thing(structure: dict[str, Any], name: str) -> None:
    with pytest.raises(InputError, match=f"structured_outputs.*{name}"):
        Structure(**structure)


def test_parameters_take_structures_alone() -> None:
    given: Any = {"regex": "a"}
    with pytest.raises(InputError, match="structured_outputs"):
        SamplingParams(structured_outputs=given)


REFUSED: list[tuple[Any, str]] = [
    ({"type": "banana"}, "type"),
    ({"type": [{}]}, "type"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "Unsatisfiable"),
    ({"anyOf": []}, "anyOf"),
    ({"anyOf": [{"type": "null"}], "type": "object"}, "Unsatisfiable"),
    ({"enum": []}, "enum"),
    ({"$ref": "http://example.org/schema"}, r"\$ref"),
    ({"not": {"$ref": "http://example.org/schema"}}, "example.org"),
    ({"$ref": "#/$defs/missing"}, r"\$ref"),
    ({"$ref": "#"}, r"\$ref.*itself"),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, r"\$ref.*itself"),
    ({"$dynamicRef": "#a"}, "dynamicRef"),
    ({"type": "string", "pattern": "("}, "pattern"),
    ({"type": "string", "pattern": "a)(b"}, "pattern"),
    ({"type": "string", "pattern": "\\"}, "pattern"),
    ({"type": "string", "pattern": 5}, "pattern"),
    ({"type": "object", "patternProperties": {"(": {}}}, "patternProperties"),
    ({"type": "string", "minLength": -1}, "minLength"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "maxLength"),
    ({"type": "integer", "multipleOf": 0}, "multipleOf"),
    ({"type": "integer", "minimum": "a"}, "minimum"),
    ({"type": "integer", "minimum": 5, "maximum": 2}, ""),
    ({"type": "object", "required": "a"}, "required"),
    ({"type": "object", "properties": []}, "properties"),
    ({"type": "object", "properties": {"a": {}}, "required": ["b"], "additionalProperties": False}, ""),
    ({"type": "object", "patternProperties": {"a": {}, "b": {}}}, "disjoint"),
    ({"type": "array", "items": 5}, "items"),
]


@pytest.mark.parametrize(("schema", "name"), REFUSED)
def test_a_schema_that_cannot_be_kept_to_is_refused_by_name(llm: LLM, schema: Any, name: str) -> None:
    with pytest.raises(InputError, match=rf"structured_outputs\.json: .*{name}"):
        ask(llm, "hi", held(json=schema))


@pytest.mark.parametrize("text", ["", "{", "[]", "5", '{"const": NaN}', '{"const": 1e999}', "false", "[" * 5000])
def test_cve_2025_48942_what_is_no_schema_is_refused(llm: LLM, text: str) -> None:
    with pytest.raises(InputError, match=r"structured_outputs\.json"):
        ask(llm, "hi", held(json=text))


@pytest.mark.parametrize(
    "pattern",
    [
        *("(", "a)", "[", "a{3,1}", "[z-a]", "(?=a)b", "(?<!a)b", r"\bword", r"(a)\1", "a^b", "a$b"),
        *(r"\Qa", "a\\", "*", "\ud800"),
    ],
)
def test_cve_2025_48943_a_regex_that_cannot_be_kept_to_is_refused(llm: LLM, pattern: str) -> None:
    with pytest.raises(InputError, match=r"structured_outputs\.regex"):
        ask(llm, "hi", held(regex=pattern))


@pytest.mark.parametrize(
    "grammar",
    [
        *("", 'root ::= "a', 'rot ::= "a"', "root ::= x", "root ::= root", "\ud800", "a", 'root ::= ("a"'),
        *('root ::= * "a"', "root ::= []", 'root ::= "\\q"', "root ::= \u00e9", f"root ::= {'(' * 99}", "start: x"),
    ],
)
def test_a_grammar_that_is_none_is_refused(llm: LLM, grammar: str) -> None:
    with pytest.raises(InputError, match=r"structured_outputs\.grammar"):
        ask(llm, "hi", held(grammar=grammar))


def test_cve_2025_57809_recursion_is_followed(llm: LLM) -> None:
    tree = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    (output,) = ask(llm, "hi", held(300, HOT, json=tree))
    assert output.error is None
    nested: dict[str, Any] = {"type": "null"}
    for _ in range(20):
        nested = (
            {"anyOf": [nested, {"type": "array", "items": nested, "maxItems": 1}]} if _ < 6 else {"anyOf": [nested]}
        )
    assert ask(llm, "hi", held(30, json=nested))[0].error is None


def test_large_schemas_are_checked_in_no_time() -> None:
    branch = '{"type": "object", "properties": {"t": {"const": %d}}, "required": ["t"]}'
    parts = ",".join(branch % number for number in range(3000))
    chain = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(3000)}
    begin = time.thread_time()
    checked_schema(f'{{"oneOf": [{parts}]}}', "field")
    refused = refusal(checked_schema, json.dumps({"$defs": chain, "oneOf": [{"$ref": "#/$defs/d0"}] * 3000}), "field")
    assert refused is not None
    checked_regex("a" * 200_000, "field")
    assert time.thread_time() - begin < 2  # it took minutes


def test_a_deep_schema_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(40):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InputError, match="deep"):
        checked_schema(json.dumps(schema), "schema")


def test_a_model_without_an_end_or_a_tokenizer_says_so(tokenizer: PreTrainedTokenizerFast) -> None:
    options: dict[str, Any] = {"device": "cpu", "num_blocks": 20}
    with LLM(tiny("llama"), **options) as bare, pytest.raises(ModelError, match=r"structured_outputs.*tokenizer"):
        ask(bare, [5, 6], held(regex="a"))
    with LLM(tiny("llama", vocab_size=len(tokenizer)), tokenizer=tokenizer, **options) as endless:
        with pytest.raises(InputError, match="stop_token_ids"):
            ask(endless, "hi", held(regex="a"))
        stop = {**GREEDY, "stop_token_ids": [tokenizer.eos_token_id]}
        assert texts(ask(endless, "hi", held(9, stop, regex="abc"))[0]) == ["abc"]


def test_item_18_without_llguidance_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with make() as llm:
        with pytest.raises(
            NotSupported, match=r"^structured_outputs: llguidance is missing; pip install 'outpace\[structured\]'$"
        ):
            ask(llm, "hi", held(regex="a"))
        assert ask(llm, "hi", SamplingParams(max_tokens=2))[0].finished


# The parts


def refusal(check: Any, *arguments: Any, **options: Any) -> str | None:
    """Why a check refuses something; None: it does not."""
    try:
        check(*arguments, **options)
    except InputError as error:
        return str(error)
    return None


@given(
    sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=30),
    limit=st.integers(0, 60),
)
def test_cve_2025_32381_the_cache_keeps_its_limit(sizes: list[tuple[int, int]], limit: int) -> None:
    cache: SizedCache[int, int] = SizedCache(limit)
    kept: dict[int, int] = {}
    for key, size in sizes:
        kept[key] = size
        for gone in cache.put(key, size, size):
            del kept[gone]
        assert cache.num_bytes == sum(kept.values()) <= limit
        assert len(cache) == len(kept)
    assert {key: cache.get(key) for key in range(6)} == {key: kept.get(key) for key in range(6)}


def test_the_compiler_keeps_what_was_used_last(tokenizer: PreTrainedTokenizerFast) -> None:
    vocabulary = TokenVocabulary.of(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    compiler = Compiler(vocabulary)
    first = compiler.compile(Structure(regex="a+"))
    assert compiler.compile(Structure(regex="a+")) is first
    small = Compiler(vocabulary, cache_bytes=memory_of(first.text) + 1)
    once = small.compile(Structure(regex="a+"))
    small.compile(Structure(regex="b+"))
    assert small.compile(Structure(regex="a+")) is not once


def test_a_grammar_crosses_to_another_process(tokenizer: PreTrainedTokenizerFast) -> None:
    vocabulary = TokenVocabulary.of(tokenizer, 300, [tokenizer.eos_token_id])
    made = Compiler(vocabulary).compile(Structure(regex="ab"))
    received = TokenVocabulary.of_bytes(vocabulary.to_bytes())
    assert received.size == 300
    matcher = CompiledGrammar(made.text, received).matcher([tokenizer.eos_token_id])
    masks = np.zeros((2, 10), dtype=np.int32)
    for token in [*tokenizer("ab")["input_ids"], tokenizer.eos_token_id, tokenizer.eos_token_id]:
        matcher.fill(masks, 1)
        allowed = np.flatnonzero(np.unpackbits(masks[1].view(np.uint8), bitorder="little"))
        assert allowed.tolist() == [token]
        assert matcher.accept(token)
    assert not matcher.accept(0)


@settings(deadline=None)
@given(st.text(alphabet='ab|()[]{}^$\\?*+.dDwx0-9:<=!"&~', max_size=12))
def test_a_regex_matches_what_it_matches_in_python(compiler: Compiler, pattern: str) -> None:
    problem = refusal(compiler.compile, Structure(regex=pattern), "field")
    assert problem is None or problem.startswith("field: ")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            wanted = re.compile(pattern)
    except (re.error, FutureWarning):
        return
    if problem is not None:
        return
    made = compiler.compile(Structure(regex=pattern), "field")
    for text in ("", "a", "b.", ".", "\n", "a\n", "ab", "-", "]", "^", "9x", "&", "[a", "a]"):
        assert accepts(made, text) <= bool(wanted.fullmatch(text)), (pattern, text)


def test_a_dot_is_no_line_end(tokenizer: PreTrainedTokenizerFast) -> None:
    compiler = Compiler(TokenVocabulary.of(tokenizer, None, [tokenizer.eos_token_id]))
    for pattern in ("Name: .*", "Name: [.].{3}", r"Name: \..+"):
        matcher = compiler.compile(Structure(regex=pattern)).matcher([tokenizer.eos_token_id])
        assert all(matcher.accept(token) for token in tokenizer("Name: .a")["input_ids"])
        assert not matcher.accept(tokenizer("\n")["input_ids"][0])


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "items",
                    "properties",
                    "required",
                    "$ref",
                    "$defs",
                    "anyOf",
                    "oneOf",
                    "allOf",
                    "enum",
                    "const",
                    "a",
                ]
            ),
            inner | st.sampled_from(["object", "string", "array", "#", "#/$defs/a"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_a_schema_is_checked_without_trouble_and_once_is_enough(schema: Any) -> None:
    problem = refusal(checked_schema, json.dumps(schema), "field")
    assert problem is None or problem.startswith("field: ")
    if problem is None:
        found = checked_schema(json.dumps(schema), "field")
        assert checked_schema(found.text, "field").text == found.text
