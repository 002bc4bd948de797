"""Bodies as JSON, read strictly: no duplicate names, no NaN, no half characters, no bottomless nesting."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from outpace.server.fields import STRICT
from outpace.server.problems import ClientGone

_SHORT = 32 * 2**10  # bytes; more are parsed in a thread


def parse(data: bytes, depth: int, keys: int) -> Any:
    """A JSON value, or ValueError with what is wrong."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(pairs) > keys:
            raise ValueError(f"an object has more than {keys} names")
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise ValueError(f"{twice[:80]!r} is given twice")
        return found

    try:
        text = data.decode("utf-8-sig")  # a mark at the beginning says nothing
        value = json.loads(text, object_pairs_hook=unique, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8; a compressed body is not taken") from None
    except ValueError as error:
        raise ValueError("a number has too many digits" if "set_int_max" in str(error) else str(error)) from None
    _check_depth(value, depth)
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("it has a half character: a surrogate without its partner") from None
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _check_depth(value: Any, depth: int) -> None:
    level: list[Any] = [value]
    for _ in range(depth):
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {depth} levels")


class _StrictRequest(Request):
    """A request whose `json` is `parse`, off the event loop if it is long."""

    async def json(self) -> Any:
        """The body as JSON."""
        options, data = self.app.state.options, await self.body()
        arguments = (data, options.max_json_depth, options.max_json_keys)
        try:
            return parse(*arguments) if len(data) < _SHORT else await asyncio.to_thread(parse, *arguments)
        except ValueError as error:
            raise HTTPException(400, f"The body is not valid JSON: {error}"[:500]) from None


class StrictRoute(APIRoute):
    """A route that reads JSON strictly, and only from clients that say they send it.

    A page of another site can make a browser send text/plain anywhere, but not application/json.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler with a strict request."""
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if self.body_field is not None and kind != "application/json":
                raise HTTPException(415, "Send the body as application/json.")
            STRICT.set(request.app.state.options.strict_fields)
            strictly = _StrictRequest(request.scope, request.receive)
            if self.body_field is not None:
                try:
                    await strictly.body()  # FastAPI would make a 400 of a client that leaves meanwhile
                except ClientDisconnect:
                    raise ClientGone from None
            return await handle(strictly)

        return strict
