"""LanguageModel: from token ids to the next token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from clearhead.arguments import flag
from clearhead.errors import ShapeError
from clearhead.masks import Mask
from clearhead.nn.embedding import TokenEmbedding, check_ids, embedded
from clearhead.nn.generation import Sampler, as_token, check_prompt, evaluating, extend
from clearhead.nn.linear import Linear
from clearhead.nn.stacks import Decoder, DecoderCache
from clearhead.nn.start import start_embeddings, start_linears
from clearhead.scores import ScoreRule
from clearhead.shapes import Float, Int

__all__ = ["LanguageModel"]


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
        self.decoder = Decoder(
            embed_dim, num_heads, num_layers, feedforward_dim=feedforward_dim, dropout=dropout,
            attention_dropout=attention_dropout, norm_first=norm_first, bias=bias, num_kv_heads=num_kv_heads,
            scores=scores, rotary=self.embedding.positions == "rotary", activation=activation, gated=gated, norm=norm,
            checkpoint_activations=checkpoint_activations,
        )  # fmt: skip
        self.head = Linear(self.decoder.embed_dim, self.embedding.vocab_size, bias=False)
        start_embeddings(self)
        start_linears(self.decoder.blocks)
        if flag("LanguageModel", "tie_embeddings", tie_embeddings):
            self.head.weight = self.embedding.token.weight

    @property
    def max_len(self) -> int:
        """The longest sequence that the positions allow."""
        return self.embedding.max_len

    def new_cache(self) -> DecoderCache:
        """An empty cache for decoding one batch."""
        return self.decoder.new_cache()

    def forward(
        self,
        ids: Int[Tensor, "batch len"],
        *,
        lengths: Sequence[int] | Int[Tensor, " batch"] | None = None,
        mask: Mask | None = None,
        cache: DecoderCache | None = None,
    ) -> Float[Tensor, "batch len vocab_size"]:
        """Scores (logits) of the token after each token.

        Args:
            ids: int ``[batch, len]``; ids at the padding may be anything.
            lengths: int ``[batch]``, real tokens of each sequence, padding to the right; all by default.
            mask: which earlier tokens a token may attend to, besides causality; a ``Padding`` in it says the same as
                ``lengths``.
            cache: from ``new_cache``; the call's tokens follow the cached ones.

        Returns:
            ``[batch, len, vocab_size]``, zeros at the padding.

        Raises:
            ShapeError: ids are no ids, are out of range, or longer than ``max_len``; lengths do not fit.
            MaskError: the mask does not fit. UnsupportedError: padding together with a cache.
        """
        name = "LanguageModel"
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

    def generate(
        self, ids: Int[Tensor, "batch len"], max_new_tokens: int, *, temperature: float = 1.0,
        top_k: int | None = None, seed: int | None = None, stop: int | None = None, cached: bool = True,
    ) -> Int[Tensor, "batch longer"]:  # fmt: skip
        """Continue sequences, token by token; in evaluation mode, without gradients.

        Beyond ``max_len`` tokens the model reads the last ``max_len``, and recomputes them for each token, as their
        positions change.

        Args:
            ids: int ``[batch, len]``, at least one token each.
            max_new_tokens: how many tokens to add.
            temperature: divides the logits; below 1 sharper, 0 always the likeliest token.
            top_k: draw among this many likeliest tokens; by default among all.
            seed: makes the result reproducible; by default torch's own generator.
            stop: a token id after which a sequence is filled up with it.
            cached: use KV caches of earlier tokens. Without them the result is the same, slower.

        Returns:
            ``[batch, len + max_new_tokens]``, shorter where every sequence has stopped.

        Raises:
            ShapeError: an empty prompt, or arguments out of range.
        """
        name = "LanguageModel.generate"
        max_new_tokens = check_prompt(name, "ids", ids, max_new_tokens)
        sampler = Sampler(name, temperature=temperature, top_k=top_k, seed=seed, device=ids.device)
        stop = None if stop is None else as_token(name, "stop", stop)
        cache = self.new_cache() if flag(name, "cached", cached) else None

        def next_logits(ids: Tensor) -> Tensor:
            if cache is None or ids.shape[1] > self.max_len:
                return self(ids[:, -self.max_len :])[:, -1]  # type: ignore[no-any-return]
            return self(ids[:, cache.length :], cache=cache)[:, -1]  # type: ignore[no-any-return]

        with evaluating(self):
            return extend(ids, max_new_tokens, next_logits, sampler, stop)

    def compile_blocks(self, backend: str = "inductor") -> None:
        """Compile every block in place with ``torch.compile`` and this backend of it, for any length."""
        self.decoder.compile_blocks(backend)
