"""`outpace.serve` and `outpace.client`: start a server in its own process and send it prompts, under MII's names."""

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from outpace.config import AskedConfig
from outpace.errors import ConfigError, EngineDead, InputError, ModelError, OutpaceError, Overloaded, StateError
from outpace.mii import Response
from outpace.server.checks import check_policy
from outpace.server.child import import_path
from outpace.server.given import split_options
from outpace.server.options import ServerConfig, local_url

START_SECONDS = 1800.0
STOP_SECONDS = 60.0
AT_ONCE = 32  # requests of one `generate` that run together


def serve(model: str | os.PathLike[str] | None = None, **options: Any) -> "Server":
    """Start a server in a process of its own and wait until it is ready. It ends with this process.

    The options are those of `outpace serve`, with underscores. Without `port` it takes a free one.
    """
    given = _plain(options)
    if not given.get("port"):
        given["port"] = _free_port()
    return Server(None if model is None else os.fspath(model), given)


def client(url: str, *, api_key: str | None = None) -> "Client":
    """A client of a running Outpace server."""
    return Client(url, api_key)


class Client:
    """Prompts for a server: `client.generate(["DeepSpeed is"], max_new_tokens=64)`."""

    def __init__(self, url: str, api_key: str | None = None, *, certificate: str | None = None) -> None:
        """certificate: file with the server's certificate, if no known authority has signed it."""
        if not url.startswith(("http://", "https://")):
            raise InputError(f"url: expected http://host:port or https://..., got {url!r}")
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        timeout, limits = httpx.Timeout(None, connect=10.0), httpx.Limits(max_connections=None)
        verify = True if certificate is None else ssl.create_default_context(cafile=certificate)
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, limits=limits, verify=verify)
        self._name: str | None = None

    @property
    def model(self) -> str:
        """The name that the server gives its model."""
        if self._name is None:
            self._name = str(self._call("GET", "/v1/models")["data"][0]["id"])
        return self._name

    def generate(
        self,
        prompts: str | Sequence[str],
        streaming_fn: Callable[[list[Response]], object] | None = None,
        **options: Any,
    ) -> list[Response]:
        """Answer each prompt, with the arguments of `outpace.pipeline`; they run together.

        `streaming_fn` is called with each new piece of the answer, a list of one Response as in MII; for one prompt.
        """
        given = [prompts] if isinstance(prompts, str) else list(prompts)
        if streaming_fn is not None:
            if len(given) != 1:
                raise InputError(f"streaming_fn: expected one prompt, got {len(given)}; call generate for each")
            return [self._stream(given[0], streaming_fn, options)]
        path = f"/mii/{quote(self.model, safe='/')}"
        if not given:
            raise InputError("prompts: expected text, or a list of texts that is not empty")

        def one(prompt: str) -> Response:
            (answer,) = self._call("POST", path, {"prompts": [prompt], **options})
            return Response(**answer)

        with ThreadPoolExecutor(min(AT_ONCE, len(given))) as pool:
            return list(pool.map(one, given))

    __call__ = generate

    def _stream(
        self, prompt: str, streaming_fn: Callable[[list[Response]], object], options: Mapping[str, Any]
    ) -> Response:
        """Answer one prompt piece by piece; returns the whole answer."""
        asked = self._call("POST", "/tokenize", {"prompt": prompt})
        body = completion_body(prompt, asked["count"], asked["max_model_len"], options)
        text, length, reason = prompt if options.get("return_full_text") else "", 0, "none"
        piece = text
        for chunk in self._events("/v1/completions", body):
            if (choice := next(iter(chunk["choices"]), None)) is None:
                continue
            piece += choice["text"]
            text += choice["text"]
            length, reason = chunk["usage"]["completion_tokens"], choice["finish_reason"] or "none"
            streaming_fn([Response(piece, asked["count"], length, reason)])
            piece = ""
        return Response(text, asked["count"], length, reason)

    def _events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a stream. An event with an error is raised."""
        try:
            with self._http.stream("POST", path, json=body) as reply:
                if reply.status_code != 200:
                    reply.read()
                    raise _error(reply)
                for line in reply.iter_lines():
                    if not line.startswith("data:") or line.endswith("[DONE]"):
                        continue
                    event = json.loads(line.removeprefix("data:"))
                    if "error" in event:
                        raise _problem(event["error"])
                    yield event
        except TypeError as error:
            raise InputError(f"an argument cannot be sent as JSON: {error}") from None
        except httpx.HTTPError as error:
            raise StateError(f"url: the stream from {self.url} broke off ({error or type(error).__name__})") from None

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        try:
            reply = self._http.request(method, path, json=body)
        except TypeError as error:
            raise InputError(f"an argument cannot be sent as JSON: {error}") from None
        except httpx.HTTPError as error:
            raise StateError(f"url: {self.url} cannot be reached ({error or type(error).__name__})") from None
        if reply.status_code == 200:
            return reply.json()
        raise _error(reply)


class Server(Client):
    """Starts a server, is its client, and ends it."""

    def __init__(self, model: str | None, options: Mapping[str, Any]) -> None:
        _, llm, server = split_options(options)  # errors are raised before anything starts
        config = ServerConfig(**server)
        asked = AskedConfig.of(llm)
        check_policy(asked)
        if asked.nodes.node_rank:
            raise ConfigError("node_rank: only node 0 serves; on the other machines run `outpace serve`")
        keys = config.all_api_keys()
        url = local_url(config.host, config.port, tls=config.ssl_certfile is not None)
        super().__init__(url, keys[0] if keys else None, certificate=config.ssl_certfile)
        self._said: deque[str] = deque(maxlen=20)
        self._patience = config.shutdown_timeout + STOP_SECONDS
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "outpace.server.from_stdin"],  # -P: no imports from the current folder
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": import_path()},
        )
        assert self.process.stdin is not None, "it is a pipe"
        self.process.stdin.write(json.dumps({"model": model, "options": dict(options)}).encode() + b"\n")
        self.process.stdin.flush()
        self._reader = threading.Thread(target=self._forward, daemon=True)
        self._reader.start()
        try:
            self._wait()
        except BaseException:
            self.process.kill()
            self._ended()
            raise

    def terminate(self) -> int:
        """End the server; running requests may finish first. Returns the exit code; 0: they all did."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(self._patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._ended()
        return code

    terminate_server = terminate

    def close(self) -> None:
        """End the server."""
        self.terminate()

    def _ended(self) -> None:
        """Free the resources of the process."""
        self.process.wait()
        assert self.process.stdin is not None, "it is a pipe"
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self._reader.join(1.0)
        self._http.close()

    def _wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self.process.poll() is not None:
                self._reader.join(1.0)
                said = [line for line in self._said if line.startswith("error: ")]
                raise ModelError(said[-1].removeprefix("error: ") if said else "the server ended; its log says why")
            try:
                status = self._http.get("/health/ready", timeout=10.0).status_code
            except httpx.HTTPError as error:
                if isinstance(error.__cause__ or error.__context__, ssl.SSLError) or "CERTIFICATE" in str(error):
                    raise StateError(f"ssl_certfile: it does not work for a request to the server ({error})") from None
            else:
                if status == 200:
                    return
                if status != 503:
                    raise StateError(f"the server answers {status} at /health/ready; expected 200 or 503")
            time.sleep(0.05)
        raise StateError(f"the server was not ready after {START_SECONDS:.0f} s")

    def _forward(self) -> None:
        """Copy the server's standard error to that of this process."""
        assert self.process.stderr is not None, "it is a pipe"
        with self.process.stderr as lines:
            for line in lines:
                text = line.decode(errors="replace")
                self._said.append(text.rstrip())
                sys.stderr.write(text)


