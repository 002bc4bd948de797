"""OpenAI's own client against a real server: every option of every route has its effect, streamed or not."""

import asyncio
import base64
import inspect
import json
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from outpace import __version__
from outpace.server import chat_protocol, protocol
from outpace.server.fields import Body
from tests.patience import PATIENCE
from tests.server.conftest import Serve
from tests.server.fake import FakeEngine, says
from tests.server.live import BEGIN, END, MAX_MODEL_LEN, MAX_NUM_SEQS, NAMES, A, B, Live

pytestmark = pytest.mark.anyio
COMPLETIONS, CHAT = "completions", "chat"
HI = [{"role": "user", "content": "hello"}]
START: Mapping[str, Any] = {COMPLETIONS: {"prompt": "hello"}, CHAT: {"messages": HI}}
BASE: Mapping[str, Any] = {"max_tokens": 12, "temperature": 0, "return_token_ids": True}
STREAM: Mapping[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
RANDOM: Mapping[str, Any] = {"temperature": 1.5, "seed": 5}
ALL_A: Mapping[str, Any] = {"logit_bias": {str(A): 100}}
ALL_END: Mapping[str, Any] = {"logit_bias": {str(END): 100}}
TOOL = {
    "type": "function",
    "function": {"name": "find", "description": "d", "parameters": {"type": "object"}, "strict": False},
}
SCHEMA = {
    "type": "object",
    "properties": {"big": {"type": "boolean"}},
    "required": ["big"],
    "additionalProperties": False,
}
BIG = r'\{\s*"big"\s*:\s*(true|false)\s*\}'
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "city", "description": "d", "strict": True, "schema": SCHEMA},
}
FIND_BIG = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}
FIND_ANY = {"type": "function", "function": {"name": "other"}}
NAMED = {"type": "function", "function": {"name": "find"}}
ONE_CALL = {"parallel_tool_calls": False, "max_tokens": 200}


@dataclass
class Asked:
    """A request's answer, what the same request without the option got, and a way to ask more."""

    live: Live
    client: OpenAI
    route: str
    answer: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)

    def ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A plain answer as JSON."""
        return create(self.client, self.route, body).to_dict()

    def ask_stream(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A stream as the plain answer it stands for."""
        return put_together([chunk.to_dict() for chunk in create(self.client, self.route, {**body, **STREAM})])

    @property
    def choice(self) -> dict[str, Any]:
        """The first answer."""
        return self.answer["choices"][0]

    @property
    def text(self) -> str:
        """Its text."""
        return text_of(self.choice)

    @property
    def ids(self) -> list[int]:
        """Its tokens."""
        return self.choice["token_ids"]

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens of the prompt."""
        return (self.answer if self.route == CHAT else self.choice)["prompt_token_ids"]

    @property
    def prompt(self) -> str:
        """The prompt as the model sees it."""
        with self.live.http() as client:
            return client.post("/detokenize", json={"tokens": self.prompt_ids}).json()["prompt"]

    @property
    def end(self) -> tuple[Any, Any]:
        """Why it ended."""
        return self.choice["finish_reason"], self.choice["stop_reason"]


def create(client: Any, route: str, body: Mapping[str, Any]) -> Any:
    """Ask through the client: what it does not know goes into `extra_body`."""
    method = client.completions.create if route == COMPLETIONS else client.chat.completions.create
    known = inspect.signature(method).parameters
    body = {"model": NAMES[0], **START[route], **body}
    named = {name: value for name, value in body.items() if name in known}
    return method(**named, extra_body={name: value for name, value in body.items() if name not in known})


def text_of(choice: Mapping[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def put_together(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The plain answer that a stream is the pieces of; it must have one end for each answer, and then the usage."""
    *pieces, last = chunks
    assert last["choices"] == []
    assert all(piece["usage"] is None for piece in pieces)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    answer = {name: value for piece in reversed(pieces) for name, value in piece.items()}
    answer |= {"usage": last["usage"], "object": str(last["object"]).removesuffix(".chunk")}
    parts: dict[int, list[dict[str, Any]]] = {}
    for piece in pieces:
        for choice in piece["choices"]:
            parts.setdefault(choice["index"], []).append(choice)
    for each in parts.values():
        assert [part["finish_reason"] is not None for part in each] == [False] * (len(each) - 1) + [True]
    answer["choices"] = [one_choice(parts[index]) for index in sorted(parts)]
    return answer


def one_choice(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    choice: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            before = choice.get(name)
            if name == "delta":
                message = choice.setdefault("message", {"role": value.get("role"), "content": ""})
                message["content"] += value.get("content") or ""
                if calls := value.get("tool_calls"):  # each comes whole
                    message["tool_calls"] = message.get("tool_calls", []) + calls
            elif name == "logprobs" and before is not None and value is not None:
                choice[name] = {key: (before[key] or []) + (value[key] or []) or None for key in before}
            elif name in ("text", "token_ids") and before is not None and value is not None:
                choice[name] = before + value
            elif value is not None or name not in choice:
                choice[name] = value
    if calls := choice.get("message", {}).get("tool_calls"):
        choice["message"]["content"] = choice["message"]["content"] or None
        assert [call.pop("index") for call in calls] == list(range(len(calls)))
    return choice


def same(left: Any, right: Any) -> bool:
    """Equal, with some room for floats: what is in the cache is added up in another order. Null is no value."""
    if isinstance(left, dict) and isinstance(right, dict):
        return all(same(left.get(name), right.get(name)) for name in left.keys() | right.keys())
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=1e-3, abs_tol=1e-4)
    return bool(left == right)


