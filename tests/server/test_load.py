"""Rows of load in seconds, against a real server; `scripts/soak` runs them in full. Times are not judged here."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

import outpace
from bench.soak import faults, load
from bench.soak.client import COMPLETIONS, Answer, post
from bench.soak.leaks import sample
from bench.soak.row import Soak
from bench.soak.server import Server, serving, until, write_model
from outpace.types import SamplingParams
from tests.models import prompts, tiny
from tests.patience import PATIENCE

FLAGS = ("--max-num-seqs", "4", "--max-waiting", "16", "--keep-alive-timeout", "2")


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory) -> Soak:
    folder = tmp_path_factory.mktemp("soak") / "small"
    write_model(folder, 32, 2)
    return Soak(folder, folder, minutes=0.5)  # a twentieth of the full counts


@pytest.fixture(scope="module")
def runner() -> Any:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def server(soak: Soak, runner: asyncio.Runner) -> Any:
    """One server for all rows, and in the end for the ledger of what they sent."""
    started = serving(soak.small, *FLAGS)
    yield runner.run(started.__aenter__())
    runner.run(started.__aexit__(None, None, None))


def check_refusals(answers: list[Answer]) -> None:
    """Each is done, or refused with a time to come back; both happened."""
    assert {answer.outcome for answer in answers} == {"done", "rejected"}
    for answer in answers:
        assert answer.status in (200, 429)
        assert (answer.status == 429) == ("retry-after" in answer.headers)


@pytest.mark.slow
def test_l2_overload_refuses_what_is_too_much_and_goes_on(runner: asyncio.Runner, server: Server) -> None:
    check_refusals(runner.run(load.open_loop(server, 300, 1.0)))
    assert runner.run(server.is_ready())


@pytest.mark.slow
def test_l3_of_a_burst_each_request_is_answered_or_refused(runner: asyncio.Runner, server: Server, soak: Soak) -> None:
    assert runner.run(load.l3(soak, server)).passed  # 100 requests


@pytest.mark.slow
def test_l4_idle_and_slow_clients_hold_up_nobody(runner: asyncio.Runner, server: Server) -> None:
    async def go() -> list[Answer]:
        slow = load.slow_readers(server, 10, load.body(0, 300, logprobs=5, stream=True))
        async with load.connections(server, 100, b""), slow:
            answers = await load.closed_loop(server, 2, load.bodies_for(1.0, lambda number: load.body(number, 4)))
            while (await server.status())["running"]:
                await asyncio.sleep(0.02)
        return answers

    before = sample(server.pid)
    answers = runner.run(go())
    after = sample(server.pid)
    assert answers
    assert {answer.outcome for answer in answers} == {"done"}
    assert after.rss_mb - before.rss_mb < 50


@pytest.mark.slow
def test_l4_a_client_that_never_reads_is_let_go(runner: asyncio.Runner, server: Server) -> None:
    """Its answer is larger than what the system takes; `keep_alive_timeout` is two seconds here."""
    big = post(COMPLETIONS, load.body(1, 1, prompt=["a" * 4000] * 4, echo=True, logprobs=20), keep_alive=True)

    async def go() -> None:
        await server.idle()
        before = sample(server.pid).fds
        async with load.connections(server, 1, big, buffer=2048):
            server.ledger.sent += 1
            await server.idle(PATIENCE)
            assert sample(server.pid).fds > before, "the system took all of it: the test shows nothing"
            await until(lambda: sample(server.pid).fds <= before, "the connection is closed", PATIENCE)
        server.ledger.ends["cancelled"] += 1

    runner.run(go())


@pytest.mark.slow
def test_f8_clients_that_leave_at_random_moments_leave_nothing(
    runner: asyncio.Runner, server: Server, soak: Soak
) -> None:
    assert runner.run(faults.f8(soak, server)).passed  # 50 disconnects


@pytest.mark.slow
def test_n1_the_server_counted_what_the_clients_did(runner: asyncio.Runner, server: Server, soak: Soak) -> None:
    runner.run(load.open_loop(server, 100, 0.5))
    runner.run(faults.f8(soak, server))
    status, counted = runner.run(server.idle())
    assert server.ledger.agrees(counted), (server.ledger, counted)
    assert status["free_blocks"] == status["num_blocks"]
    other = replace(server.ledger, sent=server.ledger.sent + 1)
    assert not other.agrees(counted)


def test_l6_ten_times_the_cache_gives_each_the_tokens_it_has_alone() -> None:
    llm = outpace.LLM(tiny("llama"), device="cpu", num_blocks=5, block_size=16, max_num_seqs=8, deterministic=True)
    asked = [row.tolist() for row in prompts(*[20] * 13)]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)  # 4 pages each, 52 of 5
    together = llm.generate(asked, params)
    alone = [llm.generate(one, params) for one in asked]
    assert llm.engine.totals.preemptions > 0
    assert [one.outputs[0].token_ids for one in together] == [one.outputs[0].token_ids for (one,) in alone]
