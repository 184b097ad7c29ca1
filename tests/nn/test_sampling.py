"""Random numbers of generation belong to (seed, prompt, step): what shares a batch changes no text."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.nn.generation import Sampler
from tests.agreement import needs_native


def _sampler(seed: int | None = 3, temperature: float = 1.0, top_k: int | None = None) -> Sampler:
    return Sampler("generate", temperature=temperature, top_k=top_k, seed=seed)


def _prompts(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 50, (length,), generator=generator) for length in lengths]


def test_key_does_not_depend_on_other_prompts_or_on_the_place() -> None:
    prompts, sampler = _prompts(3, 5, 4), _sampler()
    keys = sampler.sequences(prompts)
    assert sampler.sequences(prompts[::-1]) == keys[::-1]
    assert [sampler.sequences([prompt])[0] for prompt in prompts] == keys
    assert len(set(keys)) == 3


def test_equal_prompts_have_different_keys() -> None:
    (prompt,), sampler = _prompts(4), _sampler()
    first, second = sampler.sequences([prompt, prompt])
    assert first != second
    assert sampler.sequences([prompt]) == [first]


@pytest.mark.parametrize("other", [{"seed": 4}, {"prompt": [1, 2, 4]}, {"prompt": [1, 2]}, {"prompt": [1, 2, 3, 0]}])
def test_key_depends_on_seed_and_prompt(other: dict[str, object]) -> None:
    key = _sampler().sequences([torch.tensor([1, 2, 3])])
    prompt = torch.tensor(other.get("prompt", [1, 2, 3]))
    assert _sampler(seed=other.get("seed", 3)).sequences([prompt]) != key  # type: ignore[arg-type]


def test_without_a_seed_torchs_generator_gives_one() -> None:
    prompts = _prompts(4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first, other = (_sampler(seed=None).sequences(prompts) for _ in range(2))
        torch.manual_seed(1)
        assert _sampler(seed=None).sequences(prompts) == first != other


def test_greedy_draw_takes_no_random_number() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        _sampler(seed=None, temperature=0.0).sequences(_prompts(4, 5))
        assert torch.equal(torch.get_rng_state(), before)


def test_tokens_are_drawn_with_their_probabilities() -> None:
    """Frequencies of 4,000 keys and of 4,000 steps, within four standard deviations."""
    sampler, draws = _sampler(), 4000
    probabilities = torch.tensor([0.5, 0.0, 0.2, 0.3])
    logits = probabilities.log()[None].expand(draws, -1)
    keys = sampler.sequences([torch.tensor([place]) for place in range(draws)])
    for sequences, steps in ((keys, [0] * draws), ([keys[0]] * draws, [*range(draws)])):
        drawn = sampler.draw(logits, sequences, steps)[:, 0].bincount(minlength=4) / draws
        deviation = (probabilities * (1 - probabilities) / draws).sqrt()
        assert bool(((drawn - probabilities).abs() <= 4 * deviation).all()), drawn
        assert drawn[1] == 0.0


def test_draw_is_that_of_each_row_alone() -> None:
    sampler, logits = _sampler(top_k=5), torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    keys, steps = sampler.sequences(_prompts(1, 2, 3, 4, 5, 6)), [0, 3, 1, 7, 2, 2]
    together = sampler.draw(logits, keys, steps)
    for row in range(6):
        part = slice(row, row + 1)
        assert torch.equal(sampler.draw(logits[part], keys[part], steps[part]), together[part])


class Uniform(ch.nn.LanguageModel):
    """A model whose scores do not depend on anything, so that only random numbers decide."""

    def __init__(self) -> None:
        super().__init__(50, 16, 2, 1, max_len=64)
        nn.init.zeros_(self.head.weight)


def test_generated_text_does_not_depend_on_the_batch() -> None:
    model, prompts = Uniform(), _prompts(4, 9, 1, 4)
    together = model.generate(prompts, 12, seed=5)
    for prompt, text in zip(prompts, together, strict=True):
        assert torch.equal(model.generate([prompt], 12, seed=5)[0], text)
        assert torch.equal(model.generate(prompt[None], 12, seed=5)[0], text)
    stacked = torch.stack([prompts[0], prompts[3]])
    assert torch.equal(model.generate(stacked, 12, seed=5)[1], together[3])
    assert len({tuple(text[-12:].tolist()) for text in together}) == 4


def test_prompts_that_start_later_have_the_same_text() -> None:
    """With blocks for two sequences at a time, the others start when those have ended."""
    model, prompts = Uniform(), _prompts(4, 9, 3, 6, 5)
    cache = model.new_paged_cache(num_blocks=2, block_size=32)
    texts = model.generate(prompts, 10, seed=5, cache=cache, stop=7)
    for one, other in zip(texts, model.generate(prompts, 10, seed=5, stop=7), strict=True):
        assert torch.equal(one, other)


def test_target_of_an_encoder_decoder_does_not_depend_on_the_batch() -> None:
    model = ch.nn.EncoderDecoder(50, 50, 16, 2, 1, max_len=32)
    nn.init.zeros_(model.head.weight)
    sources = torch.nn.utils.rnn.pad_sequence(_prompts(7, 4), batch_first=True)
    together = model.generate(sources, 9, start=1, source_lengths=[7, 4], temperature=1.0, seed=2)
    alone = model.generate(sources[1:, :4], 9, start=1, temperature=1.0, seed=2)
    assert torch.equal(together[1:], alone)


# ---- the same logits at every step ----------------------------------------------------------------------------------


def _steps(model: ch.nn.LanguageModel, prompts: list[Tensor], size: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Greedy texts and the logits of every step, in batches of a size."""
    results = []
    for first in range(0, len(prompts), size):
        batch, logits = prompts[first : first + size], list[Tensor]()
        handle = model.head.register_forward_hook(lambda module, args, output, logits=logits: logits.append(output[0]))
        try:
            texts = model.generate(batch, count, temperature=0.0)
        finally:
            handle.remove()
        results += [(text, torch.stack([step[place] for step in logits])) for place, text in enumerate(texts)]
    return results


