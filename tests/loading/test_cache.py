"""The cache folder: a folder appears whole or not at all, and once."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors import SafetensorError

from outpace.errors import ModelError, OutpaceError
from outpace.loading.cache import PROVENANCE, cache_dir, cached_models, install
from tests.patience import PATIENCE


def bare(folder: Path) -> None:
    (folder / "config.json").touch()
    (folder / "model.safetensors").write_bytes(b"12345678")


def fill(folder: Path) -> None:
    bare(folder)
    (folder / PROVENANCE).write_text(json.dumps({"dtype": "float16", "source": "a test"}))


@pytest.mark.parametrize(
    ("own", "shared", "expected"),
    [
        ("/a/b", "/c", "/a/b"),
        (None, "/c", "/c/outpace"),
        (None, None, "/home/somebody/.cache/outpace"),
        ("", "", "/home/somebody/.cache/outpace"),
        ("~/x", None, "/home/somebody/x"),
        (None, "relative", "/home/somebody/.cache/outpace"),  # as the XDG specification asks
    ],
)
def test_where_it_is(monkeypatch: pytest.MonkeyPatch, own: str | None, shared: str | None, expected: str) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    for name, value in (("OUTPACE_CACHE", own), ("XDG_CACHE_HOME", shared)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert cache_dir() == Path(expected)


def test_install_once(cache: Path) -> None:
    calls: list[Path] = []

    def make(folder: Path) -> None:
        calls.append(folder)
        fill(folder)

    first, second = install("m", make), install("m", make)
    assert first == second == cache / "models" / "m"
    assert len(calls) == 1
    assert not calls[0].exists()
    assert first.stat().st_mode & 0o777 == 0o755


def test_a_folder_under_way_is_not_a_model(cache: Path) -> None:
    def make(folder: Path) -> None:
        fill(folder)
        assert cached_models() == []
        assert not (cache / "models" / "m").exists()

    install("m", make)
    assert [model.name for model in cached_models()] == ["m"]


@pytest.mark.parametrize("error", [ModelError("half way"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing_and_can_be_tried_again(cache: Path, error: BaseException) -> None:
    def fail(folder: Path) -> None:
        fill(folder)
        raise error

    with pytest.raises(type(error)):
        install("m", fail)
    assert cached_models() == []
    assert [path for path in (cache / "models").iterdir() if path.is_dir()] == []
    assert install("m", fill).is_dir()


def test_leftovers_of_a_killed_process_are_removed(cache: Path) -> None:
    leftover = cache / "models" / ".m.partial-abc"
    other = cache / "models" / ".other.partial-abc"
    for folder in (leftover, other):
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"half")
    install("m", fill)
    assert not leftover.exists()
    assert other.exists()  # another model's, which may be under way


def test_threads_do_the_work_once(cache: Path) -> None:
    calls: list[Path] = []
    begun = threading.Barrier(4)

    def make(folder: Path) -> None:
        calls.append(folder)
        fill(folder)

    def ask(_: int) -> Path:
        begun.wait(timeout=PATIENCE)
        return install("m", make)

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(ask, range(4))) == {cache / "models" / "m"}
    assert len(calls) == 1


PROGRAM = """
import os, sys
from pathlib import Path
from outpace.loading.cache import install

def make(folder):
    with open(os.environ["CALLS"], "a") as file:
        file.write("x")
    (folder / "config.json").touch()
    (folder / "model.safetensors").write_bytes(b"12345678")
    if "die" in sys.argv:
        os._exit(9)

print(install("m", make))
"""


def run(calls: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CALLS": str(calls)}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=False)


@pytest.mark.slow
def test_processes_do_the_work_once_after_one_was_killed(cache: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    assert run(calls, "die").returncode == 9
    assert cached_models() == []
    with ThreadPoolExecutor(2) as pool:
        outputs = [done.stdout.strip() for done in pool.map(run, [calls, calls])]
    assert outputs == [str(cache / "models" / "m")] * 2
    assert calls.read_text() == "xx"  # the killed one, and one of the two
    assert [path.name for path in (cache / "models").iterdir() if path.is_dir()] == ["m"]


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(
        OutpaceError, match=r"^OUTPACE_CACHE: cannot write to .*; free some space there, or set OUTPACE_CACHE"
    ):
        install("m", fill)
    assert cached_models() == []


@pytest.mark.parametrize("name", ["", "models"])
def test_a_cache_that_is_a_file(cache: Path, name: str) -> None:
    file = cache / name if name else cache
    file.parent.mkdir(exist_ok=True)
    file.touch()
    for act in (cached_models, lambda: install("m", fill)):
        with pytest.raises(OutpaceError, match=f"^OUTPACE_CACHE: {file} is a file; set OUTPACE_CACHE to a folder$"):
            act()


def test_an_empty_folder_is_no_model_and_is_replaced(cache: Path) -> None:
    (cache / "models" / "m").mkdir(parents=True)
    assert cached_models() == []
    assert (install("m", fill) / "config.json").is_file()
    assert [model.name for model in cached_models()] == ["m"]


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "notes.txt"])
def test_a_half_made_folder_is_no_model_and_nothing_in_it_is_deleted(cache: Path, file: str) -> None:
    folder = cache / "models" / "m"
    folder.mkdir(parents=True)
    (folder / file).touch()
    assert cached_models() == []
    with pytest.raises(ModelError, match=f"^model: {folder} is not a complete model .*; delete it and try again$"):
        install("m", lambda folder: pytest.fail("it was made"))
    assert (folder / file).exists()


def test_a_link_to_a_model_is_one_and_a_broken_link_is_not(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    fill(tmp_path / "elsewhere")
    (cache / "models").mkdir(parents=True)
    (cache / "models" / "m").symlink_to(tmp_path / "elsewhere")
    (cache / "models" / "broken").symlink_to(tmp_path / "nowhere")
    assert install("m", fill) == cache / "models" / "m"
    assert [model.name for model in cached_models()] == ["m"]
    with pytest.raises(ModelError, match="delete it"):
        install("broken", fill)


@pytest.mark.parametrize("text", ["[1]", "null", "3", "{", "\xff", "[" * 100_000])
def test_a_provenance_that_says_nothing(cache: Path, text: str) -> None:
    (install("m", bare) / PROVENANCE).write_bytes(text.encode("latin-1"))
    (model,) = cached_models()
    assert (model.name, model.dtype, model.source) == ("m", "unknown", "unknown")


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        Exception("No space left on device (os error 28)"),  # tokenizers
    ],
    ids=lambda error: type(error).__name__,
)
def test_item_12_a_full_disk_is_told_in_one_line_whoever_writes(cache: Path, error: Exception) -> None:
    def make(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise error

    wanted = rf"OUTPACE_CACHE: cannot write to {cache / 'models'} \(No space left on device\); free some space"
    with pytest.raises(OutpaceError, match=wanted):
        install("m", make)
    assert [path.name for path in (cache / "models").iterdir()] == [".m.lock"]


def test_cached_models(cache: Path) -> None:
    assert cached_models() == []
    install("b", fill)
    install("a", bare)
    first, second = cached_models()
    assert (first.name, first.size, first.dtype, first.source) == ("a", 8, "unknown", "unknown")
    size = 8 + (cache / "models" / "b" / PROVENANCE).stat().st_size
    assert (second.name, second.size, second.dtype, second.source) == ("b", size, "float16", "a test")
