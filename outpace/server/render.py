"""The process that renders chats with their template. It is run as a file: it needs Jinja and nothing of Outpace.

A template comes from a model's author, or from a request. Jinja's sandbox keeps it from running code. A separate
process keeps it from running forever or filling the memory: the parent kills it, and the system limits its memory.
"""

import contextlib
import json
import math
import resource
import signal
import sys
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, UndefinedError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """`{% generation %}`: marks what the assistant says, for training. Here only its body counts."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Refused(TemplateError):
    """The template calls the chat wrong, with `raise_exception`."""


def _raise(message: object) -> None:
    raise Refused(str(message)[:200])


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=bool(options.get("ensure_ascii", False)), indent=indent)


def _sandbox() -> ImmutableSandboxedEnvironment:
    """A sandbox for one template, with the names that templates of Hugging Face models use."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


@lru_cache(maxsize=16)
def compile_template(source: str) -> Template:
    """A template in its sandbox."""
    return _sandbox().from_string(source)


@lru_cache(maxsize=16)
def syntax_error(source: str) -> str | None:
    """Why a text is not a template; None: it is one. It is only parsed: no part of it is compiled or run."""
    try:
        _sandbox().parse(source)
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {str(error.message)[:200]}"
    except RecursionError:
        return "it is nested too deep"
    return None


def render(job: dict[str, Any]) -> dict[str, str]:
    """The text, or an error message for the client."""
    pieces: list[str] = []
    room = int(job["max_chars"])
    try:
        for piece in compile_template(job["template"]).generate(**job["variables"]):
            room -= len(piece)
            if room < 0:
                return {"error": f"the chat is longer than {job['max_chars']} characters when it is written out"}
            pieces.append(piece)
        return {"text": "".join(pieces)}
    except Refused as error:
        return {"error": f"the chat template refuses the messages: {error}"}
    except UndefinedError as error:  # its message has only names of the template
        return {"error": f"the chat template fails: {str(error)[:200]}"}
    except TemplateSyntaxError as error:
        return {"error": f"the chat template is not valid Jinja (line {error.lineno}: {str(error.message)[:200]})"}
    except MemoryError:
        pieces.clear()
        return {"error": "the chat template needs too much memory"}
    except Exception as error:
        # A template may fail in any way; the message may have paths, so only the type of the error is sent.
        return {"error": f"the chat template fails ({type(error).__name__})"}


def limit_memory(megabytes: int) -> None:
    """Limit the memory of this process, if the system can."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (megabytes * 2**20, megabytes * 2**20))


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """End this process if the block takes longer, because the parent, which should have killed it, may be gone."""
    signal.alarm(math.ceil(seconds) + 1)
    yield
    signal.alarm(0)


def main(handle: int, megabytes: int, seconds: float) -> None:
    """Render one job after the other until the parent is gone."""
    connection = Connection(handle)
    limit_memory(megabytes)
    connection.send_bytes(b"{}")  # ready
    while True:
        try:
            job = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        with time_limit(seconds):
            answer = render(job)
        connection.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
