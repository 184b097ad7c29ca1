"""Check attention over a sharded sequence with ``ch.verify``: a function that gathers keys, and one with two faults.

    python examples/verify_on_ranks.py

`clearhead conform examples/verify_on_ranks.py:faulty_attention --ranks 2` checks the second one at the command line.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import clearhead as ch

QUICK_LAWS = ("output and gradients", "causal", "unequal parts", "determinism")


class Gathered(torch.autograd.Function):
    """The keys or values of all ranks, in order; backward gives each rank the sum of the gradients of its part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size(), dim=2)[dist.get_rank()]


def gathered_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks.

    Args:
        query: this rank's part ``[batch, heads, len / ranks, head_dim]``.
        key: this rank's part ``[batch, heads, len / ranks, head_dim]``.
        value: this rank's part ``[batch, heads, len / ranks, value_dim]``.
        is_causal: forbid keys after the query, counted from the first token of the sequence.
    """
    _refuse_unequal_parts(query.shape[2])
    return _attention(query, Gathered.apply(key), Gathered.apply(value), is_causal, dist.get_rank() * query.shape[2])


def faulty_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
    """``gathered_attention`` with two faults, as they happen in context parallelism."""
    _refuse_unequal_parts(query.shape[2])
    keys, values = (_gathered_without_gradient(part) for part in (key, value))
    # Fault 2: the causal mask counts queries from the first token of the rank's part.
    return _attention(query, keys, values, is_causal, 0)


def _gathered_without_gradient(part: Tensor) -> Tensor:
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.detach().contiguous())
    # Fault 1: a rank's own part receives the gradient of its own queries alone.
    parts[dist.get_rank()] = part
    return torch.cat(parts, dim=2)


def _attention(query: Tensor, keys: Tensor, values: Tensor, is_causal: bool, first: int) -> Tensor:
    if not is_causal:
        return F.scaled_dot_product_attention(query, keys, values)
    q_pos = torch.arange(first, first + query.shape[2])
    allowed = torch.arange(keys.shape[2]) <= q_pos[:, None]
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=allowed)


def _refuse_unequal_parts(length: int) -> None:
    """Every rank must refuse, or the others would wait for it."""
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([length]))
    if len({int(one) for one in lengths}) > 1:
        raise NotImplementedError("all ranks need parts of one length")


def main() -> None:
    parser = argparse.ArgumentParser(description="Check two attention functions on two ranks.")
    parser.add_argument("--quick", action="store_true", help="try a few laws")
    laws = QUICK_LAWS if parser.parse_args().quick else None
    for function in (gathered_attention, faulty_attention):
        print(f"{ch.verify(ch.verify.Distributed(function, ranks=2), laws=laws)}\n")


if __name__ == "__main__":
    main()
