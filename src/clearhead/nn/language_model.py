"""LanguageModel: from token ids to the next token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, overload

import torch
from torch import Tensor, nn

from clearhead.arguments import flag, repr_of
from clearhead.cache import in_one_thread
from clearhead.errors import ShapeError
from clearhead.invariance import eager_if_invariant
from clearhead.masks import Mask
from clearhead.nn.batch_layout import Lengths
from clearhead.nn.block_spec import BlockSpec
from clearhead.nn.decoder_cache import DecoderCache
from clearhead.nn.embedding import TokenEmbedding, check_ids, check_range, embedded, widened
from clearhead.nn.generation import Sampler, as_token, check_cache_dtype, check_prompt, evaluating, extend
from clearhead.nn.linear import Linear
from clearhead.nn.paged_generation import extend_each
from clearhead.nn.stacks import Decoder
from clearhead.nn.start import start_embeddings, start_linears
from clearhead.packing import as_lengths, real_places, unpack
from clearhead.paged_cache import PagedKVCache, PagedSequences
from clearhead.paged_step import PagedStep
from clearhead.scores import ScoreRule
from clearhead.shapes import Float, Int

__all__ = ["LanguageModel"]

#: Tokens of a block of the cache that `generate` makes for a list of prompts.
_BLOCK: Final = 64


class LanguageModel(nn.Module):
    """Token ids to scores of the next token: embedding, decoder, and the embedding's transpose.

    Args:
        vocab_size: number of token ids.
        embed_dim: width of a token.
        num_heads: number of heads.
        num_layers: number of blocks.
        max_len: longest sequence that the model sees at once.
        dropout: probability within embedding and blocks, while training only.
        attention_dropout: probability of dropping an attention weight; by default ``dropout``.
        feedforward_dim: width within the feedforwards; by default 4 times ``embed_dim``.
        norm_first: whether each sublayer reads normed tokens (pre-norm, Xiong et al. 2020); ``False`` norms the
            sums (post-norm), as in the 2017 paper.
        tie_embeddings: predict with the transpose of the token embedding (Press and Wolf 2017).
        positions: ``"learned"``, ``"sinusoidal"``, ``"rotary"`` or ``"none"``.
        bias: whether linear layers and norms add a bias.
        num_kv_heads: number of key and value heads; by default ``num_heads``.
        scores: score rules of every block's attention.
        activation: of the feedforwards: ``"gelu"``, ``"relu"`` or ``"silu"``.
        gated: whether these have a gate. With ``activation="silu"``, ``norm="rms"``,
            ``positions="rotary"`` and ``bias=False`` the blocks are those of Llama.
        norm: ``"layer"``, or ``"rms"``, which divides by the root of the mean square and has no bias.
        checkpoint_activations: while training, save only each block's input and recompute the rest in the backward
            pass: less memory for a third more work.

    Embeddings start from a truncated normal distribution of deviation 0.02, linear layers of the blocks from a normal
    one of deviation ``1 / sqrt(in_features)``, less where they add to the residual.

    Example:

    >>> import torch
    >>> model = LanguageModel(vocab_size=50, embed_dim=8, num_heads=2, num_layers=2, max_len=32)
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> model(ids).shape, model.generate(ids, 5).shape
    (torch.Size([1, 3, 50]), torch.Size([1, 8]))
    """

    def __init__(
        self, vocab_size: int, embed_dim: int, num_heads: int, num_layers: int, *, max_len: int = 512,
        dropout: float = 0.0, attention_dropout: float | None = None, feedforward_dim: int | None = None,
        norm_first: bool = True, tie_embeddings: bool = True, positions: str = "learned", bias: bool = True,
        num_kv_heads: int | None = None, scores: ScoreRule | Iterable[ScoreRule] | None = (),
        activation: str = "gelu", gated: bool = False, norm: str = "layer", checkpoint_activations: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding = TokenEmbedding(vocab_size, embed_dim, max_len=max_len, positions=positions, dropout=dropout)
        spec = BlockSpec(
            embed_dim, num_heads, feedforward_dim=feedforward_dim, dropout=dropout, attention_dropout=attention_dropout,
            norm_first=norm_first, activation=activation, bias=bias, num_kv_heads=num_kv_heads, gated=gated, norm=norm,
            rotary=self.embedding.positions == "rotary", checkpoint_activations=checkpoint_activations,
        )  # fmt: skip
        self.decoder = Decoder.from_spec(spec, num_layers=num_layers, scores=scores)
        self.head = Linear(self.decoder.embed_dim, self.embedding.vocab_size, bias=False)
        start_embeddings(self)
        start_linears(self.decoder.blocks)
        if flag("LanguageModel", "tie_embeddings", tie_embeddings):
            self.head.weight = self.embedding.token.weight

    @property
    def max_len(self) -> int:
        """The longest sequence that the positions allow."""
        return self.embedding.max_len

    def new_cache(self, *, dtype: torch.dtype | None = None) -> DecoderCache:
        """An empty cache for decoding one batch.

        Args:
            dtype: ``torch.int8``, as ``KVCache`` takes it; by default that of the tokens.
        """
        return self.decoder.new_cache(dtype=dtype)

    def new_paged_cache(
        self, num_blocks: int, *, block_size: int = 64, dtype: torch.dtype | None = None
    ) -> PagedKVCache:
        """An empty paged cache, for decoding any number of sequences of different lengths.

        Args:
            num_blocks: blocks of each layer.
            block_size: tokens of a block.
            dtype: of keys and values, ``torch.int8`` among them; by default that of the weights.

        >>> model = LanguageModel(vocab_size=50, embed_dim=8, num_heads=2, num_layers=2, max_len=32).eval()
        >>> cache, ids = model.new_paged_cache(num_blocks=4), torch.tensor([[1, 2, 3], [4, 0, 0]])
        >>> both = cache.select([cache.add(), cache.add()])
        >>> with torch.no_grad():
        ...     model(ids, lengths=[3, 1], cache=both).shape, both.lengths
        (torch.Size([2, 3, 50]), [3, 1])
        """
        return self.decoder.new_paged_cache(num_blocks, block_size=block_size, dtype=dtype)

    @eager_if_invariant
    def forward(
        self,
        ids: Int[Tensor, "batch len"],
        *,
        lengths: Sequence[int] | Int[Tensor, " batch"] | None = None,
        mask: Mask | None = None,
        cache: DecoderCache | PagedSequences | None = None,
    ) -> Float[Tensor, "batch len vocab_size"]:
        """Scores (logits) of the token after each token.

        Args:
            ids: int ``[batch, len]``; ids at the padding may be anything.
            lengths: int ``[batch]``, real tokens of each sequence, padding to the right; all by default.
            mask: which earlier tokens a token may attend to, besides causality; a ``Padding`` in it says the same as
                ``lengths``.
            cache: from ``new_cache``; the call's tokens follow the cached ones. Or sequences of a paged cache, from
                ``PagedKVCache.select``, one for each row of ``ids``; ``lengths`` may differ then, and ``mask`` is None
                or a ``Window``.

        Returns:
            ``[batch, len, vocab_size]``, zeros at the padding.

        Raises:
            ShapeError: ids are no ids, are out of range, or longer than ``max_len``; lengths do not fit.
            MaskError: the mask does not fit. UnsupportedError: padding together with a cache that is not paged.
            CacheFullError: a paged cache has too few free blocks; no sequence was changed.
        """
        name = "LanguageModel"
        if isinstance(cache, PagedSequences):
            return self._over_pages(name, ids, lengths, mask, cache)
        if cache is not None:
            self.decoder.cached_length(name, cache)
            with in_one_thread(*cache.layers):
                return self._forward(name, ids, lengths, mask, cache)
        return self._forward(name, ids, lengths, mask, None)

    def _forward(
        self, name: str, ids: Tensor, lengths: Lengths, mask: Mask | None, cache: DecoderCache | None
    ) -> Float[Tensor, "batch len vocab_size"]:
        first = self.decoder.cached_length(name, cache)
        _, length = check_ids(name, "ids", ids, self.max_len)
        if first + length > self.max_len:
            raise ShapeError.about(
                name,
                "ids",
                must=f"be at most {self.max_len} tokens long with the cache (max_len)",
                got=f"{first} in the cache and {length} more",
                then="Start a new cache, or use a larger max_len.",
            )
        layout = self.decoder.layout(name, ids, lengths=lengths, mask=mask, cache=cache)
        x = embedded(name, "ids", ids, layout, self.embedding, first)
        logits: Tensor = self.head(self.decoder.run(x, layout.mask, cache=cache))
        return layout.unpack(logits)

    def _over_pages(
        self, name: str, ids: Tensor, lengths: Lengths, mask: Mask | None, cache: PagedSequences
    ) -> Float[Tensor, "batch len vocab_size"]:
        """``forward`` of rows that extend the sequences of a paged cache: the real tokens are packed."""
        batch, length = check_ids(name, "ids", ids, self.max_len)
        if len(cache) != batch:
            raise ShapeError.about(
                name, "cache", must=f"have a sequence for each of the {batch} rows of ids", got=f"{len(cache)}",
                then="Use cache.select.",
            )  # fmt: skip
        counts = as_lengths(name, [length] * batch if lengths is None else lengths, batch=batch, longest=length)
        packed = ids.flatten().index_select(0, real_places(counts, length).to(ids.device))
        step = cache.extend(counts.tolist())
        with step:
            logits: Tensor = self.head(self._read_pages(name, packed, step, mask))
        return unpack(logits, counts, length)

    def _read_pages(
        self, name: str, packed: Int[Tensor, " total"], step: PagedStep, mask: Mask | None = None
    ) -> Tensor:
        """The last states of a step's new tokens, ``[1, total, embed_dim]``."""
        self.decoder.check_pages(name, step.pool)
        if step.longest > self.max_len:
            raise ShapeError.about(
                name, "ids", must=f"be at most {self.max_len} tokens long with the cache (max_len)", got=step.longest,
                then="Start a new sequence, or use a larger max_len.",
            )  # fmt: skip
        check_range(name, "ids", packed, self.embedding.vocab_size)
        return self.decoder.run_over_pages(self.embedding(packed[None], step.positions[None]), step, mask)

    @overload
    def generate(
        self, ids: Int[Tensor, "batch len"], max_new_tokens: int, *, temperature: float = ..., top_k: int | None = ...,
        seed: int | None = ..., stop: int | None = ..., cached: bool = ..., cache: None = ...,
        cache_dtype: torch.dtype | None = ...,
    ) -> Int[Tensor, "batch longer"]: ...  # fmt: skip

    @overload
    def generate(
        self, ids: Sequence[Int[Tensor, " len"]], max_new_tokens: int, *, temperature: float = ...,
        top_k: int | None = ..., seed: int | None = ..., stop: int | None = ..., cached: bool = ...,
        cache: PagedKVCache | None = ..., cache_dtype: torch.dtype | None = ...,
    ) -> list[Int[Tensor, " longer"]]: ...  # fmt: skip

    def generate(
        self, ids: Tensor | Sequence[Tensor], max_new_tokens: int, *, temperature: float = 1.0,
        top_k: int | None = None, seed: int | None = None, stop: int | None = None, cached: bool = True,
        cache: PagedKVCache | None = None, cache_dtype: torch.dtype | None = None,
    ) -> Tensor | list[Tensor]:  # fmt: skip
        """Continue sequences, token by token; in evaluation mode, without gradients.

        Prompts of different lengths are given as a list. They share a paged cache: as many as fit are decoded together,
        and the next ones start as soon as others end.

        Beyond ``max_len`` tokens the model reads the last ``max_len``, and recomputes them for each token, as their
        positions change.

        Args:
            ids: int ``[batch, len]``, at least one token each; or a list of prompts, int ``[len]``.
            max_new_tokens: how many tokens to add.
            temperature: divides the logits; below 1 sharper, 0 always the likeliest token.
            top_k: draw among this many likeliest tokens; by default among all.
            seed: makes the result reproducible; by default one is drawn from torch's generator. Random numbers belong
                to the seed, the prompt and the step: the other prompts of the call do not change a continuation.
                Equal prompts get different ones.
            stop: a token id after which a sequence is filled up with it.
            cached: use KV caches of earlier tokens. Without them the result is the same, slower.
            cache: the paged cache of a list of prompts; by default one with blocks for all of them.
            cache_dtype: ``torch.int8`` for cached keys and values in int8 with one scale for each head and token, about
                a quarter of float32's memory; by default they have the dtype of the weights.

        Returns:
            ``[batch, len + max_new_tokens]``, shorter where every sequence has stopped. Of a list, a list of
            ``[len + new]``, where ``new`` is up to ``max_new_tokens``: a sequence ends with ``stop``.

        Raises:
            ShapeError: an empty prompt, or arguments out of range; of a list also a sequence longer than ``max_len``.
            CacheFullError: a prompt and its new tokens exceed all free blocks of ``cache``.

        >>> model = LanguageModel(vocab_size=50, embed_dim=8, num_heads=2, num_layers=2, max_len=32)
        >>> [len(each) for each in model.generate([torch.tensor([1, 2, 3]), torch.tensor([4])], 5)]
        [8, 6]
        """
        name = "LanguageModel.generate"
        check_cache_dtype(name, cache_dtype, cached=cached, has_cache=cache is not None)
        if not isinstance(ids, Tensor):
            if not isinstance(ids, (list, tuple)):
                must, then = "be a tensor, or a list of tensors", "Use torch.as_tensor."
                raise ShapeError.about(name, "ids", must=must, got=repr_of(ids), then=then)
            if not flag(name, "cached", cached):
                raise ShapeError.about(
                    name, "cached", must="be True for a list of prompts", got="False", then="Pass ids [batch, len]."
                )
            max_new_tokens = self._check_prompts(name, ids, max_new_tokens)
        elif cache is not None:
            raise ShapeError.about(
                name, "cache", must="come with a list of prompts", got="ids in one tensor", then="Pass list(ids)."
            )
        else:
            max_new_tokens = check_prompt(name, "ids", ids, max_new_tokens)
        sampler = Sampler(name, temperature=temperature, top_k=top_k, seed=seed)
        stop = None if stop is None else as_token(name, "stop", stop)
        if not isinstance(ids, Tensor):
            return self._generate_each(name, ids, max_new_tokens, sampler, stop, cache, cache_dtype)
        memory = self.new_cache(dtype=cache_dtype) if flag(name, "cached", cached) else None

        def next_logits(ids: Tensor) -> Tensor:
            if memory is None or ids.shape[1] > self.max_len:
                return self(ids[:, -self.max_len :])[:, -1]  # type: ignore[no-any-return]
            return self(ids[:, memory.length :], cache=memory)[:, -1]  # type: ignore[no-any-return]

        with evaluating(self):
            return extend(ids, max_new_tokens, next_logits, sampler, stop)

    def _check_prompts(self, name: str, prompts: Sequence[Tensor], max_new_tokens: int) -> int:
        """``max_new_tokens`` as a number; raises for a bad prompt, or one that becomes too long."""
        for prompt in prompts:
            given = prompt[None] if isinstance(prompt, Tensor) and prompt.dim() == 1 else prompt
            max_new_tokens = check_prompt(name, "ids", given, max_new_tokens)
        longest = max((len(prompt) + max_new_tokens for prompt in prompts), default=0)
        if longest > self.max_len + 1:
            raise ShapeError.about(
                name, "ids", must=f"be at most {self.max_len} tokens long with the new ones (max_len)", got=longest,
                then="Cut the prompts, or continue them one by one.",
            )  # fmt: skip
        return max_new_tokens

    def _generate_each(
        self, name: str, prompts: Sequence[Tensor], max_new_tokens: int, sampler: Sampler, stop: int | None,
        cache: PagedKVCache | None, cache_dtype: torch.dtype | None,
    ) -> list[Tensor]:  # fmt: skip
        """``generate`` of prompts of different lengths."""
        if cache is None:
            # The last new token is not read, so it needs no place.
            needed = sum(-(-(len(prompt) + max_new_tokens) // _BLOCK) for prompt in prompts)
            cache = self.new_paged_cache(max(1, needed), block_size=_BLOCK, dtype=cache_dtype)

        def next_logits(packed: Tensor, step: PagedStep) -> Tensor:
            last = torch.tensor(step.counts, device=packed.device).cumsum(0) - 1
            logits: Tensor = self.head(self._read_pages(name, packed, step)[:, last])
            return logits[0]

        with evaluating(self):
            return extend_each(
                name, [widened(prompt) for prompt in prompts], max_new_tokens, next_logits, sampler, stop, cache
            )

    def compile_blocks(self, backend: str = "inductor") -> None:
        """Compile every block in place with ``torch.compile`` and this backend of it, for any length."""
        self.decoder.compile_blocks(backend)
