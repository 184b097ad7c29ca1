"""Tensor parallelism: a rank has some heads of each attention and some channels of each feedforward.

Parameters become DTensors on the mesh's axis. While a module runs, they are exchanged for the rank's local tensors, so
an attention with its projections is the same fused operator as in one process, on fewer heads. Its output is summed
over the ranks, and the last layer's bias is added to the sum (Shoeybi et al. 2019, "Megatron-LM", section 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from clearhead.distributed.transformers_plan import apply_plan, check_plan, has_plan
from clearhead.errors import UnsupportedError
from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.feedforward import FeedForward
from clearhead.nn.rules import RuleHolder
from clearhead.torch_private import tensors_of

__all__ = ["check_tensor_parallel", "split_over_tensor"]

#: A tensor's module, its name there, and how it is divided over the ranks.
Place = tuple[nn.Module, str, Placement]
_REPLICATE: Final = Replicate()


def check_tensor_parallel(function: str, model: nn.Module, ranks: int) -> None:
    """Raise unless every attention's heads and every feedforward's channels divide by the number of ranks.

    Raises:
        UnsupportedError: they do not, the model has neither, or an attention's score rule is no rule of the library.
    """
    units = [module for module in model.modules() if isinstance(module, MultiHeadAttention | FeedForward)]
    if not units and has_plan(model):
        check_plan(function, model, ranks)
    elif not units:
        raise UnsupportedError.about(
            function,
            "model",
            must="consist of modules of clearhead.nn, or have a tp_plan, on a mesh with 'tensor'",
            got=type(model).__name__,
            then="Use the axes 'data' and 'shard'.",
        )
    for module in units:
        sizes = _sizes(module)
        for name, size in sizes.items():
            if size % ranks:
                raise UnsupportedError.about(
                    function,
                    "mesh",
                    must=f"have an axis 'tensor' that divides {name}",
                    got=f"{ranks} for {size}",
                    then="Choose a smaller axis.",
                )
        if isinstance(module, MultiHeadAttention):
            _check_attention(function, module)


def _sizes(module: nn.Module) -> Mapping[str, int]:
    if isinstance(module, MultiHeadAttention):
        return {"num_heads": module.num_heads, "num_kv_heads": module.num_kv_heads}
    return {"feedforward_dim": module.expand.out_features} if isinstance(module, FeedForward) else {}


def _check_attention(function: str, module: MultiHeadAttention) -> None:
    if module.output_projection is None:
        raise UnsupportedError.about(
            function,
            "model",
            must="have an output projection in each attention on a mesh with 'tensor'",
            got="output_projection=False",
            then="Use the axes 'data' and 'shard'.",
        )
    for holder in module.scores:
        if isinstance(holder, RuleHolder) and holder.head_axes() is None:
            raise UnsupportedError.about(
                function,
                "model",
                must="have score rules of the library on a mesh with 'tensor'",
                got=repr(holder.rule()),
                then="Write the rule as RelativeBias or DenseBias, or drop the axis.",
            )


def split_over_tensor(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide a checked model's heads and channels over the ranks of a mesh with one axis, in place."""
    distributed: dict[int, tuple[Tensor, Tensor]] = {}
    inner = apply_plan(model, mesh) if has_plan(model) else set()
    for module in [*model.modules()]:
        if isinstance(module, MultiHeadAttention | FeedForward):
            places = [*(_of_attention(module) if isinstance(module, MultiHeadAttention) else _of_feedforward(module))]
            inner |= {*module.modules()}
            last = module.output_projection if isinstance(module, MultiHeadAttention) else module.contract
            _distribute(places, mesh, distributed)
            _narrow(module, mesh.size())
            _Split(module, places, mesh.get_group(), last).attach()
    for module in [*model.modules()]:
        parameters = tensors_of(module)[0]
        places = [(module, name, _REPLICATE) for name, each in parameters.items() if each is not None]
        if places and module not in inner:
            _distribute(places, mesh, distributed)
            _Local(module, places).attach()


def _of_attention(module: MultiHeadAttention) -> Iterator[Place]:
    for layer in (module.query_projection, module.key_projection, module.value_projection):
        yield from _of_linear(layer, 0)
    assert module.output_projection is not None
    yield from _of_linear(module.output_projection, 1)
    for holder in module.scores:
        assert isinstance(holder, RuleHolder)
        axes = holder.head_axes() or {}
        for table in tensors_of(holder):
            for name, tensor in table.items():
                if tensor is not None:
                    yield holder, name, Shard(axes[name]) if name in axes else _REPLICATE


def _of_feedforward(module: FeedForward) -> Iterator[Place]:
    for layer in (module.gate, module.expand):
        if layer is not None:
            yield from _of_linear(layer, 0)
    yield from _of_linear(module.contract, 1)


