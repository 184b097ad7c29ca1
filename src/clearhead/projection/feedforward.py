"""project_relu_project(): two linear layers and the ReLU between, which the kernels apply on a product's way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.backends import native_projection as kernels
from clearhead.backends.native_prepared import Kept, Stretches, Written
from clearhead.projection.chosen import choices
from clearhead.projection.paths import KINDS, flat
from clearhead.projection.products import are_plain, kernels_take, recorded
from clearhead.shapes import Float

__all__ = ["project_relu_project"]


def project_relu_project(
    x: Float[Tensor, "*batch in"],
    expand: Float[Tensor, "hidden in"],
    expand_bias: Float[Tensor, " hidden"] | None,
    contract: Float[Tensor, "out hidden"],
    contract_bias: Float[Tensor, " out"] | None,
) -> Float[Tensor, "*batch out"] | None:
    """``relu(x @ expand^T + expand_bias) @ contract^T + contract_bias`` without the hidden numbers before the ReLU.

    Args:
        x: ``[*batch, in]``.
        expand: ``[hidden, in]``.
        expand_bias: ``[hidden]``, or none.
        contract: ``[out, hidden]``.
        contract_bias: ``[out]``, or none.

    Returns:
        ``[*batch, out]``; None where the CPU kernels are not what both layers would use, for whoever asks to take the
        three steps one by one.

    Raises:
        UnsupportedError: as ``project``.

    Cost: that of both products. Of ``[*batch, hidden]`` one is kept for backward and one more made there, where three
    steps keep two and make two.

    >>> import torch
    >>> weights = torch.ones(4, 3), None, torch.ones(2, 4), None
    >>> (found := project_relu_project(torch.ones(5, 3), *weights)) is None or found.shape == (5, 2)
    True
    """
    parts = (x, expand, expand_bias, contract, contract_bias)
    training = torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in parts)
    plain = are_plain(*parts) and x.dim() > 0 and 0 not in x.shape
    recurs = plain and all(map(kernels.lies_plainly, (part for part in parts[1:] if part is not None)))
    shapes = [None if part is None else part.shape for part in parts]
    layout = (*shapes, x.dtype, torch.get_num_threads(), *choices(x.dtype)) if recurs else ()
    step = _KEPT.get(layout) if recurs else None
    if step is None:
        hidden = expand.shape[0] if expand.dim() == 2 else 0
        if not plain or not kernels_take(KINDS, x, expand, expand_bias):
            return None
        if not kernels_take(KINDS, x, contract, contract_bias, width=hidden):
            return None
        step = _Step(recurs)
        if recurs:
            _KEPT.put(layout, step)
    if training:
        output: Tensor = _FeedForward.apply(step, *parts)  # type: ignore[no-untyped-call]
        return output
    return step.forward(*parts)[0]


class _Step:
    """The kernels' calls for one layout."""

    def __init__(self, recurs: bool) -> None:
        self._calls = Stretches(recurs)

    def forward(
        self, x: Tensor, expand: Tensor, expand_bias: Tensor | None, contract: Tensor, contract_bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The output and the hidden numbers, ``[rows, hidden]``."""
        rows = kernels.rows_of(flat(x))

        def write_down() -> Written:
            hidden = kernels.Product([(rows, expand)], right_turned=True, bias=expand_bias, relu=True)
            output = kernels.Product([(hidden.output, contract)], right_turned=True, bias=contract_bias)
            return Written([hidden.call, output.call], [hidden.output, output.output], [], (hidden, output))

        parts = [part for part in (rows, expand, expand_bias, contract, contract_bias) if part is not None]
        (hidden, output), code, _ = self._calls.forward.run(parts, write_down)
        kernels.check(code)
        # Not a view: autograd would refuse to let it be changed in place.
        return torch.ops.aten._unsafe_view(output, (*x.shape[:-1], contract.shape[0])), hidden

    def gradients(
        self, grad: Tensor, parts: Sequence[Tensor], hidden: Tensor, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        """Of ``x``, both weights and both biases; what is not needed is None."""
        x, expand, _, contract, _ = parts
        arrived, rows = kernels.rows_of(flat(grad)), kernels.rows_of(flat(x))
        made: list[_Backward] = []

        def write_down() -> Written:
            made.append(_Backward(arrived, rows, expand, contract, hidden, needs))
            return made[-1].written()

        reads = [arrived, rows, expand, contract, hidden]
        writes, code, _ = self._calls.backward(needs).run(reads, write_down)
        kernels.check(code)
        if made:
            of_x, *others = made[-1].found()
        else:
            found = iter(writes)
            of_x, *others = (next(found) if needed else None for needed in needs)
        return None if of_x is None else of_x.view(x.shape), *others


_KEPT: Final = Kept[_Step](64)


class _Backward:
    """The calls of one backward."""

    def __init__(
        self, arrived: Tensor, rows: Tensor, expand: Tensor, contract: Tensor, hidden: Tensor, needs: Sequence[bool]
    ) -> None:
        self._of_contract = kernels.WeightGradients(arrived, hidden, *needs[3:])
        self._of_expand: list[kernels.WeightGradients] = []
        self._of_hidden, self._of_x = list[kernels.Product](), list[kernels.Product]()
        if any(needs[:3]):
            of_hidden = kernels.Product([(arrived, contract)], gate=hidden)
            self._of_hidden = [of_hidden]
            self._of_expand = [kernels.WeightGradients(of_hidden.output, rows, *needs[1:3])]
            self._of_x = [kernels.Product([(of_hidden.output, expand)])] if needs[0] else []

    def written(self) -> Written:
        """Results first, in the order of what is needed."""
        weights = [*self._of_expand, self._of_contract]
        of_expand = [product for layer in self._of_expand for product in layer.products]
        products = [*self._of_contract.products, *self._of_hidden, *of_expand, *self._of_x]
        writes = [product.output for product in self._of_x] + [part for layer in weights for part in layer.written]
        between = [product.output for product in self._of_hidden]
        return Written([product.call for product in products], [*writes, *between], [], self)

    def found(self) -> list[Tensor | None]:
        """Of ``x`` and each layer's weight and bias, once the calls are made."""
        of_expand = self._of_expand[0].found() if self._of_expand else (None, None)
        return [self._of_x[0].output if self._of_x else None, *of_expand, *self._of_contract.found()]


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: _Step, *parts: Tensor | None) -> Tensor:
        x, expand, expand_bias, contract, contract_bias = parts
        assert x is not None
        assert expand is not None
        assert contract is not None
        output, hidden = step.forward(x, expand, expand_bias, contract, contract_bias)
        ctx.step = step
        ctx.save_for_backward(*parts, hidden)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *parts, hidden = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        if recorded(grad):
            return None, *_known_gradients(grad, parts, needs)
        return None, *ctx.step.gradients(grad, parts, hidden, needs)


def _known_gradients(grad: Tensor, parts: list[Tensor], needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """The same by operators that can be differentiated again, from the inputs alone."""
    x, expand, expand_bias, contract, _ = parts
    hidden = F.linear(x, expand, expand_bias).relu()
    d_hidden = (grad @ contract) * (hidden > 0)
    of_hidden, of_output = d_hidden.reshape(-1, d_hidden.shape[-1]), grad.reshape(-1, grad.shape[-1])
    found = (
        d_hidden @ expand, of_hidden.t() @ x.reshape(-1, x.shape[-1]), of_hidden.sum(0),
        of_output.t() @ hidden.reshape(-1, hidden.shape[-1]), of_output.sum(0),
    )  # fmt: skip
    return tuple(gradient if needed else None for gradient, needed in zip(found, needs, strict=True))
