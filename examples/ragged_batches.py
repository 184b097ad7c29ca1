"""Batches of sequences of different lengths: packed end to end, or padded with lengths, with one result.

python examples/ragged_batches.py
python examples/ragged_batches.py --quick     # shorter sequences
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import clearhead as ch


def packed_by_hand(lengths: list[int]) -> None:
    """One attention module over packed sequences gives each sequence what it gives it alone."""
    attention = ch.nn.MultiHeadAttention(64, num_heads=4)
    batch = torch.randn(len(lengths), max(lengths), 64)  # padding on the right
    packed, documents = ch.pack(batch, lengths)
    print(f"padded {list(batch.shape)}, packed {list(packed.shape)}")
    print(ch.Documents([2, 3, 1]) & ch.Causal())
    output = ch.unpack(attention(packed, mask=documents & ch.Causal()), lengths)
    for row, length in enumerate(lengths):
        alone = attention(batch[row : row + 1, :length], mask=ch.Causal())
        torch.testing.assert_close(output[row : row + 1, :length], alone, atol=1e-5, rtol=1e-5)
    padding = output[-1, lengths[-1] :].abs().max()
    print(f"unpacked {list(output.shape)}: each sequence as alone, {padding:.1f} at the padding")


def positions(lengths: list[int]) -> Tensor:
    """Each packed token's position within its own sequence, int ``[1, total]``."""
    packed, _ = ch.pack(torch.arange(max(lengths)).expand(len(lengths), -1), lengths)
    return packed


def packed_or_padded(lengths: list[int]) -> None:
    """``ch.Padding`` keeps the batch padded; the real tokens get the same outputs."""
    query = torch.randn(len(lengths), 4, max(lengths), 64)
    padded = ch.attention(query, query, query, mask=ch.Padding(lengths))
    tokens, documents = ch.pack(query.transpose(1, 2), lengths)  # pack takes [batch, len, ...]
    heads = tokens.transpose(1, 2)
    output = ch.attention(heads, heads, heads, mask=documents)
    packed = ch.unpack(output.transpose(1, 2), lengths).transpose(1, 2)
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    difference = (padded - packed).transpose(1, 2)[real].abs().max()
    print(f"largest difference at real tokens: {difference:.1e}")
    full = milliseconds(lambda: ch.attention(query, query, query, mask=ch.Padding(lengths)))
    short = milliseconds(lambda: ch.attention(heads, heads, heads, mask=documents))
    share = sum(lengths) / (len(lengths) * max(lengths))
    print(f"attention: {full:.1f} ms padded, {short:.1f} ms packed; {share:.0%} of it is real")


def milliseconds(run: Callable[[], object]) -> float:
    """The shortest of five wall-clock times of a call."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def classify(lengths: list[int], steps: int) -> None:
    """Modules of ``ch.nn`` take ``lengths``, pack before their blocks and unpack after them."""
    model = ch.nn.SequenceClassifier(
        vocab_size=50,
        embed_dim=64,
        num_heads=4,
        num_layers=2,
        num_classes=2,
        dropout=0.0,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    counts, longest = torch.tensor(lengths), max(lengths)
    for step in range(steps + 1):
        ids = torch.randint(1, 50, (len(lengths), longest))
        real = torch.arange(longest) < counts[:, None]
        target = ((ids == 7) & real).any(dim=1).long()  # does a 7 occur among the real tokens?
        loss = cross_entropy(model(ids, lengths=counts), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % max(1, steps // 4) == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}")
    with torch.no_grad():
        other = torch.where(real, ids, 0)  # other ids at the padding
        same = torch.equal(model.eval()(ids, lengths=counts), model(other, lengths=counts))
    print(f"what stands in the padding changes the logits: {not same}")


def torchs_encoder(lengths: list[int]) -> None:
    """A swapped ``nn.TransformerEncoder`` removes padding by torch's mask: ``True`` forbids."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(len(lengths), max(lengths), 64)
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ch.swap(model)
    with torch.no_grad():
        output = model(x, src_key_padding_mask=~real)
    print(f"largest output at padding after swap: {output[~real].abs().max():.1f}")
    print(f"Padding.from_tokens(real) is {ch.Padding.from_tokens(real)!r}")


def jagged(lengths: list[int]) -> None:
    """Attention and modules take jagged nested tensors; outputs and gradients are jagged with the same offsets."""
    sequences = [torch.randn(length, 64) for length in lengths]
    x = torch.nested.nested_tensor(sequences, layout=torch.jagged, requires_grad=True)
    encoder = ch.nn.Encoder(64, num_heads=4, num_layers=2)
    output = encoder(x, mask=ch.Causal())
    (output - x).values().square().mean().backward()
    for mine, sequence in zip(output.unbind(), sequences, strict=True):
        torch.testing.assert_close(mine, encoder(sequence, mask=ch.Causal()), atol=1e-5, rtol=1e-5)
    assert x.grad is not None
    print(f"jagged in, {output.layout} out, gradient {x.grad.layout}: each sequence as alone")


def varlen(lengths: list[int]) -> None:
    """torch's ``varlen_attn`` by its arguments: packed tokens, and where the sequences start and end."""
    query, key, value = torch.randn(3, sum(lengths), 4, 64)  # [total, heads, head_dim]
    bounds = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    causal = (-1, 0)  # all keys before, none after
    output = ch.functional.varlen_attn(
        query, key, value, bounds, bounds, max(lengths), max(lengths), window_size=causal
    )
    first = [part[: lengths[0]].transpose(0, 1) for part in (query, key, value)]
    torch.testing.assert_close(output[: lengths[0]].transpose(0, 1), ch.attention(*first, mask=ch.Causal()))
    print(f"varlen_attn of {len(lengths)} sequences: {list(output.shape)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Batches of sequences of different lengths.")
    parser.add_argument("--quick", action="store_true", help="short sequences and few training steps")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    lengths = [12, 3, 7, 9] if quick else [512, 100, 260, 64, 330, 40, 128, 200]
    packed_by_hand(lengths)
    print(f"positions of packed tokens {positions([3, 2]).tolist()}")
    packed_or_padded(lengths)
    classify([20, 5, 12, 9, 16, 3, 20, 11], steps=20 if quick else 100)
    torchs_encoder(lengths)
    jagged(lengths)
    varlen(lengths)


if __name__ == "__main__":
    main()
