"""Schemas that people have: they work, and what no grammar enforces is checked when the answer is finished."""

import json
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field, HttpUrl, SecretStr

from outpace import LLM, FinishReason, InputError, SamplingParams
from outpace import StructuredOutputs as Structure
from outpace.structured.check import SchemaCheck
from outpace.structured.compile import Compiler
from tests.test_structured import accepts, compiler, make  # noqa: F401 - a fixture

LETTERS = "abcdefghij" * 101


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def text(most: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": most}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make()


@pytest.mark.parametrize("most", [69, 128, 300, 1000])
def test_item_22_strings_of_any_length(compiler: Compiler, most: int) -> None:  # noqa: F811
    grammar = compiler.compile(Structure(json=closed(a=text(most))))
    assert grammar.later == ()
    assert accepts(grammar, json.dumps({"a": LETTERS[:most]}))
    assert accepts(grammar, json.dumps({"a": 'a"\n'}))
    assert not accepts(grammar, json.dumps({"a": LETTERS[: most + 1]}))


def test_item_22_counts(compiler: Compiler) -> None:  # noqa: F811
    five = compiler.compile(Structure(json=closed(**{name: text(20) for name in "abcde"})))
    assert accepts(five, json.dumps(dict.fromkeys("abcde", LETTERS[:20])))
    assert not accepts(five, json.dumps(dict.fromkeys("abcde", LETTERS[:21])))
    pattern = compiler.compile(Structure(regex="[a-z]{1,100}"))
    assert accepts(pattern, LETTERS[:100])
    assert not accepts(pattern, LETTERS[:101])
    many = compiler.compile(Structure(json={"type": "array", "items": {"type": "integer"}, "maxItems": 500}))
    assert accepts(many, json.dumps([1] * 500))
    assert not accepts(many, json.dumps([1] * 501))


@pytest.mark.parametrize(
    "note",
    [
        *({"x-order": 3}, {"nullable": True}, {"strict": True}, {"propertyOrdering": ["a"]}, {"example": 1}),
        *({"contentEncoding": "base64"}, {"contentMediaType": "text/plain"}, {"x-guidance": {"lenient": True}}),
        *({"format": "path"}, {"format": "password"}, {"format": "binary"}, {"format": "uri-template"}),
        *({"format": ["odd"]}, {"markdownDescription": "*"}, {"uniqueItems": False}, {"banana": {"type": 5}}),
    ],
    ids=str,
)
def test_item_22_annotations_and_unknown_formats_are_ignored(compiler: Compiler, note: dict[str, Any]) -> None:  # noqa: F811
    for schema in (
        {"type": "string", **note},
        closed(a={"type": "string", **note}),
        {"anyOf": [{"type": "string"}], **note},
    ):
        grammar = compiler.compile(Structure(json=schema))
        assert grammar.later == ()
        value = {"a": "anything"} if schema.get("type") == "object" else "anything"
        assert accepts(grammar, json.dumps(value))
        assert not accepts(grammar, "5")


class Colour(Enum):
    """A key or a value."""

    RED = "red"
    BLUE = "blue"


PYDANTIC: list[tuple[Any, tuple[str, ...], list[str], list[str]]] = [
    (HttpUrl, (), ['"https://example.org/a?b=c"'], ['"no"', "5"]),
    (Path, (), ['"/tmp/a b"'], ["5"]),
    (SecretStr, (), ['"secret"'], ["5"]),
    (bytes, (), ['"bytes"'], ["5"]),
    (dict[Colour, int], (), ['{"red": 1}', '{"red": 1, "blue": 2}', "{}"], ['{"green": 1}', '{"red": "a"}']),
    (Annotated[int, Field(ge=10, multiple_of=5)], (), ["10", "25"], ["5", "11"]),
    (Annotated[float, Field(ge=0, le=1, multiple_of=0.25)], (), ["0.25", "1"], ["0.3", "1.25"]),
    (set[int], ("properties.value.uniqueItems",), ["[1, 2]", "[1, 1]"], ['["a"]']),
    (frozenset[Colour], ("properties.value.uniqueItems",), ['["red"]'], ['["green"]']),
    (Decimal, (), ["1.5", '"1.5"'], ["true"]),
    (tuple[int, str], (), ['[1, "a"]'], ["[1]", '[1, "a", 2]']),
    (int | None, (), ["1", "null"], ['"a"']),
    (dict[str, list[int]], (), ['{"a": [1]}'], ['{"a": 1}']),
]


@pytest.mark.parametrize(("kind", "later", "right", "wrong"), PYDANTIC, ids=lambda value: str(value)[:40])
def test_item_22_types_of_pydantic(
    compiler: Compiler,  # noqa: F811
    kind: Any,
    later: tuple[str, ...],
    right: list[str],
    wrong: list[str],
) -> None:
    model: Any = type("Model", (BaseModel,), {"__annotations__": {"value": kind}})
    grammar = compiler.compile(Structure(json=model.model_json_schema()))
    assert grammar.later == later
    assert all(accepts(grammar, f'{{"value": {value}}}') for value in right)
    assert not any(accepts(grammar, f'{{"value": {value}}}') for value in wrong)


@pytest.mark.parametrize(
    ("schema", "later", "right", "wrong"),
    [
        ({"not": {"const": 5}}, "not", "6", "5"),
        ({"if": {"type": "integer"}, "then": {"minimum": 3}}, "if", "4", "2"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems", "[1, 2]", "[1, 1]"),
        ({"type": "array", "contains": {"type": "string"}}, "contains", '["a"]', "[1]"),
        ({"oneOf": [{"type": "string"}, {"const": "a"}]}, "oneOf", '"b"', '"a"'),
        ({"type": "string", "pattern": "^(?!x)."}, "pattern", '"a"', '"x"'),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired", '{"b": 1}', '{"a": 1}'),
        ({"type": "object", "propertyNames": {"maxLength": 1}}, "propertyNames", '{"b": 1}', '{"ab": 1}'),
        (
            {"properties": {name: {"type": "integer"} for name in "abc"}, "minProperties": 2},
            *("minProperties", '{"a": 1, "b": 2}', '{"a": 1}'),
        ),
        ({"type": "integer", "multipleOf": 10**9}, "multipleOf", "2000000000", "2000000001"),
    ],
    ids=str,
)
def test_item_22_what_no_grammar_enforces_is_checked(
    compiler: Compiler,  # noqa: F811
    schema: dict[str, Any],
    later: str,
    right: str,
    wrong: str,
) -> None:
    grammar = compiler.compile(Structure(json=schema))
    assert grammar.later == (later,)
    assert accepts(grammar, right)
    assert accepts(grammar, wrong), "the grammar is looser"
    check = SchemaCheck(json.dumps(schema), grammar.later, "field")
    assert check(right).valid
    assert not check(wrong).valid
    assert check(wrong).checked == (later,)
    assert not check("{").valid


@pytest.mark.parametrize(("most", "valid"), [(1, True), (2, False)])
def test_item_22_an_answer_says_what_was_checked(llm: LLM, most: int, valid: bool) -> None:
    schema = {"type": "array", "items": {"const": "a"}, "uniqueItems": True, "minItems": most, "maxItems": most}
    params = SamplingParams(max_tokens=200, temperature=0.0, structured_outputs=Structure(json=schema))
    answer = llm.generate("hi", params, use_tqdm=False)[0].outputs[0]
    assert answer.finish_reason is FinishReason.STOP
    assert answer.structure_check is not None
    assert answer.structure_check.checked == ("uniqueItems",)
    assert answer.structure_check.valid == valid
    assert (answer.structure_check.problem is None) == valid
    plain = SamplingParams(max_tokens=200, temperature=0.0, structured_outputs=Structure(json={"const": "a"}))
    assert llm.generate("hi", plain, use_tqdm=False)[0].outputs[0].structure_check is None
    cut = SamplingParams(max_tokens=2, temperature=0.0, structured_outputs=Structure(json=schema))
    assert llm.generate("hi", cut, use_tqdm=False)[0].outputs[0].structure_check is None


def test_item_22_white_space_can_be_turned_off(llm: LLM, compiler: Compiler) -> None:  # noqa: F811
    loose = compiler.compile(Structure(json=closed(a={"type": "integer"})))
    assert accepts(loose, '{ "a":\n 1 }')
    assert not accepts(loose, f'{{{" " * 41}"a": 1}}')
    compact = compiler.compile(Structure(json=closed(a={"type": "integer"}), disable_any_whitespace=True))
    assert accepts(compact, '{"a":1}')
    assert not accepts(compact, '{"a": 1}')
    structure = Structure(json_object=True, disable_any_whitespace=True)
    params = SamplingParams(max_tokens=30, temperature=1.5, seed=1, structured_outputs=structure)
    assert llm.generate("hi", params, use_tqdm=False)[0].outputs[0].text.startswith("{")
    with pytest.raises(InputError, match="disable_any_whitespace"):
        Structure(regex="a", disable_any_whitespace=True)
    odd: Any = "yes"
    with pytest.raises(InputError, match="disable_any_whitespace"):
        Structure(json_object=True, disable_any_whitespace=odd)


def test_schemas_that_add_to_each_other_are_not_closed(compiler: Compiler) -> None:  # noqa: F811
    base = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    more = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
    schemas: list[dict[str, Any]] = [
        {"allOf": [base, more]},
        {"$defs": {"Base": base}, "allOf": [{"$ref": "#/$defs/Base"}, more]},
        {"$defs": {"Base": base}, "$ref": "#/$defs/Base", **more},
    ]
    for schema in schemas:
        grammar = compiler.compile(Structure(json=schema))
        assert accepts(grammar, '{"a": 1, "b": 2}') or accepts(grammar, '{"b": 2, "a": 1}'), schema
        assert not accepts(grammar, '{"a": 1}')
    assert not accepts(compiler.compile(Structure(json=base)), '{"a": 1, "b": 2}'), "a schema alone is closed"


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ('root ::= [a-z]+ "a"', ["ba", "aa"], ["ab", "a"]),
        ('root ::= x "a"\nx ::= [a-z]+', ["ba", "baa"], ["b"]),
        ('root ::= "(" root ")" | [0-9]+', ["((12))", "7"], ["(7"]),
        ('root ::= "\\u00e9\\x41😀\\n" [\\-\\]a-c^] .{1,2} # comment\n', ["éA😀\n-xy", "éA😀\n]é"], ["éA😀\nd"]),
        ('root ::= ("a" | )  "b"?\n  | "c"{2,3}', ["", "ab", "b", "cc"], ["c"]),
        ("root ::= [^a-z\\d] [\\w]", ["A1"], ["a1", "1a"]),
        ('start: "a" [B]\nB: /b+/', ["a", "abb"], ["b"]),
    ],
)
def test_grammars_are_read_as_people_write_them(
    compiler: Compiler,  # noqa: F811
    grammar: str,
    right: list[str],
    wrong: list[str],
) -> None:
    made = compiler.compile(Structure(grammar=grammar))
    assert [text for text in right if not accepts(made, text)] == []
    assert [text for text in wrong if accepts(made, text)] == []
