"""`outpace plan` and `outpace probe`: what they say, what they write, and how they fail."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from outpace.bench.shapes import SHAPES, config_of
from outpace.cli.app import app
from outpace.cli.flags import llm_flags
from outpace.errors import ConfigError, InputError, ModelError
from outpace.loading.numbers import numbers_of
from outpace.loading.skeleton import skeleton
from outpace.offload import probe as probing
from outpace.offload.cards import CARDS, card_with
from outpace.offload.probe import Probe
from tests.models import tiny

H200 = ("--gpu", "h200", "--ram", "64GB", "--requests", "8")
SMALL = (*H200, "--gpu-memory", "1.2GB")


def run(*args: str | Path, wide: int = 200) -> Result:
    return CliRunner(env={"COLUMNS": str(wide), "TERM": "dumb"}).invoke(app, [str(arg) for arg in args])


def data(*args: str | Path) -> Any:
    result = run("plan", *args, "--json")
    assert result.exit_code == 0, result.output or result.exception
    return json.loads(result.stdout)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, and nothing is measured."""
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))

    def fake(device: torch.device, folder: Path | None) -> Probe:
        disk = None if folder is None else 3e9
        return Probe("cpu-x", "here", None if folder is None else str(folder), "today", 2e10, 1e11, 1e10, disk)

    monkeypatch.setattr(probing, "measure", fake)
    return tmp_path / "cache"


def test_a_table_for_people() -> None:
    result = run("plan", "llama-3.2-1b", *SMALL, "--gpu-memory", "2GB")
    assert result.exit_code == 0, result.output or result.exception
    title, room, rates, *_ = result.stdout.splitlines()
    assert title == "llama-3.2-1b on h200: 8 requests of 512 + 32 tokens"
    assert room.split() == ["room:", "device", "2.00", "GB,", "host", "64.00", "GB"]
    assert "TFLOP/s, link 55.04 GB/s (typical of a h200)" in rates
    assert re.search(r"bf16 +\d+/\d+ .* link", result.stdout)
    assert "fastest:\n  outpace serve llama-3.2-1b --dtype bf16 --quantization" in result.stdout
    assert "fastest with weights as they are:\n  outpace serve llama-3.2-1b --dtype bf16 --offload" in result.stdout


def test_it_fits_in_80_columns() -> None:
    result = run("plan", "llama-3.1-70b", *H200, "--gpu-memory", "40GB", "--nvme", "/no", "--requests", "96", wide=80)
    assert result.exit_code == 0, result.output or result.exception
    table = result.stdout[: result.stdout.index("Twice")]
    assert max(map(len, table.splitlines())) <= 80
    assert "…" not in table


def test_plans_for_programs() -> None:
    found = data("llama-3.2-1b", *SMALL, "--gpu-memory", "2GB")
    assert found["work"] == {"prompt": 512, "new": 32, "requests": 8}
    assert found["machine"]["budgets"] == {"device": 2_000_000_000, "host": 64_000_000_000, "disk": None}
    assert {plan["precision"] for plan in found["plans"]} == {"bf16", "int8", "int4", "fp8"}
    for plan in found["plans"]:
        assert len(plan["tiers"]) == 16
        assert plan["bytes"]["device"] <= 2_000_000_000
        assert 0 < plan["tokens_per_second"] <= plan["limit_tokens_per_second"]
    best = max(found["plans"], key=lambda plan: plan["tokens_per_second"])
    assert f"--max-num-seqs {best['batch']} " in found["fastest"]
    assert len(data("llama-3.2-1b", *SMALL, "--gpu-memory", "2GB", "--all")["plans"]) > len(found["plans"])


def test_the_commands_have_flags_that_exist(tmp_path: Path) -> None:
    found = data("llama-3.1-70b", *H200, "--gpu-memory", "30GB", "--ram", "20GB", "--nvme", tmp_path / "none")
    known = {f"--{name.replace('_', '-')}" for flag in llm_flags() for name in flag.names}
    for line in (found["fastest"], found["fastest_with_weights_as_they_are"]):
        words = shlex.split(line)
        assert words[:3] == ["outpace", "serve", "llama-3.1-70b"]
        assert {word for word in words if word.startswith("--")} <= known
    assert f"--offload-nvme {tmp_path / 'none'}" in found["fastest_with_weights_as_they_are"]
    assert "--offload-device-memory 30GB --offload-host-memory 20GB" in found["fastest_with_weights_as_they_are"]


