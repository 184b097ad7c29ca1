"""A replacement of one of ATen's kernels in torch's dispatcher, and what it takes the place of."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.library import Library, get_kernel

__all__ = ["AtenKernel", "register"]


@dataclass(frozen=True)
class AtenKernel:
    """A replacement of one kernel.

    Attributes:
        operator: name of the operator in the namespace ``aten``, with its overload.
        run: takes the operator's arguments; returns its result, or None for a call that torch's kernel computes.
        keys: the dispatch keys whose kernels are replaced.
    """

    operator: str
    run: Callable[..., Any]
    keys: tuple[str, ...] = ("CPU",)


#: torch warns once in a process that kernels are replaced, which is what the caller asked for.
_WARNING: Final = "Warning only once for all operators"


def register(kernels: Sequence[AtenKernel]) -> Library:
    """Register replacements with the dispatcher; the kernels of before are back when the returned object is deleted."""
    library = Library("aten", "IMPL")
    for kernel in kernels:
        for key in kernel.keys:
            # Read before the registration, after which it would be the replacement.
            original = get_kernel(f"aten::{kernel.operator}", key)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=_WARNING, category=UserWarning)
                run = _with_original(kernel.run, original)
                # Another package's replacement is called for what is not taken, and stands again afterwards.
                library.impl(kernel.operator, run, key, with_keyset=True, allow_override=True)
    return library


def _with_original(run: Callable[..., Any], original: Any) -> Callable[..., Any]:
    """A kernel that calls the original one for what ``run`` does not compute."""

    def kernel(keys: torch.DispatchKeySet, *args: Any, **options: Any) -> Any:
        result = run(*args, **options)
        return original.call_boxed(keys, *args, **options) if result is None else result

    return kernel
