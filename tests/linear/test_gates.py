"""Gates and decays: the smallest of a dtype, those of absent tokens, and their device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import clearhead as ch
from clearhead.linear.forms import Decays
from tests.linear.members import MEMBERS, SHAPE, Inputs
from tests.linear.test_forms import gradients, near


def test_strong_gates_neither_overflow_nor_lose_the_last_token() -> None:
    inputs = MEMBERS["gate per channel"].draw((1, 2, 300, 8), dtype=torch.float32)
    for strength in (-1e4, -1e-6):
        strong = Inputs(inputs.query, inputs.key, inputs.value, {"log_gate": torch.full((1, 2, 300, 8), strength)})
        for form in ("chunked", "parallel"):
            output, _ = MEMBERS["gate per channel"].run(strong, form=form)
            serial, _ = MEMBERS["gate per channel"].run(strong, form="recurrent")
            torch.testing.assert_close(output, serial, rtol=1e-4, atol=1e-4)
        if strength == -1e4:
            last_alone = (inputs.query * inputs.key).sum(-1, keepdim=True) / 8**0.5 * inputs.value
            torch.testing.assert_close(output, last_alone, rtol=1e-5, atol=1e-5)


@pytest.mark.covering(0)
@pytest.mark.parametrize("native", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("name", ["gate per token", "gate per channel", "delta, gate per token"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_smallest_log_gates_clear_the_earlier_state_only(
    name: str, dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr("clearhead.linear.native.takes", lambda *given: False)
    member = MEMBERS[name]
    inputs = member.draw((1, 2, 40, 6), dtype=dtype)
    mild = inputs.extra["log_gate"] * 0.01
    for lowest in (torch.finfo(dtype).min, torch.finfo(dtype).min / 3, -1e4):
        for places in (slice(None), slice(3, None, 3), slice(7, 8)):
            gate = mild.clone()
            gate[:, :, places] = lowest
            given_ = Inputs(inputs.query, inputs.key, inputs.value, {**inputs.extra, "log_gate": gate})
            serial, last = member.run(given_, form="recurrent")
            wanted = gradients(member, given_, form="recurrent")
            for form in ("chunked", "parallel"):
                output, state = member.run(given_, form=form)
                # Sums of up to 40 logarithms of 128 would round by 3e-4 in float32 alone.
                close = {torch.float64: 1e-8, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
                torch.testing.assert_close(output, serial, rtol=close, atol=close)
                torch.testing.assert_close(state.matrix, last.matrix, rtol=close, atol=close)
                for grad, other in zip(gradients(member, given_, form=form), wanted, strict=True):
                    torch.testing.assert_close(grad, other, rtol=close, atol=close * max(1.0, float(other.abs().max())))


@pytest.mark.slow
def test_compiled_call_takes_smallest_log_gates() -> None:
    member = MEMBERS["gate per channel"]
    inputs = member.draw(dtype=torch.float32)
    inputs.extra["log_gate"][:, :, 5:9] = torch.finfo(torch.float32).min
    torch.compiler.reset()
    output, state = torch.compile(member.run, backend="eager")(inputs, chunk_size=8)
    serial, last = member.run(inputs, form="recurrent")
    torch.testing.assert_close(output, serial, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(state.matrix, last.matrix, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["gate per channel", "delta, gate per token"])
def test_gates_of_tokens_in_no_document_are_not_read(name: str) -> None:
    inputs = MEMBERS[name].draw((1, 2, 9, SHAPE[3]))
    mask = ch.Documents(ids=torch.tensor([0, 0, 0, 0, 1, 1, -1, -1, -1]))
    expected, _ = MEMBERS[name].run(inputs, mask=mask)
    inputs.extra["log_gate"][:, :, 6:] = torch.nan
    near(MEMBERS[name].run(inputs, mask=mask)[0], expected)
    inputs.extra["log_gate"][:, :, 5] = torch.nan
    with pytest.raises(ch.ShapeError, match="log_gate must be finite and at most 0"):
        MEMBERS[name].run(inputs, mask=mask)


def test_decays_move_to_the_device_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[Any] = []
    # Torch has no autocast to switch off on this device, so the call ends here.
    monkeypatch.setattr("clearhead.linear.attention.run", lambda member, *given: devices.append(member))
    x = torch.empty(1, 3, 8, 4, device="meta")
    for decay in (None, [0.5, 0.9, 1.0], torch.tensor([0.5, 0.9, 1.0])):
        ch.linear.retention(x, x, x, decay=decay)
    assert [member.log_decay.device.type for member in devices] == ["meta"] * 3


@pytest.mark.parametrize("use_native", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("kind", ["linear", "retention", "gated", "delta"])
def test_a_module_can_be_checkpointed(kind: Any, use_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not use_native:
        monkeypatch.setattr("clearhead.linear.native.library", lambda: None)
    module = ch.nn.LinearAttention(16, 2, kind=kind)
    grads = []
    for plain in (True, False):
        x = torch.randn(2, 50, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
        if plain:
            output = module(x, mask=ch.Causal())
        else:
            output = checkpoint(lambda x: module(x, mask=ch.Causal()), x, use_reentrant=False)
        grads.append(torch.autograd.grad(output.square().sum(), x)[0])
    torch.testing.assert_close(*grads)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["parallel", "chunked", "chunked, kernels"])
@pytest.mark.parametrize("name", ["gate per token", "gate per channel", "delta, gate per token"])
def test_sum_of_many_decays_keeps_precision(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not form.endswith("kernels"):
        monkeypatch.setattr("clearhead.linear.native.takes", lambda *given: False)
    form, member = form.removesuffix(", kernels"), MEMBERS[name]
    inputs = member.draw((1, 2, 512, 6), dtype=torch.float32)
    gate = torch.full_like(inputs.extra["log_gate"], -0.01)
    gate[:, :, ::16] = -100.0
    given_ = Inputs(inputs.query, inputs.key, inputs.value, {**inputs.extra, "log_gate": gate})
    serial, _ = member.run(given_, form="recurrent")
    # A float32 sum of 32 such gates has steps of 2e-4, of four, as in a chunk, 3e-5.
    torch.testing.assert_close(member.run(given_, form=form)[0], serial, rtol=2e-6, atol=2e-6)
    wanted = gradients(member, given_, form="recurrent")
    for grad, other in zip(gradients(member, given_, form=form), wanted, strict=True):
        torch.testing.assert_close(grad, other, rtol=0, atol=1e-5 * max(1.0, float(other.abs().max())))


@pytest.mark.parametrize("name", ["gate per token", "gate per channel", "delta, gate per token", "retention"])
def test_unreadable_gates_are_not_checked(name: str) -> None:
    member = MEMBERS[name]
    inputs = member.draw(dtype=torch.float32)

    def one(*parts: Any) -> Any:
        tokens = Inputs(*(part[None] for part in parts[:3]), {})  # type: ignore[arg-type]
        extra = dict(zip(inputs.extra, (part[None] for part in parts[3:]), strict=True))
        return member.run(Inputs(tokens.query, tokens.key, tokens.value, extra))[0][0]

    mapped = torch.vmap(one)(*inputs.tensors())
    torch.testing.assert_close(mapped, member.run(inputs)[0], rtol=1e-4, atol=1e-5)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = inputs.mapped(mode.from_tensor)
        assert member.run(fake)[0].shape == mapped.shape


def test_decays_can_be_vmapped_and_default_ones_are_on_the_cpu() -> None:
    x = torch.randn(1, 3, 9, 4, generator=torch.Generator().manual_seed(1))
    decays = torch.tensor([[0.5, 0.9, 1.0], [0.1, 0.2, 0.3]])
    mapped = torch.vmap(lambda decay: ch.linear.retention(x, x, x, decay=decay)[0])(decays)
    for one, decay in zip(mapped, decays, strict=True):
        torch.testing.assert_close(one, ch.linear.retention(x, x, x, decay=decay)[0], rtol=1e-4, atol=1e-5)
    with torch.device("meta"):
        assert ch.linear.retention(x, x, x)[0].device.type == "cpu"


@pytest.mark.parametrize("form", ["auto", "chunked", "parallel"])
@pytest.mark.parametrize(
    "mask", [None, ch.Padding([29, 40]), ch.Documents([9, 40, 31])], ids=["plain", "pad", "packed"]
)
def test_gradients_of_small_decays_are_as_exact_as_those_token_by_token(mask: ch.Mask | None, form: str) -> None:
    shape = (1, 4, 80, 6) if isinstance(mask, ch.Documents) else (2, 4, 40, 6)
    inputs = MEMBERS["retention"].draw(shape, dtype=torch.float32)

    def gradient(form: str, dtype: torch.dtype, decays: list[float]) -> torch.Tensor:
        decay = torch.tensor(decays, dtype=torch.float64, requires_grad=True)
        parts = (part.to(dtype) for part in (inputs.query, inputs.key, inputs.value))
        output, state = ch.linear.retention(*parts, decay=decay, mask=mask, form=form, chunk_size=16)
        return torch.autograd.grad(output.cos().sum() + state.matrix.sin().sum(), decay)[0]

    for decays in ([0.2, 1e-2, 1e-4, 1e-6], [0.999, 1e-9, 1e-20, 1e-35]):
        exact = gradient("recurrent", torch.float64, decays)
        serial = (gradient("recurrent", torch.float32, decays) - exact).abs()
        # Divided by a decay of 1e-6, the rounding of sums that cancel is as large as the gradient.
        assert bool(((gradient(form, torch.float32, decays) - exact).abs() <= 2 * serial + 1e-5 * exact.abs()).all())


def test_small_decays_have_second_and_forward_derivatives() -> None:
    x = MEMBERS["retention"].draw((1, 2, 7, 3)).query

    def call(decay: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = ch.linear.retention(x, x, x, decay=decay, form="chunked", chunk_size=4)[0]
        return output

    decay = torch.tensor([1e-2, 0.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(call, decay, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, decay)


def test_running_sums_of_decays_are_exact_without_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    for length, strongest in ((1, 1.0), (64, 128.0), (64, 1e-6), (4096, 1.0), (4096, 128.0)):
        given_ = -strongest * torch.rand(length, 3, generator=generator)
        given_[::16] = -128.0
        sums, exact = Decays.of(given_, faint=False), given_.double().cumsum(dim=0)
        assert sums.low is not None
        assert float((sums.high.double() + sums.low.double() - exact).abs().max()) < 1e-9


class _WithoutFloat64(TorchDispatchMode):
    """Refuses float64 on the device "meta", as some devices do."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor) and one.is_meta and one.dtype is torch.float64:
                raise TypeError(f"{function}: no float64 on this device")
        return result


@pytest.mark.parametrize("form", ["recurrent", "chunked", "parallel"])
def test_float64_is_not_required_of_the_device(form: str) -> None:
    x, gates = torch.empty(1, 3, 9, 4, device="meta"), torch.empty(1, 3, 9, 4, device="meta")
    learned = torch.tensor([0.5, 0.9, 1.0], requires_grad=True)
    with _WithoutFloat64():
        with pytest.raises(TypeError, match="no float64"):
            x.double()
        for decay in (None, [0.5, 0.9, 1.0], learned, learned.detach().double()):
            ch.linear.retention(x, x, x, decay=decay, form=form)
        ch.linear.gated_linear_attention(x, x, x, log_gate=gates, form=form)
        ch.linear.delta_attention(x, x, x, rate=gates[..., 0], log_gate=gates[..., :1], form=form)
        ch.linear_attention(x, x, x, feature_map="performer", causal=True, form=form)