def completion_body(prompt: str, num_tokens: int, max_model_len: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The body for a stream of /v1/completions from MII's arguments, with MII's defaults."""
    left = dict(options)
    longest = min(left.pop("max_length", None) or max_model_len, max_model_len)
    if longest <= num_tokens:
        raise InputError(f"max_length: a prompt of {num_tokens} tokens leaves no room in {longest}")
    room = longest - num_tokens
    temperature, do_sample = left.pop("temperature", None), left.pop("do_sample", True)
    left.pop("return_full_text", None)
    body = {
        "prompt": prompt,
        "max_tokens": min(left.pop("max_new_tokens", None) or room, room),
        "min_tokens": left.pop("min_new_tokens", 0),
        "temperature": (1.0 if temperature is None else temperature) if do_sample else 0.0,
        "top_p": left.pop("top_p", 0.9),
        "stream": True,
        "stream_options": {"continuous_usage_stats": True},
    }
    for name in ("top_k", "stop", "ignore_eos", "seed"):
        if (value := left.pop(name, None)) is not None:
            body[name] = value
    if left:
        raise InputError(f"{next(iter(left))}: generate has no such argument")
    return body


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as plain JSON values."""
    plain = {name: str(value) if name in ("dtype", "device") else value for name, value in options.items()}
    try:
        json.dumps(plain)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"options: one is not a plain value ({error}); give numbers, texts, lists and dicts"
        ) from None
    return plain


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _error(reply: httpx.Response) -> OutpaceError:
    """The exception for an error answer: the one that the same call raises without a server."""
    try:
        message = str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = reply.text[:200]
    kinds = {429: Overloaded, 503: EngineDead, 401: InputError, 404: InputError, 400: InputError, 413: InputError}
    return kinds.get(reply.status_code, OutpaceError)(message or f"the server answered {reply.status_code}")


def _problem(error: Mapping[str, Any]) -> OutpaceError:
    """The same for an error in a stream, which has no status."""
    codes = {"engine_failed": EngineDead, "engine_unavailable": EngineDead, "overloaded": Overloaded}
    kind = InputError if error.get("type") == "invalid_request_error" else codes.get(str(error.get("code")))
    return (kind or OutpaceError)(str(error.get("message")))
