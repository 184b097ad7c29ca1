"""The elements that dropout drops: a pure function of the seed and the place, equal on every backend.

Philox4x32-7 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3) generates 16 random bits
for each place of a row. The key is the seed. Each group of 64 columns uses 8 counters: the first word of a counter is
its number, the other three identify the row. For attention weights the row is ``(q_pos, head, batch)`` and the column
``k_pos``. A weight is dropped if its bits are below ``p * 2**16``, rounded to the nearest whole number.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from clearhead.shapes import Bool, Float, Int

__all__ = ["LEVELS", "bits", "keep_mask", "keep_scale", "philox"]

#: Probabilities are rounded to multiples of 1 / LEVELS.
LEVELS: Final = 2**16

_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_WORD: Final = 0xFFFFFFFF
#: Seven rounds pass the known statistical tests; the customary ten add a margin.
_ROUNDS: Final = 7
#: Columns of a group, and the counters that they share.
_COLUMNS: Final = 64
_COUNTERS: Final = 8


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words for each counter of four 32-bit words, as int64 tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _WORD, seed >> 32
    for _ in range(_ROUNDS):
        # The product wraps in int64; its low 64 bits are right, so both halves are.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> 32 & _WORD) ^ c1 ^ k0,
            second & _WORD,
            (first >> 32 & _WORD) ^ c3 ^ k1,
            first & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def bits(
    seed: int, group: Int[Tensor, "*batch groups"], row: tuple[Tensor, Tensor, Tensor]
) -> Int[Tensor, "*batch columns"]:
    """The 16 random bits of each column of some groups of 64 columns, one group after the other.

    Column ``64 g + 32 p + 4 j + h`` gets bits ``[16 h, 16 h + 16)`` of a 64-bit number, whose lower word is word
    ``2 p + 1`` of the counter ``(8 g + j, *row)`` and whose upper word is word ``2 p``.

    Args:
        seed: below ``2**64``.
        group: the numbers of the groups.
        row: three words that identify the row, of shapes that broadcast against that of ``group``.
    """
    counter = (_COUNTERS * group)[..., None] + torch.arange(_COUNTERS, device=group.device)
    one, two, three = (word[..., None] & _WORD for word in row)
    words = philox((counter & _WORD, one, two, three), seed)
    # The four quarters of the first pair of words, the lowest first, then those of the second pair.
    quarters = torch.stack([words[at] >> by & LEVELS - 1 for at in (1, 0, 3, 2) for by in (0, 16)], -1)
    columns: Tensor = quarters.unflatten(-1, (2, 4)).movedim(-2, -3).flatten(-4)
    return columns


def keep_mask(
    seed: int,
    probability: float,
    batch: Int[Tensor, "b 1 1 1"],
    head: Int[Tensor, "1 heads 1 1"],
    q_pos: Int[Tensor, "b 1 q_len 1"],
    k_pos: Int[Tensor, "b 1 1 k_len"],
) -> Bool[Tensor, "batch heads q_len k_len"]:
    """True where a weight is not dropped; ``k_pos`` must be consecutive along its last axis, except for padding."""
    first = k_pos[..., :1] // _COLUMNS
    group = first + torch.arange(k_pos.shape[-1] // _COLUMNS + 2, device=k_pos.device)
    drawn = bits(seed, group, (q_pos, head, batch))
    # Padding repeats an earlier position; its weight is 0, so its bits do not matter.
    places = (k_pos - _COLUMNS * first).clamp(0, drawn.shape[-1] - 1).expand(*drawn.shape[:-1], -1)
    return drawn.gather(-1, places) >= min(int(probability * LEVELS + 0.5), LEVELS - 1)


def keep_scale(
    seed: int, probability: float, indices: tuple[Tensor, Tensor, Tensor, Tensor], dtype: torch.dtype
) -> Float[Tensor, "batch heads q_len k_len"]:
    """The factor on each weight: 0 if it is dropped, else ``1 / (1 - probability)``."""
    return keep_mask(seed, probability, *indices).to(dtype) / (1.0 - probability)
