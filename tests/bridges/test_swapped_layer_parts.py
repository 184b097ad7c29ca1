"""A swapped encoder layer of torch calls hooks, and runs op by op if it is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.bridges import swap
from tests.agreement import needs_native
from tests.bridges.torch_layers import (
    BATCH,
    CALLS,
    DTYPES,
    HEADS,
    LENGTH,
    assert_agrees,
    is_layer,
    make_layer,
    output_and_gradients,
    swapped,
    tokens,
)
from tests.doubled import doubled

pytestmark = [needs_native, pytest.mark.usefixtures("_kernels"), pytest.mark.covering(1)]


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
@pytest.mark.parametrize(
    "name", ["linear1", "linear2", "norm1", "norm2", "dropout", "dropout1", "dropout2", "self_attn", ""]
)
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_hooks_fire_once_for_each_call(norm_first: bool, name: str, kind: str) -> None:
    theirs = make_layer(norm_first=norm_first)
    ours, x = swapped(theirs), tokens()
    for _ in range(3):
        output_and_gradients(ours, x, {})
    part, fired = ours.get_submodule(name), []
    handle = getattr(part, f"register_{kind}_hook")(lambda *given: fired.append(given[0]))
    for count in (1, 2, 3):
        output_and_gradients(ours, x, {}, is_fused=not (name or kind == "full_backward"))
        assert fired == [part] * count
    assert_agrees(theirs, ours, x, is_fused=None, times=1)
    handle.remove()
    assert_agrees(theirs, ours, x)


def test_a_hook_may_change_the_output() -> None:
    theirs = make_layer()
    ours, x = swapped(theirs), tokens()
    for _ in range(3):
        output_and_gradients(ours, x, {})
    for layer in (theirs, ours):
        layer.linear2.register_forward_hook(lambda part, given, output: 2.0 * output)
        layer.self_attn.register_forward_hook(lambda part, given, output: (3.0 * output[0], output[1]))
    assert_agrees(theirs, ours, x, is_fused=False)


class DoubledFeedForward(nn.TransformerEncoderLayer):
    def _ff_block(self, x: Tensor) -> Tensor:
        return 2.0 * super()._ff_block(x)


class DoubledAttention(nn.TransformerEncoderLayer):
    def _sa_block(self, *given: Any, **options: Any) -> Tensor:
        return 2.0 * super()._sa_block(*given, **options)


@pytest.mark.parametrize("kind", [DoubledFeedForward, DoubledAttention])
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_an_overridden_block_of_a_subclass_is_called(norm_first: bool, kind: type[nn.Module]) -> None:
    theirs, plain = make_layer(kind, norm_first=norm_first), make_layer(norm_first=norm_first)
    ours, x = copy.deepcopy(theirs), tokens()
    swap(ours)
    assert not torch.equal(theirs(x), plain(x))
    assert_agrees(theirs, ours, x, is_fused=False)


@pytest.mark.parametrize("name", ["_ff_block", "_sa_block"])
@pytest.mark.parametrize("when", ["before the swap", "after it", "after calls"])
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_a_block_assigned_to_an_object_is_called(norm_first: bool, when: str, name: str) -> None:
    ours, theirs, x = make_layer(norm_first=norm_first), make_layer(norm_first=norm_first), tokens()
    if when != "before the swap":
        swap(ours)
    if when == "after calls":
        for _ in range(3):
            output_and_gradients(ours, x, {}, is_fused=True)
    fired: list[str] = []

    def replace(layer: Any, records: bool) -> None:
        block = getattr(layer, name)

        def doubled(*given: Any, **options: Any) -> Tensor:
            fired.extend(["ours"] if records else [])
            return 2.0 * block(*given, **options)  # type: ignore[no-any-return]

        setattr(layer, name, doubled)

    for layer in (ours, theirs):
        replace(layer, layer is ours)
    swap(ours)
    results, textbook = output_and_gradients(ours, x, {}, is_fused=False), output_and_gradients(theirs, x, {})
    assert fired == ["ours"]
    for one, other in zip(results, textbook, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert not torch.equal(textbook[0], make_layer(norm_first=norm_first)(x))


@pytest.mark.parametrize("swap_first", [True, False])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("linear1", nn.Linear),
        ("linear2", nn.Linear),
        ("norm1", nn.LayerNorm),
        ("norm2", nn.LayerNorm),
        ("dropout", nn.Dropout),
        ("dropout1", nn.Dropout),
        ("dropout2", nn.Dropout),
        ("self_attn", nn.MultiheadAttention),
    ],
)
def test_a_subclassed_part_is_called(name: str, kind: type[nn.Module], swap_first: bool) -> None:
    theirs, x = make_layer(), tokens()
    ours = copy.deepcopy(theirs)
    if swap_first:
        swap(ours)
        for _ in range(3):
            output_and_gradients(ours, x, {}, is_fused=True)
    before = theirs(x)
    for layer in (ours, theirs):
        part = layer.get_submodule(name)
        part.__class__ = doubled(kind)
    if not swap_first:
        swap(ours)
    assert not torch.equal(before, theirs(x))
    assert_agrees(theirs, ours, x, is_fused=False)


@pytest.mark.parametrize("name", ["self_attn", "self_attn.out_proj", "linear1", "norm2"])
def test_a_parametrized_part_takes_effect(name: str) -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2.0 * weight

    theirs, x = make_layer(), tokens()
    ours = swapped(theirs)
    for _ in range(3):
        before = output_and_gradients(ours, x, {})[0]
    for layer in (theirs, ours):
        which = "in_proj_weight" if name == "self_attn" else "weight"
        nn.utils.parametrize.register_parametrization(layer.get_submodule(name), which, Doubled())
    assert_agrees(theirs, ours, x, is_fused=None)
    assert not torch.equal(before, ours(x))


@pytest.mark.parametrize("name", ["plain", "causal", "padding"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_observation_gives_the_same_bits(
    norm_first: bool, dtype: torch.dtype, dropout: float, training: bool, name: str
) -> None:
    ours, x = swapped(make_layer(dtype=dtype, norm_first=norm_first, dropout=dropout)), tokens(dtype)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            ours.train(training)
            for _ in range(3):
                torch.manual_seed(7)
                unobserved = ours(x, **CALLS[name])
                torch.manual_seed(7)
                with ch.observe(ours, ch.Want(entropy=True)) as observations:
                    observed = ours(x, **CALLS[name])
                assert len(list(observations)) == 1
                assert torch.equal(unobserved, observed)
        assert is_layer(unobserved) == gradients


@pytest.mark.parametrize("name", ["plain", "causal", "padding"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_a_trace_without_edits_changes_nothing(norm_first: bool, dtype: torch.dtype, dropout: float, name: str) -> None:
    ours, x = swapped(make_layer(dtype=dtype, norm_first=norm_first, dropout=dropout)), tokens(dtype)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            torch.manual_seed(7)
            untraced = ours(x, **CALLS[name])
            torch.manual_seed(7)
            with ch.trace(ours) as traced:
                assert torch.equal(ours(x, **CALLS[name]), untraced)
            assert traced[0].weights.shape == (BATCH, HEADS, LENGTH, LENGTH)


@pytest.mark.parametrize("name", CALLS)
def test_a_hook_on_the_attention_gets_the_callers_masks(name: str) -> None:
    """The hook gets the caller's tensors, not their internal form."""
    theirs, x, call = make_layer(), tokens(), CALLS[name]
    ours = swapped(theirs)
    for _ in range(3):
        output_and_gradients(ours, x, call, is_fused=True)
    calls: list[dict[str, Any]] = []
    ours.self_attn.register_forward_pre_hook(lambda part, given, named: calls.append(named), with_kwargs=True)
    assert_agrees(theirs, ours, x, call, is_fused=False, times=1)
    assert len(calls) == 1
    for shown, given in (("attn_mask", "src_mask"), ("key_padding_mask", "src_key_padding_mask")):
        assert calls[0][shown] is call.get(given)


