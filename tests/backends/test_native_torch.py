"""The CPU kernels with torch's features: compile, export, torch.func, subclasses, autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import clearhead as ch
from tests.agreement import draw, gradients, needs_native
from tests.problems import TABLE, tensors

pytestmark = needs_native


class TestTorch:
    """torch's features around the call: they work, or the call is refused with a reason."""

    def call(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ch.attention(query, key, value, mask=ch.Causal(), backend="native")

    def test_compiled(self) -> None:
        torch.compiler.reset()
        table, inputs = draw(4, 9), tensors()
        compiled = torch.compile(self.with_table, fullgraph=True, backend="aot_eager")
        eager, traced = (
            [run(*inputs, table), *torch.autograd.grad(run(*inputs, table).square().sum(), [*inputs, table])]
            for run in (self.with_table, compiled)
        )
        for one, other in zip(traced, eager, strict=True):
            torch.testing.assert_close(one, other)

    def with_table(self, query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
        return ch.attention(query, key, value, mask=ch.Causal(), scores=(ch.RelativeBias(table),), backend="native")

    def test_exported(self) -> None:
        class Model(torch.nn.Module):
            def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                return ch.attention(query, key, value, mask=ch.Causal(), backend="native")

        inputs = tuple(tensor.detach() for tensor in tensors())
        program = torch.export.export(Model(), inputs)
        assert "clearhead.attention" in program.graph_module.code
        torch.testing.assert_close(program.module()(*inputs), self.call(*inputs))

    @pytest.mark.parametrize("backend", ["native", "auto"])
    @pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "functionalize"])
    def test_functorch_works_or_is_refused(self, backend: str, transform: str) -> None:
        query, key, value = (tensor.detach() for tensor in tensors(batch=3))

        def call(query: Tensor) -> Tensor:
            return ch.attention(query, key, value, mask=ch.Causal(), backend=backend)

        def per_head(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return ch.attention(query, key, value, mask=ch.Causal(), backend=backend)

        runs: dict[str, Callable[[], Tensor]] = {
            "vmap": lambda: torch.func.vmap(per_head)(query, key, value),
            "grad": lambda: torch.func.grad(lambda tensor: call(tensor).sum())(query),
            "jvp": lambda: torch.func.jvp(call, (query,), (torch.ones_like(query),))[1],
            "functionalize": lambda: torch.func.functionalize(call)(query),
        }
        rights: dict[str, Callable[[], Tensor]] = {
            "vmap": lambda: self.call(query, key, value),
            "grad": lambda: torch.autograd.grad(call(tensor := query.clone().requires_grad_()).sum(), tensor)[0],
            "jvp": lambda: self.tangent(query, key, value, torch.ones_like(query)),
            "functionalize": lambda: self.call(query, key, value),
        }
        try:
            result = runs[transform]()
        except (ch.UnsupportedError, RuntimeError) as problem:
            refusal = problem
        else:
            torch.testing.assert_close(result, rights[transform](), rtol=1e-4, atol=1e-5)
            return
        assert "data pointer" not in str(refusal)
        if backend == "native":
            assert isinstance(refusal, ch.UnsupportedError)
            assert "torch.func" in str(refusal)

    @staticmethod
    def tangent(query: Tensor, key: Tensor, value: Tensor, direction: Tensor) -> Tensor:
        """The derivative along a direction, by central differences in float64."""
        query, key, value, direction = (tensor.double() for tensor in (query, key, value, direction))
        high, low = (
            ch.attention(query + step * direction, key, value, mask=ch.Causal(), backend="reference")
            for step in (1e-5, -1e-5)
        )
        return ((high - low) / 2e-5).float()

    @pytest.mark.parametrize("backend", ["native", "auto"])
    @pytest.mark.parametrize("called_before", [False, True])
    def test_forward_mode_keeps_the_tangent_or_is_refused(self, backend: str, called_before: bool) -> None:
        query, key, value = (tensor.detach() for tensor in tensors())
        if called_before:
            ch.attention(query, key, value, mask=ch.Causal(), backend=backend)
        direction = draw(*query.shape, seed=8, grad=False)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(query, direction)
            try:
                output = ch.attention(dual, key, value, mask=ch.Causal(), backend=backend)
            except (ch.UnsupportedError, NotImplementedError):
                return
            actual = torch.autograd.forward_ad.unpack_dual(output).tangent
        assert actual is not None, "the tangent was lost"
        torch.testing.assert_close(actual, self.tangent(query, key, value, direction), rtol=1e-3, atol=1e-4)

    @pytest.mark.parametrize("backend", ["native", "auto"])
    def test_make_fx_sees_the_call_or_is_refused(self, backend: str) -> None:
        from torch.fx.experimental.proxy_tensor import make_fx

        inputs = tuple(tensor.detach() for tensor in tensors())
        try:
            graph = make_fx(lambda *tensor: ch.attention(*tensor, mask=ch.Causal(), backend=backend))(*inputs)
        except (ch.UnsupportedError, RuntimeError):
            return
        other = tuple(tensor.detach() for tensor in tensors(seed=1))
        torch.testing.assert_close(graph(*other), self.call(*other))

    def test_fake_tensors_are_refused(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        x = draw(1, 2, 9, 8, grad=False)
        self.call(x, x, x)
        with FakeTensorMode() as mode, pytest.raises(ch.UnsupportedError, match="native: "):
            self.call(*[mode.from_tensor(x)] * 3)

    def test_meta_tensors_are_refused(self) -> None:
        x = torch.empty(1, 2, 9, 8, device="meta")
        with pytest.raises(ch.UnsupportedError, match="runs on cpu, not meta"):
            self.call(x, x, x)

    def test_subclasses_are_refused_or_kept(self) -> None:
        class Subclass(torch.Tensor):
            pass

        x = draw(1, 2, 9, 8, grad=False)
        right = self.call(x, x, x)
        with pytest.raises(ch.UnsupportedError, match="needs plain tensors"):
            self.call(x.as_subclass(Subclass), x, x)
        torch.testing.assert_close(
            torch.Tensor(ch.attention(x.as_subclass(Subclass), x, x, mask=ch.Causal())), right, rtol=1e-4, atol=1e-5
        )
        assert torch.equal(self.call(torch.nn.Parameter(x), x, x).detach(), right)

    @pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
    def test_gradients_of_some_inputs(self, wanted: tuple[int, ...]) -> None:
        inputs = tuple(tensor.detach() for tensor in tensors())
        every = gradients(tensors(), "native", mask=ch.Causal())
        for place in wanted:
            inputs[place].requires_grad_()
        output = self.call(*inputs)
        output.backward(torch.linspace(-1.0, 1.0, output.numel(), dtype=torch.float64).to(output).view_as(output))
        for place, tensor in enumerate(inputs):
            assert (tensor.grad is not None) == (place in wanted)
            if tensor.grad is not None:
                assert torch.equal(tensor.grad, every[1 + place])

    def test_gradient_of_a_rule_alone(self) -> None:
        query, key, value = (tensor.detach() for tensor in tensors())
        actual, right = (
            torch.autograd.grad(
                ch.attention(
                    *(tensor.to(dtype) for tensor in (query, key, value)),
                    scores=(ch.RelativeBias(table),),
                    mask=ch.Causal(),
                    backend=backend,
                )
                .square()
                .sum(),
                table,
            )[0]
            for backend, dtype in (("native", torch.float32), ("reference", torch.float64))
            for table in [TABLE.to(dtype).requires_grad_()]
        )
        torch.testing.assert_close(actual.double(), right, rtol=1e-4, atol=1e-5)

    def test_gradient_penalty_is_the_references(self) -> None:
        def penalty(inputs: tuple[Tensor, ...], call: Callable[..., Tensor]) -> tuple[Tensor, ...]:
            (first,) = torch.autograd.grad(call(*inputs).square().sum(), inputs[0], create_graph=True)
            return torch.autograd.grad(first.square().sum(), inputs)

        exact = tuple(tensor.detach().double().requires_grad_() for tensor in tensors())
        right = penalty(exact, lambda *given: ch.attention(*given, mask=ch.Causal(), backend="reference"))
        for actual, true in zip(penalty(tensors(), self.call), right, strict=True):
            torch.testing.assert_close(actual.double(), true, rtol=1e-3, atol=1e-3)

    def test_what_is_changed_before_backward_is_noticed(self) -> None:
        query, key, value = (tensor.detach().clone().requires_grad_() for tensor in tensors())
        output = self.call(query, key * 1.0, copy := value * 1.0)
        copy.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()

    def test_inference_mode(self) -> None:
        inputs = tuple(tensor.detach() for tensor in tensors())
        right = self.call(*inputs)
        with torch.inference_mode():
            made = tuple(tensor.clone() for tensor in inputs)
            outputs = [self.call(*inputs), self.call(*made)]
        assert all(torch.equal(output, right) and output.is_inference() for output in outputs)
        assert torch.equal(self.call(*inputs), right)

    def test_checkpointed(self) -> None:
        from torch.utils.checkpoint import checkpoint

        inputs = tensors()
        plain, checkpointed = (
            torch.autograd.grad(run.square().sum(), inputs)
            for run in (self.call(*inputs), checkpoint(self.call, *inputs, use_reentrant=False))
        )
        assert all(torch.equal(one, other) for one, other in zip(plain, checkpointed, strict=True))
