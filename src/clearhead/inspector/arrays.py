"""Arrays as text: byte planes, deflated, base 85; and rows quantised to 16 bits.

An array is ``{"type", "shape", "data"}`` with the type ``f32``, ``i32``, ``i16``, ``u16`` or ``u8``, little-endian. The
bytes are stored as planes, all first bytes before all second ones, which deflates better. ``"unit"`` multiplies every
element; ``"steps"``, an array itself, has a factor for each row, and the products are rounded to float32.

The text is RFC 1924's base 85, 4 bytes in 5 characters, a sixteenth shorter than base 64. Three of its characters would
need escapes within a page, so ``&<>`` are written as ``,[]``.
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

from clearhead.errors import UnsupportedError

__all__ = ["FUNCTION", "TYPES", "Floats", "Rows", "pack", "pack_part", "unpack"]

FUNCTION: Final = "view"

TYPES: Final = {"f32": "<f4", "i32": "<i4", "i16": "<i2", "u16": "<u2", "u8": "|u1"}

#: The largest integer of a quantised row: at least this, for the accuracy of scores, ...
_LEAST: Final = 511
#: ... and at most this, the largest 16 bit integer.
_MOST: Final = 32767

#: Steps are rounded down to powers of ``2 ** (1 / 4)``: few distinct steps compress to a few bytes.
_OCTAVE: Final = 4
#: The smallest step, float32's smallest normal number.
_LEAST_STEP: Final = 2.0**-126
_WRITTEN: Final = str.maketrans("&<>", ",[]")
_READ: Final = str.maketrans(",[]", "&<>")

Floats = NDArray[np.float64]


def pack(numbers: ArrayLike, kind: str, *, unit: float | None = None, repetitive: bool = True) -> dict[str, Any]:
    """An array as a JSON object; ``repetitive=False`` skips the search for repeated bytes, for data without them.

    >>> unpack(pack([[1.0, -0.5]], "f32")).tolist()
    [[1.0, -0.5]]

    Raises:
        UnsupportedError: a finite element is outside the type's range.
    """
    array = np.ascontiguousarray(_in_range(np.asarray(numbers), np.dtype(TYPES[kind])), dtype=TYPES[kind])
    planes = array.reshape(-1).view(np.uint8).reshape(-1, array.itemsize).T
    data = base64.b85encode(_deflated(planes, repetitive)).decode("ascii")
    packed: dict[str, Any] = {"type": kind, "shape": list(np.shape(numbers)), "data": data.translate(_WRITTEN)}
    return packed if unit is None else packed | {"unit": unit}


def _in_range(numbers: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """The elements, all of which the type can hold: integers as they are, float32 after rounding."""
    if numbers.dtype.kind != "f" or numbers.dtype == dtype or numbers.size == 0:
        return numbers
    if dtype.kind == "f":
        finite = numbers[np.isfinite(numbers)]
        low = high = float(np.finfo(dtype).max)
    else:
        finite = numbers
        low, high = -float(np.iinfo(dtype).min), float(np.iinfo(dtype).max)
    # A comparison with NaN is False.
    if finite.size and not (-low <= finite.min() and finite.max() <= high):
        raise UnsupportedError.about(
            FUNCTION,
            "numbers",
            must=f"be within {dtype}",
            got=f"{finite[np.abs(finite).argmax()]:.4g}",
            then="Scale queries, keys, values or biases down.",
        )
    return numbers


def _deflated(planes: NDArray[np.uint8], repetitive: bool) -> bytes:
    strategy = zlib.Z_DEFAULT_STRATEGY if repetitive else zlib.Z_HUFFMAN_ONLY
    packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS, 9, strategy)
    # A flush between planes gives each its own Huffman code: high bytes have few distinct values, low bytes many.
    packed = [packer.compress(plane.tobytes()) + packer.flush(zlib.Z_SYNC_FLUSH) for plane in planes]
    return b"".join(packed) + packer.flush()


def pack_part(numbers: Floats) -> dict[str, Any]:
    """Non-negative values in steps of 1/65535 of the largest; unrounded if one is NaN or infinite."""
    if not np.isfinite(numbers).all():
        return pack(numbers, "f32")
    unit = float(numbers.max(initial=0.0)) / 65535 or 1.0
    return pack(np.rint(numbers / unit), "u16", unit=unit)


@dataclass(frozen=True)
class Rows:
    """Rows of 16 bit integers with a step for each row; ``steps`` is None if the values are not quantised."""

    numbers: Floats
    steps: Floats | None

    @classmethod
    def of(cls, rows: Floats, steps: Floats) -> Rows:
        """Rows rounded to ``steps``, clipped to what 16 bits and the minimum accuracy allow."""
        largest = np.abs(rows).max(axis=1, initial=0.0)
        used = np.clip(steps, largest / _MOST * 2 ** (1 / _OCTAVE), largest / _LEAST)
        return cls._by(rows, used)

    @classmethod
    def in_levels(cls, rows: Floats, levels: int) -> Rows:
        """Rows rounded so that the largest integer of each is ``levels``, or up to a fifth more."""
        return cls._by(rows, np.abs(rows).max(axis=1, initial=0.0) / levels)

    @classmethod
    def _by(cls, rows: Floats, steps: Floats) -> Rows:
        steps = np.where(steps == 0, 1.0, steps)
        steps = np.maximum(2.0 ** (np.floor(np.log2(steps) * _OCTAVE) / _OCTAVE), _LEAST_STEP)
        steps = _in_range(steps, np.dtype(np.float32)).astype(np.float32).astype(np.float64)
        return cls(np.rint(rows / steps[:, None]), steps)

    @classmethod
    def exactly(cls, rows: Floats) -> Rows:
        """Rows in float32, not quantised."""
        return cls(_in_range(rows, np.dtype(np.float32)).astype(np.float32).astype(np.float64), None)

    @property
    def values(self) -> Floats:
        """The values that the page computes: integer times step, in float32."""
        if self.steps is None:
            return self.numbers
        return (self.numbers * self.steps[:, None]).astype(np.float32).astype(np.float64)

    def packed(self) -> dict[str, Any]:
        """The rows as a JSON object."""
        if self.steps is None:
            return pack(self.numbers, "f32")
        return pack(self.numbers, "i16", repetitive=False) | {"steps": pack(self.steps, "f32")}


def unpack(packed: Mapping[str, Any]) -> NDArray[Any]:
    """The values of an array; raises ``ValueError`` if the data does not match its type and shape."""
    dtype = np.dtype(TYPES[packed["type"]])
    shape = tuple(packed["shape"])
    try:
        planes = zlib.decompress(base64.b85decode(packed["data"].translate(_READ)))
    except zlib.error as failure:
        raise ValueError(str(failure)) from failure
    if len(planes) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(planes)} bytes for {shape} numbers of {dtype.itemsize} bytes")
    by_element = np.frombuffer(planes, np.uint8).reshape(dtype.itemsize, -1).T
    array = np.ascontiguousarray(by_element).view(dtype).reshape(shape)
    if "unit" in packed:
        return array * float(packed["unit"])
    if "steps" in packed:
        scaled: NDArray[Any] = array * unpack(packed["steps"]).astype(np.float64)[:, None]
        return scaled.astype(np.float32)
    return array
