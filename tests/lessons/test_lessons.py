"""Every number that the source documents print, to their last digit, from the production modules."""

from __future__ import annotations

import re
import runpy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from lessons import (
    lesson_0_self_attention,
    lesson_1_one_token,
    lesson_2_classifier,
    lesson_3_causal_mask,
    lesson_4_cross_and_heads,
)
from torch import Tensor, nn

import clearhead as ch
from clearhead.backends.reference import Steps, steps
from clearhead.bridges import from_forbidden, from_zero_forbids
from clearhead.nn import EncoderBlock, MultiHeadAttention, SequenceClassifier
from clearhead.problem import Problem

#: The documents print four decimals.
PRINTED = 1e-4
TOKENS = torch.tensor([[1.16, 0.23], [0.57, 1.36], [4.41, -2.16]])


def printed(got: Tensor | np.ndarray, expected: Sequence[float] | Sequence[Sequence[float]]) -> None:
    """Assert that a tensor is what a document prints."""
    torch.testing.assert_close(torch.as_tensor(got).detach(), torch.tensor(expected), atol=PRINTED, rtol=0.0)


def the_steps(module: MultiHeadAttention, tokens: Tensor, mask: ch.Mask | None = None) -> Steps:
    """The steps of what a module of one head attends to, each without batch and heads."""
    query, key, value = module.project(tokens)
    problem = Problem.of("steps", query, key, value, mask=mask, scores=module.scores.rules(), scale=module.scale)
    return steps(problem)


def weights(module: MultiHeadAttention, tokens: Tensor, mask: ch.Mask | None = None) -> Tensor:
    """The weights as the public call gives them."""
    want = ch.Want(rows=range(tokens.shape[0]))
    rows = ch.observe_attention(*module.project(tokens), want=want, mask=mask, scale=module.scale).rows
    assert rows is not None
    return rows[0]


def test_printed_can_fail() -> None:
    with pytest.raises(AssertionError):
        printed(torch.tensor([1.0002]), [1.0])


class TestLesson0:
    """Document 000: 3 x 2 encodings, seed 42."""

    QUERY = ((0.7621, -0.0428), (1.1063, 0.7890), (1.1164, -2.1336))
    KEY = ((-0.1469, -0.3038), (0.1057, 0.3685), (-0.9914, -2.4152))
    VALUE = ((0.6038, 0.7434), (-0.3502, 0.5303), (3.8695, 2.4246))
    SCORES = ((-0.0990, 0.0648, -0.6523), (-0.4022, 0.4078, -3.0024), (0.4842, -0.6683, 4.0461))
    SCALED = ((-0.0700, 0.0458, -0.4612), (-0.2844, 0.2883, -2.1230), (0.3424, -0.4725, 2.8610))
    WEIGHTS = ((0.3573, 0.4011, 0.2416), (0.3410, 0.6047, 0.0542), (0.0722, 0.0320, 0.8959))
    OUTPUT = ((1.0100, 1.0641), (0.2040, 0.7057), (3.4989, 2.2427))

    def module(self) -> MultiHeadAttention:
        torch.manual_seed(42)
        return MultiHeadAttention(2, 1, bias=False, output_projection=False)

    def test_projections(self) -> None:
        module = self.module()
        printed(module.query_projection.weight.T, [[0.5406, -0.1657], [0.5869, 0.6496]])
        printed(module.key_projection.weight.T, [[-0.1549, -0.3443], [0.1427, 0.4153]])
        printed(module.value_projection.weight.T, [[0.6233, 0.6146], [-0.5188, 0.1323]])
        query, key, value = module.project(TOKENS)
        printed(query[0], self.QUERY)
        printed(key[0], self.KEY)
        printed(value[0], self.VALUE)

    def test_steps_and_output(self) -> None:
        module = self.module()
        seen = the_steps(module, TOKENS)
        printed(seen.raw[0, 0], self.SCORES)
        printed(seen.scaled[0, 0], self.SCALED)
        printed(weights(module, TOKENS), self.WEIGHTS)
        printed(module(TOKENS), self.OUTPUT)
        printed(module(TOKENS[None])[0], self.OUTPUT)

    def test_the_lessons_own_lines_agree(self) -> None:
        found = lesson_0_self_attention.by_hand(lesson_0_self_attention.module(), TOKENS)
        for name, expected in (
            ("query", self.QUERY),
            ("key", self.KEY),
            ("value", self.VALUE),
            ("scores", self.SCORES),
            ("scaled", self.SCALED),
            ("weights", self.WEIGHTS),
            ("output", self.OUTPUT),
        ):
            printed(found[name], expected)


