"""Dropout under ``set_invariant(True)`` belongs to (seed, layer, sequence, position), padded, packed and alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.batch_part import BatchPart, batch_part, number_of, row_numbers
from clearhead.distributed.rank_part import RankPart
from clearhead.errors import UnsupportedError
from clearhead.nn.dropout import Dropout
from clearhead.ops.dropout import dropped, dropped_at
from tests.agreement import needs_native

pytestmark = needs_native

LENGTHS, WIDTH = [9, 5, 12, 1], 48


@pytest.fixture(autouse=True)
def setting() -> Iterator[None]:
    with ch.invariant():
        yield


def _sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(length, WIDTH, generator=generator) for length in LENGTHS]


def _padded(parts: list[Tensor], length: int) -> Tensor:
    return torch.stack([nn.functional.pad(part, (0, 0, 0, length - len(part))) for part in parts])


def _part(first: int, count: int) -> BatchPart:
    return BatchPart(first, count, len(LENGTHS), packed=False, tokens_before=0, tokens=sum(LENGTHS))


def _seeded(module: nn.Module, *inputs: Tensor, **options: object) -> Tensor:
    torch.manual_seed(3)
    output: Tensor = module(*inputs, **options)
    return output


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "block": lambda: ch.nn.EncoderBlock(WIDTH, 4, dropout=0.3),
    "block after norms": lambda: ch.nn.EncoderBlock(WIDTH, 4, dropout=0.3, norm_first=False),
    "gated block": lambda: ch.nn.EncoderBlock(WIDTH, 4, dropout=0.3, gated=True),
    "narrow hidden layer": lambda: ch.nn.EncoderBlock(WIDTH, 4, dropout=0.3, feedforward_dim=100),
    "decoder block": lambda: ch.nn.DecoderBlock(WIDTH, 4, dropout=0.3),
    "encoder": lambda: ch.nn.Encoder(WIDTH, 4, 2, dropout=0.3),
    "recomputed block": lambda: ch.nn.EncoderBlock(WIDTH, 4, dropout=0.3, checkpoint_activations=True),
}


def _forward_and_gradient(layer: nn.Module, x: Tensor, real: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of a function of its real tokens."""
    x = x.clone().requires_grad_()
    output = _seeded(layer, x, **options)
    loss = (output * torch.linspace(-1.0, 2.0, WIDTH)).square()
    (gradient,) = torch.autograd.grad(loss[real].sum(), x)
    return output.detach(), gradient


def _drops(module: nn.Module) -> bool:
    return isinstance(module, Dropout)


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_sequence_drops_the_same_padded_packed_and_alone(name: str, observed: bool) -> None:
    torch.manual_seed(0)
    layer, parts = LAYERS[name](), _sequences()
    if observed:
        [*filter(_drops, layer.modules())][-1].register_forward_hook(lambda *_: None)
    options = {} if name == "encoder" else {"mask": ch.Padding(torch.tensor(LENGTHS))}
    if name == "encoder":
        options = {"lengths": torch.tensor(LENGTHS)}
    real = torch.arange(20) < torch.tensor(LENGTHS)[:, None]
    padded = _forward_and_gradient(layer, _padded(parts, 12), real[:, :12], **options)
    longer = _forward_and_gradient(layer, _padded(parts, 20), real, **options)
    together = torch.ones(1, sum(LENGTHS), dtype=torch.bool)
    packed = _forward_and_gradient(layer, torch.cat(parts)[None], together, mask=ch.Documents(lengths=LENGTHS))
    starts = [sum(LENGTHS[:place]) for place in range(len(LENGTHS))]
    for place, length in enumerate(LENGTHS):
        with batch_part(_part(place, 1)):
            alone = _forward_and_gradient(layer, parts[place][None], together[:, :length])
        for one, among, further, row in zip(alone, padded, longer, packed, strict=True):
            assert torch.equal(one[0], among[place, :length])
            assert torch.equal(one[0], further[place, :length])
            assert torch.equal(one[0], row[0, starts[place] : starts[place] + length])
        if place:
            elsewhere = _seeded(layer, parts[place][None])
            assert not torch.equal(elsewhere, alone[0]), "the index of the sequence would not matter"


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_classifier_drops_the_same_however_long_the_padding_is(pooling: str) -> None:
    torch.manual_seed(0)
    model = ch.nn.SequenceClassifier(
        20, WIDTH, 4, 1, 3, max_len=30, dropout=0.3, embedding_dropout=0.2, attention_dropout=0.1, pooling=pooling
    )
    ids = torch.randint(20, (4, 12))
    lengths = torch.tensor(LENGTHS)
    whole = _seeded(model, ids, lengths=lengths)
    assert torch.equal(_seeded(model, nn.functional.pad(ids, (0, 9)), lengths=lengths), whole)
    for first in range(4):
        with batch_part(_part(first, 4 - first)):
            assert torch.equal(_seeded(model, ids[first:], lengths=lengths[first:]), whole[first:])
    # Without gradients the model packs the batch.
    with torch.no_grad():
        assert torch.equal(_seeded(model, ids, lengths=lengths), whole)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_attention_weights_are_dropped_as_those_of_sequences(causal: bool) -> None:
    lengths = [5, 70, 1, 130, 64]
    generator = torch.Generator().manual_seed(0)
    tensors = torch.randn(3, 1, 2, sum(lengths), 16, generator=generator).unbind()
    tensors = [tensor.requires_grad_() for tensor in tensors]
    grad = torch.randn(1, 2, sum(lengths), 16, generator=generator)
    band = ch.Causal() if causal else ch.Window(1_000)
    output = ch.attention(*tensors, mask=ch.Documents(lengths=lengths) & band, dropout=0.4, seed=9)
    gradients = torch.autograd.grad(output, tensors, grad)
    start = 0
    for place, length in enumerate(lengths):
        rows = slice(start, start + length)
        parts = [tensor[:, :, rows].detach().requires_grad_() for tensor in tensors]
        with batch_part(BatchPart(place, 1, len(lengths), packed=False, tokens_before=0, tokens=0)):
            alone = ch.attention(*parts, mask=band, dropout=0.4, seed=9)
        assert torch.equal(output[:, :, rows], alone)
        for whole, part in zip(gradients, torch.autograd.grad(alone, parts, grad[:, :, rows]), strict=True):
            assert torch.equal(whole[:, :, rows], part)
        start += length


