"""Which weights are dropped: a pure function of the seed and the place, the same on every backend.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3): the key is
the seed, the counter is (k_pos // 4, q_pos, head, batch), and word ``k_pos % 4`` of the result belongs to
the place. A weight is kept where its word is at least ``p * 2**32``.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from clearhead.shapes import Bool, Float, Int

__all__ = ["keep_scale", "kept", "philox"]

_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_WORD: Final = 0xFFFFFFFF
_ROUNDS: Final = 10


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


def kept(
    seed: int, probability: float, batch: Int[Tensor, "b 1 1 1"], head: Int[Tensor, "1 heads 1 1"],
    q_pos: Int[Tensor, "b 1 q_len 1"], k_pos: Int[Tensor, "b 1 1 k_len"],
) -> Bool[Tensor, "batch heads q_len k_len"]:  # fmt: skip
    """Where weights survive; ``k_pos`` must be consecutive along its last axis, but for padding."""
    first = k_pos[..., :1] // 4
    groups = (k_pos.shape[-1] + 3) // 4 + 1
    group = first + torch.arange(groups, device=k_pos.device)
    shape = torch.broadcast_shapes(batch.shape, head.shape, q_pos.shape, group.shape)
    counter = (group & _WORD, q_pos & _WORD, head & _WORD, batch & _WORD)
    words = torch.stack([word.expand(shape) for word in philox(counter, seed)], dim=-1).flatten(-2)
    # Padding repeats an earlier position; its weight is 0, so any word will do.
    places = (k_pos - 4 * first).clamp(0, words.shape[-1] - 1).expand(*shape[:-1], -1)
    return words.gather(-1, places) >= int(probability * 2**32)


def keep_scale(
    seed: int, probability: float, indices: tuple[Tensor, Tensor, Tensor, Tensor], dtype: torch.dtype
) -> Float[Tensor, "batch heads q_len k_len"]:
    """The factor on each weight: ``1 / (1 - probability)`` where it is kept, 0 where it is dropped."""
    return kept(seed, probability, *indices).to(dtype) / (1.0 - probability)
