"""A fused layer under torch's own ways of calling a module, copied, checkpointed, and given what is wrong."""

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
    numbers,
    same,
    tokens,
    unfused,
    upstream_of,
)

pytestmark = needs_native


@pytest.fixture(params=[True, False], ids=["norms first", "norms last"])
def warm(request: pytest.FixtureRequest) -> Any:
    """A block that was called before."""
    own = block(norm_first=request.param)
    numbers(own, tokens())
    return own


def test_autocast(warm: Any) -> None:
    x = tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, textbook = unfused(warm, x), formula(warm, x)
    assert output.dtype == textbook.dtype
    exact = formula(copy.deepcopy(warm).double(), x.double())
    within_budget("output", output, textbook, exact, terms=128, dtype=torch.bfloat16)
    checked(warm, x)


def test_functional_call(warm: Any) -> None:
    x = tokens()
    doubled = {name: (2.0 * part).detach().requires_grad_() for name, part in warm.named_parameters()}
    output = torch.func.functional_call(warm, doubled, (x,))
    other = copy.deepcopy(warm)
    with torch.no_grad():
        for part in other.parameters():
            part.mul_(2.0)
    right = numbers(other, x)
    assert torch.equal(output, right[0])
    assert not torch.equal(output, warm(x))
    same(torch.autograd.grad(output, [x, *doubled.values()], upstream_of(output)), right[1:])


def test_vmap_and_grad(warm: Any) -> None:
    x = draw(3, 2, 7, 32)
    parameters = {name: part.detach() for name, part in warm.named_parameters()}
    wide = copy.deepcopy(warm).double()
    mapped = torch.func.vmap(warm)(x)
    for own, one in zip(mapped, x, strict=True):
        within_budget("vmap", own, formula(warm, one), formula(wide, one.double()), terms=128)

    upstream = upstream_of(x[0])

    def loss(parameters: dict[str, Tensor], one: Tensor) -> Tensor:
        output: Tensor = torch.func.functional_call(warm, parameters, (one,))
        return (output * upstream).sum()

    found = torch.func.grad(loss)(parameters, x[0])
    right = numbers(warm, x[0].clone().requires_grad_())
    leaf = x[0].clone().requires_grad_()
    budget_of(warm, leaf, None, [*right[:2], *found.values()])
    by_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for place, one in enumerate(x):
        leaf = one.clone().requires_grad_()
        own = [part[place] for part in by_sample.values()]
        budget_of(warm, leaf, None, [*numbers(warm, leaf)[:2], *own])


