"""The file of what searches have found."""

import json
import logging
import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outpace.kernels import cublaslt
from outpace.kernels.cublaslt import Product
from outpace.kernels.product_cache import ProductCache, cache_file, identity
from tests.patience import PATIENCE

HERE = {"device": "a", "cublasLt": 130100}
PLAIN = Product(32, 16, 8, torch.bfloat16, False, False)
FOUND: dict[Product, bytes | None] = {
    PLAIN: bytes(range(64)),
    PLAIN._replace(bias=True): None,
    PLAIN._replace(add=True, dtype=torch.float16): b"\x01" * 64,
    PLAIN._replace(bias=True, add=True): None,
}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    cache = ProductCache(tmp_path / "new" / "file.json", HERE)
    assert cache.read() == {}
    cache.add({})
    assert not (tmp_path / "new").exists()
    cache.add(FOUND)
    more: dict[Product, bytes | None] = {PLAIN._replace(rows=64): None, PLAIN: b"\x02" * 64}
    cache.add(more)
    assert ProductCache(tmp_path / "new" / "file.json", HERE).read() == FOUND | more


def broken() -> list[tuple[str, Any]]:
    good = {"known by": HERE, "products": {"32x16x8 bfloat16": "00" * 64}}
    products = [
        {"32x16x8": None},
        {"32x16 bfloat16": None},
        {"32x16x8 float64": None},
        {"32x16x8 bfloat16 add bias": None},
        {"32x16x8 bfloat16 more": None},
        {"32x16x8 bfloat16": "00"},
        {"32x16x8 bfloat16": "zz" * 64},
        {"32x16x8 bfloat16": 5},
        ["32x16x8 bfloat16"],
    ]
    found = [
        ("text", "{"),
        ("empty", ""),
        ("list", "[]"),
        ("number", "5"),
        ("foreign", json.dumps(good | {"known by": {}})),
    ]
    found += [("missing", json.dumps({"known by": HERE})), ("deep", "[" * 100_000)]
    return found + [(str(number), json.dumps(good | {"products": each})) for number, each in enumerate(products)]


@pytest.mark.parametrize(("name", "content"), broken())
def test_files_that_are_none_of_ours_are_ignored(
    name: str, content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file.json"
    file.write_text(content)
    cache = ProductCache(file, HERE)
    with caplog.at_level(logging.DEBUG, logger="outpace"):
        assert cache.read() == {}
    assert f"{file} is ignored" in caplog.text
    cache.add(FOUND)
    assert cache.read() == FOUND


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_bytes(b"\xff\xfe\x00")
    assert ProductCache(tmp_path / "file.json", HERE).read() == {}


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        ProductCache(tmp_path / "file" / "file.json", HERE).add(FOUND)
    assert "products: they cannot be kept" in caplog.text


def write(file: Path, first: int) -> None:
    cache = ProductCache(file, HERE)
    for rows in range(first, first + 20):
        cache.add({PLAIN._replace(rows=rows): None})


def test_two_processes_that_write_lose_nothing(tmp_path: Path) -> None:
    processes = [
        multiprocessing.get_context("fork").Process(target=write, args=(tmp_path / "file.json", first))
        for first in (100, 200)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
        assert process.exitcode == 0
    assert len(ProductCache(tmp_path / "file.json", HERE).read()) == 40
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == ["file.json"]


def test_versions_and_devices_have_files_of_their_own(tmp_path: Path) -> None:
    device = torch.device("cpu")
    files = {cache_file(tmp_path, device, HERE | {"cublasLt": version}) for version in (1, 2)}
    assert len(files) == 2
    assert {file.parent for file in files} == {tmp_path / "products"}


def test_algorithms_that_are_no_longer_proposed_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """cublasLt's check of a stored algorithm takes no preferences: reductions in place would pass it."""
    found = SimpleNamespace(name="H200", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    now = identity(torch.device("cuda"), 130100)
    monkeypatch.setattr(cublaslt, "ANY_REDUCTION", 7)
    assert identity(torch.device("cuda"), 130100) != now
