"""Lesson 1: attention as one token sees it, then for all tokens at once.

Source: document 001 ("Focusing on a Single Token's Perspective"): five tokens of width 4, one head of width 3 with
biases, seed 123. The input was drawn without a seed, so it is taken as the document prints it.

The scale is the document's own. It divides scores by the square root of the *input* width, sqrt(4). The paper divides
by the square root of the width of a head, here sqrt(3): scores are sums over the head's channels, so it is their number
that sets how large scores grow. ``scale=`` says it either way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.nn import MultiHeadAttention

TOKENS = torch.tensor(
    [
        [0.5159, 0.4220, 0.5786, 0.9455],
        [0.8057, 0.6775, 0.6087, 0.6179],
        [0.6932, 0.4354, 0.0353, 0.1908],
        [0.9268, 0.5299, 0.0950, 0.5789],
        [0.9131, 0.0275, 0.1634, 0.3009],
    ]
)
#: The third token is the one that looks around.
LOOKING = 2


def module() -> MultiHeadAttention:
    """One head, narrower than the tokens."""
    torch.manual_seed(123)
    return MultiHeadAttention(4, num_heads=1, head_dim=3, output_projection=False, scale=1 / 4**0.5)


def one_token(attention: MultiHeadAttention, tokens: Tensor, place: int) -> dict[str, Tensor]:
    """One row of the computation: a single query against every key."""
    steps: dict[str, Tensor] = {}
    steps["query"] = attention.query_projection(tokens[place])
    steps["keys"] = attention.key_projection(tokens)
    steps["values"] = attention.value_projection(tokens)
    steps["scores"] = steps["keys"] @ steps["query"]
    steps["weights"] = torch.softmax(steps["scores"] / tokens.shape[1] ** 0.5, dim=-1)
    steps["context"] = steps["weights"] @ steps["values"]
    return steps


def main() -> None:
    attention = module()
    with torch.no_grad():
        for name, tensor in one_token(attention, TOKENS, LOOKING).items():
            print(f"{name}\n{tensor}\n")
        # A query of its own beside keys of their own is cross-attention, even where they share their source.
        print(f"MultiHeadAttention, token {LOOKING} alone\n{attention(TOKENS[LOOKING : LOOKING + 1], TOKENS)}\n")
        print(f"MultiHeadAttention, all tokens\n{attention(TOKENS)}")


if __name__ == "__main__":
    main()