def test_packed_attention_weights_that_cannot_be_dropped_by_sequence_raise() -> None:
    query, key, value = torch.randn(3, 1, 2, 8, 16)
    documents, table = ch.Documents(lengths=[5, 3]), torch.ones(1, 1, 8, 8, dtype=torch.bool)
    bias = ch.RelativeBias(nn.Parameter(torch.randn(2, 9)))
    for mask, scores in ((documents & ch.Dense(table), ()), (documents, [bias]), (ch.Documents(ids=[0, 1, 0]), ())):
        length = mask.ids.shape[1] if isinstance(mask, ch.Documents) else 8
        inputs = [tensor[:, :, :length] for tensor in (query, key, value)]
        with pytest.raises(UnsupportedError, match=r"^attention: [^\n]*dropout of packed sequences[^\n]*$"):
            ch.attention(*inputs, mask=mask, scores=scores, dropout=0.5)
        ch.attention(*inputs, mask=mask, scores=scores)
        with ch.invariant(False):
            ch.attention(*inputs, mask=mask, scores=scores, dropout=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("width", [1, 64, 100])
def test_rows_are_dropped_by_their_numbers(dtype: torch.dtype, width: int) -> None:
    numbers = number_of(torch.tensor([0, 0, 3, 7, 2**31 - 1]), torch.tensor([0, 5, 0, 2, 2**32 - 1]))
    x = torch.ones(5, width, dtype=dtype)
    whole = dropped(x, 20_000, 11, None, numbers)
    for place, number in enumerate(numbers):
        assert torch.equal(dropped(x[:1], 20_000, 11, None, number[None])[0], whole[place])
    if width > 64:
        # By the definition in Python.
        assert torch.equal(dropped_at(x[:, 64:], 20_000, 11, numbers, 64), whole[:, 64:])
    # Numbers below 2**32 are those of rows that are counted.
    assert torch.equal(dropped(x, 20_000, 11, None, torch.arange(3, 8)), dropped(x, 20_000, 11, None, 3))
    with pytest.raises(Exception, match=r"numbers of rows must be contiguous int64 \[5\]; got"):
        dropped(x, 20_000, 11, None, numbers[:3])


def test_rank_with_a_part_of_the_batch_draws_for_its_sequences() -> None:
    part, x = RankPart((1, 2), (0, 1), None), torch.randn(2, 5, WIDTH)
    numbers, column = part.tokens(x)
    assert column == 0
    assert torch.equal(numbers, number_of(torch.tensor([[2], [3]]), torch.arange(5)).flatten())
    with batch_part(_part(3, 1)):
        by_part, _ = RankPart(None, (0, 1), None).tokens(x[:1])
    assert torch.equal(by_part, numbers[5:])


def test_without_the_setting_rows_are_counted() -> None:
    with ch.invariant(False):
        assert row_numbers((4, 6, 8)) == 0
        with batch_part(_part(2, 2)):
            assert row_numbers((2, 6, 8)) == 12
    with batch_part(_part(2, 2)):
        assert torch.equal(row_numbers((2, 2, 8)), number_of(torch.tensor([2, 2, 3, 3]), torch.tensor([0, 1, 0, 1])))  # type: ignore[arg-type]
