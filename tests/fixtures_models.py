"""Fixtures that several test folders share: the real default model."""

from pathlib import Path

import pytest

from outpace.errors import DownloadError
from outpace.loading.default_model import default_model_path


@pytest.fixture(scope="session")
def default_model_folder() -> Path:
    """The folder of the default model in the user's cache; skips where it is not there and cannot be fetched."""
    try:
        return default_model_path()
    except DownloadError as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")
