"""Arrays of numbers as text: byte planes, deflated, base 85; and rows of numbers in as few bits as they need.

An array is ``{"type", "shape", "data"}`` with the type ``f32``, ``i32``, ``i16``, ``u16`` or ``u8``, little-endian. The
bytes of a number stand apart, all first bytes before all second ones, which deflates better. An ``"unit"`` multiplies
each number; ``"steps"``, an array itself, multiplies each row by a number of its own, rounded to 32 bits.

The text is RFC 1924's base 85, 4 bytes in 5 letters, which is a sixteenth shorter than base 64; three of its letters
would need escapes within a page, so ``&<>`` are written ``,[]``.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["TYPES", "Floats", "Rows", "pack", "pack_part", "unpack"]

TYPES: Final = {"f32": "<f4", "i32": "<i4", "i16": "<i2", "u16": "<u2", "u8": "|u1"}

#: What a row's largest number becomes: at least this, so that scores can be read as well, ...
_LEAST: Final = 511
#: ... and at most what 16 bits hold.
_MOST: Final = 32767

#: Steps are rounded down to powers of two's fourth root: so few different ones take no room.
_OCTAVE: Final = 4
_WRITTEN: Final = str.maketrans("&<>", ",[]")
_READ: Final = str.maketrans(",[]", "&<>")

Floats = NDArray[np.float64]


def pack(numbers: ArrayLike, kind: str, *, unit: float | None = None, alike: bool = True) -> dict[str, Any]:
    """An array as an object of JSON; ``alike`` says whether numbers repeat, and looking for that is worth its time.

    >>> unpack(pack([[1.0, -0.5]], "f32")).tolist()
    [[1.0, -0.5]]
    """
    array = np.ascontiguousarray(numbers, dtype=TYPES[kind])
    planes = array.reshape(-1).view(np.uint8).reshape(-1, array.itemsize).T
    data = base64.b85encode(_deflated(planes, alike)).decode("ascii")
    packed: dict[str, Any] = {"type": kind, "shape": list(np.shape(numbers)), "data": data.translate(_WRITTEN)}
    return packed if unit is None else packed | {"unit": unit}


def _deflated(planes: NDArray[np.uint8], alike: bool) -> bytes:
    strategy = zlib.Z_DEFAULT_STRATEGY if alike else zlib.Z_HUFFMAN_ONLY
    packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS, 9, strategy)
    # A flush between planes gives each a code of its own: high bytes are few different ones, low bytes all.
    packed = [packer.compress(plane.tobytes()) + packer.flush(zlib.Z_SYNC_FLUSH) for plane in planes]
    return b"".join(packed) + packer.flush()


def pack_part(numbers: Floats) -> dict[str, Any]:
    """Numbers that are not negative, to a part in 65535 of the largest; as they are where one is not finite."""
    if not np.isfinite(numbers).all():
        return pack(numbers, "f32")
    unit = float(numbers.max(initial=0.0)) / 65535 or 1.0
    return pack(np.rint(numbers / unit), "u16", unit=unit)


@dataclass(frozen=True)
class Rows:
    """Rows of 16 bit numbers, each row a multiple of a step of its own; None where numbers are kept as they are."""

    numbers: Floats
    steps: Floats | None

    @classmethod
    def of(cls, rows: Floats, steps: Floats) -> Rows:
        """Rows rounded to steps as near to ``steps`` as 16 bits and a least fineness allow."""
        largest = np.abs(rows).max(axis=1, initial=0.0)
        used = np.clip(steps, largest / _MOST * 2 ** (1 / _OCTAVE), largest / _LEAST)
        return cls._by(rows, used)

    @classmethod
    def in_levels(cls, rows: Floats, levels: int) -> Rows:
        """Rows rounded so that each one's largest number becomes ``levels``, or a fifth more."""
        return cls._by(rows, np.abs(rows).max(axis=1, initial=0.0) / levels)

    @classmethod
    def _by(cls, rows: Floats, steps: Floats) -> Rows:
        steps = np.where(steps == 0, 1.0, steps)
        steps = 2.0 ** (np.floor(np.log2(steps) * _OCTAVE) / _OCTAVE)
        steps = steps.astype(np.float32).astype(np.float64)
        return cls(np.rint(rows / steps[:, None]), steps)

    @classmethod
    def exactly(cls, rows: Floats) -> Rows:
        """Rows as they are, in 32 bits."""
        return cls(rows.astype(np.float32).astype(np.float64), None)

    @property
    def values(self) -> Floats:
        """The numbers that a reader of the page has: multiplied out in 32 bits."""
        if self.steps is None:
            return self.numbers
        return (self.numbers * self.steps[:, None]).astype(np.float32).astype(np.float64)

    def packed(self) -> dict[str, Any]:
        """Their array."""
        if self.steps is None:
            return pack(self.numbers, "f32")
        return pack(self.numbers, "i16", alike=False) | {"steps": pack(self.steps, "f32")}


def unpack(packed: Mapping[str, Any]) -> NDArray[Any]:
    """The numbers of an array; raises ``ValueError`` where they are not what it says."""
    dtype = np.dtype(TYPES[packed["type"]])
    shape = tuple(packed["shape"])
    try:
        planes = zlib.decompress(base64.b85decode(packed["data"].translate(_READ)))
    except zlib.error as failure:
        raise ValueError(str(failure)) from failure
    if len(planes) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(planes)} bytes for {shape} numbers of {dtype.itemsize} bytes")
    apart = np.frombuffer(planes, np.uint8).reshape(dtype.itemsize, -1).T
    array = np.ascontiguousarray(apart).view(dtype).reshape(shape)
    if "unit" in packed:
        return array * float(packed["unit"])
    if "steps" in packed:
        scaled: NDArray[Any] = array * unpack(packed["steps"]).astype(np.float64)[:, None]
        return scaled.astype(np.float32)
    return array
