"""``explain``: correct values, visible differences, and no change to the model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.nn import Encoder, LanguageModel, MultiHeadAttention, SequenceClassifier
from clearhead.observe import Explanation, explain
from clearhead.observe.explanation import Step, largest_difference

WORDS = ["The", "cat", "sat", "on", "the", "mat"]


def _same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to float32 rounding: with gradients and without them a call may be another backend's."""
    torch.testing.assert_close(actual, expected.detach(), rtol=1e-6, atol=1e-6)


def eps_bound(explanation: Explanation, step: Step, terms: int, size: float) -> float:
    """Rounding of a sum of ``terms`` products of size ``size``, first order, each term rounded a few times."""
    return 4.0 * torch.finfo(explanation.dtype).eps * terms * max(size, 1.0)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randn(1, len(WORDS), 16, generator=torch.Generator().manual_seed(0))


def module(**options: object) -> MultiHeadAttention:
    torch.manual_seed(1)
    return MultiHeadAttention(16, 4, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_each_step_of_plain_tensors_is_as_exact_as_its_dtype(dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(2, 4, 6, 8).to(dtype) for _ in range(3))
    explanation = explain(query, key, value, token=3, head=2, batch=1, mask=ch.Causal())
    assert [step.name for step in explanation.steps] == ["scores", "scaling", "mask", "softmax", "weighted sum"]
    for step in explanation.steps:
        assert step.difference <= eps_bound(explanation, step, 8, float(step.exact.nan_to_num(neginf=0).abs().max())), (
            step.name
        )
    wanted = ch.attention(query, key, value, mask=ch.Causal())[1, 2, 3]
    _same(explanation.output, wanted)
    assert explanation.weights[4:].tolist() == [0.0, 0.0]
    assert explanation.allowed.tolist() == [True] * 4 + [False] * 2


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_heads": 2, "rotary": True, "bias": False},
        {"scores": (ch.Alibi(4), ch.SoftCap(3.0), ch.Sink(0.5)), "scale": 0.2},
        {"head_dim": 6},
        {"output_projection": False},
    ],
    ids=str,
)
def test_last_step_of_a_module_is_its_output(options: dict[str, object], tokens: torch.Tensor) -> None:
    attention = module(**options)
    explanation = explain(attention, tokens, token="sat", head=3, mask=ch.Causal(), tokens=WORDS)
    whole = attention(tokens, mask=ch.Causal())[0, 2]
    if attention.output_projection is None:
        width = attention.head_dim
        _same(explanation.output, whole[3 * width : 4 * width])
        assert explanation.part is None
    else:
        output = explanation.step("output")
        assert output is not None
        _same(output.value, whole)
        parts = [
            explain(attention, tokens, token=2, head=head, mask=ch.Causal()).step("head's part") for head in range(4)
        ]
        bias = attention.output_projection.bias
        total = sum(part.exact for part in parts if part is not None) + (0 if bias is None else bias.detach().double())
        torch.testing.assert_close(total, output.exact, rtol=0, atol=1e-14)
    assert ("turned query" in [step.name for step in explanation.steps]) == (attention.rotary is not None)
    assert explanation.difference < 1e-6
    assert explanation.label == "sat"


def test_cross_attention_shows_key_tokens(tokens: torch.Tensor) -> None:
    torch.manual_seed(1)
    attention = MultiHeadAttention(16, 4, key_dim=5, value_dim=7)
    key, value = torch.randn(1, 3, 5), torch.randn(1, 3, 7)
    explanation = explain(attention, tokens, key, value, token=5, tokens=WORDS, key_tokens=["un", "deux", "trois"])
    assert explanation.tokens == ("un", "deux", "trois")
    assert explanation.weights.shape == (3,)
    assert explanation.difference < 1e-6


def test_unbatched_call_equals_batched_call(tokens: torch.Tensor) -> None:
    attention = module()
    one, other = explain(attention, tokens[0], token=1), explain(attention, tokens, token=1)
    assert torch.equal(one.weights, other.weights)