def test_a_config_is_enough(tmp_path: Path) -> None:
    tiny("llama").config.save_pretrained(tmp_path)
    by_folder, by_file = (data(path, *SMALL) for path in (tmp_path, tmp_path / "config.json"))
    assert by_folder["plans"] == by_file["plans"]


def test_some_layers_and_some_precisions() -> None:
    found = data("llama-3.1-70b", *H200, "--layers", "40", "--precision", "bf16", "--precision", "int4")
    assert {len(plan["tiers"]) for plan in found["plans"]} == {40}
    assert {plan["precision"] for plan in found["plans"]} == {"bf16", "int4"}


def test_rates_can_be_given() -> None:
    slow, fast = (
        data("llama-3.1-70b", *H200, "--gpu-memory", "30GB", "--ram", "150GB", "--precision", "bf16", *more)
        for more in (("--link-gbs", "10"), ("--link-gbs", "20", "--device-gbs", "9000", "--tflops", "2000"))
    )
    assert fast["machine"]["rates"] == {"bandwidth": 9e12, "flops": 2e15, "link": 2e10, "disk": None}
    assert fast["plans"][0]["tokens_per_second"] > 1.8 * slow["plans"][0]["tokens_per_second"]
    assert slow["plans"][0]["binds"] == "link"
    assert next(iter(slow["relief"])) in ("link", "device memory")


@pytest.mark.usefixtures("cache")
def test_without_a_gpu_a_size_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = data("llama-3.2-1b", "--gpu-memory", "24GB", "--ram", "8GB")
    assert found["machine"]["name"] == "4090"
    assert card_with(24e9) == "4090"
    assert card_with(1e15) == list(CARDS)[-1]


def test_fp8_is_planned_where_it_is_fast() -> None:
    names = {plan["precision"] for plan in data("llama-3.2-1b", "--gpu", "a100", "--ram", "8GB")["plans"]}
    assert names == {"bf16", "int8", "int4"}


def test_a_cpu_reads_from_disk(cache: Path, tmp_path: Path) -> None:
    given = ("--gpu", "cpu", "--ram", "1.8GB", "--nvme", tmp_path, "--requests", "1", "--precision", "bf16")
    found = data("llama-3.2-1b", *given)
    assert found["machine"]["rates"] == {"bandwidth": 2e10, "flops": 1e11, "link": None, "disk": 3e9}
    assert found["machine"]["budgets"]["host"] == 0
    bf16 = found["plans"][0]
    assert set(bf16["tiers"]) == {"device", "disk"}
    assert "--offload-host-memory 0 " in found["fastest"], "it is the same memory"
    bf16 = max(found["plans"], key=lambda plan: plan["tokens_per_second"])
    weights = sum(bf16["bytes"][part] for part in ("rest", "layers", "ring"))
    assert f"--offload-device-memory {weights // 10**7 / 100:g}GB" in found["fastest"]
    assert len(list((cache / "rates").iterdir())) == 1, "rates are kept"


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run("plan", "llama-3.1-70b", *H200, "--gpu-memory", "30GB", "--plot", tmp_path / "plan.png")
    assert result.exit_code == 0, result.output or result.exception
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("args", "kind", "message"),
    [
        (("llama-3.1-70b", "--gpu", "h900"), ConfigError, r"^gpu: 'h900' is not one of t4, "),
        (("llama-3.1-70b", *H200, "--gpu-memory", "much"), ConfigError, r"^gpu-memory: 'much' is not a size"),
        (("llama-3.1-70b", *H200, "--link-gbs", "0"), ConfigError, r"^link-gbs: .* above 0"),
        (("llama-3.1-70b", *H200, "--prompt", "0"), ConfigError, r"^prompt: .* at least 1"),
        (("llama-3.1-70b", *H200, "--layers", "81"), ConfigError, r"^layers: llama-3.1-70b has 80, got 81"),
        (("llama-3.1-70b", *H200, "--precision", "int3"), ConfigError, r"^precision: .*bf16, int8, int4, fp8"),
        (("llama-3.1-70b", *H200, "--dtype", "int3"), ConfigError, r"^dtype: "),
        (("no-such-model", *H200), ModelError, r"^model: .*llama-3.1-70b"),
        (H200, InputError, r"^model: name a config.json"),
        (("llama-3.1-70b", "-m", "llama-3.1-8b"), InputError, r"^model: given twice"),
        (("llama-3.1-70b", "--gpu", "cpu", "--gpu-memory", "3GB"), ConfigError, r"^gpu: a CPU has neither"),
        (("llama-3.1-70b", "--gpu", "cpu", "--nvme", "/not/here"), ConfigError, r"^nvme: /not/here is not a folder"),
        (
            ("llama-3.1-70b", *H200, "--gpu-memory", "4GB"),
            ConfigError,
            r"^offload\.device_memory: .* give .* more, .*everything except layers takes",
        ),
        (
            ("llama-3.1-70b", *H200, "--gpu-memory", "8GB", "--ram", "4GB", "--precision", "int4"),
            ConfigError,
            r"^offload: .* are missing; raise offload\.host_memory",
        ),
    ],
)
@pytest.mark.usefixtures("cache")
def test_what_cannot_be_is_refused(args: tuple[str, ...], kind: type[Exception], message: str) -> None:
    result = run("plan", *args)
    assert isinstance(result.exception, kind), result.output
    assert re.search(message, str(result.exception)), result.exception


