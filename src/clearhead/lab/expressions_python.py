"""A typed formula as the Python that says the same with the public API."""

from __future__ import annotations

from typing import Final

from clearhead.lab.expressions_nodes import (
    ATOM,
    COMPARE,
    NAME,
    OPERATIONS,
    PLACES,
    PLUS,
    POWER,
    SIGN,
    TRUTH,
    Node,
)

__all__ = ["mask_function", "score_function"]

#: Operations that keep whole numbers whole, in 64 bits as in float64.
_WHOLE: Final = frozenset(
    {NAME, "+", "-", "*", "%", "//", "minus", "abs", "min", "max", "at most", "at least", "where"}
)


def mask_function(tree: Node, name: str) -> str:
    """For ``ch.MaskFunction``."""
    first = "" if _stays_whole(tree) else _conversion(tree, "double()")
    return f"def {name}(batch, head, q_pos, k_pos):\n{first}    return {_written(tree, 'torch.float64')[0]}"


def score_function(tree: Node, name: str) -> str:
    """For ``ch.ScoreFunction``."""
    first, (text, binds) = _conversion(tree, "to(score.dtype)"), _written(tree, "score.dtype")
    if not _full(tree):
        text = f"torch.zeros_like(score) + {text if binds > PLUS else f'({text})'}"
    return f"def {name}(score, batch, head, q_pos, k_pos):\n{first}    return {text}"


def _written(node: Node, dtype: str) -> tuple[str, int]:
    """A node as Python, and how tightly it binds; ``dtype`` is what its numbers are computed in."""
    if node.operation == NAME:
        return str(node.value), ATOM
    if node.constant:
        return _literal(node)
    known = OPERATIONS[node.operation]
    parts = []
    for place, part in enumerate(node.parts):
        text, binds = _written(part, dtype)
        # Signs of one strength are read from the left; comparisons and powers are never left without brackets.
        strict = place > 0 or known.binds in (COMPARE, POWER)
        loose = binds <= known.binds if strict else binds < known.binds
        parts.append(f"({text})" if known.binds != ATOM and loose else text)
    if node.operation == "where" and all(part.constant for part in node.parts[1:]):
        # Between two plain numbers torch would choose in float32, or in whole numbers.
        parts[1] = f"torch.tensor({parts[1]}, dtype={dtype})"
    return known.python.format(*parts), known.binds


def _literal(node: Node) -> tuple[str, int]:
    value = float(node.value)
    if node.kind == TRUTH:
        return f"torch.tensor({bool(value)})", ATOM
    text = str(int(value)) if value.is_integer() else repr(value)
    return text, SIGN if value < 0 else ATOM


def _stays_whole(node: Node) -> bool:
    """Whether int64 tensors give exactly what float64 gives, so that positions need no conversion."""
    if node.constant:
        return node.kind == TRUTH or float(node.value).is_integer()
    if node.operation in ("%", "//") and not (node.parts[1].constant and node.parts[1].value):
        return False
    known = node.operation in _WHOLE or node.kind == TRUTH
    return known and all(_stays_whole(part) for part in node.parts)


def _conversion(node: Node, how: str) -> str:
    used = sorted(node.names() & set(PLACES))
    if not used:
        return ""
    return f"    {', '.join(used)} = {', '.join(f'{name}.{how}' for name in used)}\n"


def _full(node: Node) -> bool:
    """Whether a node surely has the score's shape and dtype."""
    if node.operation == "where":
        return all(_full(part) for part in node.parts[1:])
    return node.value == "score" or any(_full(part) for part in node.parts)
