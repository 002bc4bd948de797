"""One replica: an engine process, and the ASGI app of `outpace serve` in front of it, called through Ray."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from starlette.types import Message

from outpace.config import AskedConfig
from outpace.errors import EngineUnavailable
from outpace.server.launch import make_engine
from outpace.server.lifetime import wait_for_model
from outpace.server.logs import set_up
from outpace.server.options import ServerConfig

JOIN = 0.005  # seconds in which the events of a stream are joined: a message of Ray's costs about a millisecond
REPLICA = "replica"
"""Key in the first message of an answer: which replica gives it."""


class Replica:
    """A deployment's class: Ray makes one object of it in each replica's process, and calls its methods by name."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, model: str | None, llm_options: Mapping[str, Any], options: Mapping[str, Any], threads: int
    ) -> None:
        from ray import serve

        os.environ["OMP_NUM_THREADS"] = str(threads)  # of each rank; Ray has set it to the CPUs of all of them
        config = ServerConfig(**options)
        set_up(as_json=config.log_json)
        self._id = serve.get_replica_context().replica_id.unique_id
        self._engine = make_engine(model, llm_options, AskedConfig.of(dict(llm_options)), config)
        self._open = contextlib.AsyncExitStack()
        self._open.push_async_callback(self._engine.close)
        try:
            await self._start(model, config)
        except BaseException:
            await self._open.aclose()
            raise

    async def _start(self, model: str | None, config: ServerConfig) -> None:
        await self._engine.launch()
        tokenizer = await wait_for_model(model, self._engine)

        from outpace.server.app import create_app
        from outpace.server.tracing import make_provider

        traces = make_provider(config.otlp_traces_endpoint)
        if traces is not None:
            self._open.push_async_callback(asyncio.to_thread, traces.shutdown)
        seen = config.model_copy(update={"allowed_hosts": config.hosts(), "access_log": False})  # the ingress logs
        self._app = create_app(self._engine, seen, tokenizer, traces=traces)
        await self._open.enter_async_context(self._app.router.lifespan_context(self._app))

    async def answer(
        self, head: Mapping[str, Any], body: bytes, *, avoid: Sequence[str] = (), prefix: bytes = b"", cost: float = 0.0
    ) -> AsyncGenerator[list[Message], None]:
        """The ASGI messages that answer one request, joined to lists. Closing the generator cancels the request.

        head: the request's ASGI scope; avoid, prefix and cost are for the router.
        """
        outgoing: asyncio.Queue[Message | None] = asyncio.Queue()
        task = asyncio.create_task(self._run(head, body, outgoing))
        try:
            ended = False
            while not ended:
                messages = [await outgoing.get()]
                while not outgoing.empty():
                    messages.append(outgoing.get_nowait())
                ended = messages[-1] is None
                if found := [message for message in messages if message is not None]:
                    yield found
                if not ended:
                    await asyncio.sleep(JOIN)
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self, head: Mapping[str, Any], body: bytes, outgoing: "asyncio.Queue[Message | None]") -> None:
        """Have the app answer."""
        waiting = [body]

        async def receive() -> Message:
            if waiting:
                return {"type": "http.request", "body": waiting.pop(), "more_body": False}
            return await asyncio.get_running_loop().create_future()  # this task is cancelled when the client is gone

        async def send(message: Message) -> None:
            is_start = message["type"] == "http.response.start"
            outgoing.put_nowait({**message, REPLICA: self._id} if is_start else message)

        try:
            await self._app({**head, "type": "http", "app": self._app}, receive, send)
        finally:
            outgoing.put_nowait(None)

    async def whole_answer(self, head: Mapping[str, Any]) -> list[Message]:
        """The whole answer to a request without a body, for the ingress, which asks all replicas."""
        return [message async for messages in self.answer(head, b"") for message in messages]

    async def check_health(self) -> None:
        """Called by Ray every few seconds. After three errors in a row the replica is replaced."""
        status = self._engine.status()
        if not status.ready:
            raise EngineUnavailable(f"replica {self._id}: {status.why or 'the engine is not ready'}")

    async def __del__(self) -> None:
        """Called by Ray once the replica is drained."""
        await self._open.aclose()
