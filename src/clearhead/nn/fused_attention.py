"""Attention with its projections as one step of autograd: two stretches of kernels instead of a dozen calls."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from clearhead.backends import native
from clearhead.backends.native_projection import lies_plainly
from clearhead.dispatch import choose
from clearhead.masks import Mask
from clearhead.masks.base import conjuncts
from clearhead.masks.parts import band_of, is_padding
from clearhead.nn import step
from clearhead.nn.attention_step import AttentionKind, AttentionStep, by_head, positions_of
from clearhead.nn.held import Held
from clearhead.nn.norm import NormLike
from clearhead.nn.rule_tensors import RuleTensors, Turning, are_known, forms_of
from clearhead.nn.step import kept_step, learns, may_be_step, play
from clearhead.positions import MOST_POSITIONS, Rotary
from clearhead.problem import Problem
from clearhead.projection import KINDS, Layer, are_plain, kernels_take
from clearhead.scores import ScoreRule
from clearhead.shapes import Float
from clearhead.statistics import Want
from clearhead.watch import watched

__all__ = ["Projections", "again", "fused_attention", "is_step", "problem_like"]

_FUNCTION = "attention"
_NOTHING = Want()
#: What options of calls that may recur are; others are for ``Problem`` to look at each time.
_SIMPLE: Final = (int, float, str, type(None))


class Projections(NamedTuple):
    """What an attention is besides its mask and tokens.

    Attributes:
        sources: the layers of queries, keys and values; or one that makes all three side by side.
        last: the layer that mixes the heads.
        num_heads: of queries.
        num_kv_heads: of keys and values.
        scale: as in ``attention``, and so are those that follow.
        dropout: see there.
        backend: see there.
        rotary: what turns queries and keys by their positions, where something does; ``"angles"`` come with a call.
        rules: as ``scores`` in ``attention``.
        head_norms: norms of each head's queries and of its keys, before they are turned, where there are some; a step
            has them without gradients alone.
    """

    sources: Sequence[Layer]
    last: Layer
    num_heads: int
    num_kv_heads: int
    scale: float | None = None
    dropout: float = 0.0
    backend: str = "auto"
    rotary: Turning = None
    rules: tuple[ScoreRule, ...] = ()
    head_norms: tuple[NormLike, ...] = ()

    def tensors(self) -> list[Tensor | None]:
        """Weights and biases, the last layer's behind the others', those of norms behind these; not those of rules."""
        pairs = (*self.sources, self.last, *[pair for _, pair in self.head_norms])
        return [part for pair in pairs for part in pair]

    def kind(self) -> AttentionKind:
        """What is left of it without tensors and problem."""
        return AttentionKind(len(self.sources) + 1, self.rotary, tuple(kind for kind, _ in self.head_norms))

    def options(self) -> tuple[Hashable, ...]:
        """What tells attentions apart besides their tensors."""
        own = self.num_heads, self.num_kv_heads, self.scale, self.dropout, self.backend, self.rotary
        if not self.rules and not self.head_norms:
            return own
        return (*own, *forms_of(self.rules), *[kind for kind, _ in self.head_norms])


def fused_attention(
    tokens: Sequence[Float[Tensor, "*batch _len _in"]],
    own: Projections,
    *,
    mask: Mask | None = None,
    query_offset: int | None = None,
    held: Held | None = None,
    angles: Float[Tensor, "_rows head_dim"] | None = None,
) -> Float[Tensor, "*batch _len _out"] | None:
    """``attention`` of heads that are projected, projected back: the same numbers in one step.

    ``concat_h(attention(x Wq_h, y Wk_h, y Wv_h)) Wo``, where ``y`` is ``x`` itself or a memory.

    Args:
        tokens: ``[batch, len, in]`` of those that attend, and of the memory where it is not theirs.
        own: the attention, without rules that learn.
        mask: as in ``attention``.
        query_offset: see there.
        held: keys and values that are read from a cache; where it grows, those of ``tokens`` are written into it, and
            the first query stands at its length. ``tokens`` are those that attend alone.
        angles: of the call's tokens, as in ``turned_by_token``, where ``own.rotary`` says that a call brings them.

    Returns:
        ``[batch, len, out]``; None where the CPU kernels are not what every part would use, or somebody looks at a
        part, for whoever asks to take them one by one.

    Raises:
        ShapeError, MaskError, UnsupportedError: as ``attention``.

    Cost: that of the parts. Kept for backward are ``tokens``, queries, keys, values, the heads' output, in 16 bits
    beyond 256 tokens in float32 too, and two numbers for each row of scores.
    """
    if watched() or not may_be_step(*tokens):
        return None
    known = are_known(own.rules)
    if known and (found := again(tokens, own, mask, query_offset, held, angles)) is not None:
        return found
    rules = _rule_tensors(own.rules if known else (), angles)
    if rules.learn():
        return None
    tensors, options = [*own.tensors(), *rules.pairs()], _options(own, query_offset, rules)
    caches = () if held is None else (held,)
    recurs = (
        known and are_plain(*tokens, *own.tensors()) and rules.are_plain()
        and all(lies_plainly(part) for part in own.tensors() if part is not None)
        and all(type(option) in _SIMPLE for option in (query_offset, own.scale, own.dropout, own.backend))
    )  # fmt: skip

    def attention_of() -> list[Problem] | None:
        training = learns(*tokens, *tensors)
        found = problem_like(tokens, own, training, mask=mask, query_offset=query_offset, held=held)
        return None if found is None else [found]

    def step_of(problems: Sequence[Problem], training: bool, layout: Hashable | None) -> AttentionStep:
        return AttentionStep(problems, training, layout, own.kind(), rules)

    made = kept_step(tokens, tensors, [mask], options, attention_of, step_of, caches, recurs=recurs)
    return None if made is None else play(made, tokens, tensors, caches)


def is_step(tokens: Sequence[Tensor], own: Projections, **options: Any) -> bool:
    """Whether ``fused_attention`` would take a call if nobody watched it; whoever takes its parts with the kernels'
    products then has its bits. Takes its arguments."""
    return may_be_step(*tokens) and problem_like(tokens, own, learns(*tokens, *own.tensors()), **options) is not None


def again(
    tokens: Sequence[Any], own: Projections, mask: Mask | None, query_offset: int | None, held: Held | None = None,
    angles: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """``fused_attention`` of a call like one that it has served before, or None; of tokens, a mask and an offset that
    nobody has checked, under known rules."""
    # True is equal to 1, and so is its hash.
    if type(query_offset) not in (int, type(None)):
        return None
    rules, caches = _rule_tensors(own.rules, angles), () if held is None else (held,)
    tensors = [*own.tensors(), *rules.pairs()]
    return step.again(tokens, tensors, [mask], _options(own, query_offset, rules), caches)


def _rule_tensors(rules: Sequence[ScoreRule], angles: Tensor | None) -> RuleTensors:
    """Those of one attention's rules, and a call's angles."""
    found = RuleTensors.of([rules])
    return found if angles is None else found.with_angles(angles)


def _options(own: Projections, query_offset: int | None, rules: RuleTensors) -> tuple[Hashable, ...]:
    """What tells calls apart besides tensors and masks."""
    return (query_offset, *own.options(), *rules.places)


def problem_like(
    tokens: Sequence[Tensor], own: Projections, training: bool, *, mask: Mask | None = None,
    query_offset: int | None = None, held: Held | None = None,
) -> Problem | None:  # fmt: skip
    """The problem without numbers, where the CPU kernels are what every part would use."""
    kinds, x = KINDS if training else KINDS[:1], tokens[0]
    if not are_plain(*tokens, *own.tensors()) or (held is not None and not _goes_on(held, x, training, mask)):
        return None
    if own.head_norms and (training or not _takes_norms(own)):
        return None
    apart, last = len(own.sources) > 1, own.last
    for place, layer in enumerate(own.sources):
        if place and held is not None and not held.grows:
            continue
        read = (tokens[-1] if place else x,) if apart else tokens
        if not all(kernels_take(kinds, each, *layer) for each in read):
            return None
    if not kernels_take(kinds, x, *last, width=last[0].shape[-1]):
        return None
    problem = Problem.of(
        _FUNCTION, *_hollow(tokens, own, held), mask=mask, scores=own.rules, scale=own.scale, dropout=own.dropout,
        seed=0, query_offset=held.length if held is not None and held.grows else query_offset,
    )  # fmt: skip
    if isinstance(own.rotary, Rotary) and not _has_positions(problem, query_offset, held):
        return None
    learned = torch.is_grad_enabled() and problem.rule_parameters
    if learned or choose(_FUNCTION, problem, _NOTHING, own.backend) is not native.BACKEND:
        return None
    # Functions that the kernels take come to rules of theirs.
    return problem.with_traced_rules


def _takes_norms(own: Projections) -> bool:
    """Whether the norms are of heads whose layers stand apart."""
    size = own.sources[0][0].shape[0] // own.num_heads
    given = [part for _, pair in own.head_norms for part in pair if part is not None]
    plain = all(part.shape == (size,) and part.stride() == (1,) and not part.is_neg() for part in given)
    return len(own.sources) == 3 and len(own.head_norms) == 2 and plain


def _has_positions(problem: Problem, query_offset: int | None, held: Held | None) -> bool:
    """Whether it is plain where queries and keys stand, and a table has these places."""
    grows = held is not None and held.grows
    if query_offset is None and not grows and problem.q_len != problem.k_len:
        return False
    return problem.query_offset >= 0 and positions_of(problem, held) <= MOST_POSITIONS


def _goes_on(held: Held, x: Tensor, training: bool, mask: Mask | None) -> bool:
    """Whether a step can read what a cache holds: a mask is a band, or says which keys are real besides."""
    if training or not are_plain(x, held.key, held.value):
        return False
    if mask is None or not held.grows or band_of(mask) is not None:
        return True
    return all(band_of(part) is not None or is_padding(part) for part in conjuncts(mask))


def _hollow(tokens: Sequence[Tensor], own: Projections, held: Held | None) -> tuple[Tensor, ...]:
    """Queries, keys and values that hold no memory."""
    x, counts = tokens[0], (own.num_heads, own.num_kv_heads, own.num_kv_heads)
    nothing, batch = x.new_empty(1), x.shape[0]
    if held is None:
        rows = [nothing.expand(len(each) * each.shape[1], width) for each, width in _widths(tokens, own, counts)]
        return by_head(rows, batch, counts)
    length = held.length + x.shape[1] if held.grows else held.length
    query = nothing.expand(batch, own.num_heads, x.shape[1], held.key.shape[3])
    return query, *(nothing.expand(*part.shape[:2], length, part.shape[3]) for part in (held.key, held.value))


def _widths(tokens: Sequence[Tensor], own: Projections, counts: tuple[int, int, int]) -> list[tuple[Tensor, int]]:
    """What each product reads, and how many numbers it gives for each token."""
    widths = [weight.shape[0] for weight, _ in own.sources]
    if len(tokens) > 1 and len(widths) == 1:
        of_queries = widths[0] // sum(counts) * counts[0]
        widths = [of_queries, widths[0] - of_queries]
    return [(tokens[min(place, len(tokens) - 1)], width) for place, width in enumerate(widths)]
