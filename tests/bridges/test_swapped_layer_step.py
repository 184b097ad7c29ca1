"""torch's encoder layer, swapped, as one step: torch's numbers under every mask, and dropout."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead as ch
from clearhead.bridges import swap, unswap
from clearhead.ops import library as native_library
from tests.bridges.torch_layers import (
    BATCH,
    CALLS,
    DTYPES,
    FORBIDDEN,
    LENGTH,
    PADDING,
    SOME,
    WIDTH,
    agrees,
    is_layer,
    made,
    numbers,
    swapped,
    tokens,
)
from tests.budget import within_budget

pytestmark = [
    pytest.mark.skipif(native_library.library() is None, reason=f"{native_library.reason()}"),
    pytest.mark.usefixtures("_kernels"),
]

OPTIONS: list[dict[str, Any]] = [
    {},
    {"activation": "gelu"},
    {"norm_first": True},
    {"norm_first": True, "activation": "gelu"},
    {"layer_norm_eps": 1e-2, "activation": F.silu},
]


def _name(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in options.items()) or "plain"


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=_name)
@pytest.mark.parametrize("name", CALLS)
def test_one_layer(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    theirs = made(dtype=dtype, **options)
    agrees(theirs, swapped(theirs), tokens(dtype), CALLS[name])


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("name", ["plain", "causal", "padding"])
def test_without_biases(name: str, activation: str, norm_first: bool) -> None:
    theirs = made(bias=False, activation=activation, norm_first=norm_first)
    agrees(theirs, swapped(theirs), tokens(), CALLS[name])


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
@pytest.mark.parametrize("where", ["src_mask", "src_key_padding_mask"])
def test_a_mask_that_is_added_goes_part_by_part(where: str, norm_first: bool) -> None:
    theirs = made(norm_first=norm_first)
    size = (LENGTH, LENGTH) if where == "src_mask" else (BATCH, LENGTH)
    added = torch.randn(size, generator=torch.Generator().manual_seed(9))
    agrees(theirs, swapped(theirs), tokens(), {where: added}, is_step=False)


def test_one_of_our_masks() -> None:
    theirs, x = made(), tokens()
    ours, window = swapped(theirs), ch.Window(2, after=1)
    right = numbers(ours, x, {"src_mask": ~window.dense(LENGTH, LENGTH)}, is_step=True)
    for _ in range(4):
        found = numbers(ours, x, {"src_mask": window}, is_step=True)
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_a_row_that_may_attend_to_nothing(norm_first: bool) -> None:
    """torch has NaN there; ours is the layer whose attention gives 0 before its last bias."""
    theirs = made(norm_first=norm_first)
    ours, x = swapped(theirs), tokens()
    nothing = PADDING.clone()
    nothing[1] = True
    for _ in range(3):
        found = numbers(ours, x, {"src_key_padding_mask": nothing}, is_step=True)
        assert all(bool(part.isfinite().all()) for part in found)
        rest = numbers(ours, x, {"src_key_padding_mask": PADDING}, is_step=True)
        assert torch.equal(found[0][[0, 2]], rest[0][[0, 2]])
        bias, (one, two) = theirs.self_attn.out_proj.bias, (theirs.norm1, theirs.norm2)
        row = x[1] + bias if norm_first else one(x[1] + bias)
        right = row + theirs._ff_block(two(row)) if norm_first else two(row + theirs._ff_block(row))
        torch.testing.assert_close(found[0][1], right.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("final", [False, True])
def test_a_stack(final: bool, padded: bool, norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = made(norm_first=norm_first, activation="gelu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        theirs = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH) if final else None)
    call = {"src_key_padding_mask": PADDING} if padded else {}
    agrees(theirs, swapped(theirs), tokens(), call, is_step=None if padded or final else True, real=~PADDING)
    for mask in (FORBIDDEN, SOME):
        agrees(theirs, swapped(theirs), tokens(), {"mask": mask, **call}, is_step=None, real=~PADDING)


def test_a_stacks_layers_are_fused(taken: list[str]) -> None:
    """Padding is removed, and the rest is one operator a layer."""
    ours = swapped(nn.TransformerEncoder(made(), 2, enable_nested_tensor=False))
    numbers(ours, tokens(), {"src_key_padding_mask": PADDING})
    assert taken == ["layer", "layer"]


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
@pytest.mark.parametrize("name", ["plain", "causal", "padding"])
def test_the_batch_second(name: str, norm_first: bool) -> None:
    theirs = made(norm_first=norm_first, batch_first=False)
    x = torch.randn(LENGTH, BATCH, WIDTH, generator=torch.Generator().manual_seed(2)).requires_grad_()
    agrees(theirs, swapped(theirs), x, CALLS[name], is_step=False)


def test_one_sequence_and_none() -> None:
    theirs = made()
    ours = swapped(theirs)
    for _ in range(3):
        numbers(ours, tokens(), {})
    x = tokens()[0].detach().requires_grad_()
    agrees(theirs, ours, x, is_step=False)
    for shape in ((0, LENGTH, WIDTH), (BATCH, 0, WIDTH)):
        assert ours(torch.zeros(shape)).shape == shape


def test_what_is_wrong_is_told_after_good_calls() -> None:
    ours, x = swapped(made()), tokens()
    for _ in range(3):
        numbers(ours, x, {"src_key_padding_mask": PADDING})
    for bad, error in ((x[..., :31], "wide"), (x.double(), "dtype")):
        with pytest.raises(ch.ClearheadError, match=error):
            ours(bad)
    with pytest.raises(ch.MaskError, match="key_padding_mask"):
        ours(x, src_key_padding_mask=PADDING[:, :3])
    with pytest.raises(ch.MaskError, match="attn_mask"):
        ours(x, src_mask=FORBIDDEN[:3])
    with pytest.raises(ch.MaskError, match="is_causal"):
        ours(x, is_causal=True)


def test_masks_in_turn() -> None:
    theirs, x = made(activation="gelu"), tokens()
    ours: Callable[..., Tensor] = swapped(theirs)
    for _ in range(4):
        for call in CALLS.values():
            agrees(theirs, ours, x, call, times=1)  # type: ignore[arg-type]


def test_other_numbers_in_the_same_mask() -> None:
    """One that is written to between calls."""
    theirs, x, padding = made(activation="gelu"), tokens(), PADDING.clone()
    ours = swapped(theirs)
    for round_ in range(8):
        padding[2] = torch.arange(LENGTH) >= 1 + round_ % 7
        agrees(theirs, ours, x, {"src_key_padding_mask": padding}, times=1)


# ---- dropout ------------------------------------------------------------------------------------------------


def test_dropout_is_drawn_anew_and_each_its_own() -> None:
    """Both parts give ones, so that what is added to the residual shows what was kept."""
    theirs = made(dropout=0.5, norm_first=True)
    ours = swapped(theirs)
    with torch.no_grad():
        for layer in (ours.self_attn.out_proj, ours.linear2):
            layer.weight.zero_()
            layer.bias.fill_(1.0)
    x = torch.zeros(3, 33, WIDTH, requires_grad=True)
    outputs = []
    for _ in range(4):
        outputs.append(ours(x))
        assert is_layer(outputs[-1])
        counts = [int((outputs[-1] == value).sum()) for value in (0.0, 2.0, 4.0)]
        assert sum(counts) == x.numel()
        # 3168 places: one standard deviation is 0.009 for a half.
        assert [count / x.numel() for count in counts] == pytest.approx([0.25, 0.5, 0.25], abs=0.04)
    assert not any(torch.equal(outputs[0], other) for other in outputs[1:])
    torch.manual_seed(5)
    first = ours(x)
    torch.manual_seed(5)
    assert torch.equal(first, ours(x))
    ours.eval()
    assert bool((ours(x) == 2.0).all())


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
@pytest.mark.parametrize("which", ["dropout", "dropout1", "dropout2", "attention"])
def test_each_dropout_where_it_belongs(which: str, norm_first: bool) -> None:
    """Of one that drops 9 of 10 numbers, torch's average and its spread, over draws."""
    theirs = made(norm_first=norm_first)
    ours = swapped(theirs)
    for layer in (theirs, ours):
        if which == "attention":
            layer.self_attn.dropout = 0.9
        else:
            getattr(layer, which).p = 0.9
    x = tokens()
    draws = []
    for layer, is_step in ((ours, True), (theirs, False)):
        torch.manual_seed(6)
        outputs = [layer(x) for _ in range(400)]
        assert all(is_layer(output) == is_step for output in outputs)
        draws.append(torch.stack([output.detach() for output in outputs]))
    error = (draws[0].mean(0) - draws[1].mean(0)).abs()
    assert bool((error <= 6 * ((draws[0].var(0) + draws[1].var(0)) / 400) ** 0.5 + 1e-5).all())
    spread = [float(draw.var(0).mean()) for draw in draws]
    assert spread[0] == pytest.approx(spread[1], rel=0.1)
    assert spread[0] > 0.0


