"""project(): a linear layer's product through the faster of torch's own path and oneDNN's.

On some processors torch's float32 product runs at half the rate that oneDNN reaches on the same numbers. Which is the
case here is measured once per process and per kind of product, and remembered: the same inputs give the same bits.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from clearhead.errors import UnsupportedError
from clearhead.shapes import Float

__all__ = ["DTYPES", "KINDS", "Choice", "check_variable", "choice", "measured", "project"]

_VARIABLE: Final = "CLEARHEAD_PROJECTION"
_PATHS: Final = ("torch", "onednn")
_TYPES: Final = (Tensor, torch.nn.Parameter)
#: Multiplications from which oneDNN's call, some 10 us dearer than torch's, is worth it.
_LEAST: Final = 2**22
#: The same for a number of rows that may never come back: oneDNN prepares 0.3 ms or more for every new shape.
_LEAST_ONCE: Final = 2**24
_RECURRING_ROWS: Final = 64
_RECURRING_MULTIPLE: Final = 32
#: Rows that one product sums over: longer sums are slower in oneDNN, and less exact.
_BLOCK: Final = 512
#: What the measurement multiplies, and how often: a few milliseconds for each kind.
_ROWS, _WIDTH, _ROUNDS = 128, 512, 5
#: How much faster oneDNN must be, so that a tie stays with torch. In bfloat16 torch's own product is oneDNN's too, with
#: a copy of the bias into the output before it: the difference is smaller, and steadier.
_MARGINS: Final = {torch.float32: 1.1, torch.bfloat16: 1.03}

Product = Callable[..., Tensor]


def project(
    x: Float[Tensor, "*batch in"], weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None = None
) -> Float[Tensor, "*batch out"]:
    """``x @ weight^T + bias``: ``torch.nn.functional.linear``, by whichever product was measured to be faster.

    Only large float32 and bfloat16 products of plain CPU tensors have a choice; everything else, and everything under
    ``torch.compile``, ``torch.export``, autocast or ``torch.func``, is ``torch.nn.functional.linear`` itself. The
    products of backward are chosen likewise; under ``create_graph=True`` they are torch's own.

    Args:
        x: ``[*batch, in]``.
        weight: ``[out, in]``.
        bias: ``[out]``, or none.

    Returns:
        ``[*batch, out]``.

    Raises:
        UnsupportedError: ``CLEARHEAD_PROJECTION`` is set, and not to ``torch`` or to an ``onednn`` that is there.

    Cost: ``2 * rows * in * out`` operations, three times that with backward. A process measures for a few
    milliseconds when it first meets a product that is large enough, again in its first backward.

    >>> import torch
    >>> project(torch.ones(2, 3), torch.eye(3), torch.ones(3))
    tensor([[2., 2., 2.],
            [2., 2., 2.]])
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or type(x) not in _TYPES
        or weight.dim() != 2
        or x.numel() * weight.shape[0] < _LEAST
        or not _has_choice(x, weight, bias)
    ):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        projected: Tensor = _Projection.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return projected
    return _product("forward", x, weight, bias)


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return _product("forward", x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        # While autograd records (a second derivative is wanted) or something watches: operators that it knows.
        product = _torch_product if torch.is_grad_enabled() or type(grad) is not Tensor or _watched() else _product
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            product("input gradient", grad, weight) if needs_x else None,
            product("weight gradient", rows, x.reshape(-1, x.shape[-1])) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


def _has_choice(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN may compute this: shapes that fit, plain tensors, size, and nobody watching operators."""
    if not _plain(x) or not _plain(weight) or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        return False
    if x.dtype is not weight.dtype:
        return False
    if bias is not None and (not _plain(bias) or bias.dtype is not x.dtype or bias.shape != weight.shape[:1]):
        return False
    rows = x.numel() // weight.shape[1]
    recurs = rows <= _RECURRING_ROWS or rows % _RECURRING_MULTIPLE == 0
    return rows * weight.numel() >= (_LEAST if recurs else _LEAST_ONCE) and not _watched()


def _plain(tensor: Tensor) -> bool:
    """Numbers of a dtype that has a choice, in this machine's memory, and no subclass."""
    return (
        type(tensor) in _TYPES
        and tensor.dtype in _MARGINS
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
    )


def _watched() -> bool:
    """Whether something changes or records what operators do, or oneDNN is switched off."""
    return (
        torch.is_autocast_enabled("cpu")
        or not torch.backends.mkldnn.enabled
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())
    )


def _product(kind: str, first: Tensor, *others: Tensor | None) -> Tensor:
    return _PRODUCTS[kind][choice(kind, first.dtype).path](first, *others)


def _torch_product(kind: str, *tensors: Tensor | None) -> Tensor:
    return _PRODUCTS[kind]["torch"](*tensors)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # oneDNN reads a bias as if it were dense, whatever its stride is.
    dense = None if bias is None else bias.contiguous()
    output: Tensor = torch.ops.mkldnn._linear_pointwise.default(_dense(x), _dense(weight), dense, "none", [], "")
    return output


def _dense(x: Tensor) -> Tensor:
    """The tensor, copied unless it or its transpose lies densely; nothing says that oneDNN's operator reads more."""
    return x if x.is_contiguous() or (x.dim() == 2 and x.t().is_contiguous()) else x.contiguous()


def _summed_in_blocks(grad: Tensor, x: Tensor) -> Tensor:
    """``grad^T @ x``, a block of rows at a time."""
    # Blocks of bfloat16 would be rounded before they are added.
    blocks = max(1, round(len(x) / _BLOCK)) if x.dtype is torch.float32 else 1
    sizes = [_BLOCK] * (blocks - 1)
    sizes.append(len(x) - sum(sizes))
    parts = zip(_dense(grad).split(sizes), _dense(x).split(sizes), strict=True)
    total = _linear(*(part.t() for part in next(parts)))
    for grad_part, x_part in parts:
        total += _linear(grad_part.t(), x_part.t())
    return total


_PRODUCTS: Final[Mapping[str, Mapping[str, Product]]] = {
    "forward": {"torch": F.linear, "onednn": _linear},
    "input gradient": {"torch": torch.matmul, "onednn": lambda grad, weight: _linear(grad, weight.t())},
    "weight gradient": {"torch": lambda grad, x: grad.t() @ x, "onednn": _summed_in_blocks},
}
#: The kinds of product that are chosen apart.
KINDS: Final = tuple(_PRODUCTS)
DTYPES: Final = tuple(_MARGINS)


@dataclass(frozen=True)
class Choice:
    """By which path one kind of product runs in this process, and why.

    Attributes:
        kind: ``"forward"``, ``"input gradient"`` or ``"weight gradient"``.
        dtype: ``"float32"`` or ``"bfloat16"``.
        path: ``"torch"`` or ``"onednn"``.
        reason: in words.
        torch_gflops: torch's measured rate, or None where nothing was measured.
        onednn_gflops: oneDNN's.
    """

    kind: str
    dtype: str
    path: str
    reason: str
    torch_gflops: float | None = None
    onednn_gflops: float | None = None


_LOCK: Final = threading.Lock()
_CHOICES: Final[dict[tuple[str, torch.dtype], Choice]] = {}

if hasattr(os, "register_at_fork"):
    # A child made while another thread measures must not inherit a lock that nobody will release.
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


def choice(kind: str, dtype: torch.dtype = torch.float32) -> Choice:
    """The path of a kind of product, decided at the first call and then kept.

    Raises:
        UnsupportedError: ``CLEARHEAD_PROJECTION`` asks for what there is not.

    >>> choice("forward").path in ("torch", "onednn")
    True
    """
    found = _CHOICES.get((kind, dtype))
    if found is None:
        with _LOCK:
            found = _CHOICES.get((kind, dtype)) or _decide(kind, dtype)
            _CHOICES[kind, dtype] = found
    return found


def measured(kind: str, dtype: torch.dtype = torch.float32) -> Choice:
    """The choice with both rates, measured now where the choice did not need them.

    >>> measured("forward").torch_gflops > 0
    True
    """
    found = choice(kind, dtype)
    if found.torch_gflops is not None:
        return found
    own, other = _rates(kind, dtype)
    return replace(found, torch_gflops=own, onednn_gflops=other)


def check_variable() -> str | None:
    """The path that ``CLEARHEAD_PROJECTION`` forces, if it forces one.

    Raises:
        UnsupportedError: it names no path, or one that is not there.
    """
    forced = os.environ.get(_VARIABLE, "")
    if forced and forced not in _PATHS:
        raise UnsupportedError.about(
            "project", _VARIABLE, must=f"be {' or '.join(_PATHS)}", got=repr(forced)[:80],
            then="Unset it to let the faster one be measured.",
        )  # fmt: skip
    absent = _absent()
    if forced == "onednn" and absent is not None:
        raise UnsupportedError.about(
            "project", _VARIABLE, must="be torch here", got=f"onednn, but {absent}", then="Unset it."
        )
    return forced or None


def _decide(kind: str, dtype: torch.dtype) -> Choice:
    name = str(dtype)[6:]
    forced = check_variable()
    if forced is not None:
        return Choice(kind, name, forced, f"{_VARIABLE}={forced}")
    absent = _absent()
    if absent is not None:
        return Choice(kind, name, "torch", absent)
    own, other = _rates(kind, dtype)
    if other is None:
        return Choice(kind, name, "torch", "oneDNN fails here or computes something else", own)
    return Choice(kind, name, "onednn" if other >= _MARGINS[dtype] * own else "torch", "measured", own, other)


def _absent() -> str | None:
    """Why oneDNN's product cannot be asked for at all, or None."""
    if not torch.backends.mkldnn.is_available():
        return "this torch was built without oneDNN"
    if not hasattr(getattr(torch.ops, "mkldnn", None), "_linear_pointwise"):
        return "this torch has no operator mkldnn::_linear_pointwise"
    return None


@torch.no_grad()
def _rates(kind: str, dtype: torch.dtype) -> tuple[float, float | None]:
    """GFLOP/s of torch and of oneDNN on one product; None for oneDNN where it cannot be used."""
    # A generator of its own: measuring must not move the user's random numbers.
    generator = torch.Generator("cpu").manual_seed(0)
    second = _ROWS if kind == "weight gradient" else _WIDTH
    tensors = [
        torch.rand(rows, _WIDTH, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
        for rows in (_ROWS, second)
    ]
    if kind == "forward":
        tensors.append(tensors[0][0])
    products = _PRODUCTS[kind]
    if not _agree(products, tensors):
        return _fastest([products["torch"]], tensors)[0], None
    own, other = _fastest([products["torch"], products["onednn"]], tensors)
    return own, other


def _fastest(products: Sequence[Product], tensors: list[Tensor]) -> list[float]:
    """GFLOP/s of each product's best round; others on the machine can only slow one down."""
    seconds = [float("inf")] * len(products)
    for _ in range(_ROUNDS):
        for place, product in enumerate(products):
            started = time.perf_counter()
            product(*tensors)
            seconds[place] = min(seconds[place], time.perf_counter() - started)
    return [round(2e-9 * _ROWS * _WIDTH**2 / best, 1) for best in seconds]


def _agree(products: Mapping[str, Product], tensors: list[Tensor]) -> bool:
    """Whether oneDNN runs and computes what torch computes; also the first, slow call of each."""
    if _absent() is not None:
        return False
    try:
        found = products["onednn"](*tensors)
    except RuntimeError:
        return False
    own = products["torch"](*tensors)
    return torch.allclose(found, own, rtol=max(1e-3, 2 * torch.finfo(own.dtype).eps))
