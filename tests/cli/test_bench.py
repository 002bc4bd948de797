"""`outpace bench`: the tables, the files it writes, and what it refuses before it starts."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import Main
from tests.cli.command import run as outpace
from tests.models import tiny

SHORT = ("--device", "cpu", "--input-len", "6", "--output-len", "3", "--max-num-seqs", "4")
VLLM = (
    *("elapsed_time", "num_requests", "total_num_tokens", "requests_per_second", "tokens_per_second"),
    *("duration", "completed", "total_input_tokens", "total_output_tokens", "request_throughput"),
    *("output_throughput", "total_token_throughput"),
    *(f"{kind}_{what}_ms" for kind in ("mean", "median", "std", "p99") for what in ("ttft", "tpot", "itl")),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama without a tokenizer."""
    path: Path = tmp_path_factory.mktemp("models") / "tiny"
    tiny("llama", max_position_embeddings=512).save_pretrained(path)
    return path


def bench(*args: str | Path) -> str:
    """What a command prints, once it has ended well."""
    result = outpace("bench", *args)
    assert result.exit_code == 0, (result.output, result.exception)
    return str(result.stdout)


def read(file: Path) -> Any:
    return json.loads(file.read_text())


def test_throughput(folder: Path, tmp_path: Path) -> None:
    files = ("--output-json", tmp_path / "a.json", "--plot", tmp_path / "a.png", "--profile", tmp_path / "b.json")
    out = bench("throughput", folder, *SHORT, "--num-prompts", "5", *files)
    assert "tiny in float32 on cpu-" in out
    assert re.search(r"requests +│ +5 │", out)
    assert re.search(r"output tokens +│ +15 │", out)
    assert re.search(r"limit, output tokens/s +│ +[\d,]+ │", out)
    assert re.search(r"start-up, s: load [\d.]+, inject [\d.]+", out)
    assert re.search(r"a decode step of 4 requests: [\d,]+ us, host [\d,]+ us", out)
    found = read(tmp_path / "a.json")
    assert found.keys() == {*VLLM, "outpace"}
    assert (found["total_input_tokens"], found["total_output_tokens"], found["completed"]) == (30, 15, 5)
    ours = found["outpace"]
    assert 0 < ours["ratio"] < 1
    assert ours["options"]["max_num_seqs"] == 4
    assert ours["options"]["seed"] == 1234
    assert {"outpace", "torch", "transformers"} == ours["versions"].keys()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert len(read(tmp_path / "b.json")["longest"]) == 10


def test_a_sweep(folder: Path, tmp_path: Path) -> None:
    files = ("--output-json", tmp_path / "a.json", "--plot", tmp_path / "a.svg")
    out = bench("throughput", folder, *SHORT, "--concurrency", "1,2", *files)
    rows = re.findall(r"^│ (\d+) +│ +[\d.,]+ │", out, re.MULTILINE)
    assert rows == ["1", "2"]
    assert [point["num_requests"] for point in read(tmp_path / "a.json")["points"]] == [4, 8]
    drawn = (tmp_path / "a.svg").read_text()
    assert all(words in drawn for words in ("output tokens/s", "limit of a decode step", "median time between tokens"))


def test_splitfuse(folder: Path, tmp_path: Path) -> None:
    sizes = ("--decoders", "2", "--decoder-prompt", "2", "--long-prompt", "20", "--num-long", "2")
    files = ("--output-json", tmp_path / "a.json", "--plot", tmp_path / "a.svg")
    budget = ("--max-num-batched-tokens", "16")
    out = bench("throughput", folder, "--device", "cpu", "--splitfuse", *sizes, *budget, *files)
    assert re.search(r"│ SplitFuse │ whole prompts │".replace("│", "[│┃]"), out)
    assert re.search(r"most of one prompt beside decodes +│ +4 │ +32 │", out)
    found = read(tmp_path / "a.json")
    assert found["whole prompts"]["max_num_batched_tokens"] == 32
    drawn = (tmp_path / "a.svg").read_text()
    assert all(words in drawn for words in ("SplitFuse: P50", "whole prompts: P50", "share of tokens"))


def test_latency(folder: Path, tmp_path: Path) -> None:
    lengths = ("--input-len", "6", "--output-len", "24", "--iters", "1", "--batch-size", "2")
    out = bench("latency", folder, "--device", "cpu", *lengths, "--output-json", tmp_path / "a.json")
    assert "2 x 6 prompt and 24 new tokens" in out
    assert re.search(r"decode, tokens/s of a request +│ +[\d.,]+ │ +[\d.,]+ │ +0\.\d+ │", out)
    found = read(tmp_path / "a.json")
    assert {"avg_latency", "latencies", "percentiles"} <= found.keys()
    assert found["outpace"]["max_num_seqs"] == 2


def test_random_weights_for_a_config(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    out = bench("throughput", tmp_path, "--random", "--dtype", "bf16", *SHORT, "--num-prompts", "2")
    assert "in bfloat16 on cpu-" in out


def test_a_dataset_is_tokenized(chain_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "work.jsonl").write_text('{"prompt": "hello", "output_len": 2}\n{"prompt": "you", "output_len": 4}\n')
    options = ("--device", "cpu", "--dataset", tmp_path / "work.jsonl", "--num-prompts", "2", "--prefix-caching")
    out = bench("throughput", chain_folder, *options)
    assert re.search(r"prompt tokens +│ +8 │", out)
    assert re.search(r"output tokens +│ +6 │", out)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--concurrency", "1,x"), "concurrency: expected numbers like 1,4,16, got '1,x'"),
        (("--concurrency", "0"), "concurrency: expected numbers like 1,4,16, got '0'"),
        (("--input-len", "5"), "input-len: fixed lengths need both input-len and output-len"),
        (("--workload", "sharegpt", "--dataset", "x"), "workload: sharegpt draws its own lengths"),
        (("--splitfuse", "--concurrency", "1"), "concurrency: not with --splitfuse"),
        (("--splitfuse", "--max-num-batched-tokens", "9"), "max-num-batched-tokens: must be more than the 32 decoders"),
        (("--output-json", "no/such/a.json"), "no/such/a.json: there is no folder no/such; make it first"),
        (("--plot", "a.doc"), "plot: a.doc must end in one of .png"),
        (("--dtype", "fp7"), "dtype: "),
        (("--random",), "model: random weights need one of llama-3.1-8b"),
    ],
)
def test_what_is_wrong_is_said_before_the_model_is_looked_for(
    options: tuple[str, ...], said: str, run_main: Main
) -> None:
    code, out, err = run_main("bench", "throughput", "/no/such/model", "--device", "cpu", *options)
    assert (code, out) == (1 if said.startswith("model") else 2, "")
    assert [line for line in err.splitlines() if line.startswith(f"error: {said}")], err


def test_random_needs_a_name(run_main: Main) -> None:
    code, _, err = run_main("bench", "latency", "--random", "--device", "cpu")
    assert code == 2
    assert "error: random: name a shape (llama-3.1-8b, llama-3.1-70b, llama-3.1-405b, " in err


def test_requests_that_the_model_cannot_hold(folder: Path, run_main: Main) -> None:
    code, _, err = run_main("bench", "throughput", folder, "--device", "cpu")
    assert code == 2
    assert "error: max-model-len: the longest request has " in err


def test_the_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from outpace.cli.app import app\n"
        "shown = CliRunner().invoke(app, ['bench', 'throughput', '--help'])\n"
        "sys.exit(shown.exit_code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