def without_names(answer: Any) -> Any:
    """An answer without what is drawn, told by a clock, or found in the cache, at any depth."""
    if isinstance(answer, list):
        return [without_names(each) for each in answer]
    if not isinstance(answer, dict):
        return answer
    other = ("id", "created", "prompt_tokens_details")
    return {name: without_names(value) for name, value in answer.items() if name not in other}


# What each option must do


def as_base(asked: Asked) -> None:
    assert asked.answer["choices"] == asked.base["choices"]


def changed(asked: Asked) -> None:
    assert asked.text != text_of(asked.base["choices"][0])


def is_text(wanted: str, reason: str = "length", stop: object = None) -> Callable[[Asked], None]:
    def check(asked: Asked) -> None:
        assert (asked.text, asked.end) == (wanted, (reason, stop))

    return check


def has_prompt(wanted: str) -> Callable[[Asked], None]:
    def check(asked: Asked) -> None:
        assert asked.prompt == wanted

    return check


def has_tokens(wanted: Sequence[int], reason: str, stop: object = None) -> Callable[[Asked], None]:
    def check(asked: Asked) -> None:
        assert (asked.ids, asked.end) == (list(wanted), (reason, stop))

    return check


def of_three(asked: Asked) -> None:
    assert [choice["index"] for choice in asked.answer["choices"]] == [0, 1, 2]
    assert len({text_of(choice) for choice in asked.answer["choices"]}) == 3
    assert asked.answer["usage"]["completion_tokens"] == 36
    assert asked.answer["usage"]["prompt_tokens"] == asked.base["usage"]["prompt_tokens"]


def five_tokens(asked: Asked) -> None:
    assert (len(asked.ids), asked.answer["usage"]["completion_tokens"], asked.end[0]) == (5, 5, "length")


def repeatable(asked: Asked) -> None:
    body = {**BASE, **RANDOM}
    assert asked.ask(body)["choices"][0]["token_ids"] == asked.ids
    assert asked.ask({**body, "seed": 6})["choices"][0]["token_ids"] != asked.ids


def never_twice(asked: Asked) -> None:
    assert len(set(asked.ids)) == len(asked.ids)
    assert not set(asked.ids) & set(asked.prompt_ids)


def by_and_by_others(asked: Asked) -> None:
    assert asked.ids[0] == A
    assert 1 < asked.ids.count(A) < len(asked.ids)


def three_before_the_end(asked: Asked) -> None:
    assert len(asked.ids) == 4
    assert END not in asked.ids[:3]
    assert asked.ids[3] == END
    assert asked.end == ("stop", None)


def only_a_and_b(asked: Asked) -> None:
    assert set(asked.ids) <= {A, B}
    assert len(asked.ids) == 12


def no_aaa(asked: Asked) -> None:
    assert "aa" in asked.text
    assert "aaa" not in asked.text


def of_the_prompt(asked: Asked) -> None:
    found = (asked.answer if asked.route == CHAT else asked.choice)["prompt_logprobs"]
    assert len(found) == len(asked.prompt_ids)
    assert found[0] is None
    for token, entry in zip(asked.prompt_ids[1:], found[1:], strict=True):
        assert str(token) in entry
        assert len(entry) in (2, 3)
        assert all(-100 < each["logprob"] <= 0 for each in entry.values())
        assert {1, 2} <= {each["rank"] for each in entry.values()}


def two_tokens(asked: Asked) -> None:
    assert asked.prompt_ids == ([75, 78] if asked.route == COMPLETIONS else [83, 28])  # "lo", "t="
    assert asked.answer["usage"]["prompt_tokens"] == 2


def begin_token(asked: Asked) -> None:
    """Texts have it unless told, chats only if told."""
    assert (asked.prompt_ids[0] == BEGIN) == (asked.route == CHAT)
    assert len(asked.prompt_ids) == asked.base["usage"]["prompt_tokens"] + (1 if asked.route == CHAT else -1)


def no_tokens_told(asked: Asked) -> None:
    told = {**asked.answer, **asked.choice}
    assert (told["token_ids"], told["prompt_token_ids"]) == (None, None)


def names_are_ids(asked: Asked) -> None:
    logprobs = asked.choice["logprobs"]
    names = logprobs["tokens"] if asked.route == COMPLETIONS else [each["token"] for each in logprobs["content"]]
    assert names == [f"token_id:{token}" for token in asked.ids]


def hits(live: Live) -> float:
    with live.http() as client:
        lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("outpace:prefix_cache_hits_total{"))


