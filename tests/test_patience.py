"""No test passes or fails by how busy the machine is: none compares clocks, none waits for less than `PATIENCE`."""

import ast
import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

from tests.patience import PATIENCE, skip

TESTS = Path(__file__).parent
CLOCKS = ("perf_counter", "monotonic", "time")
WAITS = ("wait_for", "timeout", "wait", "join")
SHORT = range(1, 60)
"""Seconds that are too few for a limit. Less than one is a poll."""
REMEDY = "wait for an event, compare what happened, skip() the clock, or use tests.patience.PATIENCE"


def problems(source: str) -> Iterator[str]:
    """Lines that compare clocks, or that wait for a few seconds only."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and _compares_clocks(node):
            yield f"{node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.Call) and _name(node.func) in WAITS:
            given = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "timeout")]
            if any(isinstance(each, ast.Constant) and each.value in SHORT and each.value is not True for each in given):
                yield f"{node.lineno}: {ast.unparse(node)}"


def _compares_clocks(node: ast.Compare) -> bool:
    parts = [part for side in (node.left, *node.comparators) for part in ast.walk(side)]
    if any(isinstance(part, ast.Name) and part.id == "PATIENCE" for part in parts):
        return False
    return any(
        isinstance(part, ast.BinOp)
        and isinstance(part.op, ast.Sub)
        and isinstance(part.left, ast.Call)
        and _name(part.left.func) in CLOCKS
        for part in parts
    )


def _name(function: ast.expr) -> str:
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def test_item_14_no_test_depends_on_the_speed_of_the_machine() -> None:
    found = {str(path): list(problems(path.read_text())) for path in TESTS.rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}, REMEDY


def test_item_14_the_rule_catches_what_breaks_it() -> None:
    for wrong in ("assert time.perf_counter() - begin < 2", "await asyncio.wait_for(x, 5)", "assert event.wait(10)"):
        assert len(list(problems(wrong))) == 1
    for right in ("assert time.thread_time() - a < 2", "event.wait(PATIENCE)", "', '.join(x)", "thread.join(0.01)"):
        assert list(problems(right)) == []


def test_item_14_a_clock_that_is_moved_on() -> None:
    async def wait_long() -> None:
        waiting = asyncio.create_task(asyncio.sleep(1e6))
        await asyncio.sleep(0)
        skip(1e6)
        await waiting

    begin = time.monotonic()
    asyncio.run(wait_long())
    assert time.monotonic() - begin < PATIENCE
