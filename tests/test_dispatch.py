"""The choice of a backend, and its report."""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from clearhead.backends import native
from clearhead.backends.capability import Capability
from clearhead.dispatch import BACKENDS, loaded
from tests.problems import tensors


def _choice(**options: object) -> str | None:
    return ch.explain_dispatch(*tensors(), **options).choice  # type: ignore[arg-type]


def _or_native(without: str) -> str:
    """The kernels if they are built, else the backend that replaces them."""
    return without if native.BACKEND.capability.requires() else "native"


def test_auto_runs_the_first_able_backend() -> None:
    assert _choice() == _or_native("sdpa")
    assert _choice(mask=ch.Causal() & ch.Padding([3, 13])) == _or_native("sdpa")
    assert _choice(scores=ch.SoftCap(2.0)) == _or_native("tiled")
    assert _choice(dropout=0.1) == _or_native("tiled")
    assert _choice(want=ch.Want(lse=True)) == _or_native("tiled")
    assert _choice(want=ch.Want(max_score=True)) == _or_native("tiled")
    assert _choice(scores=ch.ScoreFunction(lambda score, b, h, i, j: score * 2)) == "tiled"
    assert _choice(scores=ch.ScoreFunction(lambda score, b, h, i, j: score - (i - j).abs())) == _or_native("tiled")
    assert _choice(want=ch.Want(received=True)) == _or_native("tiled")
    assert _choice(want=ch.Want(received=True), backend="sdpa") is None


def test_mask_beyond_the_table_limit_runs_tiled() -> None:
    query = torch.zeros(1, 1, 8192, 8)
    reasons = ch.explain_dispatch(query, query, query, mask=ch.Window(10)).reasons["sdpa"]
    assert reasons == ("would need a mask of 67,108,864 entries (limit 16,777,216)",)
    assert not ch.explain_dispatch(query, query, query, mask=ch.Causal()).reasons["sdpa"]
    longer = torch.zeros(1, 1, 8193, 8)
    assert ch.explain_dispatch(longer, longer, longer, mask=ch.Strided(3)).choice == "tiled"


def test_report_names_the_choice_and_every_reason() -> None:
    text = str(ch.explain_dispatch(*tensors(), scores=ch.SoftCap(2.0), dropout=0.1))
    assert text.splitlines()[0] == f"backend: {_or_native('tiled')}"
    assert "cannot apply SoftCap to scores; cannot reproduce dropout from a seed" in text
    for name in BACKENDS:
        assert f"  {name} " in text


def test_named_backend_runs_or_raises_with_its_reasons() -> None:
    inputs = tensors()
    with pytest.raises(ch.UnsupportedError, match="sdpa: cannot reproduce dropout from a seed"):
        ch.attention(*inputs, dropout=0.1, backend="sdpa")
    with pytest.raises(ch.UnsupportedError, match="sdpa: cannot compute received"):
        ch.observe_attention(*inputs, want=ch.Want(received=True), backend="sdpa")


def test_report_agrees_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every backend without reasons runs; every one with reasons raises."""
    inputs = tensors()
    for options in ({}, {"scores": ch.Sink(0.0)}, {"dropout": 0.2}, {"mask": ch.Strided(2)}):
        report = ch.explain_dispatch(*inputs, **options)
        for name, reasons in report.reasons.items():
            if reasons:
                with pytest.raises(ch.UnsupportedError):
                    ch.attention(*inputs, **options, backend=name)
            else:
                ch.attention(*inputs, **options, backend=name)


def test_capability_rows_are_text() -> None:
    for backend in map(loaded, BACKENDS):
        row = backend.capability.row()
        assert all(isinstance(word, str) and word for word in row.values()), backend.name


def test_capability_without_rules_says_none() -> None:
    row = Capability(rules=(), statistics=frozenset()).row()
    assert (row["score rules"], row["statistics"]) == ("none", "none")


def test_refused_sizes_say_their_number() -> None:
    query = torch.zeros(1, 64, 4096, 1)
    reasons = ch.explain_dispatch(query, query, query, want=ch.Want(received=True)).reasons["reference"]
    assert reasons == ("would need memory for 1,073,741,824 scores (limit 268,435,456)",)


def test_long_documents_need_no_square_mask() -> None:
    """Padding is one row a document and causal order a flag, however long the documents are."""
    lengths = [5000, 4500]
    query = torch.randn(1, 1, sum(lengths), 4, generator=torch.Generator().manual_seed(1))
    for mask in (ch.Documents(lengths=lengths), ch.Documents(lengths=lengths) & ch.Causal()):
        assert not ch.explain_dispatch(query, query, query, mask=mask).reasons["sdpa"]
        output = ch.attention(query, query, query, mask=mask, backend="sdpa")
        torch.testing.assert_close(output, ch.attention(query, query, query, mask=mask, backend="tiled"))
    windowed = ch.Documents(lengths=lengths) & ch.Window(3)
    assert ch.explain_dispatch(query, query, query, mask=windowed).reasons["sdpa"]


def test_explaining_draws_no_seed() -> None:
    torch.manual_seed(0)
    right = torch.rand(1)
    torch.manual_seed(0)
    ch.explain_dispatch(*tensors(), dropout=0.5)
    assert torch.equal(torch.rand(1), right)


@pytest.mark.parametrize("want", ["lse", {}, 0])
def test_explaining_takes_a_want(want: object) -> None:
    with pytest.raises(ch.UnsupportedError, match=r"explain_dispatch: want must be a ch\.Want; got"):
        ch.explain_dispatch(*tensors(), want=want)  # type: ignore[arg-type]


@pytest.mark.parametrize("mask", [None, ch.Causal(), ch.Window(2), ch.Padding([3]), ch.Documents(lengths=[2, 4])])
@pytest.mark.parametrize("scores", [(), (ch.SoftCap(3.0),), (ch.Alibi(2),)])
def test_meta_tensors_give_meta_tensors(mask: ch.Mask | None, scores: tuple[ch.ScoreRule, ...]) -> None:
    tensor = torch.empty(1, 2, 6, 4, device="meta")
    output = ch.attention(tensor, tensor, tensor, mask=mask, scores=scores)
    assert output.is_meta
    assert output.shape == tensor.shape


@pytest.mark.parametrize("widths", [(300, 20), (20, 300), (257, 256)], ids=str)
@pytest.mark.parametrize("mask", [None, ch.Causal(), ch.Window(5)], ids=["all", "causal", "window"])
def test_sdpa_runs_with_unequal_head_and_value_dim(
    widths: tuple[int, int], mask: ch.Mask | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = tuple(
        torch.randn(2, heads, 40, width) for heads, width in zip((4, 2, 2), (widths[0], *widths), strict=True)
    )
    expected = ch.attention(*(tensor.double() for tensor in inputs), mask=mask, backend="reference")
    learned = tuple(tensor.clone().requires_grad_() for tensor in inputs)
    # Its backward is far off where scores are huge, so a step of training goes by the formula.
    torch.testing.assert_close(
        ch.attention(*learned, mask=mask, backend="sdpa").double(), expected, rtol=1e-4, atol=1e-5
    )
    # Without gradients there is no square of scores.
    monkeypatch.setattr("clearhead.backends.sdpa.unfused_attention", None)
    torch.testing.assert_close(
        ch.attention(*inputs, mask=mask, backend="sdpa").double(), expected, rtol=1e-4, atol=1e-5
    )
