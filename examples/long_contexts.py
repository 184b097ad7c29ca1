"""Attention, its statistics and its cache at 16,384 tokens, with the memory that each call takes.

    python examples/long_contexts.py
    python examples/long_contexts.py --length 65536   # any length that the time allows
    python examples/long_contexts.py --quick          # 4,096 tokens

Memory is the growth of the process's peak resident set during a call, as Linux reports it; on other systems it is left
out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import clearhead as ch
from clearhead.benchmark.memory import peak_extra_bytes

HEADS, HEAD_DIM = 4, 64


def measured(name: str, call: Callable[[], ch.Observation | Tensor]) -> None:
    """Print how long ``call`` takes, and by how much it raises the process's peak memory."""
    extra = peak_extra_bytes(call)
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    memory = "" if extra is None else f"  {extra / 2**20:8.0f} MiB"
    print(f"{name:<34} {seconds:7.2f} s{memory}")


def statistics(length: int) -> ch.Observation:
    """Every statistic of a causal attention over ``length`` tokens, in one call."""
    query, key, value = torch.randn(3, 1, HEADS, length, HEAD_DIM)
    measured("causal attention", lambda: ch.attention(query, key, value, mask=ch.Causal()))
    want = ch.Want(
        lse=True,  # log-sum-exp of each row of scores
        entropy=True,  # how spread each row of weights is
        top_k=4,  # the four largest weights of each row and their keys
        received=True,  # attention that each key receives from all queries
        sink=4,  # weight on the first four keys
        distance=True,  # mean distance between query and key
        heatmap=length // 64,  # largest and mean weight in 64 x 64 tiles
        rows=[length - 1],  # the exact weights of the last query
    )
    observe = partial(ch.observe_attention, query, key, value, mask=ch.Causal(), want=want)
    measured("the same with every statistic", observe)
    print(f"all weights would take {HEADS * length * length * 4 / 2**20:,.0f} MiB")
    return observe()


def windows(length: int) -> None:
    """A window and the first few tokens: work grows with the length, not with its square."""
    mask = ch.Causal() & (ch.Window(before=511) | ch.Prefix(4))
    print((ch.Causal() & (ch.Window(before=2) | ch.Prefix(1))).picture(8, 8))
    query, key, value = torch.randn(3, 1, HEADS, length, HEAD_DIM)
    measured("512 keys before and 4 first ones", partial(ch.attention, query, key, value, mask=mask))
    query, key, value = torch.randn(3, 1, HEADS, 2 * length, HEAD_DIM)
    measured("the same, twice the length", partial(ch.attention, query, key, value, mask=mask))


@torch.no_grad()
def cached(length: int) -> None:
    """Read a prompt in chunks into a KV cache, decode a token, and compare with one call."""
    attention = ch.nn.MultiHeadAttention(256, num_heads=4, num_kv_heads=1, rotary=True).eval()
    tokens, mask = torch.randn(1, length, 256), ch.Causal() & ch.Window(before=511)
    whole = attention(tokens, mask=mask)
    cache = ch.KVCache()
    for chunk in tokens[:, :-1].split(1024, dim=1):
        last = attention(chunk, mask=mask, cache=cache)
    last = attention(tokens[:, -1:], mask=mask, cache=cache)
    assert cache.key is not None
    assert cache.value is not None
    mib = (cache.key.nbytes + cache.value.nbytes) / 2**20
    print(f"{cache}: {mib:.0f} MiB, a quarter of what 4 key heads would take")
    print(f"largest difference to one call: {(last - whole[:, -1:]).abs().max():.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Attention over many tokens, and the memory it takes.")
    parser.add_argument("--length", type=int, default=16_384, help="number of tokens")
    parser.add_argument("--quick", action="store_true", help="4,096 tokens")
    chosen = parser.parse_args()
    length = 4096 if chosen.quick else chosen.length
    torch.manual_seed(0)
    print(f"{length:,} tokens, {HEADS} heads of {HEAD_DIM}, float32")
    observed = statistics(length)
    for name in ("entropy", "received", "top_indices", "heatmap_mean", "rows"):
        print(f"  {name:<13} {list(getattr(observed, name).shape)}")
    windows(length)
    cached(length)


if __name__ == "__main__":
    main()
