"""A replica's process: started, seen to be ready, buried and started again, ended."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from outpace.replicas.choose import Wanted
from outpace.replicas.fleet import Fleet
from outpace.replicas.keeper import Keeper, Program, Timing
from outpace.replicas.upstream import fetch
from tests.patience import PATIENCE

pytestmark = pytest.mark.anyio
COMMAND = (sys.executable, "-P", str(Path(__file__).parent / "program.py"))
SOON = Timing(probe=0.01, first_probe=0.01, answer=PATIENCE, silence=PATIENCE, first_delay=0.01, longest_delay=0.02)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def kept(folder: Path, timing: Timing = SOON, **options: Any) -> AsyncIterator[tuple[Keeper, Fleet, list[int]]]:
    """A keeper of one process, its fleet, and whom it has buried."""
    fleet, buried = Fleet([str(folder / "one.sock")]), list[int]()
    program = Program({"status": "200", **options}, dict(os.environ), COMMAND)
    keeper = Keeper(fleet, fleet.replicas[0], program, timing, retired=buried.append)
    await keeper.start()
    try:
        yield keeper, fleet, buried
    finally:
        await keeper.close()
        assert not fleet.replicas[0].ready


async def until(fleet: Fleet, ready: bool) -> None:
    """Wait until the replica is ready, or is not."""
    async with asyncio.timeout(PATIENCE):
        while fleet.replicas[0].ready != ready:
            await fleet.changed()


async def test_a_process_that_dies_is_replaced(tmp_path: Path) -> None:
    async with kept(tmp_path) as (keeper, fleet, buried):
        await until(fleet, True)
        first, path = keeper.pid, fleet.replicas[0].path
        assert first is not None
        assert await fetch(path, b"GET", b"/") == (200, str(first).encode())
        fleet.chooser.begin(0, Wanted(1.0, (b"prefix",)))
        os.kill(first, signal.SIGKILL)
        await until(fleet, False)  # as soon as it does not answer, which may be before it is known to have ended
        await until(fleet, True)
        assert fleet.chooser.remembered == 0, "what it had cached is gone"
        assert (fleet.replicas[0].restarts, buried) == (1, [0])
        assert keeper.pid not in (first, None)
        assert await fetch(path, b"GET", b"/") == (200, str(keeper.pid).encode())
        last = keeper.pid
    assert last is not None
    with pytest.raises(ProcessLookupError):
        os.kill(last, 0)


async def test_a_process_that_hangs_is_replaced(tmp_path: Path) -> None:
    timing = Timing(probe=0.01, first_probe=0.01, answer=0.5, silence=1.0, first_delay=0.01)
    async with kept(tmp_path, timing) as (keeper, fleet, buried):
        await until(fleet, True)
        first = keeper.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        async with asyncio.timeout(PATIENCE):
            while not buried:
                await fleet.changed()
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        await until(fleet, True)


async def test_one_that_is_not_ready_lives_on(tmp_path: Path) -> None:
    async with kept(tmp_path, status="503") as (keeper, fleet, buried):
        path, first = Path(fleet.replicas[0].path), keeper.pid
        async with asyncio.timeout(PATIENCE):
            while not path.exists():
                await asyncio.sleep(0.01)
            while (await fetch(str(path), b"GET", b"/"))[0] != 503:
                pass
        assert (fleet.num_ready, keeper.pid, buried) == (0, first, [])
        assert not keeper.was_ready.is_set()


@pytest.mark.parametrize("code", [1, 2])
async def test_a_first_process_that_cannot_start_is_not_tried_again(tmp_path: Path, code: int) -> None:
    async with kept(tmp_path, code=code) as (keeper, fleet, _):
        assert await asyncio.wait_for(keeper.failed, PATIENCE) == code
        assert fleet.num_ready == 0


async def test_one_that_crashes_while_it_starts_is_tried_again(tmp_path: Path) -> None:
    async with kept(tmp_path, code=9) as (keeper, _, buried):
        async with asyncio.timeout(PATIENCE):
            while len(buried) < 3:
                await asyncio.sleep(0.01)
        assert not keeper.failed.done()


async def test_one_that_the_system_cannot_start_now_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, start = [OSError("too many processes")] * 2, asyncio.create_subprocess_exec

    async def sometimes(*command: str, **options: Any) -> asyncio.subprocess.Process:
        if failures:
            raise failures.pop()
        return await start(*command, **options)

    async with kept(tmp_path) as (keeper, fleet, _):
        await until(fleet, True)
        monkeypatch.setattr(asyncio, "create_subprocess_exec", sometimes)
        assert keeper.pid is not None
        os.kill(keeper.pid, signal.SIGKILL)
        await until(fleet, False)
        await until(fleet, True)
        assert not failures
