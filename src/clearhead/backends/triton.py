"""The backend of the GPU kernels in ``triton_kernels``: forward with every statistic, on CUDA.

For 16-bit inputs the weights are rounded to the inputs' dtype before they multiply the values; scores, softmax, sums
and statistics are float32. There is no gradient: if one is needed, ``flex`` or ``tiled`` runs.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from clearhead.backends.capability import Backend, Capability
from clearhead.masks.base import carried_sizes
from clearhead.problem import Problem
from clearhead.record import as_index
from clearhead.scores import Alibi, DenseBias, RelativeBias, ScoreRule, Sink, SoftCap
from clearhead.shapes import Float
from clearhead.statistics import Observation, Want
from clearhead.tensors import has_memory
from clearhead.torch_private import has_dispatch_mode

__all__ = ["BACKEND", "KernelCall", "run_kernels"]

#: The largest table of booleans that is computed for a mask that is neither intervals of keys nor a table.
_MAX_TABLE_ENTRIES: Final = 2**28
#: Sums of two positions and a mask's reach must be below 2**31.
_MAX_POSITION: Final = 2**29
#: Largest k of a top-k in registers; for larger ones whole rows are sorted, a strip at a time.
_MAX_PLACES: Final = 32
#: Weights of a strip of whole rows.
_STRIP_WEIGHTS: Final = 2**25
#: Keys that one program checks for NaN and infinity.
_CHUNK: Final = 512
_SLOPE, _RELATIVE, _DENSE, _SOFTCAP = range(4)


class _Sizes(NamedTuple):
    heads: int
    kv_heads: int
    group: int
    q_len: int
    k_len: int
    head_dim: int
    value_dim: int
    offset: int
    scale: float


class _Strides(NamedTuple):
    """Batch, head and row strides of each tensor; the last axis is contiguous."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    output: tuple[int, ...]


class _Mask(NamedTuple):
    """A band, intervals of keys, a table of places and a table of blocks; None if there is no such part."""

    keys_before: int | None = None
    keys_after: int | None = None
    start: Tensor | None = None
    stop: Tensor | None = None
    interval_strides: tuple[int, ...] | None = None
    table: Tensor | None = None
    table_strides: tuple[int, ...] | None = None
    blocks: Tensor | None = None
    block_strides: tuple[int, ...] | None = None
    block_size: int | None = None
    # Triton 3.6 loses a stride of 1, a constant, in an inner tuple unless the outer tuple has a constant after it.
    end: None = None


class _Rule(NamedTuple):
    """A rule's table, and its reach or cap."""

    table: Tensor | None
    strides: tuple[int, ...] | None
    value: int | float | None


@cache
def _kernels() -> ModuleType:
    """The module of the kernels; triton is imported on first use."""
    from clearhead.backends import triton_kernels

    return triton_kernels


@cache
def _requires() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA device, and torch finds none"
    if find_spec("triton") is None:
        return "needs the package triton, which comes with torch's builds for CUDA"
    return None


