"""A decoder block that attends to a memory, what it is by torch's operators, and how a call is held against that."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import clearhead as ch
from clearhead.nn import DecoderBlock
from clearhead.problem import draw_seed
from tests.budget import within_budget
from tests.nn.layers.definition import (
    RUNS,
    attended,
    block,
    draw,
    factor_of_rows,
    factor_of_weights,
    fed,
    normed,
    same,
    times,
    upstream_of,
)

#: What a factor stands for, in the order in which seeds are drawn: within each sublayer, and behind it.
FACTORS = ("weights", "after", "memory weights", "after the memory", "hidden", "last")


def decoder(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return block(DecoderBlock, dtype, **({"cross_attention": True} | options))


def memory_of(dtype: torch.dtype = torch.float32, batch: int = 2, length: int = 11, width: int = 32) -> Tensor:
    return draw(batch, length, width, seed=5, dtype=dtype).requires_grad_()


def formula(
    own: Any,
    x: Tensor,
    memory: Tensor,
    mask: ch.Mask | None = None,
    memory_mask: ch.Mask | None = None,
    factors: Sequence[Tensor | None] = (None,) * 6,
) -> Tensor:
    """The block by torch's operators, in its own dtype."""
    mask = ch.Causal() if mask is None else ch.Causal() & mask
    weights, after, memory_weights, after_memory, hidden, last = factors
    sublayers: list[tuple[Any, Callable[[Tensor], Tensor], Tensor | None]] = [
        (own.attention_norm, lambda y: attended(own.attention, y, y, mask, weights), after),
        (own.cross_norm, lambda y: attended(own.cross_attention, y, memory, memory_mask, memory_weights), after_memory),
        (own.feedforward_norm, lambda y: fed(own.feedforward, y, hidden), last),
    ]
    for norm, sublayer, factor in sublayers:
        if own.norm_first:
            x = x + times(sublayer(normed(x, norm)), factor)
        else:
            x = normed(x + times(sublayer(x), factor), norm)
    return x


def drops_of(own: Any) -> tuple[float, ...]:
    after = own.residual_dropout.p
    return (own.attention.dropout, after, own.cross_attention.dropout, after, own.feedforward.dropout.p, after)


def seeds_of(own: Any, seed: int = 7) -> list[int]:
    """What a call after ``torch.manual_seed(seed)`` draws."""
    torch.manual_seed(seed)
    return [draw_seed(drop) for drop in drops_of(own)]


def factors_of(own: Any, x: Tensor, memory: Tensor, seeds: Sequence[int]) -> list[Tensor | None]:
    """What the definitions keep under these seeds."""
    (batch, length, width), heads = x.shape, own.attention.num_heads
    columns = {1: width, 3: width, 4: own.feedforward.expand.weight.shape[0], 5: width}
    found: list[Tensor | None] = []
    for place, (seed, drop) in enumerate(zip(seeds, drops_of(own), strict=True)):
        if place in columns:
            found.append(factor_of_rows(seed, drop, batch * length, columns[place]))
        else:
            found.append(factor_of_weights(seed, drop, (batch, heads, length, memory.shape[1] if place else length)))
    return found


def numbers(
    own: Any,
    x: Tensor,
    memory: Tensor,
    call: Callable[..., Tensor] | None = None,
    *,
    layer: bool | None = True,
    seed: int = 7,
    **masks: ch.Mask | None,
) -> list[Tensor]:
    """Output, and gradients of ``x``, the memory and every parameter; ``layer``: one operator has to compute it."""
    torch.manual_seed(seed)
    run = RUNS[layer]
    output = run(own, x, memory=memory, **masks) if call is None else run(call, own, x, memory)
    inputs = [x, memory, *own.parameters()]
    return [output.detach(), *torch.autograd.grad(output, inputs, upstream_of(output))]


def budget_of(
    own: Any,
    x: Tensor,
    memory: Tensor,
    found: list[Tensor],
    factors: Sequence[Tensor | None] = (None,) * 6,
    **masks: ch.Mask | None,
) -> None:
    """Output and gradients against the definition in float64, on the budget of the definition in their own dtype."""

    def by_formula(own: Any, x: Tensor, memory: Tensor) -> Tensor:
        return formula(own, x, memory, factors=factors, **masks)

    textbook = numbers(own, x, memory, by_formula, layer=False)
    wide = (copy.deepcopy(own).double(), *(each.detach().double().requires_grad_() for each in (x, memory)))
    exact = numbers(*wide, by_formula, layer=False)
    names = ["output", "dx", "dmemory", *(f"d{name}" for name, _ in own.named_parameters())]
    terms = max(x.shape[0] * x.shape[1], memory.shape[0] * memory.shape[1], own.feedforward.expand.weight.shape[0])
    for name, *three in zip(names, found, textbook, exact, strict=True):
        within_budget(name, *three, terms=terms, dtype=x.dtype)


def checked(own: Any, x: Tensor, memory: Tensor, **masks: ch.Mask | None) -> None:
    """Right, and the same bits in a second call."""
    first = numbers(own, x, memory, **masks)
    budget_of(own, x, memory, first, **masks)
    same(numbers(own, x, memory, **masks), first)
