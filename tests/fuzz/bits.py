"""Random calls, each computed whole and in another way: the bits must be equal under ``ch.invariant()``.

Calls are drawn from Python's generator, a seed each, so that any one can be repeated: ``compare(seed)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

import clearhead as ch
from clearhead.nn.norm import normed
from clearhead.ops.kinds import NormKind
from clearhead.projection import ACTIVATIONS, project, project_activate_project
from clearhead.verify.laws.invariance import difference

__all__ = ["KINDS", "compare"]

#: Around the kernels' rows and tiles; small ones are as likely as large ones.
_LENGTHS = (1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 33, 48, 63, 64, 65, 97, 128, 129, 150, 200, 257)
#: The same with several tiles of keys.
_LONG = (*_LENGTHS, 300, 511, 520, 700, 1100)
_WIDTHS = (1, 3, 8, 16, 24, 32, 40, 64, 65, 80, 128)
_DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, torch.float16)
#: A mask of some sequences of the batch: ``mask(rows)``.
MaskOf = Callable[[list[int]], ch.Mask | None]


@dataclass(eq=False)
class _Call:
    """A random call of attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: MaskOf
    offset: int
    words: str
    options: dict[str, Any] = field(default_factory=dict)

    def run(
        self, rows: list[int] | None = None, queries: slice = slice(None), keys: int | None = None, **others: Any
    ) -> Tensor:
        """The output of some sequences, some queries, and the first keys."""
        chosen = [*range(len(self.query))] if rows is None else rows
        start = queries.indices(self.query.shape[2])[0]
        options: dict[str, Any] = {**self.options, "mask": self.mask(chosen), "query_offset": self.offset + start}
        query, key, value = others.get("tensors", (self.query, self.key, self.value))
        return ch.attention(
            query[chosen][:, :, queries], key[chosen][:, :, :keys], value[chosen][:, :, :keys], **options
        )


def _call(random: Random, generator: torch.Generator, *, causal: bool = False) -> _Call:
    """A call whose mask is a function of positions, so that its parts are calls; ``causal`` for as many queries as
    keys, none of which sees a later one."""
    batch, kv_heads, group = random.randint(1, 3), random.randint(1, 2), random.choice((1, 1, 2, 4))
    k_len = random.choice(_LENGTHS)
    q_len = k_len if causal else random.choice((1, k_len, random.randint(1, k_len)))
    offset = 0 if causal else random.choice((0, k_len - q_len))
    width = random.choice(_WIDTHS)
    value_width = width if random.random() < 0.8 else random.choice(_WIDTHS)
    dtype = random.choice(_DTYPES)
    shapes = ((batch, kv_heads * group, q_len, width), (batch, kv_heads, k_len, width))
    drawn = (torch.randn(shape, generator=generator) for shape in (*shapes, (batch, kv_heads, k_len, value_width)))
    query, key, value = (tensor.to(dtype) for tensor in drawn)
    name, mask = _mask(random, generator, batch, q_len, k_len, causal=causal)
    rules, rule_names = _rules(random, generator, kv_heads * group)
    options: dict[str, Any] = {"scores": rules}
    if random.random() < 0.2:
        options["scale"] = random.uniform(0.05, 1.0)
    words = f"{dtype} query {tuple(query.shape)} key {tuple(key.shape)} value_dim {value_width} {name} {rule_names}"
    return _Call(query, key, value, mask, offset, words, options)


def _mask(
    random: Random, generator: torch.Generator, batch: int, q_len: int, k_len: int, *, causal: bool
) -> tuple[str, MaskOf]:
    before, count = random.randint(0, k_len), random.randint(1, k_len)
    lengths = torch.randint(1, k_len + 1, (batch,), generator=generator)
    step = random.randint(2, 5)
    masks: dict[str, MaskOf] = {
        "causal": lambda rows: ch.Causal(),
        "window": lambda rows: ch.Window(before, 0),
        "causal prefix of nothing": lambda rows: ch.Causal() & ch.Strided(step),
    }
    if not causal:
        masks |= {
            "none": lambda rows: None,
            "two-sided window": lambda rows: ch.Window(before, count),
            "prefix": lambda rows: ch.Causal() | ch.Prefix(count),
            "padding": lambda rows: ch.Padding(lengths[rows]),
            "causal padding": lambda rows: ch.Causal() & ch.Padding(lengths[rows]),
            "global": lambda rows: ch.Window(before, 0) | ch.Global(1),
            "function": lambda rows: ch.MaskFunction(lambda b, h, i, j: (i + 2 * j) % step != 0),
        }
    name = random.choice([*masks])
    return name, masks[name]


