"""Lesson 0: self-attention of three tokens, every number of it.

Source: document 000 ("Coding Self-Attention in PyTorch"): a 3 x 2 input, three 2 x 2 weights from seed 42.
Formula: Vaswani et al. 2017, "Attention is all you need", section 3.2.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.nn import MultiHeadAttention

TOKENS = torch.tensor([[1.16, 0.23], [0.57, 1.36], [4.41, -2.16]])


def module() -> MultiHeadAttention:
    """One head as wide as the tokens, no biases, nothing after the head: the smallest there is.

    The projections are made in the order query, key, value, so the seed gives the document's weights.
    """
    torch.manual_seed(42)
    return MultiHeadAttention(2, num_heads=1, bias=False, output_projection=False)


def by_hand(attention: MultiHeadAttention, tokens: Tensor) -> dict[str, Tensor]:
    """The formula, a line at a time."""
    steps: dict[str, Tensor] = {}
    # What each token asks for, what it offers, and what it hands over.
    steps["query"] = tokens @ attention.query_projection.weight.T
    steps["key"] = tokens @ attention.key_projection.weight.T
    steps["value"] = tokens @ attention.value_projection.weight.T
    # How well every question fits every offer: one row per query, one column per key.
    steps["scores"] = steps["query"] @ steps["key"].T
    # A sum of head_dim products grows like sqrt(head_dim); dividing keeps the softmax away from its flat ends.
    steps["scaled"] = steps["scores"] / attention.head_dim**0.5
    steps["weights"] = torch.softmax(steps["scaled"], dim=-1)
    steps["output"] = steps["weights"] @ steps["value"]
    return steps


def main() -> None:
    attention = module()
    with torch.no_grad():
        for name, tensor in by_hand(attention, TOKENS).items():
            print(f"{name}\n{tensor}\n")
        print(f"MultiHeadAttention\n{attention(TOKENS)}")


if __name__ == "__main__":
    main()
