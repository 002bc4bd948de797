"""Workers that die, hang and do not start; the real one, and one without a model that is quick to start."""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outpace.errors import EngineDead, ModelError, OutpaceError, StateError
from outpace.server import client as client_module
from outpace.server import supervisor as supervisor_module
from outpace.server.engine import Delta, EngineRequest
from outpace.server.http_server import drained
from outpace.server.supervisor import Healing, Supervisor
from outpace.types import SamplingParams
from tests.models import tiny
from tests.patience import PATIENCE

QUICK = Healing(first_delay=0.05, longest_delay=0.2, stall_timeout=PATIENCE, start_timeout=PATIENCE)
ROOT = Path(__file__).parent.parent.parent


def request(token: int = 5, max_tokens: int = 50) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return EngineRequest(request_id="r", prompt_token_ids=[token, 6, 7], params=params)


def vector_of(ids: list[int]) -> EngineRequest:
    params = SamplingParams(max_tokens=0)
    return EngineRequest(request_id="v", prompt_token_ids=ids, params=params, pooling="last")


def run(work: Awaitable[Any], seconds: float = PATIENCE) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(work, seconds)

    return asyncio.run(limited())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@asynccontextmanager
async def started(
    model: str | None, options: dict[str, Any] | None = None, **changes: Any
) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(model, options, **({"healing": QUICK} | changes))
    await supervisor.start()
    try:
        yield supervisor
    finally:
        await supervisor.close()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker without a model instead of the real one."""

    async def process(sock: socket.socket) -> asyncio.subprocess.Process:
        command = (sys.executable, "-m", "tests.server.fake_worker", str(sock.fileno()))
        return await asyncio.create_subprocess_exec(*command, pass_fds=(sock.fileno(),), cwd=ROOT)

    monkeypatch.setattr(supervisor_module, "_process", process)
    monkeypatch.setattr(client_module, "COUNT_EVERY", 0.0)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


async def errors_of(streams: list[Any]) -> list[BaseException]:
    """The errors of requests that are expected to fail."""

    async def exhaust(stream: Any) -> None:
        async for _ in stream:
            pass

    found = await asyncio.gather(*map(exhaust, streams), return_exceptions=True)
    return [error for error in found if error is not None]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_f1_a_worker_that_dies_is_replaced_and_its_requests_fail_soon(number: signal.Signals) -> None:
    async def go() -> None:
        async with started(None) as engine:
            pid, card = engine.pid, engine.card
            assert pid is not None
            streams = [engine.generate(request(token)) for token in range(5, 9)]
            firsts = [await anext(stream) for stream in streams]
            assert [first.token_ids[0] for first in firsts] == [5, 6, 7, 8]
            await until(lambda: engine.status().expert_load == [[3, 4]])
            tokens = engine.status().generated_tokens
            os.kill(pid, number)
            errors = await errors_of(streams)
            assert [type(error) for error in errors] == [EngineDead] * 4
            await until(lambda: engine.pid is None)
            assert not engine.status().ready
            assert engine.card == card
            assert engine.status().expert_load == [[3, 4]]
            with pytest.raises(EngineDead, match="restarted"):
                await anext(engine.generate(request()))
            await until(lambda: engine.status().ready)
            assert engine.pid not in (None, pid)
            assert engine.status().restarts == 1
            again = engine.generate(request(9))
            assert (await anext(again)).token_ids[0] == 9
            assert engine.status().generated_tokens > tokens > 0, "totals began again"
            await again.aclose()
            await until(lambda: engine.status().expert_load == [[6, 8]])

    run(go())


@pytest.mark.usefixtures("fake")
def test_item_12_a_stopped_worker_with_work_is_not_ready_until_it_goes_on() -> None:
    async def go() -> None:
        async with started(None, healing=Healing(ready_timeout=0.2)) as engine:
            assert engine.pid is not None
            stream = engine.generate(request())
            await anext(stream)
            os.kill(engine.pid, signal.SIGSTOP)
            await until(lambda: not engine.status().ready)
            assert "no sign of life" in engine.status().why
            os.kill(engine.pid, signal.SIGCONT)
            await until(lambda: engine.status().ready)
            assert (await anext(stream)).token_ids, "its requests go on"
            await stream.aclose()
            assert engine.status().restarts == 0

    run(go())


@pytest.mark.usefixtures("fake")
def test_item_13_requests_that_the_engine_has_not_begun_are_counted_as_waiting() -> None:
    async def go() -> None:
        async with started(None, healing=Healing()) as engine:
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGSTOP)
            firsts = [asyncio.ensure_future(anext(engine.generate(request()))) for _ in range(200)]
            await until(lambda: engine.in_flight == 200)
            assert (engine.status().running, engine.status().waiting) == (0, 200)
            os.kill(engine.pid, signal.SIGCONT)
            await asyncio.gather(*firsts)
            await until(lambda: engine.status().running == 200 or not engine.in_flight)
            assert engine.status().waiting == 0

    run(go())


@pytest.mark.usefixtures("fake")
def test_f6_a_worker_that_hangs_with_work_is_killed_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        async with started(None, healing=replace(QUICK, stall_timeout=0.4)) as engine:
            pid = engine.pid
            assert pid is not None
            stream = engine.generate(request())
            await anext(stream)
            os.kill(pid, signal.SIGSTOP)
            (error,) = await errors_of([stream])
            assert isinstance(error, EngineDead)
            await until(lambda: engine.status().ready)
            assert not is_alive(pid)

    run(go())
    assert any("hangs" in record.message for record in caplog.records)


@pytest.mark.usefixtures("fake")
def test_an_idle_worker_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "TICK", 0.1)

    async def go() -> None:
        async with started(None) as engine:
            pid = engine.pid
            with monkeypatch.context() as patch:
                later = SimpleNamespace(monotonic=lambda: time.monotonic() + 2 * QUICK.stall_timeout)
                patch.setattr(supervisor_module, "time", later)
                await asyncio.sleep(3 * supervisor_module.TICK)
            stream = engine.generate(request())
            await anext(stream)
            await stream.aclose()
            assert (engine.pid, engine.status().restarts) == (pid, 0)

    run(go())


@pytest.mark.usefixtures("fake")
def test_starts_that_fail_are_tried_again_with_growing_delays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = tmp_path / "broken"

    async def go() -> None:
        async with started(None, {"fail": str(broken)}) as engine:
            assert engine.pid is not None
            broken.touch()
            os.kill(engine.pid, signal.SIGKILL)
            await until(lambda: sum("cannot be started" in record.message for record in caplog.records) == 3)
            assert not engine.status().ready
            broken.unlink()
            await until(lambda: engine.status().ready)

    run(go())
    told = [record.getMessage() for record in caplog.records if "cannot be started" in record.message]
    assert [message.rpartition("again in ")[2] for message in told[:3]] == ["0.10 s", "0.20 s", "0.20 s"]


@pytest.mark.usefixtures("fake")
def test_a_first_start_that_fails_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    async def go(seconds: float, **options: Any) -> None:
        engine = Supervisor(None, options, healing=Healing(start_timeout=seconds))
        with pytest.raises(StateError, match="start"):
            _ = engine.card
        try:
            await engine.start()
        finally:
            assert engine.pid is None
            await engine.close()

    (tmp_path / "broken").touch()
    with pytest.raises(ModelError, match="there is none"):
        run(go(PATIENCE, fail=str(tmp_path / "broken")))
    with pytest.raises(EngineDead, match="not ready in 1 s"):
        run(go(1.0, silent=True))


@pytest.mark.usefixtures("fake")
def test_draining_refuses_new_requests_and_lets_running_ones_go_on() -> None:
    async def go() -> None:
        async with started(None) as engine:
            stream = engine.generate(request())
            await anext(stream)
            engine.drain()
            assert not engine.status().ready
            with pytest.raises(EngineDead, match="shutting down"):
                await anext(engine.generate(request()))
            with pytest.raises(EngineDead, match="shutting down"):
                await engine.embed([vector_of([1])])
            waiting = asyncio.create_task(drained(engine, Counter()))
            assert (await anext(stream)).token_ids
            assert not waiting.done()
            await stream.aclose()
            await waiting

    run(go())


@pytest.mark.usefixtures("fake")
def test_closing_fails_running_requests_and_ends_the_process() -> None:
    async def go() -> None:
        async with started(None) as engine:
            pid = engine.pid
            assert pid is not None
            stream = engine.generate(request())
            await anext(stream)
            await engine.close()
            assert not is_alive(pid)
            (error,) = await errors_of([stream])
            assert isinstance(error, EngineDead)

    run(go())


# The real worker


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """More gain nothing with tiny models, and spin on a busy machine."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny("llama", max_position_embeddings=4096).save_pretrained(path)
    return str(path)


