"""Under ``set_invariant(True)`` a model's bits do not depend on how it is called, or the call raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.batch_part import BatchPart, batch_part
from clearhead.train import GradientSum
from tests.agreement import needs_native
from tests.bridges.hf_models import MODELS, eager, inputs, transformers
from tests.net.calls import as_tensor, equal
from tests.net.families import BATCH, FAMILIES, TOKENS, TRANSFORMERS_4, by_structure

pytestmark = needs_native

#: torch computes experts, and the convolutions in front of an encoder.
OUTSIDE = {"gpt-oss", "whisper"}
QUICK = {"llama", "gpt2", "bert", "bart"}


@pytest.fixture(autouse=True)
def one_order() -> Iterator[None]:
    with ch.invariant(), torch.no_grad():
        yield


def _names(*kinds: str) -> list[Any]:
    names = [name for name, row in MODELS.items() if row.kind in kinds and name not in OUTSIDE]
    return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in names]


def _swapped(name: str) -> Any:
    model = eager(name)
    ch.swap(model)
    return model


@pytest.mark.parametrize("configured", [True, False], ids=["layers from the config", "layers made when filled"])
@pytest.mark.parametrize("name", _names("decoder"))
def test_chunks_after_a_cache_have_the_bits_of_the_whole(name: str, configured: bool) -> None:
    model, ids = _swapped(name), inputs(name)["input_ids"]
    cache = transformers.DynamicCache(config=model.config) if configured else transformers.DynamicCache()
    chunks = [model(part, past_key_values=cache).logits for part in ids.split([7, 1, 5, 1, 1, 8], 1)]
    assert torch.equal(torch.cat(chunks, 1), model(ids).logits)


@pytest.mark.parametrize("name", _names("encoder-decoder", "audio"))
def test_chunks_of_a_decoder_have_the_bits_of_the_whole(name: str) -> None:
    """The first call caches keys and values of the memory."""
    model, batch = _swapped(name), inputs(name)
    ids, past, chunks = batch.pop("decoder_input_ids"), None, list[Tensor]()
    whole = model(**batch, decoder_input_ids=ids, use_cache=False).logits
    for part in ids.split([2, 1, ids.shape[1] - 3], 1):
        output = model(**batch, decoder_input_ids=part, past_key_values=past, use_cache=True)
        past = output.past_key_values
        chunks.append(output.logits)
    assert torch.equal(torch.cat(chunks, 1), whole)


def _changed_by_hooks(model: nn.Module, call: Callable[[Any], Tensor]) -> tuple[list[str], int]:
    """Modules whose hook changes the output's bits without an error, and the number of those that are refused."""
    expected, changed, errors = call(model), list[str](), list[str]()
    for name, module in [*model.named_modules()][1:]:
        handle = module.register_forward_hook(lambda *_: None)
        try:
            changed += [] if torch.equal(call(model), expected) else [name]
        except ch.UnsupportedError as error:
            errors.append(str(error))
        handle.remove()
    assert torch.equal(call(model), expected)
    assert all("set_invariant(True); got " in error for error in errors)
    return changed, len(errors)


@pytest.mark.parametrize("name", _names("decoder", "encoder", "encoder-decoder", "vision"))
def test_hook_on_a_part_keeps_the_bits_or_is_refused(name: str) -> None:
    batch = inputs(name)

    def call(model: Any) -> Tensor:
        output = model(**batch)
        logits: Tensor = output.logits if hasattr(output, "logits") else output.last_hidden_state
        return logits

    changed, refused = _changed_by_hooks(_swapped(name), call)
    assert changed == []
    assert refused > 0


def _torchs(decoder: bool, norm_first: bool) -> nn.Module:
    kind = nn.TransformerDecoderLayer if decoder else nn.TransformerEncoderLayer
    layer = kind(64, 4, 128, batch_first=True, activation="gelu", norm_first=norm_first)
    if decoder:
        return nn.TransformerDecoder(layer, 2)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("kind", ["own", "own and gated", "torch", "torch's decoder"])
