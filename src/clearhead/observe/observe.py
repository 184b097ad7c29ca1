"""``observe``: statistics of the attention of a running model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Final

import torch
from torch import Tensor, nn

from clearhead.arguments import flag, repr_of, several, whole_number
from clearhead.errors import ShapeError, UnsupportedError
from clearhead.observe.layers import (
    LayerRecords,
    Layers,
    attention_layers,
    choose_heads,
    choose_layers,
    not_called,
)
from clearhead.observe.packed import sequences_of
from clearhead.observe.text import table
from clearhead.shapes import Float, Int
from clearhead.statistics import Observation, Want
from clearhead.watch import Attend, Call, watching

__all__ = ["Observed", "Seen", "observe"]

_FUNCTION: Final = "observe"
#: Statistics with one entry per query, which ``queries`` chooses from.
_BY_QUERY: Final = frozenset({"lse", "max_score", "entropy", "top_indices", "top_weights", "sink", "distance"})


@dataclass(frozen=True, kw_only=True, eq=False)
class Observed:
    """Statistics of one call of one attention layer; those that were not requested are None.

    The axes ``heads`` and ``q_len`` contain the chosen heads and queries, in the order given. A packed batch is
    unpacked: ``batch`` counts its sequences, and rows at padding are those of queries that may attend to nothing.
    Statistics describe the weights ``p`` before dropout.

    Attributes:
        layer: the module's dotted name.
        heads: indices of the query heads.
        queries: position of each query in its sequence.
        lengths: number of tokens of each sequence if the call was packed, else None.
        lse: log-sum-exp of each row of scores, ``[batch, heads, q_len]``.
        max_score: largest score of each row, ``[batch, heads, q_len]``.
        entropy: ``-sum p log p`` of each row in nats, ``[batch, heads, q_len]``.
        top_indices: keys of the largest weights of each row, ``[batch, heads, q_len, k]``.
        top_weights: the largest weights of each row, ``[batch, heads, q_len, k]``.
        received: attention that each key receives, summed over queries, ``[batch, heads, k_len]``.
        row_weights: ``w @ weights`` for the ``w`` of ``ch.Want``, ``[batch, heads, n, k_len]``.
        heatmap_max: largest weight of each tile, ``[batch, heads, q_tiles, k_tiles]``.
        heatmap_mean: mean weight of each tile, ``[batch, heads, q_tiles, k_tiles]``.
        sink: weight on the first keys, ``[batch, heads, q_len]``.
        distance: ``sum p |q_pos - k_pos|`` of each row, ``[batch, heads, q_len]``.
        rows: attention weights of the chosen rows, ``[batch, heads, rows, k_len]``.
    """

    layer: str
    heads: tuple[int, ...]
    queries: tuple[int, ...]
    lengths: tuple[int, ...] | None
    lse: Float[Tensor, "batch heads q_len"] | None = None
    max_score: Float[Tensor, "batch heads q_len"] | None = None
    entropy: Float[Tensor, "batch heads q_len"] | None = None
    top_indices: Int[Tensor, "batch heads q_len k"] | None = None
    top_weights: Float[Tensor, "batch heads q_len k"] | None = None
    received: Float[Tensor, "batch heads k_len"] | None = None
    row_weights: Float[Tensor, "batch heads n k_len"] | None = None
    heatmap_max: Float[Tensor, "batch heads q_tiles k_tiles"] | None = None
    heatmap_mean: Float[Tensor, "batch heads q_tiles k_tiles"] | None = None
    sink: Float[Tensor, "batch heads q_len"] | None = None
    distance: Float[Tensor, "batch heads q_len"] | None = None
    rows: Float[Tensor, "batch heads rows k_len"] | None = None

    @property
    def statistics(self) -> dict[str, Tensor]:
        """The requested statistics by name."""
        return {name: value for name in _STATISTICS if (value := getattr(self, name)) is not None}

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={list(value.shape)}" for name, value in self.statistics.items())
        return f"Observed({self.layer!r}, {shown})"


_STATISTICS: Final = tuple(each.name for each in fields(Observation) if each.name != "output")


class Seen(LayerRecords[Observed]):
    """A mapping from layers to ``Observed``: ``seen["encoder.blocks.3.attention"].received``, or ``seen[3]``.

    ``calls(layer)`` gives every recorded call of a layer. ``str()`` gives a table of shapes.
    """

    def __str__(self) -> str:
        rows = []
        for name in self:
            for place, record in enumerate(self.calls(name)):
                for statistic, value in record.statistics.items():
                    rows.append([name, str(place), statistic, str(list(value.shape))])
        return table(["layer", "call", "statistic", "shape"], rows, right={1})

    def __repr__(self) -> str:
        return f"Seen({', '.join(self)})"


@contextmanager
def observe(
    model: nn.Module,
    want: Want,
    *,
    layers: Layers = None,
    heads: int | Sequence[int] | None = None,
    queries: int | Sequence[int] | None = None,
    keep: str = "last",
    detach: bool = True,
) -> Iterator[Seen]:
    """Compute statistics of every attention layer of a model while it runs within a ``with`` block.

    The model's outputs and gradients are bitwise identical to those without ``observe``. No hook is added to a module;
    the statistics can be read within the block and after it.

    Every call in this thread is observed, including those of ``generate``: the prompt is one call, each new token
    another, and positions continue from call to call. A batch that the model packs is unpacked into its sequences.
    Graphs of ``torch.compile`` cannot be observed. A block that ends without an observed call raises an error with the
    likely reason.

    Args:
        model: a model with modules of clearhead, or one that was passed to ``ch.swap``.
        want: which statistics. Its ``rows`` are positions in the sequence; each call gives the rows that it computes.
        layers: which attention layers, by number, name or glob such as ``"encoder.*"``, or several; by default all.
        heads: which query heads; by default all.
        queries: positions of the queries whose statistics are recorded; by default all. Sums over queries
            (``received``, ``row_weights``, heatmaps) include all queries.
        keep: ``"last"`` records the last call of each layer, ``"all"`` every call.
        detach: whether statistics are detached from the autograd graph. With False they can be part of a loss, at the
            cost of another pass; not within an activation checkpoint.

    Returns:
        A ``Seen``: an ``Observed`` for each layer by its dotted name.

    Raises:
        UnsupportedError: the model has no attention that can be observed, none was called, or a module's ``backend``
            cannot compute a statistic.
        ShapeError: there is no such layer, head or query; the text lists what exists.

    Cost: that of ``observe_attention`` for all heads. If gradients are recorded or the batch is packed, attention is
    computed once more for the statistics. Memory only for the requested statistics of the chosen heads.

    >>> import torch, clearhead as ch
    >>> model = ch.nn.Encoder(8, num_heads=2, num_layers=2)
    >>> with ch.observe(model, ch.Want(received=True), layers="blocks.1.*") as seen:
    ...     output = model(torch.zeros(1, 4, 8))
    >>> seen["blocks.1.attention"].received.round(decimals=3)
    tensor([[[1., 1., 1., 1.],
             [1., 1., 1., 1.]]])
    """
    if not isinstance(want, Want) or not want.names:
        got = repr(want)[:80] if isinstance(want, Want) else type(want).__name__
        raise UnsupportedError.about(
            _FUNCTION, "want", must="be a ch.Want with a statistic", got=got, then="Pass ch.Want(entropy=True)."
        )
    observer = _Observer(model, want, layers=layers, heads=heads, queries=queries, keep=keep, detach=detach)
    try:
        with watching(observer):
            yield observer.records
    finally:
        observer.close()
    observer.check(model)


class _Observer:
    """The ``Watcher`` of ``observe``."""

    edits = False

    def __init__(
        self,
        model: nn.Module,
        want: Want,
        *,
        layers: Layers,
        heads: int | Sequence[int] | None,
        queries: int | Sequence[int] | None,
        keep: str,
        detach: bool,
    ) -> None:
        chosen = choose_layers(_FUNCTION, model, layers)
        for module in chosen.values():
            if isinstance(num_heads := getattr(module, "num_heads", None), int):
                choose_heads(_FUNCTION, heads, num_heads)
        self.records = Seen(_FUNCTION, list(chosen), list(attention_layers(model)), keep)
        self._names: dict[nn.Module, str] = {module: name for name, module in chosen.items()}
        self._want, self._heads, self._detach = want, heads, flag(_FUNCTION, "detach", detach)
        self._queries = _positions("queries", queries)
        self._rows = None if want.rows is None else _positions("want.rows", want.rows)
        self._most = 0

    def attend(self, owner: object, call: Call, want: Want, inner: Attend) -> Observation:
        """Compute the call, and record its statistics if the layer was chosen."""
        name = self._names.get(owner) if isinstance(owner, nn.Module) else None
        if name is None or call.silent:
            return inner(call, want)
        packed = sequences_of(call)
        unpacked = call if packed is None else packed.call(call)
        first = unpacked.options.get("query_offset") or 0
        mine = self._wanted(first, unpacked.query.shape[-2])
        if packed is None and not want.names and not torch.is_grad_enabled():
            answer = statistics = inner(call, mine)
        else:
            answer = inner(call, want)
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self._detach):
                statistics = inner(replace(unpacked, silent=True).with_options(dropout=0.0), mine)
        lengths = None if packed is None else packed.lengths
        self.records._add(name, self._observed(name, unpacked, statistics, lengths))
        return answer

    def _wanted(self, first: int, q_len: int) -> Want:
        """The statistics to compute in a call, with rows as indices within it."""
        self._most = max(self._most, first + q_len)
        if self._rows is None:
            return self._want
        rows = [place - first for place in self._rows if first <= place < first + q_len]
        return replace(self._want, rows=rows or None)

    def _observed(self, name: str, call: Call, observation: Observation, lengths: tuple[int, ...] | None) -> Observed:
        first, q_len = call.options.get("query_offset") or 0, call.query.shape[-2]
        heads = choose_heads(_FUNCTION, self._heads, call.query.shape[-3])
        places = range(first, first + q_len)
        queries = tuple(places) if self._queries is None else tuple(each for each in self._queries if each in places)
        chosen = {}
        for statistic in _STATISTICS:
            value: Tensor | None = getattr(observation, statistic)
            if value is None:
                continue
            value = value.detach() if self._detach else value
            value = value if call.query.ndim == 4 else value[None]
            if self._heads is not None:
                value = value[:, list(heads)]
            if self._queries is not None and statistic in _BY_QUERY:
                value = value[:, :, [each - first for each in queries]]
            chosen[statistic] = value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
        return Observed(layer=name, heads=heads, queries=queries, lengths=lengths, **chosen)

    def close(self) -> None:
        """Release the model; a task that outlives the block is no longer observed."""
        self._names = {}

    def check(self, model: nn.Module) -> None:
        """Raise if the block ended without a call of a chosen layer, query or row."""
        if not self.records:
            raise not_called(_FUNCTION, model, self.records._names())
        for argument, chosen in (("queries", self._queries), ("want.rows", self._rows)):
            if chosen and max(chosen) >= self._most:
                raise ShapeError.about(
                    _FUNCTION,
                    argument,
                    must=f"lie from 0 to {self._most - 1}, the observed positions",
                    got=list(chosen)[:8],
                    then="Positions count from a sequence's first token.",
                )


def _positions(argument: str, chosen: int | Sequence[int] | Tensor | None) -> tuple[int, ...] | None:
    """Positions of queries, checked."""
    if chosen is None:
        return None
    places = []
    for given in several(chosen):
        place = whole_number(given)
        if place is None or place < 0:
            raise ShapeError.about(
                _FUNCTION,
                argument,
                must="be positions, whole numbers of at least 0",
                got=repr_of(given),
                then="They count from a sequence's first token.",
            )
        places.append(place)
    return tuple(places)
