"""Diagnosis of this machine and this installation, for ``clearhead doctor``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch

from clearhead.benchmark.machine import load, machine, threads, torch_build, versions
from clearhead.benchmark.timing import Timing, interleaved
from clearhead.choices import TABLE, ChoiceRow, processor, row_for
from clearhead.dispatch import BACKENDS, loaded
from clearhead.functional.exact import attention, explain_dispatch
from clearhead.ops import library as native_library
from clearhead.ops import memory as native_memory
from clearhead.ops.throughput import product_rate
from clearhead.projection import DTYPES, KINDS, GemmChoice, choice
from clearhead.projection.paths import ONEDNN

__all__ = ["ATTENTION", "MATRIX", "SECONDS_EACH", "Diagnosis", "Rate", "diagnose"]

MATRIX = 1024
ATTENTION = (1, 8, 512, 64)
SECONDS_EACH = 0.4
#: Extras for developers of clearhead; the others add features.
_FOR_DEVELOPERS = ("dev", "docs", "all")


@dataclass(frozen=True)
class Rate:
    """A measured speed in GFLOP/s, or the reason why it was not measured."""

    what: str
    dtype: str
    gflops: float | None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The result of ``diagnose``.

    Attributes:
        machine: processor, cores, memory, instruction sets, accelerators, load.
        versions: versions of Python, clearhead, torch and numpy.
        torch: properties of the torch build.
        threads: torch's numbers of threads, and the environment variables that set them.
        backends: each backend's capability in words.
        extras: for each extra its packages, with their versions, or None where they are not installed.
        compiler: path and version of a C++ compiler, or None.
        kernels: the instruction set of clearhead's CPU kernels and those available; or why they do not run.
        rates: measured speeds.
        processor: vendor and features, the key to the table of choices.
        table: the rows of the table of choices.
        projections: the path of each kind of GEMM of a linear layer, with the reason.
        attentions: for each dtype the selected attention, with the reason.
        missing: problems, each with a remedy.
    """

    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    torch: Mapping[str, Any]
    threads: Mapping[str, Any]
    backends: Mapping[str, Mapping[str, str]]
    extras: Mapping[str, Mapping[str, str | None]]
    compiler: Mapping[str, str] | None
    kernels: str
    rates: Sequence[Rate]
    processor: str
    table: Sequence[Mapping[str, str]]
    projections: Sequence[GemmChoice]
    attentions: Sequence[Mapping[str, str]]
    missing: Sequence[str]

    @property
    def verdict(self) -> str:
        """The last line of the report: the problems, or that there are none."""
        return "nothing is missing." if not self.missing else f"missing or in the way: {'; '.join(self.missing)}."

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as JSON values."""
        return {**asdict(self), "verdict": self.verdict}


def diagnose() -> Diagnosis:
    """Diagnose the machine and the installation; takes a few seconds of measurement.

    >>> diagnose().backends["tiled"]["usable"]
    'yes'
    """
    extras = _extras()
    compiler = _compiler()
    facts = {**machine(), "load": load()}
    return Diagnosis(
        machine=facts,
        versions=versions(),
        torch=torch_build(),
        threads=threads(),
        backends={each.name: {"what": each.summary, **each.capability.row()} for each in map(loaded, BACKENDS)},
        extras=extras,
        compiler=compiler,
        rates=[*_limits(), *_product_rates(), *_attention_rates()],
        projections=[choice(kind, dtype) for dtype in DTYPES for kind in KINDS],
        kernels=_kernels(),
        processor=str(processor()),
        table=[_table_row(row) for row in TABLE],
        attentions=[_attention_row(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)],
        missing=_missing(facts, extras, compiler),
    )


def _kernels() -> str:
    why = native_library.reason()
    if why is not None:
        return f"none: the library {why}"
    sets = f"{native_library.isa_name()} (of {', '.join(native_library.isa_names())}{_slower_sets()})"
    return f"{sets}, reuse up to {native_memory.limit() // 2**20:,} MiB of freed results"


def _table_row(row: ChoiceRow) -> dict[str, str]:
    """A row of the table of choices, in words."""
    gemm = [row.forward, row.input_gradient, row.weight_gradient]
    return {
        "processors": row.processors,
        "needs": ", ".join(sorted(row.needs)) or "nothing",
        "dtypes": ", ".join(str(dtype)[6:] for dtype in row.dtypes),
        "GEMM": ", ".join(" or ".join(paths) for paths in gemm),
        "narrow": ", ".join(" or ".join(paths) for paths in (row.narrow_forward, row.narrow_input_gradient)),
        "few rows": " or ".join(row.few_rows or row.forward),
        "attention": _sizes(row),
        "basis": row.basis,
    }


def _attention_row(dtype: torch.dtype) -> dict[str, str]:
    row = row_for(dtype)
    return {"dtype": str(dtype)[6:], "choice": _sizes(row), "reason": f"{row.processors}: {row.basis}"}


def _sizes(row: ChoiceRow) -> str:
    sizes = row.sdpa_from
    return "native" if sizes is None else f"sdpa from {sizes.full} keys, causal from {sizes.causal}; else native"


def _slower_sets() -> str:
    """Description of the wider instruction sets that were not selected."""
    names, library = native_library.isa_names(), native_library.library()
    assert library is not None
    wider = names[: names.index(library.ch_isa_name(library.ch_isa_best()).decode())]
    return f"; not {' and '.join(wider)}, whose dot products of bfloat16 Intel runs at half the rate" if wider else ""


def _missing(
    facts: Mapping[str, Any], extras: Mapping[str, Mapping[str, str | None]], compiler: Mapping[str, str] | None
) -> list[str]:
    absent = []
    for extra, packages in extras.items():
        names = [name for name, version in packages.items() if version is None]
        if names:
            absent.append(f"{', '.join(names)} (install clearhead[{extra}])")
    if not extras:
        absent.append("the package's own metadata (install clearhead with pip to see its extras)")
    if compiler is None:
        absent.append("a C++ compiler (only needed to build from source, and for torch.compile)")
    why = native_library.reason()
    if why is not None:
        absent.append(f"the CPU kernels (the library {why})")
    cores, used, busy = facts["cores"], torch.get_num_threads(), facts["load"]
    if used > cores:
        absent.append(f"cores for {used} threads ({cores} usable: set OMP_NUM_THREADS={cores})")
    if busy is not None and busy > cores + 1:
        absent.append(f"idle cores (load {busy} on {cores}: the rates above are lower than the machine's)")
    return absent


def _extras() -> dict[str, dict[str, str | None]]:
    """The extras that the installed package declares."""
    try:
        declared = metadata.requires("clearhead") or []
    except metadata.PackageNotFoundError:
        return {}
    extras: dict[str, dict[str, str | None]] = {}
    for line in declared:
        match = re.match(r"\s*([\w.-]+).*;.*extra == ['\"]([\w-]+)['\"]", line)
        if match and match[2] not in _FOR_DEVELOPERS:
            extras.setdefault(match[2], {})[match[1]] = _installed(match[1])
    return extras


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _compiler() -> dict[str, str] | None:
    """The first C++ compiler found, in the order in which builds search."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path is None:
            continue
        try:
            answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=5, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        return {"path": path, "version": (answer.stdout.splitlines() or ["unknown"])[0]}
    return None


