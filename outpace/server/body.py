"""Reads JSON bodies strictly: no duplicate names, no NaN, no broken characters, no deep nesting.

Long bodies are read and validated in threads. Even there, one long call of C code holds the GIL and blocks the event
loop: `max_json_containers` limits the cost of such a call, and everything else is split into short calls.
"""

import asyncio
import contextlib
import json
import math
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from outpace.server.big_jobs import BigJobs
from outpace.server.fields import STRICT
from outpace.server.options import ServerConfig
from outpace.server.problems import ClientGone, at_most, bad

SHORT = 32 * 2**10  # bytes; longer bodies are read in a thread
LONG = 256 * 2**10  # bytes; longer bodies are read one at a time
_STRINGS = 4  # strings allowed for each allowed array or object
_SHOWN = 20  # characters of a wrong number that an error repeats
_LONGEST_INTEGER = 300  # digits; a float holds no longer one
_WINDOW = 64 * 2**10  # bytes scanned in one call
_MARK = b"\xef\xbb\xbf"  # UTF-8's byte order mark, which is dropped
_COUNTED: Mapping[str, str] = {"messages": "max_messages", "tools": "max_tools"}
"""Lists whose items are expensive to validate -> the option that limits their length."""


class TooManyError(ValueError):
    """More arrays and objects, or strings, than a body may have."""


class OddNumberError(ValueError):
    """A number that JSON does not have, or that is too large."""

    def __init__(self, text: str, field: str | None) -> None:
        is_name = text[-1:].isalpha()
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
        super().__init__(f"{shown} is not JSON; use a finite number" if is_name else f"{shown} is out of range")
        self.field = field
        """The field of the body that has it."""


def parse(data: bytes, options: ServerConfig) -> Any:
    """The value of a JSON text. ValueError: what is wrong with the text."""
    data = data.removeprefix(_MARK)
    containers, strings, names = _structure(data)
    most = options.max_json_containers
    if containers > most:
        raise TooManyError(f"it has {containers} arrays and objects; this server takes {most}")
    if strings > _STRINGS * most:
        raise TooManyError(f"it has {strings} strings; this server takes {_STRINGS * most}")
    try:
        value = msgspec.json.decode(data) if len(data) < LONG else _decode(data)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8; send it uncompressed") from None
    except msgspec.MsgspecError:
        if (odd := _odd_number(data)) is not None:
            raise odd from None
        raise
    if _names(value, containers, options) != names:
        raise ValueError(_twice(data))
    return value