def shared_by_salt(asked: Asked, name: str = "cache_salt") -> None:
    """The same prompt is found in the cache only with the same salt."""
    text = "a prompt of several blocks " * 4
    long: dict[str, Any] = {"max_tokens": 1}
    long |= {"messages": [{"role": "user", "content": text}]} if asked.route == CHAT else {"prompt": text}
    found = []
    for salt in (f"x-{name}-{asked.route}", f"x-{name}-{asked.route}", f"y-{name}-{asked.route}"):
        before = hits(asked.live)
        asked.ask({**long, name: salt})
        found.append(hits(asked.live) - before)
    assert found[1] >= 64
    assert found[::2] == [0, 0]


def two_likeliest(asked: Asked) -> None:
    logprobs = asked.choice["logprobs"]
    assert [len(logprobs[name]) for name in sorted(logprobs)] == [12] * 4
    assert "".join(logprobs["tokens"]) == asked.text
    assert logprobs["text_offset"] == list(range(12))
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert list(top.values()) == sorted(top.values(), reverse=True)
        assert len(top) == 2
        assert top[token] == logprob == max(top.values())  # it was chosen greedily
        assert -100 < min(top.values()) <= logprob <= 0


def named_and_chosen(asked: Asked) -> None:
    logprobs = asked.choice["logprobs"]
    if asked.route == COMPLETIONS:
        chosen, tops = logprobs["tokens"], [set(top) for top in logprobs["top_logprobs"]]
    else:
        chosen = [each["token"] for each in logprobs["content"]]
        tops = [{other["token"] for other in each["top_logprobs"]} for each in logprobs["content"]]
    assert tops == [{"a", "b", token} for token in chosen]
    assert len(tops) == 12


def own_alone(asked: Asked) -> None:
    logprobs = asked.choice["logprobs"]
    assert [list(top) for top in logprobs["top_logprobs"]] == [[token] for token in logprobs["tokens"]]


def prompt_first(asked: Asked) -> None:
    assert asked.text == "hello" + text_of(asked.base["choices"][0])
    assert without_names(asked.answer["usage"]) == without_names(asked.base["usage"])


def prompt_first_with_logprobs(asked: Asked) -> None:
    prompt_first(asked)
    logprobs = asked.choice["logprobs"]
    assert len(logprobs["tokens"]) == asked.answer["usage"]["total_tokens"]
    assert logprobs["token_logprobs"][0] is None
    assert all(-100 < each <= 0 for each in logprobs["token_logprobs"][1:])


def three_likeliest_of_chat(asked: Asked) -> None:
    content = asked.choice["logprobs"]["content"]
    assert "".join(each["token"] for each in content) == asked.text
    assert bytes(byte for each in content for byte in each["bytes"]).decode() == asked.text
    for each in content:
        top = [other["logprob"] for other in each["top_logprobs"]]
        assert (len(top), top) == (3, sorted(top, reverse=True))
        assert each["top_logprobs"][0]["token"] == each["token"]
        assert -100 < top[-1] <= top[0] == each["logprob"] <= 0


def none_but_the_token(asked: Asked) -> None:
    content = asked.choice["logprobs"]["content"]
    assert [each["top_logprobs"] for each in content] == [[]] * 12


def matches(pattern: str) -> Callable[[Asked], None]:
    """The whole answer is of this form, and ends by itself."""

    def check(asked: Asked) -> None:
        assert re.fullmatch(pattern, asked.text), asked.text
        assert asked.end[0] == "stop"

    return check


def is_object(asked: Asked) -> None:
    assert asked.text.startswith("{")


def is_a_call(asked: Asked) -> None:
    (call,) = asked.choice["message"]["tool_calls"]
    assert call["function"]["name"] == "find"
    assert json.loads(call["function"]["arguments"]).keys() == {"big"}
    assert asked.end[0] == "tool_calls"
    assert not asked.choice["message"].get("content")


def served_by_alias(asked: Asked) -> None:
    assert asked.answer["model"] == NAMES[1]
    as_base(asked)


@dataclass(frozen=True)
class Case:
    """An option, and what it must do."""

    body: Mapping[str, Any]
    check: Callable[[Asked], None]


