"""Checks and creates the folder that a model is written to, with errors for everything that can go wrong."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from outpace.errors import InputError, OutpaceError
from outpace.loading.new_folder import new_folder, partial_prefix
from outpace.loading.unchanged import unreadable
from outpace.loading.weights import Extent, Source
from outpace.log import size_text


class Kind(NamedTuple):
    """The kind of folder that --force may replace."""

    contents: str
    """Its contents, for errors."""
    sign: str
    """How such a folder is recognized, for errors."""
    holds: Callable[[Path], bool]


@contextmanager
def out_folder(
    out: Path, kind: Kind, *, force: bool, field: str = "out", usable: Callable[[Path], bool] = lambda folder: False
) -> Iterator[Path]:
    """A folder that becomes `out` when the block ends without error (see `new_folder`)."""
    try:
        with new_folder(out, kind.holds if force else lambda folder: False, usable) as folder:
            yield folder
    except FileExistsError as error:
        check_out(out, kind, force=force, field=field)
        raise InputError(f"{field}: {out} was changed while {kind.contents} for it were written; try again") from error
    except OSError as error:
        if error.filename is not None and not _is_written(Path(os.fsdecode(error.filename)), out):
            raise unreadable(os.fsdecode(error.filename), error) from error
        raise OutpaceError(
            f"{field}: cannot write {out} ({error.strerror or error}); check the disk and its rights"
        ) from error


def check_out(out: Path, kind: Kind, *, force: bool, field: str = "out") -> Path:
    """The resolved folder; an error if something is there that must not be replaced."""
    out = out.expanduser().resolve()
    if not out.parent.is_dir():
        raise InputError(f"{field}: there is no folder {out.parent}; make it first")
    if not os.access(out.parent, os.W_OK):
        raise InputError(f"{field}: {out.parent} cannot be written to; choose another folder")
    if out.exists() and not out.is_dir():
        raise InputError(f"{field}: {out} is a file; give the name of a folder")
    if out.is_dir() and any(out.iterdir()):
        if not kind.holds(out):
            raise InputError(
                f"{field}: {out} is not empty and holds no {kind.contents} ({kind.sign}), so it is never replaced"
            )
        if not force:
            raise InputError(
                f"{field}: {out} holds {kind.contents} already; give --force to replace them, or another folder"
            )
    return out


def check_apart(sources: Mapping[str, Source], out: Path, field: str = "out") -> None:
    """Refuse to replace files that are read."""
    if any(path.resolve().is_relative_to(out) for path in files_of(sources)):
        raise InputError(f"{field}: {out} holds the model itself; give another folder")


def check_space(out: Path, needed: int, field: str = "out") -> None:
    """Refuse to write more than fits on the disk."""
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise OutpaceError(
            f"{field}: {size_text(needed)} will be written, and {out.parent} has room for {size_text(free)}; "
            "free some, or choose another disk"
        )


def files_of(sources: Mapping[str, Source]) -> set[Path]:
    """The files that hold the sources."""
    places = (piece.place for source in sources.values() for piece in source.pieces)
    return {place.path for place in places if isinstance(place, Extent)}


def _is_written(path: Path, out: Path) -> bool:
    """Whether a path is being written: the folder, its hidden sibling, or the parent folder."""
    return path in (out, out.parent) or any(part.name.startswith(partial_prefix(out)) for part in (path, *path.parents))
