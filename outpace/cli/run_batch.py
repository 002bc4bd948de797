"""`outpace run-batch`: answers a file of requests in OpenAI's batch format; a stopped run can be continued."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outpace.cli.batch_files import GO_ON, Batch, Line, append, opened
from outpace.cli.model import DEFAULT, KINDS, SameModel, one_model
from outpace.cli.talk import CONNECT_SECONDS, ApiKey, Device, DType, Url, base_of, given, headers_of
from outpace.errors import InputError, OutpaceError

if TYPE_CHECKING:
    import httpx

LATER = (408, 429, 502, 503, 504)
"""HTTP statuses after which a request is tried again."""
JSON = {"content-type": "application/json"}
TRIES = 6
FIRST_DELAY, LONGEST_DELAY = 0.5, 10.0  # seconds between retries


def command(
    source: Annotated[Path, typer.Argument(metavar="IN", help="JSON lines: custom_id, method, url, body.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Answers; requests that have one are skipped.")],
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help=f"{KINDS}, unless there is a --url.", show_default=DEFAULT),
    ] = None,
    same_model: SameModel = None,
    url: Url = None,
    api_key: ApiKey = None,
    max_concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Requests in flight.")] = 64,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A model name that requests may use. May be repeated.", show_default="MODEL"),
    ] = None,
    dtype: DType = None,
    device: Device = None,
) -> None:
    """Answer a file of requests. If it is stopped, the same command continues.

    A wrong line only fails itself: its answer is an error record. The exit code is 1 if any line failed.
    """
    model = one_model(model, same_model)
    if url is not None and (model or dtype or device or served_model_name):
        raise InputError("model, dtype, device, served-model-name: the server at url has its own; remove them")
    if url is None and api_key is not None:
        raise InputError("api-key: it is for a server; give its url too")
    options, names = given(dtype=dtype, device=device), tuple(served_model_name or ())
    connected = _server(url, api_key) if url else _engine(model, options, names)
    with opened(source, target) as (batch, out):
        asyncio.run(_run(batch, out, connected, max_concurrency))
    old = f" ({batch.failed_before} of them failed)" if batch.failed_before else ""
    said = f"{batch.answered} answered, {batch.failed} failed, {batch.skipped} were there{old}"
    Console(stderr=True).print(said, highlight=False)
    raise typer.Exit(1 if batch.failed or batch.failed_before else 0)


async def _run(
    batch: Batch, out: FileIO, connected: "contextlib.AbstractAsyncContextManager[httpx.AsyncClient]", most: int
) -> None:
    lines = batch.lines()  # shared by the workers: each takes the next
    async with connected as client:
        with _progress() as bar:
            task = bar.add_task("", total=batch.total)

            async def work() -> None:
                for line in lines:
                    record = await _record(client, line)
                    append(out, record)
                    batch.answered += record["error"] is None
                    batch.failed += record["error"] is not None
                    bar.update(task, completed=batch.answered + batch.failed + batch.skipped)

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(most, max(batch.total, 1))):
                        group.create_task(work())
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
            bar.update(task, completed=batch.total)


def _progress() -> Progress:
    """A progress bar on standard error if it is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("Answering"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


async def _record(client: "httpx.AsyncClient", line: Line) -> dict[str, Any]:
    """The record of an answer: a response with status 200, or an error."""
    import httpx

    if line.problem is not None:
        return _made(line, None, {"code": "invalid_line", "message": line.problem})
    try:
        reply = await _ask(client, line)
    except httpx.DecodingError as broken:
        return _made(line, None, {"code": "invalid_answer", "message": str(broken)})
    body, is_json = _body(reply)
    response = {"status_code": reply.status_code, "request_id": reply.headers.get("x-request-id", ""), "body": body}
    if reply.status_code == 200 and is_json:
        return _made(line, response, None)
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else str(body)[:500]
    return _made(line, response, {"code": str(reply.status_code) if is_json else "invalid_answer", "message": message})


def _body(reply: "httpx.Response") -> tuple[Any, bool]:
    """The body of an answer and whether it is JSON; if not, an error with its text."""
    try:
        body = reply.json()
        json.dumps(body, allow_nan=False)  # the parser accepts NaN
    except (ValueError, RecursionError):
        return {"error": {"message": reply.text[:500]}}, False
    return body, True


def _made(line: Line, response: dict[str, Any] | None, error: dict[str, Any] | None) -> dict[str, Any]:
    return {"id": line.id, "custom_id": line.custom_id, "response": response, "error": error}


async def _ask(client: "httpx.AsyncClient", line: Line) -> "httpx.Response":
    """Send a request; retry while the server is busy. An unreachable server ends the batch; no answer is lost."""
    import httpx

    delay = FIRST_DELAY
    for last in (*[False] * (TRIES - 1), True):
        try:
            reply = await client.post(line.url.removeprefix("/v1"), content=line.body)
            if reply.status_code in (401, 403):  # not the line's fault: the next run may have another key
                raise OutpaceError(f"api_key: the server refuses it ({reply.status_code}); give the right one; {GO_ON}")
            if reply.status_code not in LATER or last:
                return reply
            wait = reply.headers.get("retry-after", "")
            delay = max(delay, min(float(wait) if wait.isdecimal() else 0.0, LONGEST_DELAY))
        except httpx.TransportError as error:
            if last:
                raise OutpaceError(
                    f"url: the server cannot be reached ({error or type(error).__name__}); {GO_ON}"
                ) from None
        await asyncio.sleep(delay)
        delay = min(2 * delay, LONGEST_DELAY)
    raise AssertionError("the last try returns or raises")


@contextlib.asynccontextmanager
async def _server(url: str, key: str | None) -> "AsyncIterator[httpx.AsyncClient]":
    import httpx

    headers = headers_of(key) | JSON
    timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base_of(url), headers=headers, timeout=timeout, limits=limits) as client:
        yield client


@contextlib.asynccontextmanager
async def _engine(
    model: str | None, options: dict[str, Any], names: tuple[str, ...]
) -> "AsyncIterator[httpx.AsyncClient]":
    """The server's app with its own engine, called without a port."""
    import httpx

    from outpace.loading.read_tokenizer import load_tokenizer
    from outpace.server.app import create_app
    from outpace.server.options import ServerConfig
    from outpace.server.supervisor import Supervisor

    config = ServerConfig(request_timeout=7 * 24 * 3600.0, access_log=False, served_model_name=names)
    keys = config.all_api_keys()
    headers = headers_of(keys[0] if keys else None) | JSON
    engine = Supervisor(model, options)
    await engine.start()
    try:
        app = create_app(engine, config, await asyncio.to_thread(load_tokenizer, model))
        try:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)  # a failed request is a 500
            async with httpx.AsyncClient(
                transport=transport, base_url="http://outpace/v1", headers=headers, timeout=None
            ) as client:
                yield client
        finally:
            app.state.services.close()
    finally:
        await engine.close()
