"""A fused layer under torch's transforms, copied, checkpointed, and with invalid arguments."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import clearhead as ch
from clearhead.nn import EncoderBlock
from tests.agreement import needs_native
from tests.budget import within_budget
from tests.nn.layers.definition import (
    KINDS,
    Block,
    block,
    budget_of,
    checked,
    draw,
    formula,
    output_and_gradients,
    same,
    tokens,
    unfused,
    upstream_of,
)

pytestmark = [needs_native, pytest.mark.covering(1)]


@pytest.fixture(params=[True, False], ids=["pre-norm", "post-norm"])
def warm(request: pytest.FixtureRequest) -> Any:
    """A block that has run once."""
    module = block(norm_first=request.param)
    output_and_gradients(module, tokens())
    return module


def test_autocast_matches_the_formula(warm: Any) -> None:
    x = tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, textbook = unfused(warm, x), formula(warm, x)
    assert output.dtype == textbook.dtype
    exact = formula(copy.deepcopy(warm).double(), x.double())
    within_budget("output", output, textbook, exact, terms=128, dtype=torch.bfloat16)
    checked(warm, x)


def test_functional_call_uses_the_given_parameters(warm: Any) -> None:
    x = tokens()
    doubled = {name: (2.0 * part).detach().requires_grad_() for name, part in warm.named_parameters()}
    output = torch.func.functional_call(warm, doubled, (x,))
    other = copy.deepcopy(warm)
    with torch.no_grad():
        for part in other.parameters():
            part.mul_(2.0)
    right = output_and_gradients(other, x)
    assert torch.equal(output, right[0])
    assert not torch.equal(output, warm(x))
    same(torch.autograd.grad(output, [x, *doubled.values()], upstream_of(output)), right[1:])


def test_vmap_and_grad_match_the_formula(warm: Any) -> None:
    x = draw(3, 2, 7, 32)
    parameters = {name: part.detach() for name, part in warm.named_parameters()}
    wide = copy.deepcopy(warm).double()
    mapped = torch.func.vmap(warm)(x)
    for actual, one in zip(mapped, x, strict=True):
        within_budget("vmap", actual, formula(warm, one), formula(wide, one.double()), terms=128)

    upstream = upstream_of(x[0])

    def loss(parameters: dict[str, Tensor], one: Tensor) -> Tensor:
        output: Tensor = torch.func.functional_call(warm, parameters, (one,))
        return (output * upstream).sum()

    gradients = torch.func.grad(loss)(parameters, x[0])
    right = output_and_gradients(warm, x[0].clone().requires_grad_())
    leaf = x[0].clone().requires_grad_()
    budget_of(warm, leaf, None, [*right[:2], *gradients.values()])
    by_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for place, one in enumerate(x):
        leaf = one.clone().requires_grad_()
        actual = [part[place] for part in by_sample.values()]
        budget_of(warm, leaf, None, [*output_and_gradients(warm, leaf)[:2], *actual])


def test_forward_mode_matches_the_formula(warm: Any) -> None:
    x, tangent = tokens().detach(), draw(2, 7, 32, seed=6)
    wide = copy.deepcopy(warm).double()
    warm.attention.backend = "reference"
    jvp_output = torch.func.jvp(warm, (x,), (tangent,))[1]
    textbook = torch.func.jvp(lambda x: formula(warm, x), (x,), (tangent,))[1]
    exact = torch.func.jvp(lambda x: formula(wide, x), (x.double(),), (tangent.double(),))[1]
    within_budget("tangent", jvp_output, textbook, exact, terms=128)
    with forward_ad.dual_level():
        dual = warm(forward_ad.make_dual(x, tangent))
        within_budget("tangent", forward_ad.unpack_dual(dual).tangent, textbook, exact, terms=128)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_block_matches_the_formula(kind: type[Block]) -> None:
    module, x = block(kind), tokens()
    compiled: Any = torch.compile(module, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        budget_of(module, x, None, output_and_gradients(module, x, call=lambda _, x: compiled(x), layer=False))
    checked(module, x)


def test_exported_block_matches_the_formula(warm: Any) -> None:
    warm.eval()
    x, other = tokens().detach(), draw(2, 7, 32, seed=11)
    exported = torch.export.export(warm, (x,)).module()
    wide = copy.deepcopy(warm).double()
    within_budget("output", exported(other), formula(warm, other), formula(wide, other.double()), terms=128)


def test_jit_trace_matches_the_formula(warm: Any) -> None:
    warm.eval()
    x, other = tokens().detach(), draw(2, 7, 32, seed=11)
    wide = copy.deepcopy(warm).double()
    with torch.no_grad():
        traced = torch.jit.trace(warm, (x,), check_trace=False)
        output = traced(other)
    within_budget("output", output, formula(warm, other), formula(wide, other.double()), terms=128)


def test_fake_tensors_give_shapes(warm: Any) -> None:
    with FakeTensorMode() as mode:
        module = EncoderBlock(32, 4, dropout=0.0)
        output = module(torch.empty(2, 7, 32))
        assert output.shape == (2, 7, 32)
        assert output.fake_mode is mode
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert warm(torch.empty(2, 7, 32)).shape == (2, 7, 32)


@pytest.mark.parametrize("width", [32, 256])
def test_a_training_step_runs_on_fake_tensors(width: int) -> None:
    with FakeTensorMode():
        module = EncoderBlock(width, 4, dropout=0.1)
        x = torch.empty(4, 64, width, requires_grad=True)
        module(x).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape


def test_meta_device_gives_shapes(warm: Any) -> None:
    module = copy.deepcopy(warm).to("meta")
    for _ in range(3):
        output = module(torch.empty(2, 7, 32, device="meta", requires_grad=True))
        assert output.device.type == "meta"
        assert output.shape == (2, 7, 32)
        output.sum().backward()


def test_float64_matches_the_formula(warm: Any) -> None:
    module, x = copy.deepcopy(warm).double(), tokens(torch.float64)
    results = output_and_gradients(module, x, layer=False)
    right = output_and_gradients(module, x, call=formula, layer=False)
    for one, other in zip(results, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_copies_and_pickles_give_the_same_bits(warm: Any) -> None:
    x = tokens()
    right = output_and_gradients(warm, x)
    file = io.BytesIO()
    torch.save(warm, file)
    file.seek(0)
    for module in (copy.deepcopy(warm), pickle.loads(pickle.dumps(warm)), torch.load(file, weights_only=False)):
        same(output_and_gradients(module, x), right)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_checkpointing_gives_the_same_bits(norm_first: bool, kind: type[Block], dropout: float) -> None:
    module, checkpointed = (
        block(kind, norm_first=norm_first, dropout=dropout, checkpoint_activations=flag) for flag in (False, True)
    )
    x = tokens()
    right = output_and_gradients(module, x)
    for _ in range(2):
        same(output_and_gradients(checkpointed, x, layer=None), right)
        leaf = x.detach().requires_grad_()
        torch.manual_seed(7)
        output = checkpointed(leaf)
        output.backward(upstream_of(output))
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, right[1])


@pytest.mark.parametrize("shape", [(0, 7, 32), (2, 0, 32), (0, 0, 32), (0, 32)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens_give_an_empty_output(kind: type[Block], shape: tuple[int, ...]) -> None:
    module = block(kind)
    output_and_gradients(module, tokens())
    x = torch.zeros(shape, requires_grad=True)
    output = module(x)
    assert output.shape == shape
    output.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape


@pytest.mark.parametrize("kind", KINDS)
def test_an_unbatched_sequence_matches_the_formula(kind: type[Block]) -> None:
    module, x = block(kind), tokens(batch=1)
    for _ in range(4):
        results = output_and_gradients(module, x, call=lambda module, x: module(x[0])[None], layer=False)
        budget_of(module, x, None, results)


def test_wrong_arguments_raise_after_good_calls() -> None:
    module, x = block(), tokens()
    for _ in range(3):
        module(x, mask=ch.Padding([7, 3]))
        module(x)
    for bad, error in ((x[..., :31], "wide|width|channels"), (x.double(), "dtype"), (x[None, None], "axes|3")):
        with pytest.raises(ch.ClearheadError, match=error):
            module(bad)
    with pytest.raises(ch.ClearheadError, match="mask"):
        module(x, mask=[1])
    with pytest.raises(ch.ClearheadError, match="lengths"):
        module(x, mask=ch.Padding([7, 3, 1]))
    checked(module, x)


def test_training_decreases_the_loss() -> None:
    module, x = block(dropout=0.0), tokens()
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    target, losses = draw(2, 7, 32, seed=9), []
    for _ in range(8):
        optimizer.zero_grad()
        loss = (module(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses == sorted(losses, reverse=True)
