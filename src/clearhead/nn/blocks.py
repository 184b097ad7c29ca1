"""Blocks: attention and feedforward, each with its norm and its way around."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clearhead.arguments import flag, probability
from clearhead.cache import KVCache, restored_on_error
from clearhead.errors import ShapeError, UnsupportedError
from clearhead.masks import Causal, Mask
from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.checks import check_tokens
from clearhead.nn.dropout import Dropout, plus_dropped
from clearhead.nn.feedforward import FeedForward, drop_of
from clearhead.nn.fused_layer import LayerParts, fused_layer, norm_of, of_parts
from clearhead.nn.linear import hooked
from clearhead.nn.weights import copy_into
from clearhead.positions import Rotary
from clearhead.scores import ScoreRule
from clearhead.shapes import Float
from clearhead.watch import carried, watched

__all__ = ["DecoderBlock", "EncoderBlock"]


class _Block(nn.Module):
    """What the blocks share: the sublayer around a residual, and activation checkpointing."""

    norm_first: bool
    checkpoint_activations: bool
    residual_dropout: Dropout
    attention: MultiHeadAttention
    attention_norm: nn.LayerNorm
    feedforward: FeedForward
    feedforward_norm: nn.LayerNorm

    def _self_attending(self, x: Tensor, mask: Mask | None) -> Tensor:
        """Self-attention under a mask, and the feedforward: in one step where all parts are plain."""
        parts = None if torch.compiler.is_compiling() else self._parts(x)
        if parts is not None:
            found = fused_layer(x, parts, mask)
            if found is None:
                found = of_parts(x, parts, mask, lambda y: self.attention(y, mask=mask), self.feedforward)
            if found is not None:
                return found
        x = self._around(x, self.attention_norm, lambda y: self.attention(y, mask=mask))
        return self._around(x, self.feedforward_norm, self.feedforward)

    def _parts(self, x: Tensor) -> LayerParts | None:
        """What the block is as one step, where all there is to its parts is their tensors."""
        # Where they are stored: to ask a module takes a third of a microsecond each.
        own: Any = self._modules
        attention, feedforward, dropout = own["attention"], own["feedforward"], own["residual_dropout"]
        if type(attention) is not MultiHeadAttention or type(feedforward) is not FeedForward or hooked(dropout):
            return None
        layers, fed, after = attention.plain_layers(), feedforward.plain_layers(), drop_of(dropout)
        first, second = norm_of(own["attention_norm"], x), norm_of(own["feedforward_norm"], x)
        if layers is None or fed is None or after is None or first is None or second is None:
            return None
        pair, activation, hidden = fed
        weights = attention.dropout if attention.training else 0.0
        return LayerParts(
            layers[:-1], layers[-1], pair, (first[1], second[1]), (first[0], second[0]), self.norm_first, activation,
            (weights, after, hidden, after), attention.num_heads, attention.num_kv_heads, attention.scale,
            attention.backend, hooked(attention) or hooked(feedforward),
        )  # fmt: skip

    def _around(self, x: Tensor, norm: nn.Module, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """``x + sublayer(norm(x))`` before the norm, ``norm(x + sublayer(x))`` after it."""
        if self.norm_first:
            return plus_dropped(x, self.residual_dropout, sublayer(norm(x)))
        added: Tensor = norm(plus_dropped(x, self.residual_dropout, sublayer(x)))
        return added

    def _maybe_recomputed(self, run: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Run, keeping only the inputs for the backward pass where that was asked for."""
        if self.checkpoint_activations and self.training and torch.is_grad_enabled():
            # A compiler would trace the context; nobody watches there.
            again: dict[str, Any] = {"context_fn": carried} if watched() else {}
            output: Tensor = checkpoint(run, *arguments, use_reentrant=False, **again)
            return output
        return run(*arguments)


