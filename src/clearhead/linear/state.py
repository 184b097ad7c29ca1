"""The state of linear attention, whose size does not depend on the number of tokens, and a cache for decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from clearhead.arguments import repr_of, whole
from clearhead.errors import ShapeError
from clearhead.shapes import Float

__all__ = ["LinearCache", "LinearState"]


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearState:
    """The sums over all tokens so far, which one call returns and the next takes.

    Tensors are float32, or float64 for float64 inputs. With a ``Documents`` mask the first axis counts the documents
    that have tokens, in order.

    Attributes:
        matrix: ``S``, ``[batch, heads, features, value_dim]``.
        normalizer: ``z``, ``[batch, heads, features]``; None if outputs are not normalised.
    """

    matrix: Float[Tensor, "batch heads features value_dim"]
    normalizer: Float[Tensor, "batch heads features"] | None = None

    def mapped(self, change: Callable[[Tensor], Tensor]) -> LinearState:
        """The same state with ``change`` applied to each tensor, for example ``state.mapped(torch.Tensor.detach)``.

        Args:
            change: a function of a tensor.

        Returns:
            A new state.
        """
        return LinearState(
            matrix=change(self.matrix), normalizer=None if self.normalizer is None else change(self.normalizer)
        )

    def __repr__(self) -> str:
        return f"LinearState(matrix={list(self.matrix.shape)}, normalized={self.normalizer is not None})"


class LinearCache:
    """The state of one ``LinearAttention`` module while decoding, an explicit argument of constant size.

    >>> import torch
    >>> from clearhead.nn import LinearAttention
    >>> attention, cache = LinearAttention(8, 2), LinearCache()
    >>> for step in range(3):
    ...     output = attention(torch.randn(1, 1, 8), cache=cache)
    >>> cache
    LinearCache(length=3, state=[1, 2, 4, 4])
    """

    def __init__(self) -> None:
        self.state: LinearState | None = None
        self.length = 0

    def update(self, state: LinearState, tokens: int) -> None:
        """Replace the state by the one that a call returned.

        Args:
            state: the state after the call.
            tokens: number of tokens of the call, which are added to ``length``.

        Raises:
            ShapeError: ``state`` is no ``LinearState`` or has another shape than the cached one, or ``tokens`` is not a
                whole number of at least 0.
        """
        if not isinstance(state, LinearState) or not isinstance(state.matrix, Tensor):
            raise ShapeError.about(
                "LinearCache.update",
                "state",
                must="be a LinearState",
                got=repr_of(state),
                then="Pass what a call gave back.",
            )
        tokens = whole("LinearCache.update", "tokens", tokens, low=0)
        if self.state is not None and self.state.matrix.shape != state.matrix.shape:
            raise ShapeError.about(
                "LinearCache.update",
                "state",
                must=f"match the cached state, {list(self.state.matrix.shape)}",
                got=list(state.matrix.shape),
                then="Use one cache per layer and per batch, or call reset().",
            )
        self.state = state
        self.length += tokens

    def reset(self) -> None:
        """Empty the cache."""
        self.state, self.length = None, 0

    def __repr__(self) -> str:
        shape = None if self.state is None else list(self.state.matrix.shape)
        return f"LinearCache(length={self.length}, state={shape})"
