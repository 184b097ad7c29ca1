"""The kernels' calls of a feedforward, written down: for a step of its own, or as a part of a layer's."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure

from torch import Tensor

from clearhead.backends.native_header import Verb
from clearhead.backends.native_projection import Gate, Product, WeightGradients
from clearhead.projection.activations import Activation
from clearhead.projection.paths import Layer
from clearhead.shapes import Float

__all__ = ["FeedForwardBackward", "FeedForwardForward", "count_kept"]


def count_kept(activation: Activation, gated: bool) -> int:
    """How many tensors forward keeps for backward."""
    return 3 if gated else 2 if activation.gate is Gate.SLOPE else 1


class FeedForwardForward:
    """A feedforward's layers and what stands between them, written down.

    Args:
        rows: ``[rows, in]``.
        layers: weight and bias of each: of the gate, where there is one, of what expands and of what contracts.
        activation: of the gate's numbers, which those of the layer that expands are multiplied by; without a gate of
            the latter themselves.
        levels: of ``LEVELS`` activated numbers so many are dropped.
        seed: of dropout.
        training: whether ``kept`` has all that backward reads.
        output: where the output goes, ``[rows, out]``; a new one when left out.

    Attributes:
        calls: in order.
        output: ``[rows, out]``.
        passing: what nobody reads later, ``[rows, hidden]``: slopes of a gate.
        kept: the hidden numbers ``[rows, hidden]``, and their slopes where the activation has them; with a gate what
            they grow by with its numbers, and the activated ones.
    """

    def __init__(
        self, rows: Float[Tensor, "rows in"], layers: Sequence[Layer], activation: Activation, levels: int, seed: int,
        training: bool, output: Float[Tensor, "rows out"] | None = None,
    ) -> None:  # fmt: skip
        (first, first_bias), *between, (contract, contract_bias) = layers
        gated = bool(between)
        activated = Product(
            [(rows, first)], right_turned=True, bias=first_bias, activation=activation.kind, dropped=levels, seed=seed,
            sloped=training and (gated or activation.gate is Gate.SLOPE),
        )  # fmt: skip
        # What is dropped of one factor is dropped of the product.
        multiplied = [
            Product(
                [(rows, expand)], right_turned=True, bias=bias, gate=activated.output, gate_kind=Gate.SLOPE,
                slope_gate=activated.slope,
            )
            for expand, bias in between
        ]  # fmt: skip
        hidden = [activated, *multiplied][-1]
        last = Product([(hidden.output, contract)], right_turned=True, bias=contract_bias, output=output)
        products = [activated, *multiplied, last]
        self.calls: list[tuple[Verb, Structure]] = [product.call for product in products]
        self.output = last.output
        self.passing = [activated.slope] if gated and activated.slope is not None else []
        self.kept = [hidden.output] if hidden.slope is None else [hidden.output, hidden.slope]
        self.kept += [activated.output] if gated else []
        self._held = products


class FeedForwardBackward:
    """The way back, written down.

    Args:
        arrived: the output's gradient, ``[rows, out]``.
        rows: what forward read.
        layers: as forward had them.
        kept: what forward kept.
        activation: as forward had it.
        levels: as forward had them.
        needs: of ``rows``, and of each layer's weight and bias.

    Attributes:
        between: what is written on the way, ``[rows, hidden]``.
    """

    def __init__(
        self, arrived: Float[Tensor, "rows out"], rows: Float[Tensor, "rows in"], layers: Sequence[Layer],
        kept: Sequence[Tensor], activation: Activation, levels: int, needs: Sequence[bool],
    ) -> None:  # fmt: skip
        *first, (contract, _) = layers
        needs_rows, *of_layers = needs
        self._of_contract = WeightGradients([(arrived, kept[0])], *of_layers[-2:])
        self._of_first = list[WeightGradients]()
        self._of_hidden, self._of_x = list[Product](), list[Product]()
        self.between: list[Tensor] = []
        self._without = len(of_layers) - 2
        if any(needs[:-2]):
            self.between = self._before(arrived, contract, kept, activation, levels)
            pairs = list(zip(self.between, first, strict=True))
            places = zip(of_layers[:-2:2], of_layers[1:-2:2], strict=True)
            self._of_first = [
                WeightGradients([(grad, rows)], *own) for (grad, _), own in zip(pairs, places, strict=True)
            ]
            self._of_x = [Product([(grad, weight) for grad, (weight, _) in pairs])] if needs_rows else []

    def _before(
        self, arrived: Tensor, contract: Tensor, kept: Sequence[Tensor], activation: Activation, levels: int
    ) -> list[Tensor]:
        """Gradients of what the layers in front of the last one gave, once the calls are made."""
        if len(kept) == 3:
            _, slope, activated = kept
            own = Product([(arrived, contract)], gate=activated, gate_kind=Gate.SLOPE, slope_gate=slope)
        else:
            # Slopes know what was dropped.
            shut = levels if activation.gate is Gate.OUTPUT else 0
            own = Product([(arrived, contract)], gate=kept[-1], gate_kind=activation.gate, dropped=shut)
        self._of_hidden = [own]
        return [own.output] if own.slope is None else [own.slope, own.output]

    @property
    def calls(self) -> list[tuple[Verb, Structure]]:
        """In order."""
        of_first = [product for layer in self._of_first for product in layer.products]
        return [one.call for one in (*self._of_contract.products, *self._of_hidden, *of_first, *self._of_x)]

    @property
    def of_x(self) -> list[Tensor]:
        """The gradient of ``rows``, where it is needed."""
        return [product.output for product in self._of_x]

    @property
    def of_layers(self) -> list[Tensor]:
        """Gradients of weights and biases that the products write, in their order."""
        return [part for layer in (*self._of_first, self._of_contract) for part in layer.written]

    def found(self) -> list[Tensor | None]:
        """Gradients of ``rows``, and of each layer's weight and bias, once the calls are made."""
        of_first = [part for layer in self._of_first for part in layer.found()] or [None] * self._without
        return [self._of_x[0].output if self._of_x else None, *of_first, *self._of_contract.found()]