def test_forward_mode(warm: Any) -> None:
    x, tangent = tokens().detach(), draw(2, 7, 32, seed=6)
    wide = copy.deepcopy(warm).double()
    warm.attention.backend = "reference"
    found = torch.func.jvp(warm, (x,), (tangent,))[1]
    textbook = torch.func.jvp(lambda x: formula(warm, x), (x,), (tangent,))[1]
    exact = torch.func.jvp(lambda x: formula(wide, x), (x.double(),), (tangent.double(),))[1]
    within_budget("tangent", found, textbook, exact, terms=128)
    with forward_ad.dual_level():
        dual = warm(forward_ad.make_dual(x, tangent))
        within_budget("tangent", forward_ad.unpack_dual(dual).tangent, textbook, exact, terms=128)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled(kind: type[Block]) -> None:
    own, x = block(kind), tokens()
    compiled: Any = torch.compile(own, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        budget_of(own, x, None, numbers(own, x, call=lambda _, x: compiled(x), layer=False))
    checked(own, x)


def test_exported(warm: Any) -> None:
    warm.eval()
    x, other = tokens().detach(), draw(2, 7, 32, seed=11)
    exported = torch.export.export(warm, (x,)).module()
    wide = copy.deepcopy(warm).double()
    within_budget("output", exported(other), formula(warm, other), formula(wide, other.double()), terms=128)


def test_traced_by_jit(warm: Any) -> None:
    warm.eval()
    x, other = tokens().detach(), draw(2, 7, 32, seed=11)
    wide = copy.deepcopy(warm).double()
    with torch.no_grad():
        traced = torch.jit.trace(warm, (x,), check_trace=False)
        output = traced(other)
    within_budget("output", output, formula(warm, other), formula(wide, other.double()), terms=128)


def test_fake_tensors(warm: Any) -> None:
    with FakeTensorMode() as mode:
        own = EncoderBlock(32, 4, dropout=0.0)
        output = own(torch.empty(2, 7, 32))
        assert output.shape == (2, 7, 32)
        assert output.fake_mode is mode
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert warm(torch.empty(2, 7, 32)).shape == (2, 7, 32)


@pytest.mark.parametrize("width", [32, 256])
def test_a_step_of_training_is_planned_without_numbers(width: int) -> None:
    """As whoever asks how much memory it takes does, dropout in it."""
    with FakeTensorMode():
        own = EncoderBlock(width, 4, dropout=0.1)
        x = torch.empty(4, 64, width, requires_grad=True)
        own(x).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape


def test_on_meta(warm: Any) -> None:
    own = copy.deepcopy(warm).to("meta")
    for _ in range(3):
        output = own(torch.empty(2, 7, 32, device="meta", requires_grad=True))
        assert output.device.type == "meta"
        assert output.shape == (2, 7, 32)
        output.sum().backward()


def test_float64(warm: Any) -> None:
    own, x = copy.deepcopy(warm).double(), tokens(torch.float64)
    found = numbers(own, x, layer=False)
    right = numbers(own, x, call=formula, layer=False)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_copies_and_pickles(warm: Any) -> None:
    x = tokens()
    right = numbers(warm, x)
    file = io.BytesIO()
    torch.save(warm, file)
    file.seek(0)
    for own in (copy.deepcopy(warm), pickle.loads(pickle.dumps(warm)), torch.load(file, weights_only=False)):
        same(numbers(own, x), right)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_checkpoints_recompute_it(norm_first: bool, kind: type[Block], dropout: float) -> None:
    own, again = (
        block(kind, norm_first=norm_first, dropout=dropout, checkpoint_activations=flag) for flag in (False, True)
    )
    x = tokens()
    right = numbers(own, x)
    for _ in range(2):
        same(numbers(again, x, layer=None), right)
        leaf = x.detach().requires_grad_()
        torch.manual_seed(7)
        output = again(leaf)
        output.backward(upstream_of(output))
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, right[1])


@pytest.mark.parametrize("shape", [(0, 7, 32), (2, 0, 32), (0, 0, 32), (0, 32)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens(kind: type[Block], shape: tuple[int, ...]) -> None:
    own = block(kind)
    numbers(own, tokens())
    x = torch.zeros(shape, requires_grad=True)
    output = own(x)
    assert output.shape == shape
    output.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape


@pytest.mark.parametrize("kind", KINDS)
def test_one_sequence_without_a_batch(kind: type[Block]) -> None:
    own, x = block(kind), tokens(batch=1)
    for _ in range(4):
        found = numbers(own, x, call=lambda own, x: own(x[0])[None], layer=False)
        budget_of(own, x, None, found)


def test_wrong_arguments_raise_after_good_calls() -> None:
    own, x = block(), tokens()
    for _ in range(3):
        own(x, mask=ch.Padding([7, 3]))
        own(x)
    for bad, error in ((x[..., :31], "wide|width|channels"), (x.double(), "dtype"), (x[None, None], "axes|3")):
        with pytest.raises(ch.ClearheadError, match=error):
            own(bad)
    with pytest.raises(ch.ClearheadError, match="mask"):
        own(x, mask=[1])
    with pytest.raises(ch.ClearheadError, match="lengths"):
        own(x, mask=ch.Padding([7, 3, 1]))
    checked(own, x)


def test_it_takes_part_in_training() -> None:
    own, x = block(dropout=0.0), tokens()
    optimizer = torch.optim.Adam(own.parameters(), lr=3e-3)
    target, losses = draw(2, 7, 32, seed=9), []
    for _ in range(8):
        optimizer.zero_grad()
        loss = (own(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses == sorted(losses, reverse=True)
