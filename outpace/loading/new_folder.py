"""A folder that appears whole or not at all, and never in place of something that somebody else put there."""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from outpace.log import logger

_OLD = "-old"  # ends the name of a folder that was moved aside
_IN_THE_WAY = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


def partial_prefix(target: Path) -> str:
    """What the names of folders begin with that may become `target`."""
    return f".{target.name}.partial-"


@contextmanager
def new_folder(
    target: Path,
    replaces: Callable[[Path], bool] = lambda folder: False,
    usable: Callable[[Path], bool] = lambda folder: False,
) -> Iterator[Path]:
    """An empty folder beside `target` that becomes `target` once the block has ended well.

    It takes the place of an empty folder, or of one that `replaces` accepts. Anything else at `target`, whenever it
    appeared, is a FileExistsError and stays. After an error nothing is left of the new folder. Folders that a killed
    process left behind are removed first.

    usable: says whether an unfinished folder can be gone on with. One that can stays after an error, and what is left
    of a killed process is handed out instead of an empty folder.
    """
    partial, lock = _taken_up(target, usable) or _make(target)
    try:
        yield partial
        _flush(partial)
        partial.chmod(0o755)  # mkdtemp makes folders that only their owner can read
        _put(partial, target, replaces)
        _flush_folder(target.parent)
    finally:
        if not usable(partial):
            shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def _put(partial: Path, target: Path, replaces: Callable[[Path], bool]) -> None:
    """Rename the new folder. The system itself refuses to rename it onto a file or a folder that is not empty."""
    if _renamed(partial, target):
        return
    if target.is_symlink() or not target.is_dir() or not replaces(target):
        raise FileExistsError(errno.EEXIST, "something else is there", str(target))
    old = partial.with_name(f"{partial.name}{_OLD}")
    target.rename(old)
    lock = _lock(old)
    try:
        # checked again: another process may have put another folder there since the check above
        if not replaces(old) or not _renamed(partial, target):
            raise FileExistsError(errno.EEXIST, "it was changed at the same time", str(target))
    except BaseException:
        if not _renamed(old, target):  # under a name that no later run takes for a leftover
            kept = old.rename(target.with_name(old.name.removeprefix(".")))
            logger.warning("%s was replaced by somebody else; what was there is %s now", target, kept)
        raise
    finally:
        if lock is not None:
            os.close(lock)
    shutil.rmtree(old, ignore_errors=True)


def _renamed(folder: Path, target: Path) -> bool:
    """Rename, unless something other than an empty folder is there."""
    try:
        folder.rename(target)
    except OSError as error:
        if error.errno not in _IN_THE_WAY:
            raise
        return False
    return True


def _make(target: Path) -> tuple[Path, int]:
    """A new hidden folder, locked as long as this process lives: a lock tells that somebody writes there."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=partial_prefix(target), dir=target.parent))
        number = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # another process takes it for a leftover, and removes it
        except OSError:
            return folder, number  # a file system without locks: leftovers cannot be told there, and stay
        else:
            if folder.is_dir():
                return folder, number
        os.close(number)


def _taken_up(target: Path, usable: Callable[[Path], bool]) -> tuple[Path, int] | None:
    """What a killed process left and can be gone on with, locked; everything else that such left is removed.

    A folder that was moved aside and not replaced is put back.
    """
    taken: tuple[Path, int] | None = None
    for leftover in list(target.parent.iterdir()):
        if not leftover.name.startswith(partial_prefix(target)) or (lock := _lock(leftover)) is None:
            continue
        if taken is None and not leftover.name.endswith(_OLD) and usable(leftover):
            taken = leftover, lock
            continue
        try:
            if not (leftover.name.endswith(_OLD) and not os.path.lexists(target) and _renamed(leftover, target)):
                shutil.rmtree(leftover, ignore_errors=True)
        finally:
            os.close(lock)
    return taken


def _lock(folder: Path) -> int | None:
    """Lock a folder; None: a living process holds it, or it cannot be locked."""
    try:
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(number)
        return None
    return number


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
