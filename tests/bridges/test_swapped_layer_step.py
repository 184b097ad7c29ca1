"""A swapped encoder layer of torch is fused and matches torch under every mask and with dropout."""

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
from tests.agreement import needs_native
from tests.bridges.torch_layers import (
    BATCH,
    CALLS,
    DTYPES,
    FORBIDDEN,
    LENGTH,
    PADDING,
    SOME,
    WIDTH,
    assert_agrees,
    is_layer,
    make_layer,
    name_of,
    output_and_gradients,
    swapped,
    tokens,
)
from tests.budget import within_budget

pytestmark = [needs_native, pytest.mark.usefixtures("_kernels"), pytest.mark.covering(1)]

OPTIONS: list[dict[str, Any]] = [
    {},
    {"activation": "gelu"},
    {"norm_first": True},
    {"norm_first": True, "activation": "gelu"},
    {"layer_norm_eps": 1e-2, "activation": F.silu},
]


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
@pytest.mark.parametrize("name", CALLS)
def test_one_layer_matches_torch(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    theirs = make_layer(dtype=dtype, **options)
    assert_agrees(theirs, swapped(theirs), tokens(dtype), CALLS[name])


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("name", ["plain", "causal", "padding"])
def test_layers_without_biases_match_torch(name: str, activation: str, norm_first: bool) -> None:
    theirs = make_layer(bias=False, activation=activation, norm_first=norm_first)
    assert_agrees(theirs, swapped(theirs), tokens(), CALLS[name])


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("where", ["src_mask", "src_key_padding_mask"])
def test_an_additive_mask_runs_op_by_op(where: str, norm_first: bool) -> None:
    theirs = make_layer(norm_first=norm_first)
    size = (LENGTH, LENGTH) if where == "src_mask" else (BATCH, LENGTH)
    added = torch.randn(size, generator=torch.Generator().manual_seed(9))
    assert_agrees(theirs, swapped(theirs), tokens(), {where: added}, is_fused=False)


def test_a_clearhead_mask_equals_its_dense_form() -> None:
    theirs, x = make_layer(), tokens()
    ours, window = swapped(theirs), ch.Window(2, after=1)
    right = output_and_gradients(ours, x, {"src_mask": ~window.dense(LENGTH, LENGTH)}, is_fused=True)
    for _ in range(4):
        results = output_and_gradients(ours, x, {"src_mask": window}, is_fused=True)
        for one, other in zip(results, right, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_a_fully_masked_row_gives_the_output_bias(norm_first: bool) -> None:
    """torch gives NaN; ours gives the bias of the output projection."""
    theirs = make_layer(norm_first=norm_first)
    ours, x = swapped(theirs), tokens()
    nothing = PADDING.clone()
    nothing[1] = True
    for _ in range(3):
        results = output_and_gradients(ours, x, {"src_key_padding_mask": nothing}, is_fused=True)
        assert all(bool(part.isfinite().all()) for part in results)
        rest = output_and_gradients(ours, x, {"src_key_padding_mask": PADDING}, is_fused=True)
        assert torch.equal(results[0][[0, 2]], rest[0][[0, 2]])
        bias, (one, two) = theirs.self_attn.out_proj.bias, (theirs.norm1, theirs.norm2)
        row = x[1] + bias if norm_first else one(x[1] + bias)
        right = row + theirs._ff_block(two(row)) if norm_first else two(row + theirs._ff_block(row))
        torch.testing.assert_close(results[0][1], right.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("final", [False, True])
def test_a_stack_matches_torch(final: bool, padded: bool, norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = make_layer(norm_first=norm_first, activation="gelu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        theirs = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH) if final else None)
    call = {"src_key_padding_mask": PADDING} if padded else {}
    assert_agrees(theirs, swapped(theirs), tokens(), call, is_fused=None if padded or final else True, real=~PADDING)
    for mask in (FORBIDDEN, SOME):
        assert_agrees(theirs, swapped(theirs), tokens(), {"mask": mask, **call}, is_fused=None, real=~PADDING)


def test_a_stacks_layers_are_fused(fused_kinds: list[str]) -> None:
    """Padding is removed and each layer is one operator."""
    ours = swapped(nn.TransformerEncoder(make_layer(), 2, enable_nested_tensor=False))
    output_and_gradients(ours, tokens(), {"src_key_padding_mask": PADDING})
    assert fused_kinds == ["layer", "layer"]


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("name", ["plain", "causal", "padding"])
def test_batch_first_false_matches_torch(name: str, norm_first: bool) -> None:
    theirs = make_layer(norm_first=norm_first, batch_first=False)
    x = torch.randn(LENGTH, BATCH, WIDTH, generator=torch.Generator().manual_seed(2)).requires_grad_()
    assert_agrees(theirs, swapped(theirs), x, CALLS[name], is_fused=False)


def test_an_unbatched_and_an_empty_input() -> None:
    theirs = make_layer()
    ours = swapped(theirs)
    for _ in range(3):
        output_and_gradients(ours, tokens(), {})
    x = tokens()[0].detach().requires_grad_()
    assert_agrees(theirs, ours, x, is_fused=False)
    for shape in ((0, LENGTH, WIDTH), (BATCH, 0, WIDTH)):
        assert ours(torch.zeros(shape)).shape == shape


def test_invalid_arguments_raise_after_valid_calls() -> None:
    ours, x = swapped(make_layer()), tokens()
    for _ in range(3):
        output_and_gradients(ours, x, {"src_key_padding_mask": PADDING})
    for bad, error in ((x[..., :31], "wide"), (x.double(), "dtype")):
        with pytest.raises(ch.ClearheadError, match=error):
            ours(bad)
    with pytest.raises(ch.MaskError, match="key_padding_mask"):
        ours(x, src_key_padding_mask=PADDING[:, :3])
    with pytest.raises(ch.MaskError, match="attn_mask"):
        ours(x, src_mask=FORBIDDEN[:3])
    with pytest.raises(ch.MaskError, match="is_causal"):
        ours(x, is_causal=True)


def test_alternating_masks_match_torch() -> None:
    theirs, x = make_layer(activation="gelu"), tokens()
    ours: Callable[..., Tensor] = swapped(theirs)
    for _ in range(4):
        for call in CALLS.values():
            assert_agrees(theirs, ours, x, call, times=1)  # type: ignore[arg-type]


def test_a_mask_modified_in_place_takes_effect() -> None:
    """The mask is modified in place between calls."""
    theirs, x, padding = make_layer(activation="gelu"), tokens(), PADDING.clone()
    ours = swapped(theirs)
    for round_ in range(8):
        padding[2] = torch.arange(LENGTH) >= 1 + round_ % 7
        assert_agrees(theirs, ours, x, {"src_key_padding_mask": padding}, times=1)


# ---- dropout ------------------------------------------------------------------------------------------------


def test_dropouts_draw_new_independent_masks() -> None:
    """Both sublayers output ones, so the value added to the residual counts those not dropped."""
    theirs = make_layer(dropout=0.5, norm_first=True)
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
        # 3168 elements: the standard deviation of a share of 0.5 is 0.009.
        assert [count / x.numel() for count in counts] == pytest.approx([0.25, 0.5, 0.25], abs=0.04)
    assert not any(torch.equal(outputs[0], other) for other in outputs[1:])
    torch.manual_seed(5)
    first = ours(x)
    torch.manual_seed(5)
    assert torch.equal(first, ours(x))
    ours.eval()
    assert bool((ours(x) == 2.0).all())


@pytest.mark.slow
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("which", ["dropout", "dropout1", "dropout2", "attention"])
def test_each_dropout_matches_torchs_mean_and_variance(which: str, norm_first: bool) -> None:
    """With p = 0.9, mean and variance over draws match torch's."""
    theirs = make_layer(norm_first=norm_first)
    ours = swapped(theirs)
    for layer in (theirs, ours):
        if which == "attention":
            layer.self_attn.dropout = 0.9
        else:
            getattr(layer, which).p = 0.9
    x = tokens()
    draws = []
    for layer, is_fused in ((ours, True), (theirs, False)):
        torch.manual_seed(6)
        outputs = [layer(x) for _ in range(400)]
        assert all(is_layer(output) == is_fused for output in outputs)
        draws.append(torch.stack([output.detach() for output in outputs]))
    error = (draws[0].mean(0) - draws[1].mean(0)).abs()
    assert bool((error <= 6 * ((draws[0].var(0) + draws[1].var(0)) / 400) ** 0.5 + 1e-5).all())
    spread = [float(draw.var(0).mean()) for draw in draws]
    assert spread[0] == pytest.approx(spread[1], rel=0.1)
    assert spread[0] > 0.0


# ---- swap and unswap ----------------------------------------------------------------------------------------


def test_state_dicts_load_in_both_directions_and_unswap_restores() -> None:
    theirs, other = make_layer(), make_layer(norm_first=False)
    with torch.no_grad():
        for part in other.parameters():
            part.mul_(1.5)
    ours, x = swapped(theirs), tokens()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for _ in range(3):
        output_and_gradients(ours, x, {}, is_fused=True)
    ours.load_state_dict(other.state_dict())
    assert_agrees(other, ours, x)
    theirs.load_state_dict(ours.state_dict())
    assert_agrees(theirs, ours, x)
    unswap(ours)
    assert [type(part) for part in ours.modules()] == [type(part) for part in theirs.modules()]
    assert not is_layer(ours(x))
    assert torch.equal(ours(x), theirs(x))
    swap(ours)
    assert_agrees(theirs, ours, x)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_without_gradients_matches_torch(activation: str, norm_first: bool, training: bool) -> None:
    """In eval mode torch uses its fused inference path."""
    theirs = make_layer(norm_first=norm_first, activation=activation).train(training)
    ours, x, wide = swapped(theirs), tokens(), copy.deepcopy(theirs).double()
    for call in ({}, {"src_key_padding_mask": PADDING}, {"src_mask": FORBIDDEN}):
        with torch.no_grad():
            exact = wide(x.double(), **call)
            textbook = theirs(x, **call)
            for _ in range(4):
                output = ours(x, **call)
                counts = ~PADDING if "src_key_padding_mask" in call else torch.ones(BATCH, LENGTH, dtype=torch.bool)
                within_budget("output", output[counts], textbook[counts], exact[counts], terms=60)
        with_gradients = ours(x, **call)
        assert is_layer(with_gradients)
        assert torch.equal(with_gradients, output)