class EncoderBlock(_Block):
    """Self-attention and feedforward: ``x + attention(norm(x))``, then ``x + feedforward(norm(x))``.

    Args:
        embed_dim: width of a token.
        num_heads: number of heads.
        feedforward_dim: width within the feedforward; by default 4 times ``embed_dim``.
        dropout: probability after attention, within and after the feedforward, while training only.
        attention_dropout: probability of dropping an attention weight; by default ``dropout``.
        norm_first: norm before each part (Xiong et al. 2020); ``False`` norms the sums, as in the 2017 paper.
        activation: of the feedforward.
        bias: whether linear layers and norms add a bias.
        num_kv_heads: number of key and value heads; by default ``num_heads``.
        scores: score rules of the attention.
        rotary: as in ``MultiHeadAttention``.
        checkpoint_activations: while training keep only the block's input, and compute it again in the backward
            pass: less memory for a third more work.

    Raises:
        ShapeError, UnsupportedError: as in ``MultiHeadAttention`` and ``FeedForward``.

    >>> EncoderBlock(8, num_heads=2)(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, feedforward_dim: int | None = None, dropout: float = 0.1,
        attention_dropout: float | None = None, norm_first: bool = True, activation: str = "gelu", bias: bool = True,
        num_kv_heads: int | None = None, scores: ScoreRule | Iterable[ScoreRule] = (),
        rotary: Rotary | bool | float | None = None, checkpoint_activations: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        name = "EncoderBlock"
        self.norm_first, bias = flag(name, "norm_first", norm_first), flag(name, "bias", bias)
        self.checkpoint_activations = flag(name, "checkpoint_activations", checkpoint_activations)
        self.attention = MultiHeadAttention(
            embed_dim, num_heads, num_kv_heads=num_kv_heads, bias=bias, scores=scores, rotary=rotary,
            dropout=dropout if attention_dropout is None else attention_dropout,
        )  # fmt: skip
        self.attention_norm = nn.LayerNorm(self.attention.embed_dim, bias=bias)
        self.feedforward = FeedForward(embed_dim, feedforward_dim, activation=activation, dropout=dropout, bias=bias)
        self.feedforward_norm = nn.LayerNorm(self.attention.embed_dim, bias=bias)
        self.residual_dropout = Dropout(probability(name, "dropout", dropout))

    def forward(
        self, x: Float[Tensor, "*batch len embed_dim"], *, mask: Mask | None = None
    ) -> Float[Tensor, "*batch len embed_dim"]:
        """The block's output for tokens that attend to each other under ``mask``."""
        check_tokens("EncoderBlock", "x", x, self.attention.embed_dim, self.attention.query_projection.weight)
        return self._maybe_recomputed(self._self_attending, x, mask)

    @classmethod
    def from_torch(cls, layer: nn.TransformerEncoderLayer) -> Self:
        """A block with the weights of torch's encoder layer, copied; always batch first.

        Raises:
            UnsupportedError: the layer's activation is neither GELU nor ReLU, or its parts are not torch's own.

        >>> block = EncoderBlock.from_torch(nn.TransformerEncoderLayer(8, 2))
        """
        if not isinstance(layer, nn.TransformerEncoderLayer):
            raise UnsupportedError.about(
                "EncoderBlock.from_torch", "layer", must="be a torch.nn.TransformerEncoderLayer",
                got=type(layer).__name__, then="Build an EncoderBlock and copy the weights part by part.",
            )  # fmt: skip
        _check_parts(layer)
        own = layer.self_attn
        block = cls(
            own.embed_dim, own.num_heads, feedforward_dim=layer.linear1.out_features, dropout=layer.dropout.p,
            attention_dropout=own.dropout, norm_first=layer.norm_first, activation=_activation_of(layer),
            bias=layer.linear1.bias is not None,
        )  # fmt: skip
        weight = layer.linear1.weight
        block.to(device=weight.device, dtype=weight.dtype)
        block.attention = MultiHeadAttention.from_torch(own)
        copy_into(block.feedforward.expand, layer.linear1.weight, layer.linear1.bias)
        copy_into(block.feedforward.contract, layer.linear2.weight, layer.linear2.bias)
        for ours, theirs in ((block.attention_norm, layer.norm1), (block.feedforward_norm, layer.norm2)):
            ours.load_state_dict(theirs.state_dict())
            ours.eps = theirs.eps
        return block.train(layer.training)

    def extra_repr(self) -> str:
        return f"norm_first={self.norm_first}"