class TestLesson1:
    """Document 001: 5 x 4 printed input, 4 to 3 with biases, seed 123, scale 1/sqrt(4)."""

    TOKENS = lesson_1_one_token.TOKENS
    KEYS = (
        (0.2236, 0.8145, -0.4259),
        (0.1462, 0.9094, -0.2659),
        (0.1122, 0.6939, -0.2615),
        (0.0270, 0.8234, -0.2469),
        (0.2751, 0.6120, -0.0675),
    )
    VALUES = (
        (0.5962, 0.2799, -0.5147),
        (0.7200, 0.4179, -0.5233),
        (0.4013, 0.6908, -0.3236),
        (0.6165, 0.7007, -0.5124),
        (0.4484, 0.7392, -0.4560),
    )
    WEIGHTS_3 = (0.1988, 0.1936, 0.2067, 0.2039, 0.1969)
    CONTEXT_3 = (0.5549, 0.5678, -0.4649)
    CONTEXT = (
        (0.5522, 0.5712, -0.4637),
        (0.5531, 0.5700, -0.4640),
        (0.5549, 0.5678, -0.4649),
        (0.5535, 0.5694, -0.4642),
        (0.5536, 0.5687, -0.4642),
    )

    def module(self) -> MultiHeadAttention:
        torch.manual_seed(123)
        return MultiHeadAttention(4, 1, head_dim=3, output_projection=False, scale=1 / 4**0.5)

    def test_the_third_query_alone(self) -> None:
        module = self.module()
        query, key, value = module.project(self.TOKENS[2:3], self.TOKENS)
        printed(query[0, 0], [-0.5313, -0.5278, -0.2748])
        printed(key[0], self.KEYS)
        printed(value[0], self.VALUES)
        problem = Problem.of("steps", query, key, value, scale=module.scale)
        printed(steps(problem).raw[0, 0, 0], [-0.4316, -0.4845, -0.3540, -0.3810, -0.4506])
        seen = ch.observe_attention(query, key, value, scale=module.scale, want=ch.Want(rows=[0]))
        assert seen.rows is not None
        printed(seen.rows[0, 0], self.WEIGHTS_3)
        printed(seen.rows.sum(), 1.0)  # type: ignore[arg-type]
        printed(module(self.TOKENS[2:3], self.TOKENS)[0], self.CONTEXT_3)

    def test_all_rows(self) -> None:
        module = self.module()
        printed(module(self.TOKENS), self.CONTEXT)
        rows = weights(module, self.TOKENS)
        printed(rows[2], self.WEIGHTS_3)
        printed(rows.sum(dim=-1), [1.0] * 5)

    def test_the_usual_scale_would_give_other_numbers(self) -> None:
        module = self.module()
        module.scale = None
        scores = the_steps(module, self.TOKENS)
        torch.testing.assert_close(scores.scaled, scores.raw / 3**0.5)
        assert (weights(module, self.TOKENS)[2] - torch.tensor(self.WEIGHTS_3)).abs().max() > PRINTED

    def test_the_lessons_own_lines_agree(self) -> None:
        found = lesson_1_one_token.one_token(lesson_1_one_token.module(), self.TOKENS, 2)
        printed(found["keys"], self.KEYS)
        printed(found["weights"], self.WEIGHTS_3)
        printed(found["context"], self.CONTEXT_3)


