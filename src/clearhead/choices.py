"""The table that says which GEMM and which attention run: by processor, dtype and size.

Nothing is measured when a program runs, so two processes on one machine compute the same bits. The figures behind each
row are in ``docs/adr/0004-choices-by-table.md``. The table of instruction sets is in ``native/src/entry.cpp``, for
programs without Python.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Final, NamedTuple

import torch

from clearhead.environment import value_of
from clearhead.errors import UnsupportedError
from clearhead.torch_private import constant_when_compiled

__all__ = [
    "FEATURES",
    "FEW_ROWS",
    "INTEL",
    "LARGE_WEIGHT",
    "LARGE_WEIGHT_BFLOAT16",
    "NARROW_WEIGHT",
    "PORTABLE",
    "SMALL",
    "SMALL_UNPREPARED",
    "TABLE",
    "TILED_ROWS",
    "UNFUSED_ISA",
    "ChoiceRow",
    "FewRowsAlone",
    "KeyPadding",
    "Overrides",
    "Processor",
    "SdpaFrom",
    "ask_kernels",
    "attention_gains_alone",
    "attention_path",
    "covers",
    "is_invariant",
    "is_portable",
    "overrides",
    "padded_keys",
    "processor",
    "refuse_if_invariant",
    "row_for",
    "set_overrides",
]

INTEL: Final = "GenuineIntel"

# Sizes of a linear layer's GEMM, in multiplications (rows * columns * steps) or elements of its weight.
#: Multiplications below which torch's call, some 10 us cheaper, runs instead.
SMALL: Final = 2**22
#: The same for a number of rows that is unlikely to recur, with a path that prepares each new shape for 0.3 ms or more.
SMALL_UNPREPARED: Final = 2**24
#: A small call without gradients still takes the kernels from this weight on: reading the weight takes the time, and
#: the kernels read it once. On Zen 4, with 1 to 16 rows, 1.1 to 4.1 times as fast as torch.
LARGE_WEIGHT: Final = 2**17
#: The same for bfloat16, up to ``FEW_ROWS`` rows: torch's call costs more there.
LARGE_WEIGHT_BFLOAT16: Final = 2**14
FEW_ROWS: Final = 16
#: Up to so many rows a matrix unit waits for memory, and the kernels read the weight faster.
TILED_ROWS: Final = 5
#: A weight below this is narrow: at 64 x 64 the kernels reach 0.8 of oneDNN's rate, at 128 x 128 at least 0.9.
NARROW_WEIGHT: Final = 2**14


@dataclass(frozen=True)
class Processor:
    """The properties of a processor that the table reads.

    Args:
        vendor: ``vendor_id`` in ``/proc/cpuinfo``, such as ``"GenuineIntel"``; empty if the system does not say.
        features: of ``avx2``, ``avx512``, ``avx512_bf16``, ``amx_bf16``, ``amx_fp16``, ``neon`` and ``bf16``, and
            ``amx_kernels`` where the kernels can run their set ``amx``.
    """

    vendor: str
    features: frozenset[str]

    @classmethod
    def from_cpuinfo(cls, text: str) -> Processor:
        """The processor that a text in the format of ``/proc/cpuinfo`` describes.

        >>> Processor.from_cpuinfo("vendor_id : AuthenticAMD\\nflags : fma avx2 f16c bmi2")
        Processor(vendor='AuthenticAMD', features=frozenset({'avx2'}))
        """
        vendor = re.search(r"^vendor_id\s*:\s*(\S+)", text, re.MULTILINE)
        flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
        present = set(flags[1].split()) if flags else set()
        supported = frozenset(feature for feature, needs in _FLAGS.items() if present >= needs)
        return cls(vendor[1] if vendor else "", supported)

    def __str__(self) -> str:
        return f"{self.vendor or 'unknown vendor'}, {', '.join(sorted(self.features)) or 'no feature of the table'}"


_AVX2: Final = {"avx2", "fma", "bmi2", "f16c"}
_AVX512: Final = _AVX2 | {"avx512f", "avx512dq", "avx512bw", "avx512vl"}
#: The flags of ``/proc/cpuinfo`` that make each feature.
_FLAGS: Final = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": _AVX512 | {"avx512_bf16"},
    "amx_bf16": _AVX512 | {"amx_tile", "amx_bf16"},
    "amx_fp16": _AVX512 | {"amx_tile", "amx_fp16"},
    "neon": {"asimd"},
    "bf16": {"asimd", "bf16"},
}
#: Also what the compiler of the kernels and the operating system have to add to ``amx_bf16``.
_AMX_KERNELS: Final = "amx_kernels"
FEATURES: Final = (*_FLAGS, _AMX_KERNELS)

#: The instruction sets that the kernels can run; none before the module of the kernels is imported.
_kernel_sets: Callable[[], Sequence[str]] = tuple


def ask_kernels(sets: Callable[[], Sequence[str]]) -> None:
    """Let the table ask which instruction sets the kernels can run: the module of the kernels is above this one.

    Args:
        sets: returns their names.
    """
    global _kernel_sets
    _kernel_sets = sets
    _this_processor.cache_clear()
    _row.cache_clear()


@cache
def _this_processor() -> Processor:
    """The processor of this machine, and whether the kernels can run their set for AMX."""
    here = _read_processor()
    if "amx_bf16" not in here.features or "amx" not in _kernel_sets():
        return here
    return replace(here, features=here.features | {_AMX_KERNELS})


def _read_processor() -> Processor:
    """The processor of this machine, from ``/proc/cpuinfo``, or from torch where there is no such file."""
    try:
        return Processor.from_cpuinfo(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        pass
    if platform.machine() in ("arm64", "aarch64"):
        return Processor("", frozenset({"neon"}))
    by_torch = {"AVX2": {"avx2"}, "AVX512": {"avx2", "avx512"}}
    return Processor("", frozenset(by_torch.get(torch.backends.cpu.get_cpu_capability(), ())))


class SdpaFrom(NamedTuple):
    """Smallest numbers of queries and keys for which torch's attention replaces the kernels, full and causal."""

    full: int
    causal: int


