"""Rows of faults in seconds, against real servers; `scripts/soak` runs them in full."""

import asyncio
import random
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from bench.soak import faults
from bench.soak.client import outcomes
from bench.soak.row import Soak
from bench.soak.server import write_model
from outpace.errors import EngineDead, EngineUnavailable, Overloaded
from outpace.server.messages import Cancel
from tests.server.asgi import Call
from tests.server.conftest import Serve
from tests.server.fake import FakeEngine
from tests.server.test_worker import Drive
from tests.server.test_worker import drive as drive
from tests.server.test_worker import llm as llm


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory) -> Soak:
    folder = tmp_path_factory.mktemp("soak") / "small"
    write_model(folder, 32, 2)
    return Soak(folder, folder, minutes=0.5)  # a twentieth of the full counts


@pytest.mark.slow
def test_f3_an_error_in_a_step_fails_its_batch_alone(soak: Soak) -> None:
    result = asyncio.run(faults.f3(soak))  # 10 runs
    assert result.passed, result.measured


@pytest.mark.slow
def test_f7_fifty_requests_in_flight_finish_after_a_signal(soak: Soak) -> None:
    result = asyncio.run(faults.f7(soak))
    assert result.passed, result.measured


@pytest.mark.parametrize("seed", range(20))
def test_f8_cancels_at_random_steps_free_their_blocks_within_two(drive: Drive, seed: int) -> None:
    draw = random.Random(seed)
    driven = drive(max_num_batched_tokens=8, max_num_seqs=2)
    numbers = range(draw.randint(1, 5))
    for number in numbers:
        driven.ask(number, [5 + number] * draw.randint(1, 24), draw.randint(1, 12), n=draw.randint(1, 2))
        driven.turns(draw.randrange(4))
    driven.turns(draw.randrange(30))
    driven.send(*(Cancel(number) for number in numbers))
    driven.turns(3)  # one to take the messages in
    driven.assert_nothing_is_held()
    news = driven.news()
    told = {number for each in news for number in each.cancelled}
    ended = {delta.number for each in news for delta in each.deltas if delta.finish_reason is not None}
    assert told | ended == set(numbers)


@pytest.mark.anyio
async def test_n1_each_request_is_counted_once_by_how_it_ended(
    serve: Serve, tokenizer: PreTrainedTokenizerFast
) -> None:
    async def counted(engine: FakeEngine, body: dict[str, Any], *, leave: bool = False) -> dict[str, int]:
        server = serve(engine)
        call = Call(server.app, "/v1/completions", body)
        running = asyncio.create_task(call.run())
        if leave:
            await engine.waits.wait()
            call.leave.set()
        await running
        return outcomes((await server.get("/metrics")).text)

    plain, stream = {"prompt": "a"}, {"prompt": "a", "stream": True}
    dead, away, full = EngineDead("it died"), EngineUnavailable("not yet"), Overloaded("5 are waiting")
    held = FakeEngine(tokenizer, hold=asyncio.Event(), hold_at=2)
    for body in (plain, stream):
        assert await counted(FakeEngine(tokenizer), body) == {"done": 1}
        assert await counted(FakeEngine(tokenizer, error=full), body) == {"rejected": 1}
        assert await counted(FakeEngine(tokenizer, error=away), body) == {"rejected": 1}
        assert await counted(FakeEngine(tokenizer, error=dead), body) == {"failed": 1}
        assert await counted(FakeEngine(tokenizer), {**body, "max_tokens": -1}) == {"invalid": 1}
    assert await counted(FakeEngine(tokenizer, error=dead, error_at=3), stream) == {"failed": 1}
    assert await counted(FakeEngine(tokenizer, error=RuntimeError("x")), plain) == {"failed": 1}
    assert await counted(held, stream, leave=True) == {"cancelled": 1}
