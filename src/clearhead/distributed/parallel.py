"""``parallelize``: a model on the ranks of a device mesh."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from clearhead.arguments import flag, one_of, repr_of
from clearhead.distributed.layout import LayoutName, check_layout
from clearhead.distributed.mesh import MeshAxes, agreed
from clearhead.distributed.rank_part import RankPart, SequenceShard, check_sequence_parallel
from clearhead.distributed.sharded_attention import METHODS, Method
from clearhead.distributed.tensor_parallel import check_tensor_parallel, split_over_tensor
from clearhead.errors import UnsupportedError
from clearhead.nn import Decoder, Encoder, FeedForward, MultiHeadAttention, SequenceClassifier
from clearhead.nn.blocks import Block
from clearhead.nn.dropout import Dropout

__all__ = ["parallelize"]

_NAME: Final = "parallelize"
#: Methods of the library's models, besides ``forward``, that read parameters of the whole model.
_METHODS: Final = ("generate", "encode", "decode")

_Model = TypeVar("_Model", bound=nn.Module)


def parallelize(
    model: _Model,
    mesh: DeviceMesh,
    *,
    layout: LayoutName = "contiguous",
    method: Method = "auto",
    reshard_after_forward: bool = True,
    equal_batches: bool = True,
) -> _Model:
    """Run a model on all ranks of a device mesh, in place.

    Args:
        model: any module, on every rank the same; its parameters and buffers become those of rank 0.
        mesh: of all ranks, with axes named ``data``, ``shard``, ``tensor`` or ``context``, in any order. The batch is
            divided over ``data`` and ``shard``; along ``shard`` (FSDP2) a rank has a part of each parameter.
        layout: which tokens a rank has along ``context``: ``"contiguous"``, or ``"zigzag"``, which balances causal
            masks.
        method: of attention along ``context``, as ``ch.distributed.attention`` takes it.
        reshard_after_forward: whether a block's gathered parameters are freed between forward and backward.
        equal_batches: whether ranks have equal parts of each batch, in their order, so that dropout drops what one
            process would drop; otherwise a ``clearhead.batch_part`` around forward and backward says which sequences
            a rank has.

    Returns:
        The model itself. Its parameters are DTensors: build the optimizer afterwards. Gradients are those of the mean
        of the losses of all ranks.

    Raises:
        UnsupportedError: the mesh has an unknown axis or lacks ranks, or ranks differ; on every rank.

    Cost: parameters are sent once from rank 0. Along ``shard`` each step gathers parameters twice and scatters
    gradients; along ``data`` each step sums gradients.
    """

    def check() -> tuple[MeshAxes, Any]:
        if not isinstance(model, nn.Module):
            then = "Pass a model of clearhead.nn, of torch or of transformers."
            raise UnsupportedError.about(_NAME, "model", must="be a module", got=repr_of(model), then=then)
        if any(isinstance(tensor, DTensor) for _, tensor in _tensors(model)):
            raise UnsupportedError.about(
                _NAME, "model", must="be whole on every rank", got="DTensors", then="Parallelize a new model."
            )
        check_layout(_NAME, layout)
        one_of(_NAME, "method", method, METHODS, "'auto' chooses.")
        flag(_NAME, "reshard_after_forward", reshard_after_forward)
        flag(_NAME, "equal_batches", equal_batches)
        axes = MeshAxes.of(_NAME, mesh)
        if axes.sizes["tensor"] > 1:
            check_tensor_parallel(_NAME, model, axes.sizes["tensor"])
        if axes.sizes["context"] > 1:
            check_sequence_parallel(_NAME, model)
        return axes, (dict(axes.sizes), layout, method, reshard_after_forward, _description(model))

    axes = agreed(_NAME, check)
    _send_from_first_rank(model)
    if axes.sizes["tensor"] > 1:
        split_over_tensor(model, axes.working["tensor"])
    _assign_part(model, axes, axes.batch_part if equal_batches else None, layout, method)
    if axes.copies > 1:
        _shard(model, axes, reshard_after_forward)
    return model


def _description(model: nn.Module) -> list[tuple[str, tuple[int, ...], str]]:
    """Names, shapes and dtypes, which must be equal on all ranks."""
    return [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in _tensors(model)]


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


@torch.no_grad()
def _send_from_first_rank(model: nn.Module) -> None:
    """Parameters and buffers of rank 0 on every rank."""
    for _, tensor in _tensors(model):
        data = tensor.detach()
        dist.broadcast(data, 0)


def _assign_part(
    model: nn.Module, axes: MeshAxes, batch: tuple[int, int] | None, layout: LayoutName, method: Method
) -> None:
    """Tell the library's modules which part of their work is this rank's."""
    group = axes.group("context")
    sequence = None if group is None else SequenceShard(group, layout, method)
    part = RankPart(batch, (axes.index("tensor"), axes.sizes["tensor"]), sequence)
    if (1 if batch is None else batch[1]) * part.heads[1] == 1 and sequence is None:
        return
    pooled = replace(part, sequence=None)
    for module in model.modules():
        if isinstance(module, MultiHeadAttention | Encoder | Decoder | SequenceClassifier):
            module.part = part
        if isinstance(module, Dropout):
            module.placed = part.tokens
    for module in model.modules():
        if isinstance(module, FeedForward):
            module.dropout.placed = part.channels
        if isinstance(module, SequenceClassifier):
            module.dropout.placed = pooled.tokens


def _shard(model: nn.Module, axes: MeshAxes, reshard_after_forward: bool) -> None:
    """FSDP2 of each block, and of what remains of the model."""
    mesh = axes.working["replicate", "shard"]
    for blocks in _grouped(model, _blocks(model)):
        fully_shard(blocks, mesh=mesh, reshard_after_forward=reshard_after_forward)
    # What the whole model has stays gathered until backward, as methods that forward calls read it too.
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for name in _METHODS:
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The model's layers: ours, or in other libraries' models the elements of module lists."""
    blocks: list[nn.Module] = [module for module in model.modules() if isinstance(module, Block)]
    return blocks or list(_listed(model))


def _grouped(model: nn.Module, blocks: list[nn.Module]) -> list[list[nn.Module]]:
    """The blocks, those together that share parameters: FSDP2 gathers a parameter for one group of modules.

    A group that shares parameters with the rest of the model is left to that.
    """
    inside = {id(part) for block in blocks for part in block.modules()}
    others = [module for module in model.modules() if id(module) not in inside]
    outside = {id(each) for module in others for each in module.parameters(recurse=False)}
    groups: list[tuple[set[int], list[nn.Module]]] = []
    for block in blocks:
        used, together = {id(parameter) for parameter in block.parameters()}, [block]
        for group in [group for group in groups if group[0] & used]:
            groups.remove(group)
            used, together = group[0] | used, [*group[1], *together]
        groups.append((used, together))
    return [together for used, together in groups if not used & outside]


def _listed(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if not isinstance(child, nn.ModuleList):
            yield from _listed(child)
            continue
        for element in child:
            # A container without a forward of its own cannot gather parameters for it.
            if isinstance(element, nn.ModuleList | nn.ModuleDict):
                yield from _listed(element)
            elif any(parameter.requires_grad for parameter in element.parameters()):
                yield element
