"""The path of a linear layer's GEMM: the table's choice, or the one that ``CLEARHEAD_PROJECTION`` names."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache, lru_cache
from typing import Final

import torch

from clearhead import choices as table
from clearhead.environment import value_of
from clearhead.errors import UnsupportedError
from clearhead.projection.paths import KINDS, NATIVE, PATHS, TORCH, Path

__all__ = [
    "DTYPES",
    "LEAST_LAYER",
    "Gain",
    "GemmChoice",
    "check_variable",
    "choice",
    "choices",
    "gemm_gains_alone",
    "gemm_path",
    "has_paths",
    "large_enough",
    "layer_gains",
    "named_by_variable",
    "path_for",
    "takes_small",
]

_VARIABLE: Final = "CLEARHEAD_PROJECTION"
_FORWARD: Final = "forward"
#: Dtypes for which there is a choice of paths.
DTYPES: Final = (torch.float32, torch.bfloat16)
#: Numbers of rows that are likely to recur: small ones, as in decoding, and multiples, as of whole batches.
_RECURRING_ROWS, _RECURRING_MULTIPLE = 64, 32
#: Elements of a weight from which a linear layer of any model is replaced: choosing a path costs more than it saves on
#: layers that are narrow.
LEAST_LAYER: Final = table.NARROW_WEIGHT
#: A number of elements and of rows that is neither narrow nor few.
_LARGE: Final = 2**20


class Gain(IntEnum):
    """The calls of a linear layer that another path than torch's makes faster: none, forwards of few rows, or all large
    ones."""

    NOTHING = 0
    FEW_ROWS = 1
    ALL = 2


@dataclass(frozen=True, eq=False)
class GemmChoice:
    """The paths of one kind of GEMM in this process, and the reason.

    Attributes:
        kind: ``"forward"``, ``"input gradient"`` or ``"weight gradient"``.
        dtype: ``"float32"`` or ``"bfloat16"``.
        path: path of large GEMMs: ``"torch"``, ``"onednn"`` or ``"native"``.
        narrow: path for a weight of fewer than ``NARROW_WEIGHT`` elements.
        few_rows: path for fewer than ``TILED_ROWS`` rows.
        reason: the row of the table, or the environment variable.
    """

    kind: str
    dtype: str
    path: str
    narrow: str
    few_rows: str
    reason: str


def gemm_path(
    dtype: torch.dtype, rows: int, columns: int, steps: int, *, kind: str = "forward", training: bool = True
) -> Path:
    """The path of a linear layer's GEMM: a pure function of its arguments, the processor and the variables.

    In invariant mode it is the kernels' path at every size, also for ``float16``: it sums in one order whatever the
    number of rows.

    Args:
        dtype: ``float32`` or ``bfloat16``; other dtypes take torch's path.
        rows: number of tokens, for every kind.
        columns: number of outputs of the layer.
        steps: number of inputs of the layer.
        kind: ``"forward"``, ``"input gradient"`` or ``"weight gradient"``.
        training: whether autograd records the layer; small GEMMs then take torch's path.

    Raises:
        UnsupportedError: ``CLEARHEAD_PROJECTION`` names no path, or one that is not available for the dtype; or, in
            invariant mode, another than the kernels', or the kernels are not installed.

    >>> gemm_path(torch.float64, 512, 768, 768).name
    'torch'
    """
    if not has_paths(dtype) or not large_enough(dtype, rows, columns, steps, training=training):
        return TORCH
    return path_for(kind, dtype, rows, columns * steps)


def large_enough(dtype: torch.dtype, rows: int, columns: int, steps: int, *, training: bool) -> bool:
    """Whether a GEMM is large enough for a choice of paths; for smaller ones torch's call has the least overhead.

    Under ``set_invariant(True)`` every size is: torch's order of sums depends on the size.
    """
    if table.is_invariant():
        return rows > 0
    weight = columns * steps
    if rows * weight >= table.SMALL:
        return True
    few = dtype is torch.bfloat16 and rows <= table.FEW_ROWS
    least = table.LARGE_WEIGHT_BFLOAT16 if few else table.LARGE_WEIGHT
    return weight >= least and rows > 0 and not training


def has_paths(dtype: torch.dtype) -> bool:
    """Whether there is a choice of paths for a dtype, or in invariant mode the kernels': for portable bits in float32.

    >>> has_paths(torch.float32), has_paths(torch.float64)
    (True, False)
    """
    return table.covers(dtype) and (dtype in DTYPES or (dtype is torch.float16 and table.is_invariant()))


def layer_gains(weight: torch.Tensor, *, alone: bool) -> Gain | None:
    """Which calls of a linear layer are to take another path than torch's.

    Args:
        weight: ``[out, in]``, or its transpose.
        alone: whether the layer is no part of a fused one, whose bits it has to give, and so has to gain by itself.

    Returns:
        The calls; None if there is no choice: the dtype has no kernels, the tensor is not on the CPU, is a subclass, or
        is narrow.

    Raises:
        UnsupportedError: ``CLEARHEAD_PROJECTION`` names no path, or one that is not available for the dtype.

    >>> layer_gains(torch.ones(8, 8), alone=True) is layer_gains(torch.ones(512, 512).double(), alone=True) is None
    True
    """
    if type(weight) not in (torch.Tensor, torch.nn.Parameter) or not has_paths(weight.dtype) or not weight.is_cpu:
        return None
    least = 1 if table.is_invariant() else LEAST_LAYER
    if weight.layout is not torch.strided or weight.numel() < least:
        return None
    kinds = [each.kind for each in choices(weight.dtype) if each.path != TORCH.name]
    if (kinds and not alone) or any(_gains_alone(kind, weight.dtype) for kind in kinds):
        return Gain.ALL
    few = table.row_for(weight.dtype).few_rows_alone
    has_few = few is not None and weight.numel() >= few.weight
    return Gain.FEW_ROWS if has_few and _FORWARD in kinds else Gain.NOTHING


def gemm_gains_alone(kind: str, dtype: torch.dtype, rows: int, weight: int) -> bool:
    """Whether a GEMM gains by its path where torch would compute it otherwise: by the table, or if named.

    Args:
        kind: ``"forward"``, ``"input gradient"`` or ``"weight gradient"``.
        dtype: of its operands; only those with a choice of paths gain.
        rows: number of tokens.
        weight: elements of the weight.
    """
    if not has_paths(dtype):
        return False
    if _gains_alone(kind, dtype):
        return True
    few = table.row_for(dtype).few_rows_alone
    return kind == _FORWARD and few is not None and few.least <= rows <= few.most and weight >= few.weight


def _gains_alone(kind: str, dtype: torch.dtype) -> bool:
    """Whether all large GEMMs of a kind do."""
    return _named(dtype) is not None or kind in table.row_for(dtype).alone


def path_for(kind: str, dtype: torch.dtype, rows: int, weight: int) -> Path:
    """The path of a kind of GEMM that is large enough, by its rows and the elements of its weight."""
    chosen = choice(kind, dtype)
    if rows * weight < table.SMALL:
        return NATIVE if takes_small(dtype) else TORCH
    few = rows < table.TILED_ROWS and kind != "weight gradient"
    narrow = weight < table.NARROW_WEIGHT
    path = PATHS[chosen.few_rows if few else chosen.narrow if narrow else chosen.path]
    recurs = rows <= _RECURRING_ROWS or rows % _RECURRING_MULTIPLE == 0
    return path if recurs or not path.prepares or rows * weight >= table.SMALL_UNPREPARED else TORCH


def takes_small(dtype: torch.dtype) -> bool:
    """Whether small GEMMs take the kernels: they are available, and no other path is named."""
    return (_named(dtype) or NATIVE.name) == NATIVE.name and NATIVE.absent(dtype) is None


def choice(kind: str, dtype: torch.dtype = torch.float32) -> GemmChoice:
    """The paths of a kind of GEMM.

    Raises:
        UnsupportedError: ``CLEARHEAD_PROJECTION`` names no path, or one that is not available for the dtype.

    >>> choice("forward").path in ("torch", "onednn", "native")
    True
    """
    return _decided(dtype)[KINDS.index(kind)]


def choices(dtype: torch.dtype) -> tuple[GemmChoice, ...]:
    """The paths of every kind of GEMM; a prepared call remains valid while they are the same objects."""
    return _decided(dtype)


@cache
def named_by_variable() -> str:
    """The value of ``CLEARHEAD_PROJECTION`` at the first call; empty if it was not set."""
    return value_of(_VARIABLE)


def check_variable(dtype: torch.dtype = torch.float32) -> str | None:
    """The path that ``CLEARHEAD_PROJECTION`` names; None if it is not set.

    Raises:
        UnsupportedError: it names no path, or one that is not available for the dtype.
    """
    name = named_by_variable()
    if not name:
        return None
    absent = PATHS[name].absent(dtype)
    if absent is not None:
        available = " or ".join(name for name, path in PATHS.items() if path.absent(dtype) is None)
        must, got = f"be {available} for {str(dtype)[6:]} here", f"{name}, but {absent}"
        raise UnsupportedError.about("project", _VARIABLE, must=must, got=got, then="Unset it.")
    return name


def _named(dtype: torch.dtype) -> str | None:
    return table.overrides().gemm or check_variable(dtype)


def _decided(dtype: torch.dtype) -> tuple[GemmChoice, ...]:
    return _read(dtype, named_by_variable(), table.overrides())


@lru_cache(maxsize=64)
def _read(dtype: torch.dtype, _variable: str, _names: table.Overrides) -> tuple[GemmChoice, ...]:
    """The table's choices, cached: neither the table nor what is installed changes in a process."""
    return tuple(_read_kind(kind, dtype) for kind in KINDS)


