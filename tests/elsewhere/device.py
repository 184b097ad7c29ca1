"""A device simulated in Python: its tensors report the device "elsewhere", store their numbers on the CPU, and do not
mix with CPU tensors.

Like a GPU it refuses an operation on a device tensor and a CPU tensor of more than one number, so a tensor that the
library creates on the wrong device is detected without a GPU. The numbers are the CPU's; GPU kernels are not tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "elsewhere"
_ATEN = torch.ops.aten
#: Operations that copy between devices.
_MOVES = {_ATEN._to_copy.default, _ATEN.copy_.default}
#: Operations that also accept CPU indices, as on a GPU.
_INDEXES = {_ATEN.index.Tensor, _ATEN.index_put_.default, _ATEN.index_put.default, _ATEN._index_put_impl_.default}


class Far(Tensor):
    """A tensor of the device."""

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: Tensor) -> Far:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=torch.device(NAME, 0),
        )

    def __init__(self, raw: Tensor) -> None:
        self.raw = raw

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Far({self.raw})"

    def tolist(self) -> Any:
        """Behave like a plain tensor; torch refuses this to other subclasses."""
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


class Elsewhere(TorchDispatchMode):
    """Within this mode, ``device="elsewhere"`` creates tensors of the device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


def register() -> None:
    """Register the device with torch, once and for the whole process."""
    _setup_privateuseone_for_python_backend(NAME)
    # The autograd engine creates and moves tensors outside the mode.
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    globals()["_kept"] = library


def _empty_strided(size: Sequence[int], stride: Sequence[int], dtype: Any = None, **others: Any) -> Far:
    return Far(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _near(target).copy_(_near(source))
    return target


def _near(one: Any) -> Any:
    return one.raw if isinstance(one, Far) else one


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    far = [tensor for tensor in tensors if isinstance(tensor, Far)]
    near = [tensor for tensor in tensors if not isinstance(tensor, Far)]
    if far and function not in _MOVES | _INDEXES and any(tensor.dim() > 0 for tensor in near):
        shapes = [(tensor.device.type, tuple(tensor.shape)) for tensor in tensors]
        raise RuntimeError(f"{function}: all tensors must be on one device; got {shapes}")
    there = bool(far)
    if kwargs.get("device") is not None:
        there = torch.device(kwargs["device"]).type == NAME
        kwargs = {**kwargs, "device": "cpu" if there else kwargs["device"]}
    result = function(*tree_map(_near, args), **tree_map(_near, kwargs))
    if function is _ATEN.copy_.default:
        return args[0]
    if not there:
        return result
    result = tree_map(lambda one: Far(one) if isinstance(one, Tensor) and not isinstance(one, Far) else one, result)
    return return_and_correct_aliasing(function, args, kwargs, result)
