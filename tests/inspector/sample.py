"""A small page made of random attention, and the library's own weights to hold it against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import clearhead as ch
from clearhead.inspector import FORMAT, VERSION, pack_floats

ROWS, COLUMNS, LAYERS, HEADS, WIDTH, EMBED = 3, 4, 2, 3, 5, 7
TOKENS = ROWS * COLUMNS
SCALE = 0.4


@dataclass(frozen=True)
class Sample:
    """A page's data, and the library's weights ``[example, layer, head, query, key]``."""

    data: dict[str, Any]
    weights: Tensor


def sample(examples: int = 3, seed: int = 0) -> Sample:
    """Random sequences; the first one is predicted wrongly."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weights = torch.zeros(examples, LAYERS, HEADS, TOKENS, TOKENS)
    made = []
    for place in range(examples):
        layers = []
        for layer in range(LAYERS):
            query, key, value = (2 * random(HEADS, TOKENS, WIDTH) for _ in range(3))
            seen = ch.observe_attention(query, key, value, want=ch.Want(lse=True, rows=range(TOKENS)), scale=SCALE)
            assert seen.rows is not None
            weights[place, layer] = seen.rows
            parts = {"query": query, "key": key, "value": value, "lse": seen.lse, "output": seen.output}
            packed = {name: pack_floats(part) for name, part in parts.items()}
            layers.append({**packed, "differences": pack_floats(np.full((5, HEADS, TOKENS), 1e-7 * (layer + 1)))})
        made.append({
            "name": f"Sequence {place}", "truth": 1 if place else 0, "predicted": 1, "probabilities": [0.25, 0.75],
            "values": [(token + place) % 5 for token in range(TOKENS)],
            "telling": {"layer": 1, "head": 2, "token": 3 + place},
            "influence": [[0.1 * head - 0.05 for head in range(HEADS)] for _ in range(LAYERS)], "layers": layers,
        })  # fmt: skip
    data = {
        "format": FORMAT, "version": VERSION, "title": "A sample", "made_by": "made by a test",
        "facts": [{"label": "Test accuracy", "value": "98.1%", "note": "352 of 359"}], "classes": ["no", "yes"],
        "grid": {"rows": ROWS, "columns": COLUMNS, "max_value": 4},
        "attention": {
            "num_layers": LAYERS, "num_heads": HEADS, "head_dim": WIDTH, "embed_dim": EMBED, "scale": SCALE,
        },
        "output_weights": [pack_floats(random(EMBED, HEADS * WIDTH)) for _ in range(LAYERS)], "examples": made,
    }  # fmt: skip
    return Sample(data, weights)
