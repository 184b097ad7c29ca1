"""Score rules within a fused layer, alone and shared by the layers of a stack."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.nn import Decoder, DecoderBlock, Encoder, MultiHeadAttention
from tests.agreement import needs_native
from tests.budget import within_budget
from tests.nn.layers.definition import (
    DTYPES,
    KINDS,
    MASK_IDS,
    MASKS,
    Block,
    attended,
    block,
    budget_of,
    checked,
    decoded,
    draw,
    formula,
    fused,
    output_and_gradients,
    padding_is_contained,
    same,
    tokens,
)

pytestmark = [needs_native, pytest.mark.covering(1)]

LENGTH = 37


def drawn(*shape: int) -> Tensor:
    return draw(*shape, seed=11)


RULES: dict[str, list[ch.ScoreRule]] = {
    "alibi": [ch.Alibi(4)],
    "relative bias": [ch.RelativeBias(drawn(4, 9))],
    "soft cap": [ch.SoftCap(1.5)],
    "sink": [ch.Sink(drawn(4))],
    "all of them": [ch.SoftCap(2.0), ch.Alibi(4), ch.RelativeBias(drawn(4, 5)), ch.Sink(drawn(4))],
}
#: With a bias for seven queries and keys.
DENSE = RULES | {"dense bias": [ch.DenseBias(drawn(4, 7, 7))], "one for all heads": [ch.DenseBias(drawn(7, 7))]}
NAMES = pytest.mark.parametrize("name", RULES)


def fresh(name: str) -> list[ch.ScoreRule]:
    return [rule.mapped(torch.clone) for rule in DENSE[name]]


def assert_matches_formula(module: Any, actual: Tensor, x: Tensor) -> None:
    with torch.no_grad():
        textbook, exact = formula(module, x), formula(copy.deepcopy(module).double(), x.double())
    within_budget("output", actual, textbook, exact, terms=x.shape[0] * x.shape[1], dtype=x.dtype)


@pytest.mark.parametrize("mask", MASKS[:3], ids=MASK_IDS[:3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DENSE)
def test_output_and_every_gradient(
    name: str, kind: type[Block], norm_first: bool, dtype: torch.dtype, mask: ch.Mask | None
) -> None:
    checked(block(kind, dtype, norm_first=norm_first, scores=fresh(name)), tokens(dtype), mask)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@NAMES
def test_decoding_with_a_cache_matches_the_formula(name: str, dtype: torch.dtype, kinds: list[str]) -> None:
    module, x = block(DecoderBlock, dtype, scores=fresh(name)), draw(2, LENGTH, 32, dtype=dtype)
    for calls in ((9, *[1] * 28), (1,) * LENGTH, (3, 1, 5, 1, 1, 20, 2, 4)):
        assert_matches_formula(module, decoded(module, x, calls, cache=ch.KVCache()), x)
    assert set(kinds) == {"layer"}


@pytest.mark.parametrize("kind", [Decoder, Encoder])
@NAMES
def test_layers_that_share_rules_match_the_formula(name: str, kind: Any, kinds: list[str]) -> None:
    torch.manual_seed(1)
    module, x = kind(32, 4, 3, scores=fresh(name), dropout=0.0).eval(), draw(2, 9, 32)
    with torch.no_grad():
        right = x
        for layer in module.blocks:
            right = formula(layer, right)
        right = module.norm(right)
        for _ in range(3):
            torch.testing.assert_close(module(x), right, rtol=1e-5, atol=1e-5)
    assert kinds == ["stack"] * 3


@NAMES
def test_decoding_a_stack_token_by_token_matches_the_prefill(name: str, kinds: list[str]) -> None:
    torch.manual_seed(1)
    module, x = Decoder(32, 4, 3, scores=fresh(name), rotary=True, dropout=0.0).eval(), draw(2, LENGTH, 32)
    with torch.no_grad():
        right = module(x)
    output = decoded(module, x, [9, *[1] * 28], cache=module.new_cache())
    torch.testing.assert_close(output, right, rtol=1e-5, atol=1e-5)
    assert set(kinds) == {"stack"}


def _written_into(part: nn.Module) -> None:
    with torch.no_grad():
        for tensor in (*part.parameters(), *part.buffers()):
            tensor.mul_(3.0)


def _replaced(part: nn.Module) -> None:
    for name, tensor in [*part.named_buffers()]:
        setattr(part, name, tensor * 3.0)
    for name, parameter in [*part.named_parameters()]:
        setattr(part, name, nn.Parameter(parameter.detach() * 3.0))


def _moved(part: nn.Module) -> None:
    for tensor in (*part.parameters(), *part.buffers()):
        tensor.data = tensor.data * 3.0


def _loaded(part: nn.Module) -> None:
    part.load_state_dict({name: 3.0 * tensor for name, tensor in part.state_dict().items()})


@pytest.mark.parametrize("change", [_written_into, _replaced, _moved, _loaded])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["attention", "block", "stack"])
def test_changed_rule_tensors_take_effect(
    kind: str, dtype: torch.dtype, learned: bool, change: Any, kinds: list[str]
) -> None:
    torch.manual_seed(1)
    table = drawn(4, 9)
    scores = [ch.RelativeBias(nn.Parameter(table) if learned else table), ch.Alibi(4)]
    x = draw(2, 9, 32, dtype=dtype)
    module: Any = (
        {
            "attention": lambda: MultiHeadAttention(32, 4, scores=scores),
            "block": lambda: block(scores=scores),
            "stack": lambda: Encoder(32, 4, 2, scores=scores, dropout=0.0),
        }[kind]()
        .to(dtype)
        .eval()
    )
    parts = [part for part in module.modules() if isinstance(part, MultiHeadAttention)]

    def right(module: Any, x: Tensor) -> Tensor:
        if kind == "attention":
            return attended(module, x, x, None)
        if kind == "block":
            return formula(module, x)
        for layer in module.blocks:
            x = formula(layer, x)
        output: Tensor = module.norm(x)
        return output

    with torch.no_grad():
        for round_ in range(3):
            if round_:
                for holder in parts[0].scores:
                    change(holder)
            for _ in range(3):
                exact = right(copy.deepcopy(module).double(), x.double())
                within_budget("output", module(x), right(module, x), exact, terms=2 * 9, dtype=dtype)
    assert len(kinds) == 9


@NAMES
def test_observation_gives_the_same_bits(name: str) -> None:
    module, x = block(DecoderBlock, scores=fresh(name)), tokens()
    unobserved = [output_and_gradients(module, x)]
    with ch.observe(module, ch.Want(entropy=True)) as observations:
        observed = output_and_gradients(module, x, layer=False)
    assert len(list(observations)) == 1
    for results in unobserved:
        same(results, observed)


@pytest.mark.parametrize("rule", ["relative bias", "sink"])
def test_learned_rules_are_fused_only_without_gradients(rule: str, kinds: list[str]) -> None:
    module, x = block(scores=[each.mapped(nn.Parameter) for each in fresh(rule)]), tokens()
    for _ in range(3):
        results = output_and_gradients(module, x, layer=False)
        budget_of(module, x, None, results)
        with torch.no_grad():
            torch.testing.assert_close(module(x), results[0], rtol=1e-5, atol=1e-5)
            for part in module.parameters():
                part.add_(0.01)
    assert kinds == ["layer"] * 3


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_masked_nan_or_infinity_reaches_only_its_own_row(bad: float) -> None:
    upstream = draw(2, 7, 32, seed=3).index_fill(1, torch.tensor([5]), 0.0)
    padding_is_contained(block(scores=fresh("all of them")), tokens(), upstream, bad)


def test_create_graph_gives_the_same_gradients() -> None:
    module, x = block(scores=fresh("alibi")), tokens()
    (plain,) = torch.autograd.grad(module(x).square().sum(), x)
    (gradients,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    torch.testing.assert_close(gradients, plain, rtol=1e-4, atol=1e-5)


def test_modifying_a_rule_before_backward_raises() -> None:
    module, x = block(scores=fresh("alibi")), tokens()
    output = fused(module, x)
    module.attention.scores[0].slopes.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_different_rules_of_the_same_sizes_alternate() -> None:
    x, table = draw(2, 9, 32), drawn(4, 9)
    cases = [
        [ch.SoftCap(1.0)],
        [ch.SoftCap(2.0)],
        [ch.Alibi(4)],
        [ch.Sink(ch.Alibi(4).slopes.clone())],
        [ch.Alibi(4), ch.Sink(drawn(4))],
        [ch.Sink(drawn(4)), ch.Alibi(4)],
        [ch.RelativeBias(table), ch.RelativeBias(table)],
        [ch.RelativeBias(table), ch.RelativeBias(table.flip(0))],
    ]
    modules = [block(scores=rules) for rules in cases]
    with torch.no_grad():
        rights = [formula(module, x) for module in modules]
        for _ in range(4):
            for module, right in zip(modules, rights, strict=True):
                torch.testing.assert_close(module(x), right, rtol=1e-5, atol=1e-5)
