"""Shards are written whole or not at all, a block at a time, and hold what the splits say, bit by bit."""

import fcntl
import json
import os
import re
import shutil
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from outpace.errors import InputError, ModelError, NotSupported, OutpaceError
from outpace.loading import write_shards as shard
from outpace.loading.read_source import read
from outpace.loading.safetensors_file import SafetensorsWriter, sources_of
from outpace.loading.safetensors_header import read_header
from outpace.loading.weights import Piece, Source
from outpace.loading.write_shards import write_shards
from outpace.parallel.spans import Split

TENSORS: Mapping[str, Tensor] = {
    "rows": torch.arange(60, dtype=torch.float32).view(10, 6),
    "columns": torch.arange(48, dtype=torch.bfloat16).view(4, 12),
    "stack": torch.arange(96, dtype=torch.float16).view(2, 6, 8),
    "bias": torch.arange(10, dtype=torch.float32),
    "whole": torch.randn(3, 5),
    "scalar": torch.tensor(2.5),
    "count": torch.tensor([3, 4], dtype=torch.int64),
    "flags": torch.tensor([True, False, True]),
    "none": torch.empty(0, 4),
}
SPLITS: Mapping[str, Split | None] = {
    "rows": Split(0, (((0, 2), (5, 7)), ((2, 5), (7, 10)))),
    "columns": Split(1, (((0, 3), (6, 9)), ((3, 6), (9, 12)))),
    "stack": Split(1, (((0, 3),), ((3, 6),))),
    "bias": Split(0, (((0, 6),), ((4, 10),))),  # a key head that both ranks hold
    **dict.fromkeys(("whole", "scalar", "count", "flags", "none")),
}

ONE: Mapping[str, Tensor] = {"whole": torch.zeros(1)}


def made(tensors: Mapping[str, Tensor]) -> dict[str, Source]:
    """Sources that are made when they are wanted."""

    def source(value: Tensor) -> Source:
        return Source(tuple(value.shape), value.dtype, (Piece(value.clone, tuple(value.shape), value.dtype),))

    return {name: source(value) for name, value in tensors.items()}


def stored(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Source]:
    """Sources in a file."""
    save_file(dict(tensors), path)
    return sources_of(path, read_header(path))


