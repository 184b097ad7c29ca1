"""Parameters that are DTensors: their gradients and their whole values."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

__all__ = ["copy_whole", "local", "reshard", "scale_gradients", "sync_gradients", "whole"]


def local(tensor: Tensor) -> Tensor:
    """This process's part of a DTensor, which shares its memory; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a DTensor, on every process; any other tensor itself.

    Cost: one all-gather.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copy_whole(target: Tensor, source: Tensor) -> None:
    """Copy a whole tensor, which every process has, into a tensor or into a DTensor of its shape."""
    if isinstance(target, DTensor):
        source = distribute_tensor(source, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(source)


def reshard(model: nn.Module) -> None:
    """Free gathered parameters: after a forward pass without a backward pass they would outlive an optimizer's step."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def scale_gradients(model: nn.Module, factor: float) -> None:
    """Multiply every gradient by a number."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor)


def sync_gradients(model: nn.Module, wanted: bool) -> None:
    """Whether the next backward pass sums gradients over processes; without it they stay with each process."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)