async def tokens_of(engine: Supervisor, asked: EngineRequest) -> list[int]:
    deltas: list[Delta] = [delta async for delta in engine.generate(asked)]
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.slow
def test_f1_the_real_worker_heals_and_gives_the_same_answers(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    async def go() -> None:
        async with started(folder, {"device": "cpu"}, healing=Healing(first_delay=0.05)) as engine:
            pid = engine.pid
            assert pid is not None
            right = await tokens_of(engine, request())
            assert len(right) == 50
            while await idle_share(pid) >= 0.1:  # it may still be busy with the answer
                pass
            streams = [engine.generate(request(max_tokens=4000)) for _ in range(3)]
            for stream in streams:
                await anext(stream)
            os.kill(pid, signal.SIGKILL)
            errors = await errors_of(streams)
            assert [type(error) for error in errors] == [EngineDead] * 3
            await until(lambda: engine.status().ready)
            assert not is_alive(pid)
            assert await tokens_of(engine, request()) == right
            assert len(await engine.embed([vector_of([5, 6])])) == 1

    run(go())


async def idle_share(pid: int) -> float:
    """The part of a core that a process uses while nothing is asked of it."""

    def ticks() -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    await asyncio.sleep(0.1)
    before = ticks()
    await asyncio.sleep(0.5)
    return (ticks() - before) / os.sysconf("SC_CLK_TCK") / 0.5


PARENT = """
import asyncio, os, signal, sys
from outpace.server.supervisor import Supervisor

async def main():
    engine = Supervisor(sys.argv[1], {"device": "cpu"})
    await engine.start()
    sys.stdout.write(f"{engine.pid}\\n")
    sys.stdout.flush()
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [False, True])
def test_a_worker_dies_with_its_parent(folder: str, stopped: bool) -> None:
    command = [sys.executable, "-c", PARENT, folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, signal.SIGTERM)  # as to a whole group: the worker leaves the decision to its parent
        assert is_alive(pid)
        if stopped:
            os.kill(pid, signal.SIGSTOP)  # it cannot see that its socket is closed
        parent.kill()
    end = time.monotonic() + PATIENCE
    while is_alive(pid) and time.monotonic() < end:
        time.sleep(0.01)
    assert not is_alive(pid)


@pytest.mark.slow
def test_the_real_worker_says_what_it_cannot_load(tmp_path: Path) -> None:
    async def go() -> None:
        async with started(str(tmp_path), {"device": "cpu"}):
            pass

    with pytest.raises(OutpaceError, match="model: "):
        run(go())
