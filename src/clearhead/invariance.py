"""The same bits for a sequence however it is computed: the switch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, Final, Literal, ParamSpec, TypeVar

import torch

from clearhead.arguments import repr_of
from clearhead.choices import PORTABLE, UNFUSED_ISA, is_invariant, overrides, refuse_if_invariant, set_overrides
from clearhead.errors import UnsupportedError
from clearhead.ops.library import isa_name, library

__all__ = ["eager_if_invariant", "invariant", "is_invariant", "set_invariant"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_LEVELS: Final = 'be True, False or "portable"'


def set_invariant(invariant: bool | Literal["portable"]) -> None:
    """Set whether a sequence's bits may depend on how it is computed, for the whole process.

    With ``True`` every operator on the CPU has one order of summation, a function of absolute positions alone. In
    float32, bfloat16 and float16, on one instruction set, a token's output from ``ch.attention``, a module of ``ch.nn``
    or a model after ``ch.swap`` then has the same bits

    - alone, in any batch and at any place in it, padded or packed;
    - prefilled whole, in chunks of any sizes, or decoded token by token from a KV cache;
    - with any number of threads, fused or op by op, observed or not, compiled or not.

    Gradients of a sequence's inputs have the same bits in any batch. ``ch.train`` ends in the same weights in
    micro-batches of any size and on any number of data parallel ranks. Dropout belongs to the seed, the layer, the
    sequence and the position. Sampling from a seed gives a sequence the same text in any batch. A call for which this
    cannot hold raises ``UnsupportedError``, and ``ch.explain_dispatch`` shows the reason. ``ch.swap`` names the modules
    of a model that torch computes. ``ch.verify_model`` tests a model.

    With ``"portable"`` the bits of float32 are also the same on every instruction set of the kernels that fuses
    multiplication and addition: AVX2, AVX-512 with and without bfloat16 instructions, and NEON. Other dtypes raise.
    What torch computes is its own: initial weights from its generator, losses and optimizer steps.

    The setting is of the process, since backward runs on autograd's threads: it holds for every thread at once, and
    child processes begin with ``CLEARHEAD_INVARIANT``. The variable decides until the first call; it is read once.
    Nothing of the setting is saved with a model. A graph of ``torch.compile`` has a guard on it and is compiled again
    for the other setting. Modules of ``ch.nn`` run eagerly within a compiled function while it is on, and
    ``torch.export`` of them raises.

    Args:
        invariant: True for one order of summation, ``"portable"`` for the same bits on all instruction sets too, False
            for the fastest order of each call.

    Raises:
        UnsupportedError: ``invariant`` is no level; or it is ``"portable"``, and the kernels run by the baseline set,
            which has no fused multiply-add.

    Cost of True and ``"portable"``, which run the same code: GEMMs and attention run on clearhead's kernels even where
    the table of processors names torch's or oneDNN's; see the page Reproducibility.

    >>> import torch, clearhead as ch
    >>> layer, x = torch.nn.Linear(64, 64), torch.randn(8, 64)
    >>> ch.set_invariant(True)
    >>> report = ch.swap(layer)
    >>> with torch.no_grad():
    ...     torch.equal(layer(x)[:1], layer(x[:1]))
    True
    >>> ch.set_invariant(False)
    """
    portable = isinstance(invariant, str) and invariant == PORTABLE
    if not (portable or isinstance(invariant, bool)):
        then = "True computes the same bits in any batch, in chunks and token by token."
        raise UnsupportedError.about("set_invariant", "invariant", must=_LEVELS, got=repr_of(invariant), then=then)
    if portable and isa_name() == UNFUSED_ISA:
        got = f"'portable' on the instruction set {UNFUSED_ISA}, which has no fused multiply-add"
        then = "Use True, which keeps the bits on one instruction set."
        raise UnsupportedError.about("set_invariant", "invariant", must=_LEVELS, got=got, then=then)
    _set(invariant)


@contextmanager
def invariant(invariant: bool | Literal["portable"] = True) -> Iterator[None]:
    """Inside the context, a sequence's bits do not depend on how it is computed; ``set_invariant`` states the promise.

    Contexts nest: each restores the setting that it found, also after an exception. As with ``set_invariant``, the
    setting is of the process and not of the thread. A backward pass belongs in the context too.

    Args:
        invariant: True, ``"portable"``, or False to suspend an enclosing setting.

    Raises:
        UnsupportedError: ``set_invariant`` would raise.

    >>> import torch, clearhead as ch
    >>> query, key, value = torch.randn(3, 1, 2, 100, 16)
    >>> with ch.invariant():
    ...     whole = ch.attention(query, key, value, mask=ch.Causal())
    ...     last = ch.attention(query[:, :, -1:], key, value, mask=ch.Causal(), query_offset=99)
    >>> whole.shape, last.shape
    (torch.Size([1, 2, 100, 16]), torch.Size([1, 2, 1, 16]))
    """
    before = overrides().invariant
    set_invariant(invariant)
    try:
        yield
    finally:
        _set(before)


def eager_if_invariant(forward: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorator of a module's ``forward``, which runs eagerly within compiled code while the setting is on.

    A compiler fuses and rounds what is between the operators in its own way. Export has no eager calls and raises.
    """

    @wraps(forward)
    def eager_or_traced(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if torch.compiler.is_compiling() and is_invariant():
            if torch.compiler.is_exporting():
                refuse_if_invariant(
                    forward.__qualname__, "the graph", got="one of torch.export", then="Export with invariant(False)."
                )
            eager: Callable[_Arguments, _Result] = torch.compiler.disable(forward)
            return eager(*args, **kwargs)
        return forward(*args, **kwargs)

    # torch.compile counts recompilations of a code object, which all forwards would share.
    function: Any = eager_or_traced
    function.__code__ = function.__code__.replace(co_name=forward.__qualname__)
    return eager_or_traced


def _set(invariant: bool | str | None) -> None:
    set_overrides(replace(overrides(), invariant=invariant))
    if (loaded := library()) is not None:
        loaded.ch_set_invariant(is_invariant())
