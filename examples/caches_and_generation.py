"""KV caches and generation: with clearhead's modules, and with a swapped model of Hugging Face transformers.

    pip install "clearhead[hf]"
    python examples/caches_and_generation.py

All models are small and have random weights, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import clearhead as ch


@torch.no_grad()
def decode_step_by_step() -> float:
    """The largest difference between one call on ten tokens and ten calls on one token with a cache."""
    attention, x = ch.nn.MultiHeadAttention(64, 4, rotary=True).eval(), torch.randn(2, 10, 64)
    whole = attention(x, mask=ch.Causal())

    cache = ch.KVCache()
    steps = [attention(x[:, t : t + 1], mask=ch.Causal(), cache=cache) for t in range(10)]
    return float((torch.cat(steps, dim=1) - whole).abs().max())


class Attention(nn.Module):
    """A self-attention written by hand around ``ch.attention`` and ``ch.KVCache``."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.projections = nn.Linear(embed_dim, 3 * embed_dim)

    def forward(self, x: Tensor, cache: ch.KVCache) -> Tensor:
        split = self.projections(x).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [batch, heads, new, head_dim]
        first = cache.length  # the position of the call's first token
        key, value = cache.append(key, value)  # all tokens: [batch, heads, length, head_dim]
        output = ch.attention(query, key, value, mask=ch.Causal(), query_offset=first)
        return output.transpose(1, 2).flatten(2)


@torch.no_grad()
def take_drafts_back() -> float:
    """Decode three draft tokens in one call, reject two of them, and go on with another token."""
    attention, x = Attention(64, 4), torch.randn(1, 8, 64)
    cache = ch.KVCache()
    attention(x[:, :5], cache)  # the prompt
    attention(torch.randn(1, 3, 64), cache)  # drafts at positions 5, 6 and 7
    cache.truncate(5)  # none of them is accepted
    continued = attention(x[:, 5:], cache)

    whole = attention(x, ch.KVCache())
    return float((continued - whole[:, 5:]).abs().max())


@torch.no_grad()
def slide_a_window(window: int = 4) -> float:
    """Decode under a window of ``window`` keys, reading the last keys of the cache alone."""
    query, key, value = torch.randn(3, 1, 4, 12, 16)
    mask = ch.Causal() & ch.Window(window - 1)  # a token, and the `window - 1` tokens before it
    whole = ch.attention(query, key, value, mask=mask)

    cache, steps = ch.KVCache(), []
    for t in range(12):
        now = slice(t, t + 1)
        keys, values = cache.append(key[:, :, now], value[:, :, now])
        # Every key in the slice is inside the window of the newest token, so no mask is needed.
        steps.append(ch.attention(query[:, :, now], keys[:, :, -window:], values[:, :, -window:]))
    return float((torch.cat(steps, dim=2) - whole).abs().max())


def generate(new_tokens: int) -> None:
    """Continue two prompts with ``ch.nn.LanguageModel``, with and without a cache."""
    model = ch.nn.LanguageModel(vocab_size=100, embed_dim=64, num_heads=4, num_layers=2, max_len=32)
    prompt = torch.randint(0, 100, (2, 5))
    greedy = model.generate(prompt, new_tokens, temperature=0.0)
    assert torch.equal(greedy, model.generate(prompt, new_tokens, temperature=0.0, cached=False))
    drawn = model.generate(prompt, new_tokens, temperature=0.8, top_k=20, seed=1)
    assert torch.equal(drawn, model.generate(prompt, new_tokens, temperature=0.8, top_k=20, seed=1))
    print(f"LanguageModel.generate: {list(greedy.shape)}, equal with and without the cache, and for equal seeds")


def serve_many(new_tokens: int) -> None:
    """Continue prompts of different lengths from one paged cache, and two texts from one prompt."""
    model = ch.nn.LanguageModel(vocab_size=100, embed_dim=64, num_heads=4, num_layers=2, max_len=200)
    prompts = [torch.randint(0, 100, (length,)) for length in (5, 90, 40)]
    texts = model.generate(prompts, new_tokens, temperature=0.0)
    for prompt, text in zip(prompts, texts, strict=True):
        assert torch.equal(text, model.generate(prompt[None], new_tokens, temperature=0.0)[0])

    cache = model.eval().new_paged_cache(num_blocks=16, block_size=16)
    first = cache.add()
    with torch.no_grad():
        model(prompts[1][None], cache=cache.select([first]))
        second = cache.fork(first)  # shares the blocks of the prompt
        shared = cache.shared_blocks
        ids = torch.tensor([[7, 8], [9, 0]])
        model(ids, lengths=[2, 1], cache=cache.select([first, second]))
    print(f"paged cache: {[len(text) for text in texts]} tokens, {shared} blocks shared by a fork of 90 tokens")
    print(f"  {cache}")


def stream(model: ch.nn.LanguageModel, ids: Tensor, max_new_tokens: int) -> Iterator[int]:
    """Greedy tokens of one sequence, each as soon as it is there."""
    cache = model.new_cache()
    with torch.no_grad():
        logits = model(ids, cache=cache)
        for _ in range(max_new_tokens):
            token = logits[:, -1].argmax(-1, keepdim=True)
            yield int(token)
            logits = model(token, cache=cache)


def small_mistral() -> Any:
    """A model of Mistral's architecture with random weights and a window of 8 tokens."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return MistralForCausalLM(config).eval()


def generate_with_transformers(new_tokens: int) -> None:
    """``generate`` of a swapped model: padded to the left, with a sliding cache, and the tokens of the original."""
    model = small_mistral()
    ids = torch.tensor([[0, 0, 7, 8, 9], [3, 4, 5, 6, 7]])  # the first prompt is two tokens shorter
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
    padded = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    original = model.generate(**padded, **options)

    print(ch.swap(model))
    swapped = model.generate(**padded, return_dict_in_generate=True, **options)
    assert torch.equal(swapped.sequences, original)
    alone = model.generate(input_ids=ids[:1, 2:], attention_mask=torch.ones(1, 3).long(), **options)
    assert torch.equal(swapped.sequences[0, 2:], alone[0])

    layer = swapped.past_key_values.layers[0]
    print(f"transformers: {list(swapped.sequences.shape)}, equal to the original; alone and padded alike")
    print(f"  cache of layer 0: {type(layer).__name__}, {layer.keys.shape[2]} tokens of {layer.get_seq_length()}")


def main() -> None:
    parser = argparse.ArgumentParser(description="KV caches and generation.")
    parser.add_argument("--quick", action="store_true", help="generate fewer tokens")
    new_tokens = 12 if parser.parse_args().quick else 40
    torch.manual_seed(0)
    for check in (decode_step_by_step, take_drafts_back, slide_a_window):
        print(f"{check.__name__}: largest difference from one whole call {check():.1e}")
    generate(new_tokens)
    serve_many(new_tokens)
    model = ch.nn.LanguageModel(vocab_size=100, embed_dim=64, num_heads=4, num_layers=2, max_len=64).eval()
    print(f"stream: {list(stream(model, torch.tensor([[1, 2, 3]]), 8))}")
    if find_spec("transformers") is None:
        print("skipped: the part with transformers needs the extra 'hf': pip install 'clearhead[hf]'")
        return
    generate_with_transformers(new_tokens)


if __name__ == "__main__":
    main()