@pytest.mark.parametrize("how", ["in 16 bits", "one row a sequence", "a number"])
@pytest.mark.parametrize("name", ["self_attn", "linear2", "dropout2"])
def test_a_hook_may_replace_the_output(name: str, how: str) -> None:
    """Any output that can be added to ``x``."""
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "in 16 bits": lambda y: y.bfloat16(),
        "one row a sequence": lambda y: y.mean(1, keepdim=True),
        "a number": lambda y: y.mean((0, 1), keepdim=True),
    }
    change = changes[how]
    theirs, x = make_layer(norm_first=True).eval(), tokens()
    ours = swapped(theirs)
    if name == "self_attn" and how == "in 16 bits":
        theirs.dropout1 = ours.dropout1 = nn.Identity()
    for _ in range(3):
        ours(x)

    def replace_output(part: nn.Module, given: Any, output: Any) -> Any:
        return (change(output[0]), output[1]) if isinstance(output, tuple) else change(output)

    for layer in (theirs, ours):
        layer.get_submodule(name).register_forward_hook(replace_output)
    output, right = ours(x), theirs(x)
    assert output.dtype == right.dtype
    torch.testing.assert_close(output, right, rtol=1e-5, atol=1e-5)


def test_edits_change_the_attention() -> None:
    ours, x = swapped(make_layer()), tokens()
    for _ in range(3):
        before = output_and_gradients(ours, x, {})[0]
    with ch.trace(ours) as traced:
        traced.switch_off(heads=list(range(HEADS)))
        edited = ours(x)
    assert not torch.equal(before, edited)
    # Without any head the attention is the bias of its last layer.
    row = ours.norm1(x + ours.self_attn.out_proj.bias)
    right = ours.norm2(row + ours._ff_block(row))
    torch.testing.assert_close(edited, right, rtol=1e-5, atol=1e-5)