def test_wrong_output_is_a_difference(tokens: torch.Tensor) -> None:
    attention = module()
    handle = attention.register_forward_hook(lambda module, given, output: output + 1e-3)
    explanation = explain(attention, tokens, token=0)
    handle.remove()
    assert explanation.worst.name == "output"
    assert explanation.difference == pytest.approx(1e-3, rel=1e-2)


def test_wrong_projection_is_a_difference_of_its_step(tokens: torch.Tensor) -> None:
    attention = module()
    handle = attention.key_projection.register_forward_hook(lambda module, given, output: output * 1.01)
    explanation = explain(attention, tokens, token=0)
    handle.remove()
    differences = {step.name: step.difference for step in explanation.steps}
    assert differences["query"] < 1e-6
    assert differences["keys"] > 1e-3
    assert differences["scores"] > 1e-4


@pytest.mark.parametrize(
    ("value", "exact"),
    [
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0])),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, -math.inf])),
        (torch.tensor([1.0, math.inf]), torch.tensor([1.0, -math.inf])),
        (torch.tensor([1.0]), torch.tensor([1.0, 2.0])),
    ],
)
def test_incomparable_values_have_infinite_difference(value: torch.Tensor, exact: torch.Tensor) -> None:
    assert largest_difference(value, exact.double()) == math.inf


def test_empty_row_gives_zero_weights_and_output() -> None:
    x = torch.randn(3, 4)
    explanation = explain(x, x, x, token=1, mask=ch.Dense(torch.tensor([[True] * 3, [False] * 3, [True] * 3])))
    assert explanation.weights.tolist() == [0.0] * 3
    assert explanation.output.tolist() == [0.0] * 4
    assert explanation.difference < 1e-6
    assert "may attend to nothing" in str(explanation)


def test_masked_nan_reaches_no_output() -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    key = x.clone()
    key[2] = math.nan
    explanation = explain(x, key, key, token=1, mask=ch.Causal())
    assert bool(torch.isfinite(explanation.output).all())
    assert explanation.difference < 1e-6
    json.dumps(explanation.to_dict(), allow_nan=False)


@pytest.mark.parametrize("layer", [0, 1, "encoder.blocks.1.attention"])
def test_layer_of_a_model_is_explained_in_evaluation_mode(layer: int | str) -> None:
    torch.manual_seed(2)
    model = SequenceClassifier(10, 16, 4, 2, 3, dropout=0.3)
    model.train()
    model.encoder.blocks[0].eval()
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
    before = model(ids).shape, [part.training for part in model.modules()]
    explanation = explain(model, ids, token=2, head=1, layer=layer)
    assert explanation.difference < 1e-5
    assert [part.training for part in model.modules()] == before[1]
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules()), (
        "hooks must not stay behind"
    )


def test_each_layer_is_explained_on_its_own_input() -> None:
    torch.manual_seed(2)
    model = Encoder(16, 4, 2, norm_first=False).eval()
    x = torch.randn(1, 5, 16)
    first, second = (explain(model, x, token=0, layer=layer) for layer in (0, 1))
    query = first.step("query")
    assert query is not None
    direct = explain(model.blocks[0].attention, x, token=0).step("query")
    assert direct is not None
    assert torch.equal(query.value, direct.value)
    assert not torch.equal(second.weights, first.weights)


def test_language_model_token_attends_to_no_later_token() -> None:
    torch.manual_seed(2)
    model = LanguageModel(10, 16, 4, 1, max_len=8)
    explanation = explain(model, torch.tensor([[1, 2, 3, 4]]), token=1)
    assert explanation.allowed.tolist() == [True, True, False, False]
    assert explanation.mask == "Causal()"


