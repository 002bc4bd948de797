"""Machines to try configs on."""

import pytest
import torch


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which torch sees a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
