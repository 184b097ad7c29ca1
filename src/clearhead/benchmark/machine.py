"""Facts about machine and software, recorded with the results."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

__all__ = ["load", "machine", "threads", "torch_build", "usable_cores", "versions"]

INSTRUCTIONS = (
    "avx2", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16",
    "amx_int8", "asimd", "asimddp", "i8mm", "sve", "bf16",
)  # fmt: skip
"""CPU instruction sets that decide the speed of attention."""

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "KMP_BLOCKTIME",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "KMP_AFFINITY",
    "GOMP_CPU_AFFINITY",
)


def machine() -> dict[str, Any]:
    """Processor, usable cores, memory in bytes, instruction sets and accelerators."""
    info = _text("/proc/cpuinfo")
    flags = set(_field(info, r"(?:flags|Features)").split())
    return {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "processor": _processor(info),
        "cores": usable_cores(),
        "memory": _memory(),
        "instructions": [name for name in INSTRUCTIONS if name in flags],
        "accelerators": _accelerators(),
    }


def usable_cores() -> int:
    """Number of cores that the process may run on; in a container fewer than the machine has."""
    affinity = getattr(os, "sched_getaffinity", None)
    allowed = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = _text("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        return max(1, min(allowed, round(int(quota[0]) / int(quota[1]))))
    return allowed


def load() -> float | None:
    """Load average of the last minute; None where the system does not report it."""
    try:
        return round(os.getloadavg()[0], 2)
    except (OSError, AttributeError):
        return None


def versions() -> dict[str, str]:
    """Versions of Python, clearhead, torch and numpy."""
    return {
        "python": sys.version.split()[0],
        "clearhead": _version("clearhead"),
        "torch": torch.__version__,
        "numpy": _version("numpy"),
    }


def threads() -> dict[str, Any]:
    """Number of torch's threads, and the environment variables that set it."""
    return {
        "intra_op": torch.get_num_threads(),
        "inter_op": torch.get_num_interop_threads(),
        "variables": {name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ},
    }


def torch_build() -> dict[str, Any]:
    """Libraries of this torch build and its CPU capability."""
    return {
        "version": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkl": torch.backends.mkl.is_available(),
        "onednn": torch.backends.mkldnn.is_available(),
        "openmp": torch.backends.openmp.is_available(),
        "cuda": torch.version.cuda,
        "cuda_usable": torch.cuda.is_available(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed as a package"


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _field(text: str, name: str) -> str:
    match = re.search(rf"^{name}\s*:\s*(.*)$", text, re.MULTILINE)
    return match[1].strip() if match else ""


def _processor(info: str) -> str:
    return _field(info, "model name") or platform.processor() or platform.machine() or "unknown"


def _memory() -> int | None:
    """Bytes of memory that the machine or the container has."""
    total = _field(_text("/proc/meminfo"), "MemTotal").split()
    sizes = [int(total[0]) * 1024] if total else []
    limit = _text("/sys/fs/cgroup/memory.max").strip()
    if limit.isdigit():
        sizes.append(int(limit))
    return min(sizes, default=None)


def _accelerators() -> list[str]:
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
