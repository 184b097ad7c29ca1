"""torch's ``nn.MultiheadAttention`` with the same parameters, arguments and returns, computed by ``attention``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrize import is_parametrized

from clearhead.choices import is_invariant
from clearhead.errors import ShapeError, UnsupportedError
from clearhead.functional.jagged import is_jagged
from clearhead.integrations.recast import stands_for
from clearhead.integrations.torch.attention_weights import WeightedCall, with_weights
from clearhead.integrations.torch.jagged import JaggedArguments, jagged_mask
from clearhead.integrations.torch.masks import MaskReader, Meaning, may_look
from clearhead.integrations.torch.parts import is_plain
from clearhead.invariance import eager_if_invariant
from clearhead.masks import Mask
from clearhead.nn.checks import converts
from clearhead.nn.fused import fused_attention, is_fused_attention
from clearhead.nn.reading import cached_reading
from clearhead.nn.spec import Projections
from clearhead.ops.packed_weight import as_stored
from clearhead.projection import NATIVE, Path, project
from clearhead.shapes import Float
from clearhead.statistics import Want
from clearhead.torch_private import parameters_of
from clearhead.watch import attend, attend_wanting, edited, recognise, watched

__all__ = ["LEAST_WORK", "SwappedMultiheadAttention", "mask_reader"]

_NAME = "MultiheadAttention"
#: Multiplications below which a call that is not fused costs less than the choice of a backend: without a mask it is
#: torch's own, which has the same semantics there; with one it is the formula.
LEAST_WORK: Final = 2**24
#: Elements of tokens whose copy to batch-first order costs less than fusing saves.
_SOON: Final = 2**17


#: ``attn_mask``, ``key_padding_mask`` and ``is_causal``.
_Masks = tuple[Tensor | Mask | Meaning | None, Tensor | None, bool]


class _ModuleCall(NamedTuple):
    """Queries, keys and values by head, and what masks mean for them."""

    tensors: tuple[Tensor, Tensor, Tensor]
    meaning: Meaning


@stands_for(nn.MultiheadAttention)
class SwappedMultiheadAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` computed by ``attention``; put in place by ``swap``, not made directly.

    Parameters, ``state_dict``, arguments, returns and the meaning of masks are torch's: ``True`` forbids. A query
    that may attend to nothing gives weights 0 and the bias of ``out_proj``, where torch gives NaN.
    """

    @eager_if_invariant
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | Mask | Meaning | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from ``query`` to ``key``, as ``nn.MultiheadAttention.forward``.

        Args:
            query: ``[q_len, batch, embed_dim]``, ``[batch, q_len, embed_dim]`` with ``batch_first``, or
                ``[q_len, embed_dim]``. With ``batch_first`` tokens may be jagged nested tensors.
            key: the same of ``k_len`` and ``kdim``.
            value: the same of ``k_len`` and ``vdim``.
            key_padding_mask: bool ``[batch, k_len]``, ``True`` marks padding; or float, added to scores.
            need_weights: return weights too, which takes ``q_len * k_len`` memory.
            attn_mask: bool ``[q_len, k_len]`` or ``[batch * num_heads, q_len, k_len]``, ``True`` forbids; or float,
                added to scores; or a clearhead mask, in which ``True`` allows.
            average_attn_weights: weights averaged over heads.
            is_causal: a hint that ``attn_mask`` is the causal mask; it is believed.

        Returns:
            The output, shaped as ``query``; and weights ``[batch, q_len, k_len]``, or
            ``[batch, num_heads, q_len, k_len]`` unaveraged, or None. As in torch, weights returned while training
            are those after dropout. For jagged tokens weights are padded with 0.

        Raises:
            ShapeError: axes, widths or lengths do not fit.
            MaskError: a mask does not fit.
            UnsupportedError: a dtype is not the module's.
        """
        if is_jagged(query) or is_jagged(key):
            masks = (attn_mask, key_padding_mask, is_causal)
            return self._jagged(query, key, value, masks, need_weights, average_attn_weights)
        attn_mask = None if isinstance(attn_mask, Meaning) and attn_mask.says_nothing() else attn_mask
        masks = (attn_mask, key_padding_mask, is_causal)
        _check_kinds(query, key, value)
        if not is_plain(query, key, value):
            return self.by_torch(query, key, value, masks, need_weights, average_attn_weights)
        batched = _check_axes(query, key, value, 0 if self.batch_first else 1)
        self._check_numbers(query, key, value)
        dropout = self.dropout if self.training else 0.0
        # Dropout of 1, which only torch allows, leaves nothing of a row.
        square, given, path = need_weights or dropout >= 1.0, masks, None
        sequences = (query,) if query is key else (query, key)
        if not square and key is value and all(map(self._is_one_step, sequences)):
            meaning = mask_reader(_NAME, self, query, key).meaning(*masks)
            tokens = self.by_batch(*sequences)
            options: dict[str, Any] = {"mask": meaning.mask, "query_offset": 0}
            projections = self.projections()
            if meaning.scores:
                projections = replace(projections, rules=lambda: tuple(meaning.scores))
            fused = fused_attention(tokens, projections, **options)
            if fused is not None:
                return fused if self.batch_first else fused.transpose(0, 1).contiguous(), None
            # An observed call is bitwise identical to an unobserved one.
            path = NATIVE if watched() and is_fused_attention(tokens, projections, **options) else None
            masks = (meaning, None, False)
        plain = not torch.compiler.is_compiling() and not is_invariant()
        small = path is None and plain and self._work(query, key) < LEAST_WORK
        square = square or small
        if square and watched():
            call = self._by_head(query, key, value, masks, look=may_look(query))
            if edited():
                return self._edited(call, dropout, need_weights, average_attn_weights, batched)
            # Observers that edit nothing see the same attention beside the call.
            attend(self, *call.tensors, mask=call.meaning.mask, scores=call.meaning.scores, query_offset=0)
        if small and given == (None, None, False):
            return self.by_torch(query, key, value, given, need_weights, average_attn_weights)
        call = self._by_head(query, key, value, masks, look=not small and may_look(query), path=path)
        weights = None
        if square:
            output, weights = with_weights(
                WeightedCall(
                    query=call.tensors[0],
                    key=call.tensors[1],
                    value=call.tensors[2],
                    mask=call.meaning.mask,
                    scores=call.meaning.scores,
                    query_offset=0,
                    dropout=dropout,
                )
            )
        else:
            output = attend(
                self,
                *call.tensors,
                mask=call.meaning.mask,
                scores=call.meaning.scores,
                dropout=dropout,
                query_offset=0,
            )
        return self._returned(output, weights if need_weights else None, average_attn_weights, batched, path)

    def _jagged(
        self, query: Tensor, key: Tensor, value: Tensor, masks: _Masks, need_weights: bool, average: bool
    ) -> tuple[Tensor, Tensor | None]:
        """A call with jagged tokens."""
        attn_mask, padding, is_causal = masks
        given = {
            "query": query,
            "key": key,
            "value": value,
            "attn_mask": jagged_mask(_NAME, "attn_mask", attn_mask, is_causal),
        }
        jagged = JaggedArguments.of(
            _NAME,
            {"attn_mask": ("query", "key")},
            given,
            batch_first=self.batch_first,
            padding={"key_padding_mask": padding},
            allow_packed=not need_weights,
        )
        output, weights = self(**jagged.arguments, need_weights=need_weights, average_attn_weights=average)
        return jagged.restored(output), None if weights is None else jagged.without_padding(weights)

    def _check_numbers(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raise unless the inputs have the widths and the dtype of the projections."""
        # Not the attribute: a parametrized module computes it.
        weight = parameters_of(self).get("in_proj_weight" if self._qkv_same_embed_dim else "q_proj_weight")
        for name, tensor, width in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            if tensor.shape[-1] != width:
                raise ShapeError.about(
                    _NAME,
                    name,
                    must=f"be {width} channels wide",
                    got=f"shape {tuple(tensor.shape)}",
                    then="Project it, or build the module with another embed_dim, kdim or vdim.",
                )
            if weight is not None and tensor.dtype != weight.dtype and not converts(tensor):
                raise UnsupportedError.about(
                    _NAME,
                    name,
                    must=f"have the module's dtype {weight.dtype}",
                    got=tensor.dtype,
                    then="Convert with .to(dtype), or run under torch.autocast.",
                )

    def _is_one_step(self, x: Tensor) -> bool:
        """Whether queries, keys and values are one GEMM of contiguous batch-first tokens, possibly after a small
        copy."""
        extra = self.bias_k is not None or self.add_zero_attn
        in_order = x.ndim == 3 and (self.batch_first or x.shape[1] == 1 or x.numel() <= _SOON)
        return in_order and self._qkv_same_embed_dim and not extra

    def by_batch(self, *sequences: Tensor) -> tuple[Float[Tensor, "batch len width"], ...]:
        """The sequences in batch-first order."""
        return sequences if self.batch_first else tuple(each.transpose(0, 1) for each in sequences)

    def is_plain(self, *sequences: Tensor) -> bool:
        """Whether attention of the first of these to the last is what ``projections`` say."""
        plain = not is_parametrized(self) and not is_parametrized(self.out_proj)
        return plain and all(map(self._is_one_step, sequences))

    def projections(self) -> Projections:
        """Weights and options: one layer for queries, keys and values, and the output projection."""
        parts = (self, self.out_proj)
        # A parametrization computes the weights anew for each call.
        keep = not torch.compiler.is_compiling() and not any(map(is_parametrized, parts))
        projections = cached_reading(self, None, self._read, may_be_hooked=lambda: parts) if keep else None
        return self._read() if projections is None else projections

    def _read(self) -> Projections:
        return Projections(
            [(as_stored(self.in_proj_weight), self.in_proj_bias)],
            (as_stored(self.out_proj.weight), self.out_proj.bias),
            self.num_heads,
            self.num_heads,
            dropout=self.dropout if self.training else 0.0,
        )

    def by_torch(
        self, query: Tensor, key: Tensor, value: Tensor, masks: _Masks, need_weights: bool, average: bool
    ) -> tuple[Tensor, Tensor | None]:
        """torch's own computation."""
        attn_mask, key_padding_mask, is_causal = masks
        return super().forward(
            query,
            key,
            value,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,  # type: ignore[arg-type]
            average_attn_weights=average,
            is_causal=is_causal,
        )

    def _edited(
        self, call: _ModuleCall, dropout: float, need_weights: bool, average: bool, batched: bool
    ) -> tuple[Tensor, Tensor | None]:
        """A call that observers may edit, and its weights after their edits, before dropout."""
        want = Want(rows=range(call.tensors[0].shape[2])) if need_weights else Want()
        observation = attend_wanting(
            self,
            *call.tensors,
            want=want,
            mask=call.meaning.mask,
            scores=call.meaning.scores,
            dropout=dropout,
            query_offset=0,
        )
        weights = None if observation.rows is None else observation.rows.to(observation.output.dtype)
        return self._returned(observation.output, weights, average, batched)

    def _returned(
        self, output: Tensor, weights: Tensor | None, average: bool, batched: bool, path: Path | None = None
    ) -> tuple[Tensor, Tensor | None]:
        joined = project(self._joined(output, batched), self.out_proj.weight, self.out_proj.bias, path=path)
        if weights is None:
            return joined, None
        weights = weights.mean(dim=1) if average else weights
        return joined, weights if batched else weights[0]

    def _by_head(
        self, query: Tensor, key: Tensor, value: Tensor, masks: _Masks, *, look: bool, path: Path | None = None
    ) -> _ModuleCall:
        """The attention of a call: its tensors by head, and what its masks mean."""
        heads, keys, values = self._projected(query, key, value, path)
        q_len, k_len = heads.shape[2], keys.shape[2]
        meaning = mask_reader(_NAME, self, query, key, look=look).meaning(*masks)
        keys, values = self._extra_keys(keys, values)
        return _ModuleCall((heads, keys, values), meaning.extended(keys.shape[2] - k_len, q_len, k_len))

    def _work(self, query: Tensor, key: Tensor) -> int:
        """Approximate number of multiplications of a call."""
        k_len = key.shape[-2 if self.batch_first or key.ndim == 2 else 0]
        width: int = self.embed_dim
        return 2 * ((query.numel() + key.numel()) * width + query.numel() * k_len)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor, path: Path | None) -> tuple[Tensor, Tensor, Tensor]:
        """Projections ``[batch, heads, len, head_dim]``, as views of one GEMM for each distinct input."""
        bias, one = self.in_proj_bias, self.embed_dim
        if not self._qkv_same_embed_dim:
            weights: Sequence[Tensor] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            sources: tuple[Tensor, ...] = (query, key, value)
            widths = [one, one, one]
        elif query is key and key is value:
            sources, widths = (query,), [3 * one]
            weights = (self.in_proj_weight,)
        else:
            sources, widths = ((query, key), [one, 2 * one]) if key is value else ((query, key, value), [one] * 3)
            weights = self.in_proj_weight.split(widths)
        biases = (None,) * len(sources) if bias is None else bias.split(widths)
        products = (project(*each, path=path) for each in zip(sources, weights, biases, strict=True))
        parts = [
            part for product, width in zip(products, widths, strict=True) for part in _parts(product, width // one)
        ]
        heads_query, heads_key, heads_value = map(self._split, parts)
        return heads_query, heads_key, heads_value

    def _split(self, x: Tensor) -> Tensor:
        heads = x.view(*x.shape[:-1], self.num_heads, self.head_dim)
        if heads.ndim == 3:
            return heads.transpose(0, 1)[None]
        return heads.transpose(1, 2) if self.batch_first else heads.permute(1, 2, 0, 3)

    def _joined(self, heads: Tensor, batched: bool) -> Tensor:
        if not batched:
            return heads[0].transpose(0, 1).flatten(-2)
        return (heads.transpose(1, 2) if self.batch_first else heads.permute(2, 0, 1, 3)).flatten(-2)

    def _extra_keys(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The learned key of ``add_bias_kv`` and the zero key of ``add_zero_attn``, in torch's order."""
        if self.bias_k is not None and self.bias_v is not None:
            learned = (
                bias.view(1, self.num_heads, 1, self.head_dim).expand(keys.shape[0], -1, -1, -1).to(keys.dtype)
                for bias in (self.bias_k, self.bias_v)
            )
            keys, values = (torch.cat(pair, dim=2) for pair in zip((keys, values), learned, strict=True))
        if self.add_zero_attn:
            keys, values = (functional.pad(tensor, (0, 0, 0, 1)) for tensor in (keys, values))
        return keys, values


recognise(lambda module: isinstance(module, SwappedMultiheadAttention))


def mask_reader(
    function: str, attention: SwappedMultiheadAttention, queries: Tensor, keys: Tensor, *, look: bool | None = None
) -> MaskReader:
    """Reads the masks of a call of ``attention``, or of a stack whose layers attend so; ``look`` as numbers may be read
    by default."""
    batched = queries.ndim == 3
    length = 1 if batched and attention.batch_first else 0
    return MaskReader(
        function=function,
        batched=batched,
        batch=queries.shape[1 - length] if batched else 1,
        num_heads=attention.num_heads,
        q_len=queries.shape[length],
        k_len=keys.shape[length],
        look=may_look(queries) if look is None else look,
    )


def _parts(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """Equal parts of the last axis. One ``unbind`` has one gradient to write, slices each a whole one."""
    return x.view(*x.shape[:-1], count, x.shape[-1] // count).unbind(-2) if count > 1 else (x,)


def _check_kinds(query: object, key: object, value: object) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise ShapeError.about(
                _NAME,
                name,
                must="be a tensor",
                got=type(tensor).__name__,
                then="Self-attention takes the same tensor three times.",
            )


def _check_axes(query: Tensor, key: Tensor, value: Tensor, batch_axis: int) -> bool:
    """Whether the call is batched."""
    if query.ndim not in (2, 3):
        raise ShapeError.about(
            _NAME,
            "query",
            must="have 3 axes, or 2 unbatched",
            got=f"shape {tuple(query.shape)}",
            then="Flatten what stands before [len, embed_dim] into one batch axis.",
        )
    for name, tensor in (("key", key), ("value", value)):
        if tensor.ndim != query.ndim or (query.ndim == 3 and tensor.shape[batch_axis] != query.shape[batch_axis]):
            raise ShapeError.about(
                _NAME,
                name,
                must=f"have query's axes and batch, as in {tuple(query.shape)}",
                got=f"shape {tuple(tensor.shape)}",
                then="Batch all three alike, or none; see batch_first.",
            )
    if value.shape[:-1] != key.shape[:-1]:
        raise ShapeError.about(
            _NAME,
            "value",
            must=f"have key's length, as in {tuple(key.shape)}",
            got=f"shape {tuple(value.shape)}",
            then="One value per key.",
        )
    return query.ndim == 3
