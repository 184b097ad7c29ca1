"""The kernels' calls of one attention with its projections, and the step that they make."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from ctypes import Structure
from typing import Final, NamedTuple

import torch
from torch import Tensor

from clearhead.backends import native
from clearhead.backends.native_append import Append
from clearhead.backends.native_header import Verb
from clearhead.backends.native_memory import new_tensor
from clearhead.backends.native_norm import Norm, NormForward, NormKind
from clearhead.backends.native_prepared import Written
from clearhead.backends.native_projection import Product, WeightGradients, run_all, run_calls
from clearhead.backends.native_rotation import Rotation
from clearhead.backends.native_work import BackwardWork, ForwardWork, Rows
from clearhead.functional import attention
from clearhead.nn.held import Held
from clearhead.nn.rule_tensors import RuleTensors, Turning, turning
from clearhead.nn.step import LearningStep, WayBack
from clearhead.positions import Rotary, table_of, turned_by_token
from clearhead.problem import Problem
from clearhead.projection import Layer, layers_of, project
from clearhead.shapes import Float
from clearhead.statistics import Want

__all__ = [
    "AttentionBackward",
    "AttentionForward",
    "AttentionKind",
    "AttentionStep",
    "attended_by_parts",
    "by_head",
    "positions_of",
    "taken",
]

_NOTHING = Want()


def by_head(projected: Sequence[Tensor], batch: int, counts: tuple[int, int, int]) -> tuple[Tensor, ...]:
    """Queries, keys and values ``[batch, heads, len, dim]`` in ``[rows, width]`` each, or in one that holds them side
    by side, or keys and values alone; ``counts`` are their heads."""
    found: list[Tensor] = []
    for own, together in zip(projected, _TOGETHER[len(projected)], strict=True):
        found += _split(own, batch, counts[len(found) : len(found) + together])
    return tuple(found)


def _split(rows: Float[Tensor, "rows width"], batch: int, counts: Sequence[int]) -> list[Tensor]:
    """Heads ``[batch, heads, len, dim]`` that lie side by side, so many of each kind."""
    by_token = rows.view(batch, len(rows) // batch, sum(counts), -1)
    return [part.transpose(1, 2) for part in by_token.split(list(counts), dim=2)]


#: Of queries, keys and values how many lie side by side in each of one, two or three projections.
_TOGETHER: Final = {1: (3,), 2: (1, 2), 3: (1, 1, 1)}


def _by_head_of(problem: Problem, projected: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same for a problem."""
    return by_head(projected, problem.batch, (problem.num_heads, problem.num_kv_heads, problem.num_kv_heads))


def _side_by_side(heads: Tensor) -> Float[Tensor, "rows width"]:
    return heads.transpose(1, 2).reshape(heads.shape[0] * heads.shape[2], -1)


class AttentionKind(NamedTuple):
    """What an attention is besides its problem and its tensors.

    Attributes:
        layers: how many it has: those of queries, keys and values, and the one that mixes heads.
        rotary: what turns its queries and keys.
        head_norms: kind and epsilon of the norms of heads, of queries and of keys, where there are some: their weights
            and biases stand behind the layers'.
    """

    layers: int
    rotary: Turning = None
    head_norms: tuple[tuple[NormKind, float], ...] = ()

    @property
    def pairs(self) -> int:
        """How many weights with their biases it has."""
        return self.layers + len(self.head_norms)

    def told_apart(self, tensors: Sequence[Tensor | None]) -> tuple[list[Layer], list[Norm]]:
        """Layers and norms of its tensors."""
        layers, others = tensors[: 2 * self.layers], tensors[2 * self.layers :]
        norms = [Norm(*kind, *others[2 * place : 2 * place + 2]) for place, kind in enumerate(self.head_norms)]
        return layers_of(layers), norms


class _Source(NamedTuple):
    """A product that queries, keys or values come from: which layer's, on which tokens, and the part of the layer that
    reads these."""

    place: int
    tokens: int
    weight: Tensor
    bias: Tensor | None


