"""Jagged nested tensors in swapped modules of torch, with torch's mask arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from clearhead.arguments import repr_of
from clearhead.errors import MaskError, UnsupportedError
from clearhead.functional.jagged import JaggedLayout
from clearhead.integrations.torch.masks import Meaning
from clearhead.masks import Causal, Mask
from clearhead.nn.jagged import JaggedCall, laid_out_arguments
from clearhead.shapes import Float

__all__ = ["JaggedArguments", "jagged_mask"]


@dataclass(frozen=True, eq=False)
class JaggedArguments:
    """The arguments of a call with jagged tokens, as those of a call with packed or padded ones.

    Attributes:
        arguments: of the call.
        layout: of the tokens that the result has.
        packed: whether the tokens are packed, or else padded.
    """

    arguments: dict[str, Any]
    layout: JaggedLayout
    packed: bool

    @classmethod
    def of(
        cls,
        function: str,
        masks: Mapping[str, tuple[str, str]],
        given: Mapping[str, Any],
        *,
        batch_first: bool,
        padding: Mapping[str, object],
        allow_packed: bool = True,
    ) -> Self:
        """Read a call.

        Args:
            function: the public name in errors.
            masks: for each mask argument, the arguments of its queries and of its keys.
            given: tokens, the queries first, and masks as ``jagged_mask`` gives them.
            batch_first: whether the module's first axis is the batch, which it must be.
            padding: padding masks, which must be None.
            allow_packed: False for padded tokens.
        """
        if not batch_first:
            raise UnsupportedError.about(
                function,
                "batch_first",
                must="be True for jagged tensors, whose first axis is the batch",
                got="False",
                then="Make the module with batch_first=True.",
            )
        for argument, mask in padding.items():
            if mask is not None:
                raise MaskError.about(
                    function,
                    argument,
                    must="be None where tokens are jagged",
                    got=repr_of(mask),
                    then="A jagged tensor has no padding.",
                )
        return cls(*laid_out_arguments(function, JaggedCall(masks=masks), given, allow_packed=allow_packed))

    def restored(self, output: Tensor) -> Tensor:
        """The jagged output."""
        return self.layout.restored(output, packed=self.packed)

    def without_padding(self, weights: Float[Tensor, "batch *heads longest k_len"]) -> Tensor:
        """Weights with 0 in the rows of padding."""
        real = self.layout.real()
        return weights.masked_fill(~real.view(real.shape[0], *(1,) * (weights.ndim - 3), -1, 1), 0.0)


def jagged_mask(function: str, argument: str, mask: Tensor | Mask | Meaning | None, is_causal: bool) -> Mask | None:
    """A mask argument of a call with jagged tokens.

    Raises:
        MaskError: it is a tensor other than the causal mask.
    """
    if isinstance(mask, Mask) or (mask is None and not is_causal):
        return mask
    if is_causal:
        return Causal()
    if isinstance(mask, Meaning) and not mask.scores:
        return mask.mask
    raise MaskError.about(
        function,
        argument,
        must="be None, a clearhead mask, or causal with is_causal=True where tokens are jagged",
        got=repr_of(mask),
        then="Pass ch.Causal(), ch.Window(...) or another predicate of positions in a sequence.",
    )
