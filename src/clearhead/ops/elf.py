"""A check of a shared library's file before it is loaded: one that was cut short would end the process by SIGBUS."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

__all__ = ["damage_of"]

_SELF: Final = Path("/proc/self/exe")
_MAGIC: Final = b"\x7fELF"
_BITS64: Final = 2
#: The file's header after the identification: type, machine, version, entry, the places of the two tables, flags,
#: sizes. System V ABI, chapter 4.
_HEADER: Final = "16xHHIQQQIHHHHHH"
#: A segment: type, flags, place in the file, two addresses, bytes in the file, bytes in memory, alignment.
_SEGMENT: Final = "IIQQQQQQ"
_HEADER_BYTES: Final = struct.calcsize("<" + _HEADER)


def damage_of(path: Path) -> str | None:
    """What is wrong with the file of a library of this system's kind; None if it is whole.

    On a system whose programs are no ELF files, and for files of 32 bits, nothing is checked.

    Raises:
        OSError: the file cannot be read.

    Cost: reads the header and the table of segments.

    >>> import sys
    >>> damage_of(Path(sys.executable)) is None
    True
    """
    running = _header(_SELF) if _SELF.exists() else None
    if running is None or running[4] != _BITS64:
        return None
    header = _header(path)
    if header is None:
        return "is damaged (the file is no library: it has no ELF header)"
    if len(header) < _HEADER_BYTES:
        return f"is damaged (the file ends after {len(header)} bytes)"
    order = _order(header)
    if header[4:6] != running[4:6] or _machine(header) != _machine(running):
        return f"was built for another machine (ELF machine {_machine(header)} instead of {_machine(running)})"
    _, _, _, _, segments_at, sections_at, _, _, segment_bytes, segments, section_bytes, sections, _ = struct.unpack(
        order + _HEADER, header
    )
    size = path.stat().st_size
    ends = [segments_at + segments * segment_bytes, sections_at + sections * section_bytes]
    if max(ends) <= size and segment_bytes == struct.calcsize(order + _SEGMENT):
        with path.open("rb") as file:
            file.seek(segments_at)
            table = file.read(segments * segment_bytes)
        ends += [place + length for _, _, place, _, _, length, _, _ in struct.iter_unpack(order + _SEGMENT, table)]
    if max(ends) > size:
        return f"is damaged (the file has {size:,} of at least {max(ends):,} bytes)"
    return None


def _header(path: Path) -> bytes | None:
    """The first bytes of an ELF file, fewer than its header has if it was cut short; None of another file."""
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    return header if header.startswith(_MAGIC) else None


def _order(header: bytes) -> str:
    return ">" if header[5] == 2 else "<"


def _machine(header: bytes) -> int:
    machine: int = struct.unpack_from(_order(header) + "H", header, 18)[0]
    return machine
