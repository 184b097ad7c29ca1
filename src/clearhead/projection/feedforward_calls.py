"""The kernels' calls of a feedforward, written down: for a step of its own, or as a part of a layer's."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure

from torch import Tensor

from clearhead.backends.native_library import Verb
from clearhead.backends.native_projection import Gate, Product, WeightGradients
from clearhead.projection.activations import Activation
from clearhead.projection.paths import Layer
from clearhead.shapes import Float

__all__ = ["FeedForwardBackward", "FeedForwardForward"]


class FeedForwardForward:
    """Both layers and what stands between them, written down.

    Args:
        rows: ``[rows, in]``.
        layers: weight and bias of each.
        activation: what stands between.
        levels: of ``LEVELS`` hidden numbers so many are dropped.
        seed: of dropout.
        training: whether ``kept`` has all that backward reads.
        output: where the output goes, ``[rows, out]``; a new one when left out.

    Attributes:
        calls: in order.
        output: ``[rows, out]``.
        kept: the hidden numbers ``[rows, hidden]``, and their slopes where the activation has them.
    """

    def __init__(
        self, rows: Float[Tensor, "rows in"], layers: Sequence[Layer], activation: Activation, levels: int, seed: int,
        training: bool, output: Float[Tensor, "rows out"] | None = None,
    ) -> None:  # fmt: skip
        (expand, expand_bias), (contract, contract_bias) = layers
        hidden = Product(
            [(rows, expand)], right_turned=True, bias=expand_bias, activation=activation.kind, dropped=levels,
            seed=seed, sloped=training and activation.gate is Gate.SLOPE,
        )  # fmt: skip
        last = Product([(hidden.output, contract)], right_turned=True, bias=contract_bias, output=output)
        self.calls: list[tuple[Verb, Structure]] = [hidden.call, last.call]
        self.output = last.output
        self.kept = [hidden.output] if hidden.slope is None else [hidden.output, hidden.slope]
        self._held = (hidden, last)


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
    """

    def __init__(
        self, arrived: Float[Tensor, "rows out"], rows: Float[Tensor, "rows in"], layers: Sequence[Layer],
        kept: Sequence[Tensor], activation: Activation, levels: int, needs: Sequence[bool],
    ) -> None:  # fmt: skip
        (expand, _), (contract, _) = layers
        self._of_contract = WeightGradients([(arrived, kept[0])], *needs[3:])
        self._of_expand: list[WeightGradients] = []
        self._of_hidden, self._of_x = list[Product](), list[Product]()
        if any(needs[:3]):
            # Slopes know what was dropped.
            shut = levels if activation.gate is Gate.OUTPUT else 0
            of_hidden = Product([(arrived, contract)], gate=kept[-1], gate_kind=activation.gate, dropped=shut)
            self._of_hidden = [of_hidden]
            self._of_expand = [WeightGradients([(of_hidden.output, rows)], *needs[1:3])]
            self._of_x = [Product([(of_hidden.output, expand)])] if needs[0] else []

    @property
    def calls(self) -> list[tuple[Verb, Structure]]:
        """In order."""
        of_expand = [product for layer in self._of_expand for product in layer.products]
        return [one.call for one in (*self._of_contract.products, *self._of_hidden, *of_expand, *self._of_x)]

    @property
    def of_x(self) -> list[Tensor]:
        """The gradient of ``rows``, where it is needed."""
        return [product.output for product in self._of_x]

    @property
    def of_layers(self) -> list[Tensor]:
        """Gradients of weights and biases that the products write, in their order."""
        return [part for layer in (*self._of_expand, self._of_contract) for part in layer.written]

    @property
    def between(self) -> list[Tensor]:
        """What is written on the way."""
        return [product.output for product in self._of_hidden]

    def found(self) -> list[Tensor | None]:
        """Gradients of ``rows``, and of each layer's weight and bias, once the calls are made."""
        of_expand = self._of_expand[0].found() if self._of_expand else (None, None)
        return [self._of_x[0].output if self._of_x else None, *of_expand, *self._of_contract.found()]
