"""project(): a linear layer by the selected path; project_each(): several linear layers that read the same input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead import choices as table
from clearhead.backends.containment import without_autocast
from clearhead.invariance import eager_if_invariant
from clearhead.ops.packed_weight import PackedWeight, Weight, as_stored
from clearhead.ops.quantized_weight import QuantizedWeight
from clearhead.projection.autocast import operand_cast
from clearhead.projection.paths import KINDS, NATIVE, TORCH, Path, Term, flat
from clearhead.projection.selection import choice, has_paths, large_enough, path_for, takes_small
from clearhead.projection.stored import StoredWeight, project_stored
from clearhead.sequence_sums import TreeSum
from clearhead.shapes import Float
from clearhead.tensors import has_memory, traces
from clearhead.torch_private import (
    base_of,
    differentiates_forward,
    has_dispatch_mode,
    has_function_mode,
    transforms,
)

__all__ = ["has_choice", "kernels_take", "project", "project_each", "recorded", "unlooked", "unrecorded"]

_TYPES: Final = (Tensor, torch.nn.Parameter)


def project(
    x: Float[Tensor, "*batch in"],
    weight: Float[Tensor, "out in"] | Weight,
    bias: Float[Tensor, " out"] | None = None,
    *,
    path: Path | None = None,
) -> Float[Tensor, "*batch out"]:
    """``x @ weight^T + bias``: ``torch.nn.functional.linear`` by the path that the table of processors selects.

    There is a choice of paths for float32 and bfloat16 CPU tensors if the GEMM is large, or without gradients if the
    weight is. All other calls, and all under ``torch.compile``, ``torch.export``, autocast or ``torch.func``, are
    ``torch.nn.functional.linear``. Backward's GEMMs have the same choice; with ``create_graph=True`` they are torch's.

    In invariant mode (``clearhead.set_invariant``) the kernels compute every call on float32, bfloat16 and float16 CPU
    tensors: each output row, and each row of the gradient of ``x``, has the same bits alone and among any other rows.
    Autocast casts the operands to its dtype first.
    ``torch.compile`` then leaves the call out of its graph, and raises with ``fullgraph=True``.

    Args:
        x: ``[*batch, in]``.
        weight: ``[out, in]``; integers and a packed weight take ``project_stored``.
        bias: ``[out]``, or None.
        path: the path to take, which must support the tensors; None for the table's choice.

    Returns:
        ``[*batch, out]``.

    Raises:
        UnsupportedError: ``CLEARHEAD_PROJECTION`` names no path, or one that is not available; or, in invariant mode,
            a transform of ``torch.func`` is active, a path other than the kernels' is named, or the kernels are not
            installed.

    Cost: ``2 * rows * in * out`` operations, three times that with backward.

    >>> import torch
    >>> project(torch.ones(2, 3), torch.eye(3), torch.ones(3))
    tensor([[2., 2., 2.],
            [2., 2., 2.]])
    """
    if isinstance(weight := _readable(weight, x), StoredWeight):
        return project_stored(x, weight, bias)
    if path is None and torch.compiler.is_compiling() and table.is_invariant():
        return _eager(x, weight, bias)
    if path is None and not has_choice(x, weight, bias):
        if (cast := operand_cast()) is not None:
            operands = cast(x), cast(weight), None if bias is None else cast(bias)
            with without_autocast("cpu"):
                return project(*operands)
        _refuse_variant(x, weight, bias)
        return F.linear(x, weight, bias)
    if _needs_gradient(x, weight, bias):
        (projected,) = _Projections.apply(path, x, weight, bias)  # type: ignore[no-untyped-call]
        return projected  # type: ignore[no-any-return]
    return _forward(path, x, weight, bias)


#: ``project`` outside the graphs of a compiler, whose GEMMs are torch's.
_eager: Final = eager_if_invariant(project)


def project_each(
    x: Float[Tensor, "*batch in"],
    weights: Sequence[Weight],
    biases: Sequence[Float[Tensor, " out"] | None],
    *,
    path: Path | None = None,
) -> tuple[Float[Tensor, "*batch out"], ...]:
    """``project(x, weight, bias)`` for each weight and bias; backward sums the gradients of ``x`` in one GEMM.

    Args:
        x: ``[*batch, in]``.
        weights: weights ``[out, in]``, as ``project`` takes them; ``out`` may differ.
        biases: one for each weight, ``[out]`` or None.
        path: the path to take, which must support the tensors; None for the table's choice.

    Returns:
        One output ``[*batch, out]`` for each weight.

    Raises:
        UnsupportedError: ``CLEARHEAD_PROJECTION`` names no path, or one that is not available.

    Cost: that of ``project`` for each; backward saves a pass over ``x``'s gradient for every layer but the first.

    >>> import torch
    >>> x = torch.ones(2, 3, requires_grad=True)
    >>> [part.shape for part in project_each(x, [torch.eye(3), torch.ones(4, 3)], [None, None])]
    [torch.Size([2, 3]), torch.Size([2, 4])]
    """
    pairs = tuple(zip((_readable(weight, x) for weight in weights), biases, strict=True))
    floats = [(weight, bias) for weight, bias in pairs if isinstance(weight, Tensor)]
    together = torch.is_grad_enabled() and x.requires_grad and len(floats) == len(pairs) > 1
    # A layer that is too small for a choice cannot be part of the common GEMM.
    if not together or (path is None and not all(has_choice(x, *pair) for pair in floats)):
        return tuple(project(x, *pair, path=path) for pair in pairs)
    flat = [part for pair in floats for part in pair]
    projected: tuple[Tensor, ...] = _Projections.apply(path, x, *flat)  # type: ignore[no-untyped-call]
    return projected


def _readable(weight: Weight, x: Tensor) -> Weight:
    """The weight, or a copy of a packed one where ``x`` cannot be multiplied by panels."""
    weight = as_stored(weight)
    if isinstance(weight, PackedWeight) and not (are_plain(x) and x.dim() > 0 and x.dtype is weight.dtype):
        return weight.dense()
    return weight


def _refuse_variant(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise under ``set_invariant(True)`` if torch's GEMM would compute elements that the kernels could not."""
    # Wrong shapes raise in torch; without elements there is no sum.
    if not table.is_invariant() or x.is_meta or x.numel() == 0 or weight.dim() != 2:
        return
    parts = [part for part in (x, weight, bias) if part is not None]
    if torch.compiler.is_compiling() or traces():
        got = "a graph that is traced"
    elif watched():
        got = "a call under a transform of torch.func or a dispatch mode"
    elif x.dim() > 0 and all(map(_plain, parts)):
        return
    else:
        got = ", ".join(sorted({f"{type(part).__name__} of {str(part.dtype)[6:]} on {part.device}" for part in parts}))
    dtypes = "float32" if table.is_portable() else "float32 or bfloat16"
    table.refuse_if_invariant("project", "x", got=got, then=f"Use plain {dtypes} tensors on the CPU.")


