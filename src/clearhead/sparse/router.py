"""A router: which blocks of keys a block of queries attends to, chosen by their pooled scores."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.arguments import flag, whole
from clearhead.backends.containment import without_autocast
from clearhead.errors import ShapeError
from clearhead.masks import Blocks, Causal, Mask
from clearhead.problem import Problem
from clearhead.shapes import Float

__all__ = ["routed"]

_NAME = "routed"


def routed(
    query: Float[Tensor, "*leading q_len head_dim"],
    key: Float[Tensor, "*kv_leading k_len head_dim"],
    *,
    keep: int,
    size: int = 64,
    causal: bool = True,
    first: int = 0,
    query_offset: int = 0,
) -> Mask:
    """The mask under which each block of queries attends to its own block of keys and to the best others.

    A block of keys is its mean ``mean_j key_j``; a block of queries is ``q``, and it keeps the blocks with the largest
    ``q @ mean_j key_j``: ``keep`` of them, its own and the ``first`` ones always among them.

    Without ``causal``, ``q`` is the mean of the block's queries. With it, ``q`` is the block's *first* query, only
    whole blocks before its own are chosen from, and within its own block a query sees no later key. So whatever a
    query attends to was decided by tokens that it may see: changing a token changes nothing before it, the choice of
    blocks included. (A mean over the block would let a block's later queries choose for its earlier ones.)

    To decode, choose when a block begins, with its first query and all keys so far, and keep that mask for the block's
    other tokens: the numbers are those of the whole sequence at once.

    Choosing has no gradient: keys are trained through the scores of the blocks that were chosen, as in the papers.

    Args:
        query: ``[batch, heads, q_len, head_dim]``, as ``attention`` will get it; leading axes may be missing.
        key: ``[batch, kv_heads, k_len, head_dim]``; each query head chooses for itself.
        keep: how many blocks a block of queries attends to, its own included; all where there are fewer.
        size: tokens in a block; the last may be shorter.
        causal: whether later keys are forbidden. The last query then stands beside the last key.
        first: how many of the first blocks are kept always, out of ``keep`` (they often hold attention's sink).
        query_offset: position of the first query, where a block begins: a multiple of ``size``.

    Returns:
        ``ch.Blocks``, or with ``causal`` ``ch.Causal() & ch.Blocks``, one table for each batch and head. Give it as
        ``mask=``; combine it with others by ``&``.

    Raises:
        ShapeError: a number out of range, an offset within a block, or keys after the last query under ``causal``.

    Cost: ``2 * q_blocks * k_blocks * head_dim`` operations a head for choosing; attention under the mask then takes
    ``q_len * keep * size`` scores.

    Papers: Lu et al. 2025, "MoBA", section 2.2 (mean-pooled keys, own block always; there each token chooses); Yuan et
    al. 2025, "Native sparse attention", sections 3.3.2 (blocks chosen by scores of compressed keys) and 4.1 (first and
    nearest blocks always).

    >>> import torch
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]).repeat_interleave(2, dim=0)
    >>> print(routed(x, x, keep=2, size=2).picture(8, 8))
    ■·······
    ■■······
    ■■■·····
    ■■■■····
    ■■··■···
    ■■··■■··
    ··■■··■·
    ··■■··■■
    """
    # Values take no part; a problem checks the rest.
    problem = Problem.of(_NAME, query, key, key, query_offset=query_offset)
    keep, size = whole(_NAME, "keep", keep, low=1), whole(_NAME, "size", size, low=1)
    first, causal = whole(_NAME, "first", first, low=0), flag(_NAME, "causal", causal)
    query_offset = whole(_NAME, "query_offset", query_offset, low=0)
    if query_offset % size:
        raise ShapeError.about(
            _NAME,
            "query_offset",
            must=f"be a multiple of size {size}",
            got=query_offset,
            then="Within a block, use the mask that was chosen where it began.",
        )
    if causal and query_offset + problem.q_len != problem.k_len:
        raise ShapeError.about(
            _NAME,
            "key",
            must=f"end with the last query, at length {query_offset + problem.q_len}, when causal",
            got=f"length {problem.k_len}",
            then="Give query_offset, or pass causal=False.",
        )
    if first >= keep:
        raise ShapeError.about(
            _NAME, "first", must=f"be less than keep {keep}", got=first, then="The own block is kept besides."
        )
    # Autocast would round the scores to 16 bits, and choose other blocks.
    with torch.no_grad(), without_autocast(problem.query.device.type):
        table = _table(problem, keep, size, causal, first)
    return Causal() & Blocks(table, size) if causal else Blocks(table, size)


def _table(problem: Problem, keep: int, size: int, causal: bool, first: int) -> Tensor:
    """bool ``[batch, heads, q_blocks, k_blocks]``."""
    asked = problem.query[:, :, ::size] if causal else _means(problem.query, size)
    offered = _means(problem.key, size).repeat_interleave(problem.num_heads // problem.num_kv_heads, dim=1)
    scores = asked.to(offered.dtype) @ offered.transpose(-2, -1)
    before = problem.query_offset // size
    q_block = torch.arange(before, before + scores.shape[2], device=scores.device)[:, None]
    k_block = torch.arange(scores.shape[3], device=scores.device)
    # A NaN is no reason to be chosen, nor to push another block out.
    scores = scores.nan_to_num(nan=-torch.inf).masked_fill((k_block == q_block) | (k_block < first), torch.inf)
    if causal:
        scores = scores.masked_fill(k_block > q_block, -torch.inf)
    # topk may take any of equal scores, a sort takes the earlier one.
    best = scores.argsort(dim=-1, descending=True, stable=True)[..., :keep]
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
    if causal:
        chosen &= k_block <= q_block
    # Rows of a table count from position 0; nobody asks for those before the call.
    return F.pad(chosen, (0, 0, before, 0))


def _means(tensor: Tensor, size: int) -> Tensor:
    """The mean of each block of tokens, in float32 at least: ``[batch, heads, blocks, dim]``."""
    work = tensor.to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)
    length = work.shape[2]
    sums = F.pad(work, (0, 0, 0, -length % size)).unflatten(2, (-1, size)).sum(dim=3)
    counts = (length - torch.arange(0, length, size, device=work.device)).clamp(max=size)
    means: Tensor = sums / counts[:, None]
    return means
