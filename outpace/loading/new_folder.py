"""A folder that appears whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def partial_prefix(target: Path) -> str:
    """What the names of folders begin with that may become `target`."""
    return f".{target.name}.partial-"


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """An empty folder beside `target` that takes its place, and that of what is there, once the block has ended well.

    If it does not, nothing is left of the new folder, and what was there stays.
    """
    partial = Path(tempfile.mkdtemp(prefix=partial_prefix(target), dir=target.parent))
    old = partial.with_name(f"{partial.name}-old")
    try:
        yield partial
        _flush(partial)
        partial.chmod(0o755)  # mkdtemp makes folders that only their owner can read
        if target.is_dir():
            target.rename(old)
        partial.rename(target)
        _flush_folder(target.parent)
    except BaseException:
        if old.is_dir() and not target.exists():
            old.rename(target)
        raise
    finally:
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Put the files on the disk before the folder gets its name: a power cut must not leave a model with holes."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
