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
from tests.doubled import doubled
from tests.gemms import name_gemm
from tests.nn.layers.definition import (
    DTYPES,
    MASK_IDS,
    block,
    budget_of,
    by_modules,
    checked,
    factors_of,
    fused,
    output_and_gradients,
    seeds_of,
    tokens,
    unfused,
    upstream_of,
)

pytestmark = [needs_native, pytest.mark.covering(1)]


@pytest.mark.parametrize("mask", [None, ch.Causal(), ch.Padding(torch.tensor([7, 3]))], ids=MASK_IDS[:3])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_observation_gives_the_same_bits(
    norm_first: bool, dtype: torch.dtype, dropout: float, training: bool, mask: ch.Mask | None
) -> None:
    layers: list[dict[str, Any]] = [{}, {"activation": "relu", "bias": False, "num_kv_heads": 2}]
    for options in layers:
        module, x = block(dtype=dtype, norm_first=norm_first, dropout=dropout, **options), tokens(dtype)
        with torch.set_grad_enabled(training):
            for _ in range(2):
                torch.manual_seed(7)
                unobserved = fused(module, x, mask=mask)
                torch.manual_seed(7)
                with ch.observe(module, ch.Want(entropy=True)) as observations:
                    observed = module(x, mask=mask)
                assert len(list(observations)) == 1
                assert torch.equal(unobserved, observed)


@pytest.mark.parametrize("name", ["attention", "feedforward", "trace"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_hooks_give_the_same_bits(norm_first: bool, dtype: torch.dtype, dropout: float, name: str) -> None:
    module, x = block(dtype=dtype, norm_first=norm_first, dropout=dropout), tokens(dtype)
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            torch.manual_seed(7)
            unhooked = module(x)
            torch.manual_seed(7)
            if name == "trace":
                with ch.trace(module):
                    assert torch.equal(module(x), unhooked)
                continue
            with module.get_submodule(name).register_forward_hook(lambda *_: None):
                assert torch.equal(module(x), unhooked)


REPLACEMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "in 16 bits": lambda y: y.bfloat16(),
    "in 64 bits": lambda y: y.double(),
    "one row for all": lambda y: y.mean((0, 1)),
    "one row a sequence": lambda y: y.mean(1, keepdim=True),
    "a number": lambda y: y.mean(),
    "transposed": lambda y: y.transpose(0, 1).contiguous().transpose(0, 1),
    "negative": lambda y: torch._neg_view(y),
}


@pytest.mark.parametrize("how", REPLACEMENTS)
@pytest.mark.parametrize("name", ["attention", "feedforward"])
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_a_hook_may_replace_the_output(norm_first: bool, name: str, how: str) -> None:
    """Any output that can be added to ``x``."""
    module, x = block(norm_first=norm_first).eval(), tokens()
    module.get_submodule(name).register_forward_hook(lambda part, given, output: REPLACEMENTS[how](output))
    try:
        textbook = by_modules(module, x)
    except (RuntimeError, ch.ClearheadError):  # a norm of 64 bits with weights of 32
        with pytest.raises((RuntimeError, ch.ClearheadError)):
            module(x)
        return
    actual = module(x)
    assert actual.dtype == textbook.dtype
    assert actual.shape == textbook.shape
    torch.testing.assert_close(actual, textbook, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_gradients_under_observation_match_the_formula(norm_first: bool, dropout: float) -> None:
    module, x = block(norm_first=norm_first, dropout=dropout), tokens()

    def observed(module: Any, x: Tensor) -> Tensor:
        with ch.observe(module, ch.Want(lse=True)):
            output: Tensor = module(x)
        return output

    factors = factors_of(module, x, seeds_of(module))
    budget_of(module, x, None, output_and_gradients(module, x, call=observed, layer=False), factors)


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_edits_change_the_attention(norm_first: bool) -> None:
    module, x = block(norm_first=norm_first), tokens()

    def edited(module: Any, x: Tensor) -> Tensor:
        with ch.trace(module) as traced:
            traced.switch_off(heads=[1])
            output: Tensor = module(x)
        return output

    for _ in range(3):
        output_and_gradients(module, x)
    budget_of(module, x, None, output_and_gradients(module, x, call=edited, layer=False), off=[1])
    budget_of(module, x, None, output_and_gradients(module, x))


def test_backward_under_observation_matches_the_formula() -> None:
    module, x = block(), tokens()
    torch.manual_seed(7)
    output = module(x)
    with ch.observe(module, ch.Want(lse=True)):
        gradients = torch.autograd.grad(output, [x, *module.parameters()], upstream_of(output), retain_graph=True)
        module(x)
    budget_of(module, x, None, [output.detach(), *gradients])


PARTS = [
    "attention", "attention.query_projection", "attention.value_projection", "attention.output_projection",
    "attention_norm", "feedforward", "feedforward.expand", "feedforward.activation", "feedforward.dropout",
    "feedforward.contract", "feedforward_norm", "residual_dropout",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_hooks_on_parts_fire(norm_first: bool, name: str, kind: str) -> None:
    module, x = block(norm_first=norm_first), tokens()
    output_and_gradients(module, x)
    part, fired = module.get_submodule(name), []
    handle = getattr(part, f"register_{kind}_hook")(lambda *given: fired.append(given[0]))
    for _ in range(2):
        fired.clear()  # the formula calls the activation
        results = output_and_gradients(module, x, layer=False)
        assert fired == [part] * (2 if name == "residual_dropout" else 1)
        budget_of(module, x, None, results)
    handle.remove()
    checked(module, x)


def test_hooks_on_the_block_fire() -> None:
    module, x = block(), tokens()
    fired: list[str] = []
    module.register_forward_pre_hook(lambda *_: fired.append("before"))
    module.register_forward_hook(lambda *_: fired.append("after"))
    checked(module, x)
    assert fired == ["before", "after"] * 2


def test_global_module_hooks_fire() -> None:
    module, x = block(), tokens()
    for _ in range(3):
        module(x)
    fired: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda part, given, output: fired.append(part))
    try:
        results = output_and_gradients(module, x, layer=False)
    finally:
        handle.remove()
    assert all(module.get_submodule(name) in fired for name in PARTS)
    budget_of(module, x, None, results)
    checked(module, x)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2.0 * weight


@pytest.mark.parametrize(
    "name",
    [*(name for name in PARTS if "projection" in name or "norm" in name), "feedforward.expand", "feedforward.contract"],
)
def test_a_parametrized_part_takes_effect(name: str) -> None:
    module, x = block(), tokens()
    for _ in range(3):
        before = module(x)
    parametrize.register_parametrization(module.get_submodule(name), "weight", Doubled())
    results = output_and_gradients(module, x, layer=None)
    assert not torch.equal(before, results[0])
    budget_of(module, x, None, results)


def agrees_with_its_modules(module: Any, x: Tensor, before: Tensor) -> None:
    assert not torch.equal(before, module(x))
    results = output_and_gradients(module, x, layer=False)
    textbook = output_and_gradients(module, x, call=by_modules, layer=False)
    wide = copy.deepcopy(module).double()
    exact = output_and_gradients(wide, x.detach().double().requires_grad_(), call=by_modules, layer=False)
    for place, three in enumerate(zip(results, textbook, exact, strict=True)):
        within_budget(str(place), *three, terms=128)


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("attention", MultiHeadAttention),
        ("feedforward", FeedForward),
        ("attention.key_projection", Linear),
        ("attention.output_projection", Linear),
        ("feedforward.contract", Linear),
        ("attention_norm", nn.LayerNorm),
        ("feedforward_norm", nn.LayerNorm),
        ("residual_dropout", Dropout),
        ("feedforward.dropout", Dropout),
        ("feedforward.activation", nn.GELU),
    ],
)
def test_a_subclass_of_a_part_is_called(name: str, kind: type[nn.Module], norm_first: bool) -> None:
    module, x = block(norm_first=norm_first), tokens()
    for _ in range(3):
        before = module(x)
    module.get_submodule(name).__class__ = doubled(kind)
    agrees_with_its_modules(module, x, before)