# numbers


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-30b-a3b", "deepseek-v2-lite"])
def test_sizes_are_those_of_the_model(name: str) -> None:
    model = skeleton(config_of(name), torch.bfloat16)
    numbers = numbers_of(model, torch.bfloat16)
    weights = sum(weight.numel() for weight in model.parameters())
    assert len(numbers.layers) == SHAPES[name]["num_hidden_layers"]
    assert sum(numbers.sizes("bf16")) + numbers.rest["bf16"] == pytest.approx(2 * weights, rel=1e-3)
    assert sum(numbers.sizes("int8")) == pytest.approx(sum(numbers.sizes("bf16")) / 2, rel=0.02)
    assert sum(numbers.sizes("int4")) == pytest.approx(sum(numbers.sizes("bf16")) / 4, rel=0.05)


def test_experts_and_windows_are_seen() -> None:
    numbers = numbers_of(skeleton(config_of("gpt-oss-20b"), torch.bfloat16), torch.bfloat16)
    first, second = numbers.layers[:2]
    assert (first.window, second.window) == (128, 0)
    assert first.experts is not None
    assert (first.experts.total, first.experts.per_token) == (32, 4)
    assert first.flops < 2 * first.weights["bf16"] // 2 // 4


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "bloom", "mixtral"])
def test_layers_are_found(family: str) -> None:
    model = tiny(family)
    numbers = numbers_of(model, torch.float32)
    assert len(numbers.layers) == model.config.num_hidden_layers
    assert min(layer.kv_bytes for layer in numbers.layers) > 0
    assert numbers.head_flops > 0


# probe


def test_rates_for_people(cache: Path, tmp_path: Path) -> None:
    result = run("probe", "--device", "cpu", "--nvme", tmp_path)
    assert result.exit_code == 0, result.output or result.exception
    assert "cpu-x, measured today" in result.stdout
    for text in ("20.00 GB/s", "products in fp32", "0.1 TFLOP/s", "10.00 GB/s", "3.00 GB/s", "free: disk"):
        assert text in result.stdout


@pytest.mark.usefixtures("cache")
def test_rates_for_programs() -> None:
    found = json.loads(run("probe", "--device", "cpu", "--json").stdout)
    assert (found["bandwidth"], found["disk"]) == (2e10, None)
    assert found["free"].keys() == {"device", "host", "disk"}


def test_a_disk_needs_a_folder() -> None:
    assert "nvme: /not/here is not a folder" in str(run("probe", "--nvme", "/not/here").exception)
