"""What one rank computes of a parallelized model: some sequences of the batch, tokens of each sequence, and heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from clearhead.batch_part import current, first_row, number_of, row_numbers
from clearhead.choices import is_invariant
from clearhead.cut import Region, cut_mask
from clearhead.dispatch import run
from clearhead.distributed.layout import LayoutName, chunks_of, positions_of
from clearhead.distributed.sharded_attention import Method, attention
from clearhead.errors import ShapeError, UnsupportedError
from clearhead.masks import Causal, Documents, Mask, Padding, Prefix, Strided, Window
from clearhead.masks.base import Carrying, Combined
from clearhead.nn import (
    Decoder,
    DecoderBlock,
    Encoder,
    EncoderBlock,
    EncoderDecoder,
    FeedForward,
    LanguageModel,
    MultiHeadAttention,
    SequenceClassifier,
)
from clearhead.nn.dropout import Dropout
from clearhead.nn.embedding import TokenEmbedding
from clearhead.nn.rules import RuleHolder
from clearhead.problem import Problem
from clearhead.scores import ScoreRule
from clearhead.shapes import Float, Int
from clearhead.statistics import Want
from clearhead.watch import watched

__all__ = ["RankPart", "SequenceShard", "check_sequence_parallel"]

#: Modules that run on a part of each sequence: ours, and those that compute each token alone.
_TAKE_PARTS: Final = (
    MultiHeadAttention, FeedForward, EncoderBlock, DecoderBlock, Encoder, Decoder, LanguageModel, SequenceClassifier,
    EncoderDecoder, TokenEmbedding, Dropout, RuleHolder, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.Linear, nn.Identity,
    nn.ModuleList, nn.Sequential, nn.GELU, nn.ReLU, nn.SiLU,
)  # fmt: skip

_NOTHING: Final = Want()
#: Masks that are equal for all heads.
_WITHOUT_HEADS: Final = (Causal, Documents, Padding, Prefix, Strided, Window)


@dataclass(frozen=True)
class SequenceShard:
    """A rank's tokens of each sequence.

    Attributes:
        group: the ranks that have the sequence together.
        layout: which tokens each has.
        method: as ``ch.distributed.attention`` takes it.
    """

    group: ProcessGroup
    layout: LayoutName
    method: Method

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def whole_length(self, length: int) -> int:
        """Tokens of the whole sequence; raises on every rank if the parts are not those of the layout."""
        ranks = dist.get_world_size(self.group)
        lengths = [torch.empty(1, dtype=torch.int64) for _ in range(ranks)]
        dist.all_gather(lengths, torch.tensor([length]), group=self.group)
        parts = [int(each) for each in lengths]
        whole = sum(parts)
        expected = [sum(map(len, chunks_of(whole, ranks, rank, self.layout))) for rank in range(ranks)]
        if parts != expected:
            raise ShapeError.about(
                "parallelize",
                "layout",
                must=f"have parts of the lengths {expected}, as {self.layout!r} cuts {whole} tokens",
                got=f"lengths {parts}",
                then="Cut whole sequences by ch.distributed.shard.",
            )
        return whole

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def positions(self, length: int) -> Int[Tensor, " length"]:
        """Positions of this rank's tokens."""
        ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        return positions_of(self.whole_length(length), ranks, rank, self.layout)

    # Collectives of the exchange depend on its plan, which a compiler cannot trace.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Attention of this rank's queries to the keys of all ranks."""
        return attention(query, key, value, group=self.group, layout=self.layout, method=self.method, **options)

    def gathered(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The tensors of all ranks, on a new first axis."""
        gathered: Tensor = _Gathered.apply(x, self.group)  # type: ignore[no-untyped-call]
        return gathered


@dataclass(frozen=True)
class RankPart:
    """A rank's share of a model.

    Attributes:
        batch: which of how many equal parts of the batch; None where ``batch_part`` says which sequences.
        heads: which part of the heads and of the feedforwards' channels, and how many there are.
        sequence: the rank's tokens of each sequence; None for all.
    """

    batch: tuple[int, int] | None
    heads: tuple[int, int]
    sequence: SequenceShard | None

    def check_unobserved(self, function: str, dropout: float) -> None:
        """Raise on every rank if an observer is active and the rank has a part of an attention."""
        if watched() and (self.heads[1] > 1 or self.attends(dropout)):
            raise UnsupportedError.about(
                function,
                "mesh",
                must="have the axes 'data' and 'shard' alone while a model is observed",
                got="a part of the heads or tokens, or dropout",
                then="Observe it in one process, or call eval().",
            )

    def attends(self, dropout: float) -> bool:
        """Whether tokens are elsewhere, or dropout draws at places that the fused operators do not know."""
        return self.sequence is not None or (dropout > 0.0 and (self.batch or (0, 1))[0] + self.heads[0] > 0)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, mask: Mask | None, scores: Sequence[ScoreRule],
        scale: float | None, dropout: float, query_offset: int | None, backend: str,
    ) -> Tensor:  # fmt: skip
        """This rank's part of an attention."""
        batch, heads = query.shape[0] if query.ndim == 4 else 1, query.shape[-3]
        if self.sequence is not None:
            if dropout > 0.0 and (self.batch or (0, 1))[1] * self.heads[1] > 1:
                raise UnsupportedError.about(
                    "parallelize",
                    "dropout",
                    must="be 0 in attention where a mesh has 'context' and other axes",
                    got=dropout,
                    then="Build the model with attention_dropout=0.0.",
                )
            ranks = dist.get_world_size(self.sequence.group)
            rules = [rule.mapped(lambda tensor: _averaged(tensor, ranks)) for rule in scores]
            options = {"mask": mask, "scores": rules, "scale": scale, "dropout": dropout}
            output: Tensor = self.sequence.attend(query, key, value, **options)
            return output
        problem = Problem.of(
            "attention", query, key, value, mask=mask, scores=scores, scale=scale, dropout=dropout,
            query_offset=query_offset,
        )  # fmt: skip
        first_batch, _, first_key = problem.origin
        if self.batch is not None:
            first_batch = self.batch[0] * batch
        origin = (first_batch, self.heads[0] * heads, first_key)
        done = run("attention", replace(problem, origin=origin), _NOTHING, backend)
        return done.with_leading(problem.leading).output

    def mask(self, mask: Mask | None, heads: int, queries: range, keys: int) -> Mask | None:
        """A mask of all heads, for the rank's heads."""
        if not isinstance(mask, Mask) or self.heads[1] == 1 or not _reads_heads(mask):
            return mask
        if self.sequence is not None:
            queries, keys = (range(self.sequence.whole_length(len(queries))), self.sequence.whole_length(keys))
        if isinstance(mask, Carrying):
            mask.check("parallelize", mask.carries()[0], heads * self.heads[1], queries, keys)
        first = self.heads[0] * heads
        return cut_mask(mask.placed(queries.start), Region(range(first, first + heads), queries, range(keys)))

    def _rows(self, shape: torch.Size) -> Int[Tensor, " rows"]:
        """Numbers of the rows of ``[*batch, len, width]`` in the whole batch."""
        if self.batch is None and self.sequence is None:
            rows = row_numbers(shape)
            return torch.arange(shape[:-1].numel()) + rows if isinstance(rows, int) else rows
        length = shape[-2] if len(shape) > 1 else 1
        batch = shape[:-2].numel()
        whole = length if self.sequence is None else self.sequence.whole_length(length)
        tokens = torch.arange(length) if self.sequence is None else self.sequence.positions(length)
        part = current() if self.batch is None else None
        if is_invariant():
            first = (0 if part is None else part.first) if self.batch is None else self.batch[0] * batch
            return number_of(torch.arange(first, first + batch)[:, None], tokens).flatten()
        if part is not None and part.starts is not None:
            return (torch.tensor(part.starts)[:, None] + tokens).flatten()
        first = first_row(shape) // length if self.batch is None else self.batch[0] * batch
        return ((torch.arange(batch) + first)[:, None] * whole + tokens).flatten()

    def tokens(self, x: Tensor) -> tuple[Int[Tensor, " rows"], int]:
        """Places of tokens ``[*batch, len, width]`` in the whole batch."""
        return self._rows(x.shape), 0

    def channels(self, x: Tensor) -> tuple[Int[Tensor, " rows"], int]:
        """Places of the rank's channels within a feedforward."""
        return self._rows(x.shape), self.heads[0] * x.shape[-1]


def check_sequence_parallel(function: str, model: nn.Module) -> None:
    """Raise ``UnsupportedError`` unless every module of a model can run on a part of each sequence.

    Modules of ``clearhead.nn`` can, but for ``LinearAttention`` and the mixing of neighbours; so can torch's norms,
    embeddings and linear layers, which compute each token alone.
    """
    for module in model.modules():
        if not isinstance(module, _TAKE_PARTS):
            raise UnsupportedError.about(
                function,
                "model",
                must="consist of modules of clearhead.nn on a mesh with 'context'",
                got=type(module).__name__,
                then="Use the axes 'data', 'shard' and 'tensor'.",
            )


def _reads_heads(mask: Mask) -> bool:
    """Whether a mask may differ between heads."""
    if isinstance(mask, Combined):
        return any(map(_reads_heads, mask.parts()))
    return type(mask) not in _WITHOUT_HEADS


def _averaged(tensor: Tensor, ranks: int) -> Tensor:
    """The tensor, whose gradient, which is the sum over ranks already, is divided by their number."""
    divided: Tensor = _Averaged.apply(tensor, ranks)  # type: ignore[no-untyped-call]
    return divided if tensor.requires_grad else tensor


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.ranks, None


class _Gathered(torch.autograd.Function):
    """The tensors of all ranks; a rank's gradient is the sum of those that its tensor has on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None
