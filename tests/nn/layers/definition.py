"""Blocks, their formula in torch operators, and comparisons of the two."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead as ch
from clearhead.backends.dropout import keep_scale
from clearhead.nn import DecoderBlock, EncoderBlock
from clearhead.ops.dropout import LEVELS
from clearhead.problem import draw_seed
from clearhead.testing import fused_calls
from tests.budget import within_budget
from tests.dropped import keep_mask

Block = EncoderBlock | DecoderBlock
KINDS = [EncoderBlock, DecoderBlock]
DTYPES = [torch.float32, torch.bfloat16]


def block(
    kind: Any = EncoderBlock, dtype: torch.dtype = torch.float32, width: int = 32, heads: int = 4, **options: Any
) -> Any:
    torch.manual_seed(1)
    made = kind(width, heads, **({"dropout": 0.0} | options))
    with torch.no_grad():
        for part in made.parameters():
            if part.ndim == 1:  # Norms start with ones and zeros.
                part.add_(0.3 * torch.randn_like(part))
        if options.get("activation") == "relu" and dtype is torch.bfloat16:
            # A ReLU's gradient jumps at 0: keep hidden values away from 0, so that rounding does not decide.
            before = made.feedforward.gate or made.feedforward.expand
            before.weight.mul_(0.3)
            if before.bias is not None:
                before.bias.copy_(torch.randn_like(before.bias).sign() * 2.0)
    return made.to(dtype)


def draw(*shape: int, seed: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tokens(dtype: torch.dtype = torch.float32, batch: int = 2, length: int = 7, width: int = 32) -> Tensor:
    return draw(batch, length, width, dtype=dtype).requires_grad_()


@dataclass
class Factors:
    """Factors of each dropout: attention weights, attention output, hidden values, feedforward output."""

    weights: Tensor
    after: Tensor
    hidden: Tensor
    last: Tensor


def times(y: Tensor, factor: Tensor | None) -> Tensor:
    """Apply a dropout factor to ``y``."""
    return y if factor is None else y * factor.to(y.dtype).view(y.shape)


def normed(y: Tensor, norm: nn.Module) -> Tensor:
    if isinstance(norm, nn.RMSNorm):
        return F.rms_norm(y, y.shape[-1:], norm.weight, norm.eps)
    return F.layer_norm(y, y.shape[-1:], norm.weight, norm.bias, norm.eps)  # type: ignore[arg-type]


def rotated(heads: Tensor, base: float, first: int = 0) -> Tensor:
    """RoPE in torch operators; positions start at ``first``."""
    half = heads.shape[-1] // 2
    places = torch.arange(first, first + heads.shape[-2], dtype=torch.float64)
    angles = torch.outer(places, base ** (-torch.arange(half, dtype=torch.float64) / half))
    cosine, sine = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    x, y = heads[..., :half], heads[..., half:]
    return torch.cat([x * cosine - y * sine, y * cosine + x * sine], -1)


def ruled(scores: Tensor, rules: Sequence[ch.ScoreRule]) -> tuple[Tensor, list[Tensor]]:
    """Scores after the rules, and the logits of sinks."""
    batch, heads, rows, columns = scores.shape
    distance = torch.arange(rows)[:, None] - torch.arange(columns)
    sinks = []
    for rule in rules:
        if isinstance(rule, ch.Alibi):
            scores = scores - rule.slopes.to(scores.dtype)[:, None, None] * distance.abs()
        elif isinstance(rule, ch.RelativeBias):
            reach = rule.table.shape[1] // 2
            scores = scores + rule.table.to(scores.dtype)[:, distance.clamp(-reach, reach) + reach]
        elif isinstance(rule, ch.DenseBias):
            scores = scores + rule.bias.to(scores.dtype)
        elif isinstance(rule, ch.SoftCap):
            scores = rule.cap * torch.tanh(scores / rule.cap)
        else:
            assert isinstance(rule, ch.Sink)
            sinks.append(rule.logits.to(scores.dtype)[:, None, None].expand(batch, heads, rows, 1))
    return scores, sinks


def attended(
    part: Any, y: Tensor, keys: Tensor, mask: ch.Mask | None, factor: Tensor | None = None, off: Sequence[int] = ()
) -> Tensor:
    """An attention with its projections in torch operators; the output of the heads in ``off`` is 0."""
    layers = ((part.query_projection, y), (part.key_projection, keys), (part.value_projection, keys))
    heads = [
        F.linear(read, one.weight, one.bias).unflatten(-1, (-1, part.head_dim)).transpose(1, 2) for one, read in layers
    ]
    if part.rotary is not None:
        heads[:2] = [rotated(one, part.rotary.base) for one in heads[:2]]
    query, key, value = (one.repeat_interleave(part.num_heads // one.shape[1], 1) for one in heads)
    scale = part.head_dim**-0.5 if part.scale is None else part.scale
    scores = query @ key.transpose(-2, -1) * scale
    scores, sinks = ruled(scores, part.scores.rules())
    allowed = torch.ones((), dtype=torch.bool)
    if mask is not None:
        allowed = mask.dense(y.shape[1], keys.shape[1])
    allowed = allowed.expand(scores.shape)
    scores = scores.masked_fill(~allowed, -torch.inf).masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    scores = torch.cat([scores, *sinks], -1)
    weights = times(torch.softmax(scores, -1)[..., : keys.shape[1]].masked_fill(~allowed, 0.0), factor)
    on = torch.tensor([float(head not in off) for head in range(part.num_heads)], dtype=y.dtype)
    joined = (weights @ value * on[:, None, None]).transpose(1, 2).flatten(-2)
    return F.linear(joined, part.output_projection.weight, part.output_projection.bias)


def fed(part: Any, y: Tensor, factor: Tensor | None = None) -> Tensor:
    """A feedforward in torch operators."""
    first, *second = [one for one in (part.gate, part.expand) if one is not None]
    hidden = times(part.activation(F.linear(y, first.weight, first.bias)), factor)
    for one in second:
        hidden = hidden * F.linear(y, one.weight, one.bias)
    return F.linear(hidden, part.contract.weight, part.contract.bias)


def formula(
    module: Any, x: Tensor, mask: ch.Mask | None = None, factors: Factors | None = None, off: Sequence[int] = ()
) -> Tensor:
    """The block in torch operators, in its own dtype; the output of the heads in ``off`` is 0."""
    if isinstance(module, DecoderBlock):
        mask = ch.Causal() if mask is None else ch.Causal() & mask
    names = ("weights", "after", "hidden", "last")
    weights, after, hidden, last = (None if factors is None else getattr(factors, name) for name in names)

    def attend(y: Tensor) -> Tensor:
        return times(attended(module.attention, y, y, mask, weights, off), after)

    def feed(y: Tensor) -> Tensor:
        return times(fed(module.feedforward, y, hidden), last)

    if module.norm_first:
        x = x + attend(normed(x, module.attention_norm))
        return x + feed(normed(x, module.feedforward_norm))
    x = normed(x + attend(x), module.attention_norm)
    return normed(x + feed(x), module.feedforward_norm)


def by_modules(module: Any, x: Tensor, mask: ch.Mask | None = None) -> Tensor:
    """Call the submodules of the block op by op."""
    dropout: Callable[[Tensor], Tensor] = module.residual_dropout
    if module.norm_first:
        x = x + dropout(module.attention(module.attention_norm(x), mask=mask))
        return x + dropout(module.feedforward(module.feedforward_norm(x)))
    x = module.attention_norm(x + dropout(module.attention(x, mask=mask)))
    output: Tensor = module.feedforward_norm(x + dropout(module.feedforward(x)))
    return output


def factors_of(module: Any, x: Tensor, seeds: Sequence[int]) -> Factors:
    """Dropout factors of these seeds."""
    batch, length, width = x.shape
    hidden, rows = module.feedforward.expand.weight.shape[0], batch * length
    weights = factor_of_weights(seeds[0], module.attention.dropout, (batch, module.attention.num_heads, length, length))
    drops = (module.residual_dropout.p, module.feedforward.dropout.p, module.residual_dropout.p)
    after, within, last = map(factor_of_rows, seeds[1:], drops, [rows] * 3, (width, hidden, width))
    return Factors(weights, after, within, last)


def factor_of_rows(seed: int, drop: float, rows: int, columns: int) -> Tensor:
    """The factor of activation dropout under a seed."""
    levels = round(drop * LEVELS)
    if levels == 0:
        return torch.ones(rows, columns, dtype=torch.float64)
    return keep_mask(rows, columns, levels, seed).double() * (LEVELS / (LEVELS - levels))


def factor_of_weights(seed: int, drop: float, axes: tuple[int, int, int, int]) -> Tensor:
    """The factor of dropout on attention weights; ``axes`` are batch, heads, queries and keys."""
    if not drop:
        return torch.ones(axes, dtype=torch.float64)
    one, two, three, four = (
        torch.arange(size).view([-1 if axis == dimension else 1 for axis in range(4)])
        for dimension, size in enumerate(axes)
    )
    return keep_scale(seed, drop, (one, two, three, four), torch.float64)


def seeds_of(module: Any, seed: int = 7) -> list[int]:
    """The seeds that a call after ``torch.manual_seed(seed)`` draws."""
    torch.manual_seed(seed)
    drops = (
        module.attention.dropout,
        module.residual_dropout.p,
        module.feedforward.dropout.p,
        module.residual_dropout.p,
    )
    return [draw_seed(drop) for drop in drops]


def dropping(kind: Any, dtype: torch.dtype, drops: Sequence[float], **options: Any) -> Any:
    """A block with separate probabilities for attention weights, hidden values and the residual branches."""
    module = block(kind, dtype, attention_dropout=drops[0], **options)
    module.feedforward.dropout.p, module.residual_dropout.p = drops[1:]
    return module


def fused(call: Callable[..., Tensor], *given: Any, **options: Any) -> Tensor:
    """Call, and assert that one layer operator ran."""
    with fused_calls() as calls:
        output = call(*given, **options)
    assert calls == ["layer"]
    return output


def unfused(call: Callable[..., Tensor], *given: Any, **options: Any) -> Tensor:
    """Call, and assert that no layer operator ran."""
    with fused_calls() as calls:
        output = call(*given, **options)
    assert "layer" not in calls
    return output


#: How a call must run: fused, op by op, or either.
RUNS: dict[bool | None, Callable[..., Tensor]] = {
    True: fused,
    False: unfused,
    None: lambda call, *given, **options: call(*given, **options),
}


def upstream_of(output: Tensor, seed: int = 3) -> Tensor:
    return draw(*output.shape, seed=seed).to(output.dtype)


def output_and_gradients(
    module: Any,
    x: Tensor,
    mask: ch.Mask | None = None,
    *,
    call: Callable[..., Tensor] | None = None,
    layer: bool | None = True,
    seed: int = 7,
    upstream: Tensor | None = None,
) -> list[Tensor]:
    """Output, and gradients of ``x`` and every parameter; ``layer``: whether one operator must compute it."""
    torch.manual_seed(seed)
    output = RUNS[layer](module, x, mask=mask) if call is None else RUNS[layer](call, module, x)
    upstream = upstream_of(output) if upstream is None else upstream.to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, [x, *module.parameters()], upstream)]


def budget_of(
    module: Any,
    x: Tensor,
    mask: ch.Mask | None,
    actual: list[Tensor],
    factors: Factors | None = None,
    upstream: Tensor | None = None,
    off: Sequence[int] = (),
) -> None:
    """Assert that output and gradients have at most twice the error of the formula in the same dtype."""
    wide = copy.deepcopy(module).double()

    def by_formula(module: Any, x: Tensor) -> Tensor:
        return formula(module, x, mask, factors, off)

    textbook = output_and_gradients(module, x, call=by_formula, layer=False, upstream=upstream)
    exact = output_and_gradients(
        wide, x.detach().double().requires_grad_(), call=by_formula, layer=False, upstream=upstream
    )
    names = ["output", "dx", *(f"d{name}" for name, _ in module.named_parameters())]
    terms = max(x.shape[0] * x.shape[1], module.feedforward.expand.weight.shape[0])
    for name, *three in zip(names, actual, textbook, exact, strict=True):
        within_budget(name, *three, terms=terms, dtype=x.dtype)


def decoded(call: Callable[..., Tensor], x: Tensor, calls: Sequence[int], **given: Any) -> Tensor:
    """Decode without gradients; ``calls`` are the numbers of tokens of each call."""
    with torch.no_grad():
        return torch.cat([call(part, **given) for part in x.split(list(calls), 1)], 1)


def same(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, two in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=0.0, atol=0.0, equal_nan=True)


def checked(module: Any, x: Tensor, mask: ch.Mask | None = None) -> None:
    """Assert that a call matches the formula and a second call gives the same bits."""
    first = output_and_gradients(module, x, mask)
    budget_of(module, x, mask, first)
    same(output_and_gradients(module, x, mask), first)


#: A block like Llama's.
LLAMA: dict[str, Any] = {
    "gated": True,
    "norm": "rms",
    "activation": "silu",
    "rotary": 100.0,
    "bias": False,
    "num_kv_heads": 2,
}
MASKS: list[ch.Mask | None] = [
    None,
    ch.Causal(),
    ch.Padding(torch.tensor([7, 3])),
    ch.Window(2) & ch.Causal(),
    ch.Padding(torch.tensor([0, 7])),
    ch.Dense(torch.rand(7, 7, generator=torch.Generator().manual_seed(4)) < 0.3),
]
MASK_IDS = ["none", "causal", "padding", "window", "nothing to attend to", "dense"]


#: Without a bias, hidden values may lie close to 0, where a ReLU's gradient jumps.
WITHIN = [
    (activation, bias, dtype)
    for activation in ("gelu", "relu", "silu")
    for bias in (True, False)
    for dtype in DTYPES
    if bias or activation != "relu" or dtype is torch.float32
]


def padding_is_contained(module: Any, x: Tensor, upstream: Tensor, bad: float) -> None:
    """Assert that NaN or infinity in a padding token reaches its own row alone."""
    mask = ch.Padding(torch.tensor([7, 3]))
    right = output_and_gradients(module, x, mask, upstream=upstream)
    spoiled = x.detach().clone()
    spoiled[1, 5] = bad
    results = output_and_gradients(module, spoiled.requires_grad_(), mask, upstream=upstream)
    rows = [place for place in range(7) if place != 5]
    same([results[0][0], results[0][1, rows]], [right[0][0], right[0][1, rows]])
    wide, exact_x = copy.deepcopy(module).double(), x.detach().double().requires_grad_()
    textbook = torch.autograd.grad(formula(module, x, mask), x, upstream)[0]
    exact = torch.autograd.grad(formula(wide, exact_x, mask), exact_x, upstream.double())[0]
    within_budget("dx", results[1][0], textbook[0], exact[0], terms=128, dtype=x.dtype)


def caches_alternate(module: Any, x: Tensor, lengths: Sequence[int]) -> None:
    """Assert that caches of these lengths, filled in turn with a token each, give the outputs of the whole sequence."""
    with torch.no_grad():
        whole = module(x)
        caches = {first: ch.KVCache() for first in lengths}
        for first, cache in caches.items():
            module(x[:, :first], cache=cache)
        for _ in range(4):
            for cache in caches.values():
                place = cache.length
                token = module(x[:, place : place + 1], cache=cache)
                torch.testing.assert_close(token, whole[:, place : place + 1], rtol=1e-5, atol=1e-5)
