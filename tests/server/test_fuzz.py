"""B-1: whatever the schema allows or forbids, on every route, against a real server with its engine.

The suite runs the same few examples each time; OUTPACE_FUZZ_EXAMPLES=500 runs that many others for each route and mode,
which ones `--hypothesis-seed` says.
"""

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
from tests.server.fake import FakeEngine
from tests.server.live import NAMES, Live

GIVEN = os.environ.get("OUTPACE_FUZZ_EXAMPLES")
EXAMPLES = int(GIVEN or 60)
LONGEST = 10  # seconds of a request
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
PROBE: Any = {"prompt": "are you there?", "max_tokens": 2, "temperature": 0, "ignore_eos": True}


def operations() -> list[tuple[str, str, GenerationMode]]:
    """Every route that /openapi.json names; one without a body cannot be asked wrong."""
    tokenizer = byte_tokenizer()
    app = create_app(FakeEngine(tokenizer), ServerConfig(), tokenizer)
    app.state.serving.close()
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
        deadline=LONGEST * 1000,
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
    """What the schema cannot say: which names the model has, without which few requests come past the first check.

    And answers stay short: without a limit those of MII and of chats fill the context.
    """
    if isinstance(case.body, dict):
        if isinstance(case.body.get("model"), str):
            case.body["model"] = NAMES[0]
        if case.path.startswith("/mii") and case.body.get("max_new_tokens") is None:
            case.body["max_new_tokens"] = 4
        if "messages" in case.body and case.path.startswith("/v1") and case.body.get("max_completion_tokens") is None:
            case.body["max_tokens"] = 4
    for name in case.path_parameters or {}:
        case.path_parameters[name] = NAMES[0]


def probe(session: requests.Session, live: Live) -> None:
    """The engine answers, and it is the one that was started."""
    answer = session.post(f"{live.url}/v1/completions", json=PROBE, timeout=LONGEST)
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 2)
    assert session.get(f"{live.url}/status", timeout=LONGEST).json()["restarts"] == 0


def test_b1_routes_that_are_not_in_the_schema() -> None:
    """The page and its files, which take nothing, are all that schemathesis does not know."""
    tokenizer = byte_tokenizer()
    app = create_app(FakeEngine(tokenizer), ServerConfig(), tokenizer)
    app.state.serving.close()
    known = {path for _, path, _ in operations()}

    def walk(routes: Any) -> Iterator[str]:
        for route in routes:
            if isinstance(route, Route):
                yield route.path.replace(":path}", "}")
            else:
                yield from walk(vars(route).get("routes", ()))

    assert set(walk(app.routes)) - known <= {"/", "/web/{name}", "/docs", "/docs/oauth2-redirect", "/openapi.json"}