class FewRowsAlone(NamedTuple):
    """Calls of a linear layer that are faster by the kernels: of ``least`` to ``most`` rows, with at least ``weight``
    elements of the weight."""

    least: int
    most: int
    weight: int


class KeyPadding(NamedTuple):
    """Numbers of keys, from ``least`` and ``below`` a limit, that torch's attention reads faster filled up to a
    ``multiple``."""

    multiple: int
    least: int
    below: int


_BFLOAT16, _FLOAT32, _FLOAT16 = torch.bfloat16, torch.float32, torch.float16
_NATIVE, _ONEDNN, _TORCH = ("native",), ("onednn",), ("torch",)


@dataclass(frozen=True, kw_only=True)
class ChoiceRow:
    """One row of the table. Paths are in order of preference: the first that is installed runs, torch's as the last.

    Attributes:
        processors: the processors that the row is for, in words.
        dtypes: dtypes of the operands.
        basis: the measurements behind the row.
        vendor: the vendor that the row is for; None for any.
        needs: features that the processor must have.
        forward: paths of ``x @ weight.T + bias``.
        input_gradient: paths of ``grad @ weight``.
        weight_gradient: paths of ``grad.T @ x``.
        narrow_forward: paths of ``x @ weight.T + bias`` for a weight of fewer than ``NARROW_WEIGHT`` elements.
        narrow_input_gradient: paths of ``grad @ weight`` for a weight of fewer than ``NARROW_WEIGHT`` elements.
        few_rows: paths of both for fewer than ``TILED_ROWS`` rows; empty if they do not differ.
        alone: the kinds of GEMM whose path is faster than torch's in a program that has nothing else of clearhead.
        few_rows_alone: the calls of ``x @ weight.T + bias`` that are, where ``alone`` does not have it; None for none.
        sdpa_from: sizes from which torch's attention runs; None for the kernels at every size.
        sdpa_padding: keys that are zero-padded for torch's attention; None for no padding.
    """

    processors: str
    dtypes: tuple[torch.dtype, ...]
    basis: str
    vendor: str | None = None
    needs: frozenset[str] = frozenset()
    forward: tuple[str, ...] = _NATIVE
    input_gradient: tuple[str, ...] = _NATIVE
    weight_gradient: tuple[str, ...] = _NATIVE
    narrow_forward: tuple[str, ...] = _NATIVE
    narrow_input_gradient: tuple[str, ...] = _NATIVE
    few_rows: tuple[str, ...] = ()
    alone: tuple[str, ...] = ("forward", "input gradient", "weight gradient")
    few_rows_alone: FewRowsAlone | None = None
    sdpa_from: SdpaFrom | None = None
    sdpa_padding: KeyPadding | None = None

    def matches(self, dtype: torch.dtype, processor: Processor) -> bool:
        """Whether the row applies to a dtype on a processor."""
        return dtype in self.dtypes and self.vendor in (None, processor.vendor) and self.needs <= processor.features

    def order(self, kind: str, rows: int, weight: int) -> tuple[str, ...]:
        """The paths of one kind of GEMM, for a number of rows and of elements of the weight."""
        if kind == "weight gradient":
            return self.weight_gradient
        if self.few_rows and rows < TILED_ROWS:
            return self.few_rows
        if kind == "forward":
            return self.narrow_forward if weight < NARROW_WEIGHT else self.forward
        return self.narrow_input_gradient if weight < NARROW_WEIGHT else self.input_gradient


