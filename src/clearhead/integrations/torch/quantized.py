"""Quantised linear layers of torchao and torch.ao on clearhead's kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.ao.nn.quantized.dynamic import Linear as DynamicLinear
from torch.nn import functional

from clearhead.choices import is_invariant, refuse_if_invariant
from clearhead.integrations.recast import class_of, original_of, recast, stands_for
from clearhead.integrations.report import BEFORE, OUTSIDE, SwapRow
from clearhead.integrations.torch.parts import is_plain
from clearhead.integrations.torch.quantized_weights import (
    Unknown,
    is_quantized_by_torch,
    is_tensor_subclass,
    parts_of,
    read_module,
    read_weight,
)
from clearhead.invariance import eager_if_invariant
from clearhead.nn.linear import Linear, reads_layers
from clearhead.nn.weight_packing import MOST_BYTES
from clearhead.ops.kinds import DTYPES, Rounding
from clearhead.ops.library import library
from clearhead.ops.quantized_weight import QuantizedWeight
from clearhead.projection import Layer
from clearhead.projection.stored import project_stored
from clearhead.torch_private import packed_weight_of, version_of

__all__ = [
    "SwappedQuantizedLinear",
    "described",
    "has_unfused",
    "is_quantized",
    "pack_quantized",
    "quantized_layer",
    "quantized_weight",
    "restored_quantized",
    "swap_quantized",
    "unpack_quantized",
]

#: Largest relative differences from the module's own result: of rounded inputs, of a weight alone in float32, and in
#: dtypes of 16 bits, where torchao rounds several times.
_ROUNDED, _FLOAT32, _SHORT = 1e-3, 1e-5, 1e-2
_TRIAL_ROWS: Final = (1, 5)


@dataclass(frozen=True, eq=False)
class _Reading:
    """A module's integers, and the objects and versions that they were read from."""

    sources: tuple[object, ...]
    versions: tuple[int, ...]
    weight: QuantizedWeight

    def is_current(self, sources: tuple[object, ...], versions: tuple[int, ...]) -> bool:
        """Whether another reading would give the same."""
        same = len(sources) == len(self.sources) and all(map(_is, sources, self.sources))
        return same and versions == self.versions


def _is(one: object, other: object) -> bool:
    return one is other


_READINGS: Final[WeakKeyDictionary[nn.Module, _Reading]] = WeakKeyDictionary()
#: Layers whose integers are read with panels.
_PACKED: Final[WeakSet[nn.Module]] = WeakSet()


def quantized_weight(module: Any) -> QuantizedWeight:
    """The integers of a quantised linear layer, read again where they changed.

    Raises:
        Unknown: their layout is not known.
    """
    is_dynamic = is_quantized_by_torch(module)
    parts = [] if is_dynamic else parts_of(module.weight)
    sources = (packed_weight_of(module),) if is_dynamic else (module.weight, *parts)
    versions = tuple(map(version_of, parts))
    reading = _READINGS.get(module)
    if reading is None or any(part is None for part in sources) or not reading.is_current(sources, versions):
        weight = read_module(module) if is_dynamic else read_weight(module.weight)
        _READINGS[module] = reading = _Reading(sources, versions, _with_panels(weight) if module in _PACKED else weight)
    return reading.weight


def _with_panels(weight: QuantizedWeight) -> QuantizedWeight:
    packed = weight.packed()
    return weight if packed.panels is None or packed.panels.numel() > MOST_BYTES * weight.numel() else packed


def pack_quantized(modules: Iterable[nn.Module]) -> None:
    """Store a copy of the integers of swapped layers in the kernels' panels, where inputs are rounded."""
    for module in modules:
        if isinstance(module, _SWAPPED):
            _PACKED.add(module)
            _READINGS.pop(module, None)


def unpack_quantized(modules: Iterable[nn.Module]) -> None:
    """Drop the copies of ``pack_quantized``."""
    for module in modules:
        if module in _PACKED:
            _PACKED.discard(module)
            _READINGS.pop(module, None)


