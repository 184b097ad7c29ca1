"""Models of transformers, observed and edited while they run and while they generate."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

import clearhead as ch
from clearhead.observe import attention_layers, head_effects, rollout

transformers: Any = pytest.importorskip("transformers")

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2}


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, intermediate_size=32, num_key_value_heads=2, max_position_embeddings=32)
    model = transformers.LlamaForCausalLM(config).eval()
    eager = transformers.LlamaForCausalLM._from_config(deepcopy(config), attn_implementation="eager").eval()
    eager.load_state_dict(model.state_dict())
    ch.swap(model)
    return model, eager


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(1, 40, (2, 7), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("gradients", [False, True])
def test_statistics_match_eager_weights_and_output_is_unmodified(ids: torch.Tensor, gradients: bool) -> None:
    model, eager = llama()
    assert list(attention_layers(model)) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    with torch.set_grad_enabled(gradients):
        plain = model(ids).logits
        with ch.observe(model, ch.Want(entropy=True, received=True, rows=[6], distance=True)) as records:
            watched = model(ids).logits
    assert torch.equal(plain, watched)
    with torch.no_grad():
        squares = eager(ids, output_attentions=True).attentions
    for place, weights in enumerate(squares):
        record = records[place]
        assert record.rows is not None
        assert record.received is not None
        assert record.entropy is not None
        assert record.distance is not None
        torch.testing.assert_close(record.rows[:, :, 0], weights[:, :, 6], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(record.received, weights.sum(-2), rtol=1e-4, atol=1e-5)
        entropy = -torch.special.xlogy(weights, weights).sum(-1)
        torch.testing.assert_close(record.entropy, entropy, rtol=1e-3, atol=1e-5)
        away = (torch.arange(7)[:, None] - torch.arange(7)).abs()
        torch.testing.assert_close(record.distance, (weights * away).sum(-1), rtol=1e-4, atol=1e-5)


def test_generate_records_the_prompt_and_each_token_by_position(ids: torch.Tensor) -> None:
    model, eager = llama()
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with ch.observe(model, ch.Want(distance=True, rows=[8]), keep="all") as records:
        longer = model.generate(ids, **options)
    assert torch.equal(longer, eager.generate(ids, **options))
    calls = records.calls(1)
    assert [call.queries for call in calls] == [tuple(range(7)), (7,), (8,)]
    with torch.no_grad():
        weights = eager(longer[:, :-1], output_attentions=True).attentions[1]
    assert calls[2].rows is not None
    assert calls[2].distance is not None
    torch.testing.assert_close(calls[2].rows[:, :, 0], weights[:, :, 8], rtol=1e-4, atol=1e-6)
    away = 8.0 - torch.arange(9)
    torch.testing.assert_close(calls[2].distance[..., 0], (weights[:, :, 8] * away).sum(-1), rtol=1e-4, atol=1e-5)


def test_switched_off_head_equals_zeroed_projection_columns(ids: torch.Tensor) -> None:
    model, eager = llama()
    effects = head_effects(model, ids)
    assert [list(effect.shape) for effect in effects.values()] == [[4], [4]]
    assert min(float(effect.min()) for effect in effects.values()) > 0.0
    with torch.no_grad(), ch.trace(model) as traced:
        traced.switch_off(2, layers=0)
        edited = model(ids).logits
    eager.model.layers[0].self_attn.o_proj.weight.data[:, 8:12] = 0.0
    with torch.no_grad():
        torch.testing.assert_close(edited, eager(ids).logits, rtol=1e-4, atol=1e-5)
    assert rollout(traced, 6).sum(-1).allclose(torch.ones(2, 1))


def test_masks_are_unmodified_under_a_trace(ids: torch.Tensor) -> None:
    model, _ = llama()
    with torch.no_grad(), ch.trace(model) as traced:
        model(ids)
    assert [repr(traced[layer].problem.mask) for layer in range(2)] == ["Causal()"] * 2


def test_left_padding_is_not_real(ids: torch.Tensor) -> None:
    model, _ = llama()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad(), ch.trace(model) as traced:
        model(ids, attention_mask=mask)
    assert torch.equal(traced[0].real, mask.bool())
    assert rollout(traced).sum(-1).allclose(torch.ones(2, 1))