NEUTRAL: Mapping[str, Any] = {
    "best_of": 1,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "store": False,
    "metadata": {"run": "7"},
    "service_tier": "auto",
    "safety_identifier": "somebody",
    "prompt_cache_retention": "24h",
}
"""Fields of other servers at values that change nothing."""
NEUTRAL_IN_CHAT: Mapping[str, Any] = {"modalities": ["text"], "echo": False, "include_reasoning": True}
SHARED = {
    **{name: Case({name: value}, as_base) for name, value in NEUTRAL.items()},
    "prompt_cache_key": Case({"prompt_cache_key": "s"}, lambda asked: shared_by_salt(asked, "prompt_cache_key")),
    "model": Case({"model": NAMES[1]}, served_by_alias),
    "n": Case({"n": 3, **RANDOM}, of_three),
    "max_tokens": Case({"max_tokens": 5}, five_tokens),
    "temperature": Case({"temperature": 1.5, "seed": 1}, changed),
    "top_p": Case({"top_p": 1e-6, **RANDOM}, as_base),
    "top_k": Case({"top_k": 1, **RANDOM}, as_base),
    "min_p": Case({"min_p": 1.0, **RANDOM}, as_base),
    "seed": Case(RANDOM, repeatable),
    "stop, a list": Case({"stop": ["zzz", "aaa"], **ALL_A}, is_text("", "stop", "aaa")),
    "stop, a text": Case({"stop": "a", **ALL_A}, is_text("", "stop", "a")),
    "include_stop_str_in_output": Case(
        {"stop": ["aaa"], "include_stop_str_in_output": True, **ALL_A}, is_text("aaa", "stop", "aaa")
    ),
    "presence_penalty": Case({"presence_penalty": 2.0, "max_tokens": 40}, changed),
    "frequency_penalty": Case(
        {"frequency_penalty": 2.0, "max_tokens": 40, "logit_bias": {str(A): 30}}, by_and_by_others
    ),
    "repetition_penalty": Case({"repetition_penalty": 1000.0}, never_twice),
    "logit_bias": Case(ALL_A, is_text("a" * 12)),
    "response_format, text": Case({"response_format": {"type": "text"}}, as_base),
    "response_format, json_object": Case({"response_format": {"type": "json_object"}}, is_object),
    "response_format, json_schema": Case({"response_format": FORMAT, "max_tokens": 90}, matches(BIG)),
    "structured_outputs": Case({"structured_outputs": {"regex": "[xy]{4}"}}, matches("[xy]{4}")),
    "guided_json": Case({"guided_json": SCHEMA, "max_tokens": 90}, matches(BIG)),
    "guided_regex": Case({"guided_regex": "[xy]{4}"}, matches("[xy]{4}")),
    "guided_choice": Case({"guided_choice": ["left", "right"]}, matches("left|right")),
    "guided_grammar": Case({"guided_grammar": 'root ::= "x" [0-9]'}, matches("x[0-9]")),
    "user": Case({"user": "somebody"}, as_base),  # it stands in the access log, see test_limits.py
    "min_tokens": Case({"min_tokens": 3, **ALL_END}, three_before_the_end),
    "the end token": Case(ALL_END, has_tokens([END], "stop")),
    "ignore_eos": Case({"ignore_eos": True, **ALL_END}, has_tokens([END] * 12, "length")),
    "special tokens are left out": Case({"ignore_eos": True, **ALL_END}, is_text("")),
    "skip_special_tokens": Case({"skip_special_tokens": False, "ignore_eos": True, **ALL_END}, is_text("<|end|>" * 12)),
    "spaces_between_special_tokens": Case({"spaces_between_special_tokens": True}, as_base),
    "stop_token_ids": Case({"stop_token_ids": [B, A], **ALL_A}, has_tokens([A], "stop", A)),
    "allowed_token_ids": Case({"allowed_token_ids": [A, B]}, only_a_and_b),
    "bad_words": Case({"bad_words": ["aaa"], **ALL_A}, no_aaa),
    "prompt_logprobs": Case({"prompt_logprobs": 2}, of_the_prompt),
    "truncate_prompt_tokens": Case({"truncate_prompt_tokens": 2}, two_tokens),
    "cache_salt": Case({"cache_salt": "s"}, shared_by_salt),
    "return_token_ids": Case({"return_token_ids": False}, no_tokens_told),
    "priority": Case({"priority": 7}, as_base),  # its effect is in a test below
}
OF_COMPLETIONS = {
    **SHARED,
    "prompt of ids": Case({"prompt": [BEGIN, 71, 68, 75, 75, 78]}, as_base),
    "prompt in a list": Case({"prompt": ["hello"]}, as_base),
    "prompt of ids in a list": Case({"prompt": [[BEGIN, 71, 68, 75, 75, 78]]}, as_base),
    "suffix": Case({"suffix": ""}, as_base),
    "echo": Case({"echo": True}, prompt_first),
    "logprobs": Case({"logprobs": 2}, two_likeliest),
    "logprobs of none": Case({"logprobs": 0}, own_alone),
    "logprob_token_ids": Case({"logprobs": 5, "logprob_token_ids": [A, B]}, named_and_chosen),
    "echo and logprobs": Case({"echo": True, "logprobs": 1}, prompt_first_with_logprobs),
    "add_special_tokens": Case({"add_special_tokens": False}, begin_token),
    "return_tokens_as_token_ids": Case({"return_tokens_as_token_ids": True, "logprobs": 1}, names_are_ids),
}
CALLS = {
    "id": "c1",
    "type": "function",
    "function": {"name": "find", "arguments": '{"x": 1}'},
    "index": 0,
    "provider_specific_fields": {"thought": "t"},
}
CACHED_PART = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}
ECHOED_PROMPT = "user=hello;assistant=<r>a;user=hello;assistant="
ECHOED: Mapping[str, Any] = {
    "role": "assistant",
    "content": "a",
    "refusal": None,
    "annotations": [],
    "audio": None,
    "function_call": None,
    "tool_calls": None,
    "reasoning": "r",
    "reasoning_content": "r",
    "id": "msg_1",
    "provider_specific_fields": {"refusal": None},
}
"""An answer as clients send it back."""
OF_CHAT = {
    **SHARED,
    **{name: Case({name: value}, as_base) for name, value in NEUTRAL_IN_CHAT.items()},
    "reasoning_effort": Case({"reasoning_effort": "low"}, has_prompt("low!user=hello;assistant=")),
    "reasoning_effort, none": Case({"reasoning_effort": "none"}, has_prompt("noneuser=hello;assistant=")),
    "verbosity": Case({"verbosity": "high"}, has_prompt("highuser=hello;assistant=")),
    "messages echoed back": Case({"messages": [*HI, ECHOED, *HI]}, has_prompt(ECHOED_PROMPT)),
    "messages with a refusal": Case(
        {"messages": [*HI, {"role": "assistant", "content": None, "refusal": "no"}, *HI]},
        has_prompt("user=hello;assistant=no;user=hello;assistant="),
    ),
    "messages to be cached": Case(
        {"messages": [{"role": "user", "content": [CACHED_PART], "cache_control": {"type": "ephemeral"}}]}, as_base
    ),
    "max_completion_tokens": Case({"max_completion_tokens": 5, "max_tokens": 5}, five_tokens),
    "logprobs": Case({"logprobs": True}, none_but_the_token),
    "top_logprobs": Case({"logprobs": True, "top_logprobs": 3}, three_likeliest_of_chat),
    "logprob_token_ids": Case({"logprobs": True, "logprob_token_ids": [A, B]}, named_and_chosen),
    "add_special_tokens": Case({"add_special_tokens": True}, begin_token),
    "return_tokens_as_token_ids": Case({"return_tokens_as_token_ids": True, "logprobs": True}, names_are_ids),
    "messages of parts": Case(
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]}]},
        has_prompt("user=he\nllo;assistant="),
    ),
    "messages of all roles": Case(
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "developer", "content": "d"},
                {"role": "user", "content": "u", "name": "eve"},
                {"role": "assistant", "content": None, "tool_calls": [CALLS]},
                {"role": "tool", "content": "t", "tool_call_id": "c1"},
            ]
        },
        has_prompt('system=s;system=d;user(eve)=u;assistant=c1:find{"x": 1};tool=t#c1;assistant='),
    ),
    "tools": Case({"tools": [TOOL]}, lambda asked: (asked.prompt.index('"name": "find"'), None)[1]),
    "tool_choice, none": Case({"tools": [TOOL], "tool_choice": "none"}, as_base),
    "tool_choice, auto": Case(
        {"tools": [TOOL], "tool_choice": "auto"}, lambda asked: (asked.prompt.index('"name": "find"'), None)[1]
    ),
    "tool_choice, required": Case({"tools": [FIND_BIG], "tool_choice": "required", **ONE_CALL}, is_a_call),
    "tool_choice, a name": Case({"tools": [FIND_ANY, FIND_BIG], "tool_choice": NAMED, **ONE_CALL}, is_a_call),
    "add_generation_prompt": Case({"add_generation_prompt": False}, has_prompt("user=hello;")),
    "continue_final_message": Case(
        {"messages": [*HI, {"role": "assistant", "content": "Well"}], "continue_final_message": True},
        has_prompt("user=hello;assistant=Well"),
    ),
    "chat_template_kwargs": Case(
        {"chat_template_kwargs": {"mood": "happy:"}}, has_prompt("happy:user=hello;assistant=")
    ),
    "documents": Case({"documents": [{"text": "doc"}]}, has_prompt("[doc]user=hello;assistant=")),
}
ROUTES: Mapping[str, Mapping[str, Case]] = {COMPLETIONS: OF_COMPLETIONS, CHAT: OF_CHAT}


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[OpenAI]:
    with live.openai() as client:
        yield client


