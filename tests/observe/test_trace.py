"""``trace``: every inner point equals the formula, edits take effect, and the model is left unmodified."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.backends import reference
from clearhead.nn import Encoder, LanguageModel, MultiHeadAttention
from clearhead.observe import POINTS
from clearhead.problem import Problem


def module(**options: Any) -> MultiHeadAttention:
    torch.manual_seed(0)
    return MultiHeadAttention(16, 4, **options).eval()


def encoder(**options: Any) -> Encoder:
    torch.manual_seed(0)
    return Encoder(16, 4, 3, **options).eval()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))


def textbook(attention: MultiHeadAttention, x: Tensor, mask: ch.Mask) -> dict[str, Tensor]:
    """Each point, written out."""
    query, key, value = attention.project(x)
    group = attention.num_heads // attention.num_kv_heads
    scores = query @ key.repeat_interleave(group, 1).transpose(-2, -1)
    scaled = scores / query.shape[-1] ** 0.5
    masked = scaled.masked_fill(~mask.dense(6, 6), -torch.inf)
    weights = masked.softmax(-1)
    heads = weights @ value.repeat_interleave(group, 1)
    assert attention.output_projection is not None
    joined = heads.transpose(1, 2).flatten(-2)
    return {
        "query": query,
        "key": key,
        "value": value,
        "scores": scores,
        "scaled": scaled,
        "masked": masked,
        "weights": weights,
        "head_outputs": heads,
        "output": attention.output_projection(joined),
    }


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "rotary": True}, {"bias": False}], ids=str)
def test_every_point_equals_the_formula(x: Tensor, options: dict[str, Any]) -> None:
    attention, mask = module(**options), ch.Causal() & ch.Window(3)
    with torch.no_grad():
        plain = attention(x, mask=mask)
        with ch.trace(attention) as traced:
            output = attention(x, mask=mask)
        wanted = textbook(attention, x, mask)
    assert torch.equal(output, plain)
    points = traced[0]
    assert list(points.shapes) == list(POINTS)
    for name in POINTS:
        value = getattr(points, name)
        assert value.shape == wanted[name].shape == points.shapes[name]
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5, msg=name)


def test_squares_are_computed_when_read(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    steps = reference.steps

    def counted(problem: Problem) -> reference.Steps:
        asked.append(problem)
        return steps(problem)

    monkeypatch.setattr(reference, "steps", counted)
    attention = module()
    with torch.no_grad(), ch.trace(attention) as traced:
        attention(x)
    assert "[2, 4, 6, 6]" in str(traced)
    before = len(asked)
    assert traced[0].weights.shape == traced[0].scores.shape
    assert len(asked) == before + 1


def test_the_table_names_layer_call_point_and_shape(x: Tensor) -> None:
    model = encoder()
    with torch.no_grad(), ch.trace(model, layers=[0, 2], keep="all") as traced:
        traced.switch_off(0, layers=2)
        model(x)
        model(x[:1])
    lines = [" ".join(line.split()) for line in str(traced).splitlines()]
    assert lines[0] == "layer call point shape"
    assert "blocks.0.attention 1 weights [1, 4, 6, 6]" in lines
    assert "blocks.2.attention 0 head_outputs [2, 4, 6, 4] edited" in lines
    assert len(lines) == 1 + 2 * 2 * len(POINTS)


@pytest.mark.parametrize("point", POINTS)
def test_replaced_point_is_used_by_later_steps(x: Tensor, point: str) -> None:
    """Each point doubled, against the formula computed from that point."""
    attention, mask = module(num_kv_heads=2), ch.Causal()
    with torch.no_grad():
        wanted = textbook(attention, x, mask)
        with ch.trace(attention) as traced:
            traced.replace(point, lambda tensor: 2.0 * tensor)
            output = attention(x, mask=mask)
        restored = attention(x, mask=mask)
    parts = {name: 2.0 * wanted[name] if name == point else wanted[name] for name in ("query", "key", "value")}
    scores = parts["query"] @ parts["key"].repeat_interleave(2, 1).transpose(-2, -1)
    factor = 2.0 if point in ("scores", "scaled", "masked") else 1.0
    weights = (factor * scores / 2.0).masked_fill(~mask.dense(6, 6), -torch.inf).softmax(-1)
    weights = weights * (2.0 if point == "weights" else 1.0)
    heads = weights @ parts["value"].repeat_interleave(2, 1) * (2.0 if point == "head_outputs" else 1.0)
    assert attention.output_projection is not None
    expected = attention.output_projection(heads.transpose(1, 2).flatten(-2)) * (2.0 if point == "output" else 1.0)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    points = traced[0]
    assert points.edited == (point,)
    torch.testing.assert_close(points.weights, weights, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(points.head_outputs, heads, rtol=1e-4, atol=1e-5)
    assert points.output is not None
    torch.testing.assert_close(points.output, output)
    torch.testing.assert_close(restored, wanted["output"], rtol=1e-4, atol=1e-5)


def test_replaced_masked_scores_keep_the_sink(x: Tensor) -> None:
    attention = module(scores=(ch.Alibi(4), ch.Sink(0.5)))
    masked = torch.randn(2, 4, 6, 6).masked_fill(~ch.Causal().dense(6, 6), -torch.inf)
    with torch.no_grad(), ch.trace(attention) as traced:
        traced.replace("masked", masked)
        attention(x, mask=ch.Causal())
    weights = torch.cat([masked, torch.full((2, 4, 6, 1), 0.5)], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(traced[0].weights, weights)
    torch.testing.assert_close(traced[0].head_outputs, weights @ traced[0].value, rtol=1e-4, atol=1e-5)
    assert torch.equal(traced[0].masked, masked)


def test_heads_are_switched_off_until_undo(x: Tensor) -> None:
    model = encoder()
    with torch.no_grad():
        plain = model(x)
        with ch.trace(model) as traced:
            edit = traced.switch_off([1, 3], layers="blocks.1.*")
            without = model(x)
            heads = traced[1].head_outputs
            edit.undo()
            assert torch.equal(model(x), plain)
            traced.switch_off(0)
            model(x)
        assert torch.equal(model(x), plain)
    assert heads[:, [1, 3]].abs().max() == 0.0
    assert heads[:, [0, 2]].abs().min() > 0.0
    assert not torch.allclose(without, plain)
    assert all(points.head_outputs[:, 0].abs().max() == 0.0 for points in traced.values())


def test_temperature_divides_scores(x: Tensor) -> None:
    attention = module(scores=ch.Alibi(4))
    with torch.no_grad(), ch.trace(attention, keep="all") as traced:
        attention(x)
        edit = traced.temperature(0.5)
        attention(x)
        edit.undo()
        traced.temperature(4.0, heads=2)
        attention(x)
    plain, sharp, flat = traced.calls(0)
    torch.testing.assert_close(sharp.scaled, plain.scaled / 0.5)
    bias = plain.masked - plain.scaled
    torch.testing.assert_close(sharp.weights, (plain.scaled / 0.5 + bias).softmax(-1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(flat.scaled[:, 2], plain.scaled[:, 2] / 4.0)
    torch.testing.assert_close(flat.scaled[:, :2], plain.scaled[:, :2])


def test_edits_are_differentiable(x: Tensor) -> None:
    attention = module().double()
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)

    def run(scale: Tensor) -> Tensor:
        with ch.trace(attention) as traced:
            traced.replace("scores", lambda scores: scale * scores, heads=[0, 2])
            output: Tensor = attention(x.double(), mask=ch.Causal())
        return output

    assert torch.autograd.gradcheck(run, (scale,))


def test_detach_false_keeps_the_graph(x: Tensor) -> None:
    attention = module()
    with ch.trace(attention, detach=False) as traced:
        attention(x)
    traced[0].weights[..., 0].sum().backward()
    assert attention.query_projection.weight.grad is not None
    with ch.trace(attention) as traced:
        attention(x)
    assert not traced[0].weights.requires_grad


@pytest.mark.parametrize("training", [False, True])
def test_a_trace_without_edits_changes_nothing(x: Tensor, training: bool) -> None:
    results = []
    for way in ("plain", "traced"):
        model = encoder(dropout=0.2).train(training)
        torch.manual_seed(5)
        if way == "traced":
            with ch.trace(model):
                output = model(x, lengths=[6, 3])
        else:
            output = model(x, lengths=[6, 3])
        output.square().sum().backward()
        results.append([output, *(part.grad for part in model.parameters()), torch.get_rng_state()])
    for plain, traced in zip(*results, strict=True):
        assert torch.equal(plain, traced)


def test_statistics_describe_the_edited_call(x: Tensor) -> None:
    attention = module()
    want = ch.Want(rows=[0])
    for blocks in (False, True):
        first, second = (ch.trace(attention), ch.observe(attention, want))
        with torch.no_grad():
            if blocks:
                with first as traced, second as records:
                    traced.replace("masked", torch.zeros(1, 1, 6, 6).expand(2, 4, 6, 6))
                    attention(x)
            else:
                with second as records, first as traced:
                    traced.replace("masked", lambda masked: torch.zeros_like(masked))
                    attention(x)
        assert records[0].rows is not None
        torch.testing.assert_close(records[0].rows, torch.full((2, 4, 1, 6), 1 / 6))


def test_replacing_weights_raises_under_observe(x: Tensor) -> None:
    attention = module()
    with ch.observe(attention, ch.Want(entropy=True)), ch.trace(attention) as traced:
        traced.replace("weights", lambda weights: weights)
        attention(x)
        traced.replace("weights", lambda weights: 0.0 * weights)
        with torch.no_grad(), pytest.raises(ch.UnsupportedError, match="not replace weights while another"):
            attention(x)


def test_a_swapped_module_is_traced_and_edited(x: Tensor) -> None:
    torch.manual_seed(0)
    torchs = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    ch.swap(torchs)
    with torch.no_grad():
        plain, weights = torchs(x, x, x, average_attn_weights=False)
        with ch.trace(torchs) as traced:
            torchs(x, x, x)
        torch.testing.assert_close(traced[0].weights, weights, rtol=1e-4, atol=1e-6)
        assert traced[0].output is not None
        torch.testing.assert_close(traced[0].output, plain)
        with ch.trace(torchs) as traced:
            traced.replace("masked", lambda masked: masked.masked_fill(torch.eye(6).bool(), -torch.inf))
            output, edited = torchs(x, x, x, average_attn_weights=False)
        expected = weights.masked_fill(torch.eye(6).bool(), 0.0)
        torch.testing.assert_close(edited, expected / expected.sum(-1, keepdim=True), rtol=1e-4, atol=1e-6)
        heads = (edited @ traced[0].value).transpose(1, 2).flatten(-2)
        torch.testing.assert_close(output, torchs.out_proj(heads), rtol=1e-4, atol=1e-5)


def test_generate_runs_with_an_edit() -> None:
    torch.manual_seed(0)
    model = LanguageModel(20, 16, 4, 2).eval()
    ids = torch.tensor([[1, 2, 3]])
    with ch.trace(model, keep="all") as traced:
        traced.switch_off([0, 1, 2, 3])
        model.generate(ids, 3, temperature=0.0)
    calls = traced.calls(1)
    assert [call.problem.q_len for call in calls] == [3, 1, 1]
    assert [call.problem.k_len for call in calls] == [3, 4, 5]
    assert all(call.head_outputs.abs().max() == 0.0 for call in calls)
    # The points are copies, as later steps write to the cache with the first step's keys.
    torch.testing.assert_close(calls[0].key, calls[2].key[:, :, :3])


def test_nothing_is_left_behind(x: Tensor) -> None:
    model = encoder()

    def fail(output: Tensor) -> Tensor:
        raise RuntimeError("on purpose")

    with ch.trace(model) as traced:
        traced.replace("output", fail, layers=1)
        with pytest.raises(RuntimeError, match="on purpose"):
            model(x)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    with torch.no_grad(), ch.trace(model) as traced:
        model(x)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert traced[0].weights.shape == (2, 4, 6, 6)


def test_record_false_applies_edits_and_records_nothing(x: Tensor) -> None:
    model = encoder()
    with torch.no_grad(), ch.trace(model, record=False) as traced:
        traced.switch_off(1)
        edited = model(x)
    assert len(traced) == 0
    assert not torch.allclose(edited, model(x))


@pytest.mark.slow
def test_edits_of_a_compiled_model_raise(x: Tensor) -> None:
    model = encoder()
    model.compile_blocks(backend="eager")
    block = ch.trace(model, record=False)
    traced = block.__enter__()
    traced.switch_off(0)
    with torch.no_grad():
        model(x)
    with pytest.raises(ch.UnsupportedError, match="trace: model must be run within the block; got no call of blocks"):
        block.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda traced: traced.replace("score", 0), "trace: point must be one of query, key, value, scores, scaled"),
        (lambda traced: traced.replace("scores", 0), "trace: by must be a tensor or a function of one; got int"),
        (
            lambda traced: traced.replace("scores", torch.zeros(5)),
            "scores must be replaced by a tensor of shape (2, 4, 6, 6)",
        ),
        (lambda traced: traced.replace("output", lambda _: None), "output must be replaced by a tensor of shape"),
        (lambda traced: traced.replace("output", torch.zeros(1), heads=0), "heads must be left out for output"),
        (lambda traced: traced.switch_off(4), "heads must lie from 0 to 3; got 4"),
        (lambda traced: traced.switch_off(0, layers=7), "layers must be one of 0 (blocks.0.attention), 2 (blocks.2."),
        (lambda traced: traced.switch_off(0, layers=1), "layers must be one of 0 (blocks.0.attention), 2 (blocks.2."),
        (lambda traced: traced.temperature(0.0), "temperature must be a number above 0; got 0.0"),
    ],
)
def test_bad_edits_raise_one_line(x: Tensor, edit: Any, words: str) -> None:
    model = encoder()

    def run() -> None:
        with ch.trace(model, layers=[0, 2]) as traced:
            edit(traced)
            model(x)

    with pytest.raises(ch.ClearheadError) as caught:
        run()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    with (
        pytest.raises(ch.UnsupportedError, match="must have attention that can be observed"),
        ch.trace(nn.Linear(1, 1)),
    ):
        pass
