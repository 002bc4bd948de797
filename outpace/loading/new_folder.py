"""Creates a folder atomically, and never replaces one that another program put there."""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from outpace.log import logger

_OLD = "-old"  # suffix of a folder that was moved aside
_IN_THE_WAY = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


def partial_prefix(target: Path) -> str:
    """Prefix of hidden folders that will become `target`."""
    return f".{target.name}.partial-"


@contextmanager
def new_folder(
    target: Path,
    replaces: Callable[[Path], bool] = lambda folder: False,
    usable: Callable[[Path], bool] = lambda folder: False,
) -> Iterator[Path]:
    """A new folder next to `target` that is renamed to `target` when the block ends without error.

    It replaces an empty folder, or one that `replaces` accepts. Anything else at `target` stays and is a
    FileExistsError, even if it appears during the block. After an error the new folder is removed. Folders of killed
    processes are removed first.

    usable: whether an unfinished folder can be continued. Such a folder stays after an error, and one of a killed
    process is used instead of an empty folder.
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
    """Rename the new folder. The system refuses to replace a file or a folder that is not empty."""
    if _renamed(partial, target):
        return
    if target.is_symlink() or not target.is_dir() or not replaces(target):
        raise FileExistsError(errno.EEXIST, "something else is there", str(target))
    old = partial.with_name(f"{partial.name}{_OLD}")
    target.rename(old)
    lock = _lock(old)
    try:
        # check again: another process may have replaced the folder since the check above
        if not replaces(old) or not _renamed(partial, target):
            raise FileExistsError(errno.EEXIST, "it was changed at the same time", str(target))
    except BaseException:
        if not _renamed(old, target):  # keep it under a name that later runs do not remove
            kept = old.rename(target.with_name(old.name.removeprefix(".")))
            logger.warning("%s was replaced by another program; the old folder is now %s", target, kept)
        raise
    finally:
        if lock is not None:
            os.close(lock)
    shutil.rmtree(old, ignore_errors=True)


def _renamed(folder: Path, target: Path) -> bool:
    """Rename; False if the target is something other than an empty folder."""
    try:
        folder.rename(target)
    except OSError as error:
        if error.errno not in _IN_THE_WAY:
            raise
        return False
    return True


def _make(target: Path) -> tuple[Path, int]:
    """A new hidden folder with a lock that lasts as long as this process: it marks the folder as in use."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=partial_prefix(target), dir=target.parent))
        number = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # another process treats it as a leftover and removes it
        except OSError:
            return folder, number  # a file system without locks: leftovers cannot be recognized and stay
        else:
            if folder.is_dir():
                return folder, number
        os.close(number)


def _taken_up(target: Path, usable: Callable[[Path], bool]) -> tuple[Path, int] | None:
    """Lock and return a leftover folder that can be continued; remove the other leftovers of killed processes.

    A folder that was moved aside and not replaced is moved back.
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
    """Lock a folder; None: another process holds the lock, or it cannot be locked."""
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
    """Flush all files before the folder gets its name, so that a power cut cannot leave a damaged model."""
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
