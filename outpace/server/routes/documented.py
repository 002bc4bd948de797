"""Describes answers in /openapi.json: every route may answer with OpenAI's error body."""

from collections.abc import Mapping
from typing import Any

from outpace.server.responses import ErrorBody

_ERRORS: Mapping[str, str] = {
    "4XX": (
        "400: the request is wrong, and the message names the field. 401: the API key is missing or wrong. 404: there "
        "is no such model or path. 408, 413, 415, 431: the body or the headers are too slow, too long or of a wrong "
        "kind. 429: too many requests; Retry-After says when to come back."
    ),
    "5XX": (
        "500: the server failed, and its log has the request id. 503: the engine is not ready; Retry-After says when "
        "to come back. 504: the request took too long."
    ),
}

_EVENT: Mapping[str, Any] = {
    "type": "object",
    "description": "One event: a chunk of the answer as JSON; the last event is [DONE].",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}
"""Before OpenAPI 3.2 the schema of a stream is that of each of its events."""


def answers(model: Any, description: str, *, stream: bool = False, content: str | None = None) -> dict[int | str, Any]:
    """The responses of a route: 200 with this model, and the errors."""
    ok: dict[str, Any] = {"description": description}
    if model is not None:
        ok["model"] = model
    if stream:
        ok["content"] = {"text/event-stream": {"schema": _EVENT}}
    if content is not None:
        ok["content"] = {content: {"schema": {"type": "string"}}}
    errors: dict[int | str, Any] = {
        status: {"model": ErrorBody, "description": text} for status, text in _ERRORS.items()
    }
    return {200: ok, **errors}
