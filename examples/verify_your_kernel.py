"""Check attention functions with ``ch.verify``: a blockwise one, and the same with two faults.

    pip install "clearhead[verify]"     # Hypothesis, which makes failing examples small
    python examples/verify_your_kernel.py

`clearhead conform examples/verify_your_kernel.py:faulty_attention` checks the second one at the command line.
"""

from __future__ import annotations

import argparse
import math
from importlib.util import find_spec

import torch
from torch import Tensor

import clearhead as ch

BLOCK = 4
QUICK_LAWS = ("output", "mask polarity", "empty rows", "no leak from the future")


def blockwise_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention with a running softmax over blocks of keys, called as torch's function is.

    Args:
        query: ``[batch, heads, q_len, head_dim]``.
        key: ``[batch, heads, k_len, head_dim]``.
        value: ``[batch, heads, k_len, value_dim]``.
        attn_mask: bool, True may attend; or float, added to the scores.
        is_causal: forbid keys after the query, counted from the first of both.
        scale: factor on the scores, ``1 / sqrt(head_dim)`` by default.
    """
    q_len, k_len = query.shape[2], key.shape[2]
    bias = _bias(attn_mask, is_causal, q_len, k_len, query)
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    maximum = query.new_full((*query.shape[:3], 1), -torch.inf)
    normaliser = torch.zeros_like(maximum)
    output = query.new_zeros((*query.shape[:3], value.shape[3]))
    for start in range(0, k_len, BLOCK):
        block = slice(start, start + BLOCK)
        scores = query @ key[:, :, block].transpose(2, 3) * scale + bias[..., block]
        new_maximum = torch.maximum(maximum, scores.amax(dim=-1, keepdim=True))
        reference = new_maximum.masked_fill(new_maximum == -torch.inf, 0.0)  # a row that may attend to nothing so far
        weights = torch.exp(scores - reference)
        shrink = torch.exp(maximum - reference)
        normaliser = normaliser * shrink + weights.sum(dim=-1, keepdim=True)
        output = output * shrink + weights @ value[:, :, block]
        maximum = new_maximum
    return output / normaliser.masked_fill(normaliser == 0.0, 1.0)


def _bias(attn_mask: Tensor | None, is_causal: bool, q_len: int, k_len: int, query: Tensor) -> Tensor:
    """What is added to the scores, of a shape that broadcasts to them."""
    bias = query.new_zeros(q_len, k_len)
    if is_causal:
        allowed = torch.ones(q_len, k_len, dtype=torch.bool, device=query.device).tril()
        bias = bias.masked_fill(~allowed, -torch.inf)
    if attn_mask is None:
        return bias
    if attn_mask.dtype == torch.bool:
        return bias + query.new_zeros(attn_mask.shape).masked_fill(~attn_mask, -torch.inf)
    return bias + attn_mask


def faulty_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """``blockwise_attention`` with two faults, as they happen in kernels."""
    # Fault 1: of more than one block of keys, those after the last full block are dropped.
    count = key.shape[2] // BLOCK * BLOCK or key.shape[2]
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*attn_mask.shape[:-1], key.shape[2])[..., :count]
        if attn_mask.dtype == torch.bool:
            # Fault 2: a large negative number in the place of minus infinity.
            attn_mask = query.new_zeros(attn_mask.shape).masked_fill(~attn_mask, -1e4)
    return blockwise_attention(query, key[:, :, :count], value[:, :, :count], attn_mask)


def main() -> None:
    parser = argparse.ArgumentParser(description="Check two attention functions.")
    parser.add_argument("--quick", action="store_true", help="try a few laws")
    laws = QUICK_LAWS if parser.parse_args().quick else None
    if find_spec("hypothesis") is None:
        print("skipped: the search for small examples needs the extra 'verify': pip install 'clearhead[verify]'")
    for function in (blockwise_attention, faulty_attention):
        print(f"{ch.verify(function, laws=laws)}\n")


if __name__ == "__main__":
    main()
