"""``scores=None`` means no score rules, in every public function and module that takes rules."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch

Q = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0))
X = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(1))
IDS = torch.tensor([[1, 2, 3, 4]])


def module(make: Callable[..., Any], *arguments: Any, inputs: tuple[Tensor, ...] = (X,), **options: Any) -> Any:
    def call(scores: Any) -> Tensor:
        torch.manual_seed(0)
        with torch.no_grad():
            output: Tensor = make(*arguments, **options, scores=scores).eval()(*inputs)
        return output

    return call


TAKES_RULES: dict[str, Callable[[Any], Any]] = {
    "attention": lambda scores: ch.attention(Q, Q, Q, scores=scores),
    "observe_attention": lambda scores: ch.observe_attention(Q, Q, Q, want=ch.Want(lse=True), scores=scores).lse,
    "explain_dispatch": lambda scores: str(ch.explain_dispatch(Q, Q, Q, scores=scores)),
    "explain": lambda scores: ch.explain(Q, Q, Q, token=1, scores=scores).text(),
    "view": lambda scores: ch.view(Q, Q, scores=scores).data,
    "sparse.top_k_attention": lambda scores: ch.sparse.top_k_attention(Q, Q, Q, k=2, scores=scores),
    "nn.MultiHeadAttention": module(ch.nn.MultiHeadAttention, 8, 2),
    "nn.Encoder": module(ch.nn.Encoder, 8, 2, num_layers=1),
    "nn.Decoder": module(ch.nn.Decoder, 8, 2, num_layers=1),
    "nn.EncoderBlock": module(ch.nn.EncoderBlock, 8, 2),
    "nn.DecoderBlock": module(ch.nn.DecoderBlock, 8, 2),
    "nn.LanguageModel": module(ch.nn.LanguageModel, 10, 8, num_heads=2, num_layers=1, max_len=8, inputs=(IDS,)),
    "nn.SequenceClassifier": module(
        ch.nn.SequenceClassifier, 10, 8, num_heads=2, num_layers=1, num_classes=3, max_len=8, inputs=(IDS,)
    ),
}


def test_every_public_name_with_rules_is_tried() -> None:
    names = []
    for prefix, space in (("", ch), ("nn.", ch.nn), ("sparse.", ch.sparse)):
        for name in space.__all__:
            one = getattr(space, name)
            if callable(one) and "scores" in _parameters(one):
                names.append(prefix + name)
    assert set(names) == set(TAKES_RULES)


def _parameters(one: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(one).parameters)
    except ValueError:
        return set()


@pytest.mark.parametrize("name", TAKES_RULES)
def test_none_means_no_rules(name: str) -> None:
    with_none, without = TAKES_RULES[name](None), TAKES_RULES[name](())
    if isinstance(with_none, Tensor):
        assert torch.equal(with_none, without)
    else:
        assert with_none == without


@pytest.mark.slow
def test_none_in_a_compiled_call() -> None:
    for mask in (None, ch.Window(2) & ch.Padding([3])):
        compiled = torch.compile(
            lambda query, mask=mask: ch.attention(query, query, query, mask=mask, scores=None),
            backend="eager",
            fullgraph=True,
        )
        torch.testing.assert_close(compiled(Q), ch.attention(Q, Q, Q, mask=mask))
