"""A tiny OpenAI-compatible server on a free port: it repeats what it is told, and remembers what it was asked."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse


@dataclass
class FakeOpenAI:
    """How it behaves, and what came."""

    takes_ids: bool = True
    key: str | None = None
    busy: int = 0
    """So many requests are answered with 503 first."""
    breaks: bool = False
    """Streams end with an error after the first piece."""
    delay: float = 0.0
    """Seconds before each piece."""
    reply: bytes | None = None
    """What whole answers are, instead of the words."""
    words: list[str] = field(default_factory=lambda: ["Hel", "lo ", "wörld"])
    bodies: list[Any] = field(default_factory=list)
    most: int = 0
    """Most requests at once."""
    now: int = 0
    url: str = ""

    def app(self) -> FastAPI:
        """The routes."""
        app = FastAPI()

        @app.get("/v1/models")
        async def models(request: Request) -> Response:
            if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
                return _error(401, "wrong key")
            return JSONResponse({"data": [{"id": "fake", "max_model_len": 4096}]})

        @app.post("/tokenize")
        async def tokenize(request: Request) -> Response:
            text = (await request.json())["prompt"]
            return JSONResponse({"tokens": list(range(100, 100 + len(text.split())))})

        @app.post("/v1/{route:path}")
        async def answer(route: str, request: Request) -> Response:
            body = await request.json()
            if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
                return _error(401, "wrong key")
            self.bodies.append(body)
            if self.busy:
                self.busy -= 1
                return _error(503, "not now", **{"retry-after": "0"})
            prompt = body.get("prompt", body.get("messages"))
            if prompt == "bad" or (isinstance(prompt, list) and isinstance(prompt[0], int) and not self.takes_ids):
                return _error(400, "prompt: bad")
            if body.get("stream"):
                return StreamingResponse(self._pieces(body), media_type="text/event-stream")
            if self.reply is not None:
                return Response(self.reply)
            return JSONResponse({"route": route, "choices": [{"text": "".join(self.words)}]})

        return app

    async def _pieces(self, body: Any) -> AsyncIterator[str]:
        self.now += 1
        self.most = max(self.most, self.now)
        chat = "messages" in body
        try:
            if chat:
                yield _event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            for word in self.words[: body.get("max_tokens")]:
                await asyncio.sleep(self.delay)
                yield _event({"choices": [{"delta": {"content": word}} if chat else {"text": word}]})
                if self.breaks:
                    yield _event({"error": {"message": "the engine died"}})
                    return
            if body.get("stream_options"):
                usage = {"prompt_tokens": 7, "completion_tokens": len(self.words[: body.get("max_tokens")])}
                yield _event({"choices": [], "usage": usage})
            yield "data: [DONE]\n\n"
        finally:
            self.now -= 1


def _event(value: Any) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _error(status: int, message: str, **headers: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status, headers)


@contextmanager
def served(fake: FakeOpenAI) -> Iterator[FakeOpenAI]:
    """Run it in a thread."""
    server = uvicorn.Server(uvicorn.Config(fake.app(), port=0, log_level="critical", lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started and thread.is_alive():
        thread.join(0.005)
    fake.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.should_exit = server.force_exit = True
        thread.join()