def _sources(problem: Problem, tokens: int, layers: Sequence[Layer]) -> list[_Source]:
    """Those of an attention to as many sequences: queries from the first, keys and values from the last."""
    if tokens == 1:
        return [_Source(place, 0, *layer) for place, layer in enumerate(layers)]
    if len(layers) == 1:
        # Queries read other tokens than keys and values do: one layer is two products.
        (weight, bias), of_queries = layers[0], problem.num_heads * problem.head_dim
        parts = (slice(None, of_queries), slice(of_queries, None))
        return [_Source(0, own, weight[rows], None if bias is None else bias[rows]) for own, rows in enumerate(parts)]
    return [_Source(place, int(place > 0), *layer) for place, layer in enumerate(layers)]


def _query_source(problem: Problem, layers: Sequence[Layer]) -> _Source:
    """That of queries alone, where keys and values are there already."""
    return _sources(problem, 2, layers)[0]


def positions_of(problem: Problem, held: Held | None) -> int:
    """How many positions a call's queries and keys stand at, from 0 on, up to where a cache of its own must grow."""
    room = held.key.shape[2] if held is not None and held.grows else problem.k_len
    return max(problem.query_offset + problem.q_len, room)


def _turns(
    rotary: Rotary | Tensor | None, problem: Problem, heads: Sequence[Tensor], held: Held | None = None, *,
    back: bool = False,
) -> list[Rotation]:  # fmt: skip
    """What turns queries, and keys where these are not there already, by their positions in place."""
    if rotary is None:
        return []
    if isinstance(rotary, Tensor):
        return [Rotation(_as_many_rows(part, len(rotary)), rotary, 0, back=back) for part in heads[:2]]
    # Behind those that a cache holds new keys stand where their tokens do as queries.
    places = (problem.query_offset, problem.query_offset if held is not None and held.grows else 0)
    table = table_of(rotary, problem.head_dim, positions_of(problem, held))
    return [Rotation(part, table, first, back=back) for part, first in zip(heads[:2], places, strict=False)]


def _as_many_rows(heads: Tensor, count: int) -> Float[Tensor, "_batch heads _len head_dim"]:
    """Heads of so many tokens: of each sequence, or of all of them, one behind the other as they were projected."""
    batch, _, length, _ = heads.shape
    if count == length:
        return heads
    assert count == batch * length
    rows = heads.stride(0) // length
    assert length == 1 or rows == heads.stride(2)
    return heads.as_strided((1, heads.shape[1], count, heads.shape[3]), (0, heads.stride(1), rows, 1))