class _AssignedForward:
    """A ``forward`` assigned to an object; copies of the object keep it."""

    def __init__(self, kind: type[nn.Module], part: nn.Module) -> None:
        self.kind, self.part = kind, part

    def __call__(self, *given: Any, **options: Any) -> Tensor:
        output: Tensor = self.kind.forward(self.part, *given, **options)
        return 2.0 * output


@pytest.mark.parametrize("name", PARTS)
def test_a_forward_assigned_to_a_part_is_called(name: str) -> None:
    module, x = block(), tokens()
    for _ in range(3):
        before = module(x)
    part = module.get_submodule(name)
    part.forward = _AssignedForward(type(part), part)
    agrees_with_its_modules(module, x, before)


@pytest.mark.parametrize(
    "rule",
    [ch.Sink(nn.Parameter(torch.zeros(4))), ch.RelativeBias(nn.Parameter(torch.zeros(4, 9)))],
    ids=["learned sink", "learned bias"],
)
def test_learned_rules_run_op_by_op(rule: ch.ScoreRule) -> None:
    module, x = block(scores=[rule]), tokens()
    unfused(module, x)
    module(x).sum().backward()
    assert all(part.grad is not None for part in module.parameters())


def test_other_backends_run_op_by_op() -> None:
    module, x = block(DecoderBlock), tokens()
    with torch.no_grad():
        whole, cache = module(x), ch.KVCache()
        steps = [module(x[:, place : place + 1], cache=cache) for place in range(7)]
        torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-5, atol=1e-5)
    module.attention.backend = "tiled"
    results = output_and_gradients(module, x, layer=False)
    budget_of(module, x, None, results)


def test_torch_projections_run_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    name_gemm(monkeypatch, "torch")
    module, x = block(), tokens()
    for _ in range(3):
        unfused(module, x)
