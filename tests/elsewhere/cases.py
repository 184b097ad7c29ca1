"""Functions, masks, score rules, statistics, linear attention and modules on a simulated device, against the CPU.

``tests/elsewhere/test_elsewhere.py`` runs these in a separate process, as ``pytest tests/elsewhere/cases.py`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead import linear, sparse
from tests.elsewhere import device
from tests.problems import BATCH, HEADS, LEN, MASKS, RULES

Call = Callable[..., Any]
#: "auto" selects torch's kernels there where they support the call, otherwise the tiles.
BACKENDS = ("auto", "reference")
FORMS = ("recurrent", "chunked", "parallel")
MAPS = ("elu", "relu", "performer")
#: Longer than a chunk and a block.
LONG = 130


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    device.register()


@pytest.fixture(autouse=True)
def _there(_registered: None) -> Iterator[None]:
    torch.manual_seed(1)
    with device.Elsewhere():
        yield


def heads(length: int = LEN, num_heads: int = HEADS, kv_heads: int = HEADS) -> list[Tensor]:
    return [torch.randn(BATCH, count, length, 8) for count in (num_heads, kv_heads, kv_heads)]


def length_for(form: str) -> int:
    """Few tokens are enough token by token: every operation runs through Python here."""
    return LEN if form == "recurrent" else LONG


def tokens() -> Tensor:
    return torch.randint(0, 20, (2, LEN))


def results(call: Call, inputs: Sequence[Tensor], where: str, learns: bool) -> list[Tensor]:
    """Outputs of the call and gradients of its inputs, all of them on the device ``where``."""
    torch.manual_seed(2)
    given = [one.to(where).requires_grad_(learns and one.is_floating_point()) for one in inputs]
    tensors = [one for one in _flat(call(*given)) if isinstance(one, Tensor)]
    assert tensors
    if learns:
        total = sum(one.square().sum() for one in tensors if one.requires_grad)
        assert isinstance(total, Tensor)
        tensors += torch.autograd.grad(total, [one for one in given if one.requires_grad])
    assert {one.device.type for one in tensors} == {where}
    return [one.detach().cpu() for one in tensors]


def _flat(result: Any) -> list[Any]:
    if is_dataclass(result):
        return _flat([getattr(result, field.name) for field in fields(result)])
    return [leaf for one in result for leaf in _flat(one)] if isinstance(result, list | tuple) else [result]


def agrees(call: Call, *inputs: Tensor, learns: bool = True) -> None:
    """Assert that outputs and gradients on the device equal those on the CPU."""
    here = results(call, inputs, "cpu", learns)
    there = results(call, inputs, device.NAME, learns)
    for expected, got in zip(here, there, strict=True):
        # Rounding differs; the tolerance is relative to the tensor's largest number.
        largest = expected.double().nan_to_num().abs().max().item() if expected.numel() else 0.0
        torch.testing.assert_close(got, expected, atol=1e-5 * max(1.0, largest), rtol=1e-4, equal_nan=True)


def module(make: Callable[[], nn.Module], call: Call) -> Call:
    """A call that builds the module, with the same weights, on the device of its inputs."""

    def run(*inputs: Tensor) -> Any:
        torch.manual_seed(3)
        # A moved module would no longer share weights between layers: the device's tensors have their own class.
        with inputs[0].device:
            made = make()
        return call(made, *inputs)

    return run


def test_device_refuses_mixed_tensors_like_a_gpu() -> None:
    there, here = torch.randn(2, 3, device=device.NAME), torch.randn(2, 3)
    assert (there + torch.tensor(1.0)).device.type == device.NAME
    with pytest.raises(RuntimeError, match="on one device"):
        there + here


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str, backend: str) -> None:
    agrees(lambda q, k, v: ch.attention(q, k, v, mask=MASKS[mask].mask, backend=backend), *heads())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_rules(rule: str, backend: str) -> None:
    agrees(lambda q, k, v: ch.attention(q, k, v, mask=ch.Causal(), scores=RULES[rule].rules, backend=backend), *heads())


@pytest.mark.parametrize(
    "rule",
    [
        lambda table: ch.ScoreFunction(lambda score, b, h, i, j: score + 0.1 * table[h, i - j + LEN]),
        lambda table: ch.ScoreFunction(lambda score, b, h, i, j: score * torch.sigmoid(table[h, j])),
        lambda table: ch.RelativeBias(table[:, :7]),
        lambda table: ch.DenseBias(table[:, None, :LEN]),
        lambda table: ch.Sink(table[:, 0]),
    ],
    ids=["function of distance", "gate", "relative", "dense", "sink"],
)
def test_gradients_of_learned_tensors(rule: Callable[[Tensor], ch.ScoreRule]) -> None:
    def call(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
        return ch.attention(query, key, value, mask=ch.Causal(), scores=rule(table))

    agrees(call, *heads(), torch.randn(HEADS, 2 * LEN))


@pytest.mark.parametrize("mask", ["none", "causal", "padding", "blocks", "function", "document ids"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_statistics(backend: str, mask: str) -> None:
    def call(query: Tensor, key: Tensor, value: Tensor) -> ch.Observation:
        want = ch.Want(
            lse=True, max_score=True, entropy=True, top_k=3, received=True, heatmap=4, sink=1, distance=True,
            rows=[0, 5], row_weights=torch.ones(1, 1, 2, LEN, device=query.device),
        )  # fmt: skip
        return ch.observe_attention(query, key, value, mask=MASKS[mask].mask, want=want, backend=backend)

    agrees(call, *heads())


@pytest.mark.parametrize("mask", [None, ch.Causal(), ch.Padding([LEN, 5])], ids=["none", "causal", "padding"])
def test_dropout_drops_the_same_weights(mask: ch.Mask | None) -> None:
    agrees(lambda q, k, v: ch.attention(q, k, v, mask=mask, dropout=0.3, seed=5), *heads())


@pytest.mark.parametrize("mask", [None, ch.Causal(), ch.Padding([LEN, 5])], ids=["none", "causal", "padding"])
def test_top_k(mask: ch.Mask | None) -> None:
    agrees(lambda q, k, v: sparse.top_k_attention(q, k, v, k=3, mask=mask), *heads())


@pytest.mark.parametrize(
    "call",
    [
        lambda q, k, v: ch.attention(q, k, v, mask=sparse.routed(q, k, keep=2, size=16)),
        lambda q, k, v: sparse.dilated_attention(q, k, v, stride=3, before=20),
        lambda q, k, v: ch.attention(q, k, v, mask=sparse.longformer(LONG, 8, 4)),
        lambda q, k, v: ch.attention(q, k, v, mask=sparse.big_bird(LONG, size=16, num_heads=HEADS)),
        lambda q, k, v: ch.attention(q, k, v, mask=sparse.covered(ch.Causal() & ch.Window(9), LONG, size=16)),
    ],
    ids=["routed", "dilated", "longformer", "big bird", "covered"],
)
def test_patterns(call: Call) -> None:
    agrees(call, *heads(LONG, HEADS, 2))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "feature_map", ["elu", "relu", linear.PositiveRandomFeatures.draw(8, 32)], ids=["elu", "relu", "performer"]
)
def test_linear_attention(feature_map: Any, form: str) -> None:
    agrees(
        lambda q, k, v: linear.linear_attention(q, k, v, feature_map=feature_map, causal=True, form=form),
        *heads(length_for(form), HEADS, 2),
    )


@pytest.mark.parametrize("causal", [True, False])
def test_linear_attention_with_padding(causal: bool) -> None:
    mask = ch.Padding([LONG, 50])
    agrees(lambda q, k, v: linear.linear_attention(q, k, v, causal=causal, mask=mask), *heads(LONG, HEADS, 2))


def test_linear_attention_with_documents() -> None:
    mask = ch.Documents(lengths=[60, 70])
    inputs = [one[:1] for one in heads(LONG)]
    agrees(lambda q, k, v: linear.linear_attention(q, k, v, causal=True, mask=mask), *inputs)


def test_linear_attention_in_two_parts() -> None:
    def call(*inputs: Tensor) -> list[Any]:
        first, state = linear.linear_attention(*(one[:, :, :60] for one in inputs), causal=True)
        then, state = linear.linear_attention(*(one[:, :, 60:] for one in inputs), causal=True, state=state)
        return [first, then, state]

    agrees(call, *heads(LONG))


@pytest.mark.parametrize("form", FORMS)
def test_decays_gates_and_the_delta_rule(form: str) -> None:
    length = length_for(form)
    query, key, value = heads(length)
    gates, rates = torch.rand(BATCH, HEADS, length, 8), torch.rand(BATCH, HEADS, length)
    agrees(lambda q, k, v: linear.retention(q, k, v, form=form), query, key, value)
    agrees(lambda q, k, v, g: linear.gated_linear_attention(q, k, v, log_gate=-g, form=form), query, key, value, gates)
    agrees(
        lambda q, k, v, g, r: linear.delta_attention(q, k, v, log_gate=-g[..., :1], rate=r, form=form),
        query,
        key,
        value,
        gates,
        rates,
    )


def test_positions() -> None:
    agrees(lambda q: ch.positions.Rotary().rotate(q, 5), heads()[0])
    agrees(lambda q: q + ch.positions.sinusoidal(torch.arange(LEN, device=q.device), 8), heads()[0])


def test_packing() -> None:
    def call(x: Tensor) -> Tensor:
        packed, _ = ch.pack(x, [LEN, 5])
        return ch.unpack(packed, [LEN, 5])

    agrees(call, torch.randn(2, LEN, 16))


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2}, {"rotary": True}], ids=str)
@pytest.mark.parametrize("mask", [ch.Causal(), ch.Padding([LEN, 4])], ids=["causal", "padding"])
def test_multi_head_attention(mask: ch.Mask, options: dict[str, Any]) -> None:
    agrees(
        module(lambda: ch.nn.MultiHeadAttention(16, 4, **options), lambda made, x: made(x, mask=mask)),
        torch.randn(2, LEN, 16),
    )


@pytest.mark.parametrize("kind", ["linear", "retention", "gated", "delta"])
def test_linear_attention_module(kind: str) -> None:
    mask = ch.Causal() & ch.Padding([LEN, 4])
    agrees(
        module(lambda: ch.nn.LinearAttention(16, 4, kind=kind), lambda made, x: made(x, mask=mask)),
        torch.randn(2, LEN, 16),
    )


@pytest.mark.parametrize("learns", [True, False])
def test_stacks(learns: bool) -> None:
    x = torch.randn(2, LEN, 16)
    encoder = module(lambda: ch.nn.Encoder(16, 4, 2).train(learns), lambda made, x: made(x, lengths=[LEN, 4]))
    decoder = module(
        lambda: ch.nn.Decoder(16, 4, 2, cross_attention=True),
        lambda made, x: made(x, memory=2 * x, memory_lengths=[LEN, 5]),
    )
    agrees(encoder, x, learns=learns)
    agrees(decoder, x, learns=learns)


def test_decoder_with_a_cache_on_the_device() -> None:
    def call(made: Any, x: Tensor) -> Tensor:
        cache = made.new_cache()
        return torch.cat([made(x[:, place : place + 1], cache=cache) for place in range(LEN)], dim=1)

    agrees(module(lambda: ch.nn.Decoder(16, 4, 2).eval(), call), torch.randn(2, LEN, 16), learns=False)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary", "none"])
def test_language_model_trains_and_generates(positions: str) -> None:
    def learned(made: Any, ids: Tensor) -> Any:
        loss = nn.functional.cross_entropy(made(ids).flatten(0, 1), ids.flatten())
        return [loss, *torch.autograd.grad(loss, list(made.parameters()))]

    def make() -> nn.Module:
        return ch.nn.LanguageModel(20, 16, 4, 2, max_len=32, positions=positions)

    agrees(module(make, learned), tokens(), learns=False)
    agrees(module(make, lambda made, ids: made.eval().generate(ids, 9, temperature=0.0)), tokens(), learns=False)


def test_classifier_and_translator() -> None:
    def classify(made: Any, ids: Tensor) -> Any:
        return made(ids, lengths=[LEN, 4])

    agrees(module(lambda: ch.nn.SequenceClassifier(20, 16, 4, 2, 3).eval(), classify), tokens(), learns=False)
    agrees(
        module(lambda: ch.nn.EncoderDecoder(20, 20, 16, 4, 2).eval(), lambda made, ids: made(ids, ids)),
        tokens(),
        learns=False,
    )


def test_swapped_torch_modules() -> None:
    def heads_of_torch() -> nn.Module:
        return nn.Sequential(nn.MultiheadAttention(16, 4, batch_first=True))

    def attend(made: Any, x: Tensor) -> Any:
        ch.swap(made)
        return made[0](x, x, x, need_weights=True)

    def encode(made: Any, x: Tensor) -> Any:
        ch.swap(made)
        padded = torch.arange(LEN, device=x.device)[None] >= torch.tensor([[LEN], [5]], device=x.device)
        # The values in the padding are undefined.
        return made(x, src_key_padding_mask=padded) * ~padded[..., None]

    def stack_of_torch() -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    agrees(module(heads_of_torch, attend), torch.randn(2, LEN, 16))
    agrees(module(stack_of_torch, encode), torch.randn(2, LEN, 16))


def test_traced_and_observed_model() -> None:
    def traced(made: Any, x: Tensor) -> Any:
        with ch.trace(made) as records:
            made(x, mask=ch.Causal())
        return [one.head_outputs for one in records.values()]

    def observed(made: Any, x: Tensor) -> Any:
        want = ch.Want(lse=True, entropy=True, top_k=2, heatmap=4, received=True)
        with ch.observe(made, want) as records:
            made(x, mask=ch.Causal())
        return [value for one in records.values() for value in (one.lse, one.entropy, one.top_weights, one.received)]

    def encoder() -> nn.Module:
        return ch.nn.Encoder(16, 4, 2).eval()

    agrees(module(encoder, traced), torch.randn(2, LEN, 16), learns=False)
    agrees(module(encoder, observed), torch.randn(2, LEN, 16), learns=False)