def test_hooks_and_modes_are_restored_if_the_model_raises() -> None:
    torch.manual_seed(2)
    model = SequenceClassifier(10, 16, 4, 1, 2)
    with pytest.raises(ch.ShapeError):
        explain(model, torch.tensor([[99]]), token=0)
    assert model.training
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def _tensors(**options: object) -> Callable[[], Explanation]:
    x = torch.zeros(3, 4)
    return lambda: explain(x, x, x, **{"token": 0, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (_tensors(token=3), ch.ShapeError, "token must be one of 0, 1, 2; got 3"),
        (_tensors(token=-1), ch.ShapeError, "token must be one of"),
        (_tensors(token=True), ch.ShapeError, "token must be one of"),
        (_tensors(token="dog", tokens=["a", "b", "c"]), ch.ShapeError, "0 'a', 1 'b', 2 'c'; got 'dog'"),
        (_tensors(token="a", tokens=["a", "b", "a"]), ch.ShapeError, "occur exactly once in the text; got 'a' at 0, 2"),
        (_tensors(tokens=["a"]), ch.ShapeError, "tokens must have one text for each of 3 tokens; got 1"),
        (_tensors(head=1), ch.ShapeError, "head must be a whole number from 0 to 0; got 1"),
        (_tensors(batch=2), ch.ShapeError, "batch must be"),
        (_tensors(layer=0), ch.UnsupportedError, "layer must be left out for tensors"),
        (_tensors(backend="none"), ch.UnsupportedError, "backend must be one of"),
        (lambda: explain(torch.zeros(3, 4), token=0), ch.ShapeError, "inputs must be key and value, after query"),
        (lambda: explain([1.0], token=0), ch.UnsupportedError, "subject must be tensors or a module"),  # type: ignore[arg-type]
        (lambda: explain(nn.Linear(2, 2), torch.zeros(1, 2, 2), token=0), ch.UnsupportedError, "MultiHeadAttention"),
        (lambda: explain(module(), token=0), ch.UnsupportedError, "inputs must be what MultiHeadAttention takes"),
        (
            lambda: explain(module(), torch.zeros(1, 2, 16), token=0, scale=1.0),
            ch.UnsupportedError,
            "left out for a module",
        ),
        (
            lambda: explain(Encoder(16, 4, 2), torch.zeros(1, 2, 16), token=0, layer=2),
            ch.ShapeError,
            "layer must be one of 0 (blocks.0.attention), 1 (blocks.1.attention); got 2",
        ),
        (lambda: explain(Encoder(16, 4, 2), torch.zeros(2, 2, 16), token=0), ch.ShapeError, "one sequence, batch 1"),
    ],
)
def test_bad_input_raises_one_line_that_lists_the_choices(
    call: Callable[[], Explanation], error: type[ValueError], text: str
) -> None:
    with pytest.raises(error) as raised:
        call()
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


def test_text_shows_steps_keys_and_worst_difference(tokens: torch.Tensor) -> None:
    text = str(explain(module(), tokens, token=1, head=2, mask=ch.Causal(), tokens=WORDS))
    assert text.splitlines()[0].startswith("token 1 'cat' · head 2 of 4 · 6 keys · float32")
    for words in (
        "q = Wq x[1] + b",
        "[6, 4]",
        "Wo[:, 8:12] o",
        "2 of 6 keys are allowed",
        "masked",
        "worst difference",
    ):
        assert words in text


def test_text_shows_the_heaviest_keys_unless_all_rows() -> None:
    x = torch.randn(50, 4)
    explanation = explain(x, x, x, token=0)
    assert "the 24 heaviest of 50 keys" in explanation.text()
    assert "heaviest" not in explanation.text(all_rows=True)
    assert len(explanation.text(all_rows=True).splitlines()) > 50


def test_the_page_escapes_every_text_and_loads_nothing() -> None:
    x = torch.randn(2, 4)
    explanation = explain(x, x, x, token=0, tokens=["<script>alert(1)</script>", "a&b\n"])
    page = explanation._repr_html_()
    assert "<script" not in page
    assert "&lt;script" in page
    assert "a&amp;b\\n" in page
    assert "http" not in page


def test_the_dictionary_is_json_with_none_for_masked_scores() -> None:
    x = torch.randn(3, 4)
    explanation = explain(x, x, x, token=0, mask=ch.Causal())
    read = json.loads(json.dumps(explanation.to_dict(), allow_nan=False))
    masked = next(step for step in read["steps"] if step["name"] == "mask")
    assert masked["value"][1:] == [None, None]
    assert read["allowed"] == [True, False, False]
    assert read["worst_difference"] == explanation.difference
