"""project_activate_project(): two linear layers; activation and dropout between them are GEMM epilogues."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.backends.containment import without_autocast
from clearhead.batch_part import row_numbers
from clearhead.ops.block import Tape, run_blocks
from clearhead.ops.dropout import LEVELS, dropped
from clearhead.ops.packed_weight import Weight
from clearhead.problem import draw_seed
from clearhead.projection.activations import ACTIVATIONS
from clearhead.projection.autocast import operand_cast
from clearhead.projection.linear import are_plain, kernels_take
from clearhead.projection.paths import KINDS, Layer
from clearhead.projection.stored import StoredWeight, multiply_stored
from clearhead.shapes import Float

__all__ = ["project_activate", "project_activate_project"]


def project_activate_project(
    x: Float[Tensor, "*batch in"],
    expand: Float[Tensor, "hidden in"] | Weight,
    expand_bias: Float[Tensor, " hidden"] | None,
    contract: Float[Tensor, "out hidden"] | Weight,
    contract_bias: Float[Tensor, " out"] | None,
    *,
    gate: Layer | None = None,
    activation: str = "relu",
    dropout: float = 0.0,
) -> Float[Tensor, "*batch out"] | None:
    """A feedforward layer as one fused operator; activation and dropout are GEMM epilogues.

    ``dropout(activation(x @ expand^T + expand_bias)) @ contract^T + contract_bias``; with a gate
    ``(dropout(activation(x @ gate^T + gate_bias)) * (x @ expand^T + expand_bias)) @ contract^T + contract_bias``.

    Args:
        x: ``[*batch, in]``.
        expand: ``[hidden, in]``; integers and packed weights without gradients alone.
        expand_bias: ``[hidden]``, or None.
        contract: ``[out, hidden]``, likewise.
        contract_bias: ``[out]``, or None.
        gate: weight ``[hidden, in]`` and bias ``[hidden]`` of the gate, which multiplies the output of ``expand``.
        activation: one of ``ACTIVATIONS``.
        dropout: probability of dropping a hidden element, rounded to the nearest 1/65536, below 1; a seed is drawn from
            torch's generator.

    Returns:
        ``[*batch, out]``; None if the table selects another path for a layer: the caller then runs op by op.

    Raises:
        UnsupportedError: ``CLEARHEAD_PROJECTION`` names no path, or one that is not available.

    Cost: that of the GEMMs. For backward it saves one tensor ``[*batch, hidden]`` with ReLU and two with other
    activations, and backward makes one more, with or without dropout; op by op up to four are saved and three made.
    With a gate three are saved and two made.

    Paper: Shazeer 2020, "GLU variants improve transformer", section 2, for gates.

    >>> import torch
    >>> weights = torch.ones(4, 3), None, torch.ones(2, 4), None
    >>> (found := project_activate_project(torch.ones(5, 3), *weights)) is None or found.shape == (5, 2)
    True
    """
    layers: list[Layer] = [*([] if gate is None else [gate]), (expand, expand_bias), (contract, contract_bias)]
    tensors = _tensors_of(layers)
    if (cast := operand_cast()) is not None:
        x, layers = cast(x), [_cast(layer, cast) for layer in layers]
        opened = None if gate is None else layers[0]
        with without_autocast("cpu"):
            return project_activate_project(
                x, *layers[-2], *layers[-1], gate=opened, activation=activation, dropout=dropout
            )
    training = torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in (x, *tensors))
    levels = round(dropout * LEVELS)
    if not are_plain(x, *tensors) or x.dim() == 0 or 0 in x.shape or levels >= LEVELS:
        return None
    hidden, kinds = expand.shape[0] if len(expand.shape) == 2 else 0, KINDS if training else KINDS[:1]
    if not all(kernels_take(kinds, x, *layer) for layer in layers[:-1]):
        return None
    if gate is not None and gate[0].shape != expand.shape:
        return None
    if not kernels_take(kinds, x, contract, contract_bias, width=hidden):
        return None
    seed, rows, tape = draw_seed(levels), row_numbers(x.shape), Tape()
    tape.integer(1, 0, 0, 0, 0, 1, len(layers))
    tape.linears(layers)
    tape.integer(ACTIVATIONS[activation].kind, levels, 0)
    tape.seeds((seed,), rows)

    def recompute(places: Mapping[int, Tensor], tokens: Sequence[Tensor]) -> Tensor:
        return _by_torch(tokens[0], [_copied(layer, places) for layer in layers], activation, (levels, seed, rows))

    # Sequences stay apart: gradients of parameters are sums over them.
    tokens = x if x.dim() == 3 else x.reshape(1, -1, x.shape[-1])
    output = run_blocks([tokens], tape, recompute if training else None)
    return output.view(*x.shape[:-1], contract.shape[0])


def _tensors_of(layers: Sequence[Layer]) -> list[Tensor]:
    """Weights in floating point, and biases."""
    return [part for layer in layers for part in layer if isinstance(part, Tensor)]


def _cast(layer: Layer, cast: Callable[[Tensor], Tensor]) -> Layer:
    weight, bias = layer
    return cast(weight) if isinstance(weight, Tensor) else weight, None if bias is None else cast(bias)


def _copied(layer: Layer, places: Mapping[int, Tensor]) -> tuple[Tensor, Tensor | None]:
    weight, bias = layer
    assert isinstance(weight, Tensor)
    return places.get(id(weight), weight), None if bias is None else places.get(id(bias), bias)


def _by_torch(
    x: Tensor,
    layers: Sequence[tuple[Tensor, Tensor | None]],
    activation: str,
    drop: tuple[int, int, Tensor | int],
) -> Tensor:
    """The feedforward layer by operations that autograd records; ``drop`` are levels, seed and the rows' numbers."""
    levels, seed, rows = drop
    first, *gated, contract = layers
    hidden = ACTIVATIONS[activation].formula(F.linear(x, *first))
    if levels:
        hidden = hidden * dropped(torch.ones(hidden.shape, dtype=hidden.dtype), levels, seed, None, rows)
    for expand in gated:
        hidden = hidden * F.linear(x, *expand)
    return F.linear(hidden, *contract)


def project_activate(
    x: Float[Tensor, "*batch in"],
    weight: Float[Tensor, "out in"] | Weight,
    bias: Float[Tensor, " out"] | None,
    *,
    activation: str,
) -> Float[Tensor, "*batch out"] | None:
    """``activation(x @ weight^T + bias)`` without gradients; the activation is a GEMM epilogue.

    Args:
        x: ``[*batch, in]``.
        weight: ``[out, in]``.
        bias: ``[out]``, or none.
        activation: one of ``ACTIVATIONS``.

    Returns:
        ``[*batch, out]``; None if a gradient may be needed, or the layer does not take the CPU kernels.

    Raises:
        UnsupportedError: ``CLEARHEAD_PROJECTION`` names no path, or one that is not available.

    >>> weight = torch.ones(4, 3)
    >>> (found := project_activate(torch.ones(5, 3), weight, None, activation="gelu")) is None or found.shape == (5, 4)
    True
    """
    parts = (x, *_tensors_of([(weight, bias)]))
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        return None
    if not are_plain(*parts) or x.dim() == 0 or 0 in x.shape or not kernels_take(KINDS[:1], x, weight, bias):
        return None
    kind = ACTIVATIONS[activation].kind
    if isinstance(weight, StoredWeight):
        return multiply_stored(x, weight, bias, kind)
    output: Tensor = torch.ops.clearhead.linear.default(x, weight, bias, kind)
    return output
