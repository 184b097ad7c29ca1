"""accelerate: torch's own attention and linear layers on the CPU, computed by clearhead's kernels in any program."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from torch.library import Library

from clearhead.arguments import flag
from clearhead.choices import refuse_if_invariant
from clearhead.errors import UnsupportedError
from clearhead.integrations.aten.attention import ATTENTION
from clearhead.integrations.aten.kernel import register
from clearhead.integrations.aten.linear import LINEAR
from clearhead.ops.library import reason

__all__ = ["ACCELERATED", "Accelerated", "Acceleration", "accelerate"]


@dataclass(frozen=True)
class Accelerated:
    """What is accelerated in this process."""

    attention: bool = False
    linear: bool = False


_KERNELS: Final = {"attention": ATTENTION, "linear": LINEAR}
_LOCK: Final = threading.RLock()
ACCELERATED = Accelerated()
#: The registrations, by the part of ``Accelerated``.
_LIBRARIES: Final[dict[str, Library]] = {}


class Acceleration:
    """What ``accelerate`` returns: a context manager that restores on leaving what held before ``accelerate``.

    Attributes:
        attention: whether attention is accelerated.
        linear: whether linear layers are accelerated.
    """

    def __init__(self, parts: Accelerated, before: Accelerated) -> None:
        self.attention, self.linear = parts.attention, parts.linear
        self._before = before

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _apply(self._before)

    def __repr__(self) -> str:
        return f"Acceleration(attention={self.attention}, linear={self.linear})"


def accelerate(enabled: bool = True, *, attention: bool = True, linear: bool = True) -> Acceleration:
    """Compute torch's own attention and linear layers on the CPU with clearhead's kernels, in the whole process.

    ``torch.nn.functional.scaled_dot_product_attention``, forward and backward, and the matrix multiplications behind
    ``torch.nn.Linear`` (``mm`` and ``addmm``) run on clearhead's kernels wherever the table of processors says that
    they are faster; every other call runs on torch's kernels. Programs, packages and graphs of ``torch.compile`` are
    served without a changed line. Meaning, errors and shapes are torch's: ``is_causal`` counts from the first query and
    key, masks are bool (``True`` allows) or added to scores, and a query without keys gives 0. Results differ by
    rounding. Dropout has torch's distribution and is seeded by torch's generator, but draws other elements.

    It takes effect at once, lasts until ``accelerate(False)``, and is a context manager::

        with ch.accelerate():
            model(x)

    Call it, and leave the context, while no other thread computes. Packages compiled by AOTInductor call torch's
    kernels directly and are not accelerated. A call that torch's kernels compute costs some 4 us more than before.

    Args:
        enabled: False restores torch's kernels.
        attention: whether attention is accelerated.
        linear: whether linear layers are accelerated.

    Returns:
        An ``Acceleration``, with which ``with`` restores on leaving what held before.

    Raises:
        UnsupportedError: the CPU kernels are not available here.

    Cost: none beyond the calls; in attention with a mask, two passes over the mask.

    >>> import torch, clearhead as ch
    >>> x = torch.randn(1, 4, 256, 64)
    >>> plain = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    >>> with ch.accelerate():
    ...     fast = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    >>> torch.allclose(plain, fast, atol=1e-6)
    True
    """
    enabled = flag("accelerate", "enabled", enabled)
    parts = Accelerated(flag("accelerate", "attention", attention), flag("accelerate", "linear", linear))
    if enabled and reason() is not None:
        raise UnsupportedError.about(
            "accelerate", "the CPU kernels", must="be available", got=str(reason()), then="See 'clearhead doctor'."
        )
    if enabled:
        refuse_if_invariant(
            "accelerate",
            "enabled",
            got="True, with small calls left to torch",
            then="Use ch.swap.",
        )
    parts = parts if enabled else Accelerated()
    return Acceleration(parts, _apply(parts))


def _apply(parts: Accelerated) -> Accelerated:
    """Make these the accelerated parts; returns what held before."""
    global ACCELERATED
    with _LOCK:
        before = ACCELERATED
        # All are made before any is kept, so that an error changes nothing.
        made = {name: _LIBRARIES.get(name) or register(_KERNELS[name]) for name in _KERNELS if getattr(parts, name)}
        _LIBRARIES.clear()
        _LIBRARIES.update(made)
        ACCELERATED = parts
        return before
