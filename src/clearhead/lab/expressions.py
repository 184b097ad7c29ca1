"""Typed formulas as masks and score rules: parsed to nodes of a fixed table, never run as code.

A formula has the names ``q_pos``, ``k_pos``, ``batch``, ``head`` and, in a score rule, ``score``; numbers,
``+ - * / // % **``, comparisons, ``and or not`` (or ``& | ~``), ``a if c else b`` and the functions in ``FUNCTIONS``.
Python's parser builds the tree; anything outside the tables below raises an error with its column.
"""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from torch import Tensor

from clearhead.errors import ClearheadError, MaskError, ShapeError
from clearhead.lab.expressions_nodes import CONSTANT, NAME, NUMBER, OPERATIONS, PLACES, TRUTH, Node, computed
from clearhead.lab.expressions_python import mask_function, score_function
from clearhead.masks import MaskFunction
from clearhead.scores import ScoreFunction

__all__ = ["FUNCTIONS", "LONGEST", "Expression", "mask_expression", "score_expression"]

LONGEST: Final = 300
_DEEPEST: Final = 24
_MOST_NODES: Final = 120
_LARGEST: Final = 1e9
_LARGEST_POWER: Final = 8
#: A number directly followed by a letter, which Python would split with a warning.
_GLUED: Final = re.compile(r"(?<![\w.])(?>(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d+)?)(?=[A-Za-z_])")
_LETTERS: Final = frozenset(string.ascii_letters + string.digits + "_ .,+-*/%<>=!&|~()")

#: Functions by name, with their least and largest number of arguments.
FUNCTIONS: Final[Mapping[str, tuple[int, int]]] = {
    "abs": (1, 1),
    "floor": (1, 1),
    "exp": (1, 1),
    "log": (1, 1),
    "sqrt": (1, 1),
    "tanh": (1, 1),
    "min": (2, 8),
    "max": (2, 8),
    "where": (3, 3),
}

_SIGNS: Final[Mapping[type[ast.AST], str]] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.BitAnd: "&", ast.BitOr: "|", ast.And: "&", ast.Or: "|", ast.Not: "~", ast.Invert: "~", ast.USub: "minus",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip


