"""A typed formula as equivalent Python with the public API."""

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

#: Operations that map integers to integers, in int64 as in float64.
_WHOLE: Final = frozenset(
    {NAME, "+", "-", "*", "%", "//", "minus", "abs", "min", "max", "at most", "at least", "where"}
)


def mask_function(tree: Node, name: str) -> str:
    """The Python of a mask, for ``ch.MaskFunction``."""
    first = "" if _is_exact_in_integers(tree) else _conversion(tree, "double()")
    return f"def {name}(batch, head, q_pos, k_pos):\n{first}    return {_written(tree, 'torch.float64')[0]}"


def score_function(tree: Node, name: str) -> str:
    """The Python of a score rule, for ``ch.ScoreFunction``."""
    first, (text, binds) = _conversion(tree, "to(score.dtype)"), _written(tree, "score.dtype")
    if not _full(tree):
        text = f"torch.zeros_like(score) + {text if binds > PLUS else f'({text})'}"
    return f"def {name}(score, batch, head, q_pos, k_pos):\n{first}    return {text}"


def _written(node: Node, dtype: str) -> tuple[str, int]:
    """A node as Python, and its precedence; ``dtype`` is that of its constants."""
    if node.operation == NAME:
        return str(node.value), ATOM
    if node.constant:
        return _literal(node)
    rule = OPERATIONS[node.operation]
    parts = []
    for place, part in enumerate(node.parts):
        text, binds = _written(part, dtype)
        # Operators of equal precedence associate to the left; nested comparisons and powers always get brackets.
        strict = place > 0 or rule.binds in (COMPARE, POWER)
        loose = binds <= rule.binds if strict else binds < rule.binds
        parts.append(f"({text})" if rule.binds != ATOM and loose else text)
    if node.operation == "where" and all(part.constant for part in node.parts[1:]):
        # For two Python numbers torch.where would use float32 or int64.
        parts[1] = f"torch.tensor({parts[1]}, dtype={dtype})"
    return rule.python.format(*parts), rule.binds


def _literal(node: Node) -> tuple[str, int]:
    value = float(node.value)
    if node.kind == TRUTH:
        return f"torch.tensor({bool(value)})", ATOM
    text = str(int(value)) if value.is_integer() else repr(value)
    return text, SIGN if value < 0 else ATOM


def _is_exact_in_integers(node: Node) -> bool:
    """Whether int64 tensors give exactly the results of float64, so that positions need no conversion."""
    if node.constant:
        return node.kind == TRUTH or float(node.value).is_integer()
    if node.operation in ("%", "//") and not (node.parts[1].constant and node.parts[1].value):
        return False
    whole = node.operation in _WHOLE or node.kind == TRUTH
    return whole and all(_is_exact_in_integers(part) for part in node.parts)


def _conversion(node: Node, how: str) -> str:
    used = sorted(node.names() & set(PLACES))
    if not used:
        return ""
    return f"    {', '.join(used)} = {', '.join(f'{name}.{how}' for name in used)}\n"


def _full(node: Node) -> bool:
    """Whether a node certainly has the score's shape and dtype."""
    if node.operation == "where":
        return all(_full(part) for part in node.parts[1:])
    return node.value == "score" or any(_full(part) for part in node.parts)