#: The first row that matches applies.
TABLE: Final[tuple[ChoiceRow, ...]] = (
    ChoiceRow(
        processors="Intel with AMX", vendor=INTEL, needs=frozenset({"amx_bf16", _AMX_KERNELS}), dtypes=(_BFLOAT16,),
        basis="measured on a Xeon with AMX", forward=_NATIVE + _ONEDNN,
    ),
    ChoiceRow(
        processors="Intel with AMX, kernels without", vendor=INTEL, needs=frozenset({"amx_bf16"}), dtypes=(_BFLOAT16,),
        basis="measured on a Xeon with AMX", forward=_ONEDNN, input_gradient=_TORCH, weight_gradient=_TORCH,
        narrow_forward=_ONEDNN, narrow_input_gradient=_TORCH, few_rows=_NATIVE, sdpa_from=SdpaFrom(128, 512),
        sdpa_padding=KeyPadding(multiple=16, least=64, below=512),
    ),
    ChoiceRow(
        processors="Intel with AMX", vendor=INTEL, needs=frozenset({"amx_fp16"}), dtypes=(_FLOAT16,),
        basis="not measured: same as bfloat16 with amx_bf16", sdpa_from=SdpaFrom(128, 512),
    ),
    ChoiceRow(
        processors="any with AVX-512", needs=frozenset({"avx512"}), dtypes=(_BFLOAT16,),
        basis="measured on Zen 4, Zen 5 and Emerald Rapids", forward=_NATIVE + _ONEDNN, narrow_forward=_ONEDNN,
        narrow_input_gradient=_TORCH,
    ),
    ChoiceRow(
        processors="any with AVX2", needs=frozenset({"avx2"}), dtypes=(_BFLOAT16, _FLOAT16),
        basis="measured on Zen 3, Zen 4, Zen 5, Emerald Rapids and a Xeon with AMX",
    ),
    ChoiceRow(
        processors="Intel with AVX2", vendor=INTEL, needs=frozenset({"avx2"}), dtypes=(_FLOAT32,),
        basis="measured on Emerald Rapids and a Xeon with AMX", narrow_forward=_TORCH, narrow_input_gradient=_TORCH,
        alone=(), few_rows_alone=FewRowsAlone(least=4, most=24, weight=2**20),
    ),
    ChoiceRow(
        processors="any with AVX2", needs=frozenset({"avx2"}), dtypes=(_FLOAT32,),
        basis="measured on Zen 3, Zen 4 and Zen 5", forward=_NATIVE + _ONEDNN, input_gradient=_NATIVE + _ONEDNN,
        weight_gradient=_NATIVE + _ONEDNN, narrow_forward=_ONEDNN, narrow_input_gradient=_ONEDNN,
    ),
    ChoiceRow(
        processors="any other", dtypes=(_FLOAT32, _BFLOAT16, _FLOAT16), forward=_TORCH, input_gradient=_TORCH,
        basis="measured on x86 without AVX2; ARM has not been measured", weight_gradient=_TORCH, narrow_forward=_TORCH,
        narrow_input_gradient=_TORCH, sdpa_from=SdpaFrom(64, 64),
    ),
)  # fmt: skip

