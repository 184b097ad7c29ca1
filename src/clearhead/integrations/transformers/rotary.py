"""Rotary positions as transformers' models hand them to each layer: cosines and sines of a call's tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead.ops.library import library
from clearhead.shapes import Float

__all__ = ["angles_of", "fits"]


def angles_of(given: Any, dtype: torch.dtype) -> Float[Tensor, "_rows head_dim"] | None:
    """Cosines and then sines of each token's angles, if they need no gradient; None otherwise. For calls without
    tracers, modes and transforms.

    Args:
        given: a model's ``position_embeddings``: cosines and sines, ``[batch | 1, len, head_dim]`` each, whose second
            halves are to be their first ones.
        dtype: of queries and keys.

    Returns:
        float32 ``[len, head_dim]``, or ``[batch * len, head_dim]`` where sequences differ, as behind padding.
    """
    if not isinstance(given, tuple) or len(given) != 2 or torch.is_autocast_enabled("cpu") or library() is None:
        return None
    cosine, sine = given
    if not _is_readable(cosine, dtype) or not _is_readable(sine, dtype) or cosine.shape != sine.shape:
        return None
    angles: Tensor = torch.ops.clearhead.token_angles.default(cosine.float(), sine.float())
    return angles if len(angles) else None


def fits(angles: Tensor, x: Float[Tensor, "batch len width"], head_dim: int) -> bool:
    """Whether the angles are those of tokens ``x`` and heads of ``head_dim`` channels."""
    return angles.shape[1] == head_dim and len(angles) in (x.shape[1], x.shape[0] * x.shape[1])


def _is_readable(given: Any, dtype: torch.dtype) -> bool:
    plain = type(given) is Tensor and given.is_cpu and given.dtype is dtype and not given.requires_grad
    return plain and given.dim() == 3 and given.shape[2] % 2 == 0
