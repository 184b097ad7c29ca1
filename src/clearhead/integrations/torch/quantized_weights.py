"""What quantised linear layers of torchao and torch.ao have: their integers, scales and zeros, by public attributes.

A layout is known by its attributes and their sizes, not by its class. What is read is proved by a trial against the
module's own result (``quantized``). A layout that is not known has a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.ao.nn.quantized.dynamic import Linear as DynamicLinear
from torch.nn import functional

from clearhead.ops.kinds import Rounding
from clearhead.ops.quantized_weight import QuantizedWeight

__all__ = [
    "Unknown",
    "is_quantized_by_torch",
    "is_tensor_subclass",
    "parts_of",
    "per_group",
    "read_module",
    "read_weight",
]

_PLAIN: Final = (Tensor, nn.Parameter)
#: Tensors that a layout may have beside integers, scales and zeros, each with what it means.
_FACTORS: Final = {"act_pre_scale": "the input is scaled first", "act_quant_scale": "the scale of the input is fixed"}
#: Integers of 4 bits that a floating point number represents together, and rows that are decoded at a time.
_TOGETHER, _ROWS = 4, 256


class Unknown(Exception):
    """A layout that is not known; the message says why."""


def is_tensor_subclass(weight: object) -> bool:
    """Whether a weight is a tensor of another library's class."""
    return isinstance(weight, Tensor) and type(weight) not in _PLAIN


def is_quantized_by_torch(module: nn.Module) -> bool:
    """Whether a module is a linear layer that ``torch.ao.quantization.quantize_dynamic`` made."""
    return isinstance(module, DynamicLinear)


def parts_of(weight: Any) -> list[Tensor]:
    """The tensors that a weight of torchao consists of."""
    parts = (getattr(weight, name, None) for name in ("qdata", "scale", "zero_point", "scale_and_zero"))
    return [part for part in parts if isinstance(part, Tensor)]


def read_weight(weight: Any) -> QuantizedWeight:
    """The integers of a weight of torchao.

    Raises:
        Unknown: its layout is not known.
    """
    parts = parts_of(weight)
    if weight.dim() != 2 or not parts or any(type(part) not in _PLAIN or not part.is_cpu for part in parts):
        raise Unknown(f"{type(weight).__name__} has no plain integers on the CPU")
    for name, meaning in _FACTORS.items():
        if getattr(weight, name, None) is not None:
            raise Unknown(f"{type(weight).__name__} has {name}: {meaning}")
    for layout in _LAYOUTS:
        read = layout(weight)
        if read is not None:
            return read
    sizes = ", ".join(f"{str(part.dtype)[6:]} {list(part.shape)}" for part in parts)
    raise Unknown(f"the layout of {type(weight).__name__} is not known ({sizes})")


def read_module(module: Any) -> QuantizedWeight:
    """The integers of a linear layer of ``torch.ao``, whose input is rounded with one scale for all rows.

    Raises:
        Unknown: its weight is no int8, or has zeros.
    """
    weight = module.weight()
    if weight.dtype is not torch.qint8:
        raise Unknown(f"its weight is {str(weight.dtype)[6:]}")
    if weight.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        scale, zero = torch.full((len(weight), 1), weight.q_scale()), weight.q_zero_point()
    else:
        scale, zero = weight.q_per_channel_scales()[:, None], weight.q_per_channel_zero_points().abs().max().item()
    if zero != 0:
        raise Unknown("the integers of its weight have zeros other than 0")
    return QuantizedWeight(weight.int_repr(), scale.float().contiguous(), None, Rounding.TENSOR, (0, 127))


def _of_bytes(weight: Any) -> QuantizedWeight | None:
    """An integer a byte, in the weight's own shape: torchao's ``Int8Tensor`` and ``IntxUnpackedToInt8Tensor``."""
    codes, scale = getattr(weight, "qdata", None), getattr(weight, "scale", None)
    if not isinstance(codes, Tensor) or codes.dtype is not torch.int8 or codes.shape != weight.shape or scale is None:
        return None
    scale = per_group(weight, scale)
    zero = getattr(weight, "zero_point", None)
    shift = per_group(weight, zero) if zero is not None and bool(zero.any()) else None
    rounding, bounds = _rounding(weight)
    if rounding is not Rounding.NONE:
        if shift is not None or scale.shape[1] != 1:
            raise Unknown("its input is rounded, and its weight has groups or zeros")
        return QuantizedWeight(codes, scale, None, rounding, bounds)
    if str(getattr(weight, "target_dtype", "")) == "torch.int4" and codes.shape[1] % 2 == 0:
        # As 0 to 15; half the memory to read.
        shift = (0.0 if shift is None else shift) + scale.new_full((), 8.0)
        return QuantizedWeight(_packed(codes + 8), scale, -scale * shift)
    return QuantizedWeight(codes, scale, None if shift is None else -scale * shift)


