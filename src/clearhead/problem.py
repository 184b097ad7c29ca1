"""``Problem``: a validated, immutable call of attention. Backends check nothing a second time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final

import torch
from torch import Tensor

from clearhead.arguments import dense, probability, real_number, repr_of, seed_of
from clearhead.batch_part import origin_of
from clearhead.errors import MaskError, ShapeError, UnsupportedError
from clearhead.int8_rows import channels_of, dequantize, is_quantized
from clearhead.masks.base import Mask, does_as, index_tensors, resolve_offset
from clearhead.masks.numbers import packed_numbers
from clearhead.masks.parts import Parts, parts_of
from clearhead.masks.segments import Segments, segments_of
from clearhead.scores import Alibi, DenseBias, RelativeBias, ScoreFunction, ScoreRule, Sink, as_rules
from clearhead.shapes import Bool, Float, Int
from clearhead.tensors import is_hollow
from clearhead.traced_rules import Extent, traced_rules

__all__ = ["DTYPES", "Problem", "draw_seed", "scale_of"]

#: Rules that add to scores, which leave a score of -infinity what it is.
_ADDED: Final = (Alibi, DenseBias, RelativeBias, Sink)
DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A call of attention: ``softmax(rules(scale * query @ key^T) under mask) @ value``.

    Tensors are ``[batch, heads, len, dim]``; ``leading`` is the number of the first two axes that the caller passed.
    Key and value may be the int8 rows of a ``KVCache``: the call is then that of ``dequantized``.
    """

    query: Float[Tensor, "batch heads q_len head_dim"]
    key: Float[Tensor, "batch kv_heads k_len head_dim"]
    value: Float[Tensor, "batch kv_heads k_len value_dim"]
    mask: Mask | None
    scores: tuple[ScoreRule, ...]
    scale: float
    dropout: float
    seed: int
    query_offset: int
    leading: int
    #: Places of the first batch entry, head and key in the whole that the call is a part of. Dropout draws by place.
    origin: tuple[int, int, int] = (0, 0, 0)

    @classmethod
    def of(
        cls, function: str, query: Tensor, key: Tensor, value: Tensor, *, mask: Mask | None = None,
        scores: ScoreRule | Iterable[ScoreRule] | None = (), scale: float | None = None, dropout: float = 0.0,
        seed: int | None = None, query_offset: int | None = None,
    ) -> Problem:  # fmt: skip
        """Validate a call; ``function`` is the public name in error texts."""
        problem = cls.traced(
            function, query, key, value, mask=mask, scores=scores, scale=scale, dropout=dropout, seed=seed,
            query_offset=query_offset,
        )  # fmt: skip
        problem._check_parts(function)
        return problem

    @classmethod
    def traced(
        cls, function: str, query: Tensor, key: Tensor, value: Tensor, *, mask: Mask | None = None,
        scores: ScoreRule | Iterable[ScoreRule] | None = (), scale: float | None = None, dropout: float = 0.0,
        seed: int | None = None, query_offset: int | None = None,
    ) -> Problem:  # fmt: skip
        """Validate a call whose sizes may be symbolic; masks and rules, whose checks read elements, are not checked."""
        _check_tensors(function, query, key, value)
        leading = query.ndim - 2
        query, key, value = (_four_axes(tensor) for tensor in (query, key, value))
        _check_shapes(function, query, key, value)
        rules = as_rules(function, scores)
        if mask is not None and not isinstance(mask, Mask):
            raise MaskError.about(
                function,
                "mask",
                must="be a mask",
                got=type(mask).__name__,
                then="Wrap a boolean tensor (True = may attend) in ch.Dense; convert a float mask with "
                "ch.bridges.from_additive; or use ch.Causal() and others.",
            )
        offset = _offset(function, query_offset, mask, rules, query.shape[2], key.shape[2])
        return cls(
            query=query,
            key=key,
            value=value,
            mask=None if mask is None else mask.placed(offset).to(query.device),
            scores=tuple(rule.placed(offset).to(query.device) for rule in rules),
            scale=1.0 / math.sqrt(query.shape[3]) if scale is None else scale_of(function, scale, query.dtype),
            dropout=probability(function, "dropout", dropout),
            seed=draw_seed(dropout) if seed is None else seed_of(function, seed),
            query_offset=offset,
            leading=leading,
            origin=origin_of(query.shape) if dropout else (0, 0, 0),
        )

    def _check_parts(self, function: str) -> None:
        if self.mask is not None:
            q_pos = range(self.query_offset, self.query_offset + self.q_len)
            self.mask.check(function, self.batch, self.num_heads, q_pos, self.k_len)
        for rule in self.scores:
            rule.check(function, self.batch, self.num_heads, self.q_len, self.k_len)
        if len([rule for rule in self.scores if isinstance(rule, Sink)]) > 1:
            raise UnsupportedError.about(
                function,
                "scores",
                must="hold one Sink at most",
                got="several",
                then="One logit that is the log-sum-exp of several has the same effect.",
            )

    @property
    def batch(self) -> int:
        return self.query.shape[0]

    @property
    def num_heads(self) -> int:
        return self.query.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.key.shape[1]

    @property
    def q_len(self) -> int:
        return self.query.shape[2]

    @property
    def k_len(self) -> int:
        return self.key.shape[2]

    @property
    def head_dim(self) -> int:
        return self.query.shape[3]

    @property
    def value_dim(self) -> int:
        return channels_of(self.value)

    @property
    def is_quantized(self) -> bool:
        """Whether key and value are int8 rows of a cache."""
        return is_quantized(self.key)

    @cached_property
    def dequantized(self) -> Problem:
        """The same problem with floating-point keys and values."""
        if not self.is_quantized:
            return self
        key, value = (dequantize(rows).to(self.work_dtype) for rows in (self.key, self.value))
        return self.with_tensors(self.query, key, value)

    @property
    def work_dtype(self) -> torch.dtype:
        """The dtype of scores, softmax and sums: float64 for float64, float32 for everything else."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

    @property
    def sink(self) -> Sink | None:
        return next((rule for rule in self.scores if isinstance(rule, Sink)), None)

    @property
    def elementwise(self) -> tuple[ScoreRule, ...]:
        """The rules that act on each score, all but a sink."""
        return tuple(rule for rule in self.scores if not isinstance(rule, Sink))

    @cached_property
    def rule_parameters(self) -> list[Tensor]:
        """Tensors of the rules that require a gradient; one that several rules share is one parameter."""
        learned = (tensor for rule in self.scores for tensor in rule.parameters() if tensor.requires_grad)
        return list({id(tensor): tensor for tensor in learned}.values())

    @property
    def needs_gradient(self) -> bool:
        if not torch.is_grad_enabled():
            return False
        tensors = (self.query, self.key, self.value)
        return any(tensor.requires_grad for tensor in tensors) or bool(self.rule_parameters)

    def indices(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Index tensors batch, head, q_pos and k_pos of the whole call, which broadcast to its scores."""
        return index_tensors(self.batch, self.num_heads, self.q_len, self.k_len, self.query_offset, self.query.device)

    def drawn_at(self, indices: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The places at which dropout draws for these indices of the call: batch, head, query and key."""
        if self.origin == (0, 0, 0):
            return indices
        batch, head, q_pos, k_pos = indices
        first_batch, first_head, first_key = self.origin
        return batch + first_batch, head + first_head, q_pos + first_key, k_pos + first_key

    @cached_property
    def token_numbers(self) -> Int[Tensor, " k_len"] | None:
        """The numbers of packed tokens by which dropout draws; None where it draws by the places of the call."""
        return packed_numbers(self.mask) if self.dropout and self.batch == 1 else None

    @cached_property
    def mask_parts(self) -> Parts:
        """The mask as a band, intervals of keys and tables."""
        size = (self.batch, self.num_heads, self.q_len, self.k_len)
        return parts_of(self.mask, size, self.query_offset, self.query.device)

    @cached_property
    def segments(self) -> Segments | None:
        """The sequences of a packed call on the CPU; None if the mask does not describe any."""
        # Reading lengths would synchronise with an accelerator.
        if self.mask is None or self.batch != 1 or self.query_offset != 0 or self.query.device.type != "cpu":
            return None
        return segments_of(self.mask, self.q_len, self.k_len)

    @cached_property
    def with_traced_rules(self) -> Problem:
        """The same problem with score functions replaced by equal rules and masks, where tracing finds them."""
        if not any(isinstance(rule, ScoreFunction) for rule in self.scores):
            return self
        extent = Extent(
            batch=self.batch, heads=self.num_heads, q_len=self.q_len, k_len=self.k_len, query_offset=self.query_offset
        )
        like = self.query.new_empty(0, dtype=self.work_dtype)
        rules: list[ScoreRule] = []
        mask = self.mask
        # From the last rule on: a mask comes after all rules, and a later rule may bring back a score of -infinity.
        for rule in reversed(self.scores):
            traced = None
            if isinstance(rule, ScoreFunction) and does_as(rule, ScoreFunction, "apply"):
                traced = traced_rules(rule, extent, like)
            masks = traced is not None and traced.mask is not None
            if traced is None or (masks and not all(type(one) in _ADDED for one in rules)):
                rules.insert(0, rule)
                continue
            rules[:0] = traced.rules
            if traced.mask is not None:
                mask = traced.mask if mask is None else mask & traced.mask
        # Parts of the mask are shared if the mask is.
        return (self._with if mask is self.mask else partial(replace, self))(mask=mask, scores=tuple(rules))

    def with_tensors(self, query: Tensor, key: Tensor, value: Tensor) -> Problem:
        """The same problem with other tensors of the same shapes."""
        return self._with(query=query, key=key, value=value)

    def with_scores(self, scores: tuple[ScoreRule, ...]) -> Problem:
        """The same problem with other rules of the same classes."""
        return self._with(scores=scores)

    def with_seed(self, seed: int) -> Problem:
        """The same problem with another seed."""
        return self._with(seed=seed)

    def with_table(self, table: Bool[Tensor, "batch heads q_len k_len"]) -> Problem:
        """The same problem with one table in place of the mask's tables and of masks evaluated place by place."""
        other = self._with()
        other.__dict__["mask_parts"] = self.mask_parts.with_table(table)
        return other

    def _with(self, **fields: Any) -> Problem:
        """A copy that shares the mask's parts and segments, which depend on sizes alone."""
        other = replace(self, **fields)
        for name in ("mask_parts", "segments"):
            if name in self.__dict__:
                other.__dict__[name] = self.__dict__[name]
        return other

    def without_elements(self) -> Problem:
        """The same problem with tensors of one element, expanded to their shapes, for ``with_tensors`` later."""
        hollow = (tensor.new_empty(1).expand(tensor.shape) for tensor in (self.query, self.key, self.value))
        return self.with_tensors(*hollow)


def _four_axes(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 4 else tensor[(None,) * (4 - tensor.ndim)]


def _check_tensors(function: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise ShapeError.about(
                function, name, must="be a tensor", got=type(tensor).__name__, then="Use torch.as_tensor."
            )
        dense(function, name, tensor)
        if not 2 <= tensor.ndim <= 4:
            raise ShapeError.about(
                function,
                name,
                must="have axes [batch, heads, len, head_dim], leading ones optional",
                got=f"shape {tuple(tensor.shape)}",
                then="Split the embedding into heads first.",
            )
        if tensor.ndim != query.ndim:
            raise ShapeError.about(
                function,
                name,
                must=f"have as many axes as query ({query.ndim})",
                got=f"shape {tuple(tensor.shape)}",
                then="Give all three the same axes.",
            )
        quantized = tensor is not query and all(getattr(part, "dtype", None) is torch.int8 for part in (key, value))
        if query.dtype not in DTYPES or (tensor.dtype != query.dtype and not quantized):
            wanted = f"have query's dtype {query.dtype}" if tensor.dtype in DTYPES else "be floating point"
            raise UnsupportedError.about(
                function,
                name,
                must=wanted,
                got=tensor.dtype,
                then="Convert with .to(dtype); float16, bfloat16, float32 and float64 are supported.",
            )
        if tensor.device != query.device:
            raise UnsupportedError.about(
                function,
                name,
                must=f"be on query's device {query.device}",
                got=tensor.device,
                then="Move it with .to(device).",
            )


def _check_shapes(function: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    def wrong(name: str, must: str, tensor: Tensor, then: str) -> ShapeError:
        return ShapeError.about(function, name, must=must, got=f"shape {tuple(tensor.shape)}", then=then)

    batch, heads, _, head_dim = query.shape
    if head_dim == 0 or heads == 0:
        raise wrong("query", "have at least one head and one channel", query, "Check how heads were split.")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape[0] != batch:
            raise wrong(name, f"have query's batch size {batch}", tensor, "Expand it to the batch.")
    if channels_of(key) != head_dim:
        raise wrong("key", f"have query's head_dim {head_dim}", key, "Project both to one width.")
    if channels_of(value) < 0:
        raise wrong("value", "be rows of an int8 cache, numbers and a scale", value, "Pass what ch.KVCache returned.")
    if value.shape[1:3] != key.shape[1:3]:
        raise wrong("value", f"have key's heads and length {tuple(key.shape[1:3])}", value, "One value per key.")
    if key.shape[1] == 0 or heads % key.shape[1]:
        raise wrong(
            "key",
            f"have a number of heads that divides query's {heads}",
            key,
            "Query head h reads key head h // group.",
        )


def _offset(
    function: str,
    query_offset: int | None,
    mask: Mask | None,
    rules: tuple[ScoreRule, ...],
    q_len: int,
    k_len: int,
) -> int:
    offsets = [resolve_offset(function, part, q_len, k_len, query_offset) for part in (mask, *rules)]
    # Masks and rules that read no position give 0. The compiler supports no max with a key.
    return max(offsets) or min(offsets)


def scale_of(function: str, scale: object, dtype: torch.dtype) -> float:
    """A factor on scores of queries of this dtype.

    Raises:
        ShapeError: ``scale`` is no finite number, or too large for the dtype of scores.
    """
    limits = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    factor = real_number(scale)
    # A comparison, since the compiler cannot trace isfinite of a symbolic number.
    if factor is None or not abs(factor) <= limits.max:
        # An int too large for a float is finite too.
        finite = type(scale) is int if factor is None else math.isfinite(factor)
        raise ShapeError.about(
            function,
            "scale",
            must=f"be a number within float{limits.bits}'s range" if finite else "be a finite number",
            got=repr_of(scale),
            then="Multiply query by a learned scale before the call.",
        )
    # Backends differ in their treatment of subnormals.
    return factor if limits.bits == 64 or abs(factor) >= limits.tiny else 0.0


def draw_seed(dropout: float) -> int:
    """A seed from torch's generator, so that ``torch.manual_seed`` reproduces it; 0 without dropout."""
    if dropout <= 0.0:
        return 0
    drawn = torch.randint(2**62, (), device="cpu")
    # Under FakeTensorMode there is no element to read.
    return 0 if is_hollow(drawn) else int(drawn.item())
