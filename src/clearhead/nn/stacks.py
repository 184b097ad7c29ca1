"""Encoder and Decoder: blocks one after another, and a last norm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import cast

import torch
from torch import Tensor, nn

from clearhead.arguments import flag
from clearhead.cache import KVCache, restored_on_error
from clearhead.errors import ShapeError, UnsupportedError
from clearhead.invariance import eager_if_invariant, is_invariant
from clearhead.masks import Mask
from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.batch_layout import BatchLayout, Lengths
from clearhead.nn.block_spec import BlockSpec, FromSpec
from clearhead.nn.blocks import DecoderBlock, EncoderBlock, causal
from clearhead.nn.checks import check_tokens, compile_each, depth, positive
from clearhead.nn.decoder_cache import DecoderCache
from clearhead.nn.fused_blocks import fused_blocks
from clearhead.nn.jagged import JaggedCall, takes_jagged
from clearhead.nn.norm import apply_norm, new_norm
from clearhead.nn.part import ModelPart, SequencePart
from clearhead.paged_blocks import BlockPool
from clearhead.paged_cache import PagedKVCache
from clearhead.paged_step import PagedLayer, PagedStep
from clearhead.positions import Rotary
from clearhead.scores import ScoreRule, as_rules
from clearhead.shapes import Float, Int

__all__ = ["Decoder", "Encoder"]


class Encoder(FromSpec, nn.Module):
    """A stack of encoder blocks, in which every token may attend to every other of its sequence.

    Args:
        embed_dim: width of a token.
        num_heads: number of heads.
        num_layers: number of blocks.
        feedforward_dim: width within the feedforwards; by default 4 times ``embed_dim``.
        dropout: probability after each sublayer and within the feedforwards, while training only.
        attention_dropout: probability of dropping an attention weight; by default ``dropout``.
        norm_first: whether each sublayer reads normed tokens (pre-norm, with a last norm at the end); ``False`` norms
            the sums (post-norm).
        activation: of the feedforwards: ``"gelu"``, ``"relu"`` or ``"silu"``.
        bias: whether linear layers and norms add a bias.
        num_kv_heads: number of key and value heads; by default ``num_heads``.
        scores: score rules of every block's attention; learned tensors are shared between the blocks.
        rotary: rotates queries and keys by position (RoPE): a ``Rotary``, ``True``, or the base of its
            frequencies; by default nothing does.
        gated: whether the feedforwards have a gate; with ``activation="silu"`` this is SwiGLU.
        norm: ``"layer"``, or ``"rms"``, which divides by the root of the mean square and has no bias.
        checkpoint_activations: while training, save only each block's input and recompute the rest in the backward
            pass: less memory for a third more work.

    >>> import torch
    >>> Encoder(8, num_heads=2, num_layers=2)(torch.randn(2, 5, 8), lengths=[5, 3]).shape
    torch.Size([2, 5, 8])
    """

    #: What this process computes of the module, where ``clearhead.distributed.parallelize`` divided it.
    part: ModelPart | None = None

    def __init__(
        self, embed_dim: int, num_heads: int, num_layers: int, *, feedforward_dim: int | None = None,
        dropout: float = 0.0, attention_dropout: float | None = None, norm_first: bool = True,
        activation: str = "gelu", bias: bool = True, num_kv_heads: int | None = None,
        scores: ScoreRule | Iterable[ScoreRule] | None = (), rotary: Rotary | bool | float | None = None,
        gated: bool = False, norm: str = "layer", checkpoint_activations: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        rules, count = as_rules("Encoder", scores), depth("Encoder", "num_layers", num_layers)
        self.embed_dim = positive("Encoder", "embed_dim", embed_dim)
        spec = BlockSpec(
            embed_dim, num_heads, feedforward_dim=feedforward_dim, dropout=dropout, attention_dropout=attention_dropout,
            norm_first=norm_first, activation=activation, bias=bias, num_kv_heads=num_kv_heads, rotary=rotary,
            gated=gated, norm=norm, checkpoint_activations=checkpoint_activations,
        )  # fmt: skip
        self.blocks = nn.ModuleList(EncoderBlock.from_spec(spec, scores=rules) for _ in range(count))
        self.norm = _last_norm(self.blocks, norm)

    @eager_if_invariant
    @takes_jagged(JaggedCall(masks={"mask": ("x", "x")}, attentions=lambda encoder: _attentions(encoder.blocks)))
    def forward(
        self,
        x: Float[Tensor, "*batch len embed_dim"],
        *,
        lengths: Sequence[int] | Int[Tensor, " batch"] | None = None,
        mask: Mask | None = None,
    ) -> Float[Tensor, "*batch len embed_dim"]:
        """Encode a batch.

        Args:
            x: ``[batch, len, embed_dim]``, ``[len, embed_dim]`` for one whole sequence, or jagged.
            lengths: int ``[batch]``, real tokens of each sequence, padding to the right.
            mask: which tokens a token may attend to; a ``Padding`` in it says the same as ``lengths``.

        Returns:
            The shape of ``x``, 0 at the padding.

        Raises:
            ShapeError, MaskError: the arguments do not fit.
        """
        check_tokens("Encoder", "x", x, self.embed_dim, _first(self.blocks).attention.query_projection.weight)
        batched = x if x.ndim == 3 else x[None]
        layout = self.layout("Encoder", batched, lengths=lengths, mask=mask)
        output = layout.unpack(self.run(layout.pack(batched), layout.mask))
        return output if x.ndim == 3 else output[0]

    def layout(self, function: str, batch: Tensor, *, lengths: Lengths, mask: Mask | None = None) -> BatchLayout:
        """How a padded batch ``[batch, len, ...]`` goes through the blocks."""
        size = (batch.shape[0], batch.shape[1])
        # Where nothing may be padded, nothing is asked.
        may_pack = (lengths is not None or mask is not None) and _packable(self.blocks)
        return BatchLayout.of(
            function, size, batch.device, lengths=lengths, mask=mask, may_pack=may_pack, sequence=_sequence(self.part)
        )

    def run(self, x: Tensor, mask: Mask | None) -> Tensor:
        """The blocks alone, on tokens as ``BatchLayout.pack`` returns them."""
        output = fused_blocks(self.blocks, (x,), (mask,))
        if output is None:
            output = x
            for block in self.blocks:
                output = block(output, mask=mask)
        return apply_norm(self.norm, output)

    def compile_blocks(self, backend: str = "inductor") -> None:
        """Compile every block in place with ``torch.compile`` and this backend of it, for any length."""
        compile_each("Encoder.compile_blocks", self.blocks, backend)


def _sequence(part: ModelPart | None) -> SequencePart | None:
    """The tokens of each sequence that this process has; None where it has all."""
    return None if part is None else part.sequence


def _attentions(blocks: nn.ModuleList) -> list[MultiHeadAttention]:
    """Every block's self-attention."""
    return [cast(EncoderBlock | DecoderBlock, block).attention for block in blocks]


