"""The figures of the source documents from the production modules, and on the pages of docs/learn."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.backends.reference import Steps, steps
from clearhead.bridges import from_forbidden, from_zero_forbids
from clearhead.nn import EncoderBlock, MultiHeadAttention, SequenceClassifier
from clearhead.problem import Problem
from tests.docs.test_notebooks import DOCS, cells
from tests.lessons.documents import PRINTED, Document0, Document1, Document3, Document4, printed

TOKENS = torch.tensor(Document0.TOKENS)
LEARN = DOCS / "learn"


def the_steps(module: MultiHeadAttention, tokens: Tensor, mask: ch.Mask | None = None) -> Steps:
    """The steps of a module of one head, each with axes for batch and head."""
    query, key, value = module.project(tokens)
    problem = Problem.of("steps", query, key, value, mask=mask, scores=module.scores.rules(), scale=module.scale)
    return steps(problem)


def weights(module: MultiHeadAttention, tokens: Tensor, mask: ch.Mask | None = None) -> Tensor:
    """The weights as the public call returns them."""
    want = ch.Want(rows=range(tokens.shape[0]))
    rows = ch.observe_attention(*module.project(tokens), want=want, mask=mask, scale=module.scale).rows
    assert rows is not None
    return rows[0]


def test_printed_can_fail() -> None:
    with pytest.raises(AssertionError):
        printed(torch.tensor([1.0002]), [1.0])


class TestDocument0:
    def test_projections(self) -> None:
        module = Document0.module()
        printed(module.query_projection.weight.T, Document0.QUERY_WEIGHT)
        printed(module.key_projection.weight.T, Document0.KEY_WEIGHT)
        printed(module.value_projection.weight.T, Document0.VALUE_WEIGHT)
        query, key, value = module.project(TOKENS)
        printed(query[0], Document0.QUERY)
        printed(key[0], Document0.KEY)
        printed(value[0], Document0.VALUE)

    def test_steps_and_output(self) -> None:
        module = Document0.module()
        parts = the_steps(module, TOKENS)
        printed(parts.raw[0, 0], Document0.SCORES)
        printed(parts.scaled[0, 0], Document0.SCALED)
        printed(weights(module, TOKENS), Document0.WEIGHTS)
        printed(module(TOKENS), Document0.OUTPUT)
        printed(module(TOKENS[None])[0], Document0.OUTPUT)


class TestDocument1:
    TOKENS = torch.tensor(Document1.TOKENS)

    def test_the_third_query_alone(self) -> None:
        module = Document1.module()
        query, key, value = module.project(self.TOKENS[2:3], self.TOKENS)
        printed(query[0, 0], Document1.QUERY_3)
        printed(key[0], Document1.KEYS)
        printed(value[0], Document1.VALUES)
        problem = Problem.of("steps", query, key, value, scale=module.scale)
        printed(steps(problem).raw[0, 0, 0], Document1.SCORES_3)
        rows = ch.observe_attention(query, key, value, scale=module.scale, want=ch.Want(rows=[0])).rows
        assert rows is not None
        printed(rows[0, 0], Document1.WEIGHTS_3)
        printed(rows.sum(), 1.0)
        printed(module(self.TOKENS[2:3], self.TOKENS)[0], Document1.CONTEXT_3)

    def test_all_rows(self) -> None:
        module = Document1.module()
        printed(module(self.TOKENS), Document1.CONTEXT)
        rows = weights(module, self.TOKENS)
        printed(rows[2], Document1.WEIGHTS_3)
        printed(rows.sum(dim=-1), [1.0] * 5)

    def test_the_usual_scale_would_give_other_numbers(self) -> None:
        module = Document1.module()
        module.scale = None
        parts = the_steps(module, self.TOKENS)
        torch.testing.assert_close(parts.scaled, parts.raw / 3**0.5)
        assert (weights(module, self.TOKENS)[2] - torch.tensor(Document1.WEIGHTS_3)).abs().max() > PRINTED


class TestDocument2:
    """Document 002 draws without seeds, so these hold for any numbers."""

    def test_numpy_example(self) -> None:
        generator = np.random.default_rng(1)
        tokens, *three = (generator.standard_normal(shape) for shape in ((3, 4), (4, 4), (4, 4), (4, 4)))
        query, key, value = (tokens @ weight for weight in three)
        scores = query @ key.T / 2.0
        by_hand = np.exp(scores - scores.max(axis=-1, keepdims=True))
        by_hand /= by_hand.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(by_hand.sum(axis=-1), 1.0, atol=1e-12)
        module = MultiHeadAttention.from_heads([tuple(torch.from_numpy(w.T.copy()) for w in three)])  # type: ignore[list-item]
        x = torch.from_numpy(tokens)
        np.testing.assert_allclose(module(x).detach(), by_hand @ value, atol=1e-12)
        np.testing.assert_allclose(weights(module, x).detach(), by_hand, atol=1e-12)

    def test_batched_self_attention(self) -> None:
        x = torch.randn(2, 5, 64)
        module = MultiHeadAttention(64, 1, bias=False, output_projection=False)
        observation = ch.observe_attention(*module.project(x), want=ch.Want(rows=range(5)))
        assert module(x).shape == (2, 5, 64)
        assert observation.rows is not None
        assert observation.rows.shape == (2, 1, 5, 5)
        torch.testing.assert_close(observation.rows.sum(dim=-1), torch.ones(2, 1, 5))
        torch.testing.assert_close(observation.output[:, 0], module(x))

    def test_mask_where_zero_forbids_is_our_polarity(self) -> None:
        torch.manual_seed(0)
        x = torch.randn(1, 5, 64)
        causal = torch.tril(torch.ones(5, 5)).bool()
        rows = ch.observe_attention(x, x, x, mask=from_zero_forbids(causal), want=ch.Want(rows=range(5))).rows
        assert rows is not None
        scores = (x @ x.transpose(-2, -1) / 8.0).masked_fill(causal == 0, -torch.inf)
        torch.testing.assert_close(rows, torch.softmax(scores, dim=-1))
        assert (rows[0][~causal] == 0).all()
        torch.testing.assert_close(rows.sum(dim=-1), torch.ones(1, 5))
        assert torch.equal(from_zero_forbids(causal).dense(5, 5), ch.Causal().dense(5, 5))

    def test_empty_row_is_zero_where_the_document_gives_nan(self) -> None:
        x = torch.randn(1, 3, 4).requires_grad_()
        mask = torch.tensor([[0, 0, 0], [1, 1, 0], [1, 1, 1]])
        assert torch.softmax(torch.zeros(3, 3).masked_fill(mask == 0, -torch.inf), dim=-1)[0].isnan().all()
        output = ch.attention(x, x, x, mask=from_zero_forbids(mask))
        assert (output[0, 0] == 0).all()
        output.sum().backward()
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()

    def test_dropout_drops_a_tenth_of_the_weights_and_keeps_their_mean(self) -> None:
        torch.manual_seed(0)
        query, key = torch.randn(1, 4, 200, 16), torch.randn(1, 4, 200, 16)
        # Values that are the unit vectors make the output the weights after dropout.
        value = torch.eye(200).expand(1, 4, 200, 200)
        plain = ch.attention(query, key, value)
        dropped = ch.attention(query, key, value, dropout=0.1, seed=1)
        survives = dropped != 0
        torch.testing.assert_close(dropped[survives], plain[survives] / 0.9)
        # 160,000 independent draws: six standard deviations.
        assert abs(survives.double().mean() - 0.9) < 6 * (0.9 * 0.1 / 160_000) ** 0.5
        rows = ch.observe_attention(query, key, value, dropout=0.1, seed=1, want=ch.Want(rows=[0])).rows
        assert rows is not None
        torch.testing.assert_close(rows[..., 0, :], plain[..., 0, :])

    def test_multi_head(self) -> None:
        torch.manual_seed(0)
        module = MultiHeadAttention(512, 8, dropout=0.1)
        x = torch.randn(2, 10, 512)
        assert module(x).shape == (2, 10, 512)
        rows = ch.observe_attention(*module.project(x), want=ch.Want(rows=range(10))).rows
        assert rows is not None
        assert rows.shape == (2, 8, 10, 10)
        torch.testing.assert_close(rows.sum(dim=-1), torch.ones(2, 8, 10))

    def test_encoder_block_is_torchs_post_norm_layer(self) -> None:
        torch.manual_seed(0)
        theirs = nn.TransformerEncoderLayer(64, 4, 256, activation="gelu", batch_first=True).eval()
        block = EncoderBlock(64, 4, norm_first=False)
        assert [block.norm_first, block.feedforward.expand.out_features] == [False, 256]
        block.load_state_dict(EncoderBlock.from_torch(theirs).state_dict())
        x = torch.randn(2, 10, 64)
        torch.testing.assert_close(block.eval()(x), theirs(x), atol=1e-5, rtol=1e-5)

    def test_classifier_ignores_padding(self) -> None:
        torch.manual_seed(0)
        model = SequenceClassifier(1000, 128, 4, 2, 2).eval()
        ids = torch.randint(0, 1000, (8, 50))
        assert model(ids).shape == (8, 2)
        longer = torch.cat([ids, torch.randint(0, 1000, (8, 14))], dim=1)
        torch.testing.assert_close(model(longer, lengths=[50] * 8), model(ids), atol=1e-5, rtol=1e-5)
        assert not torch.allclose(model(longer), model(ids), atol=1e-3)

    def test_training_steps_lower_the_loss(self) -> None:
        torch.manual_seed(0)
        model = SequenceClassifier(1000, 128, 4, 2, 2, dropout=0.0)
        ids, lengths, labels = torch.randint(0, 1000, (8, 50)), torch.randint(1, 51, (8,)), torch.randint(0, 2, (8,))
        losses = []
        for _ in range(3):
            # A new optimizer each time, as in the document.
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            loss = nn.functional.cross_entropy(model(ids, lengths=lengths), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert losses[2] < losses[0]

    @pytest.mark.parametrize("mode", ["train", "eval"])
    def test_agreement_with_torchs_module(self, mode: str) -> None:
        torch.manual_seed(0)
        theirs = nn.MultiheadAttention(512, 8, batch_first=True).double()
        getattr(theirs, mode)()
        ours = MultiHeadAttention.from_torch(theirs)
        inputs = [torch.randn(2, 10, 512, dtype=torch.float64).requires_grad_()]
        inputs.append(inputs[0].detach().clone().requires_grad_())
        expected, expected_weights = theirs(inputs[0], inputs[0], inputs[0])
        output = ours(inputs[1])
        torch.testing.assert_close(output, expected, atol=1e-12, rtol=1e-12)
        rows = ch.observe_attention(*ours.project(inputs[1]), want=ch.Want(rows=range(10))).rows
        assert rows is not None
        torch.testing.assert_close(rows.mean(dim=1), expected_weights, atol=1e-12, rtol=1e-12)
        expected.square().sum().backward()
        output.square().sum().backward()
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad, atol=1e-11, rtol=1e-11)
        assert theirs.in_proj_weight.grad is not None
        torch.testing.assert_close(
            ours.query_projection.weight.grad, theirs.in_proj_weight.grad[:512], atol=1e-11, rtol=1e-11
        )


class TestComparison:
    """The timing on the page of document 002."""

    @pytest.fixture
    def compare(self) -> Any:
        namespace: dict[str, Any] = {"torch": torch, "nn": nn, "MultiHeadAttention": MultiHeadAttention}
        page = (LEARN / "2-from-numpy-to-a-classifier.md").read_text("utf-8")
        (cell,) = [cell for cell in cells(page) if "def compare(" in cell]
        exec(cell.partition("\n\n\nfor name, median")[0], namespace)
        return namespace["compare"]

    def test_comparison_measures_the_same_work(self, compare: Any) -> None:
        times = compare(batch=2, length=7, embed_dim=16, num_heads=2, warm_up=1, rounds=3)
        assert list(times) == ["MultiHeadAttention", "nn.MultiheadAttention", "nn.MultiheadAttention, weights"]
        assert all(seconds > 0.0 for seconds in times.values())

    def test_comparison_refuses_different_numbers(self, compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(MultiHeadAttention, "forward", lambda self, x: x)
        with pytest.raises(AssertionError):
            compare(batch=1, length=3, embed_dim=4, num_heads=1, warm_up=0, rounds=1)


class TestDocument3:
    def test_the_converted_mask_is_causal(self) -> None:
        assert torch.equal(from_forbidden(Document3.FORBIDDEN).dense(3, 3), ch.Causal().dense(3, 3))

    @pytest.mark.parametrize("mask", [ch.Causal(), from_forbidden(Document3.FORBIDDEN)], ids=["causal", "converted"])
    def test_every_printed_tensor(self, mask: ch.Mask) -> None:
        module = Document0.module()
        query, key, value = module.project(TOKENS)
        printed(query[0], Document0.QUERY)
        printed(key[0], Document0.KEY)
        printed(value[0], Document0.VALUE)
        parts = the_steps(module, TOKENS, mask)
        printed(parts.raw[0, 0], Document0.SCORES)
        printed(parts.scaled[0, 0], Document0.SCALED)
        masked = parts.masked[0, 0]
        printed(masked[~Document3.FORBIDDEN], Document3.ALLOWED_SCORES)
        assert (masked[Document3.FORBIDDEN] == -torch.inf).all()
        printed(weights(module, TOKENS, mask), Document3.WEIGHTS)
        printed(module(TOKENS, mask=mask), Document3.OUTPUT)


class TestDocument4:
    def test_one_head_self_and_cross(self) -> None:
        for module in (Document0.module(), Document4.module(1)):
            printed(module(TOKENS, TOKENS, TOKENS), Document0.OUTPUT)
            printed(module(TOKENS, TOKENS.clone(), TOKENS.clone()), Document0.OUTPUT)
            printed(module(TOKENS[1:], TOKENS), Document0.OUTPUT[1:])
            printed(module(TOKENS), Document0.OUTPUT)

    def test_two_heads_side_by_side(self) -> None:
        module = Document4.module(2)
        printed(module(TOKENS), Document4.TWO_HEADS)
        printed(module(TOKENS, TOKENS.clone()), Document4.TWO_HEADS)


def figures(document: type) -> set[float]:
    """Every figure of a document."""
    values = (value for name, value in vars(document).items() if name.isupper() and not isinstance(value, Tensor))
    return {round(float(number), 6) for value in values for number in np.asarray(value).flat}


def page_figures(path: Path) -> set[float]:
    """Every decimal number in the cells of a page."""
    code = "\n".join(cells(path.read_text("utf-8")))
    return {round(float(number), 6) for number in re.findall(r"-?\d+\.\d+(?:e[+-]?\d+)?", code)}


PAGES = {
    "0-self-attention.md": (Document0,),
    "1-one-token.md": (Document1,),
    "3-causal-mask.md": (Document3,),
    "4-cross-attention-and-heads.md": (Document4,),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_checks_every_figure_of_its_document(name: str) -> None:
    on_page = page_figures(LEARN / name)
    assert len(on_page) > 12
    for document in PAGES[name]:
        assert figures(document) - on_page == set()
