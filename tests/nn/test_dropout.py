"""Dropout of activations: which elements survive, forward and backward, and the seeds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from clearhead.nn.blocks import EncoderBlock
from clearhead.nn.dropout import Dropout, plus_dropped
from clearhead.nn.feedforward import FeedForward
from clearhead.ops.dropout import LEVELS
from clearhead.problem import draw_seed
from tests.agreement import needs_native
from tests.dropped import keep_mask

pytestmark = needs_native

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = [(), (1,), (64, 4), (128, 128), (7, 5, 500), (2**14,), (2**10, 17), (2, 1, 9000, 1), (301, 65), (5, 16385)]


def _survivors(shape: tuple[int, ...], levels: int, seed: int) -> Tensor:
    """The mask of surviving elements by the definition."""
    width = shape[-1] if shape else 1
    return keep_mask(torch.Size(shape).numel() // width, width, levels, seed).view(shape)


def _seeded(seed: int) -> int:
    """Seed torch and return the seed that the next call draws."""
    torch.manual_seed(seed)
    drawn = draw_seed(0.5)
    torch.manual_seed(seed)
    return drawn


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("p", [0.25, 0.9])
def test_dropout_matches_its_definition(p: float, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    seed, levels = _seeded(3), round(p * LEVELS)
    factor = _survivors(shape, levels, seed).double() * (LEVELS / (LEVELS - levels))
    output = Dropout(p)(x)
    assert output.dtype is dtype
    torch.testing.assert_close(output, (x.double() * factor).to(dtype), rtol=torch.finfo(dtype).eps, atol=0)
    upstream = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    (grad,) = torch.autograd.grad(output, x, upstream)
    torch.testing.assert_close(grad, (upstream.double() * factor).to(dtype), rtol=torch.finfo(dtype).eps, atol=0)
    torch.manual_seed(3)
    with torch.no_grad():
        assert torch.equal(Dropout(p)(x), output)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_added_to_a_residual_matches_its_definition(dtype: torch.dtype) -> None:
    x, residual = (torch.randn(60, 300).to(dtype).requires_grad_() for _ in range(2))
    factor = _survivors((60, 300), LEVELS // 4, _seeded(5)).double() * (4 / 3)
    output = plus_dropped(residual, Dropout(0.25), x)
    exact = residual.double() + x.double() * factor
    # The fused pass rounds to the dtype once; two passes round twice.
    assert (output.double() - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()
    grads = torch.autograd.grad(output, (residual, x), torch.ones_like(output))
    torch.testing.assert_close(grads[0], torch.ones_like(residual))
    torch.testing.assert_close(grads[1], factor.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("shape", [(1, 16), (1024, 64)], ids=str)
def test_dropout_in_place_drops_the_same_elements(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    torch.manual_seed(0)
    expected = Dropout(0.5)(x)
    torch.manual_seed(0)
    overwritten = x * 1.0
    output = Dropout(0.5, inplace=True)(overwritten)
    assert output is overwritten
    assert torch.equal(output, expected)
    upstream = torch.randn(shape)
    assert torch.equal(*(torch.autograd.grad(each, x, upstream)[0] for each in (output, expected)))


def test_a_probability_that_rounds_to_0_drops_nothing_and_draws_no_seed() -> None:
    x, p = torch.randn(256, 256), 0.4 / LEVELS
    torch.manual_seed(0)
    assert torch.equal(Dropout(p)(x), x)
    following = draw_seed(0.5)
    torch.manual_seed(0)
    assert draw_seed(0.5) == following


def test_an_empty_input_stays_empty() -> None:
    assert Dropout(0.5)(torch.ones(0, 4)).shape == (0, 4)
    assert Dropout(0.5)(torch.ones(4, 0)).shape == (4, 0)


def test_one_frozen_input_leaves_a_gradient_for_the_other() -> None:
    x, residual = torch.randn(128, 128), torch.randn(128, 128)
    for learns in (x, residual):
        learns.requires_grad_()
        plus_dropped(residual, Dropout(0.5), x).sum().backward()
        assert learns.grad is not None
        learns.requires_grad_(False)


@pytest.mark.parametrize("module", [Dropout(0.5).eval(), nn.Identity(), Dropout(0.0), nn.Dropout(0.0)], ids=repr)
def test_dropout_of_0_adds_the_residual(module: nn.Module) -> None:
    x, residual = torch.randn(128, 128), torch.randn(128, 128)
    assert torch.equal(plus_dropped(residual, module, x), residual + x)


def test_a_broadcast_residual_is_added_after_dropout() -> None:
    x = torch.ones(128, 128)
    assert plus_dropped(torch.zeros(128), Dropout(0.5), x).shape == (128, 128)
    assert plus_dropped(torch.zeros(2, 128, 128), Dropout(0.5), x).shape == (2, 128, 128)
    assert plus_dropped(torch.zeros(128, 128, dtype=torch.float64), Dropout(0.5), x).dtype is torch.float64


def test_dropped_nan_and_infinity_become_0() -> None:
    x = torch.full((128, 128), torch.nan, requires_grad=True)
    survive = _survivors((128, 128), LEVELS // 2, _seeded(1))
    output = Dropout(0.5)(x)
    assert torch.equal(output.isnan(), survive)
    (grad,) = torch.autograd.grad(output, x, torch.full_like(x, torch.inf))
    assert torch.equal(grad.isinf(), survive)
    assert bool((grad[~survive] == 0).all())


def test_strides_do_not_change_bits() -> None:
    dense = torch.randn(300, 200)
    _seeded(1)
    expected = Dropout(0.3)(dense)
    for strided in (dense.t().contiguous().t(), torch.cat([dense, dense], 1)[:, :200], dense.neg().neg()):
        _seeded(1)
        assert torch.equal(Dropout(0.3)(strided), expected)


def test_second_derivatives_and_batched_gradients() -> None:
    x = torch.randn(128, 128, requires_grad=True)
    _seeded(1)
    output = Dropout(0.5)(x)
    (grad,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    torch.testing.assert_close(second, 2.0 * 4.0 * (output != 0))
    output = Dropout(0.5)(x)
    upstream = torch.randn(3, 128, 128)
    (many,) = torch.autograd.grad(output, x, upstream, is_grads_batched=True, retain_graph=True)
    for one, direction in zip(many, upstream, strict=True):
        torch.testing.assert_close(one, torch.autograd.grad(output, x, direction, retain_graph=True)[0])


def test_an_output_may_be_modified_in_place() -> None:
    x = torch.randn(128, 128, requires_grad=True)
    Dropout(0.5)(x).relu_().sum().backward()
    assert x.grad is not None


def test_dropout_uses_and_advances_torchs_generator() -> None:
    x = torch.ones(128, 128)
    torch.manual_seed(0)
    first, second = Dropout(0.5)(x), Dropout(0.5)(x)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(Dropout(0.5)(x), first)


def test_transformed_and_compiled_code_uses_torchs_dropout() -> None:
    x = torch.randn(4, 128, 128)
    drawn = torch.func.vmap(Dropout(0.5), randomness="different")(x)
    assert 0.4 < float((drawn == 0).float().mean()) < 0.6
    _, tangent = torch.func.jvp(Dropout(0.5), (x,), (torch.ones_like(x),))
    assert set(tangent.unique().tolist()) == {0.0, 2.0}


def test_autocast_uses_the_kernel() -> None:
    x = torch.randn(128, 128)
    survive = _survivors((128, 128), LEVELS // 2, _seeded(2))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(Dropout(0.5)(x) != 0, survive)


def test_an_observed_feedforward_drops_the_same_elements() -> None:
    """Op-by-op steps draw the same seeds for the same elements."""
    module, x = FeedForward(128, activation="gelu", dropout=0.3), torch.randn(3, 50, 128)
    torch.manual_seed(0)
    unhooked = module(x)
    handle = module.dropout.register_forward_hook(lambda *_: None)
    torch.manual_seed(0)
    torch.testing.assert_close(module(x), unhooked)
    handle.remove()


@pytest.mark.parametrize("width", [16, 128])
def test_a_hook_on_a_blocks_dropout_is_called(width: int) -> None:
    block, x = EncoderBlock(width, 2, dropout=0.5), torch.randn(2, 80, width)
    fired = []
    handle = block.residual_dropout.register_forward_hook(lambda *given: fired.append(given[2]))
    torch.manual_seed(0)
    hooked = block(x)
    assert len(fired) == 2
    handle.remove()
    torch.manual_seed(0)
    torch.testing.assert_close(block(x), hooked)


@pytest.mark.parametrize("path", ["attention", "feedforward.dropout", "residual_dropout"])
@pytest.mark.parametrize("training", [False, True])
def test_a_part_in_another_mode_drops_the_same_fused_and_op_by_op(path: str, training: bool) -> None:
    block = EncoderBlock(32, 2, dropout=0.3).train(not training)
    block.get_submodule(path).train(training)
    x = torch.randn(2, 20, 32)
    torch.manual_seed(2)
    fused = block(x)
    for part in (block.residual_dropout, block.feedforward.dropout, block.attention):
        part.register_forward_hook(lambda *_: None)
    torch.manual_seed(2)
    torch.testing.assert_close(block(x), fused)


@pytest.mark.parametrize("hooks", [False, True], ids=["fused", "op by op"])
def test_recomputed_activations_drop_the_same(hooks: bool) -> None:
    torch.manual_seed(0)
    plain, recomputed = (
        EncoderBlock(128, 2, dropout=0.3, checkpoint_activations=checkpointed) for checkpointed in (False, True)
    )
    recomputed.load_state_dict(plain.state_dict())
    grads = []
    for block in (plain, recomputed):
        for part in (block.residual_dropout, block.feedforward.dropout) if hooks else ():
            part.register_forward_hook(lambda *_: None)
        x = torch.randn(2, 80, 128, generator=torch.Generator().manual_seed(1)).requires_grad_()
        torch.manual_seed(2)
        block(x).square().sum().backward()
        grads.append([x.grad, *[parameter.grad for parameter in block.parameters()]])
    torch.testing.assert_close(*grads)
