"""Fixtures of the loading tests."""

from pathlib import Path

import pytest
import torch

from outpace.loading.build import Loaded, load


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("OUTPACE_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def smollm(default_model_folder: Path) -> Loaded:
    """The real default model in float32 on the CPU."""
    return load(default_model_folder, dtype=torch.float32, device=torch.device("cpu"))
