"""Self-attention with its projections as one step of autograd: two stretches of kernels instead of a dozen calls.

Between two large products Python finds nothing of itself in the caches, and whatever it does takes several times as
long as elsewhere: up to a tenth of a training step of a thousand tokens. Here the products and the attention are
written down first and then run, one after the other; and what was written down for one layout of tensors is kept, so
that from the third call on only addresses change.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from clearhead.backends import native
from clearhead.backends.guards import alike
from clearhead.backends.native_prepared import Kept
from clearhead.backends.native_projection import lies_plainly, rows_of
from clearhead.dispatch import choose
from clearhead.functional import attention
from clearhead.masks import Causal, Mask
from clearhead.nn.attention_step import Given, Layer, Step, by_head, by_head_of, layers_of
from clearhead.problem import Problem, draw_seed
from clearhead.projection import KINDS, are_plain, choices, kernels_take, project, recorded, unrecorded
from clearhead.scores import ScoreRule
from clearhead.shapes import Float
from clearhead.statistics import Want
from clearhead.watch import watched

__all__ = ["again", "is_step", "self_attention"]

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
    if watched() or not _may_be_step(x):
        return None
    tensors = [part for layer in (*sources, last) for part in layer]
    rules = (scores,) if isinstance(scores, ScoreRule) else tuple(scores)
    if not rules:
        known = again(x, tensors, num_heads, num_kv_heads, mask, scale, dropout, query_offset, backend)
        if known is not None:
            return known
    training = _learns(x, *tensors)
    options = (scale, dropout, query_offset, backend)
    recurs = (
        not rules and are_plain(x, *tensors) and all(lies_plainly(part) for part in tensors if part is not None)
        and all(type(option) in _SIMPLE for option in options)
    )  # fmt: skip
    layout = (
        x.shape, x.dtype, *(None if part is None else part.shape for part in tensors), num_heads, num_kv_heads,
        *options, training, torch.get_num_threads(), *(choices(x.dtype) if recurs else ()),
    )  # fmt: skip
    step = _KEPT.get((_mark(mask), layout)) if recurs else None
    if step is None or not step.is_current():
        problem = _problem_like(
            x, sources, last, training, backend, (num_heads, num_kv_heads, num_kv_heads), mask=mask, scores=rules,
            scale=scale, dropout=dropout, query_offset=query_offset,
        )  # fmt: skip
        if problem is None:
            return None
        # One that had to be placed first is another, and may have copied numbers that somebody writes into later.
        recurs = recurs and problem.mask is mask and _is_said_by_runs(problem)
        step = Step(problem, training, layout if recurs else None)
        if recurs:
            _KEPT.put((_mark(mask), layout), step)
    if recurs:
        given = [part for part in (x, *tensors) if part is not None]
        asked = _asked(x, len(given), num_heads, num_kv_heads, mask, scale, dropout, query_offset, backend)
        _KNOWN.put(asked, _Known(step, training, choices(x.dtype), alike(*given)))
    # Only now, so that whoever goes on without this step finds the generator as it was.
    seed = draw_seed(dropout)
    if training:
        output: Tensor = _SelfAttention.apply(step, seed, x, *tensors)  # type: ignore[no-untyped-call]
        return output
    return step.forward(x, tensors, seed)[-1]


def is_step(
    x: Tensor, sources: Sequence[Layer], last: Layer, *, num_heads: int, num_kv_heads: int, backend: str = "auto",
    **options: Any,
) -> bool:  # fmt: skip
    """Whether ``self_attention`` would take a call if nobody watched it; whoever takes its parts with the kernels'
    products then has its bits. Takes its arguments."""
    if not _may_be_step(x):
        return False
    training = _learns(x, *(part for layer in (*sources, last) for part in layer))
    counts = (num_heads, num_kv_heads, num_kv_heads)
    return _problem_like(x, sources, last, training, backend, counts, **options) is not None


def _may_be_step(x: Tensor) -> bool:
    return not (torch.compiler.is_compiling() or _has_any_global_hook()) and x.dim() == 3 and 0 not in x.shape


def _learns(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in tensors)


def again(
    x: object, tensors: Sequence[Tensor | None], num_heads: int, num_kv_heads: int, mask: Mask | None,
    scale: float | None, dropout: float, query_offset: int | None, backend: str,
) -> Tensor | None:  # fmt: skip
    """``self_attention`` of a call like one that it has served before, or None; of arguments that nobody has checked.

    What takes longer than the kernels of a short call, the look at each argument, is one question here: whether all
    tensors are like those of the call before.

    Args:
        x: see there.
        tensors: a weight, and a bias or None, for each of its layers, the last one behind the others.
        num_heads: see there, and so are those that follow; there are no rules.
    """
    # True is equal to 1, and so is its hash.
    if type(x) is not Tensor or type(query_offset) not in (int, type(None)):
        return None
    given = [x, *(part for part in tensors if part is not None)]
    try:
        asked = _asked(x, len(given), num_heads, num_kv_heads, mask, scale, dropout, query_offset, backend)
        known = _KNOWN.get(asked)
    except TypeError:  # what cannot be hashed
        return None
    if (
        known is None or not known.alike(*given) or watched() or _has_any_global_hook() or not unrecorded()
        or known.chosen != choices(x.dtype) or not known.step.is_current()
    ):  # fmt: skip
        return None
    seed = draw_seed(dropout)
    if known.training:
        output: Tensor = _played(known.step, seed, x, *tensors)  # type: ignore[no-untyped-call]
        return output
    return known.step.forward(x, tensors, seed)[-1]


def _asked(x: Tensor, count: int, *options: Any) -> Hashable:
    """What tells calls apart besides their tensors."""
    heads, kv_heads, mask, *others = options
    return x.shape, count, heads, kv_heads, _mark(mask), *others, torch.is_grad_enabled(), torch.get_num_threads()


def _mark(mask: Mask | None) -> Hashable:
    """A mask's name: its class where that says all, or its id, which is its own as long as a step holds the mask."""
    return Causal if type(mask) is Causal else id(mask)


