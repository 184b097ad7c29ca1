"""Parameters that are DTensors: their gradients and their whole values.

torch's packages of DTensors and FSDP take a second to import, which a training of one process does not need.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

__all__ = ["copy_whole", "local", "reshard", "scale_gradients", "sync_gradients", "whole"]

_PLAIN: Final = (Tensor, nn.Parameter)


def local(tensor: Tensor) -> Tensor:
    """This process's part of a DTensor, which shares its memory; any other tensor itself."""
    if type(tensor) in _PLAIN:
        return tensor
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a DTensor, on every process; any other tensor itself.

    Cost: one all-gather.
    """
    if type(tensor) in _PLAIN:
        return tensor
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copy_whole(target: Tensor, source: Tensor) -> None:
    """Copy a whole tensor, which every process has, into a tensor or into a DTensor of its shape."""
    if type(target) not in _PLAIN:
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(target, DTensor)
        source = distribute_tensor(source, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(source)


def reshard(model: nn.Module) -> None:
    """Free gathered parameters: after a forward pass without a backward pass they would outlive an optimizer's step."""
    from torch.distributed.fsdp import FSDPModule

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
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)
