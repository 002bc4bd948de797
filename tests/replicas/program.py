"""The process of a replica as the keeper sees it, without a model: ready at once, it says which process it is."""

import asyncio
import json
import os
import sys

INPUT = open(0, "rb", buffering=0)  # noqa: SIM115 - to the end; nothing of it is read ahead
ASKED = json.loads(INPUT.readline())


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    body = str(os.getpid()).encode()
    writer.write(b"HTTP/1.1 %s x\r\ncontent-length: %d\r\n\r\n" % (ASKED["status"].encode(), len(body)) + body)
    await writer.drain()


async def main() -> None:
    server = await asyncio.start_unix_server(answer, ASKED["unix_path"])
    async with server:
        await asyncio.get_running_loop().run_in_executor(None, INPUT.read)


if "code" in ASKED:
    sys.exit(ASKED["code"])
asyncio.run(main())
os._exit(0)
