"""What the mask arguments of ``torch.nn.MultiheadAttention`` mean, all of them together.

torch takes an ``attn_mask`` that forbids or is added, a ``key_padding_mask`` that does either, and a hint. Here they
become one mask and the score rules that are left. A causal mask, or padding to the right, is recognised, because the
kernels skip what such masks forbid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from clearhead.errors import MaskError
from clearhead.integrations.torch.polarity import from_additive, from_forbidden, from_key_padding
from clearhead.masks import Causal, Dense, Mask
from clearhead.scores import DenseBias
from clearhead.shapes import Bool

__all__ = ["MaskReader", "Meaning", "may_look", "padded_keys", "recognised"]


@dataclass(frozen=True, eq=False)
class Meaning:
    """A mask and score rules; nothing forbidden and nothing added by default."""

    mask: Mask | None = None
    scores: tuple[DenseBias, ...] = ()

    def says_nothing(self) -> bool:
        """Whether everything is allowed and nothing is added."""
        return self.mask is None and not self.scores

    def joined(self, other: Meaning) -> Meaning:
        """Both combined."""
        if self.mask is None or other.mask is None:
            mask = self.mask if other.mask is None else other.mask
        else:
            mask = self.mask & other.mask
        return Meaning(mask, self.scores + other.scores)

    def extended(self, extra: int, q_len: int, k_len: int) -> Meaning:
        """The same where ``extra`` more keys follow that everyone may attend to."""
        if extra == 0:
            return self
        wider = None
        if self.mask is not None:
            allowed = self.mask.dense(q_len, k_len, query_offset=0)
            wider = Dense(torch.nn.functional.pad(allowed, (0, extra), value=True))
        rules = (DenseBias(torch.nn.functional.pad(rule.bias, (0, extra))) for rule in self.scores)
        return Meaning(wider, tuple(rules))


_NOTHING: Final = Meaning()


@dataclass(frozen=True, kw_only=True)
class MaskReader:
    """Reads the mask arguments of one call.

    Attributes:
        function: the public name that errors speak of.
        batched: whether the call's tensors have a batch axis.
        batch: batch size of the call.
        num_heads: number of heads.
        q_len: number of queries.
        k_len: number of keys.
        look: whether the numbers in masks may be read, to recognise what has a name.
    """

    function: str
    batched: bool
    batch: int
    num_heads: int
    q_len: int
    k_len: int
    look: bool

    def meaning(
        self, attn_mask: Tensor | Mask | Meaning | None, key_padding_mask: Tensor | None, is_causal: bool
    ) -> Meaning:
        """All three combined."""
        return self.attn_mask(attn_mask, is_causal).joined(self.key_padding(key_padding_mask))

    def attn_mask(self, attn_mask: Tensor | Mask | Meaning | None, is_causal: bool) -> Meaning:
        """``attn_mask`` with its hint. As torch's contract has it, the hint is believed and the mask then not read.

        Args:
            attn_mask: bool or float ``[q_len, k_len]`` or ``[batch * num_heads, q_len, k_len]``; or one of our masks.
            is_causal: whether ``attn_mask`` is the causal mask.

        Raises:
            MaskError: another shape or dtype, the hint without the mask, or one of ours that does not fit.
        """
        if attn_mask is None:
            if is_causal:
                raise MaskError.about(
                    self.function,
                    "attn_mask",
                    must="be given with is_causal=True, which is a hint about it",
                    got="None",
                    then="Pass torch.nn.Transformer.generate_square_subsequent_mask(len) too.",
                )
            return _NOTHING
        if isinstance(attn_mask, Meaning):
            return attn_mask
        if isinstance(attn_mask, Mask):
            self._check(attn_mask)
            return Meaning(attn_mask)
        square = (self.q_len, self.k_len)
        _check_shape(self.function, "attn_mask", attn_mask, square, (self.batch * self.num_heads, *square))
        if is_causal:
            return Meaning(Causal())
        if attn_mask.is_floating_point():
            meaning = self._additive(attn_mask)
        else:
            meaning = Meaning(from_forbidden(attn_mask, num_heads=self.num_heads))
        return Meaning(recognised(meaning.mask), meaning.scores) if self.look else meaning

    def key_padding(self, key_padding_mask: Tensor | None) -> Meaning:
        """``key_padding_mask``, bool or float ``[batch, k_len]``, or ``[k_len]`` of a call without a batch.

        Raises:
            MaskError: another shape or dtype.
        """
        if key_padding_mask is None:
            return _NOTHING
        wanted = (self.batch, self.k_len) if self.batched else (self.k_len,)
        _check_shape(self.function, "key_padding_mask", key_padding_mask, wanted)
        forbidden = key_padding_mask.reshape(self.batch, 1, 1, self.k_len)
        if forbidden.is_floating_point():
            meaning = self._additive(forbidden)
            if not self.look or meaning.scores or not isinstance(meaning.mask, Dense):
                return meaning
            forbidden = ~meaning.mask.allowed
        if not self.look:
            return Meaning(from_forbidden(forbidden))
        return Meaning(from_key_padding(forbidden[:, 0, 0]) if bool(forbidden.any()) else None)

    def _check(self, mask: Mask) -> None:
        """Raise unless one of our masks fits the call; a call of torch's has no ``query_offset``."""
        if mask.position_dependent and self.q_len != self.k_len:
            raise MaskError.about(
                self.function,
                "attn_mask",
                must="not read positions where query and key differ in length",
                got=f"q_len {self.q_len}, k_len {self.k_len} under {mask!r}",
                then="Say where the first query stands: attn_mask=~mask.dense(q_len, k_len, query_offset=0).",
            )
        # A graph that is being recorded checks it in the operator.
        if not torch.compiler.is_compiling():
            mask.check(self.function, self.batch, self.num_heads, range(self.q_len), self.k_len)

    def _additive(self, bias: Tensor) -> Meaning:
        """A float mask. A large negative number forbids, but in a row that holds nothing else it is only a number:
        there torch returns an average, not NaN, and so do we."""
        if not self.look:
            mask = from_forbidden(bias == -torch.inf, num_heads=self.num_heads)
            return Meaning(mask, (DenseBias(bias.reshape(mask.allowed.shape).masked_fill(~mask.allowed, 0.0)),))
        dense, rules = from_additive(bias, num_heads=self.num_heads)
        if dense is not None:
            empty = ~dense.allowed.any(dim=-1)
            if bool(empty.any()) and bool((bias.reshape(dense.allowed.shape)[empty] > -torch.inf).any()):
                dense, rules = from_additive(bias, num_heads=self.num_heads, forbids=-torch.inf)
        return Meaning(dense, rules)


