"""The order in which a step's gradients are added under ``set_invariant(True)``: that of the sequences in the batch.

Layers add the gradients of a micro-batch's sequences in the order of a binary tree. A micro-batch that is a node of the
tree over the whole batch has that node's sum, so micro-batches and ranks compute their sequences node by node, and
``GradientSum`` adds the nodes in the order of the tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Final, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clearhead.arguments import whole
from clearhead.batch_part import BatchPart, batch_part
from clearhead.choices import is_invariant
from clearhead.distributed.layout import chunks_of
from clearhead.errors import UnsupportedError
from clearhead.projection.autocast import noted_casts
from clearhead.sequence_sums import TreeSum, tree_nodes
from clearhead.train.options import ParallelOptions

__all__ = ["GradientSum", "check_order"]


class GradientSum:
    """The gradients of a step, added in the order of its sequences, in any micro-batches and on any ranks.

    ``grad = ((g_0 + g_1) + (g_2 + g_3)) + ...``: a binary tree over the sequences' index, where ``g_i`` is the gradient
    of sequence ``i``. Under ``ch.set_invariant(True)`` layers add the sequences of one call so. This adds the calls of
    a batch: those of a process that computes it in parts, and those of data parallel ranks. The gradients, and the
    elements that dropout drops, are then those of the whole batch in one call, bit by bit. A micro-batch of 3 sequences
    from place 3 on is computed as the nodes ``[3]`` and ``[4, 5]`` of the tree.

    Torch adds the sequences of a call in an order of its own. A model that has parameters outside of modules of
    ``ch.nn``, as every swapped one, is therefore computed one sequence at a time.

    A parameter of several modules, such as a tied embedding, has a gradient for each. Inside the context those modules
    but the first have another parameter on the same memory, so that each gradient is added in a tree of its own.

    Args:
        model: the model, without gradients. On several ranks every rank has the whole model.
        sequences: number of sequences of the whole batch, at least 1.
        parts: number of micro-batches of each rank.
        rank: the place of this process among the ranks of the default process group.
        ranks: number of ranks that share the batch, all of the default process group.

    Attributes:
        nodes: the sequences of each call of this rank, in the order in which it must add them; empty for a rank without
            sequences.

    Raises:
        ShapeError: a number is out of range.
        UnsupportedError: ``ranks`` is not the number of processes.

    Cost: at most ``2 * log2(sequences)`` copies of the gradients; on several ranks one exchange of each node's
    gradients, as large as an all-reduce.

    >>> import torch, clearhead as ch
    >>> model, x = ch.nn.FeedForward(8, dropout=0.1), torch.randn(6, 5, 8)
    >>> with ch.invariant():
    ...     total = GradientSum(model, len(x), parts=2)
    ...     with total:
    ...         for rows in total.nodes:
    ...             with total.node(rows):
    ...                 model(x[rows.start : rows.stop]).sum().backward()
    ...     total.store()
    >>> total.nodes
    [range(0, 2), range(2, 3), range(3, 4), range(4, 6)]
    """

    def __init__(self, model: nn.Module, sequences: int, *, parts: int = 1, rank: int = 0, ranks: int = 1) -> None:
        name = "GradientSum"
        self._sequences = whole(name, "sequences", sequences, low=1)
        count = whole(name, "parts", parts, low=1)
        self._nodes = _nodes_of_ranks(self._sequences, whole(name, "ranks", ranks, low=1), count)
        if is_invariant() and not _keeps_order(model):
            self._nodes = [[range(at, at + 1) for rows in nodes for at in rows] for nodes in self._nodes]
        self.nodes = self._nodes[whole(name, "rank", rank, low=0, high=ranks - 1)]
        processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if ranks not in (1, processes):
            must, then = f"be 1 or the {processes} of the default process group", "Call init_process_group first."
            raise UnsupportedError.about(name, "ranks", must=must, got=ranks, then=then)
        self._parameters = list(model.parameters())
        self._aliases: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        owned: set[int] = set()
        for module in model.modules():
            for of_module, parameter in module.named_parameters(recurse=False):
                if id(parameter) in owned:
                    alias = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
                    self._aliases.append((module, of_module, parameter, alias))
                owned.add(id(parameter))
        self._tree = TreeSum()
        self._stack = ExitStack()
        self._casts: dict[int, torch.dtype] = {}
        self._random = torch.empty(0)

    def __enter__(self) -> Self:
        self._casts = self._stack.enter_context(noted_casts())
        self._random = torch.get_rng_state()
        for module, name, _, alias in self._aliases:
            setattr(module, name, alias)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        for module, name, parameter, _ in self._aliases:
            setattr(module, name, parameter)

    @contextmanager
    def node(self, sequences: range) -> Iterator[None]:
        """A ``with`` block for the forward and backward pass of a node's sequences.

        Torch's generator begins as it was at the start of the context, so that dropout draws what it draws for the
        whole batch.

        Args:
            sequences: one of ``nodes``.
        """
        torch.set_rng_state(self._random)
        part = BatchPart(sequences.start, len(sequences), self._sequences, packed=False, tokens_before=0, tokens=0)
        with batch_part(part):
            yield
        self.add(sequences)

    def add(self, sequences: range) -> None:
        """Add the gradients that the passes of a node's sequences left in the parameters.

        Args:
            sequences: one of ``nodes``.
        """
        parameters = self._all()
        self._tree.add([self._rounded(parameter) for parameter in parameters], sequences)
        for parameter in parameters:
            parameter.grad = None

    def store(self) -> None:
        """Give each parameter its sum; on several ranks every rank calls it, and has the same sums afterwards."""
        if len(self._nodes) > 1:
            sums = _sum_over_ranks(self._tree, self._all(), [_largest(nodes) for nodes in self._nodes])
        else:
            sums = self._tree.result()
        for parameter, grad in zip(self._parameters, sums, strict=False):
            parameter.grad = None if grad is None else grad.to(parameter.dtype)
        for (_, _, parameter, _), grad in zip(self._aliases, sums[len(self._parameters) :], strict=True):
            if grad is not None:
                use = grad.to(parameter.dtype)
                parameter.grad = use if parameter.grad is None else parameter.grad + use

    def _all(self) -> list[nn.Parameter]:
        return [*self._parameters, *(alias for *_, alias in self._aliases)]

    def _rounded(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient in the dtype to which autocast rounded it, in which layers round their nodes too."""
        dtype = self._casts.get(id(parameter))
        return parameter.grad if dtype is None or parameter.grad is None else parameter.grad.to(dtype)


