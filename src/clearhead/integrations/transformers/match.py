"""Recognition by structure: which row of ``families`` a module's submodules and attributes fit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import nn

from clearhead.integrations.transformers.families import (
    ATTENTIONS,
    FEEDFORWARDS,
    LAYERS,
    NORM_EPSILONS,
    AttentionRow,
    FeedForwardRow,
    LayerRow,
)
from clearhead.torch_private import submodules_of, tensors_of

__all__ = ["LayerMatch", "at", "attention_rows", "epsilon_name", "feedforward_rows", "first_of", "layer_matches"]


@dataclass(frozen=True)
class LayerMatch:
    """A layer's row, with the rows of its attentions and of its feedforward."""

    row: LayerRow
    attentions: tuple[AttentionRow, ...]
    feedforward: FeedForwardRow

    @property
    def has_views(self) -> bool:
        """Whether the kernels read views of parameters: halves of a packed weight, or a transposed ``Conv1D``."""
        return self.feedforward.packed_gate or any(len(attention.projections) == 1 for attention in self.attentions)

    @property
    def is_disentangled(self) -> bool:
        """Whether the layer's own attention adds terms of queries, keys and relative positions to scores."""
        return bool(self.attentions[0].terms)

    def feedforward_in(self, layer: Any) -> Any:
        """The module within which the paths of ``feedforward`` lie."""
        return layer if isinstance(self.row.feedforward, FeedForwardRow) else at(layer, self.row.feedforward)


def at(module: Any, path: str) -> Any:
    """What ``path`` names within ``module``.

    Raises:
        AttributeError: there is no such thing.
    """
    return _getter(path)(module) if path else module


@functools.cache
def _getter(path: str) -> Callable[[Any], Any]:
    return attrgetter(path)


def first_of(modules: Iterable[object], names: Sequence[str]) -> Any:
    """The first attribute of one of the modules that has one of the names and is not None; None without any."""
    for module in modules:
        for name in names:
            value = getattr(module, name, None)
            if value is not None:
                return value
    return None


def layer_matches(layer: nn.Module) -> Iterator[LayerMatch]:
    """The rows that the structure of a layer fits; a trial decides between them."""
    for row in LAYERS:
        match = _match(layer, row)
        if match is not None:
            yield match


def attention_rows(module: nn.Module) -> Iterator[AttentionRow]:
    """The rows that the structure of an attention module fits."""
    for row in ATTENTIONS:
        names = [*row.projections, row.output, *row.head_norms]
        if _has(module, names) and _covers(module, [*names, *row.terms], row.dropout):
            yield row


def feedforward_rows(module: nn.Module) -> Iterator[FeedForwardRow]:
    """The rows that the structure of a feedforward module fits."""
    for row in FEEDFORWARDS:
        if _has(module, [*_linears(row), row.activation]) and _covers(module, _linears(row), row.hidden, row.dropout):
            yield row


def epsilon_name(module: nn.Module) -> str | None:
    """The attribute that holds a norm's epsilon; None if the module does not look like a norm: a weight of one axis, no
    other parameters, buffers or submodules."""
    (parameters, buffers), parts = tensors_of(module), submodules_of(module)
    weight = parameters.get("weight")
    if weight is None or weight.dim() != 1 or len(parameters) > 1 or parts or buffers:
        return None
    return next((name for name in NORM_EPSILONS if isinstance(getattr(module, name, None), float)), None)


def _match(layer: nn.Module, row: LayerRow) -> LayerMatch | None:
    inline = isinstance(row.feedforward, FeedForwardRow)
    modules = [*row.attentions, *row.norms, *row.output_norms]
    if isinstance(row.feedforward, str):
        modules.append(row.feedforward)
    if not _has(layer, [*modules, *filter(None, row.dropouts)]):
        return None
    attentions = [next(_within(at(layer, path), ATTENTIONS), None) for path in row.attentions]
    feedforward = row.feedforward
    if not isinstance(feedforward, FeedForwardRow):
        feedforward = next(feedforward_rows(at(layer, feedforward)), None)  # type: ignore[assignment]
    if None in attentions or not isinstance(feedforward, FeedForwardRow) or feedforward.contract is None:
        return None
    if inline and not _has(layer, [*_linears(feedforward), feedforward.activation]):
        return None
    match = LayerMatch(row, tuple(attention for attention in attentions if attention is not None), feedforward)
    return match if _covers(layer, *_paths(match)) else None


def _within(module: nn.Module, rows: Iterable[AttentionRow]) -> Iterator[AttentionRow]:
    """Rows whose submodules a module has, which may have a norm besides, as BERT's does."""
    rows = sorted(rows, key=lambda row: -len(row.head_norms))
    return (row for row in rows if _has(module, [*row.projections, row.output, *row.head_norms]))


def _linears(row: FeedForwardRow) -> list[str]:
    return [path for path in (row.gate, row.expand, row.contract) if path is not None]


def _paths(match: LayerMatch) -> tuple[Any, ...]:
    """All that a row names in a layer: paths of modules with parameters, then those of dropouts."""
    row, modules, dropouts = match.row, [*match.row.norms, *match.row.output_norms], [*match.row.dropouts]
    for path, attention in zip(row.attentions, match.attentions, strict=True):
        names = (*attention.projections, attention.output, *attention.head_norms, *attention.terms)
        modules += [f"{path}.{name}" for name in names]
        dropouts += [f"{path}.{attention.dropout}"] if attention.dropout else []
        core = f"{path}.{attention.core}" if attention.core else path
        dropouts += [f"{core}.{name}" for name in ("attn_dropout", "dropout")]
    prefix = f"{row.feedforward}." if isinstance(row.feedforward, str) else ""
    fed = match.feedforward
    modules += [prefix + name for name in _linears(fed)]
    dropouts += [prefix + name for name in (fed.hidden, fed.dropout) if name is not None]
    return [*modules, *row.unused], *dropouts


def _has(module: nn.Module, paths: Sequence[str]) -> bool:
    missing = object()
    for path in paths:
        value: Any = module
        for name in path.split("."):
            value = getattr(value, name, missing)
        if value is missing or value is None:
            return False
    return True


def _covers(module: nn.Module, covered: Sequence[str], *dropouts: str | None) -> bool:
    """Whether linear layers, norms and dropouts in ``module`` are those that a row names, and nothing else learns."""
    named = set(covered)
    for name, part in module.named_modules():
        within = any(name == path or name.startswith(f"{path}.") for path in named)
        if next(part.parameters(recurse=False), None) is not None and not within:
            return False
        if isinstance(part, nn.Dropout) and part.p > 0 and name not in dropouts and not within:
            return False
    return True
