"""Decoder blocks that attend to a memory, their formula in torch operators, and comparisons of the two."""

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

#: The dropout factors in the order in which seeds are drawn: within each sublayer, then after it.
FACTORS = ("weights", "after", "memory weights", "after the memory", "hidden", "last")


def decoder(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return block(DecoderBlock, dtype, **({"cross_attention": True} | options))


def memory_of(dtype: torch.dtype = torch.float32, batch: int = 2, length: int = 11, width: int = 32) -> Tensor:
    return draw(batch, length, width, seed=5, dtype=dtype).requires_grad_()


def formula(
    module: Any,
    x: Tensor,
    memory: Tensor,
    mask: ch.Mask | None = None,
    memory_mask: ch.Mask | None = None,
    factors: Sequence[Tensor | None] = (None,) * 6,
) -> Tensor:
    """The block in torch operators, in its own dtype."""
    mask = ch.Causal() if mask is None else ch.Causal() & mask
    weights, after, memory_weights, after_memory, hidden, last = factors
    sublayers: list[tuple[Any, Callable[[Tensor], Tensor], Tensor | None]] = [
        (module.attention_norm, lambda y: attended(module.attention, y, y, mask, weights), after),
        (
            module.cross_norm,
            lambda y: attended(module.cross_attention, y, memory, memory_mask, memory_weights),
            after_memory,
        ),
        (module.feedforward_norm, lambda y: fed(module.feedforward, y, hidden), last),
    ]
    for norm, sublayer, factor in sublayers:
        if module.norm_first:
            x = x + times(sublayer(normed(x, norm)), factor)
        else:
            x = normed(x + times(sublayer(x), factor), norm)
    return x


def drops_of(module: Any) -> tuple[float, ...]:
    after = module.residual_dropout.p
    return (module.attention.dropout, after, module.cross_attention.dropout, after, module.feedforward.dropout.p, after)


def seeds_of(module: Any, seed: int = 7) -> list[int]:
    """The seeds that a call after ``torch.manual_seed(seed)`` draws."""
    torch.manual_seed(seed)
    return [draw_seed(drop) for drop in drops_of(module)]


def factors_of(module: Any, x: Tensor, memory: Tensor, seeds: Sequence[int]) -> list[Tensor | None]:
    """Dropout factors of these seeds."""
    (batch, length, width), heads = x.shape, module.attention.num_heads
    columns = {1: width, 3: width, 4: module.feedforward.expand.weight.shape[0], 5: width}
    factors: list[Tensor | None] = []
    for place, (seed, drop) in enumerate(zip(seeds, drops_of(module), strict=True)):
        if place in columns:
            factors.append(factor_of_rows(seed, drop, batch * length, columns[place]))
        else:
            factors.append(factor_of_weights(seed, drop, (batch, heads, length, memory.shape[1] if place else length)))
    return factors


def output_and_gradients(
    module: Any,
    x: Tensor,
    memory: Tensor,
    call: Callable[..., Tensor] | None = None,
    *,
    layer: bool | None = True,
    seed: int = 7,
    **masks: ch.Mask | None,
) -> list[Tensor]:
    """Output, and gradients of ``x``, the memory and every parameter; ``layer``: one operator must compute it."""
    torch.manual_seed(seed)
    run = RUNS[layer]
    output = run(module, x, memory=memory, **masks) if call is None else run(call, module, x, memory)
    inputs = [x, memory, *module.parameters()]
    return [output.detach(), *torch.autograd.grad(output, inputs, upstream_of(output))]


def budget_of(
    module: Any,
    x: Tensor,
    memory: Tensor,
    actual: list[Tensor],
    factors: Sequence[Tensor | None] = (None,) * 6,
    **masks: ch.Mask | None,
) -> None:
    """Assert that output and gradients have at most twice the error of the formula in the same dtype."""

    def by_formula(module: Any, x: Tensor, memory: Tensor) -> Tensor:
        return formula(module, x, memory, factors=factors, **masks)

    textbook = output_and_gradients(module, x, memory, by_formula, layer=False)
    wide = (copy.deepcopy(module).double(), *(each.detach().double().requires_grad_() for each in (x, memory)))
    exact = output_and_gradients(*wide, by_formula, layer=False)
    names = ["output", "dx", "dmemory", *(f"d{name}" for name, _ in module.named_parameters())]
    terms = max(x.shape[0] * x.shape[1], memory.shape[0] * memory.shape[1], module.feedforward.expand.weight.shape[0])
    for name, *three in zip(names, actual, textbook, exact, strict=True):
        within_budget(name, *three, terms=terms, dtype=x.dtype)


def checked(module: Any, x: Tensor, memory: Tensor, **masks: ch.Mask | None) -> None:
    """Assert that a call matches the formula and a second call gives the same bits."""
    first = output_and_gradients(module, x, memory, **masks)
    budget_of(module, x, memory, first, **masks)
    same(output_and_gradients(module, x, memory, **masks), first)