def quantized_layer(module: nn.Linear) -> Layer | None:
    """The integers and the bias of a layer of torchao that ``swap`` took; None where they cannot be read any more.

    A layer of ``torch.ao`` is no part of a fused one: its input has one scale for all rows of a call, padding among
    them.
    """
    try:
        return quantized_weight(module), module.bias
    except Unknown:
        return None


def has_unfused(module: nn.Module) -> bool:
    """Whether a quantised linear layer within a module is no part of a fused one."""
    return any(is_quantized(part) and type(part) not in _OF_TORCHAO.values() for part in module.modules())


@stands_for(nn.Linear)
class SwappedQuantizedLinear(nn.Linear):
    """``nn.Linear`` whose weight torchao quantised, on clearhead's kernels."""

    @eager_if_invariant
    def forward(self, input: Tensor) -> Tensor:
        """``input @ weight^T + bias``; by torchao's code where the kernels cannot read the call."""
        output = _computed(self, input, self.bias) if is_tensor_subclass(self.weight) else None
        return functional.linear(input, self.weight, self.bias) if output is None else output


@stands_for(Linear)
class SwappedQuantizedOwnLinear(Linear):
    """``ch.nn.Linear`` whose weight torchao quantised, on the kernels for integers."""

    forward = SwappedQuantizedLinear.forward


#: What takes the place of a class of linear layers whose weight is torchao's.
_OF_TORCHAO: Final[dict[type[nn.Module], type[nn.Linear]]] = {
    nn.Linear: SwappedQuantizedLinear,
    Linear: SwappedQuantizedOwnLinear,
}
for _kind in _OF_TORCHAO.values():
    reads_layers(_kind, quantized_layer)


@stands_for(DynamicLinear)
class SwappedDynamicLinear(DynamicLinear):
    """``torch.ao.nn.quantized.dynamic.Linear`` on clearhead's kernels."""

    @eager_if_invariant
    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight^T + bias``; by torch's code where the kernels cannot read the call."""
        output = _computed(self, x, None)
        return super().forward(x) if output is None else output  # type: ignore[no-untyped-call]


_SWAPPED: Final[tuple[type[nn.Module], ...]] = (*_OF_TORCHAO.values(), SwappedDynamicLinear)


def _computed(module: Any, x: Tensor, bias: Tensor | None) -> Tensor | None:
    """The layer's output; None if its own code is to compute it."""
    compiles = torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu")
    dtypes_fit = x.dtype in DTYPES and (bias is None or bias.dtype is x.dtype)
    if compiles or not dtypes_fit or not x.is_cpu or not is_plain(x) or x.dim() == 0:
        _refuse(f"{type(x).__name__} of {str(x.dtype)[6:]} on {x.device}, or a compiled or autocast call")
        return None
    try:
        weight = quantized_weight(module)
    except Unknown as unknown:
        _refuse(str(unknown))
        return None
    if weight.rounding is Rounding.TENSOR:
        if is_invariant():
            _refuse(_ONE_SCALE)
        bias = None if module.bias() is None else module.bias().detach()
    if x.shape[-1] != weight.shape[1]:
        return None
    return project_stored(x, weight, bias)


_ONE_SCALE: Final = "its input has one scale for all rows of a call"


def _refuse(why: str) -> None:
    """The layer's own code computes the call; with one order of sums it may not."""
    then = "Call ch.set_invariant(False), or ch.unswap(model)."
    refuse_if_invariant("linear_quantized", "the layer", got=why, then=then)


# ---- swap ------------------------------------------------------------------------------------------------------------


def swap_quantized(model: nn.Module) -> list[SwapRow]:
    """Let the quantised linear layers of a model compute on the kernels, where a trial agrees.

    Returns:
        A row for each: what it is, or why its own code computes it.
    """
    trials: dict[object, float | str] = {}
    return [_swapped(name, module, trials) for name, module in model.named_modules() if is_quantized(module)]


