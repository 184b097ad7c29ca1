"""The part of a model's work that this process does, where several processes run the model.

``clearhead.distributed.parallelize`` sets ``part`` on attentions, dropouts and models; None means all of the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from clearhead.masks import Mask
from clearhead.scores import ScoreRule
from clearhead.shapes import Float, Int

__all__ = ["ModelPart", "SequencePart"]


@runtime_checkable
class SequencePart(Protocol):
    """The tokens of each sequence that this process has."""

    def whole_length(self, length: int) -> int:
        """Tokens of the whole sequence, of which this process has ``length``."""
        ...

    def positions(self, length: int) -> Int[Tensor, " length"]:
        """Positions of this process's ``length`` tokens in the whole sequence."""
        ...

    def gathered(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The tensors of all processes, on a new first axis; gradients are summed over the processes."""
        ...


@runtime_checkable
class ModelPart(Protocol):
    """The sequences, tokens and heads that this process computes."""

    @property
    def sequence(self) -> SequencePart | None:
        """The tokens of each sequence; None where this process has all of them."""
        ...

    def check_unobserved(self, function: str, dropout: float) -> None:
        """Raise ``UnsupportedError`` if an observer is active that would see a part of an attention."""
        ...

    def attends(self, dropout: float) -> bool:
        """Whether an attention is computed by ``attend``, as the fused operators cannot."""
        ...

    def attend(
        self,
        query: Float[Tensor, "*leading q_len head_dim"],
        key: Float[Tensor, "*kv_leading k_len head_dim"],
        value: Float[Tensor, "*kv_leading k_len value_dim"],
        *,
        mask: Mask | None,
        scores: Sequence[ScoreRule],
        scale: float | None,
        dropout: float,
        query_offset: int | None,
        backend: str,
    ) -> Float[Tensor, "*leading q_len value_dim"]:
        """This process's part of an attention, with masks and dropout by place in the whole."""
        ...

    def mask(self, mask: Mask | None, heads: int, queries: range, keys: int) -> Mask | None:
        """A mask of all heads, for this process's.

        Args:
            mask: the mask.
            heads: number of this process's heads.
            queries: positions of the call's queries.
            keys: number of the call's keys.
        """
        ...