def _rules(random: Random, generator: torch.Generator, heads: int) -> tuple[tuple[ch.ScoreRule, ...], str]:
    if random.random() < 0.6:
        return (), ""
    slopes = torch.rand(heads, generator=generator) / 8
    table = torch.randn(heads, 2 * 300 + 1, generator=generator)
    rules: dict[str, Callable[[], ch.ScoreRule]] = {
        "alibi": lambda: ch.Alibi(slopes=slopes),
        "softcap": lambda: ch.SoftCap(random.uniform(2.0, 30.0)),
        "relative": lambda: ch.RelativeBias(table),
        "sink": lambda: ch.Sink(slopes),
    }
    names = random.sample([*rules], random.randint(1, 2))
    return tuple(rules[name]() for name in names), "+".join(names)


# ---- ways to compute a call a second time ---------------------------------------------------------------------------


def _alone(random: Random, generator: torch.Generator) -> tuple[str, Tensor, Tensor]:
    call = _call(random, generator)
    rows = random.sample(range(len(call.query)), random.randint(1, len(call.query)))
    return f"{call.words}; sequences {rows}", call.run()[rows], call.run(rows)


def _queries(random: Random, generator: torch.Generator) -> tuple[str, Tensor, Tensor]:
    call = _call(random, generator)
    start = random.randrange(call.query.shape[2])
    part = slice(start, random.choice((start + 1, random.randint(start + 1, call.query.shape[2]))))
    return f"{call.words}; queries {part.start}:{part.stop}", call.run()[:, :, part], call.run(queries=part)


def _chunk(random: Random, generator: torch.Generator) -> tuple[str, Tensor, Tensor]:
    """A chunk of queries, which sees the keys up to its end: prefill in chunks, and decoding."""
    call = _call(random, generator, causal=True)
    start = random.randrange(call.query.shape[2])
    end = random.choice((start + 1, random.randint(start + 1, call.query.shape[2])))
    words = f"{call.words}; queries {start}:{end} over {end} keys"
    return words, call.run()[:, :, start:end], call.run(queries=slice(start, end), keys=end)


def _padded(random: Random, generator: torch.Generator) -> tuple[str, Tensor, Tensor]:
    """A causal call with further slots, as in a cache of fixed capacity."""
    call = _call(random, generator, causal=True)
    count, slots = call.key.shape[2], random.randint(1, 70)
    tensors = [
        torch.cat([part, part.new_full((*part.shape[:2], slots, part.shape[3]), 30.0)], dim=2)
        for part in (call.query, call.key, call.value)
    ]
    return f"{call.words}; {slots} further slots", call.run(), call.run(tensors=tensors)[:, :, :count]


def _padded_left(random: Random, generator: torch.Generator) -> tuple[str, Tensor, Tensor]:
    """The last queries of sequences that start later: each is the call without its padding."""
    batch, kv_heads, group = random.randint(1, 3), random.randint(1, 2), random.choice((1, 2, 4))
    k_len, width, dtype = random.choice(_LONG), random.choice(_WIDTHS), random.choice(_DTYPES)
    starts = [random.choice((0, random.randrange(k_len))) for _ in range(batch)]
    q_len = random.choice((1, random.randint(1, k_len - max(starts))))
    shapes = ((batch, kv_heads * group, q_len, width), *[(batch, kv_heads, k_len, width)] * 2)
    query, key, value = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    padding, causal = ~ch.Padding(torch.tensor(starts)), random.random() < 0.5
    mask = padding & ch.Causal() if causal else padding
    whole = ch.attention(query, key, value, mask=mask, query_offset=k_len - q_len)
    place = random.randrange(batch)
    row, start = slice(place, place + 1), starts[place]
    tokens = (query[row], key[row, :, start:], value[row, :, start:])
    alone = ch.attention(*tokens, mask=ch.Causal() if causal else None, query_offset=k_len - start - q_len)
    words = f"{dtype} query {tuple(query.shape)} key {tuple(key.shape)} causal {causal}; starts {starts}[{place}]"
    return words, whole[row], alone


def _packed(random: Random, generator: torch.Generator) -> tuple[str, Tensor, Tensor]:
    call = _call(random, generator, causal=True)
    lengths, rest = list[int](), call.query.shape[2]
    while rest:
        lengths.append(random.randint(1, rest))
        rest -= lengths[-1]
    documents, causal = ch.Documents(lengths=lengths), random.random() < 0.5
    # Biases of positions would count from the first document.
    options = {"scale": call.options.get("scale"), "query_offset": None}
    tensors = (call.query[:1], call.key[:1], call.value[:1])
    packed = ch.attention(*tensors, mask=documents & ch.Causal() if causal else documents, **options)
    place = random.randrange(len(lengths))
    part = slice(sum(lengths[:place]), sum(lengths[: place + 1]))
    alone = ch.attention(*(each[:, :, part] for each in tensors), mask=ch.Causal() if causal else None, **options)
    return f"{call.words}; document {place} of lengths {lengths}", packed[:, :, part], alone


