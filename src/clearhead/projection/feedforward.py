"""project_relu_project(): two linear layers and the ReLU between, which the kernels apply on a product's way out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.backends import native_projection as kernels
from clearhead.projection.paths import KINDS, flat
from clearhead.projection.products import has_choice, kernels_take, recorded
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
    >>> (found := project_relu_project(torch.ones(5, 3), *weights)) is None or found.shape
    True
    """
    hidden = expand.shape[0] if expand.dim() == 2 else 0
    if not has_choice(x, expand, expand_bias) or not kernels_take(KINDS, x, expand, expand_bias):
        return None
    if not kernels_take(KINDS, x, contract, contract_bias, width=hidden):
        return None
    parts = (x, expand, expand_bias, contract, contract_bias)
    if torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in parts):
        output: Tensor = _FeedForward.apply(*parts)  # type: ignore[no-untyped-call]
        return output
    return _forward(*parts)[0]


def _forward(
    x: Tensor, expand: Tensor, expand_bias: Tensor | None, contract: Tensor, contract_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The output and the hidden numbers, ``[rows, hidden]``."""
    hidden = kernels.Product([(flat(x), expand)], right_turned=True, bias=expand_bias, relu=True)
    output = kernels.Product([(hidden.output, contract)], right_turned=True, bias=contract_bias)
    kernels.run_all([hidden, output])
    # Not a view: autograd would refuse to let it be changed in place.
    return torch.ops.aten._unsafe_view(output.output, (*x.shape[:-1], contract.shape[0])), hidden.output


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parts: Tensor | None) -> Tensor:
        x, expand, expand_bias, contract, contract_bias = parts
        assert x is not None
        assert expand is not None
        assert contract is not None
        output, hidden = _forward(x, expand, expand_bias, contract, contract_bias)
        ctx.save_for_backward(*parts, hidden)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *parts, hidden = ctx.saved_tensors
        if recorded(grad):
            return _known_gradients(grad, parts, ctx.needs_input_grad)
        return _gradients(grad, parts, hidden, ctx.needs_input_grad)


def _gradients(grad: Tensor, parts: list[Tensor], hidden: Tensor, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    x, expand, _, contract, _ = parts
    rows = flat(grad)
    of_contract = kernels.WeightGradients(rows, hidden, *needs[3:])
    if not any(needs[:3]):
        kernels.run_all(of_contract.products)
        return None, None, None, *of_contract.found()
    of_hidden = kernels.Product([(rows, contract)], gate=hidden)
    of_expand = kernels.WeightGradients(of_hidden.output, flat(x), *needs[1:3])
    of_x = [kernels.Product([(of_hidden.output, expand)])] if needs[0] else []
    kernels.run_all([*of_contract.products, of_hidden, *of_expand.products, *of_x])
    d_x = of_x[0].output.view(x.shape) if of_x else None
    return d_x, *of_expand.found(), *of_contract.found()


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
