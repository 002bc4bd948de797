"""A rank for tests: it compares its rows with the others' after every step, or fails as the environment says."""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

import outpace.load_paged
from outpace.ranks import follower
from outpace.runner.runner import Runner
from outpace.types import Step, StepOutput

FAILS = "TEST_FOLLOWER_FAILS"
NAME = "tests.parallel.follower"
_launch = Runner.launch


def launch_and_compare(self: Runner, step: Step) -> Callable[[], StepOutput]:
    """`Runner.launch`, after which the rows of all ranks must be the same."""
    output = _launch(self, step)
    rows = self._model.ranks.stacked(self.rows.tokens.contiguous())
    assert torch.equal(rows, rows[:1].expand_as(rows)), f"ranks differ after step {step.step_id}"
    return output


def fail(*arguments: Any, **options: Any) -> Any:
    """Where the environment says so."""
    raise MemoryError(f"no room in {os.environ[FAILS]}")


if __name__ == "__main__":
    fails = os.environ.get(FAILS)
    Runner.launch = fail if fails == "step" else launch_and_compare  # type: ignore[method-assign]
    if fails == "load":
        outpace.load_paged.load_paged = fail
    follower.main(int(sys.argv[1]), int(sys.argv[2]))