def _check_steps(prompts: int, count: int, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = ch.nn.LanguageModel(
        50, 64, 4, 2, max_len=512, positions="rotary", norm="rms", gated=True, activation="silu", num_kv_heads=2
    ).to(dtype)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 60, (prompts,), generator=generator).tolist()
    given = [torch.randint(0, 50, (length,), generator=generator) for length in lengths]
    with ch.invariant():
        alone = _steps(model, given, 1, count)
        for size in sizes:
            for place, (one, other) in enumerate(zip(alone, _steps(model, given, size, count), strict=True)):
                assert torch.equal(one[1], other[1]), f"logits of prompt {place} in batches of {size}"
                assert torch.equal(one[0], other[0])


@needs_native
def test_greedy_logits_are_equal_alone_and_in_a_batch() -> None:
    _check_steps(4, 6, (4,), torch.float32)


@needs_native
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_logits_of_256_tokens_are_equal_in_all_batches(dtype: torch.dtype) -> None:
    _check_steps(64, 256, (8, 64), dtype)


@needs_native
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_logits_of_a_swapped_model_are_equal_in_all_batches_and_with_prompt_lookup(dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 60, (64,), generator=generator).tolist()
    prompts = [torch.randint(2, 50, (length,), generator=generator) for length in lengths]
    options = {"max_new_tokens": 256, "min_new_tokens": 256, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}

    def steps(size: int, **others: int) -> list[tuple[Tensor, Tensor]]:
        results = []
        for first in range(0, len(prompts), size):
            batch = prompts[first : first + size]
            longest = max(map(len, batch))
            ids = torch.stack([nn.functional.pad(prompt, (longest - len(prompt), 0)) for prompt in batch])
            mask = torch.stack([torch.arange(longest) >= longest - len(prompt) for prompt in batch]).long()
            done = model.generate(ids, attention_mask=mask, **options, **others)
            logits = torch.stack(done.logits, dim=1)
            texts = done.sequences[:, longest:]
            results += [(text, logits[place]) for place, text in enumerate(texts)]
        return results

    with ch.invariant():
        ch.swap(model)
        alone = steps(1)
        ways = {"batches of 8": steps(8), "a batch of 64": steps(64), "lookup": steps(1, prompt_lookup_num_tokens=3)}
    for name, way in ways.items():
        for place, (one, other) in enumerate(zip(alone, way, strict=True)):
            assert torch.equal(one[0], other[0]), f"text of prompt {place} with {name}"
            assert torch.equal(one[1], other[1]), f"logits of prompt {place} with {name}"
