"""Rates are measured once for a device, a machine and a folder, and kept in a file that may be lost or spoilt."""

import json
from pathlib import Path

import pytest
import torch

from outpace.kernels import limits
from outpace.offload import probe as probing
from outpace.offload.numbers import Rates
from outpace.offload.probe import Probe, measure, probe

CPU = torch.device("cpu")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Path | None]:
    """The folders of measurements, which are not made."""
    calls: list[Path | None] = []

    def fake(device: torch.device, folder: Path | None) -> Probe:
        calls.append(folder)
        disk = None if folder is None else 5e9
        return Probe("cpu-x", "here", None if folder is None else str(folder), "today", 1e9, 2e9, 3e9, disk)

    monkeypatch.setattr(probing, "measure", fake)
    return calls


def test_it_is_measured_once(tmp_path: Path, measured: list[Path | None]) -> None:
    first = probe(CPU, None, tmp_path)
    assert probe(CPU, None, tmp_path) == first
    assert len(measured) == 1
    assert probe(CPU, None, tmp_path, again=True) == first
    assert len(measured) == 2


def test_each_folder_has_rates_of_its_own(tmp_path: Path, measured: list[Path | None]) -> None:
    assert probe(CPU, None, tmp_path).disk is None
    assert probe(CPU, tmp_path / "a", tmp_path).disk == 5e9
    probe(CPU, tmp_path / "b", tmp_path)
    assert probe(CPU, tmp_path / "a", tmp_path).folder == str(tmp_path / "a")
    assert measured == [None, tmp_path / "a", tmp_path / "b"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"device": "cpu"}', "null"])
def test_a_spoilt_file_is_measured_anew(content: str, tmp_path: Path, measured: list[Path | None]) -> None:
    good = probe(CPU, None, tmp_path)
    (file,) = (tmp_path / "rates").iterdir()
    file.write_text(content)
    assert probe(CPU, None, tmp_path) == good
    assert json.loads(file.read_text())["bandwidth"] == 1e9


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf"), "fast", None])
def test_rates_that_cannot_be_are_measured_anew(rate: object, tmp_path: Path, measured: list[Path | None]) -> None:
    probe(CPU, None, tmp_path)
    (file,) = (tmp_path / "rates").iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), "link": rate}))
    probe(CPU, None, tmp_path)
    assert len(measured) == 2


def test_a_cache_that_cannot_be_written_is_a_warning(
    tmp_path: Path, measured: list[Path | None], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert probe(CPU, None, tmp_path / "file").flops == 2e9
    assert "rates: they cannot be stored" in caplog.text


def test_a_cpu_has_no_link(tmp_path: Path, measured: list[Path | None]) -> None:
    assert probe(CPU, tmp_path, tmp_path).rates == Rates(1e9, 2e9, None, 5e9)
    gpu = Probe("h200", "here", None, "today", 1e9, 2e9, 3e9, None)
    assert gpu.rates == Rates(1e9, 2e9, 3e9, None)


def test_this_machine_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CPU_BYTES", 1 << 22)
    monkeypatch.setattr(limits, "CPU_MATRIX", 64)
    found = measure(CPU, tmp_path, disk_bytes=1 << 23)
    assert found.device.startswith("cpu-")
    assert min(found.bandwidth, found.flops, found.link, found.disk or 0) > 1e5
    assert found.folder == str(tmp_path)
    assert list(tmp_path.iterdir()) == [], "what was written to measure with is gone"