def _of_linear(layer: nn.Linear, axis: int) -> Iterator[Place]:
    """The weight divided along an axis; a bias along its outputs, or whole where the inputs are divided."""
    yield layer, "weight", Shard(axis)
    if layer.bias is not None:
        yield layer, "bias", Shard(0) if axis == 0 else _REPLICATE


def _distribute(places: Sequence[Place], mesh: DeviceMesh, distributed: dict[int, tuple[Tensor, Tensor]]) -> None:
    """Put DTensors in the tensors' places; a tensor in several places remains one.

    ``distributed`` has each tensor, kept alive so that its id is not used again, and its successor.
    """
    for module, name, placement in places:
        table = next(table for table in tensors_of(module) if name in table)
        tensor = table[name]
        if id(tensor) not in distributed:
            whole = distribute_tensor(tensor.detach(), mesh, [placement], src_data_rank=None)
            part = nn.Parameter(whole, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else whole
            distributed[id(tensor)] = tensor, part
        table[name] = distributed[id(tensor)][1]


def _narrow(module: nn.Module, ranks: int) -> None:
    """Let an attention count the rank's heads."""
    if isinstance(module, MultiHeadAttention):
        module.num_heads //= ranks
        module.num_kv_heads //= ranks
        for holder in module.scores:
            assert isinstance(holder, RuleHolder)
            holder.divide_heads(ranks)


class _Local:
    """Hooks of a module that exchange its DTensors for local tensors while it runs."""

    def __init__(self, module: nn.Module, places: Sequence[Place]) -> None:
        self._module, self._places = module, places
        self._exchanged: list[list[tuple[dict[str, Any], str, DTensor]]] = []

    def attach(self) -> None:
        self._module.register_forward_pre_hook(self._before, with_kwargs=True)
        # Also where forward raises.
        self._module.register_forward_hook(self._after, always_call=True)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        exchanged = []
        for owner, name, placement in self._places:
            table = next(table for table in tensors_of(owner) if name in table)
            tensor = table[name]
            if isinstance(tensor, DTensor):
                exchanged.append((table, name, tensor))
                table[name] = self._local(owner, name, tensor.to_local(), placement)
        self._exchanged.append(exchanged)
        return args, kwargs

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        for table, name, tensor in self._exchanged.pop():
            table[name] = tensor
        return output

    def _local(self, owner: nn.Module, name: str, tensor: Tensor, placement: Placement) -> Tensor | None:
        return tensor


class _Split(_Local):
    """Hooks of an attention or feedforward that runs on a rank's heads or channels.

    Args:
        module: the attention or feedforward.
        places: its tensors.
        group: the ranks that have the other parts.
        last: the layer whose outputs are summed over the ranks.
    """

    def __init__(self, module: nn.Module, places: Sequence[Place], group: ProcessGroup, last: nn.Module | None) -> None:
        super().__init__(module, places)
        self._group, self._last = group, last
        self._biases: list[Tensor | None] = []

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._biases.append(None)
        args, kwargs = super()._before(module, args, kwargs)
        # The same tensor as query and key stays one: self-attention is recognised by that.
        shared: dict[int, Tensor] = {}

        def enter(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_nested:
                raise UnsupportedError.about(
                    type(module).__name__,
                    "tokens",
                    must="be padded or packed on a mesh with 'tensor'",
                    got="a jagged tensor",
                    then="Use clearhead.packing.pack, or pass it to a whole block or model.",
                )
            if isinstance(value, Tensor) and value.is_floating_point():
                return shared.setdefault(id(value), _enter(value, self._group))
            return value

        return tuple(map(enter, args)), {name: enter(value) for name, value in kwargs.items()}

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        super()._after(module, args, output)
        bias = self._biases.pop()
        if not isinstance(output, Tensor):
            return output
        summed: Tensor = _Sum.apply(output, self._group)  # type: ignore[no-untyped-call]
        return summed if bias is None else summed + bias

    def _local(self, owner: nn.Module, name: str, tensor: Tensor, placement: Placement) -> Tensor | None:
        if owner is self._last and name == "bias":
            self._biases[-1] = tensor
            return None
        # Each rank has the gradient from its own heads.
        return tensor if isinstance(placement, Shard) else _enter(tensor, self._group)


def _enter(x: Tensor, group: ProcessGroup) -> Tensor:
    entered: Tensor = _Entered.apply(x, group)  # type: ignore[no-untyped-call]
    return entered


class _Entered(torch.autograd.Function):
    """The identity, whose gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    """The sum over the ranks, each of which reads the whole sum's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _summed(x: Tensor, group: ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
