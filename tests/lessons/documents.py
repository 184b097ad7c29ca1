"""The figures that the five source documents print, and the modules of clearhead that reproduce them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from clearhead.nn import MultiHeadAttention

#: The documents print four decimals.
PRINTED: Final = 1e-4

Row = tuple[float, ...]
Matrix = tuple[Row, ...]


def printed(tensor: Tensor | np.ndarray, expected: Sequence[float] | Sequence[Sequence[float]] | float) -> None:
    """Assert that a tensor is what a document prints."""
    torch.testing.assert_close(torch.as_tensor(tensor).detach(), torch.tensor(expected), atol=PRINTED, rtol=0.0)


class Document0:
    """Document 000: three tokens of width 2, weights from seed 42."""

    TOKENS: Final[Matrix] = ((1.16, 0.23), (0.57, 1.36), (4.41, -2.16))
    QUERY_WEIGHT: Final[Matrix] = ((0.5406, -0.1657), (0.5869, 0.6496))
    KEY_WEIGHT: Final[Matrix] = ((-0.1549, -0.3443), (0.1427, 0.4153))
    VALUE_WEIGHT: Final[Matrix] = ((0.6233, 0.6146), (-0.5188, 0.1323))
    QUERY: Final[Matrix] = ((0.7621, -0.0428), (1.1063, 0.7890), (1.1164, -2.1336))
    KEY: Final[Matrix] = ((-0.1469, -0.3038), (0.1057, 0.3685), (-0.9914, -2.4152))
    VALUE: Final[Matrix] = ((0.6038, 0.7434), (-0.3502, 0.5303), (3.8695, 2.4246))
    SCORES: Final[Matrix] = ((-0.0990, 0.0648, -0.6523), (-0.4022, 0.4078, -3.0024), (0.4842, -0.6683, 4.0461))
    SCALED: Final[Matrix] = ((-0.0700, 0.0458, -0.4612), (-0.2844, 0.2883, -2.1230), (0.3424, -0.4725, 2.8610))
    WEIGHTS: Final[Matrix] = ((0.3573, 0.4011, 0.2416), (0.3410, 0.6047, 0.0542), (0.0722, 0.0320, 0.8959))
    OUTPUT: Final[Matrix] = ((1.0100, 1.0641), (0.2040, 0.7057), (3.4989, 2.2427))

    @staticmethod
    def module() -> MultiHeadAttention:
        """One head as wide as the tokens; query, key and value are drawn in the document's order."""
        torch.manual_seed(42)
        return MultiHeadAttention(2, num_heads=1, bias=False, output_projection=False)


class Document1:
    """Document 001: five tokens of width 4, a head of width 3 with biases, seed 123, scale 1/sqrt(4)."""

    TOKENS: Final[Matrix] = (
        (0.5159, 0.4220, 0.5786, 0.9455),
        (0.8057, 0.6775, 0.6087, 0.6179),
        (0.6932, 0.4354, 0.0353, 0.1908),
        (0.9268, 0.5299, 0.0950, 0.5789),
        (0.9131, 0.0275, 0.1634, 0.3009),
    )
    QUERY_3: Final[Row] = (-0.5313, -0.5278, -0.2748)
    KEYS: Final[Matrix] = (
        (0.2236, 0.8145, -0.4259),
        (0.1462, 0.9094, -0.2659),
        (0.1122, 0.6939, -0.2615),
        (0.0270, 0.8234, -0.2469),
        (0.2751, 0.6120, -0.0675),
    )
    VALUES: Final[Matrix] = (
        (0.5962, 0.2799, -0.5147),
        (0.7200, 0.4179, -0.5233),
        (0.4013, 0.6908, -0.3236),
        (0.6165, 0.7007, -0.5124),
        (0.4484, 0.7392, -0.4560),
    )
    SCORES_3: Final[Row] = (-0.4316, -0.4845, -0.3540, -0.3810, -0.4506)
    WEIGHTS_3: Final[Row] = (0.1988, 0.1936, 0.2067, 0.2039, 0.1969)
    CONTEXT_3: Final[Row] = (0.5549, 0.5678, -0.4649)
    CONTEXT: Final[Matrix] = (
        (0.5522, 0.5712, -0.4637),
        (0.5531, 0.5700, -0.4640),
        (0.5549, 0.5678, -0.4649),
        (0.5535, 0.5694, -0.4642),
        (0.5536, 0.5687, -0.4642),
    )

    @staticmethod
    def module() -> MultiHeadAttention:
        """One head, narrower than the tokens, with the document's scale."""
        torch.manual_seed(123)
        return MultiHeadAttention(4, num_heads=1, head_dim=3, output_projection=False, scale=1 / 4**0.5)


class Document3:
    """Document 003: document 000 under a causal mask in which True forbids."""

    FORBIDDEN: Final = torch.tensor([[False, True, True], [False, False, True], [False, False, False]])
    #: The masked scores that are not -1e9, row by row.
    ALLOWED_SCORES: Final[Row] = (-6.9975e-02, -2.8442e-01, 2.8833e-01, 3.4241e-01, -4.7253e-01, 2.8610)
    WEIGHTS: Final[Matrix] = ((1.0000, 0.0000, 0.0000), (0.3606, 0.6394, 0.0000), (0.0722, 0.0320, 0.8959))
    OUTPUT: Final[Matrix] = ((0.6038, 0.7434), (-0.0062, 0.6072), (3.4989, 2.2427))


class Document4:
    """Document 004: one and two heads, self- and cross-attention, seed 42."""

    TWO_HEADS: Final[Matrix] = (
        (1.0100, 1.0641, -0.7081, -0.8268),
        (0.2040, 0.7057, -0.7417, -0.9193),
        (3.4989, 2.2427, -0.7190, -0.8447),
    )

    @staticmethod
    def module(num_heads: int) -> MultiHeadAttention:
        """Heads drawn one after the other, each its query, key and value: the document's order."""
        torch.manual_seed(42)
        drawn = [tuple(nn.Linear(2, 2, bias=False) for _ in range(3)) for _ in range(num_heads)]
        return MultiHeadAttention.from_heads(drawn)  # type: ignore[arg-type]
