"""The functions that FlexAttention's users write: score_mods and mask_mods of scalars, written for these tests.

They are the kinds of pytorch-labs' attention-gym, and combinations of them. A variant is made from learned tensors, so
that a test can make it a second time in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, or_masks

__all__ = ["BATCH", "HEADS", "LENGTH", "VARIANTS", "Variant", "by_intervals", "dense_mask", "each_place", "learned"]

BATCH, HEADS, LENGTH, WIDTH, PAGE = 2, 4, 48, 8, 4
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Variant:
    """Functions, and where they run.

    Attributes:
        score: makes a score_mod from learned tensors.
        mask: a mask_mod.
        native: whether the CPU kernels run it.
        mask_of_places, score_of_places: the same for flat tensors of places, if the function takes only scalars.
    """

    score: Callable[[dict[str, Tensor]], ScoreMod] | None = None
    mask: MaskMod | None = None
    native: bool = True
    mask_of_places: MaskMod | None = None
    score_of_places: Callable[[dict[str, Tensor]], ScoreMod] | None = None


def learned(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The tensors that score_mods close over."""
    generator = torch.Generator().manual_seed(7)
    shapes = {
        "slopes": (HEADS,),
        "distances": (HEADS, 2 * LENGTH - 1),
        "buckets": (16, HEADS),
        "plane": (HEADS, 2 * (LENGTH // WIDTH) - 1, 2 * WIDTH - 1),
        "pairs": (BATCH, HEADS, LENGTH, LENGTH),
        "rotated": (2, BATCH, HEADS, LENGTH, 6),
        "one": (),
    }
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: tensor.to(dtype).requires_grad_() for name, tensor in drawn.items()}


# ---- tables that mask_mods look up -----------------------------------------------------------------------------------

DOCUMENT = torch.tensor([[0] * 11 + [1] * 20 + [2] * 17, [0] * 30 + [1] * 1 + [2] * 17])
STARTS = torch.tensor([[0, 11, 31], [0, 30, 31]])
LENGTHS = torch.tensor([48, 37])
WINDOWS = torch.tensor([1, 5, 12, 48])
PREFIX = torch.tensor([9, 0])
#: The page of a cache that holds each logical page, and the logical page of each physical one; -1: not this sequence.
LOGICAL = torch.tensor([[2, 0, 1, 5, 3, 4, 8, 7, 6, 11, 10, 9], [1, -1, 0, -1, 3, 2, -1, 4, 5, -1, 7, 6]])
RELATION = torch.rand(HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) > 0.4
IMAGES = torch.tensor([0] * 6 + [1] * 10 + [0] * 12 + [2] * 9 + [0] * 11)


# ---- mask_mods -------------------------------------------------------------------------------------------------------


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def sliding_window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= 7)


