"""Dropout of a part of a batch is that of its rows in the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from clearhead.backends import tiled
from clearhead.batch_part import BatchPart, batch_part
from clearhead.functional.exact import attention
from clearhead.nn import LanguageModel, SequenceClassifier

IDS = torch.randint(1, 50, (5, 33), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([20, 33, 33, 7, 12])
#: The sequences of a part. Those of the second one have no padding in a batch that has.
PARTS = [range(2), range(1, 3), range(3, 5), range(4, 5)]


def _part(rows: range, lengths: Tensor | None) -> BatchPart:
    before = 0 if lengths is None else int(lengths[: rows.start].sum())
    return BatchPart(
        rows.start, len(rows), len(IDS), packed=lengths is not None, tokens_before=before, tokens=int(LENGTHS.sum())
    )


def _run(model: nn.Module, ids: Tensor, lengths: Tensor | None, part: BatchPart | None) -> tuple[Tensor, Tensor]:
    """The output with dropout of one seed, and the gradient of its sum with respect to the first weight."""
    torch.manual_seed(7)
    model.zero_grad()
    with batch_part(part):
        output = model(ids) if lengths is None else model(ids, lengths=lengths)
        output.square().sum().backward()
    weight = next(model.parameters()).grad
    assert weight is not None
    return output.detach(), weight.clone()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("feedforward_dim", [64, 100])
def test_language_model_drops_what_the_whole_batch_drops(recompute: bool, feedforward_dim: int) -> None:
    torch.manual_seed(0)
    model = LanguageModel(
        50, 64, 4, 2, max_len=33, dropout=0.3, feedforward_dim=feedforward_dim, checkpoint_activations=recompute
    )
    whole, gradient = _run(model, IDS, None, None)
    summed = torch.zeros_like(gradient)
    for rows in (range(2), range(2, 5)):
        part, part_gradient = _run(model, IDS[rows], None, _part(rows, None))
        torch.testing.assert_close(part, whole[rows], rtol=1e-5, atol=1e-5)
        summed += part_gradient
    torch.testing.assert_close(summed, gradient, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rows", PARTS)
@pytest.mark.parametrize("attention_dropout", [0.0, 0.3])
def test_classifier_drops_what_the_whole_batch_drops(rows: range, attention_dropout: float) -> None:
    torch.manual_seed(0)
    model = SequenceClassifier(50, 64, 4, 1, 3, max_len=33, dropout=0.3, attention_dropout=attention_dropout)
    whole, _ = _run(model, IDS, LENGTHS, None)
    part, _ = _run(model, IDS[rows], LENGTHS[rows], _part(rows, LENGTHS))
    torch.testing.assert_close(part, whole[rows], rtol=1e-5, atol=1e-5)
    alone, _ = _run(model, IDS[rows], LENGTHS[rows], None)
    assert rows.start == 0 or not torch.allclose(alone, whole[rows], atol=1e-3), "dropout would be that of any rows"


def test_dropout_without_kernels_drops_what_the_whole_batch_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.nn.dropout.takes", lambda x: False)
    torch.manual_seed(0)
    model = SequenceClassifier(50, 64, 4, 1, 3, max_len=33, dropout=0.3, attention_dropout=0.0).double()
    whole, _ = _run(model, IDS, LENGTHS, None)
    for rows in PARTS:
        part, _ = _run(model, IDS[rows], LENGTHS[rows], _part(rows, LENGTHS))
        torch.testing.assert_close(part, whole[rows])


@pytest.mark.parametrize("backend", ["native", tiled.BACKEND.name, "reference"])
def test_attention_drops_what_the_whole_batch_drops(backend: str) -> None:
    query, key, value = torch.randn(3, 4, 2, 20, 16)
    whole = attention(query, key, value, dropout=0.4, seed=5, backend=backend)
    with batch_part(BatchPart(2, 2, 4, packed=False, tokens_before=0, tokens=0)):
        part = attention(query[2:], key[2:], value[2:], dropout=0.4, seed=5, backend=backend)
    torch.testing.assert_close(part, whole[2:])