def parts_of(folder: Path) -> list[dict[str, Tensor]]:
    """What each file holds, read with the safetensors library: whole tensors first, then each rank."""
    names = json.loads((folder / "ds_inference_config.json").read_text())["checkpoints"]
    found = []
    for name in (*names["non_tp"], *names["tp"]):
        with safe_open(folder / name, "pt") as file:
            found.append({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
    return found


def expected(tensors: Mapping[str, Tensor], name: str, rank: int) -> Tensor:
    split = SPLITS[name]
    assert split is not None
    return torch.cat([tensors[name].narrow(split.dim, a, b - a) for a, b in split.spans[rank]], split.dim)


@pytest.fixture(params=["made", "stored", "stored, in blocks of a few rows"])
def sources(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Source]:
    if "blocks" in request.param:
        monkeypatch.setattr(shard, "BLOCK_BYTES", 64)
    return made(TENSORS) if request.param == "made" else stored(TENSORS, tmp_path / "model.safetensors")


def test_each_file_holds_its_part(sources: dict[str, Source], tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    written = write_shards(
        sources, SPLITS, tmp_path / "out", ranks=2, progress=lambda done, total: seen.append((done, total))
    )
    whole, *ranks = parts_of(tmp_path / "out")
    assert whole.keys() == {name for name, split in SPLITS.items() if split is None}
    for name, tensor in whole.items():
        assert tensor.dtype == TENSORS[name].dtype
        assert torch.equal(tensor, TENSORS[name])
    for rank, held in enumerate(ranks):
        assert held.keys() == {name for name, split in SPLITS.items() if split is not None}
        for name, tensor in held.items():
            assert torch.equal(tensor, expected(TENSORS, name, rank))
    assert seen[-1][0] == seen[-1][1] == sum(value.nbytes for held in (whole, *ranks) for value in held.values())
    assert written.files == {path.name: path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")}


def test_what_the_folder_says_of_itself(tmp_path: Path) -> None:
    write_shards(made(TENSORS), SPLITS, tmp_path / "out", ranks=2)
    descriptor = json.loads((tmp_path / "out" / "ds_inference_config.json").read_text())
    save_id = descriptor.pop("save_id")
    assert re.fullmatch("[0-9a-f]{32}", save_id)
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata()["save_id"] == save_id
    assert descriptor == {
        "type": "ds_model",
        "base_dir": "",
        "checkpoints": {"non_tp": ["non_tp.safetensors"], "tp": ["tp_00.safetensors", "tp_01.safetensors"]},
        "version": 1.0,
        "parallelization": "tp",
        "tp_size": 2,
        "dtype": "float32",
    }
    with safe_open(tmp_path / "out" / "tp_01.safetensors", "pt") as file:
        regions = json.loads(file.metadata()["regions"])
    assert regions["rows"] == {"shape": [10, 6], "dim": 0, "ranges": [[2, 5], [7, 10]]}
    assert regions.keys() == {name for name, split in SPLITS.items() if split is not None}


def test_dtypes_are_converted_on_the_way(sources: dict[str, Source], tmp_path: Path) -> None:
    write_shards(sources, SPLITS, tmp_path / "out", ranks=2, dtype=torch.bfloat16, keep={"whole", "bias"})
    whole, first, _ = parts_of(tmp_path / "out")
    found = {name: tensor.dtype for name, tensor in (whole | first).items()}
    kept = {"whole": torch.float32, "bias": torch.float32, "count": torch.int64, "flags": torch.bool}
    assert found == {name: kept.get(name, torch.bfloat16) for name in TENSORS}
    assert torch.equal(first["rows"], expected(TENSORS, "rows", 0).bfloat16())


def test_one_tensor_at_a_time_is_held(tmp_path: Path) -> None:
    """A tensor that is made is let go before the next one is made."""
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def make() -> Tensor:
        nonlocal most
        tensor = torch.ones(8, 8)
        alive.append(weakref.ref(tensor))
        most = max(most, sum(ref() is not None for ref in alive))
        return tensor

    wanted = {f"t{n}": Source((8, 8), torch.float32, (Piece(make, (8, 8), torch.float32),)) for n in range(5)}
    write_shards(wanted, dict.fromkeys(wanted, Split(0, (((0, 4),), ((4, 8),)))), tmp_path / "out", ranks=2)
    assert len(alive) == 5
    assert most == 1


def test_a_large_tensor_of_a_file_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "BLOCK_BYTES", 1024)
    largest = 0

    def spy(source: Source) -> Tensor:
        nonlocal largest
        tensor = read(source)
        largest = max(largest, tensor.nbytes)
        return tensor

    monkeypatch.setattr(shard, "read", spy)
    tensors = {"big": torch.randn(512, 32)}
    split = {"big": Split(1, (((0, 10),), ((10, 32),)))}
    write_shards(stored(tensors, tmp_path / "model.safetensors"), split, tmp_path / "out", ranks=2, dtype=torch.float64)
    assert largest == 1024
    _, first, second = parts_of(tmp_path / "out")
    assert torch.equal(torch.cat([first["big"], second["big"]], 1), tensors["big"].double())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
@pytest.mark.parametrize("when", ["weights", "other files"])
@pytest.mark.parametrize("old", [False, True])
def test_an_error_leaves_nothing(error: type[BaseException], when: str, old: bool, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if old:
        write_shards(made(TENSORS), SPLITS, out, ranks=2)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def fail(*args: Any) -> Any:
        raise error("no")

    wanted = made(TENSORS)
    if when == "weights":
        wanted["whole"] = Source((3, 5), torch.float32, (Piece(fail, (3, 5), torch.float32),))
    with pytest.raises(OutpaceError if error is OSError else error, match="no"):
        write_shards(
            wanted, SPLITS, out, ranks=2, force=old, beside=fail if when == "other files" else lambda folder: None
        )
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if old else [])


def test_shards_are_replaced_when_asked(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_shards(made(TENSORS), SPLITS, out, ranks=2)
    (out / "old").touch()
    (tmp_path / "link").symlink_to(out)
    write_shards(made({"whole": torch.zeros(1)}), SPLITS, tmp_path / "link", ranks=1, force=True)
    assert sorted(path.name for path in out.iterdir()) == [
        "ds_inference_config.json", "non_tp.safetensors", "tp_00.safetensors",
    ]  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "out"]


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write_shards(made(TENSORS), SPLITS, tmp_path / "out", ranks=2)
    assert (tmp_path / "out" / "tp_01.safetensors").is_file()
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755


def _a_file(out: Path) -> None:
    out.write_text("mine")


def _a_folder(out: Path) -> None:
    out.mkdir()
    (out / "mine").touch()


def _shards(out: Path) -> None:
    write_shards(made(TENSORS), SPLITS, out, ranks=2)


REFUSED: Mapping[str, tuple[Any, str, bool, str]] = {
    "no parent": (lambda out: None, "no/out", True, "there is no folder .*/no; make it first"),
    "a file": (_a_file, "out", True, "out is a file; give the name of a folder"),
    "somebody's folder": (_a_folder, "out", True, "is not empty and holds no shards .*, so it is never"),
    "shards, not forced": (_shards, "out", False, "holds shards already; give --force"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_in_the_way_is_never_lost(case: str, tmp_path: Path) -> None:
    prepare, name, force, words = REFUSED[case]
    prepare(tmp_path / name)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=words):
        write_shards(made(TENSORS), SPLITS, tmp_path / name, ranks=2, force=force)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("force", [False, True])
def test_what_appears_while_shards_are_written_is_never_lost(force: bool, tmp_path: Path) -> None:
    """Neither somebody's folder, nor without force the shards of another process."""
    for number, (appears, words) in enumerate(
        ((_a_file, "is a file"), (_a_folder, "holds no shards"), (_shards, "holds shards already; give --force"))
    ):
        out = tmp_path / str(number)
        if appears is _shards and force:
            continue
        with pytest.raises(InputError, match=words):
            write_shards(made(ONE), SPLITS, out, ranks=1, force=force, beside=lambda _, a=appears, o=out: a(o))  # type: ignore[misc]
        assert (out.is_file() and out.read_text() == "mine") or (out / "mine").exists() or len(parts_of(out)) == 3
        assert not list(tmp_path.glob(".*"))


def test_old_shards_are_kept_when_somebody_takes_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _shards(tmp_path / "out")
    rename = Path.rename

    def taken(path: Path, target: Path) -> Path:
        moved = rename(path, target)
        if target.name.endswith("-old") and not (tmp_path / "out").exists():
            _a_folder(tmp_path / "out")
        return moved

    monkeypatch.setattr(Path, "rename", taken)
    with pytest.raises(InputError, match="holds no shards"):
        write_shards(made(ONE), SPLITS, tmp_path / "out", ranks=1, force=True)
    assert (tmp_path / "out" / "mine").exists()
    (kept,) = tmp_path.glob("out.partial-*-old")
    assert len(parts_of(kept)) == 3
    assert not list(tmp_path.glob(".*"))


def test_the_old_shards_stay_when_the_new_ones_cannot_take_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _shards(tmp_path / "out")
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if target.name == "out" and not path.name.endswith("-old"):
            raise OSError(39, "Directory not empty")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(InputError, match="was changed while shards for it were written"):
        write_shards(made(ONE), SPLITS, tmp_path / "out", ranks=1, force=True)
    assert len(parts_of(tmp_path / "out")) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    for name in ("dead", "alive"):
        (tmp_path / f".out.partial-{name}").mkdir()
        (tmp_path / f".out.partial-{name}" / "tp_00.safetensors").touch()
    alive = os.open(tmp_path / ".out.partial-alive", os.O_RDONLY)
    fcntl.flock(alive, fcntl.LOCK_EX)
    _shards(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.partial-alive", "out"]
    os.close(alive)
    shutil.move(tmp_path / "out", tmp_path / ".out.partial-killed-old")  # killed while it replaced shards
    with pytest.raises(RuntimeError):
        write_shards(made(ONE), SPLITS, tmp_path / "out", ranks=1, force=True, beside=_fail)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert len(parts_of(tmp_path / "out")) == 3


def _fail(folder: Path) -> None:
    raise RuntimeError("no")


def test_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    """A second process that writes to the same place while the first one does; only the first to finish succeeds."""
    with pytest.raises(InputError, match="holds shards already"):
        write_shards(made(ONE), SPLITS, tmp_path / "out", ranks=1, beside=lambda folder: _shards(folder.parent / "out"))
    assert len(parts_of(tmp_path / "out")) == 3


def _remove(path: Path) -> None:
    path.unlink()


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


@pytest.mark.parametrize(
    ("change", "words"), [(_remove, "was removed while it was read"), (_append, "changed while it was read")]
)
def test_a_source_that_changes_is_named(change: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    sources = stored(TENSORS, path)
    for beside in (True, False):
        with pytest.raises(ModelError, match=f"model: {path} {words}"):
            write_shards(
                sources, SPLITS, tmp_path / "out", ranks=2,
                beside=lambda folder: change(path) if beside else None,  # noqa: B023
                progress=lambda done, total: None if beside else change(path),  # noqa: B023
            )  # fmt: skip
        save_file(dict(TENSORS), path)
        assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_file_beside_the_weights_that_disappears_is_named(tmp_path: Path) -> None:
    def beside(folder: Path) -> None:
        shutil.copyfile(tmp_path / "config.json", folder / "config.json")

    with pytest.raises(ModelError, match=r"model: .*/config\.json was removed while it was read"):
        write_shards(made(TENSORS), SPLITS, tmp_path / "out", ranks=2, beside=beside)


def test_a_full_disk_is_seen_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(OutpaceError, match=r"out: 6\d\d bytes will be written, and .* has room for 100 bytes"):
        write_shards(made(TENSORS), SPLITS, tmp_path / "out", ranks=2)
    assert list(tmp_path.iterdir()) == []


def test_a_dtype_that_safetensors_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match="x is complex128, which such a file cannot store"):
        SafetensorsWriter(tmp_path / "x", {"x": (torch.complex128, (1,))}, {})
    assert list(tmp_path.iterdir()) == []


def test_tensors_of_a_file_are_aligned(tmp_path: Path) -> None:
    tensors = {"odd": (torch.uint8, (3,)), "half": (torch.bfloat16, (5,)), "double": (torch.float64, (2,))}
    with SafetensorsWriter(tmp_path / "x", tensors, {}) as writer:
        writer.write("double", torch.ones(2, dtype=torch.float64))
    for name, source in sources_of(tmp_path / "x", read_header(tmp_path / "x")).items():
        assert source.pieces[0].place.offset % tensors[name][0].itemsize == 0  # type: ignore[union-attr]