def _packable(blocks: nn.ModuleList) -> bool:
    """Whether every block's score rules mean the same for packed sequences.

    Rotary angles do but for rounding, as those of a packed row go on from one sequence to the next.
    """
    attentions = _attentions(blocks)
    rotated = is_invariant() and any(attention.rotary is not None for attention in attentions)
    return not rotated and all(attention.scores.relative for attention in attentions)


def _last_norm(blocks: nn.ModuleList, norm: str) -> nn.Module:
    """The norm after pre-norm blocks, of the same kind; the identity after post-norm blocks."""
    first = _first(blocks)
    if not first.norm_first:
        return nn.Identity()
    biased = isinstance(first.attention_norm, nn.LayerNorm) and first.attention_norm.bias is not None
    return new_norm(type(first).__name__, norm, first.attention.embed_dim, bias=biased)


def _first(blocks: nn.ModuleList) -> EncoderBlock | DecoderBlock:
    return cast(EncoderBlock | DecoderBlock, blocks[0])


class Decoder(FromSpec, nn.Module):
    """A stack of decoder blocks: causal self-attention, cross-attention to a memory where wanted, and feedforward.

    Args:
        embed_dim: width of a token.
        num_heads: number of heads.
        num_layers: number of blocks.
        cross_attention: whether the blocks attend to a memory, an encoder's output.
        memory_dim: width of the memory; by default ``embed_dim``.
        feedforward_dim: width within the feedforwards; by default 4 times ``embed_dim``.
        dropout: probability after each sublayer and within the feedforwards, while training only.
        attention_dropout: probability of dropping an attention weight; by default ``dropout``.
        norm_first: whether each sublayer reads normed tokens (pre-norm, with a last norm at the end); ``False`` norms
            the sums (post-norm).
        activation: of the feedforwards: ``"gelu"``, ``"relu"`` or ``"silu"``.
        bias: whether linear layers and norms add a bias.
        num_kv_heads: number of key and value heads; by default ``num_heads``.
        scores: score rules of every self-attention; learned tensors are shared between the blocks.
        rotary: rotates queries and keys of the self-attentions by position (RoPE): a ``Rotary``, ``True``, or the
            base of its frequencies; by default nothing does.
        gated: whether the feedforwards have a gate; with ``activation="silu"`` this is SwiGLU.
        norm: ``"layer"``, or ``"rms"``, which divides by the root of the mean square and has no bias.
        checkpoint_activations: while training, save only each block's input and recompute the rest in the backward
            pass: less memory for a third more work.

    >>> import torch
    >>> decoder = Decoder(8, num_heads=2, num_layers=2).eval()
    >>> x, cache = torch.randn(1, 5, 8), decoder.new_cache()
    >>> with torch.no_grad():
    ...     steps = torch.cat([decoder(x[:, t : t + 1], cache=cache) for t in range(5)], dim=1)
    ...     torch.allclose(steps, decoder(x), atol=1e-5)
    True
    """

    #: What this process computes of the module, where ``clearhead.distributed.parallelize`` divided it.
    part: ModelPart | None = None

    def __init__(
        self, embed_dim: int, num_heads: int, num_layers: int, *, cross_attention: bool = False,
        memory_dim: int | None = None, feedforward_dim: int | None = None, dropout: float = 0.0,
        attention_dropout: float | None = None, norm_first: bool = True, activation: str = "gelu", bias: bool = True,
        num_kv_heads: int | None = None, scores: ScoreRule | Iterable[ScoreRule] | None = (),
        rotary: Rotary | bool | float | None = None, gated: bool = False, norm: str = "layer",
        checkpoint_activations: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        rules, count = as_rules("Decoder", scores), depth("Decoder", "num_layers", num_layers)
        self.embed_dim = positive("Decoder", "embed_dim", embed_dim)
        self.cross_attention = flag("Decoder", "cross_attention", cross_attention) or memory_dim is not None
        spec = BlockSpec(
            embed_dim, num_heads, feedforward_dim=feedforward_dim, dropout=dropout, attention_dropout=attention_dropout,
            norm_first=norm_first, activation=activation, bias=bias, num_kv_heads=num_kv_heads, rotary=rotary,
            gated=gated, norm=norm, checkpoint_activations=checkpoint_activations,
        )  # fmt: skip
        read = {"cross_attention": self.cross_attention, "memory_dim": memory_dim}
        self.blocks = nn.ModuleList(DecoderBlock.from_spec(spec, scores=rules, **read) for _ in range(count))
        self.norm = _last_norm(self.blocks, norm)

    def cached_length(self, function: str, cache: DecoderCache | None) -> int:
        """How many tokens the cache holds, once it is known to be one for this decoder."""
        if cache is None:
            return 0
        if not isinstance(cache, DecoderCache):
            raise UnsupportedError.about(
                function, "cache", must="be a DecoderCache", got=type(cache).__name__, then="Take one from new_cache()."
            )
        cache.check(function, len(self.blocks))
        return cache.length

    def new_cache(self, *, dtype: torch.dtype | None = None) -> DecoderCache:
        """An empty cache for decoding one batch.

        Args:
            dtype: ``torch.int8``, as ``KVCache`` takes it; by default that of the tokens.
        """
        layers = [KVCache(dtype=dtype) for _ in self.blocks]
        return DecoderCache(layers, [KVCache(dtype=dtype) for _ in self.blocks] if self.cross_attention else [])

    @eager_if_invariant
    @takes_jagged(
        JaggedCall(
            masks={"mask": ("x", "x")},
            lengths={"memory_lengths": "memory"},
            attentions=lambda decoder: _attentions(decoder.blocks),
        )
    )
    def forward(
        self,
        x: Float[Tensor, "*batch len embed_dim"],
        *,
        lengths: Sequence[int] | Int[Tensor, " batch"] | None = None,
        mask: Mask | None = None,
        memory: Float[Tensor, "*batch memory_len memory_dim"] | None = None,
        memory_lengths: Sequence[int] | Int[Tensor, " batch"] | None = None,
        cache: DecoderCache | None = None,
    ) -> Float[Tensor, "*batch len embed_dim"]:
        """Decode a batch.

        Args:
            x: ``[batch, len, embed_dim]``, ``[len, embed_dim]`` for one whole sequence, or jagged.
            lengths: int ``[batch]``, real tokens of each sequence, padding to the right.
            mask: what forbids more than the causal order does; a ``Padding`` in it says the same as ``lengths``.
            memory: ``[batch, memory_len, memory_dim]``, what the blocks' cross-attention attends to.
            memory_lengths: int ``[batch]``, real tokens of each memory.
            cache: from ``new_cache``; the call's tokens follow those decoded with it before.

        Returns:
            The shape of ``x``, 0 at the padding.

        Raises:
            ShapeError, MaskError: the arguments do not fit.
            UnsupportedError: padding together with a cache.
        """
        check_tokens("Decoder", "x", x, self.embed_dim, _first(self.blocks).attention.query_projection.weight)
        batched = x if x.ndim == 3 else x[None]
        memory = memory[None] if isinstance(memory, Tensor) and memory.ndim == 2 else memory
        layout = self.layout("Decoder", batched, lengths=lengths, mask=mask, cache=cache)
        output = self.run(layout.pack(batched), layout.mask, memory=memory, memory_lengths=memory_lengths, cache=cache)
        output = layout.unpack(output)
        return output if x.ndim == 3 else output[0]

    def layout(
        self,
        function: str,
        batch: Tensor,
        *,
        lengths: Lengths,
        mask: Mask | None = None,
        cache: DecoderCache | None = None,
    ) -> BatchLayout:
        """How a padded batch ``[batch, len, ...]`` goes through the blocks."""
        self.cached_length(function, cache)
        size = (batch.shape[0], batch.shape[1])
        # A memory has a batch of its own, which a packed row could not be matched with.
        may_pack = (lengths is not None or mask is not None) and not self.cross_attention and _packable(self.blocks)
        sequence = _sequence(self.part)
        if sequence is not None and cache is not None:
            raise UnsupportedError.about(
                function, "cache", must="be None where a sequence is sharded over ranks", got="a cache",
                then="Use a mesh without 'context'.",
            )  # fmt: skip
        layout = BatchLayout.of(
            function, size, batch.device, lengths=lengths, mask=mask, may_pack=may_pack, sequence=sequence
        )
        if layout.lengths is not None and cache is not None:
            raise UnsupportedError.about(
                function,
                "lengths",
                must="all be the batch's length where there is a cache",
                got=layout.lengths.tolist(),
                then="Decode sequences of one length together.",
            )
        return layout

    def run(
        self,
        x: Tensor,
        mask: Mask | None,
        *,
        memory: Tensor | None = None,
        memory_lengths: Lengths = None,
        cache: DecoderCache | None = None,
    ) -> Tensor:
        """The blocks alone, on tokens as ``BatchLayout.pack`` returns them."""
        memory, memory_mask = self._memory(memory, memory_lengths)
        layers, memories = ([], []) if cache is None else (cache.layers, cache.memory)
        with restored_on_error(*layers, *memories):
            output = self._run_blocks(x, mask, layers, memory, memory_mask, memories)
        return apply_norm(self.norm, output)

    def _run_blocks(
        self, x: Tensor, mask: Mask | None, layers: Sequence[KVCache | PagedLayer], memory: Tensor | None = None,
        memory_mask: Mask | None = None, memories: Sequence[KVCache] = (),
    ) -> Tensor:  # fmt: skip
        tokens, masks = ((x,), (causal(mask),)) if memory is None else ((x, memory), (causal(mask), memory_mask))
        caches = [each[: len(tokens)] for each in zip_longest(layers, memories)]
        output = fused_blocks(self.blocks, tokens, masks, caches)
        if output is not None:
            return output
        for block, cache, of_memory in zip_longest(self.blocks, layers, memories):
            x = block(x, mask=mask, memory=memory, memory_mask=memory_mask, cache=cache, memory_cache=of_memory)
        return x

    def new_paged_cache(
        self, num_blocks: int, *, block_size: int = 64, dtype: torch.dtype | None = None
    ) -> PagedKVCache:
        """An empty paged cache for any number of sequences.

        Args:
            num_blocks: blocks of each layer.
            block_size: tokens of a block.
            dtype: of keys and values; by default that of the weights.
        """
        attention = _first(self.blocks).attention
        weight = attention.query_projection.weight
        return PagedKVCache(
            len(self.blocks), num_blocks, attention.num_kv_heads, attention.head_dim, block_size=block_size,
            dtype=weight.dtype if dtype is None else dtype, device=weight.device,
        )  # fmt: skip

    def check_pages(self, function: str, cache: PagedKVCache | BlockPool) -> None:
        """Raise unless the cache was made for a decoder like this one."""
        attention = _first(self.blocks).attention
        wanted = (len(self.blocks), attention.num_kv_heads, attention.head_dim, attention.head_dim)
        got = (cache.num_layers, cache.num_kv_heads, cache.head_dim, cache.value_dim)
        if wanted != got or self.cross_attention:
            raise ShapeError.about(
                function,
                "cache",
                must=f"have {wanted[0]} layers of {wanted[1]} heads of {wanted[2]}, for a decoder without memory",
                got=f"{got[0]} layers of {got[1]} heads with {got[2]} and {got[3]} channels",
                then="Take one from new_paged_cache().",
            )

    def run_over_pages(self, x: Tensor, step: PagedStep, mask: Mask | None = None) -> Tensor:
        """The blocks alone, on the packed new tokens ``[1, total, embed_dim]`` of a step."""
        layers = [PagedLayer(step, place) for place in range(len(self.blocks))]
        return apply_norm(self.norm, self._run_blocks(x, mask, layers))

    def _memory(self, memory: Tensor | None, lengths: Lengths) -> tuple[Tensor | None, Mask | None]:
        """The memory with its padding emptied, and the mask over it."""
        cross = cast(DecoderBlock, self.blocks[0]).cross_attention
        if memory is None and lengths is not None:
            raise ShapeError.about(
                "Decoder", "memory", must="be given with memory_lengths", got="None", then="Pass memory=."
            )
        if memory is None or cross is None or lengths is None:
            return memory, None
        check_tokens("Decoder", "memory", memory, cross.key_dim, cross.key_projection.weight)
        layout = BatchLayout.of(
            "Decoder", memory.shape[:2], memory.device, lengths=lengths, mask=None, may_pack=False,
            sequence=_sequence(self.part),
        )  # fmt: skip
        return layout.pack(memory), layout.mask

    def compile_blocks(self, backend: str = "inductor") -> None:
        """Compile every block in place with ``torch.compile`` and this backend of it, for any length."""
        compile_each("Decoder.compile_blocks", self.blocks, backend)
