"""Files of torch.save and GGUF files through `open_weights`; nothing in a pickle ever runs."""

import argparse
import json
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from outpace.errors import ModelError
from outpace.loading.open import open_weights
from tests.loading.checkpoints import FAMILIES, Harm, check_equal, read, refused, state
from tests.loading.tiny import tiny_model, write_gguf

SMALL = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.tensor(7)}


def write_index(folder: Path, *parts: dict[str, Any]) -> Path:
    """pytorch_model-0.bin and so on, with an index."""
    for number, part in enumerate(parts):
        torch.save(part, folder / f"pytorch_model-{number}.bin")
    places = {name: f"pytorch_model-{number}.bin" for number, part in enumerate(parts) for name in part}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_bin_folders_and_files(family: str, tmp_path: Path) -> None:
    tensors = state(family)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    check_equal(open_weights(tmp_path), tensors)
    check_equal(open_weights(tmp_path / "pytorch_model.bin"), tensors)
    (tmp_path / "pytorch_model.bin").unlink()
    names = sorted(tensors)
    write_index(tmp_path, {name: tensors[name] for name in names[:3]}, {name: tensors[name] for name in names[3:]})
    check_equal(open_weights(tmp_path), tensors)


@pytest.mark.parametrize("key", ["module", "model", "state_dict"])
def test_a_state_dict_inside_of_more(key: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({key: SMALL, "epoch": 3, "optimizer": {"lr": 0.1}}, path)
    check_equal(open_weights(path), SMALL)


def test_files_of_many_kinds(tmp_path: Path) -> None:
    layer = nn.Linear(3, 2)
    torch.save(layer.state_dict(), tmp_path / "ordered.pth")
    check_equal(open_weights(tmp_path / "ordered.pth"), layer.state_dict())
    torch.save({"weight": layer.weight, "t": layer.weight.t(), "te._extra_state": None}, tmp_path / "strided.pt")
    check_equal(open_weights(tmp_path / "strided.pt"), {"weight": layer.weight.data, "t": layer.weight.data.t()})
    torch.save(SMALL, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    check_equal(open_weights(tmp_path / "old.pt"), SMALL)
    torch.save({"model": {"language_model": {"encoder": {"layers.0.weight": SMALL["a"]}}}}, tmp_path / "nested.pt")
    check_equal(open_weights(tmp_path / "nested.pt"), {"language_model.encoder.layers.0.weight": SMALL["a"]})


def compress(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)


def bomb(depth: int = 60) -> dict[str, Any]:
    """2^60 names in a pickle of a few hundred bytes."""
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {"a": found, "b": found}
    return found


def wide_bomb(width: int = 800) -> dict[str, Any]:
    inner = {str(number): torch.ones(()) for number in range(width)}
    return {str(number): inner for number in range(width)}


NO_CHECKPOINTS: dict[str, tuple[Any, str]] = {
    "a tensor": (torch.ones(2), "holds a Tensor, not tensors by name"),
    "a list": ([torch.ones(2)], "holds a list, not tensors by name"),
    "both keys": ({"model": SMALL, "module": SMALL}, "has both 'module' and 'model'"),
    "a number": ({"a": torch.ones(2), "epoch": 3}, "'epoch' is a int, not a tensor"),
    "a name twice": ({"a": {"b": torch.ones(2)}, "a.b": torch.ones(2)}, "two tensors that are both called 'a.b'"),
    "a sparse tensor": ({"a": torch.eye(3).to_sparse()}, "'a' is sparse, quantized or without values"),
    "a meta tensor": ({"a": torch.ones(3, device="meta")}, "'a' is sparse, quantized or without values"),
    "more than its data": ({"a": torch.ones(1).expand(2**40)}, "but has too little data"),
    "a bomb": (bomb(), "nested too deeply or has too many names"),
    "a wide bomb": (wide_bomb(), "nested too deeply or has too many names"),
    "one rank of two": ({"module": SMALL, "mp_world_size": 2}, "is the file of one rank of 2; name the folder"),
    "a class": ({"model": SMALL, "args": argparse.Namespace(a=1)}, "holds argparse.Namespace, which is not a tensor"),
    "a module": (nn.Linear(2, 2), "never runs. Convert it to safetensors if you trust it"),
}


@pytest.mark.parametrize("case", NO_CHECKPOINTS)
def test_what_is_no_checkpoint(case: str, tmp_path: Path) -> None:
    saved, expected = NO_CHECKPOINTS[case]
    torch.save(saved, tmp_path / "x.pt")
    assert expected in refused(tmp_path / "x.pt")


def test_a_class_that_the_user_allows(tmp_path: Path) -> None:
    torch.save({"model": SMALL, "args": argparse.Namespace(a=1)}, tmp_path / "x.pt")
    assert "torch.serialization.add_safe_globals([argparse.Namespace])" in refused(tmp_path / "x.pt")
    with torch.serialization.safe_globals([argparse.Namespace]):
        check_equal(open_weights(tmp_path / "x.pt"), SMALL)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing": (lambda path: path.write_bytes(b""), "is damaged or incomplete (it is empty)"),
    "half": (cut, "is damaged or incomplete (it ends early)"),
    "a web page": (
        lambda path: path.write_text("<!DOCTYPE html>"),
        "is damaged or incomplete (it is not a file of torch",
    ),
    "a pointer": (
        lambda path: path.write_text("version https://git-lfs.github.com/spec/v1"),
        "is a Git LFS pointer in place of the weights; run `git lfs pull`",
    ),
    "a plain pickle": (
        lambda path: path.write_bytes(pickle.dumps(Harm(path.with_name("harm")), 4)),
        "holds posix.mkdir, which is not a tensor, and files are read with weights_only=True: code in them never runs",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_what_is_wrong_with_a_file_is_said_without_the_advice_to_run_it(case: str, tmp_path: Path) -> None:
    change, expected = DAMAGED[case]
    torch.save(SMALL, path := tmp_path / "x.bin")
    change(path)
    found = refused(path)
    assert expected in found
    assert "Re-running" not in found
    assert list(tmp_path.iterdir()) == [path]


def test_compressed_archives_are_refused(tmp_path: Path) -> None:
    torch.save(SMALL, tmp_path / "x.pt")
    compress(tmp_path / "x.pt")
    assert "parts of it are compressed" in refused(tmp_path / "x.pt")


@pytest.mark.parametrize("zipped", [True, False])
def test_damaged_files(zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(SMALL, path, _use_new_zipfile_serialization=zipped)
    whole = path.read_bytes()
    rng = random.Random(0)
    for _ in range(150):
        damaged = bytearray(whole[: rng.choice([len(whole), rng.randrange(len(whole))])])
        for _ in range(rng.randint(0, 3) if len(damaged) == len(whole) else 0):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            found = open_weights(path).sources
        except ModelError as error:
            assert str(path) in str(error)  # noqa: PT017
        else:
            for source in found.values():
                assert read(source).shape == source.shape


Save = Callable[[Path, dict[str, Any]], Any]


def deepspeed(folder: Path, saved: dict[str, Any]) -> Path:
    (folder / "global_step5").mkdir()
    (folder / "latest").write_text("global_step5")
    torch.save({"module": saved}, folder / "global_step5" / "mp_rank_00_model_states.pt")
    return folder


def megatron(folder: Path, saved: dict[str, Any]) -> Path:
    (folder / "iter_0000005" / "mp_rank_00").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("5")
    torch.save({"model": {"language_model": saved}}, folder / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt")
    return folder


def descriptor(folder: Path, saved: dict[str, Any], kind: str, key: str | None) -> dict[str, Any]:
    torch.save(saved if key is None else {key: saved}, folder / "x.pt")
    return {"type": kind, "checkpoints": ["x.pt"], "version": 1.0, "base_dir": str(folder)}


def written(folder: Path, saved: dict[str, Any], name: str, **options: Any) -> Path:
    torch.save(saved, folder / name, **options)
    return folder


KINDS: dict[str, Save] = {
    "a bin folder": lambda folder, saved: written(folder, saved, "pytorch_model.bin"),
    "an index of bins": lambda folder, saved: write_index(folder, SMALL, saved),
    "a .bin file": lambda folder, saved: written(folder, saved, "x.bin") / "x.bin",
    "a .pt file": lambda folder, saved: written(folder, saved, "x.pt") / "x.pt",
    "an old .pt file": lambda folder, saved: (
        written(folder, saved, "x.pt", _use_new_zipfile_serialization=False) / "x.pt"
    ),
    "a DeepSpeed folder": deepspeed,
    "a Megatron folder": megatron,
    "a descriptor": lambda folder, saved: descriptor(folder, saved, "ds_model", None),
    "a Megatron descriptor": lambda folder, saved: descriptor(folder, saved, "Megatron", "model"),
    "a tp descriptor": lambda folder, saved: descriptor(folder, saved, "bloom", None) | {"parallelization": "tp"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_code_in_a_pickle_never_runs(kind: str, tmp_path: Path) -> None:
    harm = tmp_path / "harm"
    (folder := tmp_path / "folder").mkdir()
    source = KINDS[kind](folder, {"x": torch.ones(2), "y": Harm(harm)})
    assert "holds posix.mkdir, which is not a tensor" in refused(source)
    assert not harm.exists()
    shutil.rmtree(folder)
    folder.mkdir()
    found = open_weights(KINDS[kind](folder, {"x": torch.ones(2)})).sources  # so that the file was really read above
    assert any(name.endswith("x") for name in found)


def test_a_gguf_file(tmp_path: Path) -> None:
    model = tiny_model("llama")
    path = write_gguf(tmp_path / "x.gguf", model)
    check_equal(open_weights(path), dict(model.state_dict()))
    assert f"name the file itself: {path}" in refused(tmp_path)


def test_a_gguf_file_with_values_that_are_not_finite(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_parameter("model.norm.weight").fill_(float("nan"))
    source = open_weights(write_gguf(tmp_path / "x.gguf", model)).sources["model.norm.weight"]
    with pytest.raises(ModelError, match="not finite"):
        read(source)
