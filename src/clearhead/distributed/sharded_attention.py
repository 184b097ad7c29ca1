"""Attention over a sequence that is sharded over the ranks of a process group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal, TypeAlias

from torch import Tensor
from torch.distributed import ProcessGroup

from clearhead.arguments import repr_of
from clearhead.choices import is_invariant, refuse_if_invariant
from clearhead.distributed.call import Request, ShardedCall
from clearhead.distributed.gather import gather_attention, observe_gathered
from clearhead.distributed.heads import observe_by_heads
from clearhead.distributed.layout import LayoutName, ShardLayout
from clearhead.distributed.ring import ring_attention
from clearhead.errors import UnsupportedError
from clearhead.masks import Mask
from clearhead.scores import ScoreRule
from clearhead.shapes import Float
from clearhead.statistics import Observation, Want, check_want

__all__ = ["METHODS", "Method", "attention", "observe_attention"]

Method: TypeAlias = Literal["auto", "gather", "ring", "heads"]
METHODS: Final = ("auto", "gather", "ring", "heads")
#: Statistics that every method computes.
_ROWS: Final = frozenset({"lse"})


def attention(
    query: Float[Tensor, "*leading q_part head_dim"],
    key: Float[Tensor, "*kv_leading k_part head_dim"],
    value: Float[Tensor, "*kv_leading k_part value_dim"],
    *,
    group: ProcessGroup | None = None,
    layout: LayoutName | ShardLayout = "contiguous",
    method: Method = "auto",
    mask: Mask | None = None,
    scores: ScoreRule | Iterable[ScoreRule] | None = (),
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
) -> Float[Tensor, "*leading q_part value_dim"]:
    """Exact attention over a sequence whose tokens are on several ranks.

    ``softmax(rules(scale * query @ key^T) where the mask allows) @ value``, over the keys of all ranks, for the rank's
    queries. Masks, rules and dropout are those of ``ch.attention`` on the whole sequence and read absolute positions;
    gradients are this rank's part of that call's. Every rank of the group makes the call, with equal arguments but for
    the tensors.

    Args:
        query: this rank's part ``[batch, heads, len / ranks, head_dim]``; leading axes may be missing.
        key: this rank's part ``[batch, kv_heads, len / ranks, head_dim]``; ``kv_heads`` divides ``heads``.
        value: this rank's part ``[batch, kv_heads, len / ranks, value_dim]``.
        group: the process group; by default all ranks.
        layout: which tokens the ranks have: ``"contiguous"``; ``"zigzag"``, which balances causal masks; or a
            ``ShardLayout``. ``shard`` cuts a tensor so.
        method: ``"gather"`` gathers needed keys and values on each rank and gives the bits of one process. ``"ring"``
            passes keys and values that are needed from rank to rank, so that a rank has those of two ranks at a time.
            ``"heads"`` gives each rank some heads of the whole sequence, by two all-to-all exchanges; it needs at least
            as many key heads as ranks. ``"auto"`` takes ``"heads"`` where it can, else ``"ring"``.
        mask: the mask of the whole sequence; None allows all keys.
        scores: score rules of the whole sequence, applied to scaled scores in order, before the mask. The gradient of
            a rule's tensor is summed over ranks, on every rank.
        scale: factor on ``query @ key^T``; by default ``1 / sqrt(head_dim)``.
        dropout: probability of dropping a weight; the same weights are dropped whatever the number of ranks.
        seed: seed of the dropout; by default rank 0 draws it from torch's generator.

    Returns:
        This rank's part of the output, ``[batch, heads, len / ranks, value_dim]``.

    Raises:
        ShapeError: shapes or parts' lengths do not fit, or the ranks' arguments differ. Every rank raises.
        MaskError: the mask does not fit the whole sequence.
        UnsupportedError: no backend can run the call, the method cannot, or another rank raised.

    Cost: each rank computes the scores of its queries; with ``"heads"``, of its heads. With ``n`` tokens per rank,
    ``"gather"`` and ``"ring"`` send the keys and values that are needed, at most ``(ranks - 1) * n``; ``"gather"`` has
    memory for all, ``"ring"`` for ``2 * n`` besides its own. ``"heads"`` sends ``n * (ranks - 1) / ranks`` queries,
    keys, values and outputs. Backward of ``"gather"`` computes seven matrix products in place of five.

    Papers: Liu et al. 2023, "Ring attention with blockwise transformers", section 3; Jacobs et al. 2023, "DeepSpeed
    Ulysses", section 3.

    >>> import torch, clearhead as ch
    >>> def part(x):  # on each rank of torchrun
    ...     q = ch.distributed.shard(x, layout="zigzag")
    ...     return ch.distributed.attention(q, q, q, mask=ch.Causal(), layout="zigzag")
    """
    options = {"mask": mask, "scores": _rules(scores), "scale": scale, "dropout": dropout, "seed": seed}
    tensors = (query, key, value)
    request = Request("distributed.attention", tensors, group, layout, method, Want(), options)
    output = _observed(request).output
    return output.reshape(output.shape[4 - query.ndim :])


def observe_attention(
    query: Float[Tensor, "*leading q_part head_dim"],
    key: Float[Tensor, "*kv_leading k_part head_dim"],
    value: Float[Tensor, "*kv_leading k_part value_dim"],
    *,
    want: Want,
    group: ProcessGroup | None = None,
    layout: LayoutName | ShardLayout = "contiguous",
    method: Method = "auto",
    mask: Mask | None = None,
    scores: ScoreRule | Iterable[ScoreRule] | None = (),
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
) -> Observation:
    """Attention over a sharded sequence, and statistics of its weights over the keys of all ranks.

    Statistics are those of ``ch.observe_attention`` on the whole sequence. An axis of queries or keys holds this rank's
    part, in the order of ``layout``; other axes are whole: every rank has the whole heatmap. Indices of keys in
    ``top_indices`` and of queries in ``want.rows`` are those of the whole sequence.

    Args:
        query: this rank's part ``[batch, heads, len / ranks, head_dim]``; leading axes may be missing.
        key: this rank's part ``[batch, kv_heads, len / ranks, head_dim]``.
        value: this rank's part ``[batch, kv_heads, len / ranks, value_dim]``.
        want: the statistics, as for ``ch.observe_attention``; ``row_weights`` is this rank's part
            ``[batch | 1, heads | 1, n, len / ranks]``.
        group: the process group; by default all ranks.
        layout: which tokens the ranks have: ``"contiguous"``, ``"zigzag"`` or a ``ShardLayout``.
        method: ``"gather"`` and ``"heads"`` compute every statistic, the second with gradients; ``"ring"`` computes
            ``lse`` alone. ``"auto"`` takes ``"heads"`` if there are as many key heads as ranks, else ``"ring"`` or
            ``"gather"``.
        mask: the mask of the whole sequence; None allows all keys.
        scores: score rules of the whole sequence.
        scale: factor on ``query @ key^T``; by default ``1 / sqrt(head_dim)``.
        dropout: probability of dropping a weight; statistics describe the weights before dropout.
        seed: seed of the dropout; by default rank 0 draws it.

    Returns:
        An ``Observation`` with this rank's part of the output and of the statistics.

    Raises:
        ShapeError: shapes or parts' lengths do not fit, a field of ``want`` is out of range, or the ranks' arguments
            differ. Every rank raises.
        MaskError: the mask does not fit the whole sequence.
        UnsupportedError: no backend or method can compute the call, or another rank raised.

    Cost: that of ``ch.distributed.attention`` and up to a second pass over the scores. With ``"gather"``, statistics
    that are sums over queries are computed on each rank for the whole sequence.

    >>> import torch, clearhead as ch
    >>> def entropy(q):  # on each rank of torchrun, of its part
    ...     return ch.distributed.observe_attention(q, q, q, want=ch.Want(entropy=True)).entropy
    """
    options = {"mask": mask, "scores": _rules(scores), "scale": scale, "dropout": dropout, "seed": seed}
    name = "distributed.observe_attention"
    check_want(name, want)
    request = Request(name, (query, key, value), group, layout, method, want, options)
    return _observed(request).with_leading(query.ndim - 2)


def _observed(request: Request) -> Observation:
    """A call's output and statistics, with axes batch and heads."""
    call = ShardedCall.of(request)
    method = _method(call, request)
    tensors = [tensor if tensor.ndim == 4 else tensor[(None,) * (4 - tensor.ndim)] for tensor in request.tensors]
    if method == "heads":
        return observe_by_heads(call, *tensors)
    if call.want.names <= _ROWS:
        output, lse = (gather_attention if method == "gather" else ring_attention)(call, *tensors)
        return Observation(output=output, lse=lse if call.want.lse else None)
    return observe_gathered(call, *tensors)


