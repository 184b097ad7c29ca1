"""The worked example as a Python script that prints the values of the worksheet."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from clearhead.lab.worked_sheet import WEIGHTS, Worksheet
from clearhead.masks import Causal

__all__ = ["script"]

_START: Final = '''"""Self-attention on a small worksheet: every step by hand, then with clearhead's module."""

import torch

import clearhead as ch

PLACES = 4


def show(name, table):
    print(f"{name} {list(table.shape)}")
    for row in table.tolist():
        print("  ".join(f"{number:.{PLACES}f}" for number in row))


def table(*rows):
    return torch.tensor(rows, dtype=torch.float64)

'''

_STEPS: Final = """
show("Q", Q)
show("K", K)
show("V", V)

outputs = []
for head in range(heads):
    # Each head has its own columns.
    columns = slice(head * head_dim, (head + 1) * head_dim)
    query, key, value = Q[:, columns], K[:, columns], V[:, columns]
    scores = query @ key.T
    scaled = scores * scale
    masked = scaled.masked_fill(~allowed, -torch.inf)
    weights = {softmax}
    outputs.append(weights @ value)
    for name, step in (
        ("scores", scores), ("scaled", scaled), ("masked", masked), ("weights", weights), ("output", outputs[-1])
    ):
        show(f"{{name}} of head {{head + 1}}", step)
output = torch.cat(outputs, dim=1)
show("output", output)

module = ch.nn.MultiHeadAttention.from_heads([{heads}], scale=scale)
with torch.no_grad():
    torch.testing.assert_close(module(X, mask={mask}), output, rtol=1e-9, atol=1e-9)
"""
_SOFTMAX: Final = "torch.softmax(masked, dim=-1)"
#: The softmax of an empty row is 0 / 0; the library defines weights and output of such a query as 0.
_SOFTMAX_OF_NOTHING: Final = f"{_SOFTMAX}.nan_to_num(0.0)  # a query without keys attends to nothing"


def script(sheet: Worksheet) -> str:
    """A script that prints every step to four places and compares the module with them; needs torch and clearhead."""
    lines = [_START, f"X = {_numbers(sheet.X)}"]
    lines += [f"{name} = {_numbers(sheet.weights[name])}" for name in WEIGHTS]
    lines += [f"{name} = {_numbers(bias[None])}[0]" for name, bias in sheet.biases.items()]
    scale = "head_dim**-0.5" if sheet.own_scale is None else repr(sheet.own_scale)
    lines += [f"heads, head_dim = {sheet.heads}, {sheet.head_dim}", f"scale = {scale}", f"allowed = {_mask(sheet)}", ""]
    for letter in "qkv":
        bias = f" + b_{letter}" if sheet.biases else ""
        lines.append(f"{letter.upper()} = X @ W_{letter}{bias}")
    softmax = _SOFTMAX if bool(sheet.allowed.any(dim=1).all()) else _SOFTMAX_OF_NOTHING
    parts = _STEPS.format(softmax=softmax, heads=_one_head(sheet), mask=_library_mask(sheet))
    return "\n".join(lines) + "\n" + parts


def _numbers(table: Tensor) -> str:
    rows = [f"[{', '.join(map(repr, row))}]" for row in table.tolist()]
    return f"table({', '.join(rows)})" if len(rows) == 1 else "table(\n    " + ",\n    ".join(rows) + ",\n)"


def _mask(sheet: Worksheet) -> str:
    places = sheet.allowed.shape[0]
    if sheet.mask is None:
        return f"torch.ones({places}, {places}, dtype=torch.bool)"
    if isinstance(sheet.mask, Causal):
        return f"torch.ones({places}, {places}, dtype=torch.bool).tril()"
    rows = [f"[{', '.join(map(str, row))}]" for row in sheet.allowed.int().tolist()]
    return f"torch.tensor([{', '.join(rows)}]) == 1"


def _library_mask(sheet: Worksheet) -> str:
    if sheet.mask is None:
        return "None"
    return "ch.Causal()" if isinstance(sheet.mask, Causal) else "ch.Dense(allowed)"


def _one_head(sheet: Worksheet) -> str:
    """The weights of each head in ``nn.Linear``'s order, as an expression of the script."""
    columns, places = ("", "") if sheet.heads == 1 else ("[:, part]", "[part]")
    form = "(W_{0}{1}.T, b_{0}{2})" if sheet.biases else "W_{0}{1}.T"
    head = f"({', '.join(form.format(letter, columns, places) for letter in 'qkv')})"
    return head if sheet.heads == 1 else f"\n    {head}\n    for part in torch.arange(len(Q[0])).split(head_dim)\n"
