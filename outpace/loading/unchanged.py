"""Files that are read for minutes, and must be the same at the end as at the beginning. Imports no torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from outpace.errors import ModelError


@dataclass(frozen=True)
class Unchanged:
    """Size and time of files."""

    seen: Mapping[Path, tuple[int, int]]

    @classmethod
    def of(cls, paths: Iterable[Path]) -> "Unchanged":
        """As the files are now."""
        return cls({path: _look(path) for path in set(paths)})

    def __or__(self, other: "Unchanged") -> "Unchanged":
        return Unchanged({**self.seen, **other.seen})

    def check(self) -> None:
        """Raise if one of the files is gone or another one."""
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
    """The error for a file of a model that was there and cannot be read."""
    if isinstance(error, FileNotFoundError):
        return ModelError(f"model: {path} is gone, removed while it was read; put it back, and try again")
    return ModelError(f"model: cannot read {path} ({error.strerror or error}); check the disk and its rights")
