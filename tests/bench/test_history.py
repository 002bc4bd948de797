"""What a run of the guard is compared with, and the file that runs are kept in."""

import json
from pathlib import Path

import pytest

from bench import history
from bench.history import Figure, Run
from bench.report import row
from outpace.errors import InputError


def figure(ratio: float, part: str = "m: batches") -> Figure:
    return Figure(part, 1 / ratio, "ms", 1.0, ratio)


def run(commit: str, device: str = "h200", fell: tuple[str, ...] = (), **ratios: float) -> Run:
    figures = {name: figure(ratio) for name, ratio in ratios.items()}
    return Run(f"2026-11-{len(commit):02}", commit, device, {"torch": "2.11"}, {"gb_s": 4.0}, figures, fell)


def kinds(now: dict[str, Figure], runs: list[Run], band: float | None = None) -> dict[str, str]:
    return {each.name: each.kind for each in history.compare(now, history.references(runs, "h200"), band)}


@pytest.mark.parametrize(
    ("ratio", "kind"),
    [(0.9, "rose"), (0.761, "held"), (0.759, "fell"), (0.839, "held"), (0.841, "rose")],
)
def test_a_ratio_may_move_within_the_band(ratio: float, kind: str) -> None:
    assert kinds({"step": figure(ratio)}, [run("a", step=0.8)]) == {"step": kind}


def test_starts_have_a_wider_band_and_an_option_sets_one_for_all() -> None:
    runs = [Run("d", "a", "h200", {}, {}, {"ready": figure(1.0, "m: start")})]
    now = {"ready": figure(0.8, "m: start")}
    assert kinds(now, runs) == {"ready": "held"}
    assert kinds(now, runs, band=0.1) == {"ready": "fell"}
    assert kinds({"ready": figure(0.7, "m: start")}, runs) == {"ready": "fell"}


def test_new_figures_and_those_of_other_devices_are_compared_with_nothing() -> None:
    runs = [run("a", device="cpu", step=0.1)]
    assert kinds({"step": figure(0.8)}, runs) == {"step": "new"}
    assert history.missing(run("b"), history.references(runs, "h200"), runs, ["m: batches"]) == []


def test_each_figure_has_the_newest_reference_that_had_not_fallen() -> None:
    runs = [run("a", step=0.8, first=0.7), run("b", step=0.82), run("c", fell=("step",), step=0.5, first=0.75)]
    found = history.references(runs, "h200")
    assert {name: each.run.commit for name, each in found.items()} == {"step": "b", "first": "c"}
    assert kinds({"step": figure(0.5)}, runs) == {"step": "fell"}  # still: it was not accepted


def test_a_run_named_by_its_commit_or_date() -> None:
    runs = [run("abc1", step=0.8), run("abc22", fell=("step",), step=0.5), run("abc333", step=0.9)]
    assert history.references(runs, "h200", "abc2")["step"].figure.ratio == 0.5
    assert history.references(runs, "h200", "abc")["step"].figure.ratio == 0.9  # the newest of several
    assert history.references(runs, "h200", "2026-11-04")["step"].figure.ratio == 0.8
    with pytest.raises(InputError, match=r"reference: no run abd on h200; known: abc1 \(2026-11-04\), abc22"):
        history.references(runs, "h200", "abd")


def test_missing_figures_are_those_of_parts_that_ran() -> None:
    runs = [run("a", gone=0.1), run("b", step=0.8, first=0.7)]
    now, past = run("now", step=0.8), history.references(runs, "h200")
    (found,) = history.missing(now, past, runs, ["m: batches"])
    assert (found.name, found.kind, found.change) == ("first", "missing", None)
    assert history.missing(now, past, runs, ["m: prefill"]) == []


def test_of_two_measurements_the_better_one_counts() -> None:
    first = [row("a", 2.0, "ms", 1.0), row("b", 2.0, "ms", 1.0), row("c", 5.0, "times")]
    again = [row("a", 4.0, "ms", 1.0), row("b", 1.5, "ms", 1.0), row("c", 6.0, "times")]
    assert [each["figure"] for each in history.better(first, again)] == [2.0, 1.5, 6.0]


def test_figures_are_rows_with_a_limit() -> None:
    rows = [row("rate", 50.0, "tok/s", 100.0), row("gap", 5.0, "ms"), row("part FAILED: Error", 0.0, "")]
    assert history.figures_of("m: p", rows) == {"rate": Figure("m: p", 50.0, "tok/s", 100.0, 0.5)}


def test_a_file_is_written_and_read_and_grows(tmp_path: Path) -> None:
    path = tmp_path / "new" / "history.jsonl"
    assert history.read(path) == []
    runs = [run("a", step=0.8), run("b", fell=("step",), step=0.5)]
    history.write(path, runs)
    assert len(path.read_text().splitlines()) == 2
    again = history.read(path)
    assert [(each.commit, each.figures, list(each.fell)) for each in again] == [
        (each.commit, each.figures, list(each.fell)) for each in runs
    ]
    history.write(path, [*again, run("c")])
    assert [each.commit for each in history.read(path)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "line",
    [
        *("{", "[]", "7", '{"figures": 3}', '{"figures": {}}'),
        json.dumps({"figures": {"a": {"part": "p", "figure": 1.0, "unit": "ms", "limit": 1.0, "ratio": "x"}}}),
    ],
)
def test_a_broken_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history.write(path, [run("a", step=0.8)])
    path.write_text(path.read_text() + "\n" + line + "\n")
    with pytest.raises(InputError, match=r"history: .*history.jsonl, line 3 "):
        history.read(path)


def test_a_ratio_of_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history.write(path, [run("a", step=0.8)])
    path.write_text(path.read_text().replace('"ratio": 0.8', '"ratio": 0.0'))
    with pytest.raises(InputError, match="line 1 has a ratio or limit that is not above 0"):
        history.read(path)