@pytest.fixture(scope="module")
def bases(live: Live, client: OpenAI) -> dict[str, dict[str, Any]]:
    """What each route answers without options."""
    return {route: Asked(live, client, route).ask(BASE) for route in ROUTES}


@pytest.mark.parametrize(("route", "name"), [(route, name) for route, cases in ROUTES.items() for name in cases])
def test_each_option_has_its_effect(
    live: Live, client: OpenAI, bases: Mapping[str, dict[str, Any]], route: str, name: str
) -> None:
    case, asked = ROUTES[route][name], Asked(live, client, route, base=bases[route])
    body = {**BASE, **case.body}
    plain, streamed = asked.ask(body), asked.ask_stream(body)
    assert same(without_names(streamed), without_names(plain))
    assert plain["usage"]["total_tokens"] == plain["usage"]["prompt_tokens"] + plain["usage"]["completion_tokens"]
    asked.answer = plain
    case.check(asked)


def test_several_prompts_with_several_answers(live: Live, client: OpenAI) -> None:
    asked = Asked(live, client, COMPLETIONS)
    body = {**BASE, "prompt": ["hello", "b"], "n": 2}
    plain, alone = asked.ask(body), [asked.ask({**BASE, "prompt": text}) for text in ("hello", "b")]
    texts = [text_of(choice) for choice in plain["choices"]]
    assert texts == [text_of(each["choices"][0]) for each in alone for _ in range(2)]
    assert [choice["index"] for choice in plain["choices"]] == [0, 1, 2, 3]
    assert same(without_names(asked.ask_stream(body)), without_names(plain))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("include", [False, True])