def _check_parts(layer: nn.TransformerEncoderLayer) -> None:
    """Raise unless the layer's parts are such as a block has."""
    parts: tuple[tuple[str, type[nn.Module]], ...] = (
        ("self_attn", nn.MultiheadAttention), ("linear1", nn.Linear), ("linear2", nn.Linear), ("norm1", nn.LayerNorm),
        ("norm2", nn.LayerNorm), ("dropout", nn.Dropout),
    )  # fmt: skip
    for name, kind in parts:
        part = getattr(layer, name)
        # A norm's subclass may compute something else, and all must have a bias or none.
        fits = isinstance(part, kind) and (kind is not nn.LayerNorm or type(part).forward is nn.LayerNorm.forward)
        if fits and kind is nn.LayerNorm:
            fits = part.weight is not None and (part.bias is None) == (layer.linear1.bias is None)
        if not fits:
            raise UnsupportedError.about(
                "EncoderBlock.from_torch", "layer", must=f"have a plain {kind.__name__} as its {name}",
                got=repr(part)[:80], then="Build an EncoderBlock, exchange that part in it and copy the weights.",
            )  # fmt: skip


def _activation_of(layer: nn.TransformerEncoderLayer) -> str:
    activation = layer.activation
    if activation is nn.functional.relu or activation is torch.relu or type(activation) is nn.ReLU:
        return "relu"
    if activation is nn.functional.gelu or (type(activation) is nn.GELU and activation.approximate == "none"):
        return "gelu"
    raise UnsupportedError.about(
        "EncoderBlock.from_torch", "layer", must="use GELU or ReLU", got=getattr(activation, "__name__", activation),
        then="Build an EncoderBlock and set block.feedforward.activation.",
    )  # fmt: skip