def restored_quantized(name: str, module: nn.Module) -> SwapRow | None:
    """The row of a quantised linear layer that ``unswap`` restores; None for another module."""
    return SwapRow(name, nn.Linear.__name__) if class_of(module) in _OF_TORCHAO.values() else None


def is_quantized(module: nn.Module) -> bool:
    """Whether a module is a linear layer whose weight another library quantised, swapped or not."""
    if is_quantized_by_torch(module):
        return True
    kind = original_of(class_of(module)) or class_of(module)
    return kind in _OF_TORCHAO and is_tensor_subclass(module.weight)


def _replacement(module: nn.Module) -> type[nn.Module]:
    kind = original_of(class_of(module)) or class_of(module)
    return SwappedDynamicLinear if is_quantized_by_torch(module) else _OF_TORCHAO[kind]


def _swapped(name: str, module: nn.Module, trials: dict[object, float | str]) -> SwapRow:
    kind, ours = original_of(class_of(module)) or class_of(module), _replacement(module)
    if class_of(module) is ours:
        return SwapRow(name, kind.__name__, "native", None, BEFORE)
    if "forward" in vars(module) or library() is None:
        why = "its forward was replaced on the object" if library() is not None else "the CPU kernels are not installed"
        return SwapRow(name, kind.__name__, "left", None, why)
    try:
        weight = quantized_weight(module)
        if weight.rounding is Rounding.TENSOR and is_invariant():
            raise Unknown(f"{OUTSIDE}; {_ONE_SCALE}")
        result = _tried(module, weight, trials)
    except Unknown as unknown:
        return SwapRow(name, kind.__name__, "left", None, str(unknown))
    if isinstance(result, str):
        return SwapRow(name, kind.__name__, "left", None, result)
    if result > _budget(weight, _dtype_of(module)):
        return SwapRow(name, kind.__name__, "left", result, f"{described(weight)}, differs by {result:.1e} in a trial")
    recast(module, ours)
    return SwapRow(name, kind.__name__, "native", result, described(weight))


def described(weight: QuantizedWeight) -> str:
    """What a weight is, in words."""
    if weight.rounding is not Rounding.NONE:
        return f"int{weight.bits} weight and dynamic activation"
    groups = "" if weight.scale.shape[1] == 1 else f" in groups of {weight.group}"
    return f"int{weight.bits} weight-only{groups}"


def _dtype_of(module: Any) -> torch.dtype:
    return torch.float32 if is_quantized_by_torch(module) else module.weight.dtype


def _budget(weight: QuantizedWeight, dtype: torch.dtype) -> float:
    if dtype is not torch.float32:
        return _SHORT
    return _FLOAT32 if weight.rounding is Rounding.NONE else _ROUNDED


def _tried(module: Any, weight: QuantizedWeight, trials: dict[object, float | str]) -> float | str:
    """The relative difference of the module's own result, once for each kind and size of layer."""
    kind = (class_of(module), _dtype_of(module), weight.shape, weight.offset is None)
    key = (*kind, described(weight), weight.rounding, weight.bounds)
    if key not in trials:
        try:
            trials[key] = max(_differences(module, weight))
        except (RuntimeError, NotImplementedError, AttributeError, TypeError, AssertionError, ImportError) as error:
            lines = str(error).splitlines() or [""]
            trials[key] = f"its own code raises {type(error).__name__}: {lines[0][:80]}"
    return trials[key]


def _differences(module: Any, weight: QuantizedWeight) -> Iterator[float]:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for rows in _TRIAL_ROWS:
            x = torch.randn(rows, weight.shape[1], generator=generator).to(_dtype_of(module))
            if is_quantized_by_torch(module):
                theirs, bias = class_of(module).forward(module, x), module.bias()
            else:
                theirs, bias = functional.linear(x, module.weight, module.bias), module.bias
            ours = project_stored(x, weight, bias)
            size = theirs.double().norm().item()
            yield ((ours.double() - theirs.double()).norm().item() / size) if size else float(ours.count_nonzero())
