"""`outpace run-batch`: a file of requests in OpenAI's batch format, and a file of answers that can be gone on with."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outpace.cli.talk import CONNECT_SECONDS, ApiKey, Device, DType, Url, base_of, given
from outpace.errors import InputError, OutpaceError

if TYPE_CHECKING:
    import httpx

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
LATER = (408, 429, 502, 503, 504)
"""Statuses after which the same request may work later."""
TRIES = 6
FIRST_DELAY, LONGEST_DELAY = 0.5, 10.0  # seconds between tries


def command(
    source: Annotated[Path, typer.Argument(metavar="IN", help="JSON lines: custom_id, method, url, body.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Answers; those it has are not asked for.")],
    model: Annotated[
        str | None,
        typer.Argument(
            help="A folder, a .gguf file or a Hugging Face id, unless there is a --url.",
            show_default="SmolLM2-135M-Instruct",
        ),
    ] = None,
    url: Url = None,
    api_key: ApiKey = None,
    max_concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Requests in flight.")] = 64,
    dtype: DType = None,
    device: Device = None,
) -> None:
    """Answer a file of requests. When it is stopped, the same command goes on where it ended.

    A line that is wrong fails alone: its answer is an error record. The exit code is 1 if any failed.
    """
    if url is not None and (model or dtype or device):
        raise InputError("model, dtype, device: the server at url has its own; leave them out")
    if url is None and api_key is not None:
        raise InputError("api-key: only for a server; give its url too")
    connected = _server(url, api_key) if url else _engine(model, given(dtype=dtype, device=device))
    batch = Batch(source, target)
    asyncio.run(_run(batch, connected, max_concurrency))
    old = f" ({batch.failed_before} of them failed)" if batch.failed_before else ""
    said = f"{batch.answered} answered, {batch.failed} failed, {batch.skipped} were there{old}"
    Console(stderr=True).print(said, highlight=False)
    raise typer.Exit(1 if batch.failed or batch.failed_before else 0)


@dataclass(frozen=True, slots=True)
class Line:
    """One request, or what is wrong with it."""

    name: str
    """What its record is known by: the custom id, or the number of a line that has none."""
    custom_id: str | None
    url: str = ""
    body: Any = None
    problem: str | None = None


@dataclass
class Batch:
    """The two files. Raises InputError if they cannot be used."""

    source: Path
    target: Path
    done: set[str] = field(default_factory=set)
    total: int = 0
    answered: int = 0
    failed: int = 0
    skipped: int = 0
    failed_before: int = 0
    """Of those that are in the target already."""

    def __post_init__(self) -> None:
        try:
            with self.source.open("rb") as file:
                self.total = sum(1 for line in file if line.strip())
        except OSError as error:
            raise InputError(f"in: cannot read {self.source} ({error.strerror}); name a file of JSON lines") from None
        if self.target.resolve() == self.source.resolve():
            raise InputError("out: the same file as in; name another")
        if not self.target.parent.is_dir():
            raise InputError(f"out: there is no folder {self.target.parent}; make it first")
        if self.target.exists():
            self._read_done()

    def _read_done(self) -> None:
        """What has been answered; a last line that was cut off is taken away, to be asked again."""
        whole = 0
        with self.target.open("rb+") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    file.truncate(whole)
                    return
                whole += len(line)
                try:
                    record = json.loads(line)
                    self.done.add(str(record["id"] if record["custom_id"] is None else record["custom_id"]))
                    self.failed_before += record.get("error") is not None
                except (ValueError, KeyError, TypeError):
                    raise InputError(
                        f"out: line {number} of {self.target} is no answer of a batch; name another file"
                    ) from None

    def lines(self) -> Iterator[Line]:
        """The requests that have no answer yet, read as they are needed."""
        seen: set[str] = set()
        with self.source.open("rb") as file:
            for number, text in enumerate(file, 1):
                if not text.strip():
                    continue
                line = parse(number, text, seen)
                seen.add(line.name)
                if line.name in self.done:
                    self.skipped += 1
                else:
                    yield line


def parse(number: int, text: bytes, seen: set[str]) -> Line:
    """A line of the input."""
    name = f"line-{number}"
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Line(name, None, problem=f"line {number} is not JSON: {error}")
    custom = entry.get("custom_id") if isinstance(entry, dict) else None
    if not isinstance(custom, str) or not custom:
        return Line(name, None, problem=f"line {number}: expected an object with custom_id, a string that is not empty")
    if custom in seen:
        return Line(name, None, problem=f"line {number}: custom_id: {custom!r} is in another line too")
    url, body = entry.get("url"), entry.get("body")
    problem = None
    if entry.get("method") != "POST":
        problem = f"method: expected POST, got {entry.get('method')!r}"
    elif url not in ROUTES:
        problem = f"url: expected one of {', '.join(ROUTES)}, got {url!r}"
    elif not isinstance(body, dict):
        problem = f"body: expected an object, got {body!r:.80}"
    elif body.get("stream"):
        problem = "stream: a batch has no streams; leave it out"
    return Line(custom, custom, str(url), body, problem and f"line {number}: {problem}")


async def _run(batch: Batch, connected: "contextlib.AbstractAsyncContextManager[httpx.AsyncClient]", most: int) -> None:
    columns = (*(TextColumn("Answering"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()),)
    lines = batch.lines()  # shared: each worker takes the next
    async with connected as client:
        with batch.target.open("ab") as out, Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=batch.total)

            async def work() -> None:
                for line in lines:
                    record = await _record(client, line)
                    _count(batch, record)
                    _write(out, record)
                    bar.update(task, completed=batch.answered + batch.failed + batch.skipped)

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(most, max(batch.total, 1))):
                        group.create_task(work())
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
            bar.update(task, completed=batch.total)


def _count(batch: Batch, record: dict[str, Any]) -> None:
    good = record["error"] is None
    batch.answered += good
    batch.failed += not good


def _write(out: BinaryIO, record: dict[str, Any]) -> None:
    out.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
    out.flush()


async def _record(client: "httpx.AsyncClient", line: Line) -> dict[str, Any]:
    """The answer to a line as a record: it has either a response with status 200, or an error."""
    if line.problem is not None:
        return _made(line, None, {"code": "invalid_line", "message": line.problem})
    reply = await _ask(client, line)
    try:
        body = reply.json()
    except ValueError:
        body = {"error": {"message": reply.text[:500]}}
    response = {
        "status_code": reply.status_code,
        "request_id": reply.headers.get("x-request-id", ""),
        "body": body,
    }
    if reply.status_code == 200:
        return _made(line, response, None)
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else str(body)[:500]
    return _made(line, response, {"code": str(reply.status_code), "message": message})


def _made(line: Line, response: dict[str, Any] | None, error: dict[str, Any] | None) -> dict[str, Any]:
    return {"id": line.name, "custom_id": line.custom_id, "response": response, "error": error}


async def _ask(client: "httpx.AsyncClient", line: Line) -> "httpx.Response":
    """Ask, and again later while the server is busy. One that cannot be reached ends the batch: nothing is lost."""
    import httpx

    delay = FIRST_DELAY
    for last in (*[False] * (TRIES - 1), True):
        try:
            reply = await client.post(line.url.removeprefix("/v1"), json=line.body)
            if reply.status_code not in LATER or last:
                return reply
            wait = reply.headers.get("retry-after", "")
            delay = max(delay, min(float(wait) if wait.isdecimal() else 0.0, LONGEST_DELAY))
        except httpx.TransportError as error:
            if last:
                raise OutpaceError(
                    f"url: the server cannot be reached ({error or type(error).__name__}); "
                    "run the same command again to go on"
                ) from None
        await asyncio.sleep(delay)
        delay = min(2 * delay, LONGEST_DELAY)
    raise AssertionError("the last try returns or raises")


@contextlib.asynccontextmanager
async def _server(url: str, key: str | None) -> "AsyncIterator[httpx.AsyncClient]":
    import httpx

    headers = {"authorization": f"Bearer {key}"} if key else {}
    timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base_of(url), headers=headers, timeout=timeout, limits=limits) as client:
        yield client


@contextlib.asynccontextmanager
async def _engine(model: str | None, options: dict[str, Any]) -> "AsyncIterator[httpx.AsyncClient]":
    """The server's app over an engine of its own, called without a port."""
    import httpx

    from outpace.loading.build import load_tokenizer
    from outpace.server.app import create_app
    from outpace.server.options import ServerConfig
    from outpace.server.supervisor import Supervisor

    config = ServerConfig(request_timeout=7 * 24 * 3600.0, access_log=False)
    keys = config.all_api_keys()
    headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
    engine = Supervisor(model, options)
    await engine.start()
    try:
        app = create_app(engine, config, await asyncio.to_thread(load_tokenizer, model))
        try:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://outpace/v1", headers=headers, timeout=None
            ) as client:
                yield client
        finally:
            app.state.serving.close()
    finally:
        await engine.close()
