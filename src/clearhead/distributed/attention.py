"""Attention over a sequence that is sharded over the ranks of a process group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal, TypeAlias

from torch import Tensor
from torch.distributed import ProcessGroup

from clearhead.arguments import repr_of
from clearhead.distributed.call import Call
from clearhead.distributed.gather import gather_attention
from clearhead.distributed.heads import observe_by_heads
from clearhead.distributed.layout import LayoutName, ShardLayout
from clearhead.distributed.ring import ring_attention
from clearhead.errors import UnsupportedError
from clearhead.masks import Mask
from clearhead.scores import ScoreRule
from clearhead.shapes import Float
from clearhead.statistics import Want

__all__ = ["METHODS", "Method", "attention", "observe_attention"]

Method: TypeAlias = Literal["auto", "gather", "ring", "heads"]
METHODS: Final = ("auto", "gather", "ring", "heads")
_NOTHING: Final = Want()


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

    Output and gradients are this rank's part of ``ch.attention(query, key, value)`` of the whole sequence. Masks, rules
    and dropout are those of the whole call and read absolute positions. Every rank of the group calls the function, with
    equal arguments but for the tensors.

    Args:
        query: this rank's part ``[batch, heads, len / ranks, head_dim]``; leading axes may be missing.
        key: this rank's part ``[batch, kv_heads, len / ranks, head_dim]``; ``kv_heads`` divides ``heads``.
        value: this rank's part ``[batch, kv_heads, len / ranks, value_dim]``.
        group: the process group; by default all ranks.
        layout: which tokens the ranks have: ``"contiguous"``; ``"zigzag"``, which balances causal masks; or a
            ``ShardLayout``. ``shard`` cuts a tensor so.
        method: ``"gather"`` gathers all keys and values on each rank and gives the bits of one process. ``"ring"``
            passes keys and values that are needed from rank to rank, so that a rank has those of two ranks at a time.
            ``"heads"`` gives each rank some heads of the whole sequence, by two all-to-all exchanges; it needs at least
            as many key heads as ranks. ``"auto"`` takes ``"heads"`` where it can, else ``"ring"``.
        mask: the mask of the whole sequence; None allows all keys.
        scores: score rules of the whole sequence, applied to scaled scores in order, before the mask. Each rank gets the
            sum over ranks as the gradient of a rule's tensor.
        scale: factor on ``query @ key^T``; by default ``1 / sqrt(head_dim)``.
        dropout: probability of dropping a weight; the same weights are dropped whatever the number of ranks.
        seed: seed of the dropout; by default rank 0 draws it from torch's generator.

    Returns:
        This rank's part of the output, ``[batch, heads, len / ranks, value_dim]``.

    Raises:
        ShapeError: shapes or parts' lengths do not fit, or the ranks' arguments differ. Every rank raises.
        MaskError: the mask does not fit the whole sequence.
        UnsupportedError: no backend can run the call, the method cannot, or another rank raised.

    Cost: each rank computes the scores of its queries (``"heads"``: of its heads). With ``n`` tokens of keys and values
    per rank, ``"gather"`` sends ``(ranks - 1) n`` tokens and holds ``ranks * n``; ``"ring"`` sends what is needed, at
    most as many, and holds ``2 n`` besides its own; ``"heads"`` sends ``n (ranks - 1) / ranks`` of query, key, value and
    output. Backward of ``"gather"`` computes twice as much.

    Papers: Liu et al. 2023, "Ring attention with blockwise transformers", section 3; Jacobs et al. 2023, "DeepSpeed
    Ulysses", section 3.

    >>> import torch, clearhead as ch
    >>> def part(x):  # on each rank of torchrun
    ...     q = ch.distributed.shard(x, layout="zigzag")
    ...     return ch.distributed.attention(q, q, q, mask=ch.Causal(), layout="zigzag")
    """
    options = {"mask": mask, "scores": _rules(scores), "scale": scale, "dropout": dropout, "seed": seed}
    name = "distributed.attention"
    tensors = (query, key, value)
    call = Call.of(name, tensors, group, layout, _checked(name, method), _NOTHING, **options)
    chosen = _method(name, call, method, _NOTHING)
    four = [_four_axes(tensor) for tensor in tensors]
    if chosen == "heads":
        output = observe_by_heads(call, _NOTHING, *four).output
    else:
        output, _ = (gather_attention if chosen == "gather" else ring_attention)(call, *four)
    return output.reshape(output.shape[4 - query.ndim :])


def _rules(scores: Any) -> Any:
    """Rules that may be read more than once."""
    return tuple(scores) if isinstance(scores, Iterable) and not isinstance(scores, (Tensor, ScoreRule)) else scores


def _four_axes(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 4 else tensor[(None,) * (4 - tensor.ndim)]


def _checked(function: str, method: object) -> str:
    """The method's name; what is no method at all is refused by every rank after they have met."""
    return method if isinstance(method, str) and method in METHODS else f"no method: {method!r}"


def _method(function: str, call: Call, method: str, want: Want) -> str:
    """The method to run, which depends on nothing but what the ranks agree on."""
    if method not in METHODS:
        raise UnsupportedError.about(
            function, "method", must=f"be one of {', '.join(map(repr, METHODS))}", got=repr_of(method),
            then="'auto' chooses.",
        )  # fmt: skip
    enough_heads = call.whole.num_kv_heads >= call.exchange.ranks
    if method == "auto":
        return "heads" if enough_heads else "ring" if want.names <= {"lse"} else "gather"
    if method == "heads" and not enough_heads:
        raise UnsupportedError.about(
            function, "method", must=f"be one for {call.whole.num_kv_heads} key heads on {call.exchange.ranks} ranks",
            got="'heads'", then="Use method='ring'.",
        )  # fmt: skip
    return method
