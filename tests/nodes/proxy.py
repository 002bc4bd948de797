"""A TCP proxy that delays what it forwards, and can be cut like a cable: it stops without closing anything."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Self

DELAY = 0.001  # seconds, each way
AT_ONCE = 1 << 16


class Proxy:
    """Forwards some ports of 127.0.0.1 to others, in a thread of its own."""

    def __init__(self, port: int, to: int, count: int = 2) -> None:
        self._port, self._to, self._count = port, to, count
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._writers: list[asyncio.StreamWriter] = []

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """Forward nothing any more."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def mend(self) -> None:
        """Go on where it was cut."""
        self._loop.call_soon_threadsafe(self._open.set)

    async def _listen(self) -> None:
        self._servers = [
            await asyncio.start_server(self._serve_to(self._to + number), "127.0.0.1", self._port + number)
            for number in range(self._count)
        ]

    def _serve_to(self, port: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                there = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                writer.close()
                return
            self._writers += [writer, there[1]]
            for source, sink in ((reader, there[1]), (there[0], writer)):
                task = self._loop.create_task(self._forward(source, sink))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

        return serve

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One way of a connection, up to its end; resets end it too."""
        with contextlib.suppress(OSError):
            while data := await reader.read(AT_ONCE):
                await self._open.wait()
                await asyncio.sleep(DELAY)
                writer.write(data)
                await writer.drain()
        await self._open.wait()
        with contextlib.suppress(OSError):
            writer.close()

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)  # they end in the next round
