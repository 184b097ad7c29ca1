"""Masks of your own: combined ones, a function, what the kernels make of them, offsets, and queries without keys.

python examples/write_a_mask.py
python examples/write_a_mask.py --quick     # shorter sequences for the timings
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

import clearhead as ch


def algebra() -> None:
    """Masks combine with ``&``, ``|`` and ``~``, and print themselves."""
    print(ch.Causal() & ch.Window(before=2))  # the last three keys
    print((ch.Causal() | ch.Prefix(3)).picture(6, 6))  # a prefix language model
    print((ch.Documents([3, 5]) & ch.Causal()).picture())  # two packed documents, each causal
    print((ch.Window(3, 3) & ~ch.Window(0, 0)).picture(6, 6))  # not the token itself


def sentences(sentence: Tensor) -> ch.Mask:
    """Each token attends to its own sentence and to the first token of every earlier one.

    Args:
        sentence: int ``[len]``, the number of each token's sentence, in order.
    """
    first = torch.ones_like(sentence, dtype=torch.bool)
    first[1:] = sentence[1:] != sentence[:-1]

    def allowed(batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        same = sentence[q_pos] == sentence[k_pos]
        return (same | first[k_pos]) & (k_pos <= q_pos)

    return ch.MaskFunction(allowed)


def by_head(before: Tensor) -> ch.Mask:
    """A causal window of its own for each head.

    Args:
        before: int ``[heads]``, how many keys back a head looks.
    """

    def allowed(batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        distance = q_pos - k_pos
        return (distance >= 0) & (distance <= before[head])

    return ch.MaskFunction(allowed)


def has_intervals(mask: ch.Mask, length: int) -> bool:
    """Whether a mask tells the keys of a query as a few intervals."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    return mask.intervals(zero, zero, torch.arange(length).view(1, 1, -1, 1), length) is not None


def timed(name: str, mask: ch.Mask | None, length: int) -> None:
    """How long attention under a mask takes, and which backend runs it."""
    query, key, value = torch.randn(3, 1, 4, length, 64, generator=torch.Generator().manual_seed(0))
    report = ch.explain_dispatch(query, key, value, mask=mask)
    ch.attention(query, key, value, mask=mask)
    start = time.perf_counter()
    ch.attention(query, key, value, mask=mask)
    milliseconds = 1e3 * (time.perf_counter() - start)
    how = "all keys" if mask is None else "intervals" if has_intervals(mask, length) else "a table"
    print(f"  {name:<24} {report.choice:<8} {how:<10} {milliseconds:8.1f} ms")


def skipped_work(length: int) -> None:
    """What the kernels skip under masks that tell intervals, and under one that does not."""
    print(f"attention over {length:,} tokens, 4 heads")
    timed("everything", None, length)
    timed("Causal()", ch.Causal(), length)
    timed("Causal() & Window(127)", ch.Causal() & ch.Window(127), length)
    timed("by_head, 127 back", by_head(torch.full((4,), 127)), length)
    timed("sentences of 64", sentences(torch.arange(length) // 64), length)


def offsets() -> None:
    """Three new queries at the end of ten keys: ``query_offset`` says where they stand."""
    query, key = torch.randn(1, 1, 3, 8), torch.randn(1, 1, 10, 8)
    try:
        ch.attention(query, key, key, mask=ch.Causal())
    except ch.MaskError as error:
        print(error)
    last = ch.attention(query, key, key, mask=ch.Causal(), query_offset=7)
    print(ch.Causal().dense(3, 10, query_offset=7).int().tolist())
    print(f"output {list(last.shape)}")


def empty_rows() -> None:
    """A query that may attend to nothing gives 0, and its gradient is 0."""
    query = torch.randn(1, 1, 4, 8, requires_grad=True)
    key = torch.randn(1, 1, 4, 8)
    mask = ch.Documents(ids=torch.tensor([0, 0, -1, -1]))  # a negative number is padding
    output = ch.attention(query, key, key, mask=mask)
    output.square().sum().backward()
    assert query.grad is not None
    for name, tensor in (("output", output), ("gradient", query.grad)):
        largest = tensor.abs().amax(dim=-1).flatten().tolist()
        print(f"largest {name} of each query {[f'{x:.2f}' for x in largest]}")


def check(mask: ch.Mask, length: int) -> None:
    """The kernels agree with the formula over the mask's table."""
    query, key, value = torch.randn(3, 1, 4, length, 16, dtype=torch.float64)
    forbidden = ~mask.dense(length, length, num_heads=4)
    weights = (query @ key.mT / 4).masked_fill(forbidden, -torch.inf).softmax(-1)
    output = ch.attention(query.float(), key.float(), value.float(), mask=mask)
    difference = (output - weights @ value).abs().max()
    print(f"largest difference to the formula in float64: {difference:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Masks of your own.")
    parser.add_argument("--quick", action="store_true", help="1,024 tokens for the timings")
    length = 1024 if parser.parse_args().quick else 4096
    torch.manual_seed(0)
    algebra()
    print(sentences(torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])).picture(8, 8))
    print(by_head(torch.tensor([1, 4])).dense(1, 6, num_heads=2, query_offset=5).int().tolist())
    skipped_work(length)
    offsets()
    empty_rows()
    check(sentences(torch.arange(200) // 17), 200)
    check(by_head(torch.tensor([0, 3, 30, 300])), 200)


if __name__ == "__main__":
    main()
