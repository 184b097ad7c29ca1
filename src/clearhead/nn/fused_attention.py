"""Self-attention with its projections as one step of autograd: two stretches of kernels instead of a dozen calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from torch import Tensor

from clearhead.backends import native
from clearhead.backends.native_projection import lies_plainly
from clearhead.dispatch import choose
from clearhead.masks import Mask
from clearhead.nn import step
from clearhead.nn.attention_step import AttentionStep, by_head
from clearhead.nn.step import kept_step, learns, may_be_step, play
from clearhead.problem import Problem
from clearhead.projection import KINDS, Layer, are_plain, kernels_take
from clearhead.scores import ScoreRule
from clearhead.shapes import Float
from clearhead.statistics import Want
from clearhead.watch import watched

__all__ = ["again", "is_step", "problem_like", "self_attention"]

_FUNCTION = "attention"
_NOTHING = Want()
#: What options of calls that may recur are; others are for ``Problem`` to look at each time.
_SIMPLE: Final = (int, float, str, type(None))


def self_attention(
    x: Float[Tensor, "*batch len in"],
    sources: Sequence[Layer],
    last: Layer,
    *,
    num_heads: int,
    num_kv_heads: int,
    mask: Mask | None = None,
    scores: ScoreRule | Iterable[ScoreRule] = (),
    scale: float | None = None,
    dropout: float = 0.0,
    query_offset: int | None = None,
    backend: str = "auto",
) -> Float[Tensor, "*batch len out"] | None:
    """``attention`` of heads that are projected from one input, projected back: the same numbers in one step.

    ``concat_h(attention(x Wq_h, x Wk_h, x Wv_h)) Wo``

    Args:
        x: ``[batch, len, in]``.
        sources: the layers of queries, keys and values; or one that makes all three side by side.
        last: the layer that mixes the heads.
        num_heads: of queries.
        num_kv_heads: of keys and values.
        mask: as in ``attention``, and so are those that follow.
        scores: none whose tensors learn.
        scale: see there.
        dropout: see there; its seed is drawn as there.
        query_offset: see there.
        backend: see there.

    Returns:
        ``[batch, len, out]``; None where the CPU kernels are not what every part would use, or somebody looks at a
        part, for whoever asks to take them one by one.

    Raises:
        ShapeError, MaskError, UnsupportedError: as ``attention``.

    Cost: that of the parts. Kept for backward are ``x``, queries, keys, values, the heads' output, in 16 bits
    beyond 256 tokens in float32 too, and two numbers for each row of scores.
    """
    if watched() or not may_be_step(x):
        return None
    tensors = [part for layer in (*sources, last) for part in layer]
    rules = (scores,) if isinstance(scores, ScoreRule) else tuple(scores)
    options = (num_heads, num_kv_heads, scale, dropout, query_offset, backend)
    if not rules and (known := again(x, tensors, mask, *options)) is not None:
        return known
    recurs = (
        not rules and are_plain(x, *tensors) and all(lies_plainly(part) for part in tensors if part is not None)
        and all(type(option) in _SIMPLE for option in options)
    )  # fmt: skip

    def attention_of() -> Problem | None:
        return problem_like(
            x, sources, last, learns(x, *tensors), backend, (num_heads, num_kv_heads, num_kv_heads), mask=mask,
            scores=rules, scale=scale, dropout=dropout, query_offset=query_offset,
        )  # fmt: skip

    found = kept_step(x, tensors, mask, options, attention_of, AttentionStep, recurs=recurs)
    return None if found is None else play(found, x, tensors)


def is_step(
    x: Tensor, sources: Sequence[Layer], last: Layer, *, num_heads: int, num_kv_heads: int, backend: str = "auto",
    **options: Any,
) -> bool:  # fmt: skip
    """Whether ``self_attention`` would take a call if nobody watched it; whoever takes its parts with the kernels'
    products then has its bits. Takes its arguments."""
    if not may_be_step(x):
        return False
    training = learns(x, *(part for layer in (*sources, last) for part in layer))
    counts = (num_heads, num_kv_heads, num_kv_heads)
    return problem_like(x, sources, last, training, backend, counts, **options) is not None


def again(
    x: object, tensors: Sequence[Tensor | None], mask: Mask | None, num_heads: int, num_kv_heads: int,
    scale: float | None, dropout: float, query_offset: int | None, backend: str,
) -> Tensor | None:  # fmt: skip
    """``self_attention`` of a call like one that it has served before, or None; of arguments that nobody has checked.

    Args:
        x: see there.
        tensors: a weight, and a bias or None, for each of its layers, the last one behind the others.
        mask: see there, and so are those that follow; there are no rules.
    """
    # True is equal to 1, and so is its hash.
    if type(query_offset) not in (int, type(None)):
        return None
    return step.again(x, tensors, mask, (num_heads, num_kv_heads, scale, dropout, query_offset, backend))


def problem_like(
    x: Tensor, sources: Sequence[Layer], last: Layer, training: bool, backend: str, counts: tuple[int, int, int],
    **options: Any,
) -> Problem | None:  # fmt: skip
    """The problem without numbers, where the CPU kernels are what every part would use."""
    kinds = KINDS if training else KINDS[:1]
    tensors = [part for layer in (*sources, last) for part in layer]
    if not are_plain(x, *tensors) or not all(kernels_take(kinds, x, *layer) for layer in sources):
        return None
    if not kernels_take(kinds, x, *last, width=last[0].shape[-1]):
        return None
    leading = (x.shape[0], x.shape[1])
    hollow = [x.new_empty(1).expand(leading[0] * leading[1], weight.shape[0]) for weight, _ in sources]
    problem = Problem.of(_FUNCTION, *by_head(hollow, leading, counts), seed=0, **options)
    if problem.rule_parameters or choose(_FUNCTION, problem, _NOTHING, backend) is not native.BACKEND:
        return None
    return problem