def may_look(tensor: Tensor) -> bool:
    """Whether numbers may be read: not while a graph is recorded, nor where a device would have to stop for it."""
    return not torch.compiler.is_compiling() and tensor.device.type == "cpu"


def padded_keys(key_padding_mask: Tensor | None) -> Bool[Tensor, "*batch k_len"] | None:
    """Which keys ``key_padding_mask`` forbids for certain: those marked ``True``, or given minus infinity."""
    if key_padding_mask is None or key_padding_mask.dtype == torch.bool:
        return key_padding_mask
    return key_padding_mask == -torch.inf


def recognised(mask: Mask | None) -> Mask | None:
    """The mask by its name where it has one: none at all, or causal."""
    if not isinstance(mask, Dense) or mask.allowed.shape[:2] != (1, 1):
        return mask
    allowed = mask.allowed[0, 0]
    if allowed.numel() == 0 or not bool(allowed[-1].all()):
        return mask
    # The first row distinguishes most masks from the two that have a name, before the others are read.
    if bool(allowed[0].all()):
        return None if bool(allowed.all()) else mask
    square = allowed.shape[0] == allowed.shape[1]
    if square and not bool(allowed[0, 1:].any()) and torch.equal(allowed, torch.ones_like(allowed).tril_()):
        return Causal()
    return mask


def _check_shape(function: str, argument: str, mask: Tensor, *shapes: tuple[int, ...]) -> None:
    kind = mask.dtype == torch.bool or mask.is_floating_point() if isinstance(mask, Tensor) else False
    if not kind or tuple(mask.shape) not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        got = f"{str(mask.dtype)[6:]} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise MaskError.about(
            function,
            argument,
            must=f"be bool or floating point of shape {wanted}",
            got=got,
            then="As in torch, True forbids and floats are added to scores.",
        )