def test_usage_in_each_chunk(client: OpenAI, route: str, include: bool) -> None:
    options = {"continuous_usage_stats": True, "include_usage": include}
    stream = create(client, route, {**BASE, "stream": True, "stream_options": options})
    chunks = [chunk.to_dict() for chunk in stream]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 12
    assert (chunks[-1]["choices"] == []) == include


@pytest.mark.parametrize("route", ROUTES)
def test_without_stream_options_there_is_no_usage(client: OpenAI, route: str) -> None:
    chunks = [chunk.to_dict() for chunk in create(client, route, {**BASE, "stream": True})]
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


async def test_priority(live: Live) -> None:
    """Who is more urgent passes those who wait."""
    order: list[str] = []
    long = {"max_tokens": 300, "ignore_eos": True}
    async with live.async_openai() as client:

        async def ask(name: str, **fields: Any) -> None:
            await create(client, COMPLETIONS, {"prompt": name, **long, **fields})
            order.append(name)

        tasks = [asyncio.create_task(ask(f"early {number}")) for number in range(MAX_NUM_SEQS)]
        await until_status(live, running=MAX_NUM_SEQS)
        tasks += [asyncio.create_task(ask(f"late {number}", max_tokens=1, priority=5)) for number in range(3)]
        await until_status(live, waiting=3)
        tasks.append(asyncio.create_task(ask("urgent", priority=-1, max_tokens=1)))
        await asyncio.gather(*tasks)
    assert order.index("urgent") < min(order.index(f"late {number}") for number in range(3))


async def until_status(live: Live, **wanted: int) -> None:
    with live.http() as client:
        async with asyncio.timeout(PATIENCE):
            while any(client.get("/status").json()[name] < value for name, value in wanted.items()):
                await asyncio.sleep(0.001)


async def test_the_client_for_asyncio(live: Live, bases: Mapping[str, dict[str, Any]]) -> None:
    async with live.async_openai() as client:
        for route in ROUTES:
            plains = await asyncio.gather(*(create(client, route, BASE) for _ in range(8)))
            assert all(plain.to_dict()["choices"] == bases[route]["choices"] for plain in plains)
            stream = await create(client, route, {**BASE, **STREAM})
            streamed = put_together([chunk.to_dict() async for chunk in stream])
            assert same(streamed["choices"], bases[route]["choices"])


async def test_parallel_tool_calls(serve: Serve, tokenizer: Any) -> None:
    text = '<tool_call>\n{"name": "find", "arguments": {"x": "é"}}\n</tool_call>' * 2
    server = serve(FakeEngine(tokenizer, says(text)), tool_call_parser="hermes")
    async with server.openai() as client:
        for parallel in (True, False):
            body = {"model": "fake", "tools": [TOOL], "parallel_tool_calls": parallel}
            choice = (await create(client, CHAT, body)).choices[0]
            assert choice.finish_reason == "tool_calls"
            assert [call.function.name for call in choice.message.tool_calls] == ["find"] * (2 if parallel else 1)
            assert json.loads(choice.message.tool_calls[0].function.arguments) == {"x": "é"}


async def test_chat_template(serve: Serve) -> None:
    body = {"model": "fake", "chat_template": "own {{ messages[0].content }}", "return_token_ids": True}
    async with serve().openai() as refusing, serve(allow_request_chat_template=True).openai() as client:
        with pytest.raises(BadRequestError, match="chat_template"):
            await create(refusing, CHAT, body)
        answer = (await create(client, CHAT, body)).to_dict()
    assert answer["usage"]["prompt_tokens"] == len("own hello")


# The other routes


def vectors(client: OpenAI, **fields: Any) -> list[list[float]]:
    extra = {
        name: fields.pop(name) for name in list(fields) if name not in ("input", "model", "encoding_format", "user")
    }
    answer = client.embeddings.create(**{"model": NAMES[0], "input": "hello", **fields}, extra_body=extra)
    assert [entry.index for entry in answer.data] == list(range(len(answer.data)))
    if fields.get("encoding_format") != "base64":  # without one the client asks for base64, too, and decodes it
        return [entry.embedding for entry in answer.data]
    data = [base64.b64decode(str(entry.embedding)) for entry in answer.data]
    return [list(struct.unpack(f"<{len(each) // 4}f", each)) for each in data]