#: Below this size the kernels run on every processor; checked first, since the smallest calls take microseconds.
_SDPA_LEAST: Final = min(min(row.sdpa_from) for row in TABLE if row.sdpa_from is not None)
#: ``CLEARHEAD_ISA`` selects an instruction set of the kernels, so the kernels run.
_ROW_OF_ISA: Final = ChoiceRow(processors="any", dtypes=(_FLOAT32, _BFLOAT16, _FLOAT16), basis="CLEARHEAD_ISA is set")
#: torch's GEMMs and attention add in an order that depends on the sizes of a call.
_ROW_INVARIANT: Final = replace(_ROW_OF_ISA, basis="clearhead.set_invariant(True)")
#: The level of ``set_invariant`` at which the instruction set changes no bit of float32, and the set without fused
#: multiply-add, which rounds otherwise than the others.
PORTABLE: Final = "portable"
UNFUSED_ISA: Final = "baseline"


@dataclass(frozen=True, eq=False)
class Overrides:
    """Choices in place of the table's, set by ``clearhead.testing`` and ``set_invariant``. None keeps the table's.

    Attributes:
        gemm: the path of every GEMM large enough to have a choice.
        attention: the backend that ``"auto"`` tries first.
        processor: the processor whose rows of the table apply.
        fused: False if attention with its projections, and layers, must run op by op.
        invariant: whether a sequence's bits must not depend on how it is computed, or "portable" if they must not
            depend on the instruction set either; None for ``CLEARHEAD_INVARIANT``.
        fused_calls: a list to which the kind of each call of the block operator is appended.
    """

    gemm: str | None = None
    attention: str | None = None
    processor: Processor | None = None
    fused: bool | None = None
    invariant: bool | str | None = None
    fused_calls: list[str] | None = None


_OVERRIDES = Overrides()


def overrides() -> Overrides:
    """The current overrides, of the whole process: backward runs on autograd's threads."""
    return _OVERRIDES


def set_overrides(new: Overrides) -> Overrides:
    """Set the overrides and return the previous ones."""
    global _OVERRIDES
    before, _OVERRIDES = _OVERRIDES, new
    return before


def is_invariant() -> bool:
    """Whether a sequence's bits must not depend on how it is computed.

    Without a call of ``set_invariant`` the variable decides as it is when something first asks, since the kernels read
    it once too. ``torch.compile`` guards on the setting that it read.
    """
    chosen = _OVERRIDES.invariant
    return bool(_invariant_by_environment() if chosen is None else chosen)


def is_portable() -> bool:
    """Whether a sequence's bits must not depend on the instruction set either."""
    chosen = _OVERRIDES.invariant
    return (_invariant_by_environment() if chosen is None else chosen) == PORTABLE


def covers(dtype: torch.dtype) -> bool:
    """Whether the level of ``set_invariant`` covers a dtype of the kernels: ``"portable"`` covers float32 alone.

    >>> covers(torch.bfloat16)
    True
    """
    return dtype is torch.float32 or not is_portable()


def refuse_if_invariant(function: str, argument: str, *, got: str, then: str) -> None:
    """Raise under ``clearhead.set_invariant(True)``, for what has no one order of sums.

    Args:
        function: the public name that was called.
        argument: the argument that is refused.
        got: what it is.
        then: what the caller can do.

    Raises:
        UnsupportedError: a sequence's bits must not depend on how it is computed.
    """
    if is_invariant():
        must = "have one order of sums under ch.set_invariant(True)"
        raise UnsupportedError.about(function, argument, must=must, got=got, then=then)


