"""MultiHeadAttention: projections, and a cache, around the one attention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from clearhead.arguments import FARTHEST, flag, probability, whole
from clearhead.cache import KVCache, check_cache, count_appended, restored_on_error
from clearhead.errors import MaskError, ShapeError, UnsupportedError
from clearhead.invariance import eager_if_invariant
from clearhead.masks import Mask
from clearhead.nn.cache_view import CacheView, cache_view, cached_memory
from clearhead.nn.checks import positive, sources_of
from clearhead.nn.fused import fused_attention, is_fused_attention
from clearhead.nn.jagged import JaggedCall, takes_jagged
from clearhead.nn.linear import Linear, layer_of, linear_each, weight_at
from clearhead.nn.part import ModelPart, SequencePart
from clearhead.nn.reading import cached_reading
from clearhead.nn.rules import RuleList
from clearhead.nn.spec import Projections
from clearhead.nn.weights import HeadWeight, WeightAndBias, copy_into, heads_side_by_side, torch_projections
from clearhead.paged_step import PagedLayer
from clearhead.positions import Rotary, as_rotary
from clearhead.projection import NATIVE, Layer, Path, project, project_each
from clearhead.scores import ScoreRule
from clearhead.shapes import Float
from clearhead.torch_private import submodules_of
from clearhead.watch import attend, watched

__all__ = ["MultiHeadAttention"]

_NAME = "MultiHeadAttention"
_PROJECTIONS = ("query_projection", "key_projection", "value_projection", "output_projection")


class MultiHeadAttention(nn.Module):
    """Project to heads, attend, join the heads, project back.

    ``concat_h(attention(x Wq_h, y Wk_h, z Wv_h)) Wo``

    Args:
        embed_dim: width of queries and of the output.
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads, which divides ``num_heads``; by default ``num_heads``.
        head_dim: width of a head; by default ``embed_dim / num_heads``.
        key_dim: width of what keys are made from; by default ``embed_dim``.
        value_dim: width of what values are made from; by default ``embed_dim``.
        bias: whether projections add a bias.
        output_projection: whether heads are mixed by a last projection; without one the output is the heads side
            by side, ``num_heads * head_dim`` wide.
        dropout: probability of dropping a weight, while training only.
        scores: score rules; their ``nn.Parameter`` tensors train, move and are saved with the module.
        rotary: rotates queries and keys by position (RoPE): a ``Rotary``, ``True``, or the base of its
            frequencies; by default nothing does.
        scale: factor on ``query @ key^T``; by default ``1 / sqrt(head_dim)``.
        backend: ``"auto"``, or a backend's name, which then runs or raises with its reasons.

    Raises:
        ShapeError: sizes that are not positive, or do not divide.

    Attributes:
        part: what this process computes of the module, where ``clearhead.distributed.parallelize`` divided it.

    Cost: the projections, ``2 * len * embed_dim**2`` operations each, and the attention.

    Paper: Vaswani et al. 2017, "Attention is all you need", section 3.2.2; grouped heads: Ainslie et al. 2023.

    >>> import torch
    >>> from clearhead.masks import Causal
    >>> module = MultiHeadAttention(8, num_heads=2)
    >>> module(torch.zeros(1, 5, 8), mask=Causal()).shape
    torch.Size([1, 5, 8])
    """

    part: ModelPart | None = None

    def __init__(
        self, embed_dim: int, num_heads: int, *, num_kv_heads: int | None = None, head_dim: int | None = None,
        key_dim: int | None = None, value_dim: int | None = None, bias: bool = True, output_projection: bool = True,
        dropout: float = 0.0, scores: ScoreRule | Iterable[ScoreRule] | None = (),
        rotary: Rotary | bool | float | None = None, scale: float | None = None, backend: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed_dim = positive(_NAME, "embed_dim", embed_dim)
        self.num_heads = positive(_NAME, "num_heads", num_heads)
        self.num_kv_heads = self.num_heads if num_kv_heads is None else positive(_NAME, "num_kv_heads", num_kv_heads)
        self.head_dim = _head_dim(self.embed_dim, self.num_heads, head_dim)
        self.key_dim = self.embed_dim if key_dim is None else positive(_NAME, "key_dim", key_dim)
        self.value_dim = self.embed_dim if value_dim is None else positive(_NAME, "value_dim", value_dim)
        if self.num_heads % self.num_kv_heads:
            raise ShapeError.about(
                _NAME,
                "num_kv_heads",
                must=f"divide num_heads {num_heads}",
                got=num_kv_heads,
                then="Query head h reads key head h // (num_heads // num_kv_heads).",
            )
        self.dropout = probability(_NAME, "dropout", dropout)
        self.rotary = as_rotary(_NAME, rotary)
        if self.rotary is not None and self.head_dim % 2:
            raise ShapeError.about(
                _NAME, "head_dim", must="be even with rotary", got=self.head_dim, then="Rotary turns pairs of channels."
            )
        self.scale = scale
        self.backend = backend
        bias, mixed = flag(_NAME, "bias", bias), flag(_NAME, "output_projection", output_projection)
        kv_width = self.num_kv_heads * self.head_dim
        self.query_projection = Linear(self.embed_dim, self.num_heads * self.head_dim, bias=bias)
        self.key_projection = Linear(self.key_dim, kv_width, bias=bias)
        self.value_projection = Linear(self.value_dim, kv_width, bias=bias)
        self.output_projection = Linear(self.num_heads * self.head_dim, self.embed_dim, bias=bias) if mixed else None
        self.scores = RuleList(_NAME, scores)

    @eager_if_invariant
    @takes_jagged(JaggedCall(masks={"mask": ("query", "key")}, attentions=lambda module: [module]))
    def forward(
        self,
        query: Float[Tensor, "*batch q_len embed_dim"],
        key: Float[Tensor, "*batch k_len key_dim"] | None = None,
        value: Float[Tensor, "*batch k_len value_dim"] | None = None,
        *,
        mask: Mask | None = None,
        cache: KVCache | PagedLayer | None = None,
        query_offset: int | None = None,
    ) -> Float[Tensor, "*batch q_len output_dim"]:
        """Attend from ``query`` to ``key``.

        Args:
            query: ``[batch, q_len, embed_dim]`` or ``[q_len, embed_dim]``. Tokens may be jagged nested tensors
                ``[batch, jagged len, width]``; positions are then those within each sequence.
            key: ``[batch, k_len, key_dim]``; without it the module attends from ``query`` to itself.
            value: ``[batch, k_len, value_dim]``; by default ``key``.
            mask: which keys a query may attend to (``True`` = may); positions count from the cache's first token.
            cache: KV cache of earlier tokens. In self-attention the call's tokens are appended to it. In
                cross-attention (with ``key``) it caches the projected memory: the first call fills it, later calls
                only read it. A call that fails leaves the cache unmodified.
            query_offset: position of the first query, where ``key`` has another length and positions matter.

        Returns:
            ``[batch, q_len, embed_dim]``, or without a batch or jagged as ``query`` was; ``num_heads * head_dim`` wide
            without an output projection.

        Raises:
            ShapeError: widths or axes do not fit.
            MaskError: the mask does not fit, or positions are ambiguous.
            UnsupportedError: dtype or device differ from the module's, or the cache is no ``KVCache``.
        """
        if isinstance(cache, PagedLayer):
            return self._over_pages(query, key, value, mask, cache)
        check_cache(_NAME, "cache", cache)
        if query_offset is not None:
            query_offset = whole(_NAME, "query_offset", query_offset, low=-FARTHEST)
        is_self_attention = (key is None or key is query) and (value is None or value is key or value is query)
        key, value = self._sources(query, key, value)
        first = self._first_position(is_self_attention, cache, query_offset, query.shape[-2], key.shape[-2])
        if self.part is not None:
            self.part.check_unobserved(_NAME, self._dropped())
            self._check_whole(cache=cache, query_offset=query_offset)
            queries = range(first, first + query.shape[-2])
            mask = self.part.mask(mask, self.num_heads, queries, key.shape[-2] + (cache.length if cache else 0))
        if cache is None:
            tokens = (query,) if is_self_attention else (query, key)
            output, path = self._fused(tokens, mask, query_offset) if key is value else (None, None)
            if output is not None:
                return output
            heads, keys, values = self._heads(query, key, value, first, 0, path)
            return self._attended(heads, keys, values, mask, query_offset, path)
        with restored_on_error(cache):
            output, path = self._fused((query,), mask, query_offset, cache, None if is_self_attention else key)
            if output is not None:
                return output
            if not is_self_attention and cache.length > 0:
                heads = self._query_heads(query, first, path)
                keys, values = cached_memory(_NAME, cache, key)
            else:
                heads, keys, values = self._heads(query, key, value, first, first if is_self_attention else 0, path)
                keys, values = self._append(cache, keys, values)
            return self._attended(heads, keys, values, mask, first if is_self_attention else query_offset, path)

    def _attended(
        self,
        heads: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Mask | None,
        query_offset: int | None,
        path: Path | None = None,
    ) -> Tensor:
        """Attention and the output projection, by ``path`` or by the table's choice."""
        options: dict[str, Any] = {
            "mask": mask, "scores": self.scores.rules(), "scale": self.scale, "dropout": self._dropped(),
            "query_offset": query_offset, "backend": self.backend,
        }  # fmt: skip
        if self.part is not None and self.part.attends(self._dropped()):
            output = self.part.attend(heads, keys, values, **options)
        else:
            output = attend(self, heads, keys, values, **options)
        return self._joined(output, path)

    def _joined(self, output: Tensor, path: Path | None = None) -> Tensor:
        """The heads side by side, projected."""
        joined, last = output.transpose(-3, -2).flatten(-2), self.output_projection
        if path is not None and last is not None:
            return project(joined, *_plain(last), path=path)
        return joined if last is None else last(joined)

    def _dropped(self) -> float:
        """The probability of dropping a weight now."""
        return self.dropout if self.training else 0.0

    def _sequence_part(self) -> SequencePart | None:
        return None if self.part is None else self.part.sequence

    def _check_whole(self, **given: object) -> None:
        """Raise where an argument comes with a sequence of which other processes have other tokens."""
        for argument, value in given.items() if self._sequence_part() is not None else ():
            if value is not None:
                raise UnsupportedError.about(
                    _NAME, argument, must="be None where a sequence is sharded over ranks", got=type(value).__name__,
                    then="Use a mesh without 'context'.",
                )  # fmt: skip

    def _over_pages(
        self, x: Tensor, key: Tensor | None, value: Tensor | None, mask: Mask | None, cache: PagedLayer
    ) -> Tensor:
        """Self-attention of the new tokens of a step, ``[1, total, embed_dim]``, which are appended to their pages."""
        if key is not None or value is not None or watched() or x.ndim != 3 or (self.training and self.dropout):
            raise UnsupportedError.about(
                _NAME,
                "cache",
                must="be a KVCache for attention to a memory, with dropout and under an observer",
                got="pages",
                then="Call eval() first; decode observed sequences with new_cache().",
            )
        fused, _ = self._fused((x,), mask, None, cache)
        if fused is not None:
            return fused
        heads, keys, values = self._heads(x, x, x, cache.step.positions, cache.step.positions)
        output = cache.step.attend(
            cache.layer, heads, keys, values, mask=mask, scores=self.scores.rules(), scale=self.scale
        )
        return self._joined(output)

    def cache_view(self, cache: KVCache | PagedLayer | None, x: Tensor, memory: Tensor | None) -> CacheView | None:
        """What a fused call reads from a cache."""
        return cache_view(cache, x, memory, self.num_kv_heads, self.head_dim)

    def _fused(
        self, tokens: tuple[Tensor, ...], mask: Mask | None, query_offset: int | None,
        cache: KVCache | PagedLayer | None = None, memory: Tensor | None = None,
    ) -> tuple[Tensor | None, Path | None]:  # fmt: skip
        """The fused output, if any. Under observation a call runs op by op, with the same bits by the returned path."""
        projections = self.projections()
        view = None if projections is None or cache is None else self.cache_view(cache, tokens[0], memory)
        if projections is None or (view is None and cache is not None):
            return None, None
        output = fused_attention(tokens, projections, mask=mask, query_offset=query_offset, cache=view)
        if output is None:
            same_bits = watched() and is_fused_attention(
                tokens, projections, mask=mask, query_offset=query_offset, cache=view
            )
            return None, NATIVE if same_bits else None
        if view is not None and view.grows and isinstance(cache, KVCache):
            count_appended([cache], tokens[0].shape[1])
        return output, None

    def projections(self) -> Projections | None:
        """Weights and options; None if a linear layer is of another class, hooked or compiled."""
        if torch.compiler.is_compiling():
            return None
        return cached_reading(self, None, self._read, may_be_hooked=lambda: (self,))

    def _read(self) -> Projections | None:
        """Weights and options, if the linear layers are plain, and no part of a larger attention."""
        if self.part is not None and self.part.attends(self._dropped()):
            return None
        submodules = submodules_of(self)
        layers = [*map(submodules.get, _PROJECTIONS)]
        plain = [read for layer in layers if layer is not None and (read := layer_of(layer)) is not None]
        if len(plain) < len(layers):
            return None
        return Projections(
            plain[:-1],
            plain[-1],
            self.num_heads,
            self.num_kv_heads,
            self.scale,
            self._dropped(),
            self.backend,
            self.rotary,
            rules=self.scores.rules if self.scores else tuple,
        )

    def project(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, *, first: int = 0
    ) -> tuple[
        Float[Tensor, "*batch heads q_len head_dim"],
        Float[Tensor, "*batch kv_heads k_len head_dim"],
        Float[Tensor, "*batch kv_heads k_len head_dim"],
    ]:
        """Queries, keys and values by head, as ``attention`` takes them; rotary applied from position ``first``.

        >>> import torch
        >>> [part.shape for part in MultiHeadAttention(8, 2, num_kv_heads=1).project(torch.zeros(5, 8))]
        [torch.Size([2, 5, 4]), torch.Size([1, 5, 4]), torch.Size([1, 5, 4])]
        """
        reads_query = key is None
        first = whole(f"{_NAME}.project", "first", first, low=-FARTHEST)
        key, value = self._sources(query, key, value)
        return self._heads(query, key, value, first, first if reads_query else 0)

    def _heads(
        self, query: Tensor, key: Tensor, value: Tensor, first: int | Tensor, first_key: int | Tensor,
        path: Path | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Queries, keys and values by head, rotated from their first positions on, or by each token's position."""
        layers = (self.query_projection, self.key_projection, self.value_projection)
        if path is not None:
            first_of, plain = 1 if query is not key else 3, [*map(_plain, layers)]
            queries, keys, values = (
                projected
                for x, part in ((query, plain[:first_of]), (key, plain[first_of:]))
                if part
                for projected in project_each(x, [weight for weight, _ in part], [bias for _, bias in part], path=path)
            )
        elif query is key and key is value:
            queries, keys, values = linear_each(layers, query)
        else:
            queries, keys, values = (layer(x) for layer, x in zip(layers, (query, key, value), strict=True))
        return (
            self._rotated(queries, self.num_heads, first),
            self._rotated(keys, self.num_kv_heads, first_key),
            _split(values, self.num_kv_heads, self.head_dim),
        )

    def _query_heads(self, query: Tensor, first: int, path: Path | None = None) -> Tensor:
        layer = self.query_projection
        queries = layer(query) if path is None else project(query, *_plain(layer), path=path)
        return self._rotated(queries, self.num_heads, first)

    def _rotated(self, x: Tensor, count: int, first: int | Tensor) -> Tensor:
        """Heads, rotated by their positions."""
        heads, sequence = _split(x, count, self.head_dim), self._sequence_part()
        if self.rotary is None:
            return heads
        if isinstance(first, Tensor):
            return self.rotary.rotate_at(heads, first)
        if sequence is not None:
            return self.rotary.rotate_at(heads, sequence.positions(heads.shape[-2]))
        return self.rotary.rotate(heads, first)

    def _sources(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor]:
        widths = (self.embed_dim, self.key_dim, self.value_dim)
        return sources_of(_NAME, query, key, value, widths=widths, like=weight_at(self, "query_projection"))

    def _first_position(
        self, is_self_attention: bool, cache: KVCache | None, query_offset: int | None, q_len: int, k_len: int
    ) -> int:
        """Position of the first query."""
        if is_self_attention and cache is not None:
            if query_offset is not None:
                raise MaskError.about(
                    _NAME,
                    "query_offset",
                    must="not be given with a cache",
                    got=query_offset,
                    then="The cache's length is where the first query stands.",
                )
            return cache.length
        if query_offset is None and self.rotary is not None and q_len != k_len:
            raise MaskError.about(
                _NAME,
                "query_offset",
                must="be given when query and key differ in length under rotary",
                got=f"q_len {q_len}, k_len {k_len}, no query_offset",
                then=f"Usual choices: 0, or {k_len - q_len} (k_len - q_len: last query beside last key).",
            )
        return query_offset or 0

    def _append(self, cache: KVCache, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if keys.ndim == 4:
            return cache.append(keys, values)
        keys, values = cache.append(keys[None], values[None])
        return keys[0], values[0]

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> Self:
        """A module with the weights of torch's, copied; always batch first, whatever ``batch_first`` was.

        Masks differ: in torch's module ``True`` forbids. ``clearhead.bridges`` has functions that convert.

        Raises:
            UnsupportedError: the module adds a learned key and value (``add_bias_kv``) or a zero one.

        >>> module = MultiHeadAttention.from_torch(nn.MultiheadAttention(8, 2))
        """
        weights = torch_projections(f"{_NAME}.from_torch", module)
        new = cls(
            module.embed_dim,
            module.num_heads,
            key_dim=module.kdim,
            value_dim=module.vdim,
            bias=weights[0][1] is not None,
            dropout=module.dropout,
        )
        return new._with_weights(weights).train(module.training)

    @classmethod
    def from_heads(
        cls,
        heads: Sequence[tuple[HeadWeight, HeadWeight, HeadWeight]],
        output: HeadWeight | None = None,
        *,
        scale: float | None = None,
    ) -> Self:
        """A module made of single heads side by side, their weights copied.

        Args:
            heads: for each head its query, key and value projection: a weight ``[head_dim, width]`` as in
                ``nn.Linear``, a pair of weight and bias, or an ``nn.Linear``.
            output: the projection that mixes the heads, ``[embed_dim, num_heads * head_dim]``; none by default.
            scale: factor on ``query @ key^T``; by default ``1 / sqrt(head_dim)``.

        Raises:
            ShapeError: no heads, or weights whose shapes differ between heads.

        >>> import torch
        >>> one_head = (torch.eye(4), torch.eye(4), torch.eye(4))
        >>> MultiHeadAttention.from_heads([one_head, one_head])(torch.zeros(3, 4)).shape
        torch.Size([3, 8])
        """
        name = f"{_NAME}.from_heads"
        weights = heads_side_by_side(name, heads, output)
        (query, _), (key, _), (value, _) = weights[:3]
        new = cls(
            query.shape[1],
            len(heads),
            head_dim=len(query) // len(heads),
            key_dim=key.shape[1],
            value_dim=value.shape[1],
            bias=any(bias is not None for _, bias in weights),
            output_projection=output is not None,
            scale=scale,
        )
        last = new.output_projection
        if last is not None and weights[-1][0].shape != last.weight.shape:
            raise ShapeError.about(
                name, "output", must=f"have shape {tuple(last.weight.shape)}", got=tuple(weights[-1][0].shape),
                then="It maps the heads side by side back to the query's width.",
            )  # fmt: skip
        return new._with_weights(weights)

    def _with_weights(self, weights: Sequence[WeightAndBias]) -> Self:
        """The module with copies of these as its projections, of the first one's device and dtype."""
        self.to(device=weights[0][0].device, dtype=weights[0][0].dtype)
        for name, (weight, bias) in zip(_PROJECTIONS, weights, strict=False):
            copy_into(getattr(self, name), weight, bias)
        return self

    def extra_repr(self) -> str:
        parts = [f"{self.embed_dim}, num_heads={self.num_heads}"]
        if self.num_kv_heads != self.num_heads:
            parts.append(f"num_kv_heads={self.num_kv_heads}")
        parts.append(f"head_dim={self.head_dim}")
        for name in ("dropout", "rotary", "scale"):
            if getattr(self, name):
                parts.append(f"{name}={getattr(self, name)}")
        return ", ".join(parts)


def _head_dim(embed_dim: int, num_heads: int, head_dim: int | None) -> int:
    if head_dim is not None:
        return positive(_NAME, "head_dim", head_dim)
    if embed_dim % num_heads:
        raise ShapeError.about(
            _NAME, "num_heads", must=f"divide embed_dim {embed_dim}", got=num_heads, then="Or give head_dim yourself."
        )
    return embed_dim // num_heads


def _plain(layer: nn.Module) -> Layer:
    """Weight and bias of a layer of a call that could be fused."""
    read = layer_of(layer)
    assert read is not None
    return read


def _split(x: Tensor, heads: int, head_dim: int) -> Tensor:
    split: Tensor = x.unflatten(-1, (heads, head_dim))
    return split.transpose(-3, -2)
