"""The format of a unit file (layers as bytes): offsets of units, the header, and checksums.

The file, all numbers little-endian, is written once and named after its key:

    8 bytes    "outpace\\n"
    u32, u32   version of the format, bytes of a piece (each piece of a unit has a checksum)
    u64, u64   number of units, length of the key
    key        identifies the content, in UTF-8
    u64 each   sizes of the units, then where each begins (a multiple of 4096)
    u64 each   checksums of the pieces, unit after unit (`checksums`)
    u64        length of the note
    32 bytes   SHA-256 of the note
    32 bytes   SHA-256 of everything before
    units      one after the other
    note       the writer's description of the units, in UTF-8

Header, units and note are each padded with zeros to a multiple of 4096.

A file with this name is complete: it is written as `*.writing`, with its disk space allocated first, flushed, and only
then renamed. The temporary file is locked while its writer lives. A second writer of the same file waits for the lock
and then finds the file; unlocked temporary files are removed by the next writer. Every read is checked: if the bytes
are not those that were written, `Reading.wait` raises OffloadError.
"""

import hashlib
import struct
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

ALIGN = 4096
"""Units begin at multiples of this in files and in memory, as O_DIRECT requires."""
PIECE = 8 << 20
"""Bytes with one checksum."""

Bytes = npt.NDArray[np.uint8]
Sums = npt.NDArray[np.uint64]

_MAGIC = b"outpace\n"
_VERSION = 1
_WORD = np.dtype("<u8")
_START = struct.Struct("<8sIIQQ")
_NOTE = struct.Struct("<Q32s")
_DIGEST = hashlib.sha256().digest_size


def padded(nbytes: int) -> int:
    """Rounded up to ALIGN."""
    return -(-nbytes // ALIGN) * ALIGN


def checksums(data: Bytes) -> Sums:
    """A 64-bit checksum for each piece of `data`, whose length is a multiple of ALIGN.

    It hashes the sums of all pages, in order, and the sums of the 512 word columns. A flipped bit changes one sum of
    each kind; swapped, zeroed or stale pages change page sums; words swapped within a page change column sums. One core
    computes 12 to 17 GB/s of it, 4 of zlib.crc32, 1.7 of SHA-256.
    """
    pages = data.view(_WORD).reshape(-1, ALIGN // _WORD.itemsize)
    step = PIECE // ALIGN
    return np.array([_checksum(pages[first : first + step]) for first in range(0, len(pages), step)], dtype=_WORD)


def _checksum(pages: Sums) -> int:
    sums = np.empty(sum(pages.shape), dtype=_WORD)
    np.add.reduce(pages, axis=1, out=sums[: len(pages)])
    np.add.reduce(pages, axis=0, out=sums[len(pages) :])
    return int.from_bytes(hashlib.sha256(sums.data).digest()[:8], "little")


class Layout:
    """Offsets of all units, and the header, for a key and sizes of units."""

    def __init__(self, key: str, sizes: Sequence[int]) -> None:
        self.key = key
        self.sizes = tuple(sizes)
        self.pieces = tuple(accumulate((-(-size // PIECE) for size in self.sizes), initial=0))
        """Index of each unit's first piece; the last entry is the number of all pieces."""

    @cached_property
    def name(self) -> str:
        return f"{hashlib.sha256(self.key.encode()).hexdigest()[:40]}.units"

    @cached_property
    def header_bytes(self) -> int:
        tables = 16 * len(self.sizes) + 8 * self.pieces[-1]
        return padded(_START.size + len(self.key.encode()) + tables + _NOTE.size + _DIGEST)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each unit; the last entry is that of the note."""
        return tuple(accumulate((padded(size) for size in self.sizes), initial=self.header_bytes))

    @property
    def total(self) -> int:
        """Length of the file without its note."""
        return self.offsets[-1]

    @cached_property
    def _start(self) -> bytes:
        text = self.key.encode()
        table = np.array(self.sizes + self.offsets[:-1], dtype=_WORD)
        return _START.pack(_MAGIC, _VERSION, PIECE, len(self.sizes), len(text)) + text + table.tobytes()

    def header(self, sums: Sums, note: bytes) -> bytes:
        """The header for these checksums and this note."""
        tail = _NOTE.pack(len(note), hashlib.sha256(note).digest())
        return self._sealed(self._start + sums.astype(_WORD).tobytes() + tail)

    def parse(self, header: bytes) -> tuple[Sums, int, bytes] | None:
        """(checksums, length of the note, its hash); None: this header does not belong to this key and these sizes."""
        begin, end = len(self._start), len(self._start) + 8 * self.pieces[-1]
        content = header[: end + _NOTE.size]
        if not header.startswith(self._start) or header != self._sealed(content):
            return None
        length, digest = _NOTE.unpack(content[end:])
        return np.frombuffer(content[begin:end], dtype=_WORD), length, digest

    def _sealed(self, content: bytes) -> bytes:
        return (content + hashlib.sha256(content).digest()).ljust(self.header_bytes, b"\0")
