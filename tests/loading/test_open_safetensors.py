"""Safetensors through `open_weights`: files and folders read back, and whatever is wrong with them is a ModelError."""

import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from outpace.errors import ModelError
from outpace.loading.open import open_weights
from outpace.loading.weights import Extent
from tests.loading.checkpoints import FAMILIES, check_equal, read, refused, same_bits, state
from tests.models import tiny

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.ones(4, dtype=torch.bfloat16),
    "c": torch.tensor(7),
    "d": torch.empty(0, 2, dtype=torch.uint8),
    "e": torch.tensor([True, False, True]),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_as_transformers_writes_it(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="10KB")
    names = open_weights(tmp_path / "one").sources.keys()
    with safe_open(tmp_path / "one" / "model.safetensors", framework="pt") as file:
        expected = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert names == expected.keys()
    check_equal(open_weights(tmp_path / "one"), expected)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    check_equal(open_weights(tmp_path / "many"), expected)
    check_equal(open_weights(str(tmp_path / "many" / "model.safetensors.index.json")), expected)


def test_one_file_and_a_folder_with_one_file_of_any_name(tmp_path: Path) -> None:
    save_file(state("llama"), tmp_path / "weights.safetensors")
    check_equal(open_weights(tmp_path / "weights.safetensors"), state("llama"))
    check_equal(open_weights(tmp_path), state("llama"))
    save_file(TENSORS, tmp_path / "other.safetensors")
    assert "2 .safetensors files (other.safetensors, weights.safetensors" in refused(tmp_path)


def test_every_dtype_and_shape(tmp_path: Path) -> None:
    floats = torch.arange(-4.0, 4.0).reshape(2, 4)
    kinds = (torch.float64, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int16, torch.int8, torch.int32)
    tensors = TENSORS | {str(kind): floats.to(kind) for kind in kinds}
    save_file(tensors, tmp_path / "x.safetensors")
    found = open_weights(tmp_path).sources
    for name, tensor in tensors.items():
        assert same_bits(read(found[name]), tensor)
        assert isinstance(found[name].pieces[0].place, Extent)


def make_index(folder: Path, **places: str) -> None:
    """Two files, a.safetensors with a and b, c.safetensors with c, d and e; and an index."""
    save_file({name: TENSORS[name] for name in "ab"}, folder / "a.safetensors")
    save_file({name: TENSORS[name] for name in "cde"}, folder / "c.safetensors")
    right = {name: f"{'a' if name in 'ab' else 'c'}.safetensors" for name in TENSORS}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": right | places}))


def test_an_index_says_which_files_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_index(tmp_path)
    check_equal(open_weights(tmp_path), TENSORS)
    make_index(tmp_path, a="c.safetensors", unused="c.safetensors")  # an index that was not kept up
    check_equal(open_weights(tmp_path), TENSORS)
    assert "the index lists and no file has: unused (1)" in caplog.text
    make_index(tmp_path, f="f.safetensors")
    assert "f.safetensors is missing, though the index lists it" in refused(tmp_path)


def test_a_tensor_in_two_files_is_where_the_index_says(tmp_path: Path) -> None:
    make_index(tmp_path)
    save_file({**TENSORS, "a": torch.zeros_like(TENSORS["a"])}, tmp_path / "c.safetensors")
    check_equal(open_weights(tmp_path), TENSORS)
    make_index(tmp_path, a="c.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    save_file(TENSORS, tmp_path / "c.safetensors")
    listed = json.loads(index.read_text())["weight_map"]
    del listed["a"]
    index.write_text(json.dumps({"weight_map": listed}))
    assert "'a' is in two files" in refused(tmp_path)


@pytest.mark.parametrize("place", ["../x.safetensors", "/x.safetensors", "y/../../x.safetensors", "", "x\0y"])
def test_an_index_names_files_of_its_folder_alone(place: str, tmp_path: Path) -> None:
    make_index(tmp_path, a=place)
    assert f"lies outside {tmp_path}" in refused(tmp_path)


INDEXES = {
    "not JSON": "{",
    "a list": "[]",
    "no map": "{}",
    "an empty map": '{"weight_map": {}}',
    "numbers": '{"weight_map": {"a": 1}}',
    "a name twice": '{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}',
    "too deep": '{"weight_map": ' + "[" * 100_000,
    "not UTF-8": '{"weight_map": {"\udcff": "a.safetensors"}}',
}


@pytest.mark.parametrize("case", INDEXES)
def test_what_is_no_index(case: str, tmp_path: Path) -> None:
    make_index(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_bytes(INDEXES[case].encode("utf-8", "surrogateescape"))
    assert "is not a weight index" in refused(tmp_path)


def test_names_and_folders_without_weights(tmp_path: Path) -> None:
    assert "has no weights" in refused(tmp_path)
    assert "no such file or folder" in refused("owner/model")
    assert "no such file or folder" in refused(tmp_path / "x.safetensors")
    (tmp_path / "x.txt").touch()
    assert "x.txt is not a checkpoint" in refused(tmp_path / "x.txt")
    (tmp_path / "folder.safetensors").mkdir()
    assert "missing or not a plain file" in refused(tmp_path)


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "x.gguf", "x.json", "x.safetensors.index.json"])
def test_a_pipe_does_not_hang(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    assert name in refused(tmp_path / name)
    assert str(tmp_path) in refused(tmp_path)


Fields = dict[str, Any]
Mutation = Callable[[random.Random, Fields, bytes], bytes]
NASTY: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 7, 8, 2**31, 2**62, 2**63, 2**64, 10**400, 0.0, 6.0, 1e308, "", "F32", "F99"),
    *("BF16", [], [[]], [0], [-1], [1, 2, 3], [2**32, 2**32], [2**62, 4, 0], [0, 0], [6, 0], [0, 2**63], ["2", "3"]),
    *({}, {"dtype": "F32"}, [1] * 100, [True, False], [0.0, 24.0], "\ud800", "\0"),
)