def _read_kind(kind: str, dtype: torch.dtype) -> GemmChoice:
    name, row = _named(dtype), table.row_for(dtype)
    if table.is_invariant():
        _check_invariant(name or NATIVE.name, dtype)
    if name is not None:
        reason = "named by clearhead.testing" if table.overrides().gemm else f"{_VARIABLE}={name}"
        return GemmChoice(kind, str(dtype)[6:], name, name, name, reason)
    absent = {path: why for path, each in PATHS.items() if (why := each.absent(dtype)) is not None}
    if NATIVE.name in absent:
        table.refuse_if_invariant("project", "the GEMM", got=f"torch's: {absent[NATIVE.name]}", then="Build them.")

    def first(rows: int, weight: int) -> str:
        order = (*row.order(kind, rows, weight), TORCH.name)
        return next(path for path in order if path not in absent)

    missing = "".join(f"; {path}: {absent[path]}" for path in row.order(kind, _LARGE, _LARGE) if path in absent)
    return GemmChoice(
        kind,
        str(dtype)[6:],
        first(_LARGE, _LARGE),
        first(_LARGE, table.NARROW_WEIGHT - 1),
        first(1, _LARGE),
        f"{row.processors}: {row.basis}{missing}",
    )


def _check_invariant(name: str, dtype: torch.dtype) -> None:
    """Only the kernels sum in one order; another path must not be taken silently."""
    absent = NATIVE.absent(dtype)
    if name == NATIVE.name and absent is None:
        return
    got = f"{name}, by {_VARIABLE} or clearhead.testing" if absent is None else absent
    must, then = "be native in invariant mode", "Unset it, or call clearhead.set_invariant(False)."
    raise UnsupportedError.about("project", "the path of linear layers", must=must, got=got, then=then)
