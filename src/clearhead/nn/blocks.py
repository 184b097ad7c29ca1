"""Transformer blocks: attention and feedforward, each with a norm and a residual."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clearhead.arguments import flag, probability
from clearhead.cache import KVCache, count_appended, restored_on_error
from clearhead.errors import ShapeError
from clearhead.invariance import eager_if_invariant
from clearhead.masks import Causal, Mask
from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.block_spec import BlockSpec, FromSpec
from clearhead.nn.cache_view import CacheView
from clearhead.nn.checks import check_tokens
from clearhead.nn.dropout import Dropout, plus_dropped
from clearhead.nn.feedforward import FeedForward, drop_of
from clearhead.nn.from_torch import block_like
from clearhead.nn.fused import fused_layers, of_parts, takes_parts
from clearhead.nn.jagged import JaggedCall, takes_jagged
from clearhead.nn.linear import weight_at
from clearhead.nn.norm import apply_norm, new_norm, norm_of
from clearhead.nn.packed_rows import by_sequence
from clearhead.nn.reading import cached_reading
from clearhead.nn.spec import LayerParts, Stack
from clearhead.paged_step import PagedLayer
from clearhead.positions import Rotary
from clearhead.scores import ScoreRule
from clearhead.shapes import Float
from clearhead.torch_private import is_hooked, submodules_of
from clearhead.watch import carried, watched

__all__ = ["SUBLAYERS", "Block", "DecoderBlock", "EncoderBlock", "cache_views", "causal"]


#: Sublayers and their norms, of a block with self-attention alone and of one that attends to a memory too.
SUBLAYERS: Final = {
    1: (("attention", "attention_norm"), ("feedforward", "feedforward_norm")),
    2: (("attention", "attention_norm"), ("cross_attention", "cross_norm"), ("feedforward", "feedforward_norm")),
}


class Block(FromSpec, nn.Module):
    """What the blocks share: residuals around sublayers, and activation checkpointing."""

    norm_first: bool
    checkpoint_activations: bool
    residual_dropout: Dropout
    attention: MultiHeadAttention
    attention_norm: nn.LayerNorm | nn.RMSNorm
    feedforward: FeedForward
    feedforward_norm: nn.LayerNorm | nn.RMSNorm

    def _add_attention(self, name: str, spec: BlockSpec, scores: ScoreRule | Iterable[ScoreRule] | None) -> None:
        """Self-attention and its norm."""
        self.norm_first = flag(name, "norm_first", spec.norm_first)
        self.checkpoint_activations = flag(name, "checkpoint_activations", spec.checkpoint_activations)
        flag(name, "bias", spec.bias)
        self.attention = _attention(spec, scores=scores, rotary=spec.rotary)
        self.attention_norm = new_norm(name, spec.norm, self.attention.embed_dim, bias=spec.bias)

    def _add_feedforward(self, name: str, spec: BlockSpec) -> None:
        """The feedforward and its norm, and the dropout of what sublayers give."""
        self.feedforward = FeedForward(
            spec.embed_dim,
            spec.feedforward_dim,
            activation=spec.activation,
            dropout=spec.dropout,
            bias=spec.bias,
            gated=spec.gated,
        )
        self.feedforward_norm = new_norm(name, spec.norm, self.attention.embed_dim, bias=spec.bias)
        self.residual_dropout = Dropout(probability(name, "dropout", spec.dropout))

    def _attending(
        self, tokens: Sequence[Tensor], masks: Sequence[Mask | None], caches: Sequence[KVCache | PagedLayer | None] = ()
    ) -> Tensor:
        """Each attention under its mask, and the feedforward."""
        with by_sequence(masks[0]):
            return self._through(tokens, masks, caches)

    def _through(
        self, tokens: Sequence[Tensor], masks: Sequence[Mask | None], caches: Sequence[KVCache | PagedLayer | None]
    ) -> Tensor:
        """The sublayers, fused where all parts are plain."""
        x, names = tokens[0], SUBLAYERS[len(tokens)]
        caches = caches or (None,) * len(masks)
        parts = [submodules_of(self)[name] for name, _ in names]
        stack = None if torch.compiler.is_compiling() else self._stack(names, parts, x)
        views = None if stack is None else cache_views(self, tokens, caches)
        # A memory that a cache holds is not read again.
        read = tokens[:1] if views and views[-1] is not None else tokens
        looked_at = watched() or takes_parts() or any(map(is_hooked, parts))
        if stack is not None and views is not None and not looked_at:
            output = fused_layers(read, stack, masks, views)
            if output is not None:
                count_appended([cache for cache in caches[:1] if isinstance(cache, KVCache)], x.shape[1])
                return output

        def attended(place: int, y: Tensor) -> Tensor:
            attention = getattr(self, names[place][0])
            output: Tensor = attention(y, *tokens[1 : place + 1], mask=masks[place], cache=caches[place])
            return output

        sublayers: list[Callable[[Tensor], Tensor]] = [partial(attended, place) for place in range(len(masks))]
        sublayers.append(self.feedforward)
        if stack is not None and views is not None and looked_at:
            output = of_parts(read, stack, masks, sublayers, views)
            if output is not None:
                return output
        for (_, norm), sublayer in zip(names, sublayers, strict=True):
            x = self._around(x, getattr(self, norm), sublayer)
        return x

    def _stack(self, names: Sequence[tuple[str, str]], parts: Sequence[nn.Module], x: Tensor) -> Stack | None:
        """The block's weights and options; None if a part is of another class, or hooked."""

        def read() -> Stack | None:
            layer = self.parts(names, x)
            return None if layer is None else Stack([layer])

        key = len(names), x.shape[-1], x.dtype
        return cached_reading(self, key, read, may_be_hooked=lambda: (self, *parts))

    def parts(self, names: Sequence[tuple[str, str]], x: Tensor) -> LayerParts | None:
        """The block's weights and options, if its parts are plain."""
        submodules = submodules_of(self)
        *attentions, feedforward = [submodules[name] for name, _ in names]
        if any(type(each) is not MultiHeadAttention for each in attentions) or type(feedforward) is not FeedForward:
            return None
        projections = [part for each in attentions if (part := each.projections()) is not None]
        norms = [part for _, norm in names if (part := norm_of(submodules[norm], x)) is not None]
        fed, residual_drop = feedforward.plain_layers(), drop_of(submodules["residual_dropout"])
        if len(projections) < len(attentions) or len(norms) < len(names) or fed is None or residual_drop is None:
            return None
        return LayerParts(projections, fed[0], norms, self.norm_first, fed[1], (residual_drop,) * len(names), fed[2])

    def _around(self, x: Tensor, norm: nn.Module, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """``x + sublayer(norm(x))`` before the norm, ``norm(x + sublayer(x))`` after it."""
        if self.norm_first:
            return plus_dropped(x, self.residual_dropout, sublayer(apply_norm(norm, x)))
        return apply_norm(norm, plus_dropped(x, self.residual_dropout, sublayer(x)))

    def _maybe_recomputed(self, run: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Run; with activation checkpointing, save only the inputs for backward."""
        if self.checkpoint_activations and self.training and torch.is_grad_enabled():
            # A compiler would trace the context, and compiled code is not observed.
            options: dict[str, Any] = {"context_fn": carried} if watched() else {}
            output: Tensor = checkpoint(run, *arguments, use_reentrant=False, **options)
            return output
        return run(*arguments)


def _attention(spec: BlockSpec, **options: Any) -> MultiHeadAttention:
    return MultiHeadAttention(
        spec.embed_dim,
        spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        bias=spec.bias,
        dropout=spec.dropout if spec.attention_dropout is None else spec.attention_dropout,
        **options,
    )


def cache_views(
    block: Block, tokens: Sequence[Tensor], caches: Sequence[KVCache | PagedLayer | None]
) -> list[CacheView | None] | None:
    """What each attention reads from its cache; None where the block operator cannot read one."""
    views: list[CacheView | None] = []
    for (name, _), memory, cache in zip(SUBLAYERS[len(tokens)], (None, *tokens[1:]), caches, strict=False):
        view = None if cache is None else getattr(block, name).cache_view(cache, tokens[0], memory)
        if view is None and cache is not None:
            return None
        views.append(view)
    return views


class EncoderBlock(Block):
    """Self-attention and feedforward: ``x + attention(norm(x))``, then ``x + feedforward(norm(x))``.

    Args:
        embed_dim: width of a token.
        num_heads: number of heads.
        feedforward_dim: width within the feedforward; by default 4 times ``embed_dim``.
        dropout: probability after attention, within and after the feedforward, while training only.
        attention_dropout: probability of dropping an attention weight; by default ``dropout``.
        norm_first: whether each sublayer reads normed tokens (pre-norm, Xiong et al. 2020); ``False`` norms the
            sums (post-norm), as in the 2017 paper.
        activation: of the feedforward: ``"gelu"``, ``"relu"`` or ``"silu"``.
        bias: whether linear layers and norms add a bias.
        num_kv_heads: number of key and value heads; by default ``num_heads``.
        scores: score rules of the attention; their ``nn.Parameter`` tensors train with the block.
        rotary: rotates queries and keys by position (RoPE): a ``Rotary``, ``True``, or the base of its
            frequencies; by default nothing does.
        gated: whether the feedforward has a gate; with ``activation="silu"`` this is SwiGLU.
        norm: ``"layer"``, or ``"rms"``, which divides by the root of the mean square and has no bias.
        checkpoint_activations: while training, save only the block's input and recompute the rest in the backward
            pass: less memory for a third more work.

    Raises:
        ShapeError: sizes that are not positive, or do not divide.
        UnsupportedError: an unknown activation or norm.

    >>> EncoderBlock(8, num_heads=2)(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, feedforward_dim: int | None = None, dropout: float = 0.1,
        attention_dropout: float | None = None, norm_first: bool = True, activation: str = "gelu", bias: bool = True,
        num_kv_heads: int | None = None, scores: ScoreRule | Iterable[ScoreRule] | None = (),
        rotary: Rotary | bool | float | None = None, gated: bool = False, norm: str = "layer",
        checkpoint_activations: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        spec = BlockSpec(
            embed_dim, num_heads, feedforward_dim=feedforward_dim, dropout=dropout, attention_dropout=attention_dropout,
            norm_first=norm_first, activation=activation, bias=bias, num_kv_heads=num_kv_heads, rotary=rotary,
            gated=gated, norm=norm, checkpoint_activations=checkpoint_activations,
        )  # fmt: skip
        self._add_attention("EncoderBlock", spec, scores)
        self._add_feedforward("EncoderBlock", spec)

    @eager_if_invariant
    @takes_jagged(JaggedCall(masks={"mask": ("x", "x")}, attentions=lambda block: [block.attention]))
    def forward(
        self, x: Float[Tensor, "*batch len embed_dim"], *, mask: Mask | None = None
    ) -> Float[Tensor, "*batch len embed_dim"]:
        """The block's output for tokens, which may be jagged, that attend to each other under ``mask``."""
        check_tokens("EncoderBlock", "x", x, self.attention.embed_dim, weight_at(self, "attention", "query_projection"))
        return self._maybe_recomputed(self._attending, (x,), (mask,))

    @classmethod
    def from_torch(cls, layer: nn.TransformerEncoderLayer) -> Self:
        """A block with the weights of torch's encoder layer, copied; always batch first.

        Raises:
            UnsupportedError: the layer's activation is neither GELU nor ReLU, or its parts are not torch's own.

        >>> block = EncoderBlock.from_torch(nn.TransformerEncoderLayer(8, 2))
        """
        return block_like(cls, nn.TransformerEncoderLayer, layer)

    def extra_repr(self) -> str:
        return f"norm_first={self.norm_first}"


class DecoderBlock(Block):
    """Causal self-attention, cross-attention to a memory where wanted, and feedforward, each around a residual.

    Args:
        embed_dim: width of a token.
        num_heads: number of heads.
        feedforward_dim: width within the feedforward; by default 4 times ``embed_dim``.
        dropout: probability after each part and within the feedforward, while training only.
        attention_dropout: probability of dropping an attention weight; by default ``dropout``.
        norm_first: whether each sublayer reads normed tokens (pre-norm, Xiong et al. 2020); ``False`` norms the
            sums (post-norm), as in the 2017 paper.
        activation: of the feedforward: ``"gelu"``, ``"relu"`` or ``"silu"``.
        bias: whether linear layers and norms add a bias.
        num_kv_heads: number of key and value heads; by default ``num_heads``.
        scores: score rules of the self-attention; their ``nn.Parameter`` tensors train with the block.
        rotary: rotates queries and keys of the self-attention by position (RoPE): a ``Rotary``, ``True``, or the
            base of its frequencies; by default nothing does.
        gated: whether the feedforward has a gate; with ``activation="silu"`` this is SwiGLU.
        norm: ``"layer"``, or ``"rms"``, which divides by the root of the mean square and has no bias.
        cross_attention: whether tokens also attend to a memory, an encoder's output.
        memory_dim: width of the memory; by default ``embed_dim``.
        checkpoint_activations: while training, save only the block's input and recompute the rest in the backward
            pass: less memory for a third more work. A call with a cache saves everything.

    Raises:
        ShapeError: sizes that are not positive, or do not divide.
        UnsupportedError: an unknown activation or norm.

    >>> DecoderBlock(8, num_heads=2)(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, feedforward_dim: int | None = None, dropout: float = 0.1,
        attention_dropout: float | None = None, norm_first: bool = True, activation: str = "gelu", bias: bool = True,
        num_kv_heads: int | None = None, scores: ScoreRule | Iterable[ScoreRule] | None = (),
        rotary: Rotary | bool | float | None = None, gated: bool = False, norm: str = "layer",
        cross_attention: bool = False, memory_dim: int | None = None, checkpoint_activations: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        name = "DecoderBlock"
        spec = BlockSpec(
            embed_dim, num_heads, feedforward_dim=feedforward_dim, dropout=dropout, attention_dropout=attention_dropout,
            norm_first=norm_first, activation=activation, bias=bias, num_kv_heads=num_kv_heads, rotary=rotary,
            gated=gated, norm=norm, checkpoint_activations=checkpoint_activations,
        )  # fmt: skip
        self._add_attention(name, spec, scores)
        self.cross_attention = self.cross_norm = None
        if flag(name, "cross_attention", cross_attention) or memory_dim is not None:
            self.cross_attention = _attention(spec, key_dim=memory_dim, value_dim=memory_dim)
            self.cross_norm = new_norm(name, norm, self.attention.embed_dim, bias=bias)
        self._add_feedforward(name, spec)

    @eager_if_invariant
    @takes_jagged(
        JaggedCall(
            masks={"mask": ("x", "x"), "memory_mask": ("x", "memory")}, attentions=lambda block: [block.attention]
        )
    )
    def forward(
        self,
        x: Float[Tensor, "*batch len embed_dim"],
        *,
        mask: Mask | None = None,
        memory: Float[Tensor, "*batch memory_len memory_dim"] | None = None,
        memory_mask: Mask | None = None,
        cache: KVCache | PagedLayer | None = None,
        memory_cache: KVCache | None = None,
    ) -> Float[Tensor, "*batch len embed_dim"]:
        """The block's output for tokens that attend to themselves and to earlier ones.

        Args:
            x: ``[batch, len, embed_dim]``, ``[len, embed_dim]``, or jagged.
            mask: which earlier tokens a token may attend to; causality applies in addition.
            memory: ``[batch, memory_len, memory_dim]``, given exactly where the block has cross-attention.
            memory_mask: which tokens of the memory a token may attend to, e.g. ``Padding(memory_lengths)``.
            cache: earlier tokens' keys and values, to which this call's are appended.
            memory_cache: the memory's keys and values: filled by the first call, read by later ones.

        Raises:
            ShapeError: widths do not fit, or memory is missing or not wanted.
        """
        check_tokens("DecoderBlock", "x", x, self.attention.embed_dim, weight_at(self, "attention", "query_projection"))
        if (memory is None) != (self.cross_attention is None):
            raise ShapeError.about(
                "DecoderBlock",
                "memory",
                must="be given exactly where the block has cross-attention",
                got="none" if memory is None else f"shape {tuple(memory.shape)}",
                then="Build the block with cross_attention=True to attend to a memory.",
            )
        if memory is not None and self.cross_attention is not None:
            weight = self.cross_attention.key_projection.weight
            check_tokens("DecoderBlock", "memory", memory, self.cross_attention.key_dim, weight)
        if cache is None and memory_cache is None:
            return self._maybe_recomputed(self._run, x, mask, memory, memory_mask)
        # Recomputing it in backward would append the call's tokens again.
        # A step over pages restores them itself.
        with restored_on_error(cache if isinstance(cache, KVCache) else None, memory_cache):
            return self._run(x, mask, memory, memory_mask, cache, memory_cache)

    @classmethod
    def from_torch(cls, layer: nn.TransformerDecoderLayer) -> Self:
        """A block with the weights of torch's decoder layer, copied: one with a memory, always batch first, and always
        causal, which torch's layer is by a mask.

        Raises:
            UnsupportedError: the layer's activation is neither GELU nor ReLU, or its parts are not torch's own.

        >>> block = DecoderBlock.from_torch(nn.TransformerDecoderLayer(8, 2))
        """
        return block_like(cls, nn.TransformerDecoderLayer, layer, cross_attention=True)

    def _run(
        self,
        x: Tensor,
        mask: Mask | None,
        memory: Tensor | None,
        memory_mask: Mask | None,
        cache: KVCache | PagedLayer | None = None,
        memory_cache: KVCache | None = None,
    ) -> Tensor:
        if memory is None:
            return self._attending((x,), (causal(mask),), (cache,))
        return self._attending((x, memory), (causal(mask), memory_mask), (cache, memory_cache))

    def extra_repr(self) -> str:
        return f"norm_first={self.norm_first}"


def causal(mask: Mask | None) -> Mask:
    """The mask of a decoder: itself and earlier tokens, where ``mask`` allows them."""
    return Causal() if mask is None else Causal() & mask