def test_hook_on_a_part_of_a_stack_keeps_the_bits_or_is_refused(kind: str, norm_first: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 9, 64)
    tokens = (x, x[:, :5]) if "decoder" in kind else (x,)
    if "torch" in kind:
        model = _torchs("decoder" in kind, norm_first).eval()
        ch.swap(model)
    else:
        more: dict[str, Any] = {"norm": "rms", "gated": True, "activation": "silu", "rotary": True}
        options = more if "gated" in kind else {}
        model = ch.nn.Encoder(64, num_heads=4, num_layers=2, norm_first=norm_first, **options).eval()
    changed, refused = _changed_by_hooks(model, lambda model: model(*tokens))
    assert changed == []
    assert refused >= 8


def test_wanted_weights_are_refused_where_torch_would_rotate() -> None:
    model, batch = _swapped("llama"), inputs("llama")
    with pytest.raises(ch.UnsupportedError, match=r"^LlamaAttention: the call must have one order of sums[^\n]*$"):
        model(**batch, output_attentions=True)
    with ch.trace(model) as traced:
        observed = model(**batch).logits
    assert len(traced) == 2
    assert torch.equal(observed, model(**batch).logits)


#: Layers that get one pooled row for each sequence, which they take for the rows of one sequence.
POOLED = {"vit": ("classifier.",)}
#: Models with torch's convolutions, whose output depends on the batch, or that compare the sequences of a batch.
MIXING = {"whisper", "deberta-v2", "clip", "siglip"}


@pytest.mark.parametrize("name", by_structure([name for name in FAMILIES if name not in MIXING]))
@torch.enable_grad()
def test_gradients_have_the_order_of_sequences_or_are_named(name: str) -> None:
    if name == "t5" and TRANSFORMERS_4:
        pytest.skip("swap leaves T5 of transformers 4, which computes attention by itself")
    family = FAMILIES[name]
    model, call = family.plain(), family.call(TOKENS, "none")
    report = ch.swap(model)
    batch = {
        key: torch.cat([value, value.flip(1)])
        for key, value in call.arguments.items()
        if isinstance(value, Tensor) and len(value) == BATCH
    }
    shared = {key: value for key, value in call.arguments.items() if key not in batch}

    def backward(rows: range) -> None:
        part = {key: value[rows.start : rows.stop] for key, value in batch.items()}
        output = as_tensor(model(**part, **shared))
        (output * torch.linspace(-1.0, 1.0, output[0].numel()).view(output[0].shape)).sum().backward()

    def gradients() -> dict[str, Tensor]:
        grads = {key: part.grad for key, part in model.named_parameters() if part.grad is not None}
        model.zero_grad()
        return grads

    def added(parts: int) -> dict[str, Tensor]:
        with GradientSum(model, 2 * BATCH, parts=parts) as total:
            for rows in total.nodes:
                with total.node(rows):
                    backward(rows)
        total.store()
        return gradients()

    right = added(1)
    equal(added(2 * BATCH), right)
    with batch_part(BatchPart(0, 2 * BATCH, 2 * BATCH, packed=False, tokens_before=0, tokens=0)):
        backward(range(2 * BATCH))
    at_once = gradients()
    rows = [row for row in report.rows if row.reason.startswith("outside the promise of ch.set_invariant")]
    named = (*(f"{row.path}.".lstrip(".") for row in rows), *POOLED.get(name, ()))
    assert not [key for key in right if not torch.equal(at_once[key], right[key]) and not key.startswith(named)]


def test_second_swap_of_a_layer_in_torchs_order_changes_nothing() -> None:
    model = FAMILIES["deberta-v3"].plain()
    first, second = ch.swap(model), ch.swap(model)
    named = [row.path for row in first.replaced if row.class_name == "DebertaV2Layer"]
    assert named
    assert not second.replaced
    assert {*named} <= {row.path for row in second.before if "outside the promise" in row.reason}