class DecoderBlock(_Block):
    """Causal self-attention, cross-attention to a memory where wanted, and feedforward, each around a residual.

    Args:
        embed_dim: width of a token.
        num_heads: number of heads.
        feedforward_dim: width within the feedforward; by default 4 times ``embed_dim``.
        dropout: probability after each part and within the feedforward, while training only.
        attention_dropout: probability of dropping an attention weight; by default ``dropout``.
        norm_first: norm before each part; ``False`` norms the sums.
        activation: of the feedforward.
        bias: whether linear layers and norms add a bias.
        num_kv_heads: number of key and value heads; by default ``num_heads``.
        scores: score rules of the self-attention.
        rotary: rotary positions in the self-attention.
        cross_attention: whether tokens also attend to a memory, an encoder's output.
        memory_dim: width of the memory; by default ``embed_dim``.
        checkpoint_activations: as in ``EncoderBlock``; a call with a cache keeps everything.

    Raises:
        ShapeError, UnsupportedError: as in ``MultiHeadAttention`` and ``FeedForward``.

    >>> DecoderBlock(8, num_heads=2)(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, feedforward_dim: int | None = None, dropout: float = 0.1,
        attention_dropout: float | None = None, norm_first: bool = True, activation: str = "gelu", bias: bool = True,
        num_kv_heads: int | None = None, scores: ScoreRule | Iterable[ScoreRule] = (),
        rotary: Rotary | bool | float | None = None, cross_attention: bool = False, memory_dim: int | None = None,
        checkpoint_activations: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        name = "DecoderBlock"
        self.norm_first, bias = flag(name, "norm_first", norm_first), flag(name, "bias", bias)
        self.checkpoint_activations = flag(name, "checkpoint_activations", checkpoint_activations)
        cross_attention = flag(name, "cross_attention", cross_attention)
        weight_dropout = dropout if attention_dropout is None else attention_dropout
        self.attention = MultiHeadAttention(
            embed_dim, num_heads, num_kv_heads=num_kv_heads, bias=bias, scores=scores, rotary=rotary,
            dropout=weight_dropout,
        )  # fmt: skip
        self.attention_norm = nn.LayerNorm(self.attention.embed_dim, bias=bias)
        self.cross_attention = self.cross_norm = None
        if cross_attention or memory_dim is not None:
            self.cross_attention = MultiHeadAttention(
                embed_dim, num_heads, num_kv_heads=num_kv_heads, key_dim=memory_dim, value_dim=memory_dim, bias=bias,
                dropout=weight_dropout,
            )  # fmt: skip
            self.cross_norm = nn.LayerNorm(self.attention.embed_dim, bias=bias)
        self.feedforward = FeedForward(embed_dim, feedforward_dim, activation=activation, dropout=dropout, bias=bias)
        self.feedforward_norm = nn.LayerNorm(self.attention.embed_dim, bias=bias)
        self.residual_dropout = Dropout(probability(name, "dropout", dropout))

    def forward(
        self,
        x: Float[Tensor, "*batch len embed_dim"],
        *,
        mask: Mask | None = None,
        memory: Float[Tensor, "*batch memory_len memory_dim"] | None = None,
        memory_mask: Mask | None = None,
        cache: KVCache | None = None,
        memory_cache: KVCache | None = None,
    ) -> Float[Tensor, "*batch len embed_dim"]:
        """The block's output for tokens that see themselves and those before.

        Args:
            x: ``[batch, len, embed_dim]`` or ``[len, embed_dim]``.
            mask: what forbids more than the causal order does.
            memory: ``[batch, memory_len, memory_dim]``, given exactly where the block has cross-attention.
            memory_mask: who may attend to what in the memory, e.g. ``Padding(memory_lengths)``.
            cache: earlier tokens' keys and values, to which this call's are appended.
            memory_cache: the memory's keys and values: filled by the first call, read by later ones.

        Raises:
            ShapeError: widths do not fit, or memory is missing or not wanted.
        """
        check_tokens("DecoderBlock", "x", x, self.attention.embed_dim, self.attention.query_projection.weight)
        if (memory is None) != (self.cross_attention is None):
            raise ShapeError.about(
                "DecoderBlock", "memory", must="be given exactly where the block has cross-attention",
                got="none" if memory is None else f"shape {tuple(memory.shape)}",
                then="Build the block with cross_attention=True to attend to a memory.",
            )  # fmt: skip
        if cache is None and memory_cache is None:
            return self._maybe_recomputed(self._run, x, mask, memory, memory_mask)
        # Computed once more in the backward pass, the call's tokens would be appended once more.
        with restored_on_error(cache, memory_cache):
            return self._run(x, mask, memory, memory_mask, cache, memory_cache)

    def _run(
        self, x: Tensor, mask: Mask | None, memory: Tensor | None, memory_mask: Mask | None,
        cache: KVCache | None = None, memory_cache: KVCache | None = None,
    ) -> Tensor:  # fmt: skip
        causal = Causal() if mask is None else Causal() & mask
        cross = self.cross_attention
        if cross is None and cache is None:
            return self._self_attending(x, causal)
        x = self._around(x, self.attention_norm, lambda y: self.attention(y, mask=causal, cache=cache))
        if cross is not None and self.cross_norm is not None:
            x = self._around(x, self.cross_norm, lambda y: cross(y, memory, mask=memory_mask, cache=memory_cache))
        return self._around(x, self.feedforward_norm, self.feedforward)

    def extra_repr(self) -> str:
        return f"norm_first={self.norm_first}"
