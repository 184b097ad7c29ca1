"""The paged cache: decoding over pages against a contiguous cache, and 64 requests of mixed lengths.

``python benchmarks/paged.py [--quick] [--threads N]``: medians of interleaved calls of one run, process time.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Mapping

import torch

import clearhead as ch

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 64


def medians(calls: Mapping[str, Callable[[], object]], rounds: int, least: float = 2e-3) -> dict[str, float]:
    """Seconds of each call: the median over rounds in which the calls take turns, each until ``least`` seconds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            count, before = 0, time.process_time()
            while count == 0 or time.process_time() - before < least:
                call()
                count += 1
            times[name].append((time.process_time() - before) / count)
    return {name: statistics.median(each[1:]) for name, each in times.items()}


def decoding(batch: int, length: int, dtype: torch.dtype, block_size: int, rounds: int) -> None:
    """One token of each sequence, over blocks in random order and over contiguous keys and values."""
    cache = ch.PagedKVCache(
        1, batch * -(-length // block_size), KV_HEADS, HEAD_DIM, block_size=block_size, dtype=dtype
    )  # fmt: skip
    sequences = [cache.add() for _ in range(batch)]
    with cache.extend(dict.fromkeys(sequences, length)):
        pass
    pages = cache.key_pages(0), cache.value_pages(0)
    for part in pages:
        part.copy_(torch.randn(part.shape))
    table, lengths = cache.block_table(sequences)
    table = torch.randperm(table.numel()).view(table.shape).to(torch.int32)
    query = torch.randn(batch, HEADS, 1, HEAD_DIM).to(dtype)
    key, value = torch.randn(2, batch, KV_HEADS, length, HEAD_DIM).to(dtype)
    took = medians(
        {
            "contiguous": lambda: ch.attention(query, key, value, backend="native"),
            "paged": lambda: ch.functional.paged_attention(query, *pages, table, lengths),
        },
        rounds,
    )
    ratio = took["paged"] / took["contiguous"]
    print(
        f"| {batch} | {length} | {str(dtype)[6:]} | {block_size} | {took['contiguous'] * 1e3:.3f} ms "
        f"| {took['paged'] * 1e3:.3f} ms | {ratio:.2f} |"
    )


def requests(count: int, new_tokens: int, rounds: int) -> None:
    """Prompts of mixed lengths: one by one, as a padded batch, and over one paged cache."""
    model = ch.nn.LanguageModel(
        1000, 256, 8, 4, max_len=1024, positions="rotary", norm="rms", gated=True, activation="silu", bias=False,
        num_kv_heads=4,
    ).eval()  # fmt: skip
    drawn = torch.randint(10, 500, (count,), generator=torch.Generator().manual_seed(0))
    prompts = [torch.randint(0, 1000, (length,)) for length in drawn.tolist()]
    # Without masks for the padding, so the padded batch does less than it would have to.
    padded = torch.stack([torch.nn.functional.pad(each, (int(drawn.max()) - len(each), 0)) for each in prompts])
    calls: dict[str, Callable[[], object]] = {
        "one by one": lambda: [model.generate(each[None], new_tokens, temperature=0.0) for each in prompts],
        "padded batch": lambda: model.generate(padded, new_tokens, temperature=0.0),
        "paged": lambda: model.generate(prompts, new_tokens, temperature=0.0),
    }
    took = medians(calls, rounds)
    for name, seconds in took.items():
        print(f"| {name} | {seconds:.2f} s | {count * new_tokens / seconds:.0f} tokens/s |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(f"torch {torch.__version__}, clearhead {ch.__version__}, {platform.processor()}, {given.threads} threads\n")
    print("| batch | length | dtype | block | contiguous | paged | ratio |\n|---|---|---|---|---|---|---|")
    sizes = (
        [(1, 1000), (8, 1000)] if given.quick else [(1, 100), (1, 4000), (8, 1000), (8, 4000), (64, 100), (64, 1000)]
    )
    for dtype in (torch.float32, torch.bfloat16):
        for batch, length in sizes:
            for block_size in (16, 64):
                decoding(batch, length, dtype, block_size, 5 if given.quick else 25)
    print(
        "\n| 64 requests | time | speed |\n|---|---|---|"
        if not given.quick
        else "\n| requests | time | speed |\n|---|---|---|"
    )
    with torch.no_grad():
        requests(8 if given.quick else 64, 8 if given.quick else 32, 1 if given.quick else 3)


if __name__ == "__main__":
    main()