def _limits() -> list[Rate]:
    """Upper limits of the kernels: their GEMM's throughput with operands in the first-level cache."""
    title, why = "the kernels' GEMM, operands in the first-level cache", native_library.reason()
    rates = {str(dtype)[6:]: product_rate(dtype) for dtype in (torch.float32, torch.bfloat16)}
    return [
        Rate(title, name, None, f"the library {why}") if rate is None else Rate(title, name, float(f"{rate:.4g}"))
        for name, rate in rates.items()
    ]


def _product_rates() -> list[Rate]:
    """Throughput of torch's GEMM; skipped in bfloat16 where oneDNN has none, which takes a second."""
    rates = []
    for dtype in (torch.float32, torch.bfloat16):
        absent = ONEDNN.absent(dtype) if dtype is torch.bfloat16 else None
        name, rate = str(dtype)[6:], None
        if absent is None:
            one, other = (torch.randn(MATRIX, MATRIX).to(dtype) for _ in range(2))
            timing = _timed({"product": lambda one=one, other=other: one @ other})["product"]
            rate = _gflops(2.0 * MATRIX**3, timing)
        rates.append(Rate("torch's GEMM 1024", name, rate, absent))
    return rates


def _attention_rates() -> list[Rate]:
    """Rate of each backend on one attention call, or the reason why it does not support the call."""
    batch, heads, length, head_dim = ATTENTION
    operations = 4.0 * batch * heads * length**2 * head_dim
    query = torch.randn(ATTENTION)
    refusals = explain_dispatch(query, query, query).reasons
    calls = {
        name: lambda name=name: attention(query, query, query, backend=name)
        for name, reasons in refusals.items()
        if not reasons
    }
    timings = _timed(calls)
    title = f"attention {'x'.join(map(str, ATTENTION))}"
    return [
        Rate(f"{title}, {name}", "float32", None, "; ".join(reasons))
        if reasons
        else Rate(f"{title}, {name}", "float32", _gflops(operations, timings[name]))
        for name, reasons in refusals.items()
    ]


def _timed(calls: Mapping[str, Any]) -> dict[str, Timing]:
    with torch.no_grad():
        return interleaved(calls, repeats=7, warmup=1, seconds=SECONDS_EACH * len(calls))


def _gflops(operations: float, timing: Timing) -> float:
    # Significant digits, not decimals: a slow backend's rate must not round to 0.
    return float(f"{operations / timing.median / 1e9:.4g}")