class TestLesson2:
    """Document 002: no seeds, so what must hold whatever the numbers."""

    def test_numpy_example(self) -> None:
        generator = np.random.default_rng(1)
        tokens, *three = (generator.standard_normal(shape) for shape in ((3, 4), (4, 4), (4, 4), (4, 4)))
        by_hand, output = lesson_2_classifier.in_numpy(tokens, *three)
        assert by_hand.shape == (3, 3)
        np.testing.assert_allclose(by_hand.sum(axis=-1), 1.0, atol=1e-12)
        module = lesson_2_classifier.same_in_a_module(*three)
        x = torch.from_numpy(tokens)
        np.testing.assert_allclose(module(x).detach(), output, atol=1e-12)
        np.testing.assert_allclose(weights(module, x).detach(), by_hand, atol=1e-12)

    def test_batched_self_attention(self) -> None:
        x = torch.randn(2, 5, 64)
        module = MultiHeadAttention(64, 1, bias=False, output_projection=False)
        seen = ch.observe_attention(*module.project(x), want=ch.Want(rows=range(5)))
        assert module(x).shape == (2, 5, 64)
        assert seen.rows is not None
        assert seen.rows.shape == (2, 1, 5, 5)
        torch.testing.assert_close(seen.rows.sum(dim=-1), torch.ones(2, 1, 5))
        torch.testing.assert_close(seen.output[:, 0], module(x))

    def test_mask_where_zero_forbids_is_our_polarity(self) -> None:
        torch.manual_seed(0)
        x = torch.randn(1, 5, 64)
        causal = torch.tril(torch.ones(5, 5)).bool()
        got = lesson_2_classifier.masked_weights(x, x, x, causal)[0]
        scores = (x @ x.transpose(-2, -1) / 8.0).masked_fill(causal == 0, -torch.inf)
        torch.testing.assert_close(got, torch.softmax(scores, dim=-1)[0])
        assert (got[~causal] == 0).all()
        torch.testing.assert_close(got.sum(dim=-1), torch.ones(5))
        assert torch.equal(from_zero_forbids(causal).dense(5, 5), ch.Causal().dense(5, 5))

    def test_a_row_that_sees_nothing_is_zero_where_the_document_gives_nan(self) -> None:
        x = torch.randn(1, 3, 4).requires_grad_()
        mask = torch.tensor([[0, 0, 0], [1, 1, 0], [1, 1, 1]])
        assert torch.softmax(torch.zeros(3, 3).masked_fill(mask == 0, -torch.inf), dim=-1)[0].isnan().all()
        output = ch.attention(x, x, x, mask=from_zero_forbids(mask))
        assert (output[0, 0] == 0).all()
        output.sum().backward()
        assert torch.isfinite(x.grad).all()

    def test_dropout_drops_a_tenth_of_the_weights_and_keeps_their_mean(self) -> None:
        torch.manual_seed(0)
        query, key = torch.randn(1, 4, 200, 16), torch.randn(1, 4, 200, 16)
        # Values that are the unit vectors make the output the weights after dropout.
        value = torch.eye(200).expand(1, 4, 200, 200)
        plain = ch.attention(query, key, value)
        dropped = ch.attention(query, key, value, dropout=0.1, seed=1)
        kept = dropped != 0
        torch.testing.assert_close(dropped[kept], plain[kept] / 0.9)
        # 160,000 independent draws: six standard deviations.
        assert abs(kept.double().mean() - 0.9) < 6 * (0.9 * 0.1 / 160_000) ** 0.5
        seen = ch.observe_attention(query, key, value, dropout=0.1, seed=1, want=ch.Want(rows=[0]))
        assert seen.rows is not None
        torch.testing.assert_close(seen.rows[..., 0, :], plain[..., 0, :])

    def test_multi_head(self) -> None:
        torch.manual_seed(0)
        module = MultiHeadAttention(512, 8, dropout=0.1)
        x = torch.randn(2, 10, 512)
        assert module(x).shape == (2, 10, 512)
        seen = ch.observe_attention(*module.project(x), want=ch.Want(rows=range(10)))
        assert seen.rows is not None
        assert seen.rows.shape == (2, 8, 10, 10)
        torch.testing.assert_close(seen.rows.sum(dim=-1), torch.ones(2, 8, 10))

    def test_encoder_block_is_torchs_post_norm_layer(self) -> None:
        torch.manual_seed(0)
        theirs = nn.TransformerEncoderLayer(64, 4, 256, activation="gelu", batch_first=True).eval()
        block = lesson_2_classifier.encoder_block(64, 4)
        assert [block.norm_first, block.feedforward.expand.out_features] == [False, 256]
        block.load_state_dict(EncoderBlock.from_torch(theirs).state_dict())
        x = torch.randn(2, 10, 64)
        torch.testing.assert_close(block.eval()(x), theirs(x), atol=1e-5, rtol=1e-5)

    def test_classifier_does_not_see_padding(self) -> None:
        torch.manual_seed(0)
        model = SequenceClassifier(1000, 128, 4, 2, 2).eval()
        ids = torch.randint(0, 1000, (8, 50))
        assert model(ids).shape == (8, 2)
        longer = torch.cat([ids, torch.randint(0, 1000, (8, 14))], dim=1)
        torch.testing.assert_close(model(longer, lengths=[50] * 8), model(ids), atol=1e-5, rtol=1e-5)
        assert not torch.allclose(model(longer), model(ids), atol=1e-3)

    def test_training_step(self) -> None:
        torch.manual_seed(0)
        model = SequenceClassifier(1000, 128, 4, 2, 2, dropout=0.0)
        ids, lengths, labels = torch.randint(0, 1000, (8, 50)), torch.randint(1, 51, (8,)), torch.randint(0, 2, (8,))
        losses = [lesson_2_classifier.training_step(model, ids, lengths, labels) for _ in range(3)]
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
        got = ours(inputs[1])
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)
        seen = ch.observe_attention(*ours.project(inputs[1]), want=ch.Want(rows=range(10)))
        assert seen.rows is not None
        torch.testing.assert_close(seen.rows.mean(dim=1), expected_weights, atol=1e-12, rtol=1e-12)
        expected.square().sum().backward()
        got.square().sum().backward()
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad, atol=1e-11, rtol=1e-11)
        assert theirs.in_proj_weight.grad is not None
        torch.testing.assert_close(
            ours.query_projection.weight.grad, theirs.in_proj_weight.grad[:512], atol=1e-11, rtol=1e-11
        )

    def test_comparison_measures_the_same_work(self) -> None:
        times = lesson_2_classifier.compare(batch=2, length=7, embed_dim=16, num_heads=2, warm_up=1, rounds=3)
        assert list(times) == ["MultiHeadAttention", "nn.MultiheadAttention", "nn.MultiheadAttention, weights"]
        assert all(seconds > 0.0 for seconds in times.values())

    def test_comparison_refuses_different_numbers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(MultiHeadAttention, "forward", lambda self, x: x)
        with pytest.raises(AssertionError):
            lesson_2_classifier.compare(batch=1, length=3, embed_dim=4, num_heads=1, warm_up=0, rounds=1)


