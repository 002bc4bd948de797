"""Errors as clients see them: OpenAI's error bodies, without paths, addresses or tracebacks."""

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from outpace.errors import EngineDead, EngineUnavailable, InputError, NotSupported, OutpaceError, Overloaded

if TYPE_CHECKING:
    from fastapi.exceptions import RequestValidationError

_FIELD = re.compile(r"([a-z][a-z0-9_]*(?:[.\[][\w\].\[]*)?): ")
_LONGEST_MESSAGE = 1000
_STEP = re.compile(r"[a-z0-9_]+")
"""A field name or an index in the location of an error; other steps are names of types."""
_LAST = frozenset({408, 413, 431})  # the connection closes: the rest of the request is not read
DONE = b"data: [DONE]\n\n"
"""The last event of a stream, whole or broken."""
AMBIGUOUS = "ambiguous_length"
"""Code of requests whose length is ambiguous, because two headers give it."""
LOST = "engine_failed"
"""Code of requests that the engine began and could not finish."""


class ApiError(Exception):
    """An error that answers a request."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message[:_LONGEST_MESSAGE], param, code
        self.retry = retry
        """Whether the same request can work later."""

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        """The error as OpenAI writes it."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


_KINDS: Mapping[int, str] = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def at_most(name: str, value: int, limit: int, what: str = "") -> None:
    """Refuse a field with more of something than this server takes."""
    if value > limit:
        raise bad(name, f"{value} is more than this server takes: {limit} {what}".rstrip(), "limit_exceeded")


class ClientGone(Exception):
    """The client has closed the connection."""


def bad(param: str, message: str, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def as_api_error(error: BaseException, request_id: str) -> ApiError:
    """The error that a client gets; details of unexpected ones are only in the log, under the request's id."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), code=_CODES.get(error.status_code))
    if isinstance(error, Overloaded):
        return ApiError(429, str(error), code="overloaded", retry=True)
    if isinstance(error, EngineDead):
        code = "engine_unavailable" if isinstance(error, EngineUnavailable) else LOST
        return ApiError(503, str(error), code=code, retry=True)
    if isinstance(error, TimeoutError):
        return ApiError(504, "The request took longer than the server's request_timeout.", code="timeout")
    if isinstance(error, InputError | NotSupported):
        found = _FIELD.match(str(error))
        return ApiError(400, str(error), param=found[1] if found else None)
    from fastapi.exceptions import RequestValidationError  # imported late: some processes answer without FastAPI

    if isinstance(error, RequestValidationError):
        return _of_validation(error)
    code = "engine_error" if isinstance(error, OutpaceError) else "internal_error"
    return ApiError(500, f"The server had an error; its log has it under request id {request_id}.", code=code)


_CODES: Mapping[int, str] = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


def _of_validation(error: "RequestValidationError") -> ApiError:
    """The first thing that is wrong with a body or a path, by the name of its field."""
    first = error.errors()[0]
    path = _dotted([str(step) for step in first["loc"][1:] if _STEP.fullmatch(str(step))])
    message = str(first["msg"]).removeprefix("Value error, ").replace(" after validation", "")  # of lengths of lists
    if first["type"] == "value_error" and (found := _FIELD.match(message)):
        inner = found[1]  # the name of a field of the object, or of the object itself
        path = inner if not path or inner == path.rpartition(".")[2] else f"{path}.{inner}"
        message = message[found.end() :]
    else:
        message = f"{message[:1].lower()}{message[1:]}"
    if not path and first["type"] == "missing":
        return ApiError(400, "the body is empty; send a JSON object", code="invalid_body")
    if not path:
        return ApiError(400, f"the body is not what the route takes: {message}", code="invalid_body")
    return ApiError(400, f"{path}: {message}", param=path, code=_param_code(first["type"], message))


def _dotted(steps: list[str]) -> str:
    text = ""
    for step in steps:
        text += f"[{step}]" if step.isdigit() else f".{step}" if text else step
    return text


def _param_code(kind: str, message: str) -> str:
    if kind == "missing":
        return "missing_required_parameter"
    return "unknown_parameter" if message.startswith("unknown") else "invalid_value"


def is_stream(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether an answer with these headers is a stream of events."""
    return any(name == b"content-type" and b"event-stream" in value for name, value in headers)


def error_response(error: ApiError, request_id: str, retry_after: int) -> Response:
    """The response for an error."""
    headers = {"x-request-id": request_id}
    if error.retry:
        headers["retry-after"] = str(retry_after)
    if error.status in _LAST or error.code == AMBIGUOUS:
        headers["connection"] = "close"
    if error.status == 401:
        headers["www-authenticate"] = 'Bearer realm="outpace"'
    return Response(msgspec.json.encode(error.body), error.status, headers, "application/json")
