"""The ingress, between Ray's HTTP proxy and the replicas: forwards requests, and retries them when a replica is gone.

A request is retried as long as nothing of its answer has been sent to the client: plain answers are held until they
are whole, streams only until they begin. A stream that has begun ends with an error event, as in `outpace serve` when
its engine dies.
"""

import contextlib
from asyncio import sleep
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outpace.deploy.merge import merged_metrics, merged_status
from outpace.deploy.plan import MANY
from outpace.deploy.replica import REPLICA
from outpace.errors import EngineDead, EngineUnavailable
from outpace.log import logger
from outpace.server.gone import until_gone, whole_body
from outpace.server.guard import Guard
from outpace.server.options import ServerConfig
from outpace.server.problems import LOST, is_stream

ATTEMPTS = 4
"""Most tries of a request. Bounded: the request may be what kills the replicas."""
PAUSE = 0.25  # seconds before a replica is asked again when others may be no better
_HEAD = ("http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client", "server")
ANSWERED_BY = b"x-outpace-replica"
"""Header of answers: which replica gave it."""
_ADDED = frozenset({b"x-request-id", b"x-content-type-options"})  # the guard adds them here and in the replica
_OF_ONE = frozenset({b"content-length", ANSWERED_BY})
Merge = Callable[[Sequence[tuple[str, bytes]]], bytes]
OF_ALL: Mapping[str, Merge] = {"/metrics": merged_metrics, "/status": merged_status}
"""Paths where all replicas are asked, and how their answers, by replica, become one."""
_AGAIN = frozenset({LOST, "engine_unavailable"})
"""Codes of errors that another replica may not have."""


class ReplicaLost(Exception):
    """The replica that had a request is gone."""


class Replicas(Protocol):
    """The replicas, wherever they are."""

    def ask(self, head: Mapping[str, Any], body: bytes, avoid: Sequence[str]) -> AsyncGenerator[list[Message], None]:
        """The messages of one replica's answer; raises `ReplicaLost`."""

    async def ask_all(self, head: Mapping[str, Any]) -> list[list[Message]]:
        """The whole answer of every replica to one request."""


@dataclass
class _Answer:
    """The part of an answer that has come."""

    status: int = 0
    is_stream: bool = False
    replica: str = ""
    whole: bool = False
    held: list[Message] = field(default_factory=list)

    def take(self, message: Message) -> None:
        """Add a message."""
        if message["type"] == "http.response.start":
            self.status, self.replica = message["status"], message[REPLICA]
            headers = [(name, value) for name, value in message["headers"] if name not in _ADDED]
            self.is_stream = is_stream(headers)
            name = self.replica.encode()
            message = {"type": message["type"], "status": self.status, "headers": [*headers, (ANSWERED_BY, name)]}
        else:
            self.whole = not message.get("more_body", False)
        self.held.append(message)

    @property
    def failed_there(self) -> bool:
        """Whether another replica may do better."""
        if self.status != 503 or self.is_stream:
            return False
        with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
            return msgspec.json.decode(self.body)["error"]["code"] in _AGAIN
        return False

    @property
    def body(self) -> bytes:
        """The body of an answer that was held."""
        return b"".join(message.get("body", b"") for message in self.held[1:])


def _answer_of(messages: Sequence[Message]) -> _Answer:
    answer = _Answer()
    for message in messages:
        answer.take(message)
    return answer


class Forward:
    """An ASGI app that has each request answered by one of the replicas."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        head = {name: scope[name] for name in _HEAD if name in scope}
        head["headers"] = _with_id(head["headers"], str(scope["state"]["request_id"]))
        body = await whole_body(receive)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        merge = OF_ALL.get(path) if scope["method"] == "GET" else None
        work = self._answer(head, body, send) if merge is None else self._answer_of_all(head, merge, send)
        await until_gone(receive, work)

    async def _answer(self, head: Mapping[str, Any], body: bytes, send: Send) -> None:
        avoid: list[str] = []
        for attempt in range(1, ATTEMPTS + 1):
            answer = _Answer()
            try:
                await self._ask(head, body, avoid, answer, send)
            except ReplicaLost as error:
                logger.warning("a replica was lost with a request of attempt %d: %s", attempt, error)
                if answer.is_stream or attempt == ATTEMPTS:
                    raise EngineDead("the replica that worked on this request is gone; try again later") from None
                continue
            if answer.is_stream:
                return
            if not answer.failed_there or attempt == ATTEMPTS:
                for message in answer.held:
                    await send(message)
                return
            if answer.replica in avoid:
                await sleep(PAUSE * 2**attempt)
            avoid.append(answer.replica)

    async def _ask(
        self, head: Mapping[str, Any], body: bytes, avoid: Sequence[str], answer: _Answer, send: Send
    ) -> None:
        """One attempt: a stream goes to the client as it comes, any other answer is held."""
        async with contextlib.aclosing(self._replicas.ask(head, body, avoid)) as lists:
            async for messages in lists:
                for message in messages:
                    answer.take(message)
                if answer.is_stream:
                    held, answer.held = answer.held, []
                    for message in held:
                        await send(message)
        if not answer.whole:
            raise ReplicaLost("its answer broke off")

    async def _answer_of_all(self, head: Mapping[str, Any], merge: Merge, send: Send) -> None:
        """Ask all replicas, and make one answer of theirs."""
        answers = [answer for messages in await self._replicas.ask_all(head) if (answer := _answer_of(messages)).whole]
        found = [(answer.replica, answer.body) for answer in answers if answer.status == 200]
        if not answers:
            raise EngineUnavailable("no replica is ready; try again later")
        first = next((answer for answer in answers if answer.status == 200), answers[0])
        body = merge(found) if found else first.body
        headers = [(name, value) for name, value in first.held[0]["headers"] if name not in _OF_ONE]
        await send({**first.held[0], "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await send({"type": "http.response.body", "body": body})


def make_ingress(replicas: Replicas, options: ServerConfig) -> ASGIApp:
    """The app of an ingress process: the checks of `outpace serve`, then a replica."""
    free = {"max_concurrent_requests": MANY, "max_requests_per_key": None}  # each replica has these limits
    seen = options.model_copy(update={"allowed_hosts": options.hosts(), **free})
    keys, running = options.all_api_keys(), Counter[int | None]()
    nothing: Callable[[str], None] = lambda _: None  # noqa: E731 - the replicas count
    guard = Guard(Forward(replicas), options=seen, keys=keys, rejected=nothing, ended=nothing, running=running)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await guard(scope, receive, _without_id(send))

    return app


def _without_id(send: Send) -> Send:
    """`send` without the request's id, which Ray's proxy adds itself."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [(name, value) for name, value in message["headers"] if name != b"x-request-id"]
            message = {**message, "headers": headers}
        await send(message)

    return sending


async def _lifespan(receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})


def _with_id(headers: Sequence[tuple[bytes, bytes]], request_id: str) -> list[tuple[bytes, bytes]]:
    """Headers with the id under which the ingress logs the request."""
    return [
        *((name, value) for name, value in headers if name != b"x-request-id"),
        (b"x-request-id", request_id.encode()),
    ]