def _gradients(random: Random, generator: torch.Generator) -> tuple[str, Tensor, Tensor]:
    call = _call(random, generator)
    rows = random.sample(range(len(call.query)), random.randint(1, len(call.query)))
    upstream = torch.randn(*call.query.shape[:3], call.value.shape[3], generator=generator).to(call.query.dtype)

    def pulled(chosen: list[int]) -> list[Tensor]:
        leaves = [part[chosen].clone().requires_grad_() for part in (call.query, call.key, call.value)]
        options = {**call.options, "mask": call.mask(chosen), "query_offset": call.offset}
        output = ch.attention(*leaves, **options)
        return [*torch.autograd.grad(output, leaves, upstream[chosen])]

    whole, alone = pulled([*range(len(call.query))]), pulled(rows)
    joined = (torch.cat([part.flatten() for part in parts]) for parts in ([each[rows] for each in whole], alone))
    return f"{call.words}; gradients of sequences {rows}", *joined


def _threads(random: Random, generator: torch.Generator) -> tuple[str, Tensor, Tensor]:
    call, before = _call(random, generator), torch.get_num_threads()
    try:
        outputs = []
        for count in (1, random.choice((2, 3, 5))):
            torch.set_num_threads(count)
            outputs.append(call.run())
    finally:
        torch.set_num_threads(before)
    return f"{call.words}; {count} threads", *outputs


def _rows_of(random: Random, generator: torch.Generator) -> tuple[Tensor, slice, int, torch.dtype]:
    """Tokens of a layer, some of them, their width and dtype."""
    count, width = random.choice(_LENGTHS), random.choice((*_WIDTHS, 192, 300, 512))
    dtype = random.choice(_DTYPES)
    start = random.randrange(count)
    part = slice(start, random.choice((start + 1, random.randint(start + 1, count))))
    return torch.randn(count, width, generator=generator).to(dtype), part, width, dtype


def _linear(random: Random, generator: torch.Generator) -> tuple[str, Tensor, Tensor]:
    x, part, width, dtype = _rows_of(random, generator)
    columns = random.choice((*_WIDTHS, 200, 256, 700))
    weight = torch.randn(columns, width, generator=generator).to(dtype)
    weight = weight.t().contiguous().t() if random.random() < 0.2 else weight
    bias = torch.randn(columns, generator=generator).to(dtype) if random.random() < 0.5 else None
    words = f"linear {dtype} {tuple(x.shape)} to {columns}, rows {part.start}:{part.stop}"
    return words, project(x, weight, bias)[part], project(x[part], weight, bias)


def _feedforward(random: Random, generator: torch.Generator) -> tuple[str, Tensor, Tensor]:
    x, part, width, dtype = _rows_of(random, generator)
    hidden, activation = random.choice((*_WIDTHS, 256)), random.choice([*ACTIVATIONS])
    first, gate = (torch.randn(hidden, width, generator=generator).to(dtype) for _ in range(2))
    last = torch.randn(width, hidden, generator=generator).to(dtype)
    gates = {"gate": (gate, None)} if random.random() < 0.5 else {}
    words = f"feedforward {activation} {dtype} {tuple(x.shape)} over {hidden}, rows {part.start}:{part.stop}"
    whole, some = (
        project_activate_project(each, first, None, last, None, activation=activation, **gates) for each in (x, x[part])
    )
    assert whole is not None
    assert some is not None
    return words, whole[part], some


def _norm(random: Random, generator: torch.Generator) -> tuple[str, Tensor, Tensor]:
    x, part, width, dtype = _rows_of(random, generator)
    weight = torch.randn(width, generator=generator).to(dtype)
    norm = (random.choice((NormKind.LAYER, NormKind.RMS)), 1e-5), (weight, None)
    words = f"norm {dtype} {tuple(x.shape)}, rows {part.start}:{part.stop}"
    return words, normed(x, norm)[part], normed(x[part], norm)


#: Ways to compute a call a second time, by name.
KINDS: dict[str, Callable[[Random, torch.Generator], tuple[str, Tensor, Tensor]]] = {
    "alone": _alone,
    "queries": _queries,
    "chunk": _chunk,
    "padded": _padded,
    "padded left": _padded_left,
    "packed": _packed,
    "gradients": _gradients,
    "threads": _threads,
    "linear": _linear,
    "feedforward": _feedforward,
    "norm": _norm,
}


def compare(seed: int, kinds: tuple[str, ...] = tuple(KINDS)) -> str | None:
    """The comparison of a seed; a description if a bit differs."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    kind = kinds[seed % len(kinds)]
    words, one, other = KINDS[kind](random, generator)
    error = difference(one, other)
    return None if error is None else f"compare({seed}): {kind}: {words} differs by {error:.2g}"
