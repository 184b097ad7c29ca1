"""For tests: name what the table of processors otherwise chooses, or the processor whose rows count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from clearhead.arguments import seen
from clearhead.choices import FEATURES, Named, Processor, name, named
from clearhead.dispatch import BACKENDS
from clearhead.errors import UnsupportedError
from clearhead.projection.paths import PATHS

__all__ = ["choices", "forbid_fused", "force_fused", "fused_calls", "processor"]


@contextmanager
def choices(*, gemm: str | None = None, attention: str | None = None) -> Iterator[None]:
    """Inside the context, choose by name instead of by the table, on every thread of the process.

    Args:
        gemm: the path of every GEMM large enough to have a choice: ``"torch"``, ``"onednn"`` or ``"native"``. It stands
            above ``CLEARHEAD_PROJECTION``.
        attention: the backend that ``"auto"`` asks first. A call that the backend cannot run goes to the next one.

    Raises:
        UnsupportedError: no path or backend has the name, or the path is not there.

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
        must, then = "be a path that is there", "Name another one."
        raise UnsupportedError.about("choices", "gemm", must=must, got=f"{gemm!r}, but {absent}", then=then)
    with _naming(replace(named(), gemm=gemm, attention=attention)):
        yield


@contextmanager
def forbid_fused() -> Iterator[None]:
    """Inside the context, attention with its projections, and layers, run op by op.

    >>> import torch, clearhead
    >>> block, x = clearhead.nn.EncoderBlock(8, 2).eval(), torch.ones(1, 3, 8)
    >>> with forbid_fused():
    ...     torch.allclose(block(x), block(x))
    True
    """
    with _naming(replace(named(), fused=False)):
        yield


@contextmanager
def fused_calls() -> Iterator[list[str]]:
    """Inside the context, write down what runs as one block operator.

    Yields:
        A list that grows by ``"attention"``, ``"feedforward"``, ``"layer"`` or ``"stack"`` for each such call.
    """
    calls: list[str] = []
    with _naming(replace(named(), fused_calls=calls)):
        yield calls


@contextmanager
def force_fused() -> Iterator[list[str]]:
    """``fused_calls`` that fails where nothing runs as one block operator.

    Raises:
        UnsupportedError: at the end of the context, no call was fused.
    """
    with fused_calls() as calls:
        yield calls
    if not calls:
        must, then = "run as one block operator", "See clearhead.nn.fused for what it takes."
        raise UnsupportedError.about("force_fused", "a call", must=must, got="none that did", then=then)


@contextmanager
def processor(vendor: str, features: Iterable[str]) -> Iterator[Processor]:
    """Inside the context, read the rows of the table that count on another processor; what is installed stays.

    Args:
        vendor: as ``/proc/cpuinfo`` spells it, such as ``"GenuineIntel"`` or ``"AuthenticAMD"``.
        features: of ``avx2``, ``avx512``, ``avx512_bf16``, ``amx_bf16``, ``amx_fp16``, ``neon`` and ``bf16``.

    Raises:
        UnsupportedError: a feature is none of the table's.

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
    with _naming(replace(named(), processor=fake)):
        yield fake


def _check(function: str, argument: str, given: str | None, allowed: tuple[str, ...]) -> None:
    if given is not None and given not in allowed:
        must, then = f"be one of {', '.join(map(repr, allowed))}", "Correct the name."
        raise UnsupportedError.about(function, argument, must=must, got=seen(given), then=then)


@contextmanager
def _naming(new: Named) -> Iterator[None]:
    before = name(new)
    try:
        yield
    finally:
        name(before)
