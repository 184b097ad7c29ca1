"""Lesson 2: from twelve lines of NumPy to a classifier, and a comparison that measures what it says.

Source: document 002 ("How to Implement Self-Attention in PyTorch"). It draws its numbers without a seed, so what can
be checked is what must hold whatever they are: shapes, row sums, what a mask does, and agreement with torch's module.

Three things of the source are different here, on purpose:

- Its classifier attends to padding and averages it into the pooled vector. ``SequenceClassifier`` does neither.
- It fills forbidden scores with minus infinity, so a row without any allowed key becomes NaN. Here it is 0.
- Its comparison with torch's module times the construction of one of the two, warms neither up, runs one after the
  other, and lets torch's compute weights that nobody reads. ``compare`` below does none of that.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.bridges import from_zero_forbids
from clearhead.nn import EncoderBlock, MultiHeadAttention, SequenceClassifier


def in_numpy(tokens: np.ndarray, w_q: np.ndarray, w_k: np.ndarray, w_v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights and output, with nothing but matrix products. Weights multiply from the right here."""
    query, key, value = tokens @ w_q, tokens @ w_k, tokens @ w_v
    scores = query @ key.T / np.sqrt(query.shape[-1])
    # Without the row's largest score taken off, exp overflows as soon as a score passes 709.
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights, weights @ value


def same_in_a_module(w_q: np.ndarray, w_k: np.ndarray, w_v: np.ndarray) -> MultiHeadAttention:
    """The same weights in the production module. ``nn.Linear`` keeps weights transposed: [out, in]."""
    return MultiHeadAttention.from_heads([tuple(torch.from_numpy(w.T.copy()) for w in (w_q, w_k, w_v))])


def masked_weights(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Weights under a mask in the source's convention, where 0 forbids: the same polarity as clearhead's."""
    rows = range(query.shape[-2])
    return ch.observe_attention(query, key, value, mask=from_zero_forbids(mask), want=ch.Want(rows=rows)).rows  # type: ignore[return-value]


def encoder_block(embed_dim: int, num_heads: int) -> EncoderBlock:
    """The source's block norms the sums, as the 2017 paper does; the default here norms before (Xiong et al. 2020)."""
    return EncoderBlock(embed_dim, num_heads, norm_first=False)


def training_step(model: SequenceClassifier, ids: Tensor, lengths: Tensor, labels: Tensor) -> float:
    """One step of AdamW on one batch; the loss before it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = nn.functional.cross_entropy(model(ids, lengths=lengths), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def compare(
    *, batch: int = 32, length: int = 100, embed_dim: int = 512, num_heads: int = 8, warm_up: int = 3, rounds: int = 15
) -> dict[str, float]:
    """Median seconds of a forward pass: ours, and torch's module with and without weights, of equal parameters.

    Both are built before the clock starts, carry the same weights and run in evaluation mode without gradients. After
    ``warm_up`` calls of each they take turns, so that whatever else the machine does meets them alike.

    Raises:
        AssertionError: they do not compute the same.
    """
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(embed_dim, num_heads, batch_first=True).eval()
    ours = MultiHeadAttention.from_torch(theirs)
    x = torch.randn(batch, length, embed_dim)
    calls: dict[str, Callable[[], Tensor]] = {
        "MultiHeadAttention": lambda: ours(x),
        "nn.MultiheadAttention": lambda: theirs(x, x, x, need_weights=False)[0],
        "nn.MultiheadAttention, weights": lambda: theirs(x, x, x)[0],
    }
    taken: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        expected = theirs(x, x, x)[0]
        for call in calls.values():
            torch.testing.assert_close(call(), expected, atol=1e-5, rtol=1e-4)
        for turn in range(warm_up + rounds):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                if turn >= warm_up:
                    taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


def main() -> None:
    generator = np.random.default_rng(0)
    tokens, w_q, w_k, w_v = (generator.standard_normal(shape) for shape in ((3, 4), (4, 4), (4, 4), (4, 4)))
    weights, output = in_numpy(tokens, w_q, w_k, w_v)
    print(f"NumPy weights, each row sums to 1\n{weights.round(4)}\n")

    torch.manual_seed(0)
    x = torch.randn(1, 5, 64)
    print(
        f"weights under a causal mask\n{masked_weights(x, x, x, torch.tril(torch.ones(5, 5)))[0].round(decimals=3)}\n"
    )
    print(f"encoder block: {tuple(encoder_block(64, 4)(torch.randn(2, 10, 64)).shape)}")

    model = SequenceClassifier(vocab_size=1000, embed_dim=128, num_heads=4, num_layers=2, num_classes=2)
    ids, lengths = torch.randint(0, 1000, (8, 50)), torch.randint(5, 51, (8,))
    print(f"classifier: {tuple(model(ids, lengths=lengths).shape)}")
    print(f"loss of a training step: {training_step(model, ids, lengths, torch.randint(0, 2, (8,))):.4f}\n")

    times = compare()
    for name, seconds in times.items():
        print(f"{name:<32} {1e3 * seconds:8.2f} ms   {seconds / times['MultiHeadAttention']:.2f} x")
    print(f"\nNumPy's output\n{output.round(4)}\n")
    with torch.no_grad():
        result = same_in_a_module(w_q, w_k, w_v)(torch.from_numpy(tokens)).numpy().round(4)
    print(f"MultiHeadAttention\n{result}")


if __name__ == "__main__":
    main()
