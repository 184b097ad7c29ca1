"""Whether tensors are like others, and dictionaries what they were, asked in one call: what a kept call asks before it
is made again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level

from clearhead.backends.native_library import in_memory

__all__ = ["alike", "versions"]


def alike(*tensors: Tensor) -> Callable[..., bool]:
    """What tells tensors, as many, that are like these: class, dtype, device, sizes, strides, ``requires_grad``.

    What torch has for compiled functions does this in half a microsecond, with most of what is in force around the
    call: autocast, transformations, modes of dispatch but those of torch's own tracing.
    """
    check: Callable[..., bool] = _guards(*tensors).check
    return check


class _Guards:
    """The same by asking for each trait."""

    def __init__(self, *tensors: Tensor) -> None:
        self.like = self._traits(tensors)

    def check(self, *tensors: Tensor) -> bool:
        """Whether these are."""
        return self._traits(tensors) == self.like

    @staticmethod
    def _traits(tensors: Sequence[Tensor]) -> list[Hashable]:
        own: list[Hashable] = [maybe_current_level()]
        for tensor in tensors:
            own += [type(tensor), tensor.requires_grad]
            # What is not in memory has no strides to ask for.
            if in_memory(tensor):
                own += [tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_neg()]
        return own


def _torchs_guards() -> Callable[..., Any]:
    """torch's own, where it has them in the form that is known here."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        make: Callable[..., Any] = partial(cast(Any, TensorGuards), dynamic_dims_sizes=None, dynamic_dims_strides=None)
        make(torch.empty(1, device="cpu")).check(torch.empty(1, device="cpu"))
    except (ImportError, AttributeError, TypeError):
        return _Guards
    return make


_guards = _torchs_guards()


def versions(own: Sequence[dict[Any, Any]]) -> list[int] | None:
    """Numbers that are others once something was put into one of these, or taken out; None where nobody counts.

    What torch has for compiled functions, on an interpreter that counts.
    """
    return None if _version is None else [*map(_version, own)]


def _torchs_versions() -> Callable[[dict[Any, Any]], int] | None:
    """torch's own, where it is there and counts."""
    try:
        from torch._C._dynamo.guards import dict_version

        version = cast(Callable[[dict[Any, Any]], int], dict_version)
        some = {"some": 1}
        before, again = version(some), version(some)
        some["some"] = 2
        return version if before == again != version(some) else None
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return None


_version = _torchs_versions()
