"""Statistics over a sharded sequence: which axis of each is shared out over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from torch import Tensor

__all__ = ["AXES", "Axes"]


@dataclass(frozen=True)
class Axes:
    """How a field of an ``Observation`` is shared out.

    Attributes:
        sharded: the tokens that the rank's part is of; None if every rank has the whole.
        axis: the axis of these tokens, counted from the end.
        axes: number of axes of the field.
    """

    sharded: Literal["queries", "keys"] | None
    axis: int = -1
    axes: int = 3

    def tokens_first(self, tensor: Tensor) -> Tensor:
        """As ``[batch, heads, len, channels]``."""
        if self.axes == 3:
            return tensor[..., None]
        return tensor.transpose(-1, -2) if self.axis == -1 else tensor

    def restored(self, tensor: Tensor) -> Tensor:
        """The field's axes of what ``tokens_first`` gave."""
        if self.axes == 3:
            return tensor[..., 0]
        return tensor.transpose(-1, -2) if self.axis == -1 else tensor


AXES: Final[Mapping[str, Axes]] = {
    "output": Axes("queries", -2, 4),
    "lse": Axes("queries"),
    "max_score": Axes("queries"),
    "entropy": Axes("queries"),
    "sink": Axes("queries"),
    "distance": Axes("queries"),
    "top_indices": Axes("queries", -2, 4),
    "top_weights": Axes("queries", -2, 4),
    "received": Axes("keys"),
    "row_weights": Axes("keys", -1, 4),
    "rows": Axes("keys", -1, 4),
    "heatmap_max": Axes(None),
    "heatmap_mean": Axes(None),
}
