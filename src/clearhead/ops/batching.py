"""The operators under ``torch.vmap``: the vmapped axis is folded into the batch.

Where it cannot be, as with a bias per vmapped entry, with dropout, whose pattern depends on the batch entry, or with
whole blocks, the operator is called entry by entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from clearhead.ops.kinds import Rounding

__all__ = ["batching_rule"]

#: Tensors without a batch axis. All others begin with one, of which tables may have 1 for all entries.
_SHARED: Final = frozenset(("sink", "row_slots", "table"))
_TABLES: Final = frozenset(("start", "stop", "allowed", "blocks", "rule_tables", "row_weights"))
#: Tensors that need not be contiguous; the operators expect it of all others.
_STRIDED: Final = frozenset(("query", "key", "value", "grad_output", "x"))
#: Tensors of the operators whose results have as many leading axes as they: the vmapped axis is one more of those.
_ROWS: Final = {
    "linear": frozenset(("x",)),
    "linear_packed": frozenset(("x",)),
    "linear_quantized": frozenset(("x",)),
    "linear_input_gradient": frozenset(("grads",)),
    "norm": frozenset(("x",)),
    "dropout_add": frozenset(("x", "residual")),
}
#: Operators that are called entry by entry: they sum over the batch, or are described by lists.
_BY_ENTRY: Final = frozenset(
    (
        *("pack_weight", "unpack_weight", "linear_weight_gradient", "norm_gradients", "token_angles", "cache_append"),
        *("attention_paged", "paged_append", "block", "block_forward", "block_backward"),
    )
)
#: Tensors that operators write to.
_WRITTEN: Final = {
    "cache_append": ("cache", "new"),
    "paged_append": ("key_pages", "key"),
    "block": ("caches", "tokens"),
}


def batching_rule(name: str, names: Sequence[str]) -> Callable[..., tuple[Any, Any]]:
    """A rule for ``torch.library.register_vmap``.

    Args:
        name: the operator's.
        names: those of its arguments.
    """

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        operator = getattr(torch.ops.clearhead, name).default
        given = dict(zip(names, arguments, strict=False))
        dims = dict(zip(names, in_dims, strict=False))
        size = info.batch_size
        _check_written(name, dims)
        depends_on_all = given.get("levels") or given.get("rounding") == Rounding.TENSOR
        if name in _ROWS and _vmapped(dims) <= _ROWS[name] and not depends_on_all:
            results = _with_rows(operator(**_moved_rows(name, given, dims, size)), size)
        elif name not in _ROWS.keys() | _BY_ENTRY and _folds(given, dims):
            results = _unfolded(operator(**_folded(given, dims, size)), size)
        else:
            results = _stacked([operator(**_entry(given, dims, place)) for place in range(size)])
        return results, _result_dims(results)

    return rule


def _folds(given: dict[str, Any], dims: dict[str, Any]) -> bool:
    """Whether one call computes all entries."""
    if given.get("dropout", 0.0) > 0.0 or any(slot >= 0 for slot in given.get("rule_slots") or ()):
        return False
    tables = zip(given.get("rule_tables") or (), _listed(dims.get("rule_tables")), strict=False)
    per_entry = any(dim is not None and table.ndim != 5 for table, dim in tables)
    return not (_vmapped(dims) & _SHARED or per_entry)


def _vmapped(dims: dict[str, Any]) -> set[str]:
    """The arguments with a vmapped axis."""
    return {name for name, dim in dims.items() if any(one is not None for one in _listed(dim))}


def _check_written(name: str, dims: dict[str, Any]) -> None:
    """What is written to has an axis for what is read."""
    written, read = _WRITTEN.get(name, ("", ""))
    if written and None in _listed(dims[written]) and read in _vmapped(dims):
        raise RuntimeError(
            f"{name}: {written} must have the vmapped axis of {read}; got none. Name its axis in in_dims."
        )


def _moved_rows(name: str, given: dict[str, Any], dims: dict[str, Any], size: int) -> dict[str, Any]:
    """Arguments of the one call, with the vmapped axis in front of the rows."""

    def move(part: Any, dim: Any) -> Any:
        if isinstance(part, (list, tuple)):
            return [move(one, each) for one, each in zip(part, _listed(dim, len(part)), strict=True)]
        return _moved(part, dim, size) if isinstance(part, Tensor) else part

    return {each: move(part, dims[each]) if each in _ROWS[name] else part for each, part in given.items()}


def _with_rows(results: Any, size: int) -> Any:
    """Results of the one call: the first has the rows' axes, moments are one axis of all rows."""
    if isinstance(results, Tensor):
        return results
    first, *others = results
    return (first, *_unfolded(others, size))


def _folded(given: dict[str, Any], dims: dict[str, Any], size: int) -> dict[str, Any]:
    """Arguments of the one call, whose batch is ``size`` times as large."""
    first = "query" if "query" in given else "x"
    batch = _moved(given[first], dims[first], size).shape[1]
    # Both bounds of intervals have one shape.
    shared = any(dims.get(name) is not None for name in ("start", "stop"))

    def fold(name: str, part: Any, dim: int | None) -> Any:
        if not isinstance(part, Tensor) or name in _SHARED:
            return part
        is_shared = name in _TABLES and (part.ndim != 4 or part.shape[0] == 1)
        if dim is None and is_shared and not (shared and name in ("start", "stop")):
            return part
        moved = _moved(part, dim, size)
        if name in _TABLES:
            moved = moved.expand(size, batch, *moved.shape[2:])
        flat = moved.flatten(0, 1)
        return flat if name in _STRIDED else flat.contiguous()

    return {
        name: [fold(name, one, dim) for one, dim in zip(part, _listed(dims[name], len(part)), strict=True)]
        if isinstance(part, (list, tuple))
        else fold(name, part, dims[name])
        for name, part in given.items()
    }


def _moved(part: Tensor, dim: int | None, size: int) -> Tensor:
    """The vmapped axis first."""
    return part.expand(size, *part.shape) if dim is None else part.movedim(dim, 0)


def _listed(dim: Any, count: int = 1) -> list[int | None]:
    return list(dim) if isinstance(dim, (list, tuple)) else [dim] * count


def _entry(given: dict[str, Any], dims: dict[str, Any], place: int) -> dict[str, Any]:
    """Arguments of the call for one entry."""

    def select(part: Any, dim: Any) -> Any:
        if isinstance(part, (list, tuple)):
            return [select(one, each) for one, each in zip(part, _listed(dim, len(part)), strict=True)]
        return part if dim is None else part.select(dim, place)

    return {name: select(part, dims[name]) for name, part in given.items()}


def _unfolded(results: Any, size: int) -> Any:
    if isinstance(results, (list, tuple)):
        return type(results)(_unfolded(one, size) for one in results)
    if not isinstance(results, Tensor):
        return results
    return results.unflatten(0, (size, results.shape[0] // size))


def _stacked(results: list[Any]) -> Any:
    """Results of single calls as one; of flags, whether all are set."""
    first = results[0]
    if isinstance(first, (list, tuple)):
        return type(first)(_stacked(list(parts)) for parts in zip(*results, strict=True))
    if isinstance(first, bool):
        return all(results)
    return torch.stack(results) if isinstance(first, Tensor) else first


def _result_dims(results: Any) -> Any:
    if isinstance(results, (list, tuple)):
        return type(results)(_result_dims(one) for one in results)
    return 0 if isinstance(results, Tensor) else None