def pack(header: bytes, data: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def change_a_field(rng: random.Random, fields: Fields, data: bytes) -> bytes:
    name = rng.choice(list(fields))
    entry = fields[name]
    if isinstance(entry, dict) and rng.random() < 0.9:
        entry[rng.choice([*entry, "extra"])] = rng.choice(NASTY)
    else:
        fields[rng.choice([name, "new", ""])] = rng.choice(NASTY)
    return pack(json.dumps(fields).encode(), data)


def shift_offsets(rng: random.Random, fields: Fields, data: bytes) -> bytes:
    for name in rng.sample(list(TENSORS), rng.randint(1, 3)):
        offsets = fields[name]["data_offsets"]
        offsets[rng.randrange(2)] += rng.choice([-8, -4, -1, 1, 4, 8, len(data), 2**40])
    return pack(json.dumps(fields).encode(), data)


def swap_entries(rng: random.Random, fields: Fields, data: bytes) -> bytes:
    one, other = rng.sample(list(TENSORS), 2)
    key = rng.choice(["dtype", "shape", "data_offsets"])
    fields[one][key], fields[other][key] = fields[other][key], fields[one][key]
    return pack(json.dumps(fields).encode(), data)


def change_bytes(rng: random.Random, fields: Fields, data: bytes) -> bytes:
    whole = bytearray(pack(json.dumps(fields).encode(), data))
    for _ in range(rng.randint(1, 4)):
        whole[rng.randrange(len(whole) - len(data))] = rng.randrange(256)
    return bytes(whole)


def cut_or_grow(rng: random.Random, fields: Fields, data: bytes) -> bytes:
    whole = pack(json.dumps(fields).encode(), data)
    place = rng.randrange(len(whole))
    return rng.choice([whole[:place], whole + bytes(rng.randint(1, 9)), whole[:place] + b"\0" + whole[place:]])


def change_the_length(rng: random.Random, fields: Fields, data: bytes) -> bytes:
    header = json.dumps(fields).encode()
    claims = [0, 1, 2**60, 2**63, 2**64 - 1, 100_000_001, len(header) - 1, len(header) + 1, len(header) + len(data)]
    return pack(header, data, rng.choice([*claims, rng.randrange(2**16), rng.randrange(2**64)]))


def repeat_text(rng: random.Random, fields: Fields, data: bytes) -> bytes:
    text = json.dumps(fields)
    start, stop = sorted(rng.sample(range(len(text)), 2))
    return pack((text[:stop] + text[start:stop] * rng.randint(1, 3) + text[stop:]).encode(), data)


def nest(rng: random.Random, fields: Fields, data: bytes) -> bytes:
    deep = rng.choice(["[", '{"a":']) * rng.choice([10, 1_000, 20_000])
    return pack(json.dumps(fields).replace("null", deep).replace('"F32"', deep, 1).encode(), data)


MUTATIONS: dict[Mutation, int] = {
    change_a_field: 700,
    shift_offsets: 300,
    swap_entries: 100,
    change_bytes: 700,
    cut_or_grow: 400,
    change_the_length: 150,
    repeat_text: 150,
    nest: 30,
}


def mutated(mutation: Mutation, times: int, whole: bytes) -> Iterator[bytes]:
    length = struct.unpack("<Q", whole[:8])[0]
    for seed in range(times):
        fields = json.loads(whole[8 : 8 + length])
        yield mutation(random.Random(seed), fields, whole[8 + length :])


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_mutated_files_are_refused_or_whole(mutation: Mutation, tmp_path: Path) -> None:
    """2,530 damaged files: each is refused, or describes exactly what the safetensors library finds in it too."""
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    refusals = accepted = 0
    for content in mutated(mutation, MUTATIONS[mutation], path.read_bytes()):
        path.write_bytes(content)
        try:
            found = open_weights(path).sources
        except ModelError as error:
            refusals += str(path) in str(error)
            continue
        accepted += 1
        with safe_open(path, framework="pt") as file:
            assert set(file.keys()) == found.keys()
            for name, source in found.items():
                assert same_bits(read(source), file.get_tensor(name))
    assert refusals + accepted == MUTATIONS[mutation], "each error names the file"
    assert refusals > accepted


def test_every_cut_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert "is damaged or incomplete" in refused(path)


def test_a_header_that_claims_more_than_there_is(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 2**60) + b"{}")
    assert "its header claims 1,152,921,504,606,846,976 bytes" in refused(path)
    huge = {"a": {"dtype": "F32", "shape": [2**58], "data_offsets": [0, 2**60]}}
    path.write_bytes(pack(json.dumps(huge).encode(), b"1234"))
    assert "its tensors end at byte" in refused(path)


def test_a_pointer_of_git_lfs_says_how_to_fetch_the_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert f"is a Git LFS pointer in place of the weights; run `git lfs pull` in {tmp_path}" in refused(tmp_path)
