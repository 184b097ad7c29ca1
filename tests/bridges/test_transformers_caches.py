"""transformers' caches and ways of generating with swapped models, and its cache in pages."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from clearhead.bridges.transformers import PagedCache  # noqa: E402
from clearhead.integrations.transformers.calls import cache_in, cache_name, signature_of  # noqa: E402
from clearhead.integrations.transformers.paged import PagesTensor  # noqa: E402
from tests.bridges.hf_models import TRANSFORMERS_4  # noqa: E402

IDS = torch.randint(1, 50, (2, 20), generator=torch.Generator().manual_seed(0))
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "several": {"num_beams": 2, "num_return_sequences": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    config = transformers.LlamaConfig(**sizes, **ends, num_attention_heads=4, num_key_value_heads=2, **changes)
    return transformers.LlamaForCausalLM(config).eval()


def mistral() -> Any:
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=8, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.MistralForCausalLM(config).eval()


def generated(model: Any, way: str = "greedy", ids: Tensor = IDS, **options: Any) -> Tensor:
    ids = ids[:1] if "lookup" in way else ids
    if way == "prompt lookup" and TRANSFORMERS_4:
        pytest.skip("transformers 4 looks for an end token, and there is none")
    if "cache" in options:
        options[cache_name(model)] = options.pop("cache")
    output: Tensor = model.generate(ids, max_new_tokens=10, do_sample=False, **{**WAYS[way], **options})
    return output


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_paged_cache_generates_the_same_tokens(way: str, swapped: bool) -> None:
    model = llama()
    expected = generated(model, way)
    if swapped:
        ch.swap(model)
    cache = PagedCache(model.config, num_blocks=40, block_size=16)
    assert torch.equal(generated(model, way, cache=cache), expected)
    assert cache.pages is not None
    assert cache.pages.used_blocks <= 2 * len(cache.sequences)
    cache.reset()
    assert (cache.pages.used_blocks, cache.get_seq_length()) == (0, 0)


def test_attention_reads_the_pages_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for model in (llama(), mistral()):
        expected = generated(model)
        ch.swap(model)
        with monkeypatch.context() as patch:
            patch.setattr(PagesTensor, "elements", lambda self: pytest.fail("the pages were gathered"))
            cache = PagedCache(model.config, num_blocks=20, block_size=16)
            assert torch.equal(generated(model, cache=cache), expected)


def test_left_padding_over_pages_gives_the_same_tokens() -> None:
    model, mask = llama(), torch.ones_like(IDS)
    mask[0, :6] = 0
    expected = generated(model, attention_mask=mask)
    ch.swap(model)
    cache = PagedCache(model.config, num_blocks=20, block_size=16)
    assert torch.equal(generated(model, attention_mask=mask, cache=cache), expected)


def test_a_forked_cache_continues_a_prefix_and_leaves_it() -> None:
    model = llama()
    ch.swap(model)
    prefix = PagedCache(model.config, num_blocks=20, block_size=16)
    with torch.no_grad():
        model(IDS, **{cache_name(model): prefix})
    assert prefix.pages is not None
    for seed in range(2):
        more = torch.cat([IDS, torch.randint(1, 50, (2, 3), generator=torch.Generator().manual_seed(seed))], 1)
        fork = prefix.fork()
        assert prefix.pages.shared_blocks == 4
        assert torch.equal(generated(model, ids=more, cache=fork), generated(model, ids=more))
        fork.reset()
        assert (prefix.pages.used_blocks, prefix.get_seq_length()) == (4, 20)


def test_a_full_paged_cache_is_one_line_and_as_before() -> None:
    model = llama()
    cache = PagedCache(model.config, num_blocks=4, block_size=16)
    with torch.no_grad():
        model(IDS, **{cache_name(model): cache})
        with pytest.raises(ch.CacheFullError, match="must fit into the 0 free blocks"):
            model(IDS, **{cache_name(model): cache})
    assert cache.pages is not None
    assert (cache.get_seq_length(), cache.pages.used_blocks) == (20, 4)


@pytest.mark.parametrize("way", ["greedy", "beams", "prompt lookup"])
@pytest.mark.parametrize("implementation", ["dynamic", "static", "offloaded", "quantized"])
def test_transformers_own_caches_go_on_working_when_swapped(way: str, implementation: str) -> None:
    if implementation == "quantized" and not transformers.utils.is_optimum_quanto_available():
        pytest.skip("optimum-quanto is not installed")
    if implementation == "offloaded" and not torch.cuda.is_available():
        pytest.skip("transformers offloads to the CPU from a GPU alone")
    if implementation in ("static", "quantized") and way == "prompt lookup":
        pytest.skip("transformers takes no prompt lookup with this cache")
    model = llama()
    expected = generated(model, way, cache_implementation=implementation)
    ch.swap(model)
    assert torch.equal(generated(model, way, cache_implementation=implementation), expected)


def test_a_sliding_cache_and_assisted_decoding_go_on_working_when_swapped() -> None:
    for model in (mistral(), llama()):
        assistant = llama(rope_theta=500.0)
        plain, assisted = generated(model), generated(model, ids=IDS[:1], assistant_model=assistant)
        ch.swap(model), ch.swap(assistant)
        assert torch.equal(generated(model), plain)
        assert torch.equal(generated(model, ids=IDS[:1], assistant_model=assistant), assisted)


def batched(model: Any) -> list[list[int]]:
    """Tokens of two prompts by continuous batching."""
    if not hasattr(model, "generate_batch") or not hasattr(transformers, "ContinuousBatchingConfig"):
        pytest.skip("this transformers has no continuous batching with a size of its cache")
    small = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32)
    options = transformers.GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=49, pad_token_id=0)
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    done = model.generate_batch(prompts, generation_config=options, continuous_batching_config=small)
    return [list(each.generated_tokens) for each in done.values()]


def test_continuous_batching_says_in_one_line_which_implementations_it_takes() -> None:
    model = llama()
    ch.swap(model)
    names_others = r"clearhead is not supported for continuous batching\. Use .*'sdpa'"
    with pytest.raises(ValueError, match=names_others) as raised:
        batched(model)
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_continuous_batching_runs_by_sdpa_when_swapped_and_accelerated() -> None:
    """What the refusal names: the implementation "sdpa", whose calls ``accelerate`` serves."""
    model = llama()
    model.set_attn_implementation("sdpa")
    try:
        expected = batched(model)
    except MemoryError:
        pytest.skip("this release of transformers finds no memory for pages without a GPU")
    with ch.accelerate():
        assert batched(model) == expected
    ch.swap(model)
    model.set_attn_implementation("sdpa")
    assert batched(model) == expected


@pytest.mark.parametrize("swapped", [False, True])
def test_a_cache_is_found_whatever_its_name(swapped: bool) -> None:
    model, name = llama(), cache_name(llama())
    assert name in ("cache", "past_key_values")
    assert cache_name(torch.nn.Linear(2, 2)) is None
    if swapped:
        ch.swap(model)
        ch.freeze(model)
        assert cache_name(model) == name
    with torch.no_grad():
        cache = cache_in(model(IDS, use_cache=True))
        assert type(cache) is transformers.DynamicCache
        assert cache_in(model(IDS[:, :1], return_dict=False, **{name: cache})) is cache
        assert cache.get_seq_length() == 21
        assert cache_in(model(IDS, use_cache=False)) is None


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "RobertaForCausalLM"])
def test_laws_of_caches_apply_to_models_of_transformers(kind: str) -> None:
    # RoBERTa types the argument as tuples of tensors.
    make = getattr(transformers, kind)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = make.config_class(**sizes, num_attention_heads=4, is_decoder=True, bos_token_id=1, pad_token_id=0)
    report = ch.verify_model(make(config).eval(), laws=["chunks", "decoding"], lengths=[40, 23])
    assert "does not apply" not in [report[law].status for law in ("chunks", "decoding")]


@pytest.mark.parametrize(
    "kind", ["whisper.WhisperDecoder", "t5.T5Stack", "gpt_neo.GPTNeoBlock", "llama.LlamaAttention", "bark.BarkBlock"]
)
def test_a_cache_needs_no_type_to_be_recognised(kind: str) -> None:
    """A module whose cache is not recognised would count as one without."""
    family, name = kind.split(".")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    assert signature_of(getattr(module, name).forward).cache is not None
