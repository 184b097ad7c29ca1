"""A cached sequence in parts equals the whole sequence, and NaN in the padding reaches no real token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from transformers import DynamicCache

import clearhead as ch
from tests.net.families import FAMILIES, Family
from tests.net.modules import BATCH, HEADS, VOCAB, WIDTH, distinct, tokens

#: Tokens of each call that share a cache.
PARTS = (9, 1, 1, 3, 1, 2)
LENGTH = sum(PARTS)
CLOSE = {"rtol": 2e-5, "atol": 2e-5}

_LAYERS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "rotary, grouped heads": {"rotary": True, "num_kv_heads": 2},
    "one key head, a rule": {"num_kv_heads": 1, "scores": ch.Alibi(HEADS)},
    "sink and soft cap": {"scores": [ch.SoftCap(2.0), ch.Sink(torch.linspace(-1, 1, HEADS))]},
    "no bias": {"bias": False, "rotary": 1000.0},
}
_MORE: dict[str, dict[str, Any]] = {
    "gated, rms": {"gated": True, "norm": "rms", "activation": "silu", "bias": False, "rotary": True},
    "post-norm": {"norm_first": False, "activation": "relu"},
}


def _made(cls: type[nn.Module], *sizes: int, **options: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return distinct(cls(*sizes, **options)).eval()


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("mask", [ch.Causal(), ch.Window(4)], ids=["causal", "window"])
@pytest.mark.parametrize("options", _LAYERS.values(), ids=_LAYERS)
def test_attention_with_a_cache(options: dict[str, Any], mask: ch.Mask) -> None:
    module, x, cache = (
        _made(ch.nn.MultiHeadAttention, WIDTH, HEADS, **options),
        tokens(BATCH, LENGTH, WIDTH),
        ch.KVCache(),
    )
    parts = [module(part, mask=mask, cache=cache) for part in x.split(list(PARTS), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), module(x, mask=mask), **CLOSE)
    assert cache.length == LENGTH
    cache.truncate(LENGTH - 2)
    torch.testing.assert_close(module(x[:, -2:], mask=mask, cache=cache), parts[-1], **CLOSE)


@pytest.mark.parametrize("options", [*_LAYERS.values(), *_MORE.values()], ids=[*_LAYERS, *_MORE])
def test_decoder_block_with_caches(options: dict[str, Any]) -> None:
    module = _made(ch.nn.DecoderBlock, WIDTH, HEADS, dropout=0.0, cross_attention=True, **options)
    x, memory = tokens(BATCH, LENGTH, WIDTH), tokens(BATCH, 5, WIDTH, seed=2)
    padding = ch.Padding([5, 3])
    caches = {"cache": ch.KVCache(), "memory_cache": ch.KVCache()}
    parts = [module(part, memory=memory, memory_mask=padding, **caches) for part in x.split(list(PARTS), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), module(x, memory=memory, memory_mask=padding), **CLOSE)


@pytest.mark.parametrize("options", [*_LAYERS.values(), *_MORE.values()], ids=[*_LAYERS, *_MORE])
@pytest.mark.parametrize("cross", [False, True], ids=["alone", "with memory"])
def test_decoder_with_a_cache(cross: bool, options: dict[str, Any]) -> None:
    module = _made(ch.nn.Decoder, WIDTH, HEADS, 2, cross_attention=cross, **options)
    x, cache = tokens(BATCH, LENGTH, WIDTH), module.new_cache()
    given = {"memory": tokens(BATCH, 5, WIDTH, seed=2), "memory_lengths": [5, 2]} if cross else {}
    parts = [module(part, cache=cache, **given) for part in x.split(list(PARTS), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), module(x, **given), **CLOSE)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_language_model_with_a_cache(positions: str) -> None:
    model = _made(ch.nn.LanguageModel, VOCAB, WIDTH, HEADS, 2, max_len=32, positions=positions, num_kv_heads=2)
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    cache = model.new_cache()
    parts = [model(part, cache=cache) for part in ids.split(list(PARTS), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids), **CLOSE)
    assert torch.equal(model.generate(ids, 6, temperature=0.0), model.generate(ids, 6, temperature=0.0, cached=False))


GENERATING = [family for family in FAMILIES.values() if family.generates]


def _decoded(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    cache, first, parts = DynamicCache(config=model.config), 0, []
    for count in PARTS:
        end = first + count
        output = model(
            input_ids=ids[:, first:end],
            attention_mask=mask[:, :end],
            past_key_values=cache,
            use_cache=True,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, first:end],
        )
        parts.append(output.logits)
        first = end
    return torch.cat(parts, 1)


@pytest.mark.parametrize("padding", [0, 3], ids=["no padding", "left padding"])
@pytest.mark.parametrize(
    "family",
    [each for each in GENERATING if "decoder_input_ids" not in each.call(4, "none").arguments],
    ids=lambda family: family.name,
)
def test_swapped_decoder_with_a_cache_equals_the_original(family: Family, padding: int) -> None:
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    ours, theirs = _decoded(family.swapped(), ids, mask), _decoded(family.plain(), ids, mask)
    scale = float(theirs[mask.bool()].abs().max())
    torch.testing.assert_close(ours[mask.bool()] / scale, theirs[mask.bool()] / scale, rtol=0, atol=2e-5)


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("family", GENERATING, ids=lambda family: family.name)
def test_swapped_model_generates_the_tokens_of_the_original(family: Family, side: str) -> None:
    arguments = {
        name: value
        for name, value in family.call(8, side).arguments.items()
        if name not in ("decoder_input_ids", "use_cache")
    }
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    ours, theirs = (model.generate(**arguments, **options) for model in (family.swapped(), family.plain()))
    assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("kind", ["EncoderBlock", "Encoder", "MultiHeadAttention", "DecoderBlock"])
@pytest.mark.parametrize("hidden", [torch.nan, torch.inf], ids=["NaN", "infinity"])
def test_padding_values_reach_no_real_token(kind: str, hidden: float) -> None:
    sizes = (WIDTH, HEADS, 2) if kind == "Encoder" else (WIDTH, HEADS)
    module = _made(getattr(ch.nn, kind), *sizes, num_kv_heads=2)
    lengths = torch.tensor([9, 4])
    x, real = tokens(BATCH, 9, WIDTH), torch.arange(9) < lengths[:, None]
    spoilt = x.masked_fill(~real[..., None], hidden)
    given = {"lengths": lengths} if kind == "Encoder" else {"mask": ch.Padding(lengths)}
    assert torch.equal(module(spoilt, **given)[real], module(x, **given)[real])


@pytest.mark.parametrize("length", [1, 2, 17, 65])
def test_fully_masked_row_gives_the_output_bias(length: int) -> None:
    module = _made(ch.nn.MultiHeadAttention, WIDTH, HEADS)
    allowed = torch.ones(length, length, dtype=torch.bool)
    allowed[0] = False
    output = module(tokens(BATCH, length, WIDTH), mask=ch.Dense(allowed))
    assert torch.equal(output[:, 0], module.output_projection.bias.expand(BATCH, WIDTH))
