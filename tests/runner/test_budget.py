"""The token budget that is chosen from timed steps."""

import pytest
import torch

from outpace.runner import budget
from outpace.runner.budget import Times


def test_a_disturbed_step_does_not_make_small_steps_look_best() -> None:
    """If only the full step was disturbed, one more token seems to cost more than the mean token of that step."""
    disturbed = Times(tokens=2048, full=0.074, quarter=0.013, each=0.007, few=0.0045)
    assert disturbed.of(256) > 0
    quiet = Times(tokens=2048, full=0.037, quarter=0.013, each=0.007, few=0.0045)
    assert budget._fastest(disturbed, 2048, 8192) == budget._fastest(quiet, 2048, 8192) == 8192


def test_a_step_is_timed_by_its_quickest_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = iter([0.0, 9.0, 10.0, 13.0, 20.0, 21.0, 30.0, 35.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(ends))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    ran = list[int]()
    assert budget._seconds(lambda: ran.append(1), torch.device("cpu")) == 1.0
    assert len(ran) == 1 + budget.RUNS