@constant_when_compiled
def _invariant_by_environment() -> bool | str:
    return _variable_of_invariance()


@cache
def _variable_of_invariance() -> bool | str:
    text = value_of("CLEARHEAD_INVARIANT")
    return text if text == PORTABLE else text == "1"


def processor() -> Processor:
    """The processor whose rows of the table apply.

    >>> "neon" in processor().features or "avx2" in processor().features or not processor().features
    True
    """
    return _OVERRIDES.processor or _this_processor()


def row_for(dtype: torch.dtype) -> ChoiceRow:
    """The row of the table for a dtype of the kernels: ``float32``, ``bfloat16`` or ``float16``.

    >>> float32 = row_for(torch.float32)
    >>> torch.float32 in float32.dtypes
    True
    """
    return _row(dtype, _OVERRIDES)


@lru_cache(maxsize=64)
def _row(dtype: torch.dtype, names: Overrides) -> ChoiceRow:
    if is_invariant():
        return _ROW_INVARIANT
    isa = value_of("CLEARHEAD_ISA")
    if isa and names.processor is None:
        return replace(_ROW_OF_ISA, basis=f"CLEARHEAD_ISA={isa}")
    here = names.processor or _this_processor()
    return next(row for row in TABLE if row.matches(dtype, here))


def attention_gains_alone(dtype: torch.dtype, shorter: int, *, gradient: bool) -> bool:
    """Whether attention on the CPU is faster by the kernels in a program that calls torch's.

    Where the table sends calls to torch, torch's kernel uses a matrix unit that the kernels lack, and is slower only in
    backward of short calls: 2.4 to 2.8 times at 64 tokens, in bfloat16 on a Xeon with AMX.

    Args:
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        shorter: the smaller of the numbers of queries and keys.
        gradient: whether the call is a backward, or autograd records it.

    >>> attention_gains_alone(torch.float32, 512, gradient=False) in (True, False)
    True
    """
    if _OVERRIDES.attention is not None:
        return _OVERRIDES.attention == "native"
    sizes = row_for(dtype).sdpa_from
    return sizes is None or (gradient and shorter < sizes.full)


def attention_path(dtype: torch.dtype, q_len: int, k_len: int, *, causal: bool, gradient: bool) -> str:
    """The backend that ``"auto"`` tries first for a call on the CPU that torch's attention can run too.

    Args:
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        q_len: number of queries.
        k_len: number of keys.
        causal: whether there is a causal mask.
        gradient: whether autograd records the call. If so, only float32 goes to torch: in 16 bits torch rounds sums
            that the kernels accumulate in float32.

    >>> attention_path(torch.float32, 1, 1, causal=False, gradient=False)
    'native'
    """
    if _OVERRIDES.attention is not None:
        return _OVERRIDES.attention
    if q_len < _SDPA_LEAST or k_len < _SDPA_LEAST:
        return "native"
    sizes = row_for(dtype).sdpa_from
    if sizes is None or (gradient and dtype is not torch.float32):
        return "native"
    return "sdpa" if min(q_len, k_len) >= (sizes.causal if causal else sizes.full) else "native"


def padded_keys(dtype: torch.dtype, k_len: int) -> int:
    """The number of keys to which a call of torch's attention on the CPU is zero-padded, ``k_len`` for no padding.

    With a matrix unit torch's kernel multiplies blocks of 512 keys, and a block that is no multiple of 16 takes up to
    1.6 times as long (365 keys: 2.3 ms, 368: 1.4 ms, in bfloat16 on a Xeon with AMX).

    >>> padded_keys(torch.float32, 365)
    365
    """
    padding = row_for(dtype).sdpa_padding
    if padding is None or not padding.least <= k_len < padding.below:
        return k_len
    return k_len + -k_len % padding.multiple