@dataclass(frozen=True)
class Expression:
    """A parsed formula.

    Attributes:
        text: the formula as typed.
        tree: the root of its nodes.
    """

    text: str
    tree: Node

    def mask(self) -> MaskFunction:
        """The formula as a mask."""

        def allowed(batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
            return computed(self.tree, {"batch": batch, "head": head, "q_pos": q_pos, "k_pos": k_pos})

        return MaskFunction(allowed)

    def rule(self) -> ScoreFunction:
        """The formula as a score rule."""

        def changed(score: Tensor, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
            places = {"batch": batch, "head": head, "q_pos": q_pos, "k_pos": k_pos, "score": score}
            return computed(self.tree, places).to(score.dtype).expand_as(score).clone()

        return ScoreFunction(changed)

    def python(self, name: str) -> str:
        """An equivalent Python function with this name, for ``ch.MaskFunction`` or ``ch.ScoreFunction``."""
        return mask_function(self.tree, name) if self.tree.kind == TRUTH else score_function(self.tree, name)


def mask_expression(text: str) -> Expression:
    """Parse a formula that is true where a query may attend.

    Raises:
        MaskError: the formula is invalid; the text names the column.

    >>> mask_expression("k_pos <= q_pos and (q_pos - k_pos) % 2 == 0").mask().dense(3, 3).int().tolist()
    [[1, 0, 0], [0, 1, 0], [1, 0, 1]]
    """
    return _Reader("mask expression", text, MaskError, PLACES).read(TRUTH, "q_pos - k_pos < 4")


def score_expression(text: str) -> Expression:
    """Parse a formula for a new score.

    Raises:
        ShapeError: the formula is invalid; the text names the column.

    >>> print(score_expression("score - 0.1 * abs(q_pos - k_pos)").python("rule"))
    def rule(score, batch, head, q_pos, k_pos):
        k_pos, q_pos = k_pos.to(score.dtype), q_pos.to(score.dtype)
        return score - 0.1 * torch.abs(q_pos - k_pos)
    """
    return _Reader("score expression", text, ShapeError, (*PLACES, "score")).read(
        NUMBER, "score - 0.1 * abs(q_pos - k_pos)"
    )


class _Reader:
    """Converts Python's syntax tree to nodes."""

    def __init__(self, function: str, text: str, error: type[ClearheadError], names: tuple[str, ...]) -> None:
        self._function, self._error, self._names, self._count = function, error, names, 0
        if not isinstance(text, str) or not text.strip() or len(text) > LONGEST:
            got = f"{len(text)} characters" if isinstance(text, str) else type(text).__name__
            raise error.about(
                function, "text", must=f"have 1 to {LONGEST} characters", got=got, then="Write one short formula."
            )
        self._whole = " ".join(text.splitlines()).replace("\t", " ")
        self._before = len(self._whole) - len(self._whole.lstrip())
        self._text = self._whole.strip()

    def read(self, wanted: str, example: str) -> Expression:
        strange = next((at for at, letter in enumerate(self._text) if letter not in _LETTERS), None)
        if strange is not None:
            self._refuse(strange, self._text[strange], "be a character of formulas", f"Write e.g. {example}.")
        glued = _GLUED.search(self._text)
        if glued is not None:
            piece = self._text[glued.start() : glued.end() + 1]
            self._refuse(glued.start(), piece, "be a number alone", "Put a space or an operator after it.")
        try:
            tree = ast.parse(self._text, mode="eval").body
        except SyntaxError as failure:
            at = min(max((failure.offset or 1) - 1, 0), len(self._text) - 1)
            self._refuse(at, self._text[at : at + 12], f"be valid syntax ({failure.msg})", f"Write e.g. {example}.")
        except (ValueError, MemoryError, RecursionError):
            self._refuse(0, self._text[:12], "be a formula", f"Write e.g. {example}.")
        node = self._node(tree, 0)
        if node.kind != wanted:
            self._refuse(0, self._text, f"be {wanted}", f"Write e.g. {example}.", node.kind)
        return Expression(self._whole.strip(), node)

    def _refuse(self, at: int, piece: str, must: str, then: str, kind: str = "") -> NoReturn:
        """Name the piece and its column, counted from 1."""
        short = piece if len(piece) <= 24 else f"{piece[:21]}..."
        got = f"{short!r}, {kind}" if kind else repr(short)
        raise self._error.about(self._function, f"column {self._before + at + 1}", must=must, got=got, then=then)

    def _against(self, tree: ast.AST, must: str, then: str, kind: str = "") -> NoReturn:
        piece = ast.get_source_segment(self._text, tree) or self._text
        self._refuse(getattr(tree, "col_offset", 0), piece, must, then, kind)

    def _node(self, tree: ast.expr, depth: int) -> Node:
        self._count += 1
        if depth > _DEEPEST or self._count > _MOST_NODES:
            self._against(tree, f"stay within {_DEEPEST} levels and {_MOST_NODES} pieces", "Simplify the formula.")
        match tree:
            case ast.Constant(value=value):
                return self._number(tree, value)
            case ast.Name(id=name):
                return self._named(tree, name)
            case ast.UnaryOp(op=ast.UAdd(), operand=part):
                # Check the operand like that of a minus.
                node = self._node(part, depth + 1)
                self._made(tree, "minus", (node,))
                return node
            case ast.UnaryOp(op=sign, operand=part):
                return self._made(tree, _SIGNS[type(sign)], (self._node(part, depth + 1),))
            case ast.BinOp(op=sign) if type(sign) in _SIGNS:
                return self._made(tree, _SIGNS[type(sign)], tuple(self._parts(depth, tree.left, tree.right)))
            case ast.BoolOp(op=sign, values=values):
                return self._folded(tree, _SIGNS[type(sign)], self._parts(depth, *values))
            case ast.Compare():
                return self._compared(tree, depth)
            case ast.IfExp(test=test, body=body, orelse=other):
                return self._where(tree, self._parts(depth, test, body, other))
            case ast.Call():
                return self._called(tree, depth)
        kind = type(tree).__name__.lower()
        self._against(tree, "be a number, a name, an operator or a function of formulas", "Leave it out.", kind)

    def _parts(self, depth: int, *trees: ast.expr) -> list[Node]:
        return [self._node(tree, depth + 1) for tree in trees]

    def _number(self, tree: ast.expr, value: Any) -> Node:
        if isinstance(value, bool):
            return Node(CONSTANT, TRUTH, value=float(value))
        if not isinstance(value, (int, float)) or not abs(value) <= _LARGEST:
            self._against(tree, f"be a number of at most {_LARGEST:.0e}", "Use a smaller one.")
        return Node(CONSTANT, NUMBER, value=float(value) + 0.0)

    def _named(self, tree: ast.expr, name: str) -> Node:
        if name not in self._names:
            names = ", ".join(self._names)
            self._against(tree, f"be one of {names}", "Formulas have these names.")
        return Node(NAME, NUMBER, value=name)

    def _compared(self, tree: ast.Compare, depth: int) -> Node:
        nodes = self._parts(depth, tree.left, *tree.comparators)
        pairs = []
        for sign, left, right in zip(tree.ops, nodes, nodes[1:], strict=False):
            if type(sign) not in _SIGNS:
                self._against(tree, "compare by < <= > >= == or !=", "Use one of those.")
            pairs.append(self._made(tree, _SIGNS[type(sign)], (left, right)))
        return self._folded(tree, "&", pairs)

    def _called(self, tree: ast.Call, depth: int) -> Node:
        name = tree.func.id if isinstance(tree.func, ast.Name) else None
        if name is None or name not in FUNCTIONS:
            self._against(tree.func, f"be one of {', '.join(FUNCTIONS)}", "Formulas have these functions.")
        few, many = FUNCTIONS[name]
        given = len(tree.args)
        if tree.keywords or not few <= given <= many:
            wanted = str(few) if few == many else f"{few} to {many}"
            self._against(tree, f"pass {wanted} positional arguments to {name}", "Separate them by commas.")
        parts = self._parts(depth, *tree.args)
        if name == "where":
            return self._where(tree, parts)
        return self._folded(tree, name, parts) if many > 1 else self._made(tree, name, tuple(parts))

    def _where(self, tree: ast.expr, parts: list[Node]) -> Node:
        return self._made(tree, "where truth" if parts[1].kind == TRUTH else "where", tuple(parts))

    def _folded(self, tree: ast.expr, operation: str, parts: list[Node]) -> Node:
        whole = parts[0]
        for part in parts[1:]:
            whole = self._made(tree, operation, (whole, part))
        return whole

    def _made(self, tree: ast.expr, operation: str, parts: tuple[Node, ...]) -> Node:
        """The checked node of an operation; a constant if all its parts are constants."""
        rule = OPERATIONS[operation]
        for part, wanted in zip(parts, rule.takes, strict=True):
            if part.kind != wanted:
                then = "Put comparisons in brackets before & | ~, and compare numbers to get true or false."
                self._against(tree, f"combine parts that are {wanted}", then, f"a part of which is {part.kind}")
        power = parts[1].value if operation == "**" and parts[1].constant else None
        if operation == "**" and not (isinstance(power, float) and abs(power) <= _LARGEST_POWER):
            must = f"have a plain number of at most {_LARGEST_POWER} as its power"
            self._against(tree, must, "Multiply instead, or use exp.")
        if all(part.constant for part in parts):
            return self._evaluated(tree, Node(operation, rule.gives, parts))
        if operation in ("min", "max") and any(part.constant for part in parts):
            parts = parts if parts[1].constant else (parts[1], parts[0])
            operation = "at most" if operation == "min" else "at least"
        return Node(operation, rule.gives, parts)

    def _evaluated(self, tree: ast.expr, node: Node) -> Node:
        # Normalise -0.0, so that a division by it does not depend on an invisible sign.
        value = float(computed(node, {}).item()) + 0.0
        if not abs(value) <= _LARGEST:
            self._against(tree, f"evaluate to at most {_LARGEST:.0e}", "Use smaller numbers.", f"{value:g}")
        return Node(CONSTANT, node.kind, value=value)
