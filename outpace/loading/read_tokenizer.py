"""Loads the tokenizer of a model without its weights, with transformers, also in processes without torch."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.errors import ModelError
from outpace.loading.cache import holds_model, models_dir
from outpace.loading.checkpoint import fetch, holds_tokenizer, local_path, open_checkpoint
from outpace.loading.default_model import DEFAULT_MODEL, default_model_path
from outpace.log import chosen
from outpace.process_wide import environment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def import_without_torch() -> None:
    """Import transformers as if torch were not installed, for a process that only needs tokenizers.

    The tokenizers are the same, but the import takes a third of the time and memory. torch can be imported afterwards;
    the models of transformers cannot. Does nothing if either is imported already.
    """
    if "torch" not in sys.modules and "transformers" not in sys.modules:
        with _hidden_torch():
            from transformers.utils.import_utils import is_torch_available

            assert not is_torch_available(), "transformers must not find torch here"


@contextmanager
def _hidden_torch() -> Iterator[None]:
    with environment({"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}):  # no warning that torch is missing
        sys.modules["torch"] = None  # type: ignore[assignment]
        try:
            yield
        finally:
            del sys.modules["torch"]


def load_tokenizer(source: str | Path | None) -> "PreTrainedTokenizerBase | None":
    """The tokenizer of the model that `build.load` would load; None: it has none."""
    path = model_path(source)
    if path.suffix.lower() == ".gguf":
        from outpace.loading.gguf import read_gguf_tokenizer

        return read_gguf_tokenizer(path)
    return read_tokenizer(open_checkpoint(path))


def model_path(source: str | Path | None) -> Path:
    """The folder or file of a model; the default model (None) or one on Hugging Face is downloaded if necessary."""
    path = None if source is None else local_path(source)
    return default_model_path() if is_default(source, path) else path or fetch(str(source))


def is_default(source: str | Path | None, path: Path | None) -> bool:
    """Whether `source` means the default model. path: the local file or folder of `source`, if any."""
    return source is None or (path is None and source == DEFAULT_MODEL)


def is_here(source: str | Path | None) -> bool:
    """Whether a model is on this machine, so that nothing has to be downloaded or converted."""
    path = None if source is None else local_path(source)
    if is_default(source, path):
        return holds_model(models_dir() / DEFAULT_MODEL)
    if path is not None:
        return True

    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(str(source), "config.json"), str)


def read_tokenizer(folder: Path) -> "PreTrainedTokenizerBase | None":
    """The tokenizer in a folder; None: it has none."""
    if not holds_tokenizer(folder):
        chosen("tokenizer", None, f"{folder} holds none; pass token ids")
        return None

    from transformers import AutoTokenizer  # imported late: this takes seconds, and bad options should fail first

    from outpace.loading.problems import LOAD_ERRORS, REMEDY, line

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except LOAD_ERRORS as error:
        raise ModelError(f"model: cannot use the tokenizer in {folder} ({line(error)}); {REMEDY}") from error
    return tokenizer
