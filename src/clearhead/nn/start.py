"""The first values of a model's weights."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import nn

__all__ = ["start_embeddings", "start_linears"]

_EMBEDDING_STD: Final = 0.02
#: The layers whose output is added to the residual.
_ADDED: Final = ("output_projection", "contract")


@torch.no_grad()
def start_embeddings(model: nn.Module) -> None:
    """Embeddings from a truncated normal distribution of deviation 0.02."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=_EMBEDDING_STD)


@torch.no_grad()
def start_linears(blocks: nn.ModuleList) -> None:
    """Linear layers from a normal distribution of deviation ``1 / sqrt(in_features)``, biases 0.

    The layers that add to the residual, two in a block, get ``1 / sqrt(2 * num_layers)`` of it, so that the sum does
    not grow with depth (Radford et al. 2019, section 2.3).
    """
    for name, module in blocks.named_modules():
        if isinstance(module, nn.Linear):
            added = name.rpartition(".")[2] in _ADDED
            std = module.in_features**-0.5 / (math.sqrt(2 * len(blocks)) if added else 1.0)
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
