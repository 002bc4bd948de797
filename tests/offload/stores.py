"""What tests of the store have in common."""

import threading
from pathlib import Path

import torch

from outpace.offload.store_memory import aligned
from outpace.offload.store_read import UnitFile
from outpace.offload.store_write import UnitWriter
from tests.offload.store_process import SIZES, unit

NOTE = "what lies where: ä"


def write(folder: Path, key: str = "k", sizes: tuple[int, ...] = SIZES, *, temporary: bool = False) -> UnitFile:
    """A complete file."""
    with UnitWriter(folder, key, sizes, temporary=temporary) as writer:
        for index, size in enumerate(sizes):
            writer.put(index, unit(index, size))
        return writer.finish(NOTE)


def assert_right(file: UnitFile) -> None:
    """All units, read at the same time, are what was put, and so is the note."""
    assert file.note == NOTE
    memory = [aligned(size) for size in file.sizes]
    readings = [file.read(index, into) for index, into in enumerate(memory)]
    for index, (reading, into) in enumerate(zip(readings, memory, strict=True)):
        reading.wait()
        assert reading.done()
        assert torch.equal(into[: file.sizes[index]], unit(index, file.sizes[index]))


def readers() -> set[threading.Thread]:
    """Threads that read files."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("outpace-read")}