def _problem_like(
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


def _is_said_by_runs(problem: Problem) -> bool:
    """Whether a mask is a band and runs of keys, which are asked for again: a table, or a user's function, may say
    something else each time."""
    if problem.mask is None:
        return True
    parts = problem.mask_parts
    return not parts.rest and parts.dense is None and parts.blocks is None


class _Known(NamedTuple):
    """A step, and what tells calls that are like one that it has served."""

    step: Step
    training: bool
    chosen: Hashable
    alike: Callable[..., bool]


_KEPT: Final = Kept[Step](64)
_KNOWN: Final = Kept[_Known](64)


class _SelfAttention(torch.autograd.Function):
    """``x``, then a weight and a bias or None for each layer."""

    @staticmethod
    def forward(ctx: Any, step: Step, seed: int, x: Tensor, *tensors: Tensor | None) -> Tensor:
        *kept, output = step.forward(x, tensors, seed)
        ctx.step, ctx.seed = step, seed
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *tensors, *kept)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[2:]
        count = len(needs)
        if grad is None:
            return (None,) * (2 + count)
        # Asked for once: a checkpoint hands them out a single time.
        saved = ctx.saved_tensors
        x, *tensors = saved[:count]
        if recorded(grad):
            return None, None, *_known_gradients(ctx.step.problem.with_seed(ctx.seed), grad, saved[:count], needs)
        sources = len(layers_of(tensors)) - 1
        projected, (heads, *kept) = saved[count : count + sources], saved[count + sources :]
        arrived, rows = (rows_of(part.reshape(-1, part.shape[-1])) for part in (grad, x))
        given = Given(arrived, rows, tuple(x.shape), tensors, projected, heads, kept, ctx.seed)
        return None, None, *ctx.step.backward(given, needs)


#: ``_SelfAttention.apply`` without its look at transformations, of which there are none where a call is known.
_played: Final = super(torch.autograd.Function, _SelfAttention).apply


def _known_gradients(
    problem: Problem, grad: Tensor, tensors: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor | None]:
    """The same by parts that autograd and watchers know, from the inputs alone."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        parts = [
            part.view_as(part) if part is not None and needed else part
            for part, needed in zip(tensors, needs, strict=True)
        ]
        x, *layers = parts[0], *layers_of(parts[1:])
        assert x is not None
        *sources, last = layers
        projected = [project(x, *layer).flatten(0, 1) for layer in sources]
        output = attention(
            *by_head_of(problem, projected), mask=problem.mask, scores=problem.scores, scale=problem.scale,
            dropout=problem.dropout, seed=problem.seed, query_offset=problem.query_offset, backend=native.BACKEND.name,
        )  # fmt: skip
        output = project(output.transpose(1, 2).flatten(-2), *last)
        wanted = [part for part, needed in zip(parts, needs, strict=True) if part is not None and needed]
        found = iter(torch.autograd.grad(output, wanted, grad, create_graph=again, allow_unused=True))
    return [next(found) if part is not None and needed else None for part, needed in zip(parts, needs, strict=True)]