def _also(problem: Problem) -> list[str]:
    tensors = (problem.query, problem.key, problem.value)
    if any(type(each) not in (Tensor, torch.nn.Parameter) or not has_memory(each) for each in tensors):
        return ["needs plain tensors, not subclasses, and not those of torch.func"]
    if torch.compiler.is_compiling() or has_dispatch_mode():
        return ["cannot be traced"]
    reasons = []
    if max(problem.k_len, problem.q_len) + abs(problem.query_offset) >= _MAX_POSITION:
        reasons.append(f"takes positions below {_MAX_POSITION:,}")
    rest = problem.mask_parts.rest if problem.mask is not None else ()
    if rest:
        batch, heads = (max(sizes) for sizes in zip(*(carried_sizes(part) for part in rest), strict=True))
        entries = batch * heads * problem.q_len * problem.k_len
        if entries > _MAX_TABLE_ENTRIES:
            reasons.append(f"would need a table of {entries:,} entries (limit {_MAX_TABLE_ENTRIES:,})")
    return reasons


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides, 0 for an axis of size 1."""
    return tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _rows_side_by_side(tensor: Tensor) -> Tensor:
    """The tensor, detached, with a contiguous last axis."""
    tensor = tensor.detach().resolve_neg()
    return tensor if tensor.stride(3) == 1 or tensor.shape[3] == 1 else tensor.contiguous()


def _width(channels: int) -> int:
    """Channels of a block: a power of two of at least 16, which ``tl.dot`` requires."""
    return max(16, 1 << (channels - 1).bit_length()) if channels else 16


def _blocks(count: int, size: int) -> int:
    return -(-count // size)


@dataclass(frozen=True)
class _Rows:
    """What the pass computes for the sweeps: ``weight = exp(score - base) * share``."""

    base: Float[Tensor, "batch heads q_len"]
    share: Float[Tensor, "batch heads q_len"]


class KernelCall:
    """A problem as arguments of the kernels."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.query, self.key, self.value = map(_rows_side_by_side, (problem.query, problem.key, problem.value))
        batch, heads, q_len, _ = self.query.shape
        # The output has the memory layout of query: [batch, len, heads, dim] or [batch, heads, len, dim].
        if self.query.stride(1) < self.query.stride(2):
            self.output = self.query.new_empty(batch, q_len, heads, problem.value_dim).transpose(1, 2)
        else:
            self.output = self.query.new_empty(batch, heads, q_len, problem.value_dim)
        self.sizes = _Sizes(
            heads,
            problem.num_kv_heads,
            heads // problem.num_kv_heads,
            q_len,
            problem.k_len,
            problem.head_dim,
            problem.value_dim,
            problem.query_offset,
            problem.scale,
        )
        self.strides = _Strides(
            *(tuple(tensor.stride()[:3]) for tensor in (self.query, self.key, self.value, self.output))
        )
        self.mask = _Mask() if problem.mask is None else self._mask()
        self.kinds, self.rules = self._rules()

    def _mask(self) -> _Mask:
        parts, device = self.problem.mask_parts, self.query.device
        keys_before, keys_after = (
            reach and min(reach, 2 * _MAX_POSITION) for reach in (parts.keys_before, parts.keys_after)
        )
        mask = _Mask(keys_before=keys_before, keys_after=keys_after)
        if parts.intervals is not None:
            start, stop = (bound.to(device) for bound in parts.interval_bounds)
            mask = mask._replace(start=start, stop=stop, interval_strides=_strides(start)[:3])
        allowed = parts.table(self.problem.indices()) if parts.rest or parts.dense is not None else None
        if allowed is not None:
            mask = mask._replace(table=allowed.view(torch.uint8), table_strides=_strides(allowed))
        if parts.blocks is not None:
            table = parts.blocks.table
            mask = mask._replace(
                blocks=table.view(torch.uint8), block_strides=_strides(table), block_size=parts.blocks.size
            )
        return mask

    def _rules(self) -> tuple[tuple[int, ...], tuple[_Rule, ...]]:
        converted = [_converted(rule) for rule in self.problem.elementwise]
        return tuple(kind for kind, _ in converted), tuple(rule for _, rule in converted)

    def result(self, *trailing: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A new tensor ``[batch, heads, *trailing]``."""
        return self.query.new_empty((self.problem.batch, self.problem.num_heads, *trailing), dtype=dtype)

    def launch(self, name: str, programs: int, *arguments: Any, warps: int = 4, **constants: Any) -> None:
        """Run a kernel."""
        if programs == 0:
            return
        here = torch.cuda.device(self.query.device) if self.query.is_cuda else contextlib.nullcontext()
        with here:
            getattr(_kernels(), name)[(programs,)](
                *arguments, **constants, num_warps=warps, num_stages=2, enable_fp_fusion=True
            )

    @cached_property
    def constants(self) -> dict[str, Any]:
        """Compile-time constants of every kernel that computes scores."""
        width = _width(self.problem.head_dim)
        return {
            "KINDS": self.kinds,
            "INTERVALS": 0 if self.mask.start is None else self.mask.start.shape[3],
            "WIDTH": width,
            "PAD": width != self.problem.head_dim,
            "PRECISION": "ieee" if self.query.dtype == torch.float32 else None,
            "warps": 8 if self.query.dtype == torch.float32 or width > 128 else 4,
        }

    @property
    def pairs(self) -> int:
        return self.problem.batch * self.problem.num_heads


def _converted(rule: ScoreRule) -> tuple[int, _Rule]:
    """A rule as its kind and arguments of the kernels."""
    if isinstance(rule, Alibi):
        slopes = rule.slopes.detach().to(torch.float32)[None, :, None, None]
        return _SLOPE, _Rule(slopes, _strides(slopes), None)
    if isinstance(rule, RelativeBias):
        table = rule.table.detach().to(torch.float32).contiguous()
        return _RELATIVE, _Rule(table, _strides(table[None, :, None, :]), table.shape[1] // 2)
    if isinstance(rule, DenseBias):
        bias = rule.bias.detach()
        bias = bias.to(torch.float32) if bias.dtype == torch.float64 else bias
        return _DENSE, _Rule(bias, _strides(bias), None)
    assert isinstance(rule, SoftCap)
    return _SOFTCAP, _Rule(None, None, rule.cap)


def _dirty(call: KernelCall) -> tuple[Tensor, int]:
    """For each chunk of keys of a key head, whether it contains NaN or infinity; and the number of chunks per head."""
    problem = call.problem
    chunks = max(1, _blocks(problem.k_len, _CHUNK))
    heads = problem.batch * problem.num_kv_heads
    dirty = call.query.new_zeros(heads * chunks, dtype=torch.int32)
    call.launch(
        "non_finite", heads * chunks, call.key, call.value, dirty, call.strides, call.sizes, chunks,
        CHUNK=_CHUNK, BLOCK=32, WIDTH=_width(problem.head_dim), VALUE_WIDTH=_width(problem.value_dim),
    )  # fmt: skip
    return dirty, chunks


def _tile(call: KernelCall) -> tuple[int, int]:
    """Queries and keys of a tile of the pass, which fit the registers of 8 warps as the compiler reports for Hopper."""
    wide = max(_width(call.problem.head_dim), _width(call.problem.value_dim))
    if call.query.dtype == torch.float32:
        return (64, 32) if wide <= 64 else (32, 32) if wide <= 128 else (16, 32)
    return (64, 32) if wide > 128 else (128, 64 if wide <= 64 else 32)


#: Statistics of rows that the pass computes with the output.
_ROW_STATISTICS: Final[tuple[str, ...]] = ("lse", "max_score", "entropy", "sink", "distance")
#: Statistics that need each row's final sum first.
_SWEPT: Final = frozenset({"top_k", "received", "row_weights", "heatmap", "rows"})


def _pass(call: KernelCall, want: Want) -> tuple[dict[str, Tensor], _Rows | None]:
    """Write the output to ``call.output``; returns row statistics, and what the sweeps need, if there are any."""
    problem, asked = call.problem, want.names
    statistics = {name: call.result(problem.q_len) for name in _ROW_STATISTICS if name in asked}
    rows = _Rows(call.result(problem.q_len), call.result(problem.q_len)) if asked & _SWEPT else None
    flags, chunks = _dirty(call)
    sinks = None if problem.sink is None else problem.sink.logits.detach().to(torch.float32).contiguous()
    value_width = _width(problem.value_dim)
    block_rows, block = _tile(call)
    for dirty in (False, True):
        call.launch(
            "forward", call.pairs * _blocks(problem.q_len, block_rows),
            call.query, call.key, call.value, call.output, *(statistics.get(name) for name in _ROW_STATISTICS),
            None if rows is None else rows.base, None if rows is None else rows.share, flags,
            sinks, 0 if sinks is None or sinks.shape[0] == 1 else 1,
            call.strides, call.sizes, call.mask, call.rules, want.sink if "sink" in asked else None, chunks,
            ROWS=block_rows, BLOCK=block, VALUE_WIDTH=value_width, PAD_VALUE=value_width != problem.value_dim,
            DIRTY=dirty, **call.constants | {"warps": 8},
        )  # fmt: skip
    return statistics, rows


def _side(call: KernelCall) -> int:
    """Queries and keys of a block of the sweep over columns; equal for all requests, for bitwise equal sums."""
    return 32 if call.query.dtype == torch.float32 and _width(call.problem.head_dim) > 64 else 64


def _columns(call: KernelCall, want: Want, rows: _Rows) -> dict[str, Tensor]:
    """What keys receive, weighted sums over queries, and pooled tiles, in one or two sweeps over columns.

    Sums are added in the same blocks for all requests; a heatmap whose tiles do not consist of these has its own sweep.
    """
    asked, side = want.names, want.heatmap
    sums = _sums(call, want) if asked & {"received", "row_weights"} else None
    heat = _heat(call, side) if side > 0 else None
    if sums is not None and heat is not None and heat.along_blocks_of(_side(call)):
        _sweep_columns(call, rows, sums, heat)
    else:
        if sums is not None:
            _sweep_columns(call, rows, sums, None)
        if heat is not None:
            _sweep_columns(call, rows, None, heat)
    statistics = {} if sums is None else {"received": sums.received, "row_weights": sums.summed}
    if heat is not None:
        statistics["heatmap_max"], statistics["heatmap_mean"] = _pooled(call, heat, side)
    return {name: tensor for name, tensor in statistics.items() if tensor is not None}


class _Sums(NamedTuple):
    """Sums over queries, and the factors of the weighted ones."""

    received: Tensor | None
    summed: Tensor | None
    factors: Tensor | None


class _Heat(NamedTuple):
    """Largest weight and sum of each part of a tile, and the arrangement of blocks in tiles.

    A block of ``block`` positions contains tiles of ``side``, or is one of the ``parts`` of a tile of ``step``.
    """

    largest: Tensor
    total: Tensor
    block: int
    side: int
    step: int
    parts: int

    def along_blocks_of(self, side: int) -> bool:
        """Whether consecutive blocks of ``side`` positions are these blocks."""
        return self.block == side and self.step % side == 0


def _sums(call: KernelCall, want: Want) -> _Sums:
    k_len = call.problem.k_len
    received = call.result(k_len) if want.received else None
    if want.row_weights is None:
        return _Sums(received, None, None)
    factors = want.row_weights.detach().to(call.query.device, torch.float32)
    return _Sums(received, call.result(factors.shape[2], k_len), factors)


def _heat(call: KernelCall, side: int) -> _Heat:
    most = _side(call)
    within = side <= most and side & (side - 1) == 0
    block = most if within else min(most, _width(side))
    step = block if within else side
    parts = _blocks(step, block)
    blocks = (_blocks(length, step) * parts for length in (call.problem.q_len, call.problem.k_len))
    places = [count * (block // side if within else 1) for count in blocks]
    return _Heat(
        call.result(*places).zero_(), call.result(*places).zero_(), block, side if within else block, step, parts
    )


def _sweep_columns(call: KernelCall, rows: _Rows, sums: _Sums | None, heat: _Heat | None) -> None:
    received, summed, factors = sums or (None, None, None)
    alone = _side(call)
    block, side, step, parts = (alone, alone, alone, 1) if heat is None else heat[2:]
    q_blocks, k_blocks = (_blocks(length, step) * parts for length in (call.problem.q_len, call.problem.k_len))
    mixers = 1 if factors is None else factors.shape[2]
    mix = 16 if factors is None else min(64, _width(mixers))
    call.launch(
        "columns", call.pairs * k_blocks * _blocks(mixers, mix),
        call.query, call.key, rows.base, rows.share, received, summed, factors,
        None if factors is None else _strides(factors), mixers, *((None, None) if heat is None else heat[:2]),
        call.strides, call.sizes, call.mask, call.rules, step, parts, q_blocks, k_blocks,
        BLOCK=block, SIDE=side, MIX=mix, **call.constants,
    )  # fmt: skip


def _pooled(call: KernelCall, heat: _Heat, side: int) -> tuple[Tensor, Tensor]:
    """Largest and mean weight of each tile, from those of its parts; tiles at the end have fewer places."""
    lengths = (call.problem.q_len, call.problem.k_len)
    q_tiles, k_tiles = (_blocks(length, side) for length in lengths)
    parts = heat.parts
    largest, total = (
        each[..., : q_tiles * parts, : k_tiles * parts].unflatten(-1, (k_tiles, parts)).unflatten(-3, (q_tiles, parts))
        for each in (heat.largest, heat.total)
    )
    down, across = (
        torch.arange(0, length, side, device=total.device).neg_().add_(length).clamp_(max=side) for length in lengths
    )
    return largest.amax(dim=(-3, -1)), total.sum(dim=(-3, -1)) / (down[:, None] * across)


def _some_rows(call: KernelCall, index: Tensor, rows: _Rows) -> Tensor:
    """All weights of the queries in ``index``."""
    count, k_len = index.shape[0], call.problem.k_len
    weights = call.result(count, k_len)
    block = 32
    call.launch(
        "some_rows", call.pairs * _blocks(count, block) * _blocks(k_len, block),
        call.query, call.key, rows.base, rows.share, index, count, weights,
        call.strides, call.sizes, call.mask, call.rules, BLOCK=block, **call.constants,
    )  # fmt: skip
    return weights


def _top(call: KernelCall, count: int, rows: _Rows) -> tuple[Tensor, Tensor]:
    """Indices and weights of the ``count`` largest weights of each row; ties to the lower index."""
    q_len, k_len = call.problem.q_len, call.problem.k_len
    indices, weights = call.result(q_len, count, dtype=torch.int64), call.result(q_len, count)
    if count <= _MAX_PLACES:
        block_rows, block = 32, 64
        call.launch(
            "top", call.pairs * _blocks(q_len, block_rows),
            call.query, call.key, rows.base, rows.share, indices, weights, count,
            call.strides, call.sizes, call.mask, call.rules,
            ROWS=block_rows, BLOCK=block, PLACES=1 << (count - 1).bit_length(), **call.constants,
        )  # fmt: skip
        return indices, weights
    strip = max(1, _STRIP_WEIGHTS // max(1, call.pairs * k_len))
    for start in range(0, q_len, strip):
        stop = min(start + strip, q_len)
        whole = _some_rows(call, torch.arange(start, stop, device=call.query.device), rows)
        ordered, order = whole.sort(dim=-1, descending=True, stable=True)
        indices[:, :, start:stop], weights[:, :, start:stop] = order[..., :count], ordered[..., :count]
    return indices, weights


def run_kernels(problem: Problem, want: Want) -> Observation:
    """Output and statistics, on CUDA, or on the CPU under triton's interpreter."""
    call = KernelCall(problem)
    asked = want.names
    statistics, rows = _pass(call, want)
    if rows is not None:
        if asked & {"received", "row_weights", "heatmap"}:
            statistics |= _columns(call, want, rows)
        if want.rows is not None:
            index = as_index(want.rows).to(call.query.device).contiguous()
            statistics["rows"] = _some_rows(call, index, rows)
        if "top_k" in asked:
            statistics["top_indices"], statistics["top_weights"] = _top(call, want.top_k, rows)
    return Observation(output=call.output, **statistics)


BACKEND = Backend(
    name="triton",
    summary="clearhead's own GPU kernels, for statistics",
    capability=Capability(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
        rules=(Alibi, RelativeBias, DenseBias, SoftCap, Sink),
        dropout=False,
        max_head_dim=256,
        gradient=False,
        without_gradient=frozenset({"row_weights"}),
        requires=_requires,
        also=_also,
    ),
    run=run_kernels,
)
