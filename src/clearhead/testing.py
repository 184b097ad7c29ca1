"""Helpers for tests: override the choices of the processor table, or the processor whose rows apply."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from clearhead.arguments import repr_of
from clearhead.choices import FEATURES, Overrides, Processor, overrides, set_overrides
from clearhead.dispatch import BACKENDS
from clearhead.errors import UnsupportedError
from clearhead.projection.paths import PATHS

__all__ = ["choices", "forbid_fused", "force_fused", "fused_calls", "processor"]


@contextmanager
def choices(*, gemm: str | None = None, attention: str | None = None) -> Iterator[None]:
    """Inside the context, override the table's choices, on every thread of the process.

    Args:
        gemm: the path of every GEMM large enough to have a choice: ``"torch"``, ``"onednn"`` or ``"native"``. It takes
            precedence over ``CLEARHEAD_PROJECTION``. None leaves the choice to the table.
        attention: the backend that ``"auto"`` tries first; a call that it cannot run goes to the next one. None leaves
            the choice to the table.

    Raises:
        UnsupportedError: no path or backend has the name, or the path is not available.

    >>> import torch, clearhead
    >>> query = torch.ones(1, 1, 2, 4)
    >>> with choices(attention="tiled"):
    ...     clearhead.explain_dispatch(query, query, query).choice
    'tiled'
    """
    _check("choices", "gemm", gemm, tuple(PATHS))
    _check("choices", "attention", attention, BACKENDS)
    absent = None if gemm is None else PATHS[gemm].absent(torch.float32)
    if absent is not None:
        must, then = "be an available path", "Name another one."
        raise UnsupportedError.about("choices", "gemm", must=must, got=f"{gemm!r}, but {absent}", then=then)
    with _naming(replace(overrides(), gemm=gemm, attention=attention)):
        yield


@contextmanager
def forbid_fused() -> Iterator[None]:
    """Inside the context, layers and attention with its projections run op by op, unfused.

    >>> import torch, clearhead
    >>> block, x = clearhead.nn.EncoderBlock(8, 2).eval(), torch.ones(1, 3, 8)
    >>> with forbid_fused():
    ...     torch.allclose(block(x), block(x))
    True
    """
    with _naming(replace(overrides(), fused=False)):
        yield


@contextmanager
def fused_calls() -> Iterator[list[str]]:
    """Inside the context, record the calls that run as one block operator.

    Yields:
        A list to which each such call appends ``"attention"``, ``"feedforward"``, ``"layer"`` or ``"stack"``.
    """
    calls: list[str] = []
    with _naming(replace(overrides(), fused_calls=calls)):
        yield calls


@contextmanager
def force_fused() -> Iterator[list[str]]:
    """Record the calls that run as one block operator, and raise if there is none.

    Yields:
        A list to which each such call appends ``"attention"``, ``"feedforward"``, ``"layer"`` or ``"stack"``.

    Raises:
        UnsupportedError: at the end of the context, if no call was fused.
    """
    with fused_calls() as calls:
        yield calls
    if not calls:
        must, then = "run as one block operator", "The docstrings of clearhead.nn.fused list the conditions."
        raise UnsupportedError.about("force_fused", "a call", must=must, got="none that did", then=then)


@contextmanager
def processor(vendor: str, features: Iterable[str]) -> Iterator[Processor]:
    """Inside the context, use the table's rows of another processor; which paths are installed does not change.

    Args:
        vendor: the ``vendor_id`` in ``/proc/cpuinfo``, such as ``"GenuineIntel"`` or ``"AuthenticAMD"``.
        features: any of ``avx2``, ``avx512``, ``avx512_bf16``, ``amx_bf16``, ``amx_fp16``, ``amx_kernels``, ``neon``
            and ``bf16``.

    Yields:
        The processor.

    Raises:
        UnsupportedError: a feature is not one of the table's.

    >>> import torch
    >>> from clearhead.choices import row_for
    >>> with processor("GenuineIntel", ["avx2", "avx512", "amx_bf16"]):
    ...     row_for(torch.bfloat16).forward
    ('onednn',)
    """
    listed = tuple(features)
    for feature in listed:
        _check("processor", "features", feature, FEATURES)
    fake = Processor(vendor, frozenset(listed))
    with _naming(replace(overrides(), processor=fake)):
        yield fake


def _check(function: str, argument: str, given: str | None, allowed: tuple[str, ...]) -> None:
    if given is not None and given not in allowed:
        must, then = f"be one of {', '.join(map(repr, allowed))}", "Correct the name."
        raise UnsupportedError.about(function, argument, must=must, got=repr_of(given), then=then)


@contextmanager
def _naming(new: Overrides) -> Iterator[None]:
    before = set_overrides(new)
    try:
        yield
    finally:
        set_overrides(before)