class _Projections(torch.autograd.Function):
    """Linear layers that read one input: a path or None, ``x``, then a weight and a bias or None for each."""

    @staticmethod
    def forward(ctx: Any, path: Path | None, x: Tensor, *layers: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = layers[::2], layers[1::2]
        _, needs_x, *needs = ctx.needs_input_grad
        ctx.path = path
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if any(needs[::2]) else None, *(weights if needs_x else [None] * len(weights)))
        return tuple(
            unaliased(_forward(path, x, weight, bias))
            for weight, bias in zip(weights, biases, strict=True)
            if weight is not None
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        _, needs_x, *needs = ctx.needs_input_grad
        arrived = [grad for grad in grads if grad is not None]
        path = ctx.path
        if recorded(*arrived):
            table.refuse_if_invariant(
                "backward",
                "the gradient",
                got="a differentiable or batched one, or backward under autocast",
                then="Call backward outside of autocast, or use ch.invariant(False).",
            )
            path = TORCH
        layer_grads: list[Tensor | None] = []
        for place, grad in enumerate(grads):
            needs_weight, needs_bias = needs[2 * place : 2 * place + 2]
            layer_grads += (None, None) if grad is None else layer_gradients(path, grad, x, needs_weight, needs_bias)
        if not needs_x or not arrived:
            return None, None, *layer_grads
        terms = [(grad, weight) for grad, weight in zip(grads, weights, strict=True) if grad is not None]
        return None, _input_gradient(path, terms), *layer_grads


def unaliased(output: Tensor) -> Tensor:
    """The output, copied if it is a view: autograd forbids in-place changes of views that a function returns."""
    return output if base_of(output) is None else output.clone()


def recorded(*grads: Tensor) -> bool:
    """Whether backward must consist of torch's operators.

    That is so if a second derivative is needed, a mode is active, or a gradient is a subclass or batched
    (``is_grads_batched``).
    """
    plain = all(type(grad) is Tensor and has_memory(grad) for grad in grads)
    return torch.is_grad_enabled() or not plain or watched()


def _forward(path: Path | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return (path or path_of("forward", x, weight.numel())).forward(x, weight, bias)


def _input_gradient(path: Path | None, terms: Sequence[Term]) -> Tensor:
    grad, weight = terms[0]
    return (path or path_of("input gradient", grad, weight.numel())).input_gradient(terms)


def layer_gradients(
    path: Path | None, grad: Tensor, x: Tensor, needs_weight: bool, needs_bias: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of one layer's weight and bias, by a path, or by the selected one."""
    if table.is_invariant():
        return _gradients_by_sequence(path, grad, x, needs_weight, needs_bias)
    rows = grad.reshape(-1, grad.shape[-1])
    if not needs_weight:
        return None, rows.sum(0) if needs_bias else None
    flat = x.reshape(-1, x.shape[-1])
    path = path or path_of("weight gradient", rows, rows.shape[1] * flat.shape[1])
    return path.weight_gradient(rows, flat, needs_bias)


def _gradients_by_sequence(
    path: Path | None, grad: Tensor, x: Tensor | None, needs_weight: bool, needs_bias: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The same as a sum over the sequences ``[batch, len, width]``, in the order of their tree."""
    if not needs_weight and not needs_bias:
        return None, None
    if not needs_weight or x is None:
        x = grad.new_empty(*grad.shape[:-1], 0)
    path = path or path_of("weight gradient", grad, grad.shape[-1] * x.shape[-1])
    if path is NATIVE:
        weight, bias = path.weight_gradient(grad, x, needs_bias)
        return weight if needs_weight else None, bias
    total = TreeSum()
    for grad_part, x_part in zip(*((one if one.dim() > 2 else one[None]) for one in (grad, x)), strict=True):
        total.add(path.weight_gradient(flat(grad_part), flat(x_part), needs_bias))
    of_weight, of_bias = total.result()
    return of_weight if needs_weight else None, of_bias


def path_of(kind: str, x: Tensor, elements: int) -> Path:
    """The path of a kind of GEMM, with a weight of ``elements`` elements."""
    return path_for(kind, x.dtype, x.numel() // max(1, x.shape[-1]), elements)


def has_choice(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether there is a choice of paths: a large GEMM, shapes that fit, plain tensors, and no mode or transform that
    observes operators."""
    # In this order: a compiler or trace must not evaluate the other conditions.
    if torch.compiler.is_compiling() or traces() or type(x) not in _TYPES:
        return False
    if weight.dim() != 2:
        return False
    columns, steps = weight.shape
    training = _needs_gradient(x, weight, bias)
    if not large_enough(weight.dtype, x.numel() // max(1, steps), columns, steps, training=training):
        return False
    if not _plain(x) or x.dim() == 0:
        return False
    if not is_layer(weight, bias, x.shape[-1], x.dtype):
        return False
    if not watched():
        return True
    if transforms() or differentiates_forward():
        then = "Leave it, or call clearhead.set_invariant(False)."
        table.refuse_if_invariant("project", "x", got="a transform of torch.func", then=then)
    return False


def _needs_gradient(*parts: Tensor | None) -> bool:
    """Whether autograd records operations on these tensors."""
    return torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in parts)


def kernels_take(
    kinds: Sequence[str], x: Tensor, weight: Weight, bias: Tensor | None, *, width: int | None = None
) -> bool:
    """Whether the CPU kernels compute these kinds of GEMM of a layer within a fused operator.

    The layer reads ``x``, or ``width`` elements for each token of ``x``. A GEMM that is too small for a choice takes
    the kernels if they are available and no other path is named, since there the overhead of calls dominates. A narrow
    weight takes the kernels too, since fusion saves more than a slower GEMM costs. Integers and
    packed weights have a forward pass only.
    """
    width = x.shape[-1] if width is None else width
    if isinstance(weight, QuantizedWeight):
        return kinds == KINDS[:1] and weight.shape[1] == width and _is_bias(bias, weight.shape[0], x.dtype)
    if isinstance(weight, PackedWeight):
        fits = weight.shape[1] == width and weight.dtype is x.dtype
        return kinds == KINDS[:1] and fits and _is_bias(bias, weight.shape[0], x.dtype)
    if not is_layer(weight, bias, width, x.dtype):
        return False
    if x.numel() // x.shape[-1] * weight.numel() < table.SMALL:
        return takes_small(x.dtype)
    return all(choice(kind, x.dtype).path == NATIVE.name for kind in kinds)


def is_layer(weight: Tensor, bias: Tensor | None, width: int, dtype: torch.dtype) -> bool:
    """Whether weight and bias are plain tensors of a layer with ``width`` inputs of a dtype."""
    if weight.dim() != 2 or not _plain(weight) or weight.shape[1] != width or weight.dtype is not dtype:
        return False
    return _is_bias(bias, weight.shape[0], dtype)


def _is_bias(bias: Tensor | None, outputs: int, dtype: torch.dtype) -> bool:
    return bias is None or (_plain(bias) and bias.dtype is dtype and bias.shape == (outputs,))


def are_plain(first: Tensor, *others: Tensor | None) -> bool:
    """Whether tensors are plain and of one dtype, and no mode or transform is active; shapes are not checked."""
    # In this order: a compiler or trace must not evaluate the other conditions.
    if torch.compiler.is_compiling() or not unrecorded() or not _plain(first):
        return False
    return all(other is None or (_plain(other) and other.dtype is first.dtype) for other in others)


def _plain(tensor: Tensor) -> bool:
    """Whether a tensor has a dtype with a choice of paths, is on the CPU, strided, and no subclass."""
    return (
        type(tensor) in _TYPES
        and has_paths(tensor.dtype)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
    )


def unrecorded() -> bool:
    """Whether no tracer, mode or transform observes operators."""
    return not (traces() or watched())


def watched() -> bool:
    """Whether autocast, a mode or a transform is active, or oneDNN is disabled. In invariant mode operators run under
    modes too, since torch's add in another order."""
    if torch.is_autocast_enabled("cpu") or transforms() or differentiates_forward():
        return True
    modes = has_dispatch_mode() or has_function_mode() or not torch.backends.mkldnn.enabled
    return modes and not table.is_invariant()


def unlooked() -> bool:
    """Whether no transform and no mode observes operators."""
    return not (transforms() or differentiates_forward() or has_dispatch_mode() or has_function_mode())
