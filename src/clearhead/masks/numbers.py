"""The numbers by which dropout of packed tokens draws under ``set_invariant(True)``."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.batch_part import number_of
from clearhead.choices import is_invariant
from clearhead.masks.base import Mask, conjuncts
from clearhead.masks.sequences import Documents
from clearhead.shapes import Int

__all__ = ["packed_numbers"]


def packed_numbers(mask: Mask | None) -> Int[Tensor, " total"] | None:
    """For each token that a ``Documents`` in ``mask`` packs, its sequence's ``id`` and its position in the sequence.

    Args:
        mask: any mask.

    Returns:
        Numbers as ``number_of`` gives them; None outside of the setting, and where no single row is packed.

    >>> from clearhead.invariance import invariant
    >>> with invariant():
    ...     numbers = packed_numbers(Documents(lengths=[2, 1]))
    >>> [divmod(number, 2**32) for number in numbers.tolist()]
    [(0, 0), (0, 1), (1, 0)]
    """
    if mask is None or not is_invariant() or torch.compiler.is_compiling():
        return None
    packing = next((part for part in conjuncts(mask) if isinstance(part, Documents)), None)
    if packing is None or packing.ids.shape[0] > 1:
        return None
    ids, (start, _) = packing.ids[0], packing.bounds()
    return number_of(ids, torch.arange(len(ids), device=ids.device) - start[0])