def per_group(weight: Any, values: Tensor) -> Tensor:
    """Scales or zeros as float32 ``[out, groups]``."""
    outputs, inputs = weight.shape
    block = [*getattr(weight, "block_size", ())]
    if len(block) != 2 or block[0] not in (1, outputs) or block[1] < 1 or inputs % block[1]:
        raise Unknown(f"its blocks of {block} are not rows, groups of a row, or the whole")
    groups = inputs // block[1]
    if block[0] == outputs and outputs > 1 and groups > 1:
        raise Unknown(f"its blocks of {block} are columns")
    if values.numel() not in (groups, outputs * groups):
        raise Unknown(f"it has {values.numel()} scales for {outputs * groups} groups")
    return values.detach().float().reshape(-1, groups).expand(outputs, groups).contiguous()


def _rounding(weight: Any) -> tuple[Rounding, tuple[int, int]]:
    """How torchao rounds the layer's input."""
    if getattr(weight, "activation_quantization", None) is not None:
        raise Unknown("its input is rounded, and its weight has groups")
    asked = getattr(weight, "act_quant_kwargs", None)
    if asked is None:
        return Rounding.NONE, (-128, 127)
    granularity = getattr(asked, "granularity", None)
    if type(granularity).__name__ != "PerRow" or getattr(granularity, "dim", -1) != -1:
        raise Unknown(f"its input is rounded {type(granularity).__name__}, not row by row")
    mapping = getattr(getattr(asked, "mapping_type", None), "name", "")
    if mapping not in _MAPPINGS:
        raise Unknown(f"its input is rounded {mapping or 'in an unknown way'}")
    return _MAPPINGS[mapping], (-64, 63) if getattr(asked, "reduce_range", False) else (-128, 127)


_MAPPINGS: Final = {"SYMMETRIC": Rounding.SYMMETRIC, "ASYMMETRIC": Rounding.ASYMMETRIC}


def _packed(codes: Tensor) -> Tensor:
    """Integers of 0 to 15, two a byte."""
    wide = codes.to(torch.uint8)
    return wide[:, ::2] | wide[:, 1::2] << 4


def _of_shuffled_halves(weight: Any) -> QuantizedWeight | None:
    """Two integers a byte in an order of the processor, and scale and middle of each group: ``Int4OpaqueTensor``."""
    codes, pairs = getattr(weight, "qdata", None), getattr(weight, "scale_and_zero", None)
    if not isinstance(codes, Tensor) or codes.dtype is not torch.uint8 or not isinstance(pairs, Tensor):
        return None
    outputs, inputs = weight.shape
    if getattr(weight, "act_mapping_type", None) is not None:
        raise Unknown("its input is rounded, and its weight has groups")
    if codes.shape != (outputs, inputs // 2) or pairs.dim() != 3 or pairs.shape[1:] != (outputs, 2):
        return None
    if inputs % _TOGETHER or inputs % len(pairs):
        return None
    scale, middle = pairs.detach().float().permute(2, 1, 0).contiguous()
    return QuantizedWeight(_decoded(weight, pairs), scale, middle - 8.0 * scale)


def _decoded(weight: Any, pairs: Tensor) -> Tensor:
    """The integers of a weight whose order only its own product knows, two a byte.

    With scales of 1 and middles of 8 the weight is its integers, and an input of powers of 16 gives four of them.
    """
    outputs, inputs = weight.shape
    plain = torch.ones(pairs.shape, dtype=torch.float32)
    plain[..., 1] = 8.0
    integers = type(weight)(weight.qdata, plain, weight.block_size, weight.shape)
    decoded = torch.empty(outputs, inputs // 2, dtype=torch.uint8)
    powers = 16.0 ** torch.arange(_TOGETHER)
    for first in range(0, inputs // _TOGETHER, _ROWS):
        rows = min(_ROWS, inputs // _TOGETHER - first)
        x = torch.zeros(rows, inputs)
        for row in range(rows):
            x[row, (first + row) * _TOGETHER : (first + row + 1) * _TOGETHER] = powers
        read = functional.linear(x, integers)
        codes = read.round()
        if not torch.equal(codes, read) or codes.min() < 0 or codes.max() >= 16**_TOGETHER:
            raise Unknown(f"the integers of {type(weight).__name__} cannot be read")
        both = codes.int().t()
        columns = slice(first * 2, (first + rows) * 2)
        decoded[:, columns] = torch.stack((both & 255, both >> 8), dim=-1).flatten(1).to(torch.uint8)
    return decoded


_LAYOUTS: Final[Sequence[Callable[[Any], QuantizedWeight | None]]] = (_of_bytes, _of_shuffled_halves)
