"""What a transformer block is, as one record in place of many options."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

from clearhead.positions import Rotary

__all__ = ["BlockSpec", "FromSpec"]


@dataclass(frozen=True)
class BlockSpec:
    """What a transformer block is, apart from its weights and score rules: frozen, hashable, without tensors.

    ``from_spec`` of ``EncoderBlock``, ``DecoderBlock``, ``Encoder`` and ``Decoder`` takes one. Their constructors take
    the same options one by one, and raise where one of them does not fit.

    Args:
        embed_dim: width of a token.
        num_heads: number of heads.
        feedforward_dim: width within the feedforward; by default 4 times ``embed_dim``.
        dropout: probability after attention, within and after the feedforward, while training only.
        attention_dropout: probability of dropping an attention weight; by default ``dropout``.
        norm_first: whether each sublayer reads normed tokens (pre-norm, Xiong et al. 2020); ``False`` norms the sums
            (post-norm), as in the 2017 paper.
        activation: of the feedforward: ``"gelu"``, ``"relu"`` or ``"silu"``.
        bias: whether linear layers and norms add a bias.
        num_kv_heads: number of key and value heads; by default ``num_heads``.
        rotary: rotates queries and keys by position (RoPE): a ``Rotary``, ``True``, or the base of its frequencies; by
            default nothing does.
        gated: whether the feedforward has a gate; with ``activation="silu"`` this is SwiGLU.
        norm: ``"layer"``, or ``"rms"``, which divides by the root of the mean square and has no bias.
        checkpoint_activations: while training, save only each block's input and recompute the rest in the backward
            pass: less memory for a third more work.

    Example: the blocks of Llama, and the same with another width.

    >>> from dataclasses import replace
    >>> from clearhead.nn import Decoder
    >>> spec = BlockSpec(8, num_heads=2, norm="rms", activation="silu", gated=True, bias=False, rotary=True)
    >>> wider = Decoder.from_spec(replace(spec, embed_dim=16), num_layers=2)
    >>> wider.embed_dim, spec == BlockSpec(**vars(spec))
    (16, True)
    """

    embed_dim: int
    num_heads: int
    _: KW_ONLY
    feedforward_dim: int | None = None
    dropout: float = 0.0
    attention_dropout: float | None = None
    norm_first: bool = True
    activation: str = "gelu"
    bias: bool = True
    num_kv_heads: int | None = None
    rotary: Rotary | bool | float | None = None
    gated: bool = False
    norm: str = "layer"
    checkpoint_activations: bool = False


class FromSpec:
    """Mixin of modules whose constructors take the options of a ``BlockSpec`` one by one."""

    @classmethod
    def from_spec(cls, spec: BlockSpec, **others: Any) -> Self:
        """The module that a record describes.

        Args:
            spec: the options of a block.
            others: arguments of the constructor that the record has not, such as ``num_layers`` and ``scores``.

        Raises:
            ShapeError, UnsupportedError: as the constructor does.
        """
        make: Any = cls
        module: Self = make(**vars(spec), **others)
        return module
