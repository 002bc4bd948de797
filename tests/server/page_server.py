"""A stand-in for the server, for tests of the page: it serves the page and fakes the routes that the page calls."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles

import outpace.server

WEB = Path(outpace.server.__file__).parent / "web"
MODELS = ("tiny-chat", "tiny-other")
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)


@dataclass
class Refusal:
    """An answer to one chat request that is an error."""

    status: int
    message: str
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Script:
    """What the stand-in does, and what it saw."""

    answer: Callable[[dict[str, Any]], str] = lambda body: f"You said: {body['messages'][-1]['content']}"
    finish: str = "stop"
    key: str | None = None
    refusals: list[Refusal] = field(default_factory=list)
    fail_after: int | None = None
    """End the stream with an error after so many pieces."""
    hold: threading.Event | None = None
    """Stop after two pieces until this is set."""
    models: Sequence[str] = MODELS
    status: dict[str, Any] = field(default_factory=dict)
    experts: dict[str, Any] = field(default_factory=dict)
    chats: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)


class PageServer:
    """The stand-in; `script` may be replaced between requests."""

    def __init__(self) -> None:
        self.script = Script()
        self.url = ""
        self.app = FastAPI(openapi_url=None)
        self.app.middleware("http")(self._guard)
        self.app.add_api_route("/", self._index)
        self.app.add_api_route("/v1/models", self._models)
        self.app.add_api_route("/v1/chat/completions", self._chat, methods=["POST"], response_model=None)
        self.app.add_api_route("/status", self._status)
        self.app.add_api_route("/status/experts", self._experts)
        self.app.mount("/web", StaticFiles(directory=WEB))

    @contextlib.contextmanager
    def running(self) -> Iterator["PageServer"]:
        """Serve on a free port, in a thread."""
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server = uvicorn.Server(uvicorn.Config(self.app, log_level="warning", ws="none", lifespan="off"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield self
        finally:
            server.should_exit = True
            server.force_exit = True
            thread.join()
            listener.close()

    async def _guard(self, request: Request, respond: Callable[[Request], Any]) -> Response:
        path = request.url.path
        self.script.paths.append(path)
        public = path == "/" or path.startswith("/web/")
        if self.script.key and not public and request.headers.get("authorization") != f"Bearer {self.script.key}":
            return _error(Refusal(401, "Invalid API key."))
        response: Response = await respond(request)
        if public:
            response.headers["Content-Security-Policy"] = CSP
            response.headers["X-Content-Type-Options"] = "nosniff"
            response.headers["Cache-Control"] = "no-cache"
        return response

    def _index(self) -> FileResponse:
        return FileResponse(WEB / "index.html")

    def _models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model"} for name in self.script.models]}

    def _status(self) -> dict[str, Any]:
        return self.script.status

    def _experts(self) -> dict[str, Any]:
        return self.script.experts

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.script.chats.append(body)
        if self.script.refusals:
            return _error(self.script.refusals.pop(0))
        return StreamingResponse(_events(self.script, body), media_type="text/event-stream")


def _error(refusal: Refusal) -> JSONResponse:
    content = {"error": {"message": refusal.message, "type": "error", "code": refusal.status}}
    return JSONResponse(content, refusal.status, refusal.headers)


async def _events(script: Script, body: dict[str, Any]) -> AsyncIterator[bytes]:
    """The answer word by word, as OpenAI's server sends it."""
    ended = False
    try:
        yield _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        pieces = script.answer(body).split(" ")
        for at, piece in enumerate(pieces):
            if at == script.fail_after:
                ended = True
                yield _event({"error": {"message": "The engine died; try again.", "code": "engine_dead"}})
                return
            while at == 2 and script.hold and not script.hold.is_set():
                await asyncio.sleep(0.005)
            delta = {"content": piece if at == 0 else f" {piece}"}
            yield _event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
            await asyncio.sleep(0.001)
        ended = True
        yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": script.finish}]})
        prompt = sum(len(message["content"]) for message in body["messages"])
        yield _event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": len(pieces)}})
        yield b"data: [DONE]\n\n"
    finally:
        if not ended:
            script.cancelled.set()


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def engine_status(last_steps: Sequence[tuple[int, int, int, float]] = (), **changes: Any) -> dict[str, Any]:
    """An EngineStatus as the server sends it."""
    counts = ("running", "waiting", "free_blocks", "num_blocks", "steps", "restarts", "prompt_tokens")
    totals = ("generated_tokens", "preemptions", "prefix_hits", "prefix_queries")
    return {"ready": True, **dict.fromkeys(counts + totals, 0), "last_steps": last_steps, **changes}
