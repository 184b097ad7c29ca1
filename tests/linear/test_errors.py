"""Bad input raises one line that says what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import clearhead as ch
from clearhead.errors import ClearheadError, MaskError, ShapeError, UnsupportedError
from clearhead.linear import (
    LinearCache,
    LinearState,
    PositiveRandomFeatures,
    delta_attention,
    gated_linear_attention,
    linear_attention,
    retention,
)

X = torch.zeros(1, 2, 6, 4)
STATE = linear_attention(X, X, X, causal=True)[1]
MATRIX, NORMALIZER = torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4)
GATE, RATE = torch.zeros(1, 2, 6, 4), torch.zeros(1, 2, 6)
L, R, G, D = linear_attention, retention, gated_linear_attention, delta_attention

WRONG: dict[str, tuple[Callable[[], Any], type[ClearheadError], str]] = {
    "not a tensor": (lambda: L([1.0], X, X), ShapeError, "query must have axes"),
    "one axis": (lambda: L(X, X[0, 0, 0], X), ShapeError, "key must have axes"),
    "whole numbers": (lambda: L(X.int(), X, X), UnsupportedError, "query must be floating point"),
    "dtypes": (lambda: L(X, X.double(), X), UnsupportedError, "key must have query's dtype and device"),
    "heads": (lambda: L(X, X[:, [0, 1, 0]], X[:, [0, 1, 0]]), ShapeError, "divides query's"),
    "no heads of keys": (lambda: L(X, X[:, :0], X[:, :0]), ShapeError, "divides query's"),
    "no heads of queries": (lambda: L(X[:, :0], X, X), ShapeError, "divides query's 0"),
    "no channels": (lambda: R(X[..., :0], X[..., :0], X), ShapeError, "query must have at least one channel"),
    "no channels of values": (lambda: L(X, X, X[..., :0]), ShapeError, "value must have at least one channel"),
    "values of other heads": (lambda: L(X, X, X[:, :1]), ShapeError, "value must have key's batch and heads"),
    "batch": (lambda: L(X, X[:1].repeat(3, 1, 1, 1), X), ShapeError, "key must have query's batch and heads"),
    "channels": (lambda: L(X, X[..., :3], X), ShapeError, "key must have query's 4 channels"),
    "lengths": (lambda: L(X, X, X[:, :, :5]), ShapeError, "value must have key's length 6"),
    "causal lengths": (lambda: L(X[:, :, :2], X, X, causal=True), ShapeError, "Earlier tokens belong in state="),
    "map": (lambda: L(X, X, X, feature_map="cosine"), UnsupportedError, "elu, relu, identity, unit, performer"),
    "map of another width": (
        lambda: L(X, X, X, feature_map=PositiveRandomFeatures.draw(5)), ShapeError, "be drawn for head_dim 4"
    ),
    "unnormalised performer": (
        lambda: L(X, X, X, feature_map="performer", normalize=False), UnsupportedError, "normalize must be True"
    ),
    "form": (lambda: L(X, X, X, form="fast"), UnsupportedError, "auto, recurrent, chunked, parallel"),
    "chunk": (lambda: L(X, X, X, causal=True, chunk_size=48), ShapeError, "chunk_size must be a power of two"),
    "chunk 0": (lambda: L(X, X, X, causal=True, chunk_size=0), ShapeError, "chunk_size must be a power of two"),
    "state": (lambda: L(X, X, X, state=X), ShapeError, "state must be a LinearState"),
    "state's shape": (lambda: L(X[:, :1], X[:, :1], X[:, :1], state=STATE), ShapeError, "be of shape (1, 1, 4, 4)"),
    "state's kind": (
        lambda: L(X, X, X, state=STATE, feature_map="identity"), ShapeError, "without a normalizer"
    ),
    "state's dtype": (
        lambda: L(X.double(), X.double(), X.double(), state=STATE), ShapeError, "float64 on cpu, with a normalizer"
    ),
    "a short normalizer": (lambda: _on((MATRIX, NORMALIZER[:, :, :1])), ShapeError, "normalizer (1, 2, 1)"),
    "a normalizer in float64": (lambda: _on((MATRIX, NORMALIZER.double())), ShapeError, "(1, 2, 4) torch.float64 on"),
    "a normalizer elsewhere": (lambda: _on((MATRIX, NORMALIZER.to("meta"))), ShapeError, "torch.float32 on meta"),
    "a matrix elsewhere": (lambda: _on((MATRIX.to("meta"), NORMALIZER)), ShapeError, "float32 on cpu, with a normal"),
    "no normalizer": (lambda: _on((MATRIX, None)), ShapeError, "and normalizer NoneType"),
    "a normalizer that is no tensor": (lambda: _on((MATRIX, 1.0)), ShapeError, "and normalizer float"),
    "keys whose features are all 0": (
        lambda: L(X, X + 1e3, X, feature_map="performer"), UnsupportedError, "key must have features within torch"
    ),
    "state of documents": (
        lambda: L(X, X, X, state=STATE, mask=ch.Documents([3, 3])), ShapeError, "be of shape (2, 2, 4, 4)"
    ),
    "mask": (lambda: L(X, X, X, mask=ch.Window(2)), MaskError, "be None, Causal(), Padding, Documents or their &"),
    "mask or": (lambda: L(X, X, X, mask=ch.Causal() | ch.Padding([3])), MaskError, "or their &; got Causal()"),
    "mask tensor": (lambda: L(X, X, X, mask=torch.ones(6, 6)), MaskError, "got Tensor"),
    "padding": (lambda: L(X, X, X, mask=ch.Padding([7])), ShapeError, "lengths of at most k_len 6"),
    "documents": (lambda: L(X, X, X, mask=ch.Documents([7])), MaskError, "cover the call's tokens"),
    "documents twice": (
        lambda: L(X, X, X, mask=ch.Documents([6]) & ch.Documents([6])), MaskError, "or their &; got Documents"
    ),
    "documents in pieces": (
        lambda: L(X, X, X, mask=ch.Documents(ids=torch.tensor([0, 1, 0, 1, 1, 1]))), MaskError, "several pieces"
    ),
    "documents in a batch": (
        lambda: L(*[X.expand(2, -1, -1, -1)] * 3, mask=ch.Documents([6])), MaskError, "in a batch of 1; got batch 2"
    ),
    "decay": (lambda: R(X, X, X, decay=[0.5, 1.5]), ShapeError, "decay must be 2 numbers above 0 and at most 1"),
    "decay of heads": (lambda: R(X, X, X, decay=[0.5]), ShapeError, "one per head; got shape (1,)"),
    "gate": (lambda: G(X, X, X, log_gate=GATE[:, :, :3]), ShapeError, "log_gate must have key's axes"),
    "gate above 0": (lambda: G(X, X, X, log_gate=GATE + 1), ShapeError, "be finite and at most 0; got values from 1"),
    "gate -inf": (lambda: G(X, X, X, log_gate=GATE - torch.inf), ShapeError, "-100 is a gate of nearly 0"),
    "gate nan": (lambda: G(X, X, X, log_gate=GATE * torch.nan), ShapeError, "got values from nan to nan"),
    "gate of a real token": (
        lambda: G(X, X, X, log_gate=GATE + 1, mask=ch.Causal() & ch.Padding([1])), ShapeError, "finite and at most 0"
    ),
    "gate's channels": (lambda: G(X, X, X, log_gate=GATE[..., :3]), ShapeError, "log_gate must have 4 features or 1"),
    "rate": (lambda: D(X, X, X, rate=GATE), ShapeError, "rate must have key's axes but the last, (1, 2, 6)"),
    "complex gate": (lambda: G(X, X, X, log_gate=GATE + 0j), UnsupportedError, "log_gate must be real"),
    "complex rate": (lambda: D(X, X, X, rate=RATE + 0j), UnsupportedError, "got torch.complex64 on cpu"),
    "gate elsewhere": (lambda: G(X, X, X, log_gate=GATE.to("meta")), UnsupportedError, "on key's device cpu"),
    "rate elsewhere": (lambda: D(X, X, X, rate=RATE.to("meta")), UnsupportedError, "on key's device cpu"),
    "features": (lambda: PositiveRandomFeatures.draw(4, 0), ShapeError, "num_features must be a whole number"),
    "features' scale": (lambda: PositiveRandomFeatures.draw(4, scale=0.0), ShapeError, "scale must be positive"),
    "cache": (lambda: _twice(), ShapeError, "match the cached state, [1, 2, 4, 4]"),
}  # fmt: skip


def _on(parts: tuple[Any, Any]) -> None:
    """Every form goes on from a state, and each must refuse it; the last to be tried is the kernels'."""
    for form in ("parallel", "recurrent"):
        with pytest.raises(ShapeError):
            L(X, X, X, causal=True, form=form, state=LinearState(matrix=parts[0], normalizer=parts[1]))
    L(X, X, X, causal=True, form="chunked", state=LinearState(matrix=parts[0], normalizer=parts[1]))


def _twice() -> None:
    cache = LinearCache()
    cache.update(STATE, 6)
    cache.update(LinearState(matrix=torch.zeros(3, 2, 4, 4)), 1)


@pytest.mark.parametrize("call", WRONG)
def test_bad_input_raises_one_line(call: str) -> None:
    run, kind, text = WRONG[call]
    with pytest.raises(kind) as raised:
        run()
    said = str(raised.value)
    assert text in said
    assert "\n" not in said
    assert " must " in said
    assert "; got " in said
