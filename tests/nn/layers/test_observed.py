"""A layer runs op by op, with bitwise identical results, where a part is observed, hooked, edited or replaced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import clearhead as ch
from clearhead.nn import DecoderBlock, FeedForward, MultiHeadAttention
from clearhead.nn.dropout import Dropout
from clearhead.nn.linear import Linear
from tests.agreement import needs_native
from tests.budget import within_budget
from tests.nn.layers.definition import (
    DTYPES,
    MASK_IDS,
    block,
    budget_of,
    by_modules,
    checked,
    factors_of,
    fused,
    numbers,
    seeds_of,
    tokens,
    unfused,
    upstream_of,
)

pytestmark = needs_native


@pytest.mark.parametrize("mask", [None, ch.Causal(), ch.Padding(torch.tensor([7, 3]))], ids=MASK_IDS[:3])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_observation_gives_the_same_bits(
    norm_first: bool, dtype: torch.dtype, dropout: float, training: bool, mask: ch.Mask | None
) -> None:
    layers: list[dict[str, Any]] = [{}, {"activation": "relu", "bias": False, "num_kv_heads": 2}]
    for options in layers:
        own, x = block(dtype=dtype, norm_first=norm_first, dropout=dropout, **options), tokens(dtype)
        with torch.set_grad_enabled(training):
            for _ in range(2):
                torch.manual_seed(7)
                alone = fused(own, x, mask=mask)
                torch.manual_seed(7)
                with ch.observe(own, ch.Want(entropy=True)) as seen:
                    watched = own(x, mask=mask)
                assert len(list(seen)) == 1
                assert torch.equal(alone, watched)


@pytest.mark.parametrize("name", ["attention", "feedforward", "trace"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_hooks_give_the_same_bits(norm_first: bool, dtype: torch.dtype, dropout: float, name: str) -> None:
    own, x = block(dtype=dtype, norm_first=norm_first, dropout=dropout), tokens(dtype)
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            torch.manual_seed(7)
            alone = own(x)
            torch.manual_seed(7)
            if name == "trace":
                with ch.trace(own):
                    assert torch.equal(own(x), alone)
                continue
            with own.get_submodule(name).register_forward_hook(lambda *_: None):
                assert torch.equal(own(x), alone)


HANDED_ON: dict[str, Callable[[Tensor], Tensor]] = {
    "in 16 bits": lambda y: y.bfloat16(),
    "in 64 bits": lambda y: y.double(),
    "one row for all": lambda y: y.mean((0, 1)),
    "one row a sequence": lambda y: y.mean(1, keepdim=True),
    "a number": lambda y: y.mean(),
    "transposed": lambda y: y.transpose(0, 1).contiguous().transpose(0, 1),
    "negative": lambda y: torch._neg_view(y),
}


@pytest.mark.parametrize("how", HANDED_ON)
@pytest.mark.parametrize("name", ["attention", "feedforward"])
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_a_hook_that_hands_on_something_else(norm_first: bool, name: str, how: str) -> None:
    """Whatever may be added to ``x``."""
    own, x = block(norm_first=norm_first).eval(), tokens()
    own.get_submodule(name).register_forward_hook(lambda part, given, output: HANDED_ON[how](output))
    try:
        textbook = by_modules(own, x)
    except (RuntimeError, ch.ClearheadError):  # a norm of 64 bits with weights of 32
        with pytest.raises((RuntimeError, ch.ClearheadError)):
            own(x)
        return
    found = own(x)
    assert found.dtype == textbook.dtype
    assert found.shape == textbook.shape
    torch.testing.assert_close(found, textbook, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_gradients_under_observation(norm_first: bool, dropout: float) -> None:
    own, x = block(norm_first=norm_first, dropout=dropout), tokens()

    def watched(own: Any, x: Tensor) -> Tensor:
        with ch.observe(own, ch.Want(lse=True)):
            output: Tensor = own(x)
        return output

    factors = factors_of(own, x, seeds_of(own))
    budget_of(own, x, None, numbers(own, x, call=watched, layer=False), factors)


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_edits_reach_the_attention(norm_first: bool) -> None:
    own, x = block(norm_first=norm_first), tokens()

    def edited(own: Any, x: Tensor) -> Tensor:
        with ch.trace(own) as traced:
            traced.switch_off(heads=[1])
            output: Tensor = own(x)
        return output

    for _ in range(3):
        numbers(own, x)
    budget_of(own, x, None, numbers(own, x, call=edited, layer=False), off=[1])
    budget_of(own, x, None, numbers(own, x))


def test_backward_under_observation() -> None:
    own, x = block(), tokens()
    torch.manual_seed(7)
    output = own(x)
    with ch.observe(own, ch.Want(lse=True)):
        found = torch.autograd.grad(output, [x, *own.parameters()], upstream_of(output), retain_graph=True)
        own(x)
    budget_of(own, x, None, [output.detach(), *found])


PARTS = [
    "attention", "attention.query_projection", "attention.value_projection", "attention.output_projection",
    "attention_norm", "feedforward", "feedforward.expand", "feedforward.activation", "feedforward.dropout",
    "feedforward.contract", "feedforward_norm", "residual_dropout",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_hooks_fire(norm_first: bool, name: str, kind: str) -> None:
    own, x = block(norm_first=norm_first), tokens()
    numbers(own, x)
    part, seen = own.get_submodule(name), []
    handle = getattr(part, f"register_{kind}_hook")(lambda *given: seen.append(given[0]))
    for _ in range(2):
        seen.clear()  # the formula calls the activation
        found = numbers(own, x, layer=False)
        assert seen == [part] * (2 if name == "residual_dropout" else 1)
        budget_of(own, x, None, found)
    handle.remove()
    checked(own, x)


def test_hooks_on_the_block_itself() -> None:
    own, x = block(), tokens()
    seen: list[str] = []
    own.register_forward_pre_hook(lambda *_: seen.append("before"))
    own.register_forward_hook(lambda *_: seen.append("after"))
    checked(own, x)
    assert seen == ["before", "after"] * 2


def test_hooks_on_every_module() -> None:
    own, x = block(), tokens()
    for _ in range(3):
        own(x)
    seen: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda part, given, output: seen.append(part))
    try:
        found = numbers(own, x, layer=False)
    finally:
        handle.remove()
    assert all(own.get_submodule(name) in seen for name in PARTS)
    budget_of(own, x, None, found)
    checked(own, x)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2.0 * weight


@pytest.mark.parametrize(
    "name",
    [*(name for name in PARTS if "projection" in name or "norm" in name), "feedforward.expand", "feedforward.contract"],
)
def test_a_parametrized_part(name: str) -> None:
    own, x = block(), tokens()
    for _ in range(3):
        before = own(x)
    parametrize.register_parametrization(own.get_submodule(name), "weight", Doubled())
    found = numbers(own, x, layer=None)
    assert not torch.equal(before, found[0])
    budget_of(own, x, None, found)


class OwnAttention(MultiHeadAttention):
    def forward(self, *given: Any, **options: Any) -> Tensor:
        return 2.0 * super().forward(*given, **options)


class OwnFeedForward(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * super().forward(x)


class OwnLinear(Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * super().forward(input)


class OwnNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * super().forward(input)


class OwnDropout(Dropout):
    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * super().forward(input)


class OwnActivation(nn.GELU):
    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * super().forward(input)


def agrees_with_its_modules(own: Any, x: Tensor, before: Tensor) -> None:
    assert not torch.equal(before, own(x))
    found = numbers(own, x, layer=False)
    textbook = numbers(own, x, call=by_modules, layer=False)
    wide = copy.deepcopy(own).double()
    exact = numbers(wide, x.detach().double().requires_grad_(), call=by_modules, layer=False)
    for place, three in enumerate(zip(found, textbook, exact, strict=True)):
        within_budget(str(place), *three, terms=128)


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("attention", OwnAttention), ("feedforward", OwnFeedForward), ("attention.key_projection", OwnLinear),
     ("attention.output_projection", OwnLinear), ("feedforward.contract", OwnLinear), ("attention_norm", OwnNorm),
     ("feedforward_norm", OwnNorm), ("residual_dropout", OwnDropout), ("feedforward.dropout", OwnDropout),
     ("feedforward.activation", OwnActivation)],
)  # fmt: skip
def test_a_subclass_of_a_part_is_called(name: str, kind: type[nn.Module], norm_first: bool) -> None:
    own, x = block(norm_first=norm_first), tokens()
    for _ in range(3):
        before = own(x)
    own.get_submodule(name).__class__ = kind
    agrees_with_its_modules(own, x, before)


class _Set:
    """A ``forward`` that is set on an object, and goes with its copies."""

    def __init__(self, kind: type[nn.Module], part: nn.Module) -> None:
        self.kind, self.part = kind, part

    def __call__(self, *given: Any, **options: Any) -> Tensor:
        output: Tensor = self.kind.forward(self.part, *given, **options)
        return 2.0 * output


@pytest.mark.parametrize("name", PARTS)
def test_a_forward_that_is_set_on_a_part_is_called(name: str) -> None:
    own, x = block(), tokens()
    for _ in range(3):
        before = own(x)
    part = own.get_submodule(name)
    part.forward = _Set(type(part), part)
    agrees_with_its_modules(own, x, before)


@pytest.mark.parametrize(
    "rule",
    [ch.Sink(nn.Parameter(torch.zeros(4))), ch.RelativeBias(nn.Parameter(torch.zeros(4, 9)))],
    ids=["learned sink", "learned bias"],
)
def test_learned_rules_run_op_by_op(rule: ch.ScoreRule) -> None:
    own, x = block(scores=[rule]), tokens()
    unfused(own, x)
    own(x).sum().backward()
    assert all(part.grad is not None for part in own.parameters())


def test_a_cache_and_other_backends_run_op_by_op() -> None:
    own, x = block(DecoderBlock), tokens()
    with torch.no_grad():
        whole, cache = own(x), ch.KVCache()
        steps = [own(x[:, place : place + 1], cache=cache) for place in range(7)]
        torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-5, atol=1e-5)
    own.attention.backend = "tiled"
    found = numbers(own, x, layer=False)
    budget_of(own, x, None, found)


def test_products_that_are_torchs_run_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARHEAD_PROJECTION", "torch")
    own, x = block(), tokens()
    for _ in range(3):
        unfused(own, x)
