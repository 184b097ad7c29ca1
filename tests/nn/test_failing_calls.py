"""A call that fails, at its start or in the middle, leaves the caches that it was given unmodified."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.cache import KVCache
from clearhead.nn import Decoder, DecoderBlock, MultiHeadAttention

WIDTH, HEADS = 16, 4


def attention() -> tuple[nn.Module, dict[str, Any], Sequence[KVCache], str]:
    cache = KVCache()
    return MultiHeadAttention(WIDTH, HEADS), {"cache": cache}, [cache], "output_projection"


def block() -> tuple[nn.Module, dict[str, Any], Sequence[KVCache], str]:
    cache = KVCache()
    return DecoderBlock(WIDTH, HEADS), {"cache": cache}, [cache], "feedforward"


def crossing_block() -> tuple[nn.Module, dict[str, Any], Sequence[KVCache], str]:
    caches = KVCache(), KVCache()
    given = {"cache": caches[0], "memory_cache": caches[1], "memory": torch.randn(2, 7, WIDTH)}
    return DecoderBlock(WIDTH, HEADS, cross_attention=True), given, caches, "feedforward"


def decoder() -> tuple[nn.Module, dict[str, Any], Sequence[KVCache], str]:
    module = Decoder(WIDTH, HEADS, 2)
    cache = module.new_cache()
    return module, {"cache": cache}, cache.layers, "blocks.1.feedforward"


def contents(caches: Sequence[KVCache]) -> list[tuple[Any, ...]]:
    return [
        (cache.length, *(None if part is None else part.clone() for part in (cache.key, cache.value)))
        for cache in caches
    ]


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("tokens_before", [0, 3])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("make", [attention, block, crossing_block, decoder])
def test_caches_stay_unmodified(make: Callable[[], Any], gradients: bool, tokens_before: int) -> None:
    torch.manual_seed(0)
    module, given, caches, last = make()
    module.eval()
    with torch.set_grad_enabled(gradients):
        if tokens_before:
            module(torch.randn(2, tokens_before, WIDTH), **given)
        before = contents(caches)
        with pytest.raises(ch.ClearheadError):
            module(torch.randn(2, 2, WIDTH + 1), **given)
        handle = module.get_submodule(last).register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            module(torch.randn(2, 2, WIDTH), **given)
        handle.remove()
        for now, then in zip(contents(caches), before, strict=True):
            assert now[0] == then[0]
            assert all((a is b is None) or torch.equal(a, b) for a, b in zip(now[1:], then[1:], strict=True))
        module(torch.randn(2, 2, WIDTH), **given)
        assert caches[0].length == tokens_before + 2
