"""Units of bytes in a file of our own, read with O_DIRECT by several threads straight into the caller's memory.

The file, all numbers little-endian, is written once and named after its key:

    8 bytes    "outpace\\n"
    u32, u32   version of the format, bytes of a piece (each piece of a unit has a checksum)
    u64, u64   number of units, length of the key
    key        what the file is of, in UTF-8
    u64 each   sizes of the units, then where each begins (a multiple of 4096)
    u64 each   checksums of the pieces, unit after unit (`store_layout.checksums`)
    u64        length of the note
    32 bytes   SHA-256 of the note
    32 bytes   SHA-256 of everything before
    units      one after the other
    note       what the writer says about the units, in UTF-8

Header, units and note are each padded with zeros to a multiple of 4096.

A file with this name is complete: it is written as `*.writing`, with all its room taken first, flushed to the disk,
and only then renamed. The temporary file is locked while its writer lives. Whoever wants the same file waits for the
lock and then finds the file; a temporary file that nobody has locked is removed by the next writer. Every read is
checked: if the bytes are not those that were written, `Reading.wait` raises OffloadError.
"""

from outpace.offload.store_layout import ALIGN
from outpace.offload.store_memory import aligned, free_memory
from outpace.offload.store_read import Reading, ReadOptions, UnitFile, stored_size
from outpace.offload.store_write import UnitWriter

__all__ = [
    "ALIGN",
    "ReadOptions",
    "Reading",
    "UnitFile",
    "UnitWriter",
    "aligned",
    "free_memory",
    "stored_size",
]
