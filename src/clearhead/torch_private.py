"""Every private name of torch that clearhead uses, with its reason and what happens where torch lacks it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["differentiates_forward", "is_batched_gradient", "transforms"]


def transforms() -> bool:
    """Whether a transform of ``torch.func`` is active: ``autograd.Function`` without a rule for it would raise.

    Without the name the answer is no, and such a call raises what torch raises.
    """
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return active is not None and bool(active())


def differentiates_forward() -> bool:
    """Whether forward-mode differentiation is active: kernels have no rule for tangents.

    Without the name the answer is no, and such a call raises what torch raises.
    """
    return int(getattr(forward_ad, "_current_level", -1)) >= 0


def is_batched_gradient(grad: Tensor) -> bool:
    """Whether it is many gradients in one, as ``is_grads_batched=True`` and vectorized Jacobians pass them.

    Without the name the answer is no, and the kernels' operators refuse such a tensor.
    """
    check = getattr(torch._C._functorch, "is_legacy_batchedtensor", None)
    return check is not None and bool(check(grad))