def prefix(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx < PREFIX[b]


def same_document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return DOCUMENT[b, q_idx] == DOCUMENT[b, kv_idx]


def jagged(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """A window within documents, at positions counted from the start of each."""
    q_local = q_idx - STARTS[b, DOCUMENT[b, q_idx]]
    kv_local = kv_idx - STARTS[b, DOCUMENT[b, kv_idx]]
    return same_document(b, h, q_idx, kv_idx) & sliding_window(b, h, q_local, kv_local)


def neighborhood(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """NATTEN on a plane: the nearest 3 x 3 keys, of which those at the border are shifted inwards."""
    rows = LENGTH // WIDTH
    middle_row = (q_idx // WIDTH).clamp(1, rows - 2)
    middle_column = (q_idx % WIDTH).clamp(1, WIDTH - 2)
    near_rows = (middle_row - kv_idx // WIDTH).abs() <= 1
    return near_rows & ((middle_column - kv_idx % WIDTH).abs() <= 1)


def dilated(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    distance = (q_idx - kv_idx).abs()
    return (distance <= 12) & (distance % 3 == 0)


def transposed(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Causal in column-major order of a plane."""

    def order(index: Tensor) -> Tensor:
        return index % WIDTH * (LENGTH // WIDTH) + index // WIDTH

    return order(q_idx) >= order(kv_idx)


def paged(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Causal over keys in pages, in the order in which a cache stores them."""
    page = LOGICAL[b, kv_idx // PAGE]
    return torch.where(page >= 0, q_idx >= page * PAGE + kv_idx % PAGE, False)


def per_head_window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx).abs() < WINDOWS[h]


def padding(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx < LENGTHS[b]


def nested_lookup(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Looks up axis by axis, which only a function of scalars can."""
    return RELATION[h][q_idx][kv_idx]


def images(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Text is causal; the tokens of an image attend to each other both ways."""
    of_image = (IMAGES[q_idx] == IMAGES[kv_idx]) & (IMAGES[q_idx] > 0)
    return of_image | causal(b, h, q_idx, kv_idx)


def no_keys_for_some(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx > kv_idx) & (q_idx % 5 != 3)


# ---- score_mods ------------------------------------------------------------------------------------------------------


def _buckets(distance: Tensor) -> Tensor:
    """T5's buckets of ``kv_idx - q_idx``: exact ones, then ones whose size grows, on each side."""
    side, exact, farthest = 8, 4, 32
    far = exact + (torch.log(distance.abs().float() / exact) / math.log(farthest / exact) * (side - exact)).long()
    far = torch.minimum(far, torch.full_like(far, side - 1))
    near = torch.where(distance.abs() < exact, distance.abs(), far)
    return torch.where(distance > 0, side, 0) + near


def _checkerboard(given: dict[str, Tensor]) -> ScoreMod:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        score = torch.where((kv_idx - q_idx).abs() % 2 == 1, score * 0.5, score)
        return torch.where((kv_idx - q_idx).abs() % 2 == 0, score * given["one"], score)

    return score_mod


def _latent(given: dict[str, Tensor]) -> ScoreMod:
    """Multi-head latent attention: the part of the score that comes from rotated channels."""
    query, key = given["rotated"]

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + (query[b, h, q_idx] * key[b, h, kv_idx]).sum(dim=-1)

    return score_mod


#: mask_mods that are read for every place; the others become intervals of keys.
_BY_PLACE = (jagged, neighborhood, dilated, transposed, paged, nested_lookup)


def by_intervals(mask: MaskMod | None) -> bool:
    """Whether a mask_mod becomes intervals of keys."""
    return mask not in _BY_PLACE


VARIANTS: dict[str, Variant] = {
    "nothing": Variant(),
    "causal": Variant(mask=causal),
    "sliding window": Variant(mask=sliding_window),
    "prefix LM": Variant(mask=or_masks(prefix, causal)),
    "documents": Variant(mask=same_document),
    "causal documents": Variant(mask=and_masks(same_document, causal)),
    "jagged windows": Variant(mask=jagged),
    "2-D neighborhood": Variant(mask=neighborhood),
    "dilated": Variant(mask=dilated),
    "transposed": Variant(mask=transposed),
    "paged": Variant(mask=paged),
    "per-head window": Variant(mask=per_head_window),
    "padding": Variant(mask=and_masks(causal, padding)),
    "nested look-ups": Variant(
        mask=nested_lookup, mask_of_places=lambda b, h, q, k: RELATION[h, q, k]
    ),
    "images in text": Variant(mask=images),
    "rows without keys": Variant(mask=no_keys_for_some),
    "alibi": Variant(lambda given: lambda s, b, h, q, k: s + (k - q) * given["slopes"][h]),
    "alibi, computed slopes": Variant(
        lambda given: lambda s, b, h, q, k: s + torch.exp2(-((h + 1) * 8.0 / HEADS)) * (k - q) * given["one"], causal
    ),
    "soft cap": Variant(lambda given: lambda s, b, h, q, k: 5.0 * torch.tanh(s / 5.0), causal),
    "soft cap of alibi": Variant(
        lambda given: lambda s, b, h, q, k: 5.0 * torch.tanh((s + (k - q) * given["slopes"][h]) / 5.0), native=False
    ),
    "alibi of a soft cap": Variant(
        lambda given: lambda s, b, h, q, k: 5.0 * torch.tanh(s / 5.0) + (k - q) * given["slopes"][h], sliding_window
    ),
    "relative positions": Variant(lambda given: lambda s, b, h, q, k: s + given["one"] * (q - k)),
    "relative table": Variant(lambda given: lambda s, b, h, q, k: s + given["distances"][h, q - k + LENGTH - 1]),
    "relative table, axis by axis": Variant(
        lambda given: lambda s, b, h, q, k: s + given["distances"][h][q - k + LENGTH - 1], causal, native=False,
        score_of_places=lambda given: lambda s, b, h, q, k: s + given["distances"][h, q - k + LENGTH - 1],
    ),
    "T5": Variant(lambda given: lambda s, b, h, q, k: s + given["buckets"][_buckets(k - q), h], padding),
    "2-D relative": Variant(
        lambda given: lambda s, b, h, q, k: s
        + given["plane"][h, q // WIDTH - k // WIDTH + LENGTH // WIDTH - 1, q % WIDTH - k % WIDTH + WIDTH - 1],
        neighborhood,
    ),
    "bias of pairs": Variant(lambda given: lambda s, b, h, q, k: s + given["pairs"][b, h, q, k], same_document),
    "temperature": Variant(lambda given: lambda s, b, h, q, k: s * given["slopes"][h].exp(), causal, native=False),
    "checkerboard": Variant(_checkerboard, native=False),
    "squared ReLU": Variant(lambda given: lambda s, b, h, q, k: torch.relu(s) ** 2 * given["one"], native=False),
    "latent": Variant(_latent, causal, native=False),
    "causal as a score": Variant(
        lambda given: lambda s, b, h, q, k: torch.where(q >= k, s + given["slopes"][h] * (q - k), -float("inf"))
    ),
    "nothing but -inf in some rows": Variant(
        lambda given: lambda s, b, h, q, k: torch.where((q > k) & (q % 5 != 3), s * given["one"], -float("inf")),
        native=False,
    ),
}  # fmt: skip


def dense_mask(variant: Variant) -> Tensor:
    """The mask at every place."""
    if variant.mask is None:
        return torch.ones(BATCH, HEADS, LENGTH, LENGTH, dtype=torch.bool)
    return each_place(variant.mask_of_places or variant.mask)


def each_place(function: Callable[..., Tensor], *first: Tensor) -> Tensor:
    """A function at every place, ``[batch, heads, length, length]``, called on flat tensors of all places.

    ``first`` are arguments before the indices.
    """
    grid = torch.meshgrid(*(torch.arange(size) for size in (BATCH, HEADS, LENGTH, LENGTH)), indexing="ij")
    flat = function(*(argument.flatten() for argument in (*first, *grid)))
    assert flat.shape == (grid[0].numel(),)
    return flat.view(BATCH, HEADS, LENGTH, LENGTH)