EMBEDDINGS: Mapping[str, Mapping[str, Any]] = {
    "input of ids": {"input": [BEGIN, 71, 68, 75, 75, 78]},
    "input of several": {"input": ["hello", "b"]},
    "model": {"model": NAMES[1]},
    "float": {"encoding_format": "float"},
    "base64": {"encoding_format": "base64"},
    "mean": {"pooling": "mean"},
    "last": {"pooling": "last"},
    "normalize": {"normalize": False},
    "dimensions": {"dimensions": 8},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 1},
    "add_special_tokens": {"add_special_tokens": False},
    "user": {"user": "somebody"},
}
OTHER = {"last", "normalize", "dimensions", "truncate_prompt_tokens", "add_special_tokens"}
"""Options that change the vector."""


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embeddings(client: OpenAI, name: str) -> None:
    plain = client.embeddings.create(model=NAMES[0], input="hello", encoding_format="float")
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == 6
    base = plain.data[0].embedding
    assert math.isclose(math.hypot(*base), 1.0, rel_tol=1e-5)
    found = vectors(client, **EMBEDDINGS[name])
    assert (found[0] == pytest.approx(base, abs=1e-5)) == (name not in OTHER)
    assert math.isclose(math.hypot(*found[0]), 1.0, rel_tol=1e-5) == (name != "normalize")
    assert len(found) == (2 if name == "input of several" else 1)
    if name == "dimensions":
        short = base[:8]
        assert found[0] == pytest.approx([value / math.hypot(*short) for value in short], abs=1e-5)
    if name == "truncate_prompt_tokens":
        assert found[0] == pytest.approx(vectors(client, input="o", add_special_tokens=False)[0], abs=1e-5)


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == list(NAMES)
    for name in NAMES:
        assert client.models.retrieve(name).to_dict()["max_model_len"] == MAX_MODEL_LEN
    with pytest.raises(NotFoundError):
        client.models.retrieve("other")


CHAT_TEXT = "user=hello;assistant="
TOKENIZE: Sequence[tuple[Mapping[str, Any], str]] = [
    ({"prompt": "hello"}, "<|begin|>hello"),
    ({"prompt": "hello", "model": NAMES[1]}, "<|begin|>hello"),
    ({"prompt": "hello", "add_special_tokens": False}, "hello"),
    ({"messages": HI}, CHAT_TEXT),
    ({"messages": HI, "add_special_tokens": True}, f"<|begin|>{CHAT_TEXT}"),
    ({"messages": HI, "add_generation_prompt": False}, "user=hello;"),
    ({"messages": HI, "return_token_strs": True}, CHAT_TEXT),
    (
        {"messages": [*HI, {"role": "assistant", "content": "Well"}], "continue_final_message": True},
        "user=hello;assistant=Well",
    ),
    ({"messages": HI, "chat_template_kwargs": {"mood": "happy:"}}, f"happy:{CHAT_TEXT}"),
    ({"messages": HI, "tools": [TOOL]}, json.dumps([{**TOOL}]) + CHAT_TEXT),
]


@pytest.mark.parametrize(("body", "wanted"), TOKENIZE)
def test_tokenize_and_back(live: Live, body: Mapping[str, Any], wanted: str) -> None:
    with live.http() as client:
        found = client.post("/tokenize", json=body).json()
        back = client.post("/detokenize", json={"tokens": found["tokens"], "model": NAMES[0]}).json()
    assert back == {"prompt": wanted}
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), MAX_MODEL_LEN)
    assert found["token_strs"] == (list(wanted) if "return_token_strs" in body else None)


def mii(live: Live, **fields: Any) -> Any:
    with live.http() as client:
        return client.post(f"/mii/{NAMES[1]}", json={"prompts": "hello", "max_new_tokens": 12, **fields}).json()


GREEDY: Mapping[str, Any] = {"do_sample": False}
MII: Mapping[str, tuple[Mapping[str, Any], Callable[[dict[str, Any], str], bool]]] = {
    "prompts": ({"prompts": ["hello"], **GREEDY}, lambda found, greedy: found["generated_text"] == greedy),
    "max_new_tokens": ({"max_new_tokens": 5, **GREEDY}, lambda found, greedy: found["generated_text"] == greedy[:5]),
    "max_length": ({"max_length": 10, **GREEDY}, lambda found, greedy: found["generated_length"] == 4),
    "min_new_tokens": ({"min_new_tokens": 12, **GREEDY}, lambda found, greedy: found["generated_length"] == 12),
    "top_p": ({"top_p": 1e-6}, lambda found, greedy: found["generated_text"] == greedy),
    "top_k": ({"top_k": 1}, lambda found, greedy: found["generated_text"] == greedy),
    "temperature": ({"temperature": 1e-4}, lambda found, greedy: found["generated_text"] == greedy),
    "ignore_eos": ({"ignore_eos": True, **GREEDY}, lambda found, greedy: found["generated_length"] == 12),
    "return_full_text": (
        {"return_full_text": True, **GREEDY},
        lambda found, greedy: found["generated_text"] == f"hello{greedy}",
    ),
    "seed": (
        {"seed": 3, "temperature": 1.5, "top_p": 1.0, "stream": False},
        lambda found, greedy: found["generated_text"] != greedy,
    ),
}


@pytest.mark.parametrize("name", MII)
def test_mii(live: Live, name: str) -> None:
    (plain,) = mii(live, **GREEDY)
    greedy = plain["generated_text"]
    assert (plain["prompt_length"], plain["generated_length"], plain["finish_reason"]) == (6, 12, "length")
    fields, check = MII[name]
    (found,) = mii(live, **fields)
    assert check(found, greedy)
    assert [found] == mii(live, **fields)


