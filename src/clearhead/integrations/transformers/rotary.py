"""Rotary positions as transformers' models hand them to each layer: cosines and sines of a call's tokens."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor

from clearhead.shapes import Float
from clearhead.torch_private import version_of

__all__ = ["angles_of", "fits"]


@dataclass(frozen=True)
class _LastAngles:
    """Angles, None if they cannot be read, and the tensors that they were made from."""

    cosine: ref[Tensor]
    sine: ref[Tensor]
    versions: tuple[int, int]
    angles: Tensor | None


_LAST: Final = threading.local()
#: Layers with full and with windowed attention may be given different angles.
_KINDS: Final = 2


def angles_of(given: Any, dtype: torch.dtype) -> Float[Tensor, "_rows head_dim"] | None:
    """Cosines and then sines of each token's angles, if they need no gradient; None otherwise. All layers of a kind
    are given the same two tensors, which are read once. For calls without tracers, modes and transforms.

    Args:
        given: a model's ``position_embeddings``: cosines and sines, ``[batch | 1, len, head_dim]`` each, whose second
            halves are to be their first ones.
        dtype: of queries and keys.

    Returns:
        float32 ``[len, head_dim]``, or ``[batch * len, head_dim]`` where sequences differ, as behind padding.
    """
    if not isinstance(given, tuple) or len(given) != 2 or torch.is_autocast_enabled("cpu"):
        return None
    cosine, sine = given
    if type(cosine) is not Tensor or type(sine) is not Tensor or cosine.dtype is not dtype:
        return None
    last: tuple[_LastAngles, ...] = getattr(_LAST, "entries", ())
    versions = version_of(cosine), version_of(sine)
    for entry in last:
        if entry.cosine() is cosine and entry.sine() is sine and entry.versions == versions:
            return entry.angles
    angles = _made(cosine, sine)
    _LAST.entries = (_LastAngles(ref(cosine), ref(sine), versions, angles), *last[: _KINDS - 1])
    return angles


def fits(angles: Tensor, x: Float[Tensor, "batch len width"], head_dim: int) -> bool:
    """Whether the angles are those of tokens ``x`` and heads of ``head_dim`` channels."""
    return angles.shape[1] == head_dim and len(angles) in (x.shape[1], x.shape[0] * x.shape[1])


def _made(cosine: Tensor, sine: Tensor) -> Tensor | None:
    if cosine.dim() != 3 or cosine.shape != sine.shape or cosine.shape[-1] % 2 or 0 in cosine.shape:
        return None
    if not cosine.is_cpu or not sine.is_cpu or cosine.requires_grad or sine.requires_grad:
        return None
    # What is made in inference mode could not be part of a gradient later.
    with torch.inference_mode(False):
        first, second = torch.cat((cosine, sine), -1).view(*cosine.shape[:2], 2, 2, -1).unbind(-2)
        if not torch.equal(first, second):
            return None
        if len(first) > 1 and torch.equal(first, first[:1].expand_as(first)):
            first = first[:1]
        return first.reshape(-1, cosine.shape[-1]).float()
