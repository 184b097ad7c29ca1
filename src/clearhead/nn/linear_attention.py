"""LinearAttention: projections, and a state, around the linear family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.arguments import flag, one_of
from clearhead.errors import MaskError, ShapeError, UnsupportedError
from clearhead.linear import (
    FeatureMap,
    LinearCache,
    LinearState,
    PositiveRandomFeatures,
    delta_attention,
    gated_linear_attention,
    linear_attention,
    retention,
)
from clearhead.linear.feature_maps import PERFORMER, as_feature_map
from clearhead.masks import Causal, Documents, Mask, Padding
from clearhead.masks.base import conjuncts, does_as
from clearhead.nn.checks import positive, sources_of
from clearhead.nn.jagged import JaggedCall, takes_jagged
from clearhead.nn.linear import Linear, weight_at
from clearhead.shapes import Float

__all__ = ["LinearAttention"]

_NAME = "LinearAttention"
_GATE_RANK: Final = 16
#: Divides the logarithms of gates, so that a fresh module forgets slowly (Yang et al. 2024, GLA, section 4.4).
_GATE_TEMPERATURE: Final = 16.0


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """A member of the family as a module runs it.

    Attributes:
        verb: the function.
        feature_map: its default.
        ordered: whether it is causal by its formula.
        extra: what it takes from each key's token besides key and value.
    """

    verb: Callable[..., tuple[Tensor, LinearState]]
    feature_map: str
    ordered: bool = True
    extra: str | None = None


_KINDS: Final = {
    "linear": _Kind(verb=linear_attention, feature_map="elu", ordered=False),
    "retention": _Kind(verb=retention, feature_map="identity"),
    "gated": _Kind(verb=gated_linear_attention, feature_map="identity", extra="log_gate"),
    "delta": _Kind(verb=delta_attention, feature_map="unit", extra="rate"),
}


class LinearAttention(nn.Module):
    """Project to heads, attend by a state of fixed size, join the heads, project back.

    Invariant mode (``clearhead.set_invariant``) covers the projections alone: the recurrence is summed in chunks of 64
    tokens that begin where a call begins, and token by token from a state, so a sequence read whole, in parts or one by
    one may differ in the last digits.

    Args:
        embed_dim: width of queries and of the output.
        num_heads: number of heads.
        kind: ``"linear"``, ``"retention"``, ``"gated"`` (log gates from ``logsigmoid`` of a projection of rank 16,
            divided by 16) or ``"delta"`` (rates from ``sigmoid`` of a projection).
        feature_map: of queries and keys: ``"elu"``, ``"relu"``, ``"identity"``, ``"unit"``, ``"performer"`` or a
            ``FeatureMap``; by default the kind's. Random features are saved with the module.
        num_kv_heads: heads of keys and values, shared by as many heads of queries each; by default ``num_heads``.
        head_dim: width of a head; by default ``embed_dim / num_heads``.
        key_dim: width of what keys are made from; by default ``embed_dim``.
        value_dim: width of what values are made from; by default ``embed_dim``.
        bias: whether projections add a bias.
        output_projection: whether heads are mixed by a last projection.

    Raises:
        ShapeError: sizes that are not positive, or do not divide.
        UnsupportedError: no such kind or map.

    Cost: the projections, ``2 * len * embed_dim**2`` operations each, and per token and head what the verb says.

    Papers: those of the verbs in ``clearhead.linear``.

    >>> import torch
    >>> from clearhead.masks import Causal
    >>> LinearAttention(8, num_heads=2, kind="delta")(torch.zeros(1, 5, 8), mask=Causal()).shape
    torch.Size([1, 5, 8])
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, kind: str = "linear",
        feature_map: str | FeatureMap | PositiveRandomFeatures | None = None, num_kv_heads: int | None = None,
        head_dim: int | None = None, key_dim: int | None = None, value_dim: int | None = None, bias: bool = True,
        output_projection: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.kind = one_of(_NAME, "kind", kind, _KINDS, "Usual: 'linear'.")
        self.embed_dim = positive(_NAME, "embed_dim", embed_dim)
        self.num_heads = positive(_NAME, "num_heads", num_heads)
        self.num_kv_heads = self.num_heads if num_kv_heads is None else positive(_NAME, "num_kv_heads", num_kv_heads)
        if self.num_heads % self.num_kv_heads:
            raise ShapeError.about(
                _NAME,
                "num_kv_heads",
                must=f"divide num_heads {num_heads}",
                got=num_kv_heads,
                then="Each head of keys serves as many heads of queries.",
            )
        if head_dim is None and self.embed_dim % self.num_heads:
            raise ShapeError.about(
                _NAME,
                "embed_dim",
                must=f"be a multiple of num_heads {num_heads}",
                got=embed_dim,
                then="Or give head_dim.",
            )
        own_width = self.embed_dim // self.num_heads
        self.head_dim = own_width if head_dim is None else positive(_NAME, "head_dim", head_dim)
        self.key_dim = self.embed_dim if key_dim is None else positive(_NAME, "key_dim", key_dim)
        self.value_dim = self.embed_dim if value_dim is None else positive(_NAME, "value_dim", value_dim)
        bias, mixed = flag(_NAME, "bias", bias), flag(_NAME, "output_projection", output_projection)
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.query_projection = Linear(self.embed_dim, width, bias=bias)
        self.key_projection = Linear(self.key_dim, kv_width, bias=bias)
        self.value_projection = Linear(self.value_dim, kv_width, bias=bias)
        self.output_projection = Linear(width, self.embed_dim, bias=bias) if mixed else None
        self.extra_projection = self._extra_projection(kv_width)
        self.feature_map = self._feature_map(feature_map)
        drawn = self.feature_map
        self.register_buffer(
            "random_features",
            drawn.weights.to(torch.float32).to(self.query_projection.weight.device)
            if isinstance(drawn, PositiveRandomFeatures)
            else None,
        )

    @takes_jagged(JaggedCall(masks={"mask": ("query", "key")}, by_state=True))
    def forward(
        self,
        query: Float[Tensor, "*batch q_len embed_dim"],
        key: Float[Tensor, "*batch k_len key_dim"] | None = None,
        value: Float[Tensor, "*batch k_len value_dim"] | None = None,
        *,
        mask: Mask | None = None,
        cache: LinearCache | None = None,
    ) -> Float[Tensor, "*batch q_len output_dim"]:
        """Attend from ``query`` to ``key``.

        Args:
            query: ``[batch, q_len, embed_dim]``, ``[q_len, embed_dim]``, or jagged.
            key: ``[batch, k_len, key_dim]``; without it the module attends from ``query`` to itself.
            value: ``[batch, k_len, value_dim]``; by default ``key``.
            mask: None, ``Causal()``, ``Padding``, ``Documents`` or their ``&``; positions count from the cache's
                first token, and lengths may reach to tokens of later calls. Every kind but ``"linear"`` is causal and
                must be told so.
            cache: the state after earlier tokens. In self-attention the call's tokens are added to it. In
                cross-attention (with ``key``) the first call fills it, later calls only read it.

        Returns:
            ``[batch, q_len, embed_dim]``, or ``[q_len, embed_dim]`` as ``query`` was; ``num_heads * head_dim`` wide
            without an output projection.

        Raises:
            ShapeError: widths or axes do not fit.
            MaskError: a mask that a state of fixed size cannot honour, or that does not fit.
            UnsupportedError: dtype or device differ from the module's, or a cache of another kind.
        """
        is_self_attention = (key is None or key is query) and (value is None or value is key or value is query)
        key, value = self._sources(query, key, value)
        if cache is not None and not isinstance(cache, LinearCache):
            raise UnsupportedError.about(
                _NAME,
                "cache",
                must="be a LinearCache",
                got=type(cache).__name__,
                then="Pass clearhead.linear.LinearCache().",
            )
        is_cached = not is_self_attention and cache is not None and cache.state is not None
        if is_cached and cache is not None and cache.length != key.shape[-2]:
            raise ShapeError.about(
                _NAME,
                "key",
                must=f"be the memory that filled the cache, {cache.length} tokens",
                got=f"shape {tuple(key.shape)}",
                then="Call cache.reset() before attending to another memory.",
            )
        if is_cached:
            # The memory is in the state already.
            key, value, mask = key[..., :0, :], value[..., :0, :], None
        ordered = self._check_order(mask)
        if ordered and not is_self_attention:
            raise MaskError.about(
                _NAME,
                "mask",
                must="hold no Causal() where key is not query",
                got=repr(mask)[:80],
                then="A memory has no order with the queries; kind 'linear' without Causal() reads it.",
            )
        if is_self_attention and cache is not None:
            mask = _mask_of_new_keys(mask, cache.length, key.shape[-2])
        output, state = _KINDS[self.kind].verb(
            self._heads(self.query_projection(query)),
            self._heads(self.key_projection(key)),
            self._heads(self.value_projection(value)),
            feature_map=self._map(),
            mask=mask,
            state=None if cache is None else cache.state,
            **self._extra(key),
        )
        if cache is not None and not is_cached:
            cache.update(state, key.shape[-2])
        joined = output.transpose(-3, -2).flatten(-2)
        return joined if self.output_projection is None else self.output_projection(joined)

    def _feature_map(
        self, given: str | FeatureMap | PositiveRandomFeatures | None
    ) -> str | FeatureMap | PositiveRandomFeatures:
        """The map, by default the kind's own, once it is known to be one that the kind can use."""
        chosen = _KINDS[self.kind].feature_map if given is None else given
        feature_map = as_feature_map(_NAME, chosen, self.head_dim)
        if _KINDS[self.kind].ordered and feature_map.only_normalized:
            raise UnsupportedError.about(
                _NAME,
                "feature_map",
                must=f"need no normaliser with kind {self.kind!r}",
                got=feature_map.name,
                then="Only kind 'linear' normalises.",
            )
        features = feature_map.features(self.head_dim)
        if _KINDS[self.kind].extra == "log_gate" and features != self.head_dim:
            raise ShapeError.about(
                _NAME,
                "feature_map",
                must=f"have a feature for each of {self.head_dim} channels with kind 'gated'",
                got=f"{feature_map.name}, which has {features}",
                then="Each feature has a gate of its own.",
            )
        return PositiveRandomFeatures.draw(self.head_dim) if chosen == PERFORMER else chosen

    def _extra_projection(self, width: int) -> nn.Module | None:
        match _KINDS[self.kind].extra:
            case "log_gate":
                return nn.Sequential(Linear(self.key_dim, _GATE_RANK, bias=False), Linear(_GATE_RANK, width))
            case "rate":
                return Linear(self.key_dim, self.num_kv_heads)
        return None

    def _extra(self, key: Tensor) -> dict[str, Tensor]:
        """The gates or rates of the tokens that keys are made from."""
        if self.extra_projection is None:
            return {}
        extra = self.extra_projection(key)
        if _KINDS[self.kind].extra == "log_gate":
            exact = torch.promote_types(extra.dtype, torch.float32)
            return {"log_gate": F.logsigmoid(self._heads(extra).to(exact)) / _GATE_TEMPERATURE}
        return {"rate": torch.sigmoid(extra).transpose(-2, -1)}

    def _map(self) -> str | FeatureMap | PositiveRandomFeatures:
        if isinstance(self.feature_map, PositiveRandomFeatures):
            weights = self.random_features
            assert isinstance(weights, Tensor)
            return replace(self.feature_map, weights=weights)
        return self.feature_map

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)
        return heads

    def _check_order(self, mask: Mask | None) -> bool:
        """Whether keys count in their order; raises where the kind cannot do otherwise and the mask does not say so."""
        causal = isinstance(mask, Mask) and any(does_as(part, Causal) for part in conjuncts(mask))
        if _KINDS[self.kind].ordered and not causal:
            raise MaskError.about(
                _NAME,
                "mask",
                must=f"hold Causal() with kind {self.kind!r}, alone or with & Padding or & Documents",
                got=repr(mask)[:80],
                then="Its formula has no form that looks ahead; kind 'linear' has.",
            )
        return causal

    def _sources(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor]:
        widths = (self.embed_dim, self.key_dim, self.value_dim)
        return sources_of(_NAME, query, key, value, widths=widths, like=weight_at(self, "query_projection"))

    def extra_repr(self) -> str:
        """The sizes, for printing."""
        shared = "" if self.num_kv_heads == self.num_heads else f", num_kv_heads={self.num_kv_heads}"
        return f"{self.embed_dim}, num_heads={self.num_heads}{shared}, head_dim={self.head_dim}, kind={self.kind!r}"


def _mask_of_new_keys(mask: Mask | None, cached: int, length: int) -> Mask | None:
    """A mask whose positions count from the cache's first token, for ``length`` tokens behind ``held`` ones."""
    if not isinstance(mask, Mask):
        return mask
    whole: Mask | None = None
    for part in conjuncts(mask):
        if isinstance(part, Documents) and cached:
            raise MaskError.about(
                _NAME,
                "mask",
                must="hold no Documents with a cache that holds tokens",
                got=repr(mask)[:80],
                then="Decode documents as a batch: the state after a packed call has one entry for each.",
            )
        if isinstance(part, Padding) and does_as(part, Padding):
            part = Padding((part.lengths - cached).clamp(0, length))
        whole = part if whole is None else whole & part
    return whole