def test_mii_stop(live: Live) -> None:
    (plain,) = mii(live, **GREEDY)
    stop = plain["generated_text"][2:4]
    (found,) = mii(live, stop=[stop], **GREEDY)
    assert (found["finish_reason"], found["generated_text"]) == ("stop", plain["generated_text"].partition(stop)[0])


def test_the_rest(live: Live) -> None:
    with live.http() as client:
        assert client.get("/version").json() == {"version": __version__}
        for path in ("/health", "/healthz", "/health/live", "/health/ready"):
            assert client.get(path).json()["status"] == "ok"
        metrics = client.get("/metrics").text  # of replicas on a cluster, each with its name
        assert re.search(r'^outpace:num_requests_running\{(replica="\w+",)?model_name="tiny"\}', metrics, re.MULTILINE)
        assert client.get("/status").json()["model"] == "tiny"


# Nothing is ignored in silence

OF_CLIENT = frozenset({"extra_headers", "extra_query", "extra_body", "timeout", "self"})
OF_VLLM = (
    *("best_of", "use_beam_search", "length_penalty", "early_stopping", "logits_processors", "prompt_embeds"),
    *("mm_processor_kwargs", "media_io_kwargs", "kv_transfer_params", "ec_transfer_params", "vllm_xargs", "request_id"),
    *("logprob_token_ids", "flat_logprobs", "include_reasoning", "thinking_token_budget", "repetition_detection"),
    *(
        "structural_tag",
        "return_prompt_text",
        "data_parallel_rank",
        "use_audio_in_video",
        "lora_path",
        "trust_remote_code",
    ),
)


def unsupported() -> Iterator[tuple[str, str]]:
    """(route, field): everything that OpenAI's client or vLLM can send and this server does not know."""
    with OpenAI(api_key="none") as client:
        known: dict[str, tuple[Callable[..., Any], type[Body]]] = {
            "/v1/completions": (client.completions.create, protocol.CompletionRequest),
            "/v1/chat/completions": (client.chat.completions.create, protocol.ChatRequest),
            "/v1/embeddings": (client.embeddings.create, protocol.EmbeddingRequest),
        }
        for route, (method, model) in known.items():
            names = {*inspect.signature(method).parameters, *OF_VLLM} - OF_CLIENT
            yield from ((route, name) for name in sorted(names - model.model_fields.keys()))


UNSUPPORTED = list(unsupported())


@pytest.mark.parametrize("route", sorted({route for route, _ in UNSUPPORTED}))
async def test_fields_that_are_not_supported_are_named(serve: Serve, route: str) -> None:
    start: dict[str, Any] = {
        "/v1/completions": START[COMPLETIONS],
        "/v1/chat/completions": START[CHAT],
        "/v1/embeddings": {"input": "a"},
    }[route]
    names = [name for other, name in UNSUPPORTED if other == route]
    assert len(names) > 10
    server = serve(access_log=False)
    async with server.http() as client:
        for name in names:
            for value in (True, "x", 3, {"a": 1}):
                answer = await client.post(route, json={**start, name: value})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), answer.text
    assert server.engine.requests == []


# Every field has a case


def used(value: Any) -> Iterator[tuple[str, str]]:
    """(model, field) of everything that a request gives."""
    if isinstance(value, Body):
        for name in value.model_fields_set:
            yield type(value).__name__, name
            yield from used(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            yield from used(item)


SENT: Mapping[type[Body], Sequence[Mapping[str, Any]]] = {
    protocol.CompletionRequest: [
        {**START[COMPLETIONS], **STREAM},
        {**START[COMPLETIONS], "stream": True, "stream_options": {"include_obfuscation": False}},
        *({**START[COMPLETIONS], **case.body} for case in OF_COMPLETIONS.values()),
    ],
    protocol.ChatRequest: [
        {**START[CHAT], **STREAM, "chat_template": "x", "tools": [TOOL], "parallel_tool_calls": False},
        *({**START[CHAT], **case.body} for case in OF_CHAT.values()),
    ],
    protocol.EmbeddingRequest: [{"input": "a", **fields} for fields in EMBEDDINGS.values()],
    protocol.TokenizeRequest: [body for body, _ in TOKENIZE],
    protocol.DetokenizeRequest: [{"tokens": [1], "model": NAMES[0]}],
    protocol.MiiRequest: [{"prompts": "hello", "stop": ["a"], **fields} for fields, _ in MII.values()],
}


def kinds() -> Iterator[type[Body]]:
    """The models of protocol.py that no other inherits from."""
    for kind in {**vars(chat_protocol), **vars(protocol)}.values():
        if isinstance(kind, type) and issubclass(kind, Body) and kind is not Body and not kind.__subclasses__():
            yield kind


def test_every_field_of_the_protocol_has_a_case() -> None:
    covered = {pair for kind, bodies in SENT.items() for body in bodies for pair in used(kind.model_validate(body))}
    covered |= {("StreamOptions", "continuous_usage_stats")}  # test_usage_in_each_chunk
    covered |= {
        (kind.__name__, name) for kind in (chat_protocol.TextPart,) for name in kind.model_fields
    }  # joined to a text
    declared = {(kind.__name__, name) for kind in kinds() for name in kind.model_fields}
    assert declared - covered == set()
