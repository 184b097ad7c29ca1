"""EncoderDecoder: from source ids to target ids."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clearhead.arguments import flag
from clearhead.errors import ShapeError
from clearhead.invariance import eager_if_invariant
from clearhead.nn.batch_layout import Lengths
from clearhead.nn.block_spec import BlockSpec
from clearhead.nn.checks import check_tokens
from clearhead.nn.decoder_cache import DecoderCache
from clearhead.nn.embedding import TokenEmbedding, check_ids, check_range, embedded
from clearhead.nn.generation import Sampler, as_token, check_cache_dtype, check_prompt, evaluating, extend
from clearhead.nn.linear import Linear
from clearhead.nn.stacks import Decoder, Encoder
from clearhead.nn.start import start_embeddings
from clearhead.shapes import Float, Int

__all__ = ["EncoderDecoder"]


class EncoderDecoder(nn.Module):
    """Source ids and target ids to scores of the next target token: the whole of the 2017 paper.

    Args:
        source_vocab_size: number of source ids.
        target_vocab_size: number of target ids.
        embed_dim: width of a token.
        num_heads: number of heads.
        num_layers: number of blocks in the encoder, and in the decoder.
        max_len: longest source and longest target.
        dropout: probability within embeddings and blocks, while training only.
        attention_dropout: probability of dropping an attention weight; by default ``dropout``.
        feedforward_dim: width within the feedforwards; by default 4 times ``embed_dim``.
        norm_first: whether each sublayer reads normed tokens (pre-norm, Xiong et al. 2020); ``False`` norms the
            sums (post-norm), as in the 2017 paper.
        tie_embeddings: predict with the transpose of the target embedding.
        positions: ``"learned"``, ``"sinusoidal"``, ``"rotary"`` or ``"none"``.
        checkpoint_activations: while training, save only each block's input and recompute the rest in the backward
            pass: less memory for a third more work.

    Example:

    >>> import torch
    >>> model = EncoderDecoder(40, 50, embed_dim=8, num_heads=2, num_layers=1, max_len=32)
    >>> source = torch.tensor([[1, 2, 3, 0]])
    >>> model(source, torch.tensor([[4, 5]]), source_lengths=[3]).shape
    torch.Size([1, 2, 50])
    >>> model.generate(source, 6, start=1, source_lengths=[3]).shape
    torch.Size([1, 7])
    """

    def __init__(
        self, source_vocab_size: int, target_vocab_size: int, embed_dim: int, num_heads: int, num_layers: int, *,
        max_len: int = 512, dropout: float = 0.1, attention_dropout: float | None = None,
        feedforward_dim: int | None = None, norm_first: bool = True, tie_embeddings: bool = True,
        positions: str = "learned", checkpoint_activations: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.source_embedding, self.target_embedding = (
            TokenEmbedding(size, embed_dim, max_len=max_len, positions=positions, dropout=dropout)
            for size in (source_vocab_size, target_vocab_size)
        )
        spec = BlockSpec(
            embed_dim, num_heads, feedforward_dim=feedforward_dim, dropout=dropout, attention_dropout=attention_dropout,
            norm_first=norm_first, rotary=self.source_embedding.positions == "rotary",
            checkpoint_activations=checkpoint_activations,
        )  # fmt: skip
        self.encoder = Encoder.from_spec(spec, num_layers=num_layers)
        self.decoder = Decoder.from_spec(spec, num_layers=num_layers, cross_attention=True)
        self.head = Linear(self.decoder.embed_dim, self.target_embedding.vocab_size, bias=False)
        start_embeddings(self)
        if flag("EncoderDecoder", "tie_embeddings", tie_embeddings):
            self.head.weight = self.target_embedding.token.weight

    @property
    def max_len(self) -> int:
        """The longest source and the longest target that the positions allow."""
        return self.source_embedding.max_len

    def new_cache(self, *, dtype: torch.dtype | None = None) -> DecoderCache:
        """An empty cache for decoding one batch.

        Args:
            dtype: ``torch.int8``, as ``KVCache`` takes it; by default that of the tokens.
        """
        return self.decoder.new_cache(dtype=dtype)

    @eager_if_invariant
    def forward(
        self,
        source: Int[Tensor, "batch source_len"],
        target: Int[Tensor, "batch target_len"],
        *,
        source_lengths: Lengths = None,
        target_lengths: Lengths = None,
    ) -> Float[Tensor, "batch target_len target_vocab_size"]:
        """Scores (logits) of the token after each target token.

        Args:
            source: int ``[batch, source_len]``.
            target: int ``[batch, target_len]``, beginning with the start token.
            source_lengths: int ``[batch]``, real source tokens, padding to the right.
            target_lengths: int ``[batch]``, real target tokens.

        Returns:
            ``[batch, target_len, target_vocab_size]``, zeros at the padding.

        Raises:
            ShapeError: ids are no ids, out of range, or longer than ``max_len``; batches or lengths do not fit.
        """
        memory = self.encode(source, source_lengths=source_lengths)
        return self.decode(target, memory, source_lengths=source_lengths, target_lengths=target_lengths)

    def encode(
        self, source: Int[Tensor, "batch source_len"], *, source_lengths: Lengths = None
    ) -> Float[Tensor, "batch source_len embed_dim"]:
        """The memory that the decoder attends to, zeros at the padding."""
        check_ids("EncoderDecoder", "source", source, self.max_len)
        layout = self.encoder.layout("EncoderDecoder", source, lengths=source_lengths)
        x = embedded("EncoderDecoder", "source", source, layout, self.source_embedding)
        return layout.unpack(self.encoder.run(x, layout.mask))

    def decode(
        self,
        target: Int[Tensor, "batch target_len"],
        memory: Float[Tensor, "batch source_len embed_dim"],
        *,
        source_lengths: Lengths = None,
        target_lengths: Lengths = None,
        cache: DecoderCache | None = None,
    ) -> Float[Tensor, "batch target_len target_vocab_size"]:
        """Scores of the token after each target token, given the memory."""
        name = "EncoderDecoder"
        first = self.decoder.cached_length(name, cache)
        batch, _ = check_ids(name, "target", target, self.max_len - first)
        check_tokens(name, "memory", memory, self.encoder.embed_dim, self.head.weight)
        if batch != memory.shape[0]:
            raise ShapeError.about(
                name,
                "target",
                must=f"have source's batch size {memory.shape[0]}",
                got=batch,
                then="Give one target per source.",
            )
        layout = self.decoder.layout(name, target, lengths=target_lengths, cache=cache)
        x = embedded(name, "target", target, layout, self.target_embedding, first)
        states = self.decoder.run(x, layout.mask, memory=memory, memory_lengths=source_lengths, cache=cache)
        logits: Tensor = self.head(states)
        return layout.unpack(logits)

    def generate(
        self, source: Int[Tensor, "batch source_len"], max_new_tokens: int, *, start: int,
        source_lengths: Lengths = None, temperature: float = 0.0, top_k: int | None = None, seed: int | None = None,
        stop: int | None = None, cached: bool = True, cache_dtype: torch.dtype | None = None,
    ) -> Int[Tensor, "batch longer"]:  # fmt: skip
        """Targets for sources, token by token from ``start``; by default always the likeliest token.

        Args:
            source: int ``[batch, source_len]``.
            max_new_tokens: how many tokens to add, below ``max_len``.
            start: the token id that every target begins with.
            source_lengths: int ``[batch]``, real source tokens.
            temperature: divides the logits; below 1 sharper, 0 always the likeliest token.
            top_k: draw among this many likeliest tokens; by default among all.
            seed: makes the result reproducible; by default one is drawn from torch's generator. Random numbers belong
                to the seed, the source and the step: the other sources of the call do not change a target.
            stop: a token id after which a target is filled up with it.
            cached: use KV caches of earlier tokens. Without them the result is the same, slower.
            cache_dtype: ``torch.int8`` for cached keys and values in int8 with one scale for each head and token, about
                a quarter of float32's memory; by default they have the dtype of the tokens.

        Returns:
            ``[batch, 1 + max_new_tokens]``, shorter where every target has stopped.

        Raises:
            ShapeError: arguments out of range.
        """
        name = "EncoderDecoder.generate"
        max_new_tokens = check_prompt(name, "source", source, max_new_tokens)
        if max_new_tokens > self.max_len:
            raise ShapeError.about(
                name,
                "max_new_tokens",
                must=f"be at most {self.max_len} (max_len)",
                got=max_new_tokens,
                then="Ask for fewer, or build the model with a larger max_len.",
            )
        sampler = Sampler(name, temperature=temperature, top_k=top_k, seed=seed)
        start = as_token(name, "start", start)
        stop = None if stop is None else as_token(name, "stop", stop)
        check_cache_dtype(name, cache_dtype, cached=cached)
        cache = self.new_cache(dtype=cache_dtype) if flag(name, "cached", cached) else None
        target = torch.full((source.shape[0], 1), start, dtype=torch.int64, device=source.device)
        check_range(name, "start", target, self.target_embedding.vocab_size)
        with evaluating(self):
            memory = self.encode(source, source_lengths=source_lengths)

            def next_logits(ids: Tensor) -> Tensor:
                new = ids if cache is None else ids[:, cache.length :]
                return self.decode(new, memory, source_lengths=source_lengths, cache=cache)[:, -1]

            lengths = [source.shape[1]] * len(source) if source_lengths is None else [*map(int, source_lengths)]
            prompts = (row[:length] for row, length in zip(source, lengths, strict=True))
            return extend(target, max_new_tokens, next_logits, sampler, stop, prompts)

    def compile_blocks(self, backend: str = "inductor") -> None:
        """Compile every block in place with ``torch.compile`` and this backend of it, for any length."""
        self.encoder.compile_blocks(backend)
        self.decoder.compile_blocks(backend)