def _keeps_order(model: nn.Module) -> bool:
    """Whether every parameter is that of a module of ``ch.nn``, which adds sequences in the order of the tree."""
    ours = [module for module in model.modules() if type(module).__module__.startswith("clearhead.nn.")]
    within = {part for module in ours for part in module.modules()}
    return all(module in within or next(module.parameters(recurse=False), None) is None for module in model.modules())


def _nodes_of_ranks(sequences: int, ranks: int, parts: int) -> list[list[range]]:
    """For each rank the nodes of the tree of which its micro-batches consist."""

    def of_part(place: int) -> list[range]:
        (some,) = chunks_of(sequences, ranks * parts, place, "contiguous")
        return tree_nodes(some, sequences)

    places = [range(rank * parts, (rank + 1) * parts) for rank in range(ranks)]
    return [[node for place in of_rank for node in of_part(place)] for of_rank in places]


def _largest(nodes: Sequence[range]) -> list[range]:
    """The nodes that a rank has after it added those that it can."""
    tree = TreeSum()
    for node in nodes:
        tree.add([], node)
    return [node for node, _ in tree.nodes]


#: Dtypes of gradients. Ranks agree on a parameter's by a number, which is 0 where it has no gradient.
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


def _sum_over_ranks(
    tree: TreeSum, parameters: Sequence[Tensor], nodes_of_ranks: Sequence[Sequence[range]]
) -> list[Tensor | None]:
    """The sum of the nodes of all ranks, in the order of the tree, on every rank.

    Each rank adds a slice of all nodes' gradients, so that a rank sends and receives about as much as in an all-reduce.
    """
    numbers = torch.zeros(len(parameters), dtype=torch.uint8)
    for _, tensors in tree.nodes:
        of_node = [0 if tensor is None else 1 + _DTYPES.index(tensor.dtype) for tensor in tensors]
        numbers = torch.maximum(numbers, torch.tensor(of_node, dtype=torch.uint8))
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    sums: list[Tensor | None] = [None] * len(parameters)
    for number, dtype in enumerate(_DTYPES, start=1):
        places = (numbers == number).nonzero().flatten().tolist()
        if not places:
            continue
        like = [parameters[at] for at in places]
        mine = [_flat([tensors[at] for at in places], like, dtype) for _, tensors in tree.nodes]
        total = _exchanged(mine, sum(tensor.numel() for tensor in like), dtype, nodes_of_ranks)
        parts = total.split([tensor.numel() for tensor in like])
        for at, part, tensor in zip(places, parts, like, strict=True):
            sums[at] = part.view(tensor.shape)
    return sums


def _flat(tensors: Sequence[Tensor | None], like: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The elements of tensors one after the other, 0 for an absent one."""
    parts = [torch.zeros_like(of) if one is None else one for one, of in zip(tensors, like, strict=True)]
    return torch.cat([part.reshape(-1).to(dtype) for part in parts])


def _exchanged(
    mine: Sequence[Tensor], elements: int, dtype: torch.dtype, nodes_of_ranks: Sequence[Sequence[range]]
) -> Tensor:
    """The sum of flat gradients, those of this rank's nodes being ``mine``."""
    ranks = len(nodes_of_ranks)
    width = -(-elements // ranks)
    received: list[tuple[range, Tensor]] = []
    for number in range(max(map(len, nodes_of_ranks))):
        sent = torch.zeros(ranks * width, dtype=dtype)
        if number < len(mine):
            sent[:elements] = mine[number]
        slices = torch.empty_like(sent)
        dist.all_to_all_single(slices, sent)
        of_ranks = zip(nodes_of_ranks, slices.view(ranks, width).unbind(), strict=True)
        received += [(nodes[number], part) for nodes, part in of_ranks if number < len(nodes)]
    tree = TreeSum()
    for node, part in sorted(received, key=lambda each: each[0].start):
        tree.add([part], node)
    (slice_sum,) = tree.result()
    assert slice_sum is not None
    total = torch.empty(ranks, width, dtype=dtype)
    dist.all_gather(list(total.unbind()), slice_sum.contiguous())
    return total.view(-1)[:elements]


#: Degrees that divide what one process adds up, and the kernels' sums along it.
_DIVIDING: Final = ("shard", "tensor_parallel", "context_parallel")


def check_order(function: str, parallel: ParallelOptions) -> None:
    """Raise ``UnsupportedError`` under ``set_invariant(True)`` if gradients would be added in another order.

    Args:
        function: name of the caller in error texts.
        parallel: how several processes share the work.
    """
    if not is_invariant():
        return
    for name in _DIVIDING:
        degree = getattr(parallel, name)
        if degree > 1:
            raise UnsupportedError.about(
                function,
                f"--{name.replace('_', '-')}",
                must="be 1 under set_invariant(True)",
                got=degree,
                then="Sums over processes along it have another order; --data-parallel keeps the bits.",
            )
