"""Checks that files did not change while they were read for minutes. Imports no torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from outpace.errors import ModelError


@dataclass(frozen=True)
class Unchanged:
    """Sizes and modification times of files."""

    seen: Mapping[Path, tuple[int, int]]

    @classmethod
    def of(cls, paths: Iterable[Path]) -> "Unchanged":
        return cls({path: _look(path) for path in set(paths)})

    def __or__(self, other: "Unchanged") -> "Unchanged":
        return Unchanged({**self.seen, **other.seen})

    def check(self) -> None:
        """Raise if a file was removed or changed."""
        for path, before in self.seen.items():
            if _look(path) != before:
                raise ModelError(f"model: {path} changed while it was read; wait until it is complete, and try again")


def _look(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise unreadable(path, error) from error
    return found.st_size, found.st_mtime_ns


def unreadable(path: Path | str, error: OSError) -> ModelError:
    """The error for a model's file that can no longer be read."""
    if isinstance(error, FileNotFoundError):
        return ModelError(f"model: {path} was removed while it was read; put it back, and try again")
    return ModelError(f"model: cannot read {path} ({error.strerror or error}); check the disk and its rights")
