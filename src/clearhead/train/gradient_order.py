"""The order in which a step's gradients are added under ``set_invariant(True)``: that of the sequences in the batch.

Layers add the gradients of a micro-batch's sequences in the order of a binary tree, and ``GradientSum`` adds those of
micro-batches in the same order. A micro-batch of 2**n sequences is a node of the tree, so the sum has the same bits for
every such size.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from torch import nn

from clearhead.choices import is_invariant
from clearhead.errors import UnsupportedError
from clearhead.sequence_sums import TreeSum

if TYPE_CHECKING:
    from clearhead.train.options import TrainingOptions

__all__ = ["GradientSum", "check_order", "rows_of_share"]


class GradientSum:
    """The sum of a step's gradients over micro-batches; a context in which their passes run.

    A parameter of several modules, such as a tied embedding, has a gradient for each. Inside the context those modules
    but the first have another parameter on the same memory, so that each gradient is added in its own tree: autograd
    would add them for every micro-batch.

    Args:
        model: the model, whose parameters have no gradients yet.

    Cost: ``log2(micro-batches)`` copies of the gradients.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._aliases: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        owned: set[int] = set()
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in owned:
                    alias = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
                    self._aliases.append((module, name, parameter, alias))
                owned.add(id(parameter))
        self._tree = TreeSum()

    def __enter__(self) -> GradientSum:
        for module, name, _, alias in self._aliases:
            setattr(module, name, alias)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for module, name, parameter, _ in self._aliases:
            setattr(module, name, parameter)

    def add(self, counts: bool) -> None:
        """Add the gradients that a micro-batch left; ``counts`` is False for one that stands in for none."""
        parameters = [*self._parameters, *(alias for *_, alias in self._aliases)]
        if counts:
            self._tree.add([parameter.grad for parameter in parameters])
        for parameter in parameters:
            parameter.grad = None

    def store(self) -> None:
        """Give each parameter its sum."""
        sums = self._tree.result()
        for parameter, grad in zip(self._parameters, sums, strict=False):
            parameter.grad = grad
        for (_, _, parameter, _), grad in zip(self._aliases, sums[len(self._parameters) :], strict=True):
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad


def rows_of_share(rows: int, shares: int, place: int) -> range:
    """The rows of one of several shares of a batch: a power of two of them, in the last shares fewer or none.

    >>> [list(rows_of_share(5, 2, place)) for place in range(2)]
    [[0, 1, 2, 3], [4]]
    """
    size = 1 << max(0, -(-rows // shares) - 1).bit_length()
    return range(min(place * size, rows), min((place + 1) * size, rows))


def check_order(function: str, options: TrainingOptions, processes: int) -> None:
    """Raise ``UnsupportedError`` under ``set_invariant(True)`` if gradients would be added in another order.

    Args:
        function: name of the caller in error texts.
        options: options of the task.
        processes: number of processes that share the work.
    """
    if not is_invariant():
        return
    rows = getattr(options, "batch_size", 1)
    sizes = [str(size) for size in (1 << power for power in range(rows.bit_length())) if rows % size == 0]
    parts = options.accumulate
    size, rest = divmod(rows, parts)
    if parts > 1 and (rest or size & (size - 1)):
        raise UnsupportedError.about(
            function,
            "--accumulate",
            must="divide the batch into a power of two of sequences each under set_invariant(True)",
            got=f"{parts} parts of {rows} sequences",
            then=f"Parts of {', '.join(sizes)} or all {rows} sequences have one order of sums.",
        )
    if options.accumulate > 1 and options.precision != "fp32":
        raise UnsupportedError.about(
            function,
            "--precision",
            must="be fp32 with --accumulate under set_invariant(True)",
            got=options.precision,
            then="Autocast rounds the gradients of each part.",
        )
    if processes > 1:
        raise UnsupportedError.about(
            function,
            "processes",
            must="be 1 under set_invariant(True)",
            got=processes,
            then="A sum over processes has another order than one over sequences.",
        )
