"""Apps over an engine in memory, and clients for them."""

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from openai import AsyncOpenAI
from transformers import PreTrainedTokenizerFast

from outpace.server.app import create_app
from outpace.server.options import ServerConfig
from tests.server.fake import FakeEngine
from tests.server.live import live as live


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Served:
    """A server with its engine and clients."""

    app: FastAPI
    engine: FakeEngine
    headers: dict[str, str] = field(default_factory=dict)

    def http(self) -> httpx2.AsyncClient:
        """A plain client."""
        transport = httpx2.ASGITransport(self.app)
        return httpx2.AsyncClient(transport=transport, base_url="http://server", headers=self.headers)

    def openai(self, key: str = "none") -> AsyncOpenAI:
        """OpenAI's own client."""
        return AsyncOpenAI(base_url="http://server/v1", api_key=key, http_client=self.http(), max_retries=0)

    async def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        """One POST."""
        async with self.http() as client:
            return await client.post(path, json=body, **options)

    async def get(self, path: str, **options: Any) -> httpx2.Response:
        """One GET."""
        async with self.http() as client:
            return await client.get(path, **options)


Serve = Callable[..., Served]


@pytest.fixture
def serve(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Makes a server: options of ServerConfig, or `engine=` and `tokenizer=`."""
    monkeypatch.delenv("OUTPACE_API_KEYS", raising=False)
    apps: list[FastAPI] = []

    def make(
        engine: FakeEngine | None = None, tokenizer: PreTrainedTokenizerFast = tokenizer, **options: Any
    ) -> Served:
        engine = engine or FakeEngine(tokenizer)
        app = create_app(engine, ServerConfig(**options), tokenizer)
        apps.append(app)
        return Served(app, engine)

    yield make
    for app in apps:
        app.state.services.close()


@pytest.fixture
async def openai(serve: Serve) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's client of a server with default options."""
    async with serve().openai() as client:
        yield client
