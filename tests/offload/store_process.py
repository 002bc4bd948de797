"""A process that tests of the store start and kill: `python -m tests.offload.store_process ROLE FOLDER`."""

import logging
import sys
from pathlib import Path

import torch

from outpace.offload.store_memory import aligned
from outpace.offload.store_read import UnitFile
from outpace.offload.store_write import UnitWriter

SIZES = (5_000_000, 4096, 1, 0, 9_000_001)
"""Units of several pieces, of whole and broken pages, and of nothing."""


def unit(index: int, size: int) -> torch.Tensor:
    """What the unit of this number contains."""
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(index))


def say(word: str) -> None:
    """A line for the test."""
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def write(folder: Path, temporary: bool, key: str = "k") -> None:
    """Write all but the last unit, wait for a word, and finish; or take what another process wrote."""
    with UnitWriter(folder, key, SIZES, temporary=temporary) as writer:
        if writer.found is None:
            for index, size in enumerate(SIZES[:-1]):
                writer.put(index, unit(index, size))
            say("writing")
            sys.stdin.readline()
            writer.put(len(SIZES) - 1, unit(len(SIZES) - 1, SIZES[-1]))
        else:
            say("found")
        file = writer.finish()
    say("right" if _is_right(file) else "wrong")
    file.read(0, aligned(SIZES[0]))  # not waited for, and nothing closed: the process must end all the same


def _is_right(file: UnitFile) -> bool:
    into = aligned(max(SIZES))
    for index, size in enumerate(SIZES):
        file.read(index, into).wait()
        if not torch.equal(into[:size], unit(index, size)):
            return False
    return True


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    write(Path(sys.argv[2]), temporary=sys.argv[1] == "temporary")
