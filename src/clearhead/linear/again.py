"""A pass of our own made once more by operations of torch, for gradients that it does not know how to give."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from clearhead.backends.containment import without_autocast
from clearhead.backends.native_library import in_memory

__all__ = ["Parts", "gradients_again", "recorded"]

#: Tensors of a pass in their order; None for one that there is not.
Parts: TypeAlias = tuple[Tensor | None, ...]


def recorded(grads: Parts) -> bool:
    """Whether gradients take operations that autograd and transforms know.

    A second derivative is wanted, or one of them is no plain tensor, or many at once (``is_grads_batched``).
    """
    arrived = [grad for grad in grads if grad is not None]
    return torch.is_grad_enabled() or not all(in_memory(one) and not is_legacy_batchedtensor(one) for one in arrived)


def gradients_again(compute: Callable[[Parts], Parts], inputs: Parts, grads: Parts) -> Parts:
    """The gradients of every input, recorded where autograd records.

    Args:
        compute: from the inputs what the pass gave, by operations that autograd knows.
        inputs: those of the pass.
        grads: of what it gave.
    """
    wanted = torch.is_grad_enabled()
    device = next(part.device.type for part in inputs if part is not None)
    # Autocast would multiply in 16 bits what the pass summed up in 32.
    with torch.enable_grad(), without_autocast(device):
        # A caller may make one input of another. What reaches one through the other is no gradient of this pass.
        own = tuple(None if part is None else part.view_as(part) for part in inputs)
        reached = [
            (part, grad)
            for part, grad in zip(compute(own), grads, strict=True)
            if part is not None and grad is not None and part.requires_grad
        ]
        asked = [part for part in own if part is not None and part.requires_grad]
        outputs, arrived = [part for part, _ in reached], [grad for _, grad in reached]
        found = iter(torch.autograd.grad(outputs, asked, arrived, create_graph=wanted, allow_unused=True))
    return tuple(next(found) if part is not None and part.requires_grad else None for part in own)
