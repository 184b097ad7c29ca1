"""Where the error of an encoder in bfloat16 comes from: BERT base on random weights, against float64.

    python benchmarks/residual_stream.py

Each row rounds some tensors to bfloat16 and computes in float32: the residual stream (sums and the norms of them), the
other outputs of operations, the operands of GEMMs. The last rows are models. An error is the largest one relative to
the largest exact output.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel

import clearhead as ch

Rounding = Callable[[Tensor], Tensor]


def exact(x: Tensor) -> Tensor:
    """Not rounded."""
    return x


def rounded(x: Tensor) -> Tensor:
    """The nearest bfloat16, in the dtype of ``x``."""
    return x.to(torch.bfloat16).to(x.dtype)


def encode(model: BertModel, ids: Tensor, residual: Rounding, outputs: Rounding, operands: Rounding) -> Tensor:
    """The model's last hidden states, ``[batch, len, width]``, with three kinds of tensors rounded."""
    heads = model.config.num_attention_heads

    def linear(x: Tensor, layer: nn.Linear) -> Tensor:
        return outputs(F.linear(operands(x), operands(layer.weight), layer.bias))

    def normed(x: Tensor, norm: nn.LayerNorm) -> Tensor:
        return residual(norm(residual(x)))

    embeddings = model.embeddings
    places = torch.arange(ids.shape[1])
    x = embeddings.word_embeddings(ids) + embeddings.position_embeddings(places)
    x = normed(x + embeddings.token_type_embeddings.weight[0], embeddings.LayerNorm)
    for layer in model.encoder.layer:
        core = layer.attention.self
        query, key, value = (
            operands(linear(x, each)).unflatten(-1, (heads, -1)).transpose(1, 2)
            for each in (core.query, core.key, core.value)
        )
        weights = operands((query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1))
        context = outputs(weights @ value).transpose(1, 2).flatten(-2)
        attended = layer.attention.output
        x = normed(x + linear(context, attended.dense), attended.LayerNorm)
        hidden = outputs(F.gelu(linear(x, layer.intermediate.dense)))
        x = normed(x + linear(hidden, layer.output.dense), layer.output.LayerNorm)
    return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2, help="sequences of 128 tokens (default: 2)")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = BertModel(BertConfig(), add_pooling_layer=False).eval()
    ids = torch.randint(0, 30_000, (options.batch, 128))
    with torch.no_grad():
        reference = encode(copy.deepcopy(model).double(), ids, exact, exact, exact)
        swapped = copy.deepcopy(model).bfloat16()
        ch.swap(swapped)
        rows = {
            "residual stream, outputs and operands": encode(model, ids, rounded, rounded, rounded),
            "residual stream": encode(model, ids, rounded, exact, exact),
            "outputs and operands": encode(model, ids, exact, rounded, rounded),
            "operands": encode(model, ids, exact, exact, rounded),
            "transformers, bfloat16": copy.deepcopy(model).bfloat16()(ids).last_hidden_state,
            "transformers, float32 under autocast": _under_autocast(model, ids),
            "clearhead, bfloat16": swapped(ids).last_hidden_state,
        }
    print("| rounded to bfloat16 | error |\n|---|---|")
    for name, output in rows.items():
        error = (output.double() - reference).abs().max() / reference.abs().max()
        print(f"| {name} | {error:.4f} |")


def _under_autocast(model: BertModel, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        states: Tensor = model(ids).last_hidden_state
    return states


if __name__ == "__main__":
    main()