def _structure(data: bytes) -> tuple[int, int, int]:
    """Count arrays and objects, strings, and names in objects of a JSON text."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    containers = quotes = names = inside = 0
    for begin in range(0, len(data), _WINDOW):
        pieces = data[begin : begin + _WINDOW].split(b'"')
        outside = b"".join(pieces[inside::2])
        containers += outside.count(b"[") + outside.count(b"{")
        names += outside.count(b":")
        quotes += len(pieces) - 1
        inside = quotes & 1
    return containers, quotes // 2, names


def _decode(data: bytes) -> Any:
    """Decode a long JSON text; long lists of numbers in its fields in pieces, see the top of this file."""
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        return msgspec.json.decode(data)  # not an object
    return {name: _field(bytes(each)) for name, each in fields.items()}


def _field(data: bytes) -> Any:
    flat = len(data) > _WINDOW and data.count(b"[") == 1 and data[:1] == b"[" and data[-1:] == b"]"
    if not flat or b'"' in data or b"{" in data:
        return msgspec.json.decode(data)
    values: list[Any] = []
    begin, end = 1, len(data) - 1
    while True:
        comma = data.find(b",", begin + _WINDOW, end)
        found = msgspec.json.decode(b"[" + data[begin : comma if comma >= 0 else end] + b"]")
        if not found and (values or comma >= 0):
            raise ValueError("a value is missing in a list")
        values += found
        if comma < 0:
            return values
        begin = comma + 1


def _largest_field(data: bytes) -> str:
    """The field of a body that has most arrays, objects and strings."""
    fields: dict[str, msgspec.Raw] = {}
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        fields = msgspec.json.decode(data.removeprefix(_MARK), type=dict[str, msgspec.Raw])
    return max(fields, key=lambda name: sum(_structure(bytes(fields[name]))), default="body")[:80]


def _names(value: Any, containers: int, options: ServerConfig) -> int:
    """Count the names in all objects of a value. ValueError: one object has too many, or the nesting is too deep."""
    names, level = 0, [value] if isinstance(value, dict | list) else []
    for _ in range(options.max_json_depth):
        for each in level:
            if type(each) is dict:
                names += len(each)
                if len(each) > options.max_json_keys:
                    raise ValueError(f"an object has more than {options.max_json_keys} names")
        containers -= len(level)
        if not level or containers <= 0:  # no containers are left: skip long lists of numbers
            return names
        level = [
            child
            for parent in level
            for child in (parent.values() if type(parent) is dict else parent)
            if type(child) is dict or type(child) is list
        ]
    raise ValueError(f"it is nested deeper than {options.max_json_depth} levels")


def _twice(data: bytes) -> str:
    """The error message for a text in which an object has a name twice."""
    found: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen and not found:
                found.append(name)
            seen.add(name)

    json.loads(data, object_pairs_hook=unique)
    return f"{found[0][:80]!r} is given twice" if found else "a name is given twice"


def _odd_number(data: bytes) -> OddNumberError | None:
    """The error for a text that has NaN, an infinity, or a number out of range; None: something else is wrong."""
    odd: list[str] = []

    def note(text: str) -> object:
        odd.append(text)
        return odd

    try:
        value = json.loads(
            data,
            parse_constant=note,
            parse_int=lambda text: note(text) if len(text) > _LONGEST_INTEGER else 0,
            parse_float=lambda text: 0 if math.isfinite(float(text)) else note(text),
        )
    except (ValueError, RecursionError):
        return None
    fields = value if isinstance(value, dict) else {}
    named = (name for name, each in fields.items() if name.isascii() and name.isprintable() and _holds(each, odd))
    return OddNumberError(odd[0], next(named, "")[:80] or None) if odd else None


def _holds(value: object, wanted: object) -> bool:
    """Whether this object is in a JSON value."""
    left = [value]
    while left:
        if (each := left.pop()) is wanted:
            return True
        left += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
    return False


def _read(data: bytes, model: type[BaseModel], options: ServerConfig) -> BaseModel:
    try:
        value = parse(data, options)
    except TooManyError as error:
        raise bad(_largest_field(data), str(error), "limit_exceeded") from None
    except OddNumberError as error:
        if error.field is not None:
            raise bad(error.field, str(error), "invalid_value") from None
        raise HTTPException(400, f"The body is not valid JSON: {error}") from None
    except ValueError as error:
        raise HTTPException(400, f"The body is not valid JSON: {error}"[:500]) from None
    for name, option in _COUNTED.items():
        if isinstance(value, dict) and isinstance(given := value.get(name), list) and name in model.model_fields:
            at_most(name, len(given), getattr(options, option), name)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False, include_context=False)
        raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in wrong]) from None


async def read(data: bytes, model: type[BaseModel], options: ServerConfig, jobs: BigJobs) -> BaseModel:
    """Parse and validate a body, off the event loop if it is long."""
    if len(data) < SHORT:
        return _read(data, model, options)
    if len(data) < LONG:
        return await asyncio.to_thread(_read, data, model, options)
    return await jobs.run(_read, data, model, options)


class _ReadRequest(Request):
    """A request whose body is already validated: FastAPI gets the model instead of JSON."""

    validated: BaseModel

    async def json(self) -> Any:
        """The body."""
        return self.validated


class StrictRoute(APIRoute):
    """A route that reads JSON strictly, and only from clients that say they send it.

    A page of another site can make a browser send text/plain anywhere, but not application/json.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler with a strict request."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        model: Any = self.body_field.field_info.annotation

        async def strict(request: Request) -> Response:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise HTTPException(415, "Send the body as application/json.")
            encoding = request.headers.get("content-encoding", "identity").strip().lower()
            if encoding not in ("", "identity"):
                raise HTTPException(415, f"Content-Encoding: {encoding[:40]} is not supported; send it uncompressed.")
            state, request = request.app.state, _ReadRequest(request.scope, request.receive)
            STRICT.set(state.options.strict_fields)
            try:
                data = await request.body()
            except ClientDisconnect:  # FastAPI would answer 400
                raise ClientGone from None
            if data:
                request.validated = await read(data, model, state.options, state.services.bodies)
            return await handle(request)

        return strict
