"""Losses of which several ranks have some tokens each."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from clearhead.arguments import repr_of
from clearhead.distributed.mesh import MeshAxes
from clearhead.errors import ShapeError
from clearhead.shapes import Float

__all__ = ["mean_loss"]

#: Axes along which ranks have different tokens.
_DIVIDED: Final = ("data", "context", "shard")


def mean_loss(total: Float[Tensor, ""], count: int | Tensor, mesh: DeviceMesh) -> Float[Tensor, ""]:
    """The mean loss of all tokens of all ranks, from each rank's sum and count.

    ``sum over ranks of total / sum over ranks of count``

    Ranks may have different counts, as with padding. If each rank has as many tokens as any other, the mean of its own
    tokens has the same gradients.

    Args:
        total: the sum of the losses of this rank's tokens, with its graph.
        count: how many tokens that were, padding aside.
        mesh: the mesh that the model was parallelized on.

    Returns:
        The mean, equal on every rank; 0 where no rank has a token. Its backward gives a parallelized model the
        gradients of one process.

    Raises:
        ShapeError: ``total`` is not one floating point number.
        UnsupportedError: ``mesh`` is none that ``parallelize`` takes.

    Cost: one sum of two numbers over ranks for each axis, and another in backward.

    >>> import torch.nn.functional as F, clearhead as ch
    >>> def loss(logits, labels, mesh):  # on each rank; a label of -100 is padding
    ...     total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    ...     return ch.distributed.mean_loss(total, (labels != -100).sum(), mesh)
    """
    if not isinstance(total, Tensor) or total.numel() != 1 or not total.is_floating_point():
        raise ShapeError.about(
            "mean_loss",
            "total",
            must="be one floating point number",
            got=repr_of(total),
            then='Sum the losses of the tokens: reduction="sum".',
        )
    axes = MeshAxes.of("mean_loss", mesh)
    groups = [group for name in _DIVIDED if (group := axes.group(name)) is not None]
    counts = torch.as_tensor(count, device=total.device).detach().reshape(()).to(torch.float64)
    for group in groups:
        total = _SummedLoss.apply(total, group)  # type: ignore[no-untyped-call]
        dist.all_reduce(counts, group=group)
    return total.reshape(()) / counts.clamp(min=1).to(total.dtype)


class _SummedLoss(torch.autograd.Function):
    """The sum over ranks, and in backward the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.group), None


def _sum(x: Tensor, group: ProcessGroup) -> Tensor:
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
