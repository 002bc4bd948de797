"""B-1: whatever the schema allows or forbids, on every route, against a real server with its engine.

The suite runs the same few examples each time; OUTPACE_FUZZ_EXAMPLES=500 runs that many others for each route and mode,
which ones `--hypothesis-seed` says.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

from outpace.server.app import create_app
from outpace.server.options import ServerConfig
from tests.models import byte_tokenizer
from tests.patience import PATIENCE
from tests.server.fake import FakeEngine
from tests.server.live import MAX_MODEL_LEN, NAMES, VOCAB, Live

GIVEN = os.environ.get("OUTPACE_FUZZ_EXAMPLES")
EXAMPLES = int(GIVEN or 60)
LONGEST = PATIENCE  # of a request
TOKENS = 64  # of the answers to a request
LENGTHS = {
    "/v1/completions": ("max_tokens", 16),
    "/v1/chat/completions": ("max_completion_tokens", MAX_MODEL_LEN),
    "/mii/{deployment}": ("max_new_tokens", MAX_MODEL_LEN),
}
"""What bounds an answer, and what it is without."""
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
PROBE: Any = {"prompt": "are you there?", "max_tokens": 2, "temperature": 0, "ignore_eos": True}


def operations() -> list[tuple[str, str, GenerationMode]]:
    """Every route that /openapi.json names; one without a body cannot be asked wrong."""
    tokenizer = byte_tokenizer()
    app = create_app(FakeEngine(tokenizer), ServerConfig(), tokenizer)
    app.state.services.close()
    modes: Mapping[str, list[GenerationMode]] = {"post": list(GenerationMode), "get": [GenerationMode.POSITIVE]}
    paths = app.openapi()["paths"]
    return [(method.upper(), path, mode) for path in paths for method in paths[path] for mode in modes[method]]


@pytest.fixture(scope="module")
def fuzzed(live: Live) -> Iterator[tuple[Any, requests.Session]]:
    """The schema of the server, and a connection to it."""
    with requests.Session() as session:
        yield schemathesis.openapi.from_url(f"{live.url}/openapi.json"), session


@pytest.mark.parametrize(("method", "path", "mode"), operations())
def test_b1_whatever_the_schema_allows_or_forbids(
    live: Live, fuzzed: Any, method: str, path: str, mode: GenerationMode
) -> None:
    schema, session = fuzzed
    operation = schema[path][method]
    positive = mode is GenerationMode.POSITIVE
    checks = CHECKS if positive else [*CHECKS, negative_data_rejection]
    seen: Counter[int] = Counter()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize=GIVEN is None,
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def fuzz(case: Any) -> None:
        if positive:
            complete(case)
        response = case.call_and_validate(checks=checks, session=session, timeout=LONGEST)
        seen[response.status_code] += 1
        if seen.total() % 50 == 0:
            probe(session, live)

    fuzz()
    probe(session, live)
    assert set(seen) <= {200, 400, 404, 405}
    assert (seen[200] > 0) == positive, seen


def complete(case: Any) -> None:
    """What the schema cannot say, without which few requests come past the first check; and answers stay short."""
    if isinstance(case.body, dict):
        if len(repr(case.body)) % 4:  # the others stay as they are
            case.body = allowed(case.body)
        if case.path in LENGTHS:
            shorten(case.body, *LENGTHS[case.path])
    for name in case.path_parameters or {}:
        case.path_parameters[name] = NAMES[0]


def allowed(given: dict[str, Any]) -> dict[str, Any]:
    """A body with what its fields must have together, and with names and tokens that the model has."""
    body: dict[str, Any] = whole(given)
    if isinstance(body.get("model"), str):
        body["model"] = NAMES[0]
    for name in {"prompt", "input", "tokens"} & body.keys():
        body[name] = near(body[name])
    for message in body.get("messages") or ():
        fit(message)
    if {"input", "tokens", "prompts"}.isdisjoint(body) and (body.get("prompt") is None) == (not body.get("messages")):
        body |= {"prompt": "a", "messages": None}  # of /tokenize, which takes either
    return body


def whole(value: Any) -> Any:
    """2.0 is an integer to JSON schema, but not to this server."""
    if isinstance(value, dict):
        return {name: whole(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return list(map(whole, value))
    return int(value) if isinstance(value, float) and value.is_integer() else value


def near(prompt: Any) -> Any:
    """Most token ids are the model's, some are just not."""
    if isinstance(prompt, list):
        return list(map(near, prompt))
    return prompt % (VOCAB + 8) if isinstance(prompt, int) else prompt


def fit(message: dict[str, Any]) -> None:
    """A message has what its role needs, and nothing that belongs to another."""
    for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if message["role"] != role:
            message.pop(name, None)
    for call in message.get("tool_calls") or ():
        call["function"]["arguments"] = json.dumps({"given": call["function"]["arguments"]})
    if message.get("content") is None and not message.get("tool_calls"):
        message["content"] = "a"


def shorten(body: dict[str, Any], usual: str, default: int) -> None:
    """All answers together have TOKENS tokens at most, or one each; lengths that are refused stay as they are."""
    asked = body.get("prompt", body.get("prompts"))
    prompts = asked if isinstance(asked, list) and not isinstance(asked[0], int) else [asked]
    most = int(max(1, TOKENS // (len(prompts) * (body.get("n") or 1))))
    longest = 2**31 if "prompts" in body else MAX_MODEL_LEN  # MII's is cut to the room that there is
    names = ("max_tokens", "max_completion_tokens", "max_new_tokens")
    for name in [name for name in names if body.get(name) is not None] or [usual]:
        if most < (body.get(name) or default) <= longest:
            body[name] = most


def probe(session: requests.Session, live: Live) -> None:
    """The engine answers, and it is the one that was started."""
    answer = session.post(f"{live.url}/v1/completions", json=PROBE, timeout=LONGEST)
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 2)
    assert session.get(f"{live.url}/status", timeout=LONGEST).json()["restarts"] == 0


def test_b1_routes_that_are_not_in_the_schema() -> None:
    """The page and its files, which take nothing, are all that schemathesis does not know."""
    tokenizer = byte_tokenizer()
    app = create_app(FakeEngine(tokenizer), ServerConfig(), tokenizer)
    app.state.services.close()
    known = {path for _, path, _ in operations()}

    def walk(routes: Any) -> Iterator[str]:
        for route in routes:
            if isinstance(route, Route):
                yield route.path.replace(":path}", "}")
            else:
                yield from walk(vars(route).get("routes", ()))

    assert set(walk(app.routes)) - known <= {"/", "/web/{name}", "/docs", "/docs/oauth2-redirect", "/openapi.json"}
