"""Lesson 3: a mask that hides the future.

Source: document 003 ("Coding Masked Self-Attention in PyTorch"): lesson 0's tokens and weights, and a causal mask.

In the document's mask ``True`` *forbids*, and forbidden scores are set to -1e9. Here ``True`` *allows*, in every mask,
and forbidden keys take no part at all. ``clearhead.bridges`` holds the functions that turn one convention into the
other; ``from_forbidden`` is the one for this document. The numbers agree because every row has a key left to attend
to: in a row without one, -1e9 everywhere would come out as an even average over all that was forbidden; here it is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

import clearhead as ch
from clearhead.bridges import from_forbidden
from clearhead.nn import MultiHeadAttention

TOKENS = torch.tensor([[1.16, 0.23], [0.57, 1.36], [4.41, -2.16]])
#: As the document builds it: 1 on and below the diagonal, then "is it 0?".
FORBIDDEN = torch.tril(torch.ones(3, 3)) == 0


def module() -> MultiHeadAttention:
    """Lesson 0's: masking adds no weights."""
    torch.manual_seed(42)
    return MultiHeadAttention(2, num_heads=1, bias=False, output_projection=False)


def by_hand(attention: MultiHeadAttention, tokens: Tensor) -> dict[str, Tensor]:
    """Lesson 0's formula with one line more, the mask, between scaling and softmax."""
    steps: dict[str, Tensor] = {}
    steps["query"] = tokens @ attention.query_projection.weight.T
    steps["key"] = tokens @ attention.key_projection.weight.T
    steps["value"] = tokens @ attention.value_projection.weight.T
    steps["scores"] = steps["query"] @ steps["key"].T
    steps["scaled"] = steps["scores"] / attention.head_dim**0.5
    steps["masked"] = steps["scaled"].masked_fill(FORBIDDEN, -1e9)
    steps["weights"] = torch.softmax(steps["masked"], dim=-1)
    steps["output"] = steps["weights"] @ steps["value"]
    return steps


def main() -> None:
    attention = module()
    converted = from_forbidden(FORBIDDEN)
    print(f"the document's mask, where True forbids\n{FORBIDDEN}\n")
    print(f"converted, where True allows\n{converted.dense(3, 3)}\n")
    print(f"which is {ch.Causal()}\n")
    with torch.no_grad():
        for name, tensor in by_hand(attention, TOKENS).items():
            print(f"{name}\n{tensor}\n")
        print(f"MultiHeadAttention, the document's mask converted\n{attention(TOKENS, mask=converted)}\n")
        print(f"MultiHeadAttention, mask=Causal()\n{attention(TOKENS, mask=ch.Causal())}")


if __name__ == "__main__":
    main()
