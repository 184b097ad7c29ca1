"""The shapes in the modules' signatures hold: jaxtyping checks calls in a separate process."""

from __future__ import annotations

import pytest

from tests.processes import with_torch_alone

PROGRAM = """
import typing
# The hook decorates single methods, so beartype cannot resolve Self.
typing.Self = typing.Any
from jaxtyping import install_import_hook, TypeCheckError
modules = ["clearhead.nn", "clearhead.cache", "clearhead.packing", "clearhead.positions"]
modules += ["clearhead.integrations.torch.polarity"]
with install_import_hook(modules, "beartype.beartype"):
    import clearhead as ch
    import clearhead.nn as nn
    import clearhead.integrations.torch.polarity as border
    from clearhead.cache import KVCache
    from clearhead.packing import pack, unpack
    from clearhead.positions import sinusoidal
import torch

x, memory = torch.randn(2, 5, 8), torch.randn(2, 7, 6)
for options in ({}, {"output_projection": False, "head_dim": 3}, {"num_kv_heads": 1, "rotary": True}):
    attention = nn.MultiHeadAttention(8, 2, **options)
    for tokens in (x, x[0]):
        attention(tokens, mask=ch.Causal(), cache=KVCache())
        attention.project(tokens)
wide = nn.MultiHeadAttention(8, 2, key_dim=6, value_dim=6)
wide(x, memory), wide(x[0], memory[0]), wide(x, memory, cache=KVCache())
nn.EncoderBlock(8, 2)(x), nn.EncoderBlock(8, 2)(x[0]), nn.FeedForward(8)(x)
nn.DecoderBlock(8, 2, memory_dim=6)(x, memory=memory, cache=KVCache())
for lengths in (None, [5, 2], torch.tensor([0, 5])):
    nn.Encoder(8, 2, 1)(x, lengths=lengths)
    nn.Decoder(8, 2, 1, memory_dim=6)(x, lengths=lengths, memory=memory, memory_lengths=torch.tensor([7, 1]))
ids = torch.randint(0, 9, (2, 5))
for positions in ("learned", "sinusoidal", "rotary", "none"):
    for pooling in ("mean", "max", "mean_max", "first"):
        nn.SequenceClassifier(9, 8, 2, 1, 3, pooling=pooling, positions=positions)(ids, lengths=[5, 2])
    language = nn.LanguageModel(9, 8, 2, 1, positions=positions)
    language(ids, lengths=[5, 2]), language.generate(ids, 3)
translator = nn.EncoderDecoder(9, 9, 8, 2, 1)
translator(ids, ids[:, :3], source_lengths=[5, 2], target_lengths=torch.tensor([1, 3]))
translator.generate(ids, 3, start=0)
packed, _ = pack(x, [5, 2])
unpack(packed, torch.tensor([5, 2])), sinusoidal(torch.tensor([[1, 2]]), 4), sinusoidal(3, 4)
mask = torch.rand(5, 5) > 0.5
border.from_forbidden(mask), border.from_zero_forbids(mask), border.from_key_padding(mask)
border.from_additive(x, num_heads=2)
border.to_forbidden(ch.Causal(), 2, 3, query_offset=1)
try:
    nn.Encoder(8, 2, 1)(torch.zeros(2, 5, 8, dtype=torch.int64))
except TypeCheckError:
    print("checked")
"""


@pytest.mark.slow
def test_signatures_hold_and_are_checked() -> None:
    pytest.importorskip("jaxtyping")
    pytest.importorskip("beartype")
    done = with_torch_alone(PROGRAM)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "checked"
