"""Grammars of many callers: they take turns at the process that compiles; cheap grammars do not wait for it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from transformers import PreTrainedTokenizerFast

from outpace.errors import Overloaded
from outpace.server.caller import CALLER
from outpace.server.child import Child
from outpace.server.compiling import CompileJob
from outpace.server.grammars import MAX_WAITING, GrammarService
from outpace.server.options import ServerConfig
from outpace.structured.outputs import StructuredOutputs
from outpace.structured.wire import WireGrammar
from tests.patience import PATIENCE
from tests.server.conftest import Serve
from tests.server.fake import FakeEngine

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"


class Gate:
    """Stands before the process: jobs pass it one by one, once it is open."""

    def __init__(self, ask: Callable[..., bytes | None]) -> None:
        self._ask = ask
        self.open, self.reached = threading.Event(), threading.Event()
        self.jobs: list[Any] = []
        """What has come to it, in order."""

    def __call__(self, child: Child, job: bytes, seconds: float, most: int) -> bytes | None:
        self.jobs.append(msgspec.msgpack.decode(job, type=CompileJob).asked["regex"])
        self.reached.set()
        assert self.open.wait(PATIENCE)
        return self._ask(child, job, seconds, most)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(Child.ask)
    monkeypatch.setattr(Child, "ask", lambda *arguments: made(*arguments))
    yield made
    made.open.set()


@pytest.fixture
async def grammars(tokenizer: PreTrainedTokenizerFast) -> AsyncIterator[GrammarService]:
    made = GrammarService(tokenizer, FakeEngine(tokenizer).card, ServerConfig(grammar_timeout=60.0))
    yield made
    made.close()


@contextmanager
def caller(index: int | None) -> Iterator[None]:
    token = CALLER.set(index)
    try:
        yield
    finally:
        CALLER.reset(token)


def begin(grammars: GrammarService, pattern: str) -> "asyncio.Task[WireGrammar]":
    return asyncio.create_task(grammars.compile("guided_regex", StructuredOutputs(regex=pattern)))


async def settle(tasks: list[Any]) -> None:
    """Let tasks run until they wait."""
    for _ in range(2 * len(tasks) + 2):
        await asyncio.sleep(0)


async def test_item_6_callers_take_turns(grammars: GrammarService, gate: Gate) -> None:
    with caller(0):
        slow = [begin(grammars, f"a{number}") for number in range(6)]
    await settle(slow)
    with caller(1):
        other = begin(grammars, "b")
    await settle([other])
    assert await asyncio.to_thread(gate.reached.wait, PATIENCE)
    gate.open.set()
    await asyncio.gather(*slow, other)
    assert gate.jobs.index("b") <= 2, "at most one of the other caller's comes first, after the one that ran"
    assert [job for job in gate.jobs if job != "b"] == [f"a{number}" for number in range(6)]


async def test_item_6_what_is_cheap_or_known_does_not_wait(grammars: GrammarService, gate: Gate) -> None:
    gate.open.set()
    known = await grammars.compile("guided_regex", StructuredOutputs(regex="known"))
    gate.open.clear()
    gate.reached.clear()
    slow = begin(grammars, "slow")
    assert await asyncio.to_thread(gate.reached.wait, PATIENCE)
    async with asyncio.timeout(PATIENCE):
        assert await grammars.compile("guided_regex", StructuredOutputs(regex="known")) is known
        assert await grammars.compile("guided_choice", StructuredOutputs(choice=["yes", "no"]))
        assert await grammars.compile("response_format", StructuredOutputs(json_object=True))
    assert not slow.done()
    assert gate.jobs == ["known", "slow"]
    gate.open.set()
    assert await slow


async def test_item_6_one_caller_cannot_fill_the_queue(grammars: GrammarService, gate: Gate) -> None:
    with caller(0):
        waiting = [begin(grammars, "first")]
        await settle(waiting)
        assert await asyncio.to_thread(gate.reached.wait, PATIENCE)
        waiting += [begin(grammars, f"a{number}") for number in range(MAX_WAITING)]
        await settle(waiting)
        with pytest.raises(Overloaded, match="of your grammars"):
            await grammars.compile("guided_regex", StructuredOutputs(regex="one more"))
        waiting.pop().cancel()
        await settle(waiting)
        waiting.append(begin(grammars, "in the place of one that went away"))
        await settle(waiting)
    with caller(1):
        other = begin(grammars, "b")
    await settle([other])
    gate.open.set()
    assert await other
    assert gate.jobs.index("b") <= 2
    assert all(await asyncio.gather(*waiting))


async def test_item_6_keys_are_callers(serve: Serve, gate: Gate) -> None:
    server = serve(api_key=("key-a", "key-b"), grammar_timeout=60.0)

    def post(key: str, pattern: str) -> "asyncio.Task[Any]":
        headers = {"authorization": f"Bearer {key}"}
        return asyncio.create_task(server.post(COMPLETIONS, {"prompt": "a", "guided_regex": pattern}, headers=headers))

    first = post("key-a", "a0")
    assert await asyncio.to_thread(gate.reached.wait, PATIENCE)
    jobs: Any = server.app.state.services.grammars._jobs
    several = [post("key-a", f"a{number}") for number in range(1, 5)]
    while sum(map(len, jobs._waiting.values())) < 4:
        await asyncio.sleep(0)
    other = post("key-b", "b")
    while sum(map(len, jobs._waiting.values())) < 5:
        await asyncio.sleep(0)
    gate.open.set()
    answers = await asyncio.gather(first, *several, other)
    assert [answer.status_code for answer in answers] == [200] * 6
    assert gate.jobs.index("b") <= 2
