"""Quantized folders appear whole or not at all; what a killed run finished is used, if it is still right."""

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outpace.errors import InputError, ModelError, OutpaceError
from outpace.loading import write_quantized
from outpace.loading.quantize import quantize_model
from outpace.loading.quantize_options import Asked
from outpace.loading.safetensors_file import SafetensorsWriter
from outpace.loading.write_quantized import RECORD
from tests.loading.skeletons import empty_llama
from tests.loading.tiny import tiny_model
from tests.loading.unpack import stored

ASKED = Asked("int4", group_size=32, asymmetric=True)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of about 16 kB: the model has several."""
    monkeypatch.setattr(write_quantized, "FILE_BYTES", 16_000)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def stop_at(monkeypatch: pytest.MonkeyPatch, count: int, stop: Callable[[], object]) -> None:
    """Let something happen instead of a later write."""
    write, calls = SafetensorsWriter.write, iter(range(10_000))

    def stopped(self: SafetensorsWriter, name: str, tensor: torch.Tensor, skip: int = 0) -> int:
        if next(calls) == count:
            stop()
        return write(self, name, tensor, skip)

    monkeypatch.setattr(SafetensorsWriter, "write", stopped)


def fail(error: BaseException) -> Callable[[], object]:
    def raises() -> None:
        raise error

    return raises


def interrupted(model: Path, out: Path, error: BaseException | None = None, count: int = 30) -> Path:
    """Run until a write fails; the folder that is left."""
    error = error or KeyboardInterrupt()
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, count, fail(error))
        with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else OutpaceError):
            quantize_model(model, out, ASKED)
    assert not out.exists()
    (left,) = out.parent.glob(f".{out.name}.partial-*")
    return left


def same_files(first: Path, second: Path) -> None:
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def leftovers(folder: Path) -> list[Path]:
    return list(folder.glob(".*partial*"))


def test_a_run_that_was_interrupted_is_gone_on_with(model: Path, tmp_path: Path) -> None:
    whole = quantize_model(model, tmp_path / "whole", ASKED)
    assert len(whole.files) > 3
    left = interrupted(model, tmp_path / "out")
    finished = {path.name: path.stat().st_ino for path in left.glob("*.safetensors")}
    seen: list[tuple[int, int]] = []
    again = quantize_model(model, tmp_path / "out", ASKED, progress=lambda done, total: seen.append((done, total)))
    assert 0 < len(again.taken_up) < len(again.files)
    assert all((tmp_path / "out" / name).stat().st_ino == finished[name] for name in again.taken_up)
    assert again.errors == whole.errors
    assert seen[0][0] > 0
    assert seen[-1][0] == seen[-1][1]
    same_files(tmp_path / "whole", tmp_path / "out")
    assert leftovers(tmp_path) == []


def test_a_process_that_was_killed(model: Path, tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from outpace.loading import write_quantized
from outpace.loading.quantize import quantize_model
from outpace.loading.quantize_options import Asked
write_quantized.FILE_BYTES = 16_000
quantize_model(
    sys.argv[1], Path(sys.argv[2]), Asked("int4", group_size=32, asymmetric=True),
    progress=lambda done, total: os._exit(9) if done > total / 2 else None,
)
"""
    ended = subprocess.run([sys.executable, "-c", code, str(model), str(tmp_path / "out")], check=False)
    assert ended.returncode == 9
    assert len(leftovers(tmp_path)) == 1
    quantize_model(model, tmp_path / "whole", ASKED)
    assert quantize_model(model, tmp_path / "out", ASKED).taken_up
    same_files(tmp_path / "whole", tmp_path / "out")
    assert leftovers(tmp_path) == []


def test_a_finished_file_that_changed_is_written_again(model: Path, tmp_path: Path) -> None:
    quantize_model(model, tmp_path / "whole", ASKED)
    left = interrupted(model, tmp_path / "out")
    first, second = sorted(left.glob("*.safetensors"))[:2]
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    first.write_bytes(content)
    os.utime(first, ns=(0, 0))
    again = quantize_model(model, tmp_path / "out", ASKED)
    assert first.name not in again.taken_up
    assert second.name in again.taken_up
    same_files(tmp_path / "whole", tmp_path / "out")


def cut_record(left: Path, model: Path) -> None:
    (left / RECORD).write_text((left / RECORD).read_text()[:-9])


def change_source(left: Path, model: Path) -> None:
    os.utime(model / "model.safetensors", ns=(1, 1))


@pytest.mark.parametrize("change", [cut_record, change_source])
def test_what_cannot_be_used_is_removed(change: Callable[[Path, Path], None], model: Path, tmp_path: Path) -> None:
    change(interrupted(model, tmp_path / "out"), model)
    assert quantize_model(model, tmp_path / "out", ASKED).taken_up == ()
    assert leftovers(tmp_path) == []


def test_other_options_begin_anew(model: Path, tmp_path: Path) -> None:
    interrupted(model, tmp_path / "out")
    assert quantize_model(model, tmp_path / "out", Asked("int4", group_size=16, asymmetric=True)).taken_up == ()
    assert leftovers(tmp_path) == []


def test_a_full_disk(model: Path, tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    interrupted(model, tmp_path / "out", full)  # finished files stay
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 0, fail(full))
        with pytest.raises(OutpaceError, match=r"out: cannot write .*other .No space left on device.; check the disk"):
            quantize_model(model, tmp_path / "other", ASKED)
    assert not list(tmp_path.glob(".other*")), "nothing was finished"
    assert quantize_model(model, tmp_path / "out", ASKED).taken_up


def test_a_source_that_changes_leaves_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_at(monkeypatch, 30, lambda: os.utime(model / "model.safetensors", ns=(1, 1)))
    with pytest.raises(ModelError, match=r"model\.safetensors changed while it was read"):
        quantize_model(model, tmp_path / "out", ASKED)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_existing_folders(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize_model(model, out, ASKED)
    with pytest.raises(InputError, match="holds quantized weights already; give --force to replace them"):
        quantize_model(model, out, Asked("int8"))
    quantize_model(model, out, Asked("int8"), force=True)
    assert not any("zero_point" in name for name in stored(out))
    with pytest.raises(InputError, match=r"holds the model itself|holds no quantized weights"):
        quantize_model(model, model, ASKED, force=True)
    with pytest.raises(InputError, match="there is no folder"):
        quantize_model(model, tmp_path / "no/out", ASKED)


WATCH = """
import re, sys
from pathlib import Path
from outpace.loading.quantize import quantize_model
from outpace.loading.quantize_options import Asked

def anonymous(what):
    return int(re.search(what + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

tiny, large, out = map(Path, sys.argv[1:])
asked = Asked("int4", asymmetric=True)
quantize_model(tiny, out / "tiny", asked)  # everything is imported
before = anonymous("RssAnon")
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
quantize_model(large, out / "large", asked)
print(anonymous("VmHWM") - anonymous("RssFile") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_model_is_never_in_memory(tmp_path: Path) -> None:
    empty_llama(tmp_path / "tiny", 64, 1, 64)
    weights = empty_llama(tmp_path / "large", 2048, 4, 16384)
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", WATCH, *(str(tmp_path / name) for name in ("tiny", "large", "out"))]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    peak = int(re.findall(r"\d+", found.stdout)[-1])
    assert weights > 600 << 20
    assert peak < 320 << 20