class TestLesson3:
    """Document 003: lesson 0 under a causal mask in which True forbids."""

    FORBIDDEN = torch.tensor([[False, True, True], [False, False, True], [False, False, False]])
    WEIGHTS = ((1.0000, 0.0000, 0.0000), (0.3606, 0.6394, 0.0000), (0.0722, 0.0320, 0.8959))
    OUTPUT = ((0.6038, 0.7434), (-0.0062, 0.6072), (3.4989, 2.2427))

    def module(self) -> MultiHeadAttention:
        torch.manual_seed(42)
        return MultiHeadAttention(2, 1, bias=False, output_projection=False)

    def test_the_mask_is_converted_at_the_border(self) -> None:
        assert torch.equal(lesson_3_causal_mask.FORBIDDEN, self.FORBIDDEN)
        assert torch.equal(from_forbidden(self.FORBIDDEN).dense(3, 3), ch.Causal().dense(3, 3))

    @pytest.mark.parametrize("mask", [ch.Causal(), from_forbidden(FORBIDDEN)], ids=["causal", "converted"])
    def test_every_printed_tensor(self, mask: ch.Mask) -> None:
        module = self.module()
        query, key, value = module.project(TOKENS)
        printed(query[0], TestLesson0.QUERY)
        printed(key[0], TestLesson0.KEY)
        printed(value[0], TestLesson0.VALUE)
        seen = the_steps(module, TOKENS, mask)
        printed(seen.raw[0, 0], TestLesson0.SCORES)
        printed(seen.scaled[0, 0], TestLesson0.SCALED)
        masked = seen.masked[0, 0]
        allowed = ~self.FORBIDDEN
        printed(masked[allowed], [-6.9975e-02, -2.8442e-01, 2.8833e-01, 3.4241e-01, -4.7253e-01, 2.8610])
        assert (masked[self.FORBIDDEN] == -torch.inf).all()
        printed(weights(module, TOKENS, mask), self.WEIGHTS)
        printed(module(TOKENS, mask=mask), self.OUTPUT)

    def test_the_lessons_own_lines_agree(self) -> None:
        found = lesson_3_causal_mask.by_hand(self.module(), TOKENS)
        assert (found["masked"][self.FORBIDDEN] == -1e9).all()
        printed(found["weights"], self.WEIGHTS)
        printed(found["output"], self.OUTPUT)


