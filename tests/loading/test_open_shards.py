"""Files of ranks that say which part of each tensor they hold, through `open_weights` and `open_checkpoint`."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from outpace.errors import ModelError
from outpace.loading.checkpoint import open_checkpoint, weight_files
from outpace.loading.open import open_weights
from tests.loading.checkpoints import FAMILIES, check_equal, refused, state

Ranges = list[tuple[int, int]]
Split = dict[str, tuple[int, list[Ranges]]]
"""By name: the dimension, and the ranges of each rank."""


def save_shards(folder: Path, whole: Mapping[str, Tensor], split: Split, degree: int, files: int = 1) -> Path:
    """What `outpace shard` writes: non-tp.safetensors, tp_RR_MM.safetensors and the descriptor."""
    folder.mkdir(exist_ok=True)
    save_file({name: value for name, value in whole.items() if name not in split}, folder / "non-tp.safetensors")
    for rank in range(degree):
        for number in range(files):
            names = sorted(split)[number::files]
            held = {name: (split[name][0], split[name][1][rank]) for name in names}
            save_shard(folder / f"tp_{rank:02d}_{number:02d}.safetensors", whole, held)
    listed = [f"tp_{rank:02d}_{number:02d}.safetensors" for number in range(files) for rank in range(degree)]
    fields: dict[str, Any] = {
        "type": "ds_model",
        "base_dir": "",
        "checkpoints": {"non_tp": ["non-tp.safetensors"], "tp": listed},
    }
    fields |= {"version": 1.0, "parallelization": "tp", "tp_size": degree, "dtype": "float32"}
    (folder / "ds_inference_config.json").write_text(json.dumps(fields))
    return folder


def save_shard(path: Path, whole: Mapping[str, Tensor], held: Mapping[str, tuple[int, Ranges]]) -> None:
    tensors: dict[str, Tensor] = {}
    regions: dict[str, Any] = {}
    for name, (dim, ranges) in held.items():
        value = whole[name]
        tensors[name] = torch.cat([value.narrow(dim, start, stop - start) for start, stop in ranges], dim)
        regions[name] = {"shape": list(value.shape), "dim": dim, "ranges": ranges}
    save_file(tensors, path, metadata={"format": "pt", "regions": json.dumps(regions)})


def even(whole: Mapping[str, Tensor], degree: int) -> Split:
    """Every matrix in equal parts of one dimension or the other."""
    split: Split = {}
    for number, (name, value) in enumerate(whole.items()):
        dim = number % 2
        if value.dim() == 2 and value.shape[dim] % degree == 0:
            each = value.shape[dim] // degree
            split[name] = (dim, [[(rank * each, (rank + 1) * each)] for rank in range(degree)])
    return split


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_shards_of_every_family(family: str, degree: int, tmp_path: Path) -> None:
    whole = state(family)
    folder = save_shards(tmp_path / "shards", whole, even(whole, degree), degree, files=3)
    check_equal(open_weights(folder, training_mp_size=degree), whole)
    check_equal(open_weights(folder / "ds_inference_config.json"), whole)


def test_ranges_that_several_ranks_hold_and_fused_ones(tmp_path: Path) -> None:
    whole = {"kv": torch.randn(4, 8), "fused": torch.randn(3, 12), "odd": torch.randn(5, 2), "norm": torch.randn(8)}
    split: Split = {
        "kv": (0, [[(0, 2)], [(0, 2)], [(2, 4)], [(2, 4)]]),  # two heads of keys for four ranks
        "fused": (1, [[(rank, rank + 1), (4 + rank, 5 + rank), (8 + rank, 9 + rank)] for rank in range(4)]),
        "odd": (0, [[(0, 2)], [(2, 3)], [(3, 4)], [(4, 5)]]),
    }
    folder = save_shards(tmp_path / "shards", whole, split, 4)
    check_equal(open_weights(folder), whole)
    assert len(open_weights(folder).sources["kv"].pieces) == 2


WHOLE = {"a": torch.arange(24.0).reshape(6, 4), "b": torch.randn(3)}
HALVES: Split = {"a": (0, [[(0, 3)], [(3, 6)]])}
Held = Mapping[str, tuple[int, Ranges]]


def second(held: Held, whole: Mapping[str, Tensor] = WHOLE) -> Callable[[Path], Any]:
    """Write another file of rank 1."""
    return lambda folder: save_shard(folder / "tp_01_00.safetensors", whole, held)


def with_regions(text: str) -> Callable[[Path], Any]:
    tensors = {"a": torch.randn(3, 4)}
    return lambda folder: save_file(tensors, folder / "tp_01_00.safetensors", metadata={"regions": text})


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a file that is missing": (
        lambda folder: (folder / "tp_01_00.safetensors").unlink(),
        "tp_01_00.safetensors does not exist",
    ),
    "a part that is missing": (second({"a": (0, [(4, 6)])}), "'a': no rank holds index 3 of dimension 0"),
    "the end is missing": (second({"a": (0, [(3, 5)])}), "'a': no rank holds index 5 of dimension 0"),
    "a tensor that is missing": (second({}), "'a': no rank holds index 3 of dimension 0"),
    "another dimension": (second({"a": (1, [(0, 4)])}), "'a': its parts do not fit together"),
    "another shape": (second({"a": (0, [(3, 6)])}, {"a": torch.ones(7, 4)}), "'a': its parts do not fit together"),
    "another dtype": (second({"a": (0, [(3, 6)])}, {"a": WHOLE["a"].half()}), "'a': its parts do not fit together"),
    "also in non-tp": (second({"b": (0, [(0, 3)]), "a": (0, [(3, 6)])}), "'b' is both in non_tp and in tp"),
    "other bytes": (
        with_regions('{"a": {"shape": [6, 4], "dim": 0, "ranges": [[3, 5]]}}'),
        "'a': its parts do not fit together",
    ),
    "a name that is not there": (with_regions('{"b": {"shape": [1], "dim": 0, "ranges": []}}'), "which it lacks"),
    "no regions": (with_regions("{}"), "'a': rank 1 has it, unlike rank 0"),
}
TEXTS = ("", "[]", "{", '{"a": 1}', '{"a": {}}', '{"a": {"shape": 3, "dim": 0, "ranges": []}}', "[" * 50_000)
PARTS = (
    {"shape": [6, 4], "dim": 2, "ranges": []},
    {"shape": [6, 4], "dim": -1, "ranges": []},
    {"shape": [6, 4], "dim": 0, "ranges": [[0]]},
    {"shape": [6, 4], "dim": 0, "ranges": [[3, 2]]},
    {"shape": [6, 4], "dim": 0, "ranges": [[3, 7]]},
    {"shape": [6, True], "dim": 0, "ranges": [[3, 6]]},
    {"shape": [6.0, 4], "dim": 0, "ranges": [[3, 6]]},
    {"shape": [6, 4], "dim": 0, "ranges": [[3, 6]], "more": 1},
)


@pytest.mark.parametrize("case", DAMAGES)
def test_shards_that_do_not_fit_together(case: str, tmp_path: Path) -> None:
    folder = save_shards(tmp_path / "shards", WHOLE, HALVES, 2)
    damage, expected = DAMAGES[case]
    damage(folder)
    assert expected in refused(folder)


@pytest.mark.parametrize("text", [*TEXTS, *(json.dumps({"a": part}) for part in PARTS)])
def test_metadata_that_are_damaged(text: str, tmp_path: Path) -> None:
    folder = save_shards(tmp_path / "shards", WHOLE, HALVES, 2)
    with_regions(text)(folder)
    assert "tp_01_00.safetensors: regions in its metadata are damaged" in refused(folder)


def test_one_shard_alone(tmp_path: Path) -> None:
    folder = save_shards(tmp_path / "shards", WHOLE, HALVES, 2)
    assert "holds the part of one rank; name the folder" in refused(folder / "tp_00_00.safetensors")


def test_a_folder_of_shards_is_a_checkpoint(tmp_path: Path) -> None:
    folder = save_shards(tmp_path / "shards", WHOLE, HALVES, 2)
    (folder / "config.json").write_text("{}")
    open_checkpoint(folder)
    assert [path.stem for path in weight_files(folder)] == ["non-tp", "tp_00_00", "tp_01_00"]
    (folder / "tp_01_00.safetensors").unlink()
    with pytest.raises(ModelError, match=r"tp_01_00.safetensors does not exist"):
        open_checkpoint(folder)
