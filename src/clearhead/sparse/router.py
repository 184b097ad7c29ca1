"""A router: chooses the blocks of keys that each block of queries attends to, by pooled scores."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.arguments import flag, whole
from clearhead.backends.containment import without_autocast
from clearhead.choices import refuse_if_invariant
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
    """A mask under which each block of queries attends to its own block of keys and to the blocks of largest score.

    The score of a block of keys is ``q @ mean_j key_j``, where ``q`` represents the block of queries. A block of
    queries attends to ``keep`` blocks, which always include its own and the ``first`` ones.

    Without ``causal``, ``q`` is the mean of the block's queries. With ``causal``, ``q`` is the block's *first* query,
    only whole blocks before its own are candidates, and within its own block a query attends to no later key. Later
    tokens therefore cannot influence the choice. (With a mean over the block, its later queries would choose for
    earlier ones.)

    For decoding, call ``routed`` when a block begins, with its first query and all keys so far, and use that mask for
    the block's other tokens: the outputs equal those of the whole sequence at once.

    The choice has no gradient: keys get gradients through the scores of the chosen blocks, as in the papers.

    Args:
        query: ``[batch, heads, q_len, head_dim]``, the query of the attention call; leading axes may be missing.
        key: ``[batch, kv_heads, k_len, head_dim]``; each query head chooses separately.
        keep: number of blocks that a block of queries attends to, including its own; all if there are fewer.
        size: tokens in a block; the last one may be shorter.
        causal: whether later keys are forbidden; the last query is then at the position of the last key.
        first: number of first blocks that are always included in ``keep`` (they often contain an attention sink).
        query_offset: position of the first query, a multiple of ``size``.

    Returns:
        ``ch.Blocks``, or with ``causal`` ``ch.Causal() & ch.Blocks``, with one table for each batch entry and head, for
        ``mask=``; combine it with other masks by ``&``.

    Raises:
        ShapeError: a number is out of range, the offset is within a block, or there are keys after the last query with
            ``causal``.

    Cost: ``2 * q_blocks * k_blocks * head_dim`` operations per head for the choice; attention under the mask then takes
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
    # Validates the arguments; values are not needed.
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
            _NAME, "first", must=f"be less than keep {keep}", got=first, then="The query's own block is included too."
        )
    refuse_if_invariant(
        _NAME, "keep", got=f"{keep}: torch computes the scores", then="Use a fixed pattern, or ch.invariant(False)."
    )
    # Autocast would round the scores to 16 bits, and the choice would change.
    with torch.no_grad(), without_autocast(problem.query.device.type):
        table = _table(problem, keep, size, causal, first)
    return Causal() & Blocks(table, size) if causal else Blocks(table, size)


def _table(problem: Problem, keep: int, size: int, causal: bool, first: int) -> Tensor:
    """The chosen blocks, bool ``[batch, heads, q_blocks, k_blocks]``."""
    asked = problem.query[:, :, ::size] if causal else _means(problem.query, size)
    offered = _means(problem.key, size).repeat_interleave(problem.num_heads // problem.num_kv_heads, dim=1)
    scores = asked.to(offered.dtype) @ offered.transpose(-2, -1)
    before = problem.query_offset // size
    q_block = torch.arange(before, before + scores.shape[2], device=scores.device)[:, None]
    k_block = torch.arange(scores.shape[3], device=scores.device)
    # A block with a score of NaN ranks last.
    scores = scores.nan_to_num(nan=-torch.inf).masked_fill((k_block == q_block) | (k_block < first), torch.inf)
    if causal:
        scores = scores.masked_fill(k_block > q_block, -torch.inf)
    # topk may take any of equal scores, a stable sort takes the earlier one.
    best = scores.argsort(dim=-1, descending=True, stable=True)[..., :keep]
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
    if causal:
        chosen &= k_block <= q_block
    # Rows of a table count from position 0; those before the first query are not read.
    return F.pad(chosen, (0, 0, before, 0))


def _means(tensor: Tensor, size: int) -> Tensor:
    """The mean of each block of tokens, in float32 at least: ``[batch, heads, blocks, dim]``."""
    work = tensor.to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)
    length = work.shape[2]
    sums = F.pad(work, (0, 0, 0, -length % size)).unflatten(2, (-1, size)).sum(dim=3)
    counts = (length - torch.arange(0, length, size, device=work.device)).clamp(max=size)
    means: Tensor = sums / counts[:, None]
    return means
