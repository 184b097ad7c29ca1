"""Lesson 4: one module for self- and cross-attention, and several heads side by side.

Source: document 004 ("Coding Encoder-Decoder Attention and Multi-Head Attention in PyTorch"): lesson 0's tokens, one
and then two heads from seed 42, the heads' outputs joined without a projection after them.
"""

from __future__ import annotations

import torch
from torch import nn

from clearhead.nn import MultiHeadAttention

TOKENS = torch.tensor([[1.16, 0.23], [0.57, 1.36], [4.41, -2.16]])


def heads(num_heads: int) -> MultiHeadAttention:
    """Heads drawn one after the other, each its query, key and value: the order in which the document draws them.

    ``MultiHeadAttention(4, num_heads=2)`` draws all queries first, and splits its width between the heads where the
    document gives each head the full width; so the weights are made as the document makes them, and put in.
    """
    torch.manual_seed(42)
    drawn = [tuple(nn.Linear(2, 2, bias=False) for _ in ("query", "key", "value")) for _ in range(num_heads)]
    return MultiHeadAttention.from_heads(drawn)


def main() -> None:
    one, two = heads(1), heads(2)
    with torch.no_grad():
        print(f"self-attention, one head\n{one(TOKENS)}\n")
        print(f"cross-attention: the last token asks, all tokens answer\n{one(TOKENS[2:], TOKENS)}\n")
        for number in range(2):
            own = slice(2 * number, 2 * number + 2)
            query, key, value = (part[number] for part in two.project(TOKENS))
            alone = torch.softmax(query @ key.T / 2**0.5, dim=-1) @ value
            print(f"head {number + 1} alone, columns {own.start} and {own.start + 1}\n{alone}\n")
        print(f"MultiHeadAttention, two heads\n{two(TOKENS)}")


if __name__ == "__main__":
    main()