def _rules(scores: Any) -> Any:
    """Rules that may be read more than once."""
    return tuple(scores) if isinstance(scores, Iterable) and not isinstance(scores, (Tensor, ScoreRule)) else scores


def _method(call: ShardedCall, request: Request) -> str:
    """The method to run, which depends on nothing but what the ranks agree on."""
    whole, ranks, method = call.whole, call.exchange.ranks, request.method
    enough_heads, others = whole.num_kv_heads >= ranks, call.want.names - _ROWS
    if method not in METHODS:
        reason, then = f"be one of {', '.join(map(repr, METHODS))}", "'auto' chooses."
    elif method == "auto":
        method = "heads" if enough_heads else "gather" if others or is_invariant() else "ring"
        reason = ""
    elif method == "heads" and not enough_heads:
        reason, then = f"be one for {whole.num_kv_heads} key heads on {ranks} ranks", "Use method='ring'."
    elif method == "ring" and others:
        reason, then = f"be one that computes {', '.join(sorted(others))}", "Use method='heads' or 'gather'."
    else:
        reason = ""
    if not reason and method == "ring":
        refuse_if_invariant(
            request.function, "method", got="'ring', whose sums depend on the ranks", then="Use 'gather' or 'heads'."
        )
    if not reason and method == "gather" and others and whole.needs_gradient:
        reason, then = "be one that differentiates statistics", "Use method='heads', or torch.no_grad()."
    if reason:
        raise UnsupportedError.about(request.function, "method", must=reason, got=repr_of(method), then=then)
    return method
