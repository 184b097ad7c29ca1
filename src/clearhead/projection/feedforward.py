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
from clearhead.projection.feedforward_calls import FeedForwardBackward, FeedForwardForward, count_kept
from clearhead.projection.paths import KINDS, Layer, flat, layers_of
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
    gate: Layer | None = None,
    activation: str = "relu",
    dropout: float = 0.0,
) -> Float[Tensor, "*batch out"] | None:
    """``dropout(activation(x @ expand^T + expand_bias)) @ contract^T + contract_bias``, without the hidden numbers in
    between; with a gate ``(dropout(activation(x @ gate^T + gate_bias)) * (x @ expand^T + expand_bias)) @ contract^T +
    contract_bias``.

    Args:
        x: ``[*batch, in]``.
        expand: ``[hidden, in]``.
        expand_bias: ``[hidden]``, or none.
        contract: ``[out, hidden]``.
        contract_bias: ``[out]``, or none.
        gate: weight ``[hidden, in]`` and bias ``[hidden]`` of a layer that opens and shuts what ``expand`` gives.
        activation: one of ``ACTIVATIONS``.
        dropout: probability of dropping a hidden number, to the nearest 1/65536, 1 not among them; a seed is drawn from
            torch's generator.

    Returns:
        ``[*batch, out]``; None where the CPU kernels are not what every layer would use, for whoever asks to take the
        steps one by one.

    Raises:
        UnsupportedError: as ``project``.

    Cost: that of the products. Of ``[*batch, hidden]`` a ReLU keeps one for backward and others two, and one more is
    made there, with dropout as without; one step after the other keeps up to four and makes three. With a gate three
    are kept and two are made.

    Paper: Shazeer 2020, "GLU variants improve transformer", section 2, for gates.

    >>> import torch
    >>> weights = torch.ones(4, 3), None, torch.ones(2, 4), None
    >>> (found := project_activate_project(torch.ones(5, 3), *weights)) is None or found.shape == (5, 2)
    True
    """
    layers = [*([] if gate is None else [gate]), (expand, expand_bias), (contract, contract_bias)]
    tensors = [part for layer in layers for part in layer]
    parts = (x, *tensors)
    training = torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in parts)
    levels = round(dropout * LEVELS)
    plain = are_plain(x, *tensors) and x.dim() > 0 and 0 not in x.shape and levels < LEVELS
    recurs = plain and all(map(kernels.lies_plainly, (part for part in tensors if part is not None)))
    shapes = [None if part is None else part.shape for part in parts]
    kind = (activation, levels, training)
    layout = (*shapes, x.dtype, *kind, torch.get_num_threads(), *choices(x.dtype)) if recurs else ()
    step = _KEPT.get(layout) if recurs else None
    if step is None:
        hidden, kinds = expand.shape[0] if expand.dim() == 2 else 0, KINDS if training else KINDS[:1]
        if not plain or not all(kernels_take(kinds, x, *layer) for layer in layers[:-1]):
            return None
        if gate is not None and gate[0].shape != expand.shape:
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
    return step.forward(seed, x, layers)[0]


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

    def forward(self, seed: int, x: Tensor, layers: Sequence[Layer]) -> list[Tensor]:
        """The output, and what backward reads."""
        rows = kernels.rows_of(flat(x))

        def write_down() -> Written:
            own = FeedForwardForward(rows, layers, self.activation, self.dropped, seed, self._training)
            return Written([*own.calls], [own.output, *own.kept, *own.passing], [], own)

        parts = [part for layer in layers for part in layer if part is not None]
        (output, *kept), code, _ = self._calls.forward.run([rows, *parts], write_down, (seed,))
        kernels.check(code)
        if self._training:
            del kept[count_kept(self.activation, len(layers) > 2) :]
        # Not a view: autograd would refuse to let it be changed in place.
        return [torch.ops.aten._unsafe_view(output, (*x.shape[:-1], layers[-1][0].shape[0])), *kept]

    def gradients(
        self, grad: Tensor, x: Tensor, layers: Sequence[Layer], kept: Sequence[Tensor], needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        """Of ``x``, and of each weight and bias; what is not needed is None."""
        arrived, rows = kernels.rows_of(flat(grad)), kernels.rows_of(flat(x))
        made: list[FeedForwardBackward] = []

        def write_down() -> Written:
            own = FeedForwardBackward(arrived, rows, layers, kept, self.activation, self.dropped, needs)
            made.append(own)
            return Written([*own.calls], [*own.of_x, *own.of_layers, *own.between], [], own)

        reads = [arrived, rows, *(weight for weight, _ in layers), *kept]
        writes, code, _ = self._calls.backward(needs).run(reads, write_down)
        kernels.check(code)
        if made:
            of_x, *others = made[-1].found()
        else:
            found = iter(writes)
            of_x, *others = (next(found) if needed else None for needed in needs)
        return None if of_x is None else of_x.view(x.shape), *others


_KEPT: Final = Kept[_Step](64)


class _FeedForward(torch.autograd.Function):
    """A step, its seed, what it reads, and a weight and a bias of each layer."""

    @staticmethod
    def forward(ctx: Any, step: _Step, seed: int, x: Tensor, *tensors: Tensor | None) -> Tensor:
        output, *kept = step.forward(seed, x, layers_of(tensors))
        ctx.step, ctx.seed, ctx.count = step, seed, len(tensors)
        ctx.save_for_backward(x, *tensors, *kept)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Asked for once: a checkpoint hands them out a single time.
        x, *saved = ctx.saved_tensors
        layers, kept = layers_of(saved[: ctx.count]), saved[ctx.count :]
        needs = ctx.needs_input_grad[2:]
        if recorded(grad):
            return None, None, *_known_gradients(ctx.step, ctx.seed, grad, x, layers, needs)
        return None, None, *ctx.step.gradients(grad, x, layers, kept, needs)


def _known_gradients(
    step: _Step, seed: int, grad: Tensor, x: Tensor, layers: Sequence[Layer], needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """The same by operators that can be differentiated again, from the inputs alone."""
    (first, first_bias), *between, (contract, _) = layers
    before, of_hidden = F.linear(x, first, first_bias), grad @ contract
    activated = step.activation.formula(before)
    kept = dropped(torch.ones_like(before), step.dropped, seed) if step.dropped else None
    activated = activated if kept is None else activated * kept
    # Of a gate's feedforward two layers meet in the hidden numbers.
    multiplied = [F.linear(x, *expand) for expand in between]
    hidden, of_activated = activated, of_hidden
    for other in multiplied:
        hidden, of_activated = activated * other, of_hidden * other
    of_activated = of_activated if kept is None else of_activated * kept
    of_first = [step.activation.backward(of_activated, before), *[of_hidden * activated for _ in multiplied]]
    read, found = flat(x), list[Tensor]()
    for of_own in of_first:
        rows = flat(of_own)
        found += [rows.t() @ read, rows.sum(0)]
    of_x = of_first[0] @ first
    for of_own, (weight, _) in zip(of_first[1:], between, strict=True):
        of_x = of_x + of_own @ weight
    of_output = flat(grad)
    found = [of_x, *found, of_output.t() @ flat(hidden), of_output.sum(0)]
    return tuple(gradient if needed else None for gradient, needed in zip(found, needs, strict=True))
