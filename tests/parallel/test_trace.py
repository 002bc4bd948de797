"""Traces of pipeline stages: what is written, and what is computed from them."""

from pathlib import Path

import pytest

from outpace.errors import ConfigError, InputError
from outpace.parallel.stages import bubble
from outpace.parallel.trace import (
    ENVIRONMENT,
    Interval,
    Trace,
    ideal_speedup,
    idle_share,
    read,
    replayed,
    shifted,
    steady_idle_share,
    within,
)
from tests.parallel.schedules import pipeline


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 5), (2, 1), (2, 16), (3, 7), (4, 16)])
def test_equal_stages_have_the_bubble_of_the_formula(stages: int, micro_batches: int) -> None:
    ideal = pipeline(stages, micro_batches)
    assert idle_share(ideal) == pytest.approx(bubble(stages, micro_batches))
    if micro_batches >= stages:  # else there is no time at which all stages have work
        assert steady_idle_share(ideal) == pytest.approx(0, abs=1e-12)
    whole = max(spans[-1].end for spans in ideal.values())
    assert stages * micro_batches / whole == pytest.approx(ideal_speedup(stages, micro_batches))


def test_gaps_count_as_idle_in_the_steady_state_too() -> None:
    found = pipeline(2, 16, took=1.0, gap=0.25)
    assert steady_idle_share(found) == pytest.approx(0.2, abs=0.02)
    assert idle_share(found) > bubble(2, 16)


def test_a_slow_stage_makes_the_others_wait() -> None:
    slow = [Interval(m, 1 + 2 * m, 3 + 2 * m) for m in range(8)]
    found = {0: [Interval(m, 2.0 * m, 2.0 * m + 1) for m in range(8)], 1: slow}
    assert steady_idle_share(found) == pytest.approx(0.25, abs=0.05)


def test_less_than_two_stages_and_micro_batches() -> None:
    assert bubble(1, 1) == 0
    assert ideal_speedup(1, 3) == 1
    assert ideal_speedup(4, 1) == 1
    assert idle_share({0: [Interval(0, 1.0, 1.0)]}) == 0
    with pytest.raises(InputError, match="no spans"):
        idle_share({0: [], 1: []})


def test_ranks_write_files_that_are_read_as_stages(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    for rank, stage in enumerate((1, 1, 0, 0)):  # two ranks share a stage; the first rank has the last stage
        trace = Trace(stage, rank, folder)
        for span in pipeline(2, 3)[stage]:
            trace.add(span.step, span.begin + 100 * rank, span.end + 100 * rank, waited=0.5, cpu=0.25)
    found = read(folder, {2: -200.0})
    assert {stage: [tuple(span) for span in spans] for stage, spans in found.items()} == {
        stage: [(*span[:3], 0.5, 0.25) for span in spans] for stage, spans in pipeline(2, 3).items()
    }


def test_one_is_only_made_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert Trace.asked(0, 0) is None
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path))
    trace = Trace.asked(stage=1, rank=3)
    assert trace is not None
    trace.add(7, 1.0, 2.0)
    assert read(tmp_path) == {1: [Interval(7, 1.0, 2.0)]}
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=ENVIRONMENT):
        Trace.asked(0, 0)


def test_a_folder_without_traces_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=ENVIRONMENT):
        read(tmp_path)


def test_parts_of_a_trace() -> None:
    assert within(pipeline(2, 3), 2.0, 3.5) == {0: [Interval(2, 2.0, 3.0)], 1: [Interval(1, 2.0, 3.0)]}
    assert shifted([Interval(1, 5.0, 6.0), Interval(0, 1.0, 2.0)], 1.0) == [
        Interval(0, 2.0, 3.0),
        Interval(1, 6.0, 7.0),
    ]


def test_cpu_times_are_replayed_without_waits() -> None:
    busy = {stage: [span._replace(cpu=0.5) for span in spans] for stage, spans in pipeline(3, 8, gap=2.0).items()}
    alone = {stage: [span._replace(cpu=0.5) for span in spans] for stage, spans in pipeline(3, 8, took=0.5).items()}
    assert replayed(busy) == alone
    uneven = {
        0: [Interval(0, 0, 0, cpu=1), Interval(1, 0, 0, cpu=1)],
        1: [Interval(0, 0, 0, cpu=3), Interval(1, 0, 0, cpu=3)],
    }
    assert [span.begin for span in replayed(uneven)[1]] == [1, 4]
