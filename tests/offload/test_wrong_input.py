"""Budgets, folders and dictionaries that cannot be meant, loads that are interrupted, and folders that are shared."""

import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outpace import LLM, ConfigError, init_inference
from outpace.config import InferenceConfig, LLMConfig
from outpace.errors import OffloadError
from outpace.offload.store_write import UnitWriter
from tests.offload.placed import LAYERS, deep, offload_at
from tests.offload.streamed import answers, llm_of, streaming_of

BUDGETS = ("device_memory", "host_memory", "kv", "host_pages", "expert_cache", "kv_files")


@pytest.mark.parametrize("field", BUDGETS)
def test_budgets(field: str) -> None:
    def read(value: object) -> Any:
        more: dict[str, dict[str, Any]] = {"kv_files": {"kv": 1, "nvme": "."}, "expert_cache": {"device_memory": 1}}
        return getattr(LLMConfig.of(offload={**more.get(field, {}), field: value}, device="cpu").offload, field)

    for given, wanted in (
        ("20 GB", 20e9),
        ("20gb", 20e9),
        ("1e3", 1000),
        ("50%", 0.5),
        (0, 0),
        ("1.5GiB", 1.5 * 2**30),
    ):
        assert read(given) == wanted
    for wrong in (
        -1,
        -0.5,
        float("nan"),
        float("inf"),
        True,
        False,
        1.5,
        "150%",
        "1e3GB",
        "",
        "GB",
        "-5GB",
        "nan",
        [1],
    ):
        with pytest.raises(ConfigError, match=rf"^offload\.{field}: "):
            read(wrong)


