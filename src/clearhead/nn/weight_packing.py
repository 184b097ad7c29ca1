"""Linear layers whose weights are in the kernels' panels alone, and their way back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import torch
from torch import nn

from clearhead.ops.library import library
from clearhead.ops.packed_weight import PackedParameter, PackedWeight
from clearhead.projection import DTYPES
from clearhead.torch_private import parameters_of

__all__ = ["MOST_BYTES", "WeightOf", "linear_weights", "pack_weights", "unpack_weights"]

#: Bytes of the panels, for each byte of the weight, up to which a weight is packed. Narrow weights are padded, and
#: instruction sets without dot products of 16 bits widen these.
MOST_BYTES: Final = 1.25


class WeightOf(NamedTuple):
    """A weight that fused operators read.

    Attributes:
        module: the module that has it.
        name: its name there.
        transposed: whether it is ``[in, out]``.
        parts: equal parts of its outputs that operators read by themselves.
    """

    module: nn.Module
    name: str = "weight"
    transposed: bool = False
    parts: int = 1


def linear_weights(stack: nn.Module) -> Iterator[WeightOf]:
    """The weights of the linear layers, and of torch's attentions, in a stack of layers."""
    for module in stack.modules():
        if isinstance(module, nn.Linear):
            yield WeightOf(module)
        elif isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            yield WeightOf(module, "in_proj_weight", parts=3)


def pack_weights(model: nn.Module, weights: Iterable[WeightOf]) -> None:
    """Replace parameters of a model, in place, by such in panels; a weight that other modules read too stays."""
    use_of = {(id(each.module), each.name): each for each in weights}
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in parameters_of(module).items():
            owners.setdefault(id(parameter), []).append((module, name))
    for places in owners.values():
        uses = [use_of.get((id(module), name)) for module, name in places]
        (module, name), first = places[0], uses[0]
        if first is None or None in uses or len({each[2:] for each in uses if each is not None}) > 1:
            continue
        packed = _packed(parameters_of(module)[name], first)
        for module, name in places if packed is not None else ():
            parameters_of(module)[name] = packed


def unpack_weights(modules: Iterable[nn.Module]) -> None:
    """Give modules back the parameters that ``pack_weights`` replaced, with their elements as they are now."""
    restored: dict[int, nn.Parameter] = {}
    for module in modules:
        table = parameters_of(module)
        for name, parameter in [*table.items()]:
            if isinstance(parameter, PackedParameter):
                if id(parameter) not in restored:
                    restored[id(parameter)] = parameter.restored()
                table[name] = restored[id(parameter)]


def _packed(parameter: nn.Parameter | None, use: WeightOf) -> PackedParameter | None:
    """A parameter in panels, where these are about as large."""
    if library() is None or type(parameter) is not nn.Parameter or parameter.layout is not torch.strided:
        return None
    if parameter.dtype not in DTYPES or not parameter.is_cpu or parameter.dim() != 2 or not parameter.is_contiguous():
        return None
    packed = PackedWeight.of(parameter.t() if use.transposed else parameter)
    begins = packed.shape[0] % use.parts == 0 and packed.shape[0] // use.parts % packed.columns == 0
    if packed.panels.numel() > MOST_BYTES * parameter.nbytes or (use.parts > 1 and not begins):
        return None
    return PackedParameter.in_place_of(parameter, packed, use.transposed)