class AttentionForward:
    """Projections, rotary positions, attention and the heads' mixing, written down.

    Args:
        problem: of hollow tensors.
        tokens: ``[batch * len, in]`` of those that attend, and of the memory where it is not theirs.
        layers: of queries, keys and values, or one that makes all three; the last one mixes the heads.
        seed: of the attention's dropout.
        training: whether ``kept`` holds what backward reads besides.
        held: keys and values that are read from a cache, not while training.
        rotary: what turns queries and keys, or the angles of the call's tokens as in ``turned_by_token``.
        norms: of each head's queries and of its keys, not while training.

    Attributes:
        calls: in order.
        counters: of their fields, those that hold a position.
        output: ``[batch, len, out]``.
        kept: what is projected, queries and keys turned; the heads; while training their rows' statistics, and exact
            output where it is kept.
        stays: tensors that the calls read and that stay where they are.
    """

    def __init__(
        self, problem: Problem, tokens: Sequence[Float[Tensor, "_rows _in"]], layers: Sequence[Layer], seed: int,
        training: bool, held: Held | None = None, rotary: Rotary | Tensor | None = None, norms: Sequence[Norm] = (),
    ) -> None:  # fmt: skip
        *first, (weight, bias) = layers
        rows = tokens[0]
        alone = held is not None and not held.grows
        sources = [_query_source(problem, first)] if alone else _sources(problem, len(tokens), first)
        products = [Product([(tokens[own.tokens], own.weight)], right_turned=True, bias=own.bias) for own in sources]
        projected, normed = [product.output for product in products], list[NormForward]()
        self.kept = [*projected]
        for place, norm in enumerate(norms):
            normed.append(NormForward(projected[place].view(-1, problem.head_dim), norm))
            projected[place] = normed[-1].output.view(projected[place].shape)
            self.kept.append(projected[place])
        heads, turns, appended = self._heads(problem, projected, held, rotary)
        attended = ForwardWork(problem.with_tensors(*heads).with_seed(seed), _NOTHING, for_backward=training)
        self.counters = [append.counter for append in appended]
        if held is not None and held.grows:
            self.counters += [turn.counter for turn in turns if isinstance(rotary, Rotary)]
            self.counters += [(attended.description, "k_len", problem.q_len), (attended.description, "query_offset", 0)]
        elif held is not None:
            attended.description.k_len = held.length
        self.output = new_tensor(rows, (problem.batch, problem.q_len, weight.shape[0]))
        mixed = Product(
            [(_side_by_side(attended.output), weight)], right_turned=True, bias=bias,
            output=self.output.view(len(rows), -1),
        )  # fmt: skip
        statistics = [] if attended.rows is None else [attended.rows.softmax]
        if attended.rows is not None and attended.rows.output is not None and rows.dtype != torch.float32:
            statistics.append(attended.rows.output)
        self.kept += [attended.output, *statistics]
        self.calls: list[tuple[Verb, Structure]] = [
            *(product.call for product in products), *(own.call for own in normed), *(turn.call for turn in turns),
            *(append.call for append in appended), attended.call, mixed.call,
        ]  # fmt: skip
        self.stays = [*attended.held, *_tables(rotary, turns)]
        # Of a sink alone, and nobody reads it here.
        self.stays += [] if attended.lse is None else [attended.lse]
        self._alive = (products, normed, turns, appended, attended, mixed)

    @staticmethod
    def _heads(
        problem: Problem, projected: Sequence[Tensor], held: Held | None, rotary: Rotary | Tensor | None
    ) -> tuple[tuple[Tensor, ...], list[Rotation], list[Append]]:
        """Queries, keys and values; what turns those that are new, and what puts them behind those that a cache
        holds."""
        if held is not None and not held.grows:
            heads = tuple(_split(projected[0], problem.batch, [problem.num_heads]))
        else:
            heads = _by_head_of(problem, projected)
        turns, (query, *new) = _turns(rotary, problem, heads, held), heads
        if held is None:
            return heads, turns, []
        rooms = (held.key, held.value)
        appended = [Append(part, room, held.length) for part, room in zip(new, rooms, strict=False)]
        return (query, *rooms), turns, appended


def _tables(rotary: Rotary | Tensor | None, turns: Sequence[Rotation]) -> list[Tensor]:
    """What the turns read that stays where it is: a table for all calls."""
    return [turn.table for turn in turns[:1] if isinstance(rotary, Rotary)]


def taken(kept: deque[Tensor], layers: Sequence[Layer], tokens: int) -> list[Tensor]:
    """What an attention kept, off the front of what a step did: its projections in two axes, all else in four."""
    first = len(layers) - 1
    found = [kept.popleft() for _ in range(first if first > 1 else tokens)]
    while kept and kept[0].dim() == 4:
        found.append(kept.popleft())
    return found