@pytest.mark.parametrize(
    ("offload", "says"),
    [
        ({"cpu_offload_gb": -1}, r"offload\.cpu_offload_gb: "),
        ({"cpu_offload_gb": True}, r"offload\.cpu_offload_gb: "),
        ({"slots": 0, "auto": True}, r"offload\.slots: "),
        ({"slots": 3}, r"offload\.slots .* concern layers that are streamed"),
        ({"nvme": ""}, r"offload\.nvme: the path is empty"),
        ({"nvme": 3}, r"offload\.nvme: expected a path"),
        ({"nvm": "/x"}, r"offload: unknown name 'nvm'"),
        ("host", r"offload: "),
    ],
)
def test_other_fields(offload: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LLMConfig.of(offload=offload, device="cpu")


EXAMPLE = {
    "stage": 3,
    "stage3_prefetch_bucket_size": 2 * 8192 * 8192,
    "stage3_param_persistence_threshold": 8192,
    "stage3_max_live_parameters": 1e9,
    "offload_param": {"device": "cpu", "pin_memory": "auto"},
}
"""As the examples of ZeRO-Inference have it."""


@pytest.mark.parametrize("config", [LLMConfig, InferenceConfig])
def test_dictionaries_of_deepspeed(config: Any) -> None:
    found = config.of(zero=EXAMPLE, device="cpu").zero
    assert (found.prefetch_bucket_size, found.max_live_parameters) == (2 * 8192 * 8192, 10**9)
    assert found.offload_param.pin_memory
    for wrong, says in (
        ({"zero": {**EXAMPLE, "overlap_comm": True}}, r"zero: overlap_comm: it concerns training"),
        (
            {"zero": {**EXAMPLE, "offload_optimizer": {"device": "cpu"}}},
            r"zero: offload_optimizer: it concerns training",
        ),
        ({"zero": {**EXAMPLE, "stage3_bucket": 1}}, "zero: unknown name 'stage3_bucket'"),
        ({"zero": {**EXAMPLE, "stage": 2}}, r"zero\.stage: 1 and 2"),
        ({"zero_optimization": EXAMPLE}, r"zero_optimization: DeepSpeed's name .* give its dictionary as zero"),
    ):
        with pytest.raises(ConfigError, match=says):
            config.of(wrong, device="cpu")


def test_budgets_that_are_too_small_or_larger_than_any_machine(tmp_path: Path) -> None:
    model = deep("llama")
    with llm_of(model, offload={"device_memory": 10**30, "nvme": str(tmp_path)}) as llm:
        assert llm.engine.streaming is None
    for offload, says in (
        ({"device_memory": 0}, r"offload\.device_memory: 0 bytes are left .* give .* more"),
        ({"kv": 10**30}, r"offload\.kv: .* are missing"),
        ({"kv": 1}, r"offload\.kv: less than one page"),
    ):
        with pytest.raises(ConfigError, match=says):
            LLM(deep("llama"), device="cpu", offload=offload)


def away(model: Any, folder: Path) -> dict[str, Any]:
    return {"offload": offload_at("disk", model, folder)}


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, file = deep("llama"), tmp_path / "file"
    file.touch()
    wrong = (
        (file, "is not a folder; name a folder"),
        (file / "in it", r"cannot be used \(Not a directory\); make the folder first"),
        (tmp_path / "absent", r"cannot be used \(No such file or directory\); make the folder first"),
        (tmp_path / "not" / "mounted", r"cannot be used \(No such .*make the folder first"),
        (tmp_path / ("a" * 300), r"cannot be used \(File name too long\); make the folder first"),
    )
    budgets = away(model, tmp_path)["offload"]
    for path, says in wrong:
        with pytest.raises(ConfigError, match=rf"^offload\.nvme: {re.escape(str(path))} {says}$"):
            llm_of(model, offload=budgets | {"nvme": str(path)})
        param = {"device": "nvme", "nvme_path": str(path), "max_in_cpu": 0}
        zero = {"stage": 3, "offload_param": param, "max_live_parameters": 0}
        with pytest.raises(ConfigError, match=rf"^zero\.offload_param\.nvme_path: {re.escape(str(path))} {says}$"):
            llm_of(model, zero=zero)
    assert list(tmp_path.iterdir()) == [file]
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        with pytest.raises(ConfigError, match=r"offload\.nvme: .* is not writable; name another folder"):
            llm_of(model, **away(model, tmp_path))
    wanted = None
    for name in ("Ordner für Gewichte 重み 🙂", "with\nnewline", "a" * 200):
        with llm_of(model, **away(model, tmp_path / name)) as llm:
            assert streaming_of(llm).placement.tiers == ("disk",) * LAYERS
            found = answers(llm)
        assert wanted in (None, found)
        wanted = found


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a tmpfs")
def test_a_folder_in_memory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = deep("llama"), Path(f"/dev/shm/outpace-test-{os.getpid()}")
    try:
        with llm_of(model) as resident, llm_of(model, **away(model, folder)) as llm:
            assert answers(llm) == answers(resident)
    finally:
        folder.rmdir()  # nothing is in it


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
@pytest.mark.parametrize("live", [True, False])
def test_f10_a_load_that_ends_half_way_leaves_nothing(
    live: bool, error: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder, files, put = deep("llama"), tmp_path / "model", tmp_path / "files", UnitWriter.put
    model.save_pretrained(folder)
    threads = threading.active_count()
    calls = []

    def interrupted(self: UnitWriter, *args: Any) -> None:
        calls.append(args)
        if len(calls) == 4:
            if isinstance(error, OSError):
                with monkeypatch.context() as patch:
                    patch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(error))
                    return put(self, *args)
            raise error
        return put(self, *args)

    monkeypatch.setattr(UnitWriter, "put", interrupted)
    with pytest.raises(
        (KeyboardInterrupt, OffloadError), match=None if error is KeyboardInterrupt else "cannot be writ"
    ):
        llm_of(model if live else str(folder), **away(model, files))
    assert len(calls) == 4
    assert not any(files.iterdir())
    assert threading.active_count() == threads
    assert not [name for name in Path("/proc/self/fd").iterdir() if _target(name).startswith(str(files))]
    with llm_of(str(folder), **away(model, files)) as llm, llm_of(model) as resident:
        assert answers(llm) == answers(resident)


def _target(number: Path) -> str:
    try:
        return str(number.readlink())
    except OSError:
        return ""


def test_a_model_that_changes_between_two_starts_has_another_file(tmp_path: Path) -> None:
    folder, files = tmp_path / "model", tmp_path / "files"
    for seed in (0, 1):
        model = deep("llama", weights_seed=seed)
        model.save_pretrained(folder)
        with llm_of(str(folder), **away(model, files)) as llm, llm_of(model) as resident:
            assert answers(llm) == answers(resident)
    assert len(list(files.iterdir())) == 2


def test_f14_two_llms_of_one_process_on_one_folder(tmp_path: Path) -> None:
    folder, files = tmp_path / "model", tmp_path / "files"
    model, other = deep("llama"), deep("gpt2")
    model.save_pretrained(folder)
    with llm_of(model) as resident, llm_of(other) as another:
        wanted, others = answers(resident), answers(another)
    with ThreadPoolExecutor(3) as pool:
        made = [pool.submit(llm_of, str(folder), **away(model, files)) for _ in range(2)]
        made.append(pool.submit(llm_of, other, **away(other, files)))
        llms = [each.result() for each in made]
        assert list(pool.map(answers, llms)) == [wanted, wanted, others]
    llms[0].shutdown()
    assert answers(llms[1]) == wanted
    for llm in llms[1:]:
        llm.shutdown()
    assert len(list(files.iterdir())) == 1


def test_f10_what_goes_wrong_after_layers_are_put_away_lets_them_go(tmp_path: Path) -> None:
    model, folder, files = deep("llama"), tmp_path / "model", tmp_path / "files"
    model.save_pretrained(folder)
    threads = threading.active_count()
    with pytest.raises(ConfigError, match="less than one page"):
        LLM(str(folder), device="cpu", offload={**away(model, files)["offload"], "kv": 1})
    assert threading.active_count() == threads
    engine = init_inference(deep("llama"), device="cpu", **away(model, files))
    engine.destroy()
    engine.destroy()
    assert threading.active_count() == threads