class TestLesson4:
    """Document 004: self and cross through one module, one and two heads, seed 42."""

    TWO = (
        (1.0100, 1.0641, -0.7081, -0.8268),
        (0.2040, 0.7057, -0.7417, -0.9193),
        (3.4989, 2.2427, -0.7190, -0.8447),
    )

    def test_one_head_self_and_cross(self) -> None:
        torch.manual_seed(42)
        module = MultiHeadAttention(2, 1, bias=False, output_projection=False)
        printed(module(TOKENS, TOKENS, TOKENS), TestLesson0.OUTPUT)
        printed(module(TOKENS, TOKENS.clone(), TOKENS.clone()), TestLesson0.OUTPUT)
        printed(module(TOKENS[1:], TOKENS), TestLesson0.OUTPUT[1:])
        printed(lesson_4_cross_and_heads.heads(1)(TOKENS), TestLesson0.OUTPUT)

    def test_two_heads_side_by_side(self) -> None:
        torch.manual_seed(42)
        drawn = [tuple(nn.Linear(2, 2, bias=False).weight for _ in range(3)) for _ in range(2)]
        module = MultiHeadAttention.from_heads(drawn)  # type: ignore[arg-type]
        printed(module(TOKENS), self.TWO)
        printed(module(TOKENS, TOKENS.clone()), self.TWO)
        printed(lesson_4_cross_and_heads.heads(2)(TOKENS), self.TWO)


LESSONS = sorted(Path(lesson_0_self_attention.__file__).parent.glob("lesson_*.py"))


ENDS = {
    "lesson_0_self_attention": TestLesson0.OUTPUT,
    "lesson_1_one_token": TestLesson1.CONTEXT,
    "lesson_3_causal_mask": TestLesson3.OUTPUT,
    "lesson_4_cross_and_heads": TestLesson4.TWO,
}


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_script_runs_and_ends_with_the_production_modules_numbers(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(path), run_name="__main__")
    *_, before, last = capsys.readouterr().out.split("\n\n")
    title, *lines = last.strip().splitlines()
    assert title.startswith("MultiHeadAttention")
    got = torch.tensor(_numbers(lines))
    if path.stem in ENDS:
        # What is read back was rounded to four decimals, as the document was.
        torch.testing.assert_close(got, torch.tensor(ENDS[path.stem]), atol=1.5 * PRINTED, rtol=0.0)
    else:
        assert torch.equal(got, torch.tensor(_numbers(before.splitlines()[1:])))


def _numbers(lines: list[str]) -> list[list[float]]:
    """A printed matrix, read back."""
    return [[float(number) for number in re.findall(r"-?\d+\.\d*", line)] for line in lines]


def test_there_is_a_lesson_for_every_document() -> None:
    assert [path.stem.split("_")[1] for path in LESSONS] == ["0", "1", "2", "3", "4"]
