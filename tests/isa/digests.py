"""Digests of random calls on one instruction set: ``python -m tests.isa.digests 0 40`` prints a line per seed.

A process has one set, which ``CLEARHEAD_ISA`` names, so a test starts this program once for each and compares the
lines. Numbers are drawn as integers and scaled: torch's normal distribution rounds otherwise with other instructions.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from random import Random
from typing import Literal

import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.nn.norm import normed
from clearhead.ops.kinds import NormKind
from clearhead.ops.library import isa_name
from clearhead.projection import ACTIVATIONS, project, project_activate_project

__all__ = ["KINDS", "digest"]

#: Around the kernels' rows, lanes and tiles.
_LENGTHS = (1, 2, 3, 5, 7, 8, 12, 13, 16, 17, 31, 33, 63, 64, 65, 97, 129, 200, 257, 513, 700)
_WIDTHS = (1, 3, 8, 16, 17, 24, 32, 40, 64, 65, 80, 100, 128)
#: Output, log-sum-exp and every statistic of a query or of a key.
_STATISTICS = 1 | 1 << 3 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 8


class Draw:
    """Random choices and tensors of a seed, the same on every processor."""

    def __init__(self, seed: int) -> None:
        self.random, self.generator = Random(seed), torch.Generator().manual_seed(seed)

    def tensor(self, *shape: int, spread: float = 2.0) -> Tensor:
        """Uniform between ``-spread`` and ``spread``."""
        whole = torch.randint(-(2**22), 2**22, shape, generator=self.generator)
        return whole.float() * (spread / 2**22)

    def fill(self, module: nn.Module) -> None:
        """Give a module such weights, of a size that keeps activations near 1."""
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                spread = 1.7 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
                parameter.copy_(self.tensor(*parameter.shape, spread=spread))
                if "norm" in name and name.endswith("weight"):
                    parameter.add_(1.0)


def _mask(draw: Draw, batch: int, q_len: int, k_len: int) -> tuple[str, ch.Mask | None]:
    random = draw.random
    before, count, step = random.randint(0, k_len), random.randint(1, k_len), random.randint(2, 5)
    lengths = torch.randint(1, k_len + 1, (batch,), generator=draw.generator)
    table = draw.tensor(q_len, k_len) > 0.5
    masks: dict[str, ch.Mask | None] = {
        "none": None,
        "causal": ch.Causal(),
        "window": ch.Window(before, 0),
        "two-sided window": ch.Window(before, count),
        "prefix": ch.Causal() | ch.Prefix(count),
        "padding": ch.Padding(lengths),
        "causal padding": ch.Causal() & ch.Padding(lengths),
        "strided": ch.Causal() & ch.Strided(step),
        "table": ch.Dense(table),
    }
    name = random.choice([*masks])
    return name, masks[name]


def _rules(draw: Draw, heads: int) -> tuple[str, tuple[ch.ScoreRule, ...]]:
    slopes = draw.tensor(heads, spread=0.12).abs()
    table = draw.tensor(heads, 2 * 300 + 1)
    rules: dict[str, Callable[[], ch.ScoreRule]] = {
        "alibi": lambda: ch.Alibi(slopes=slopes),
        "softcap": lambda: ch.SoftCap(draw.random.uniform(2.0, 30.0)),
        "relative": lambda: ch.RelativeBias(table),
        "sink": lambda: ch.Sink(slopes),
    }
    names = [] if draw.random.random() < 0.5 else draw.random.sample([*rules], draw.random.randint(1, 2))
    return "+".join(names), tuple(rules[name]() for name in names)


def _attention(draw: Draw) -> tuple[str, list[Tensor]]:
    """Forward and the gradients of query, key and value."""
    random = draw.random
    batch, kv_heads, group = random.randint(1, 2), random.randint(1, 2), random.choice((1, 1, 2, 4))
    k_len = random.choice(_LENGTHS)
    q_len = random.choice((1, k_len, random.randint(1, k_len)))
    width = random.choice(_WIDTHS)
    value_width = width if random.random() < 0.8 else random.choice(_WIDTHS)
    shapes = ((kv_heads * group, q_len, width), (kv_heads, k_len, width), (kv_heads, k_len, value_width))
    leaves = [draw.tensor(batch, *shape).requires_grad_() for shape in shapes]
    mask_name, mask = _mask(draw, batch, q_len, k_len)
    rule_name, rules = _rules(draw, kv_heads * group)
    offset = random.choice((0, k_len - q_len))
    dropout = {"dropout": 0.3, "seed": 5} if random.random() < 0.2 else {}
    output = ch.attention(*leaves, mask=mask, scores=rules, query_offset=offset, **dropout)  # type: ignore[arg-type]
    gradients = torch.autograd.grad(output, leaves, draw.tensor(*output.shape))
    words = f"batch {batch}, heads {kv_heads * group}/{kv_heads}, {q_len} x {k_len}, {width}/{value_width}"
    return f"{words}, {mask_name}, {rule_name or 'no rule'}, {dropout}", [output.detach(), *gradients]


def _statistics(draw: Draw) -> tuple[str, list[Tensor]]:
    random = draw.random
    length, width = random.choice(_LENGTHS), random.choice(_WIDTHS)
    query, key, value = (draw.tensor(1, 2, length, width) for _ in range(3))
    sizes = [min(3, length), min(4, length), 0, 0]
    after = random.choice(([], [0]))
    options = {"after": after[0]} if after else {}
    results = torch.ops.clearhead.attention_forward.default(
        query, key, value, width**-0.5, _STATISTICS, statistic_sizes=sizes, **options
    )
    statistics: list[Tensor] = []
    want = ch.Want(received=True, heatmap=random.choice((8, 16)), entropy=True)
    observed = ch.observe_attention(query, key, value, want=want)
    for field in ("received", "entropy", "heatmap_mean", "heatmap_max"):
        part = getattr(observed, field, None)
        statistics += [part] if isinstance(part, Tensor) else []
    return f"{length} x {width}, {options}, {len(statistics)} observed", [*results, *statistics]


def _linear(draw: Draw) -> tuple[str, list[Tensor]]:
    random = draw.random
    rows, width = random.choice(_LENGTHS), random.choice((*_WIDTHS, 192, 300, 512, 1100))
    columns = random.choice((*_WIDTHS, 200, 256, 700))
    x, weight, bias = draw.tensor(rows, width), draw.tensor(columns, width), draw.tensor(columns)
    weight = weight.t().contiguous().t() if random.random() < 0.2 else weight
    leaves = [each.requires_grad_() for each in (x, weight, bias)]
    output = project(*leaves)
    gradients = torch.autograd.grad(output, leaves, draw.tensor(*output.shape))
    return f"{rows} rows, {width} to {columns}", [output.detach(), *gradients]


def _feedforward(draw: Draw) -> tuple[str, list[Tensor]]:
    random = draw.random
    rows, width = random.choice(_LENGTHS), random.choice(_WIDTHS)
    hidden, activation = random.choice((*_WIDTHS, 256)), random.choice([*ACTIVATIONS])
    first, gate = draw.tensor(hidden, width, spread=3.0), draw.tensor(hidden, width)
    x, last = draw.tensor(rows, width, spread=4.0), draw.tensor(width, hidden)
    gated = random.random() < 0.5
    leaves = [each.requires_grad_() for each in (x, first, last, *([gate] if gated else []))]
    gate_layer = (gate, None) if gated else None
    output = project_activate_project(x, first, None, last, None, activation=activation, gate=gate_layer)
    assert output is not None
    gradients = torch.autograd.grad(output, leaves, draw.tensor(*output.shape))
    words = f"{activation}, {rows} rows, {width} over {hidden}, {'gated' if gated else 'plain'}"
    return words, [output.detach(), *gradients]


def _norm(draw: Draw) -> tuple[str, list[Tensor]]:
    random = draw.random
    rows, width = random.choice(_LENGTHS), random.choice((*_WIDTHS, 300, 512, 1100, 2500))
    x, weight = draw.tensor(rows, width).requires_grad_(), draw.tensor(width).requires_grad_()
    kind = random.choice((NormKind.LAYER, NormKind.RMS))
    output = normed(x, ((kind, 1e-5), (weight, None)))
    gradients = torch.autograd.grad(output, (x, weight), draw.tensor(*output.shape))
    return f"{kind.name}, {rows} rows of {width}", [output.detach(), *gradients]


def _model(draw: Draw) -> tuple[str, list[Tensor]]:
    """Logits, greedy text and the gradients of every parameter of a small language model."""
    random = draw.random
    options = {
        "positions": random.choice(("learned", "sinusoidal", "rotary")),
        "norm": random.choice(("layer", "rms")),
        "activation": random.choice(("gelu", "silu", "relu")),
        "gated": random.random() < 0.5,
        "num_kv_heads": random.choice((None, 1, 2)),
        "norm_first": random.random() < 0.7,
    }
    model = ch.nn.LanguageModel(61, 48, num_heads=4, num_layers=2, max_len=96, **options)  # type: ignore[arg-type]
    draw.fill(model)
    model.eval()
    ids = torch.randint(0, 61, (2, random.randint(3, 40)), generator=draw.generator)
    with torch.no_grad():
        text = model.generate(ids, 12, temperature=0.0)
        sampled = model.generate(ids, 12, temperature=0.8, top_k=random.choice((None, 20)), seed=random.randrange(99))
        in_pages = model.generate([ids[0], ids[1, : ids.shape[1] // 2 + 1]], 6, temperature=0.0)
        scored = model(ids, lengths=[ids.shape[1], ids.shape[1] // 2 + 1])
    assert isinstance(text, Tensor)
    assert isinstance(sampled, Tensor)
    model.train()
    logits = model(ids)
    gradients = torch.autograd.grad(logits, [*model.parameters()], draw.tensor(*logits.shape))
    return f"{options}, {tuple(ids.shape)} ids", [text, sampled, *in_pages, scored, logits.detach(), *gradients]


def _swapped(draw: Draw) -> tuple[str, list[Tensor]]:
    """An encoder of torch that runs on the kernels: outputs under padding, and every gradient."""
    random = draw.random
    activation, first = random.choice(("gelu", "relu")), random.random() < 0.5
    layer = nn.TransformerEncoderLayer(40, 4, 72, 0.0, activation=activation, batch_first=True, norm_first=first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    draw.fill(model)
    assert not ch.swap(model).outside
    x, length = draw.tensor(2, random.randint(2, 90), 40), random.randint(1, 2)
    hidden = torch.arange(x.shape[1]) >= torch.tensor([[x.shape[1]], [length]])
    with torch.no_grad():
        padded = model.eval()(x, src_key_padding_mask=hidden)[:, :length]
    output = model.train()(x.requires_grad_())
    gradients = torch.autograd.grad(output, [x, *model.parameters()], draw.tensor(*output.shape))
    return f"{activation}, {'pre' if first else 'post'}-norm, {tuple(x.shape)}", [padded, output.detach(), *gradients]


#: Kinds of calls by name: each gives words and the tensors whose bits are compared.
KINDS: dict[str, Callable[[Draw], tuple[str, list[Tensor]]]] = {
    "attention": _attention,
    "statistics": _statistics,
    "linear": _linear,
    "feedforward": _feedforward,
    "norm": _norm,
    "model": _model,
    "swapped": _swapped,
}


def digest(seed: int) -> str:
    """``kind: words: digests`` of a seed's results. A NaN's sign and payload are the processor's and do not count."""
    kind = [*KINDS][seed % len(KINDS)]
    words, results = KINDS[kind](Draw(seed))
    parts = []
    for result in results:
        plain = result.detach().contiguous()
        if plain.is_floating_point():
            plain = torch.where(plain.isnan(), torch.full_like(plain, torch.nan), plain)
        parts.append(hashlib.sha256(plain.numpy().tobytes()).hexdigest()[:12])
    return f"{seed} {kind} {words}: {' '.join(parts)}"


def main(arguments: list[str]) -> None:
    """Print the set and torch's, then the digests of ``count`` seeds from ``first`` on: ``first count [level]``."""
    first, count = map(int, arguments[:2])
    level: Literal["portable"] | bool = "portable" if arguments[2:3] != ["off"] else False
    print(isa_name(), torch.backends.cpu.get_cpu_capability())
    torch.set_num_threads(1)
    with ch.invariant(level):
        for seed in range(first, first + count):
            print(digest(seed))


if __name__ == "__main__":
    main(sys.argv[1:])
