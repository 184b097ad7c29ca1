"""Norms by the CPU kernels, of a sum where there is one: what drops out, the residual and the norm in one pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.backends.native_header import DTYPES, MAX_THREADS, NormDescription, NormKind, Verb
from clearhead.backends.native_library import new_description
from clearhead.backends.native_memory import new_tensor
from clearhead.shapes import Float

__all__ = ["Norm", "NormBackward", "NormForward", "NormKind"]


class Norm(NamedTuple):
    """``(x - mean) / sqrt(variance + epsilon) * weight + bias`` of each row.

    The mean is 0 for ``NormKind.RMS``, and for ``RMS_FROM_ONE``, which multiplies by ``1 + weight``.
    """

    kind: NormKind
    epsilon: float
    weight: Float[Tensor, " columns"] | None
    bias: Float[Tensor, " columns"] | None


class NormForward:
    """A norm written down: it writes ``output``, and ``sum`` and ``moments`` where they are wanted.

    ``sum = dropped(x) + added``, ``output = norm(sum)``; see ``ch_norm``.

    Args:
        x: ``[rows, columns]``, contiguous, as all here.
        norm: what it is.
        added: ``[rows, columns]``, or none.
        levels: of ``LEVELS`` numbers of ``x`` so many are dropped.
        seed: of dropout.
        keep_sum: whether the sum is written; where it is ``x`` itself, nothing is.
        keep_moments: whether what backward needs of each row is written.
        output: where the output goes; a new tensor when left out.

    Attributes:
        output: ``[rows, columns]``.
        sum: the same, or None.
        moments: float32 ``[rows, 2]``, or None.
        call: what ``native_library.run`` takes.
    """

    def __init__(
        self, x: Float[Tensor, "rows columns"], norm: Norm, *, added: Float[Tensor, "rows columns"] | None = None,
        levels: int = 0, seed: int = 0, keep_sum: bool = False, keep_moments: bool = False,
        output: Float[Tensor, "rows columns"] | None = None,
    ) -> None:  # fmt: skip
        own = _description(x, norm, levels, seed)
        plain = added is None and levels == 0
        self.output = new_tensor(x, tuple(x.shape)) if output is None else output
        written = new_tensor(x, tuple(x.shape)) if keep_sum and not plain else None
        self.sum = x if plain else written
        self.moments = new_tensor(x, (len(x), 2), torch.float32) if keep_moments else None
        own.input, own.output = x.data_ptr(), self.output.data_ptr()
        bias = None if norm.bias is None else norm.bias.detach()
        own.added, own.bias, own.sum, own.moments = map(_address, (added, bias, written, self.moments))
        self.call: tuple[Verb, NormDescription] = Verb.NORM, own
        self._held = (x, norm, added)

    @property
    def written(self) -> list[Tensor]:
        """What the kernel writes besides the output."""
        between = [] if self.call[1].sum is None or self.sum is None else [self.sum]
        return between if self.moments is None else [*between, self.moments]


class NormBackward:
    """The way back through a norm, written down.

    Args:
        arrived: the gradient of the output, ``[rows, columns]``; contiguous, as all here.
        summed: what was normed.
        moments: as forward wrote them.
        norm: what it is.
        more: a second part of the output's gradient, or none.
        at_sum: the gradient that arrives at the sum besides, or none.
        levels: as forward had it.
        seed: as forward had it.
        needs: whether the gradients of weight and bias are wanted.
        of_sum: where the gradient of the sum goes; a new tensor when left out.

    Attributes:
        of_sum: the gradient of the sum, and so of what was added.
        of_input: that of ``x``; the same tensor where nothing was dropped.
        of_norm: those of weight and bias, None for one that is not wanted.
        call: what ``native_library.run`` takes.
    """

    def __init__(
        self, arrived: Float[Tensor, "rows columns"], summed: Float[Tensor, "rows columns"],
        moments: Float[Tensor, "rows 2"], norm: Norm, *, more: Float[Tensor, "rows columns"] | None = None,
        at_sum: Float[Tensor, "rows columns"] | None = None, levels: int = 0, seed: int = 0,
        needs: tuple[bool, bool] = (True, True), of_sum: Float[Tensor, "rows columns"] | None = None,
    ) -> None:  # fmt: skip
        own = _description(summed, norm, levels, seed)
        size = tuple(summed.shape)
        self.of_sum = new_tensor(summed, size) if of_sum is None else of_sum
        dropped = new_tensor(summed, size) if levels else None
        self.of_input = self.of_sum if dropped is None else dropped
        self.of_norm = tuple(
            new_tensor(summed, size[1:]) if needed and part is not None else None
            for needed, part in zip(needs, (norm.weight, norm.bias), strict=True)
        )
        own.sum, own.moments, own.grad_output = summed.data_ptr(), moments.data_ptr(), arrived.data_ptr()
        own.grad_sum = self.of_sum.data_ptr()
        own.grad_more, own.grad_arrived, own.grad_input = map(_address, (more, at_sum, dropped))
        own.grad_weight, own.grad_bias = map(_address, self.of_norm)
        self.call: tuple[Verb, NormDescription] = Verb.NORM_BACKWARD, own
        self._held = (arrived, summed, moments, norm, more, at_sum)

    @property
    def between(self) -> list[Tensor]:
        """Gradients that are written on the way."""
        return [self.of_sum] if self.of_input is self.of_sum else [self.of_sum, self.of_input]


def _description(x: Float[Tensor, "rows columns"], norm: Norm, levels: int, seed: int) -> NormDescription:
    own = new_description(NormDescription)
    own.threads = min(torch.get_num_threads(), MAX_THREADS)
    own.dtype, own.dropped, own.seed = DTYPES[x.dtype], levels, seed
    own.rows, own.columns = x.shape
    own.epsilon, own.kind = norm.epsilon, norm.kind
    own.weight = None if norm.weight is None else norm.weight.data_ptr()
    return own


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