# ---- what a swap is -----------------------------------------------------------------------------------------


def test_state_goes_both_ways_and_unswap_restores() -> None:
    theirs, other = made(), made(norm_first=False)
    with torch.no_grad():
        for part in other.parameters():
            part.mul_(1.5)
    ours, x = swapped(theirs), tokens()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for _ in range(3):
        numbers(ours, x, {}, is_step=True)
    ours.load_state_dict(other.state_dict())
    agrees(other, ours, x)
    theirs.load_state_dict(ours.state_dict())
    agrees(theirs, ours, x)
    unswap(ours)
    assert [type(part) for part in ours.modules()] == [type(part) for part in theirs.modules()]
    assert not is_layer(ours(x))
    assert torch.equal(ours(x), theirs(x))
    swap(ours)
    agrees(theirs, ours, x)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_without_gradients(activation: str, norm_first: bool, training: bool) -> None:
    """In eval mode against torch's own closed road."""
    theirs = made(norm_first=norm_first, activation=activation).train(training)
    ours, x, wide = swapped(theirs), tokens(), copy.deepcopy(theirs).double()
    for call in ({}, {"src_key_padding_mask": PADDING}, {"src_mask": FORBIDDEN}):
        with torch.no_grad():
            exact = wide(x.double(), **call)
            textbook = theirs(x, **call)
            for _ in range(4):
                found = ours(x, **call)
                counts = ~PADDING if "src_key_padding_mask" in call else torch.ones(BATCH, LENGTH, dtype=torch.bool)
                within_budget("output", found[counts], textbook[counts], exact[counts], terms=60)
        with_gradients = ours(x, **call)
        assert is_layer(with_gradients)
        assert torch.equal(with_gradients, found)
