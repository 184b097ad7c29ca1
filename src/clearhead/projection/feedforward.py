"""project_activate_project(): two linear layers and what stands between them, applied on a product's way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.backends import native_projection as kernels
from clearhead.backends.native_dropout import LEVELS, dropped
from clearhead.backends.native_prepared import Kept, Stretches, Written
from clearhead.problem import draw_seed
from clearhead.projection.activations import ACTIVATIONS, Activation
from clearhead.projection.chosen import choices
from clearhead.projection.feedforward_calls import FeedForwardBackward, FeedForwardForward
from clearhead.projection.paths import KINDS, flat
from clearhead.projection.products import are_plain, kernels_take, recorded
from clearhead.shapes import Float

__all__ = ["project_activate", "project_activate_project"]


def project_activate_project(
    x: Float[Tensor, "*batch in"],
    expand: Float[Tensor, "hidden in"],
    expand_bias: Float[Tensor, " hidden"] | None,
    contract: Float[Tensor, "out hidden"],
    contract_bias: Float[Tensor, " out"] | None,
    *,
    activation: str = "relu",
    dropout: float = 0.0,
) -> Float[Tensor, "*batch out"] | None:
    """``dropout(activation(x @ expand^T + expand_bias)) @ contract^T + contract_bias``, without the hidden numbers in
    between.

    Args:
        x: ``[*batch, in]``.
        expand: ``[hidden, in]``.
        expand_bias: ``[hidden]``, or none.
        contract: ``[out, hidden]``.
        contract_bias: ``[out]``, or none.
        activation: one of ``ACTIVATIONS``.
        dropout: probability of dropping a hidden number, to the nearest 1/65536, 1 not among them; a seed is drawn from
            torch's generator.

    Returns:
        ``[*batch, out]``; None where the CPU kernels are not what both layers would use, for whoever asks to take the
        steps one by one.

    Raises:
        UnsupportedError: as ``project``.

    Cost: that of both products. Of ``[*batch, hidden]`` a ReLU keeps one for backward and others two, and one more is
    made there, with dropout as without; one step after the other keeps up to four and makes three.

    >>> import torch
    >>> weights = torch.ones(4, 3), None, torch.ones(2, 4), None
    >>> (found := project_activate_project(torch.ones(5, 3), *weights)) is None or found.shape == (5, 2)
    True
    """
    parts = (x, expand, expand_bias, contract, contract_bias)
    training = torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in parts)
    levels = round(dropout * LEVELS)
    plain = are_plain(*parts) and x.dim() > 0 and 0 not in x.shape and levels < LEVELS
    recurs = plain and all(map(kernels.lies_plainly, (part for part in parts[1:] if part is not None)))
    shapes = [None if part is None else part.shape for part in parts]
    kind = (activation, levels, training)
    layout = (*shapes, x.dtype, *kind, torch.get_num_threads(), *choices(x.dtype)) if recurs else ()
    step = _KEPT.get(layout) if recurs else None
    if step is None:
        hidden, kinds = expand.shape[0] if expand.dim() == 2 else 0, KINDS if training else KINDS[:1]
        if not plain or not kernels_take(kinds, x, expand, expand_bias):
            return None
        if not kernels_take(kinds, x, contract, contract_bias, width=hidden):
            return None
        step = _Step(ACTIVATIONS[activation], levels, training, recurs)
        if recurs:
            _KEPT.put(layout, step)
    seed = draw_seed(levels)
    if training:
        output: Tensor = _FeedForward.apply(step, seed, *parts)  # type: ignore[no-untyped-call]
        return output
    return step.forward(seed, *parts)[0]


def project_activate(
    x: Float[Tensor, "*batch in"], weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None, *,
    activation: str,
) -> Float[Tensor, "*batch out"] | None:  # fmt: skip
    """``activation(x @ weight^T + bias)`` where nothing is learned, without the numbers before the activation.

    Args:
        x: ``[*batch, in]``.
        weight: ``[out, in]``.
        bias: ``[out]``, or none.
        activation: one of ``ACTIVATIONS``.

    Returns:
        ``[*batch, out]``; None where a gradient may be wanted, or the CPU kernels are not what the layer would use.

    Raises:
        UnsupportedError: as ``project``.

    >>> weight = torch.ones(4, 3)
    >>> (found := project_activate(torch.ones(5, 3), weight, None, activation="gelu")) is None or found.shape == (5, 4)
    True
    """
    parts = (x, weight, bias)
    if torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in parts):
        return None
    if not are_plain(*parts) or x.dim() == 0 or 0 in x.shape or not kernels_take(KINDS[:1], x, weight, bias):
        return None
    kind = ACTIVATIONS[activation].kind
    output = kernels.product([(flat(x), weight)], right_turned=True, bias=bias, activation=kind)
    return output.view(*x.shape[:-1], weight.shape[0])


class _Step:
    """The kernels' calls for one layout.

    Args:
        activation: what stands between.
        dropped: of ``LEVELS`` hidden numbers so many are dropped.
        training: whether forward keeps what backward needs.
        recurs: whether calls may come again.
    """

    def __init__(self, activation: Activation, dropped: int, training: bool, recurs: bool) -> None:
        self.activation, self.dropped, self._training = activation, dropped, training
        self._calls = Stretches(recurs)

    def forward(
        self, seed: int, x: Tensor, expand: Tensor, expand_bias: Tensor | None, contract: Tensor,
        contract_bias: Tensor | None,
    ) -> list[Tensor]:  # fmt: skip
        """The output; the hidden numbers, ``[rows, hidden]``; and their slopes where the activation has them."""
        rows = kernels.rows_of(flat(x))
        layers = ((expand, expand_bias), (contract, contract_bias))

        def write_down() -> Written:
            own = FeedForwardForward(rows, layers, self.activation, self.dropped, seed, self._training)
            return Written([*own.calls], [own.output, *own.kept], [], own)

        parts = [part for part in (rows, expand, expand_bias, contract, contract_bias) if part is not None]
        (output, *kept), code, _ = self._calls.forward.run(parts, write_down, (seed,))
        kernels.check(code)
        # Not a view: autograd would refuse to let it be changed in place.
        return [torch.ops.aten._unsafe_view(output, (*x.shape[:-1], contract.shape[0])), *kept]

    def gradients(
        self, grad: Tensor, parts: Sequence[Tensor], kept: Sequence[Tensor], needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        """Of ``x``, both weights and both biases; what is not needed is None."""
        x, expand, _, contract, _ = parts
        arrived, rows = kernels.rows_of(flat(grad)), kernels.rows_of(flat(x))
        made: list[FeedForwardBackward] = []

        def write_down() -> Written:
            layers = ((expand, None), (contract, None))
            own = FeedForwardBackward(arrived, rows, layers, kept, self.activation, self.dropped, needs)
            made.append(own)
            return Written([*own.calls], [*own.of_x, *own.of_layers, *own.between], [], own)

        writes, code, _ = self._calls.backward(needs).run([arrived, rows, expand, contract, *kept], write_down)
        kernels.check(code)
        if made:
            of_x, *others = made[-1].found()
        else:
            found = iter(writes)
            of_x, *others = (next(found) if needed else None for needed in needs)
        return None if of_x is None else of_x.view(x.shape), *others


_KEPT: Final = Kept[_Step](64)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: _Step, seed: int, *parts: Tensor | None) -> Tensor:
        x, expand, expand_bias, contract, contract_bias = parts
        assert x is not None
        assert expand is not None
        assert contract is not None
        output, *kept = step.forward(seed, x, expand, expand_bias, contract, contract_bias)
        ctx.step, ctx.seed = step, seed
        ctx.save_for_backward(*parts, *kept)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        parts, kept = saved[:5], saved[5:]
        needs = ctx.needs_input_grad[2:]
        if recorded(grad):
            return None, None, *_known_gradients(ctx.step, ctx.seed, grad, parts, needs)
        return None, None, *ctx.step.gradients(grad, parts, kept, needs)


def _known_gradients(
    step: _Step, seed: int, grad: Tensor, parts: Sequence[Tensor], needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """The same by operators that can be differentiated again, from the inputs alone."""
    x, expand, expand_bias, contract, _ = parts
    before = F.linear(x, expand, expand_bias)
    hidden, of_hidden = step.activation.formula(before), grad @ contract
    if step.dropped:
        kept = dropped(torch.ones_like(before), step.dropped, seed)
        hidden, of_hidden = hidden * kept, of_hidden * kept
    of_before = step.activation.backward(of_hidden, before)
    rows, of_output = flat(of_before), flat(grad)
    found = (of_before @ expand, rows.t() @ flat(x), rows.sum(0), of_output.t() @ flat(hidden), of_output.sum(0))
    return tuple(gradient if needed else None for gradient, needed in zip(found, needs, strict=True))
