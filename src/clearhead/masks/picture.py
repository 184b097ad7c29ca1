"""A mask as a small picture in text."""

from __future__ import annotations

from clearhead.masks.base import Mask, carried_sizes
from clearhead.masks.sequences import Documents, Padding
from clearhead.masks.tables import Blocks, Dense

__all__ = ["picture"]

_SIDE = 8
_LARGEST = 24


def picture(mask: Mask, q_len: int | None = None, k_len: int | None = None) -> str:
    """The mask over a few positions: one line per query, ``■`` where it may attend, ``·`` where not.

    Args:
        mask: any mask; of several batches or heads the first is drawn, and the picture says so.
        q_len: queries to draw; by default the mask's own size where it has one, else 8; 24 at most.
        k_len: keys to draw, likewise.

    >>> from clearhead import Causal, Window
    >>> print(picture(Causal() & Window(1), 3, 3))
    ■··
    ■■·
    ·■■
    """
    own_q, own_k = _own_size(mask)
    q_len, k_len = q_len or own_q, k_len or own_k
    dense = mask.dense(q_len, k_len, query_offset=0)
    batch, heads = carried_sizes(mask)
    corner = dense.reshape(-1, q_len, k_len)[0, :_LARGEST, :_LARGEST]
    lines = ["".join("■" if allowed else "·" for allowed in row) for row in corner.tolist()]
    if q_len > _LARGEST or k_len > _LARGEST:
        lines.append(f"(the first {corner.shape[0]} of {q_len} queries, {corner.shape[1]} of {k_len} keys)")
    if batch > 1 or heads > 1:
        lines.append(f"(the first of {batch} batch x {heads} heads)")
    return "\n".join(lines)


def _own_size(mask: Mask) -> tuple[int, int]:
    """The number of queries and keys that a mask's own tensors speak of, 8 by 8 where they speak of none."""
    match mask:
        case Documents():
            return mask.ids.shape[1], mask.ids.shape[1]
        case Padding():
            longest = max([_SIDE, *mask.lengths.tolist()])
            return _SIDE, longest
        case Dense():
            return mask.allowed.shape[2], mask.allowed.shape[3]
        case Blocks():
            return mask.table.shape[2] * mask.size, mask.table.shape[3] * mask.size
    own = [_own_size(part) for name in mask.fields if isinstance(part := getattr(mask, name), Mask)]
    fixed = [size for size in own if size != (_SIDE, _SIDE)]
    return fixed[0] if fixed else (_SIDE, _SIDE)
