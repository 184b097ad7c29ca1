"""SequenceClassifier: from token ids to class scores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from clearhead.arguments import one_of, probability, whole
from clearhead.choices import is_invariant
from clearhead.invariance import eager_if_invariant
from clearhead.masks import Mask
from clearhead.nn.batch_layout import Lengths
from clearhead.nn.block_spec import BlockSpec
from clearhead.nn.checks import positive
from clearhead.nn.dropout import Dropout
from clearhead.nn.embedding import TokenEmbedding, check_ids, embedded
from clearhead.nn.linear import Linear
from clearhead.nn.neighbours import NeighbourMixing
from clearhead.nn.part import ModelPart
from clearhead.nn.pooling import POOLINGS, pool
from clearhead.nn.stacks import Encoder
from clearhead.nn.start import start_embeddings
from clearhead.scores import ScoreRule
from clearhead.shapes import Float, Int

__all__ = ["SequenceClassifier"]


class SequenceClassifier(nn.Module):
    """Token ids to class scores: embedding, encoder, pooling over the real tokens, one linear layer.

    Padding is never attended to and never pooled.

    Args:
        vocab_size: number of token ids.
        embed_dim: width of a token.
        num_heads: number of heads.
        num_layers: number of blocks.
        num_classes: number of classes.
        max_len: longest sequence.
        dropout: probability within the blocks and before the last layer, while training only.
        attention_dropout: probability of dropping an attention weight; by default ``dropout``.
        embedding_dropout: probability on embeddings; by default ``dropout``.
        feedforward_dim: width within the feedforwards; by default 4 times ``embed_dim``.
        norm_first: whether each sublayer reads normed tokens (pre-norm, Xiong et al. 2020); ``False`` norms the
            sums (post-norm), as in the 2017 paper.
        pooling: ``"mean"``, ``"max"``, ``"mean_max"`` (both side by side) or ``"first"`` (the first token).
        positions: ``"learned"``, ``"sinusoidal"``, ``"rotary"`` or ``"none"``.
        neighbours: how many tokens on each side a linear layer mixes into each token before the blocks.
        num_kv_heads: number of key and value heads; by default ``num_heads``.
        scores: score rules of every block's attention.
        checkpoint_activations: while training, save only each block's input and recompute the rest in the backward
            pass: less memory for a third more work.

    Embeddings start from a truncated normal distribution of deviation 0.02, linear layers from that of
    ``torch.nn.Linear``.

    Example:

    >>> import torch
    >>> model = SequenceClassifier(vocab_size=100, embed_dim=8, num_heads=2, num_layers=2, num_classes=3)
    >>> model(torch.randint(0, 100, (2, 7)), lengths=[7, 4]).shape
    torch.Size([2, 3])
    """

    #: What this process computes of the module, where ``clearhead.distributed.parallelize`` divided it.
    part: ModelPart | None = None

    def __init__(
        self, vocab_size: int, embed_dim: int, num_heads: int, num_layers: int, num_classes: int, *,
        max_len: int = 512, dropout: float = 0.1, attention_dropout: float | None = None,
        embedding_dropout: float | None = None, feedforward_dim: int | None = None, norm_first: bool = True,
        pooling: str = "mean", positions: str = "learned", num_kv_heads: int | None = None,
        neighbours: int = 0, scores: ScoreRule | Iterable[ScoreRule] | None = (), checkpoint_activations: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        name = "SequenceClassifier"
        self.pooling = one_of(name, "pooling", pooling, POOLINGS, "The usual one is 'mean'.")
        neighbours = whole(name, "neighbours", neighbours, low=0, high=2**16)
        self.embedding = TokenEmbedding(
            vocab_size,
            embed_dim,
            max_len=max_len,
            positions=positions,
            dropout=dropout if embedding_dropout is None else embedding_dropout,
        )
        width = self.embedding.token.embedding_dim
        self.neighbours = NeighbourMixing(width, neighbours) if neighbours else None
        spec = BlockSpec(
            embed_dim, num_heads, feedforward_dim=feedforward_dim, dropout=dropout, attention_dropout=attention_dropout,
            norm_first=norm_first, num_kv_heads=num_kv_heads, rotary=self.embedding.positions == "rotary",
            checkpoint_activations=checkpoint_activations,
        )  # fmt: skip
        self.encoder = Encoder.from_spec(spec, num_layers=num_layers, scores=scores)
        self.dropout = Dropout(probability(name, "dropout", dropout))
        pooled = width * (2 if self.pooling == "mean_max" else 1)
        self.classifier = Linear(pooled, positive(name, "num_classes", num_classes))
        start_embeddings(self)

    @property
    def max_len(self) -> int:
        """The longest sequence that the positions allow."""
        return self.embedding.max_len

    @eager_if_invariant
    def forward(
        self,
        ids: Int[Tensor, "batch len"],
        *,
        lengths: Sequence[int] | Int[Tensor, " batch"] | None = None,
        mask: Mask | None = None,
    ) -> Float[Tensor, "batch num_classes"]:
        """Class scores (logits) of each sequence.

        Args:
            ids: int ``[batch, len]``; ids at the padding may be anything.
            lengths: int ``[batch]``, real tokens of each sequence, padding to the right; all by default.
            mask: who may attend to whom; a ``Padding`` in it says the same as ``lengths``.

        Returns:
            ``[batch, num_classes]``. A sequence without tokens pools to zeros.

        Raises:
            ShapeError: ids are no ids, are out of range, or longer than ``max_len``; lengths do not fit.
            MaskError: the mask does not fit.
        """
        states, counts = self.encode(ids, lengths=lengths, mask=mask)
        sequence = None if self.part is None else self.part.sequence
        pooled = pool(states, counts, self.pooling, sequence)
        # A row is a sequence of its own, for which the kernels draw dropout and add gradients of parameters.
        by_sequence = is_invariant()
        logits: Tensor = self.classifier(self.dropout(pooled[:, None] if by_sequence else pooled))
        return logits[:, 0] if by_sequence else logits

    def encode(
        self, ids: Int[Tensor, "batch len"], *, lengths: Lengths = None, mask: Mask | None = None
    ) -> tuple[Float[Tensor, "batch len embed_dim"], Int[Tensor, " batch"] | None]:
        """The encoder's output, zeros at the padding, and each sequence's length (None: all are full)."""
        name = "SequenceClassifier"
        check_ids(name, "ids", ids, self.max_len)
        layout = self.encoder.layout(name, ids, lengths=lengths, mask=mask)
        x = embedded(name, "ids", ids, layout, self.embedding)
        if self.neighbours is not None:
            x = self.neighbours(layout.without_padding(x), layout.positions(ids.device))
        return layout.unpack(self.encoder.run(x, layout.mask)), layout.lengths

    def compile_blocks(self, backend: str = "inductor") -> None:
        """Compile every block in place with ``torch.compile`` and this backend of it, for any length."""
        self.encoder.compile_blocks(backend)