class AttentionBackward:
    """The way back, written down: products before the attention's, and behind it, where gradients of queries and keys
    are turned back first.

    Args:
        problem: of hollow tensors.
        arrived: the output's gradient, ``[rows, out]``.
        tokens: what forward read.
        layers: as forward had them.
        kept: what forward kept.
        seed: as forward had it.
        needs: of ``tokens``, each of them, and of each layer's weight and bias.
        rotary: as forward had it.
    """

    def __init__(
        self, problem: Problem, arrived: Float[Tensor, "rows out"], tokens: Sequence[Float[Tensor, "_rows _in"]],
        layers: Sequence[Layer], kept: Sequence[Tensor], seed: int, needs: Sequence[bool],
        rotary: Rotary | Tensor | None = None,
    ) -> None:  # fmt: skip
        *first, (weight, _) = layers
        sources = _sources(problem, len(tokens), first)
        projected, (heads, softmax, *exact) = kept[: len(sources)], kept[len(sources) :]
        own = heads if heads.dtype == torch.float32 else exact[0] if exact else None
        self.problem, self.statistics = (
            problem.with_tensors(*_by_head_of(problem, projected)).with_seed(seed),
            Rows(own, None, softmax),
        )
        self._mixed = WeightGradients([(arrived, _side_by_side(heads))], *needs[-2:])
        self._before, self._after = [*self._mixed.products], list[Product]()
        self._rotary, self._turns, self._own = rotary, list[Rotation](), list[WeightGradients]()
        #: Of each of ``tokens``, None where it is not needed.
        self.of_tokens: list[Tensor | None] = [None] * len(tokens)
        self._attended: BackwardWork | None = None
        #: What is written on the way.
        self.between: list[Tensor] = []
        self._without = len(needs) - 2
        if any(needs[:-2]):
            self._add_attention(arrived, tokens, projected, sources, weight, needs)

    def _add_attention(
        self, arrived: Tensor, tokens: Sequence[Tensor], projected: Sequence[Tensor], sources: Sequence[_Source],
        weight: Tensor, needs: Sequence[bool],
    ) -> None:  # fmt: skip
        problem, count = self.problem, len(tokens)
        of_joined = Product([(arrived, weight)])
        self._before.append(of_joined)
        of_projected = [new_tensor(part, tuple(part.shape)) for part in projected]
        self._of_heads = of_joined.output.view(problem.batch, problem.q_len, problem.num_heads, -1).transpose(1, 2)
        self._into = _by_head_of(problem, of_projected)
        self._attended = BackwardWork(problem, self.statistics, self._of_heads, into=self._into)
        self._turns = _turns(self._rotary, problem, self._into, back=True)
        self.between = [of_joined.output, *of_projected, self._attended.delta]
        pairs = list(zip(sources, of_projected, strict=True))
        for place in range(sources[-1].place + 1):
            parts = [(part, tokens[own.tokens]) for own, part in pairs if own.place == place]
            self._own.append(WeightGradients(parts, *needs[count + 2 * place : count + 2 * place + 2]))
        self._after = [product for layer in self._own for product in layer.products]
        for place, (rows, needed) in enumerate(zip(tokens, needs, strict=False)):
            if needed:
                found = new_tensor(rows, (problem.batch, len(rows) // problem.batch, rows.shape[1]))
                terms = [(part, own.weight) for own, part in pairs if own.tokens == place]
                self._after.append(Product(terms, output=found.view(rows.shape)))
                self.of_tokens[place] = found

    @property
    def calls(self) -> list[tuple[Verb, Structure]]:
        """In order."""
        attended = [] if self._attended is None else [self._attended.call]
        return [*(product.call for product in self._before), *attended, *self._behind]

    @property
    def _behind(self) -> list[tuple[Verb, Structure]]:
        """Those behind the attention's."""
        return [*(turn.call for turn in self._turns), *(product.call for product in self._after)]

    @property
    def stays(self) -> list[Tensor]:
        """Tensors that the calls read and that stay where they are."""
        return [] if self._attended is None else [*self._attended.held, *_tables(self._rotary, self._turns)]

    @property
    def of_layers(self) -> list[Tensor]:
        """Gradients of weights and biases that the products write, in their order."""
        return [part for layer in (*self._own, self._mixed) for part in layer.written]

    def found(self) -> list[Tensor | None]:
        """Gradients of ``tokens``, and of each layer's weight and bias, once the calls are made."""
        mixed = [*self._mixed.found()]
        if self._attended is None:
            return [None] * self._without + mixed
        return [*self.of_tokens, *(part for layer in self._own for part in layer.found()), *mixed]

    def run_contained(self) -> None:
        """Make the calls where NaN or inf may meet a mask."""
        run_all(self._before)
        if self._attended is None:
            return
        gradients = native.gradients(self.problem, self.statistics, native.Arrived(self._of_heads))
        for place, gradient in zip(self._into, gradients, strict=True):
            place.copy_(gradient)
        run_calls(self._behind)


def attended_by_parts(
    problem: Problem,
    tokens: Sequence[Float[Tensor, "*batch _len _in"]],
    layers: Sequence[Layer],
    seed: int,
    rotary: Rotary | Tensor | None = None,
) -> Float[Tensor, "batch len out"]:
    """An attention with its projections by functions that autograd and watchers know."""
    *first, last = layers
    sources = _sources(problem, len(tokens), first)
    projected = [project(tokens[own.tokens], own.weight, own.bias).flatten(0, 1) for own in sources]
    query, key, value = _by_head_of(problem, projected)
    if isinstance(rotary, Tensor):
        query, key = turned_by_token(query, rotary), turned_by_token(key, rotary)
    elif rotary is not None:
        query, key = rotary.rotate(query, problem.query_offset), rotary.rotate(key)
    output = attention(
        query, key, value, mask=problem.mask, scores=problem.scores, scale=problem.scale,
        dropout=problem.dropout, seed=seed, query_offset=problem.query_offset, backend=native.BACKEND.name,
    )  # fmt: skip
    return project(output.transpose(1, 2).flatten(-2), *last)


class AttentionStep(LearningStep):
    """One attention with its projections: a weight and a bias for each of its layers, the last one behind the
    others."""

    def __init__(
        self, problems: Sequence[Problem], training: bool, layout: Hashable | None, kind: AttentionKind,
        rules: RuleTensors,
    ) -> None:  # fmt: skip
        super().__init__(problems, training, layout, [problem.dropout for problem in problems], rules)
        self.kind = kind

    def write_forward(
        self, problems: Sequence[Problem], tokens: Sequence[Tensor], tensors: Sequence[Tensor | None],
        seeds: Sequence[int], held: Sequence[Held | None], angles: Tensor | None,
    ) -> Written:  # fmt: skip
        (layers, norms), rotary = self.kind.told_apart(tensors), turning(self.kind.rotary, angles)
        own = AttentionForward(problems[0], tokens, layers, seeds[0], self.training, held[0], rotary, norms)
        return Written(own.calls, [*own.kept, own.output], own.stays, own, own.counters)

    def write_backward(
        self, problems: Sequence[Problem], arrived: Tensor, tokens: Sequence[Tensor],
        tensors: Sequence[Tensor | None], kept: Sequence[Tensor], seeds: Sequence[int], needs: Sequence[bool],
        angles: Tensor | None,
    ) -> WayBack:  # fmt: skip
        layers, rotary = layers_of(tensors), turning(self.kind.rotary, angles)
        return _AttentionWayBack(AttentionBackward(problems[0], arrived, tokens, layers, kept, seeds[0], needs, rotary))

    def by_parts(
        self, problems: Sequence[Problem], tokens: Sequence[Tensor], tensors: Sequence[Tensor | None],
        seeds: Sequence[int], angles: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return attended_by_parts(problems[0], tokens, layers_of(tensors), seeds[0], turning(self.kind.rotary, angles))


class _AttentionWayBack(WayBack):
    def __init__(self, own: AttentionBackward) -> None:
        self._own = own

    def written(self) -> Written:
        own = self._own
        of_tokens = [part for part in own.of_tokens if part is not None]
        return Written(own.calls, [*of_tokens, *own.of_layers, *own.between], own.stays, own)

    def found(self) -> list[Tensor | None]:
        return self._own.found()

    def contained(self) -> list[Tensor | None]:
        self._own.run_contained()
        return self._own.found()
