"""The nodes of a typed formula: operand and result kinds, tensor function and Python text of each operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

__all__ = ["CONSTANT", "NAME", "NUMBER", "OPERATIONS", "PLACES", "TRUTH", "Node", "computed"]

PLACES: Final = ("q_pos", "k_pos", "batch", "head")

NUMBER: Final = "a number"
TRUTH: Final = "true or false"
NAME: Final = "name"
CONSTANT: Final = "constant"


@dataclass(frozen=True)
class Operation:
    """An operation: the kinds of its operands and result, its tensor function, and its Python text.

    ``binds`` is its precedence in Python's grammar, so that brackets are written only where needed.
    """

    takes: tuple[str, ...]
    gives: str
    compute: Callable[..., Tensor]
    python: str
    binds: int


ATOM, POWER, SIGN, TIMES, PLUS, AND, OR, COMPARE = 9, 8, 7, 6, 5, 4, 3, 2
_TWO: Final = (NUMBER, NUMBER)
_BOTH: Final = (TRUTH, TRUTH)

OPERATIONS: Final[Mapping[str, Operation]] = {
    "+": Operation(_TWO, NUMBER, torch.add, "{0} + {1}", PLUS),
    "-": Operation(_TWO, NUMBER, torch.sub, "{0} - {1}", PLUS),
    "*": Operation(_TWO, NUMBER, torch.mul, "{0} * {1}", TIMES),
    "/": Operation(_TWO, NUMBER, torch.true_divide, "{0} / {1}", TIMES),
    "//": Operation(_TWO, NUMBER, torch.floor_divide, "{0} // {1}", TIMES),
    "%": Operation(_TWO, NUMBER, torch.remainder, "{0} % {1}", TIMES),
    "**": Operation(_TWO, NUMBER, torch.pow, "{0}**{1}", POWER),
    "minus": Operation((NUMBER,), NUMBER, torch.neg, "-{0}", SIGN),
    "<": Operation(_TWO, TRUTH, torch.lt, "{0} < {1}", COMPARE),
    "<=": Operation(_TWO, TRUTH, torch.le, "{0} <= {1}", COMPARE),
    ">": Operation(_TWO, TRUTH, torch.gt, "{0} > {1}", COMPARE),
    ">=": Operation(_TWO, TRUTH, torch.ge, "{0} >= {1}", COMPARE),
    "==": Operation(_TWO, TRUTH, torch.eq, "{0} == {1}", COMPARE),
    "!=": Operation(_TWO, TRUTH, torch.ne, "{0} != {1}", COMPARE),
    "&": Operation(_BOTH, TRUTH, torch.logical_and, "{0} & {1}", AND),
    "|": Operation(_BOTH, TRUTH, torch.logical_or, "{0} | {1}", OR),
    "~": Operation((TRUTH,), TRUTH, torch.logical_not, "~{0}", SIGN),
    "where": Operation((TRUTH, NUMBER, NUMBER), NUMBER, torch.where, "torch.where({0}, {1}, {2})", ATOM),
    "where truth": Operation((TRUTH, TRUTH, TRUTH), TRUTH, torch.where, "torch.where({0}, {1}, {2})", ATOM),
    "min": Operation(_TWO, NUMBER, torch.minimum, "torch.minimum({0}, {1})", ATOM),
    "max": Operation(_TWO, NUMBER, torch.maximum, "torch.maximum({0}, {1})", ATOM),
    "at most": Operation(_TWO, NUMBER, torch.minimum, "torch.clamp({0}, max={1})", ATOM),
    "at least": Operation(_TWO, NUMBER, torch.maximum, "torch.clamp({0}, min={1})", ATOM),
    **{
        name: Operation((NUMBER,), NUMBER, getattr(torch, name), f"torch.{name}({{0}})", ATOM)
        for name in ("abs", "floor", "exp", "log", "sqrt", "tanh")
    },
}


@dataclass(frozen=True)
class Node:
    """An operation on parts, or a ``NAME`` or ``CONSTANT`` with its ``value``."""

    operation: str
    kind: str
    parts: tuple[Node, ...] = ()
    value: float | str = ""

    @property
    def constant(self) -> bool:
        return self.operation == CONSTANT

    def names(self) -> frozenset[str]:
        """The names that the node reads."""
        names = {str(self.value)} if self.operation == NAME else set()
        return frozenset(names).union(*(part.names() for part in self.parts))


def computed(node: Node, places: Mapping[str, Tensor]) -> Tensor:
    """A node's value, float64 or bool, over tensors that broadcast."""
    if node.operation == NAME:
        return places[str(node.value)].to(torch.float64)
    if node.constant:
        return torch.tensor(node.value, dtype=torch.bool if node.kind == TRUTH else torch.float64)
    return OPERATIONS[node.operation].compute(*(computed(part, places) for part in node.parts))
