"""The two files of `outpace run-batch`: requests are read line by line, answers are appended line by line."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from outpace.errors import InputError, OutpaceError, StateError
from outpace.structured.outputs import is_text

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
GO_ON = "run the same command again to continue"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input: a request, or what is wrong with it."""

    number: int
    custom_id: str | None
    """None: the line has no valid one, so its record is identified by the line number."""
    url: str = ""
    body: bytes = b""
    problem: str | None = None

    @property
    def id(self) -> str:
        """The id of its record."""
        return f"line-{self.number}"

    @property
    def key(self) -> tuple[bool, str]:
        """Identifies the line's record, even if a custom_id looks like the number of another line."""
        return (True, self.id) if self.custom_id is None else (False, self.custom_id)


def parse(number: int, text: bytes, seen: set[str]) -> Line:
    """Parse a line of the input. seen: custom ids of earlier lines; its own is added."""
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Line(number, None, problem=f"line {number} is not JSON: {error}")
    custom = entry.get("custom_id") if isinstance(entry, dict) else None
    if not isinstance(custom, str) or not custom:
        problem = f"line {number}: expected an object with custom_id, a string that is not empty"
        return Line(number, None, problem=problem)
    if not is_text(custom):
        return Line(number, None, problem=f"line {number}: custom_id: {custom!r:.80} has half of a surrogate pair")
    if custom in seen:
        return Line(number, None, problem=f"line {number}: custom_id: {custom!r} is in another line too")
    seen.add(custom)
    try:
        return Line(number, custom, *_request(entry))
    except InputError as error:
        return Line(number, custom, problem=f"line {number}: {error}")


def _request(entry: dict[str, Any]) -> tuple[str, bytes]:
    """The route and the body of a line."""
    method, url, body = entry.get("method"), entry.get("url"), entry.get("body")
    if method != "POST":
        raise InputError(f"method: expected POST, got {method!r:.80}")
    if url not in ROUTES:
        raise InputError(f"url: expected one of {', '.join(ROUTES)}, got {url!r:.80}")
    if not isinstance(body, dict):
        raise InputError(f"body: expected an object, got {type(body).__name__}")
    if body.get("stream"):
        raise InputError("stream: a batch has no streams; remove it")
    try:
        return str(url), as_json(body)
    except UnicodeEncodeError:
        raise InputError(r"body: a text has half of a surrogate pair (such as \ud800); remove it") from None
    except ValueError:
        raise InputError("body: NaN, Infinity and numbers beyond 1e308 are not JSON; give another number") from None
    except RecursionError:
        raise InputError("body: nested too deeply") from None


def as_json(value: Any) -> bytes:
    """JSON that every parser accepts. Raises ValueError for values that JSON does not have."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


@dataclass
class Batch:
    """The state of a batch: which lines have a record, and how many failed."""

    source: Path
    target: Path
    total: int
    done: set[tuple[bool, str]] = field(default_factory=set)
    answered: int = 0
    failed: int = 0
    skipped: int = 0
    failed_before: int = 0
    """Failed records that the target already has."""

    def lines(self) -> Iterator[Line]:
        """The requests without a record, read as they are needed."""
        seen: set[str] = set()
        with self.source.open("rb") as file:
            for number, text in enumerate(file, 1):
                if not text.strip():
                    continue
                line = parse(number, text, seen)
                if line.key in self.done:
                    self.skipped += 1
                else:
                    yield line

    def read_done(self, out: FileIO) -> None:
        """Find the lines that have a record. An incomplete last line is removed and asked for again."""
        whole = 0
        with open(out.fileno(), "rb", closefd=False) as file:  # buffered
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                self._add_done(number, line)
        out.truncate(whole)

    def _add_done(self, number: int, line: bytes) -> None:
        try:
            record = json.loads(line)
            custom = record["custom_id"]
            self.done.add((True, str(record["id"])) if custom is None else (False, str(custom)))
            self.failed_before += record.get("error") is not None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InputError(
                f"out: line {number} of {self.target} is no answer of a batch; name another file"
            ) from None


@contextlib.contextmanager
def opened(source: Path, target: Path) -> Iterator[tuple[Batch, FileIO]]:
    """The batch and its target file, locked against other runs."""
    batch = Batch(source, target, _count_lines(source))
    if target.resolve() == source.resolve():
        raise InputError("out: the same file as in; name another")
    if not target.parent.is_dir():
        raise InputError(f"out: there is no folder {target.parent}; make it first")
    if target.exists() and not target.is_file():
        raise InputError(f"out: {target} is not a file; name one")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_lock(target))
            # unbuffered: a failed write raises at once, and not again when the file is closed
            out = stack.enter_context(FileIO(target, "a+"))
            out.seek(0)
            batch.read_done(out)
        except OSError as error:
            raise InputError(f"out: cannot use {target} ({error.strerror}); name another file") from None
        yield batch, out


def _lock(target: Path) -> contextlib.AbstractContextManager[Any]:
    try:
        return FileLock(f"{target.resolve()}.lock").acquire(timeout=0)
    except Timeout:
        raise StateError(f"out: another run-batch writes to {target}; wait for it, or name another file") from None


def _count_lines(source: Path) -> int:
    try:
        with source.open("rb") as file:
            return sum(1 for line in file if line.strip())
    except OSError as error:
        raise InputError(f"in: cannot read {source} ({error.strerror}); name a file of JSON lines") from None


def append(out: FileIO, record: dict[str, Any]) -> None:
    """Append a record as a line, whole or not at all."""
    line = _record_line(record)
    end = out.seek(0, 2)
    try:
        written = 0
        while written < len(line):
            written += out.write(line[written:]) or 0
    except OSError as error:
        with contextlib.suppress(OSError):
            out.truncate(end)
        raise OutpaceError(f"out: cannot write to {out.name!s} ({error.strerror}); mend that and {GO_ON}") from None


def _record_line(record: dict[str, Any]) -> bytes:
    try:
        return as_json(record) + b"\n"
    except UnicodeEncodeError:  # a server sent half of a surrogate pair: keep it escaped
        return json.dumps(record).encode() + b"\n"
