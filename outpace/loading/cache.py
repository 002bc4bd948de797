"""The user's cache folder: finds it, lists its models, and installs new ones atomically."""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from outpace.errors import ModelError, OutpaceError
from outpace.loading.new_folder import new_folder, partial_prefix

PROVENANCE = "outpace.json"
_RUST_OS_ERROR = re.compile(r"([^:\s][^:]*) \(os error \d+\)")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True)
class CachedModel:
    """One model in the cache folder."""

    name: str
    size: int  # bytes on disk
    dtype: str
    source: str


def cache_dir() -> Path:
    """The cache folder: OUTPACE_CACHE, else $XDG_CACHE_HOME/outpace, else ~/.cache/outpace."""
    if own := os.environ.get("OUTPACE_CACHE"):
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(shared) if Path(shared).is_absolute() else Path("~/.cache").expanduser()
    return base / "outpace"


def models_dir() -> Path:
    """The folder in the cache with one folder for each model."""
    folder = cache_dir() / "models"
    for path in (folder.parent, folder):
        if path.exists() and not path.is_dir():
            raise OutpaceError(f"OUTPACE_CACHE: {path} is a file; set OUTPACE_CACHE to a folder")
    return folder


def holds_model(folder: Path) -> bool:
    """Whether a folder looks like a model: it has a config and weights, or an index of weights."""
    weights = (folder / f"{name}{suffix}" for name in _WEIGHTS for suffix in ("", ".index.json"))
    return (folder / "config.json").is_file() and any(path.is_file() for path in weights)


def install(name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder of `name`; if it does not exist, `make` fills a new one, which appears only when complete.

    If several processes ask for the same name, one does the work and the others wait.
    """
    target = models_dir() / name
    if holds_model(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / f".{name}.lock"):
            if not holds_model(target):
                _check_free(target)
                _make_whole(target, make)
    except Exception as error:
        if (problem := _system_message(error)) is None:
            raise
        raise OutpaceError(
            f"OUTPACE_CACHE: cannot write to {target.parent} ({problem}); "
            "free some space there, or set OUTPACE_CACHE to a folder that can be written"
        ) from error
    return target


def _system_message(error: Exception) -> str | None:
    """The operating system's message; None: the error is another. safetensors and tokenizers do not raise OSError."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    found = _RUST_OS_ERROR.search(str(error))
    return found[1] if found else None


def cached_models() -> list[CachedModel]:
    """All complete models in the cache folder, sorted by name."""
    if not models_dir().is_dir():
        return []
    folders = (path for path in models_dir().iterdir() if holds_model(path) and not path.name.startswith("."))
    return [_describe(path) for path in sorted(folders)]


def _check_free(target: Path) -> None:
    """Refuse to replace anything but an empty folder: the user may have put it there."""
    empty = target.is_dir() and not target.is_symlink() and not any(target.iterdir())
    if os.path.lexists(target) and not empty:
        raise ModelError(f"model: {target} is not a complete model (config.json and weights); delete it and try again")


def _make_whole(target: Path, make: Callable[[Path], None]) -> None:
    """Fill a hidden sibling of `target` and rename it. The caller holds the lock, so other siblings are leftovers."""
    for leftover in target.parent.glob(f"{partial_prefix(target)}*"):
        shutil.rmtree(leftover)
    with new_folder(target) as partial:
        make(partial)


def _describe(folder: Path) -> CachedModel:
    facts = _provenance(folder / PROVENANCE)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    dtype, source = (str(facts.get(key, "unknown")) for key in ("dtype", "source"))
    return CachedModel(folder.name, size, dtype, source)


def _provenance(path: Path) -> dict[str, object]:
    """The content of the file; empty if it cannot be read."""
    try:
        facts = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}
