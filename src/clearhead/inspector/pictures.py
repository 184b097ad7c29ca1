"""An image in a page, and which keys are its patches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from clearhead.arguments import repr_of, several, whole, whole_number
from clearhead.errors import ShapeError
from clearhead.inspector.arrays import pack
from clearhead.inspector.carried import FUNCTION

__all__ = ["check_grid", "picture"]


def picture(image: Tensor | ArrayLike, grid: tuple[int, int], first: int) -> dict[str, Any]:
    """The image's object of the schema.

    Raises:
        ShapeError: ``image`` is not an image, or ``grid`` is not a pair of positive integers.
    """
    pixels = _pixels(image)
    sides = [size for given in several(grid) if (size := whole_number(given)) is not None and size >= 1]
    if len(sides) != 2 or len(several(grid)) != 2:
        raise ShapeError.about(
            FUNCTION,
            "grid",
            must="be (rows, columns) of the image's patches",
            got=repr_of(grid),
            then="A ViT of 224 pixels and patches of 16 has (14, 14).",
        )
    then = "It is the key of the first patch: 1 after a class token."
    place = whole(FUNCTION, "grid_first", first, low=0, then=then)
    return {"pixels": pack(pixels, "u8"), "rows": sides[0], "columns": sides[1], "first": place}


def check_grid(image: dict[str, Any], k_len: int) -> None:
    """Raise if a patch is not a key.

    Raises:
        ShapeError: the last patch comes after the last key.
    """
    last = image["first"] + image["rows"] * image["columns"]
    if last > k_len:
        raise ShapeError.about(
            FUNCTION,
            "grid",
            must=f"have at most {k_len} patches, counting the keys before the first",
            got=f"{image['rows']} x {image['columns']} from key {image['first']} on",
            then="Count the patches.",
        )


def _array(image: object) -> NDArray[Any]:
    """The image as a numeric array; an empty array if it cannot be converted."""
    try:
        array = np.asarray(image.detach().to("cpu", torch.float64) if isinstance(image, Tensor) else image)
    except (TypeError, ValueError, RuntimeError):
        return np.zeros(0)
    return array if array.dtype.kind in "biuf" else np.zeros(0)


def _pixels(image: Tensor | ArrayLike) -> NDArray[np.uint8]:
    """Pixels ``[height, width, 1 or 3]``; other dtypes than uint8 are scaled from their minimum and maximum."""
    array = _array(image)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3) or array.size == 0:
        raise ShapeError.about(
            FUNCTION,
            "image",
            must="be [height, width], or [height, width, 3]",
            got=f"shape {array.shape}",
            then="Move channels to the end: image.permute(1, 2, 0).",
        )
    is_bytes = image.dtype == torch.uint8 if isinstance(image, Tensor) else array.dtype == np.uint8
    if is_bytes:
        return array.astype(np.uint8)
    numbers = np.nan_to_num(array.astype(np.float64))
    low, high = numbers.min(), numbers.max()
    spread: NDArray[np.uint8] = np.rint((numbers - low) / ((high - low) or 1.0) * 255).astype(np.uint8)
    return spread
