"""`scripts/bench runtime`, `moe`, `quantization` on tiny shapes: rows beside their limits; failures are rows."""

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import runtime
from bench.plans import PLANS, TINY, ways
from bench.report import Report, row
from bench.runtime import Bench
from outpace.bench.latency import decode_step, first_token
from outpace.bench.subject import started
from outpace.errors import InputError
from outpace.kernels.limits import Speed
from tests.models import tiny

SPEED = Speed(1e9, 1e10)
LENGTH = '{"max_model_len": 64}'


def run(folder: Path, *options: str) -> dict[str, Any]:
    runtime.main([*options, "--out", str(folder)])
    (file,) = folder.glob("*.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def names(found: dict[str, Any], model: str) -> list[str]:
    return [row["what"].removeprefix(f"{model}: ") for row in found["rows"]]


def test_results_are_written_after_each_part_and_a_failure_is_one_row(tmp_path: Path) -> None:
    to = Report("runtime", tmp_path, Speed(1e12, 1e13), "somewhere")

    def broken() -> Any:
        raise RuntimeError("out of luck")

    to.part("m: throughput", broken)
    to.part("m: latency", lambda: ([row("m: decode", 5.0, "tok/s", 10.0, ("them", 2.0))], {"a": 1}))
    (file,) = tmp_path.glob("runtime_somewhere_*.json")
    found = json.loads(file.read_text())
    assert [row["what"] for row in found["rows"]] == ["m: throughput FAILED: RuntimeError", "m: decode"]
    assert (found["rows"][1]["of limit"], found["rows"][1]["times other"]) == (0.5, 2.5)
    assert found["details"] == {"m: throughput": {"error": "out of luck"}, "m: latency": {"a": 1}}
    assert "| m: decode | 5.000 | tok/s | 10.000 | 0.500 | 2 (them) | 2.500 |" in file.with_suffix(".md").read_text()


def test_parts_and_their_limits(tmp_path: Path) -> None:
    parts = "throughput,latency,full-load,sweep,long-prompts,batches,prefill,few-long"
    found = run(tmp_path, "--models", "tiny", "--tiny", "--only", parts)
    rows = {row["what"].removeprefix("tiny: "): row for row in found["rows"]}
    between = "median between tokens"
    assert list(rows) == [
        *("ready, without making weights", "weights that a step reads", "throughput", f"throughput, {between}"),
        *("decode step of 1", "decode of one", "first token", "8/8", f"8/8, {between}"),
        *("1 in flight", f"1 in flight, {between}", "2 in flight", f"2 in flight, {between}"),
        *("long prompts, prompt and output tokens", "step of 1", "step of 2", "step of 2 to that of 1"),
        *("first token of 16", "first token of 64", "attention: 1 x 200 + 3 x 20 keys"),
    ]
    differences = {"decode step of 1", "decode of one"}  # of two times: on a busy machine they may be below zero
    assert all(row["figure"] > 0 for what, row in rows.items() if what not in differences)
    for name in ("throughput", "decode of one", "8/8", "step of 2", "first token of 16"):
        assert 0 < rows[name]["of limit"] < 1
    ratio = rows["step of 2 to that of 1"]["figure"]
    assert ratio == pytest.approx(rows["step of 2"]["figure"] / rows["step of 1"]["figure"])
    assert rows["first token of 64"]["limit"] > rows["first token of 16"]["limit"]
    long = found["details"]["tiny: long-prompts"]
    assert long["num_requests"] == TINY.long_requests
    assert TINY.long_requests * 16 <= long["total_input_tokens"] <= TINY.long_requests * 48
    assert rows["long prompts, prompt and output tokens"]["figure"] == long["total_token_throughput"]
    assert len([*tmp_path.glob("runtime_*_tiny_sweep.png")]) == 1


def test_experts_and_schemes_one_after_the_other(tmp_path: Path) -> None:
    asked = ("--models", "tiny-moe", "--tiny", "--only", "decode,throughput", "--schemes", "none,int4")
    found = run(tmp_path, "moe", *asked, "--options", LENGTH)
    rows = {row["what"].removeprefix("tiny-moe: "): row for row in found["rows"]}
    parts = ("throughput", "throughput, median between tokens", "decode step of 1", "decode of one", "first token")
    assert {f"{way}, {part}" for way in ("torch", "torch int4") for part in parts} <= {*rows}
    assert rows["torch, decode step of 2"]["limit"] > rows["torch, decode step of 1"]["limit"]  # more experts
    assert rows["torch int4, decode of one"]["limit"] > 1.5 * rows["torch, decode of one"]["limit"]
    assert {"tiny-moe, torch: decode", "tiny-moe, torch int4: throughput"} <= {*found["details"]}
    assert [*found["details"]["tiny-moe, torch: decode"]] == ["1", "2"]
    assert len([*tmp_path.glob("moe_cpu-*_tiny-moe.png")]) == 1


def test_pictures_have_the_names_of_folders_and_matplotlib_may_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny("llama").save_pretrained(tmp_path / "mine")
    asked = ["--models", str(tmp_path / "mine"), "--tiny", "--only", "decode,sweep", "--options", LENGTH]
    found = run(tmp_path / "drawn", *asked)
    assert not [row for row in found["rows"] if "FAILED" in row["what"]]
    for name in ("mine", "mine_sweep"):
        assert len([*(tmp_path / "drawn").glob(f"runtime_*-??_{name}.png")]) == 1
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    found = run(tmp_path / "bare", *asked)
    assert not [row for row in found["rows"] if "FAILED" in row["what"]]
    assert capsys.readouterr().out.count("no picture: plot: matplotlib is not installed") == 2


def test_splitfuse_has_its_own_sizes_whatever_the_options(tmp_path: Path) -> None:
    given = '{"max_num_batched_tokens": 4, "max_model_len": 8}'
    found = run(tmp_path, "--models", "tiny", "--tiny", "--only", "splitfuse", "--options", given)
    assert not [row for row in found["rows"] if "FAILED" in row["what"]]
    assert len([*tmp_path.glob("runtime_*_tiny_splitfuse.png")]) == 1


def test_results_without_rows_are_written(tmp_path: Path) -> None:
    Report("runtime", tmp_path, SPEED, "somewhere").add("nothing", [])
    (file,) = tmp_path.glob("*.md")
    assert "nothing was measured" in file.read_text()


def test_ways_to_run_a_model() -> None:
    assert ways([""], [""]) == {"": {}}
    assert ways([""], ["none", "fp8+fp8"]) == {
        "none": {},
        "fp8+fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    }
    assert ways(["hf"], ["none", "int4"]) == {
        "hf": {"moe": {"enabled": False}}, "hf int4": {"moe": {"enabled": False}, "quantization": "int4"},
    }  # fmt: skip


def test_a_start_is_measured_twice_and_failures_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def start(model: str, options: Any, cache: Path) -> dict[str, float]:
        asked.append(cache)
        assert options["kernels"]["experts"] == "triton"
        assert cache.is_dir()
        return {"load": 2.0, "all": 12.0 if len(asked) == 1 else 6.0}

    monkeypatch.setattr(runtime, "seconds_of_start", start)
    found = run(tmp_path, "moe", "--models", "tiny-moe", "--only", "decode,start", "--experts", "triton")
    assert [(row["what"], row["figure"], row["of limit"]) for row in found["rows"]] == [
        ("tiny-moe, triton: ready, decode FAILED: ConfigError", 0.0, "-"),  # Triton needs a GPU
        ("tiny-moe: triton, ready, kernel cache empty", 10.0, 1.0),
        ("tiny-moe: triton, ready, kernel cache full", 4.0, 1.25),
    ]
    assert asked[0] == asked[1]
    assert not asked[0].exists()


def test_what_the_process_that_is_started_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "start.py").write_text(runtime.START)
    monkeypatch.setattr(sys, "argv", ["-c", "tiny-moe", json.dumps({"max_model_len": 64, "max_num_seqs": 2})])
    runpy.run_path(str(tmp_path / "start.py"))
    took = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert took["all"] > took["load"] > 0


def test_a_model_is_started_and_what_it_cannot_hold_is_told(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "tiny")
    options = ["--models", str(tmp_path / "tiny"), "--only", "throughput", "--options", LENGTH]
    found = [row["what"] for row in run(tmp_path / "out", *options)["rows"]]
    assert found[0].endswith("tiny: ready, without making weights")
    assert found[-1].endswith("throughput FAILED: InputError")


def test_a_model_that_cannot_be_started_is_one_row(tmp_path: Path) -> None:
    found = run(tmp_path, "--models", "nobody/nothing", "--only", "batches")
    assert [row["what"].split(" FAILED")[0] for row in found["rows"]] == ["nobody/nothing: batches"]


def test_requests_are_as_long_as_the_model_has_positions_for() -> None:
    assert runtime.longest("llama-3.1-8b", 8256) == 8256
    assert runtime.longest("gemma-2-2b", 8256) == 8192
    assert runtime.longest("somebody/else", 8256) == 8256


def test_a_step_is_one_in_which_all_requests_take_part() -> None:
    with started("tiny", speed=SPEED, max_model_len=64, max_num_batched_tokens=16, max_num_seqs=4) as subject:
        found = decode_step(subject, 4, input_len=12, output_len=12, iters=2)  # the prompts need several steps
        assert 0 < found["steps"] < 2 * 11
        with pytest.raises(InputError, match="the longest request has 65 tokens"):
            first_token(subject, 64)


def test_few_long_contexts_among_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to = Report("runtime", tmp_path, SPEED, "somewhere")
    (found,), details = Bench("attention", to, TINY).few_long()
    assert details["bytes"] == (200 + 3 * 20) * 2 * 2 * 16 * 2  # keys, K and V, heads, size, bytes of fp16
    assert found["limit"] == pytest.approx(details["bytes"] / SPEED.bandwidth * 1e3)
    assert found["figure"] > 0

    def batch(heads: Any, seqs: list[tuple[int, int]]) -> Any:
        assert (len(seqs), seqs.count((1, 32768)), seqs.count((1, 300)), seqs.count((0, 0))) == (256, 8, 200, 48)
        raise StopIteration

    monkeypatch.setattr(runtime, "attend", batch)
    with pytest.raises(StopIteration):
        Bench("attention", to).few_long()


@pytest.mark.parametrize(
    ("device", "scheme", "best", "ratio"),
    [("h200", "fp8+fp8", "3.69 (vLLM 0.26.0)", 1.0), ("h200", "int8", "-", "-"), ("b200", "fp8+fp8", "-", "-")],
)
def test_others_stand_beside_the_same_way_alone(
    tmp_path: Path, device: str, scheme: str, best: str, ratio: float | str
) -> None:
    to = Report("quantization", tmp_path, SPEED, device)
    bench = Bench("llama-3.1-8b", to, way=scheme, others=PLANS["quantization"].others)
    row = bench.row("decode step of 8", 3.69, "ms")
    assert (row["best other"], row["times other"]) == (best, ratio)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (["--only", "latency,speed"], "--only: there is no speed; there are throughput, latency"),
        (["moe", "--experts", "cutlass"], "--experts: there is no cutlass; there are "),
        (["--options", "{"], "argument --options: not JSON"),
        (["--options", "[1]"], r"argument --options: expected a JSON object, got \[1\]"),
    ],
)
def test_what_does_not_exist(
    options: list[str], wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, *options)
    assert re.search(wrong, capsys.readouterr().err)


def test_options_of_the_engine_are_given_to_it_and_written(tmp_path: Path) -> None:
    asked = ["--models", "tiny", "--tiny", "--only", "latency", "--options", '{"max_num_batched_tokens": 48}']
    found = run(tmp_path, *asked)
    assert found["options of LLM"] == '{"max_num_batched_tokens": 48}'
    assert found["details"]["tiny: latency"]["outpace"]["max_num_batched_tokens"] == 48
