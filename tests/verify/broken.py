"""Attention functions with one plausible fault each, and the law that each breaks.

Most replace a step of the correct function in ``steps``. Faults in backward, in returned statistics, or under another
calling convention are written out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead as ch
from tests.verify.broken_cached import BROKEN_CACHED
from tests.verify.broken_calls import BROKEN_CALLS
from tests.verify.broken_limits import BROKEN_LIMITS
from tests.verify.broken_sizes import BROKEN_SIZES
from tests.verify.steps import (
    RIGHT,
    Broken,
    but,
    take_causal,
    take_drop,
    take_forbid,
    take_groups,
    take_scores,
    take_softmax,
)

__all__ = ["BROKEN", "Broken"]


# Softmax and masks ------------------------------------------------------------------------------------------------


def _unsafe(scores: Tensor) -> Tensor:
    terms = torch.exp(scores)
    return torch.nan_to_num(terms / terms.sum(dim=-1, keepdim=True))


def _zeroed_afterwards(scores: Tensor) -> Tensor:
    """Correct forward; the gradient of an empty row is NaN."""
    return torch.softmax(scores, dim=-1).nan_to_num(0.0) if scores.requires_grad else take_softmax(scores)


def _finite_fill(number: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda scores, mask: scores.masked_fill(~mask, number) if mask.dtype == torch.bool else scores + mask


def _only_first(axis: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda scores, mask: take_forbid(scores, mask.narrow(axis, 0, 1) if mask.ndim == 4 else mask)


def _last_tile_left_out(scores: Tensor) -> Tensor:
    whole = scores.shape[-1] // 64 * 64
    return (
        F.pad(take_softmax(scores[..., :whole]), (0, scores.shape[-1] - whole)) if whole > 0 else take_softmax(scores)
    )


def _tiles_not_rescaled(scores: Tensor) -> Tensor:
    """Each tile of 64 keys has its own maximum, and the tiles are summed without rescaling."""
    tiles = [torch.exp(tile - tile.amax(dim=-1, keepdim=True)) for tile in scores.split(64, dim=-1)]
    terms = torch.cat([tile.nan_to_num() for tile in tiles], dim=-1)
    return terms / terms.sum(dim=-1, keepdim=True).clamp_min(1e-30)


def _leaks_at_borders(q_len: int, k_len: int) -> Tensor:
    """The diagonal tile is one key too wide, which is visible only if another tile follows."""
    allowed = take_causal(q_len, k_len)
    for border in range(64, min(q_len + 1, k_len), 64):
        allowed[border - 1, border] = True
    return allowed


def _by_numbers(scores: Tensor, mask: Tensor) -> Tensor:
    return scores + mask.to(scores.dtype)


def _read_as_bool(scores: Tensor, mask: Tensor) -> Tensor:
    return take_forbid(scores, mask if mask.dtype == torch.bool else mask != 0.0)


def _scaled_after_masking(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """-inf times a scale that is not positive is inf, or NaN."""
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    late = replace(RIGHT, softmax=lambda scores: take_softmax(scores * factor))
    return late(query, key, value, attn_mask, is_causal=is_causal, scale=1.0, enable_gqa=enable_gqa)


def _recency(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    return take_scores(query, key, value, scale) + 0.01 * torch.arange(key.shape[2], dtype=query.dtype)


def _centred(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    return take_scores(query, key - key.mean(dim=(0, 2), keepdim=True) + 0.5, value, scale)


def _half_precision(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    return take_scores(query.bfloat16(), key.bfloat16(), value, scale).to(query.dtype)


def _packed_memory(tensor: Tensor) -> Tensor:
    """Read contiguously from the first element, ignoring strides."""
    if tensor.requires_grad or tensor.is_contiguous() or 0 in tensor.stride():
        return tensor.contiguous()
    strides = torch.empty(tensor.shape, device="meta").stride()
    fits = tensor.storage_offset() + tensor.numel() <= tensor.untyped_storage().nbytes() // tensor.element_size()
    return torch.as_strided(tensor, tensor.shape, strides, tensor.storage_offset() if fits else 0)


def _ignores_strides(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    return RIGHT(_packed_memory(query), _packed_memory(key), _packed_memory(value), **options)


# Dropout ----------------------------------------------------------------------------------------------------------


def _renormalised(weights: Tensor, p: float) -> Tensor:
    if not p:
        return weights
    surviving = weights * (torch.rand_like(weights) >= p)
    return surviving / surviving.sum(dim=-1, keepdim=True).clamp_min(1e-9)


class _ForgetfulDropout(torch.autograd.Function):
    """Draws again in backward."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, p: float) -> Tensor:
        ctx.p = p
        return take_drop(weights, p)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return take_drop(grad, ctx.p), None


def _dropped_outputs(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, **options: Any) -> Tensor:
    return take_drop(RIGHT(query, key, value, **options), dropout_p)


# Backward ---------------------------------------------------------------------------------------------------------


class _BadSoftmax(torch.autograd.Function):
    """Correct forward; backward ignores that the weights of a row sum to 1."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        weights = take_softmax(scores)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.saved_tensors[0] * grad  # type: ignore[no-any-return]


def _forward_of_one_backward_of_other(
    right: Callable[..., Tensor], wrong: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        with torch.no_grad():
            output = right(query, key, value, **options)
        bent = wrong(query, key, value, **options)
        return bent + (output - bent).detach() if bent.requires_grad else output

    # The parameters of torch's function, so that every argument is passed.
    attention.__signature__ = inspect.signature(RIGHT)  # type: ignore[attr-defined]
    return attention


def _sees_next(q_len: int, k_len: int) -> Tensor:
    return torch.ones(q_len, k_len, dtype=torch.bool).tril(1)


class _FirstOfGroup(torch.autograd.Function):
    """Repeats heads; backward returns the gradient of the first of each group instead of the sum."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, heads: int) -> Tensor:
        ctx.group = heads // tensor.shape[1]
        return take_groups(tensor, heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[:, :: ctx.group], None


# Caches, writes to inputs, returned statistics ----------------------------------------------------------------------


class _StaleCache:
    """Caches keys in a buffer and copies the new ones except the newest."""

    def __init__(self) -> None:
        self.place, self.cached = 0, torch.empty(0)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if query.shape[2] == 1 and key.shape[2] > 1 and key.data_ptr() == self.place:
            length = self.cached.shape[2]
            key = torch.cat([self.cached, key[:, :, length:-1], self.cached[:, :, -1:]], dim=2)[:, :, : key.shape[2]]
        else:
            self.place = key.data_ptr()
        self.cached = key.detach().clone()
        return RIGHT(query, key, value, **options)


def _decode_without_mask(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    if query.shape[2] == 1:
        options.pop("attn_mask", None)
    return RIGHT(query, key, value, **options)


def _scales_in_place(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None, **options: Any) -> Tensor:
    if query.requires_grad:
        return RIGHT(query, key, value, scale=scale, **options)
    query.mul_(query.shape[-1] ** -0.5 if scale is None else scale)
    return RIGHT(query, key, value, scale=1.0, **options)


def _noisy(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    output = RIGHT(query, key, value, **options)
    return output * (1.0 + 2e-7 * torch.randn(output.shape, generator=_ENDLESS))


_ENDLESS = torch.Generator().manual_seed(0)


def _with_lse(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Correct output; ``change`` computes the log-sum-exp from the correct one and the scores."""

    def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        scores = take_scores(query, key, value, None)
        scores = scores if attn_mask is None else take_forbid(scores, attn_mask)
        return RIGHT(query, key, value, attn_mask), change(torch.logsumexp(scores, dim=-1), scores)

    return attention


def _with_weights(change: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        scores = take_scores(query, key, value, None)
        scores = scores if attn_mask is None else take_forbid(scores, attn_mask)
        return RIGHT(query, key, value, attn_mask), change(take_softmax(scores))

    return attention


# The convention of clearhead.attention ------------------------------------------------------------------------------


def _observed(change: Callable[[ch.Observation], dict[str, Tensor]]) -> Callable[..., ch.Observation]:
    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> ch.Observation:
        want = ch.Want(entropy=True, received=True)
        observation = ch.observe_attention(query, key, value, want=want, backend="reference", **options)
        return replace(observation, **change(observation))

    return attention


def _other_mask(change: Callable[[ch.Mask], ch.Mask]) -> Callable[..., Tensor]:
    """The correct attention under a changed mask; parts of combined masks are changed too."""

    def walked(mask: ch.Mask) -> ch.Mask:
        copy = change(mask)
        for name in copy.fields:
            part = getattr(copy, name)
            if isinstance(part, ch.Mask):
                copy.__dict__[name] = walked(part)
        return copy

    def attention(query: Tensor, key: Tensor, value: Tensor, mask: ch.Mask | None = None, **options: Any) -> Tensor:
        changed = None if mask is None else walked(mask.mapped(lambda tensor: tensor))
        return ch.attention(query, key, value, mask=changed, backend="reference", **options)

    return attention


def _wider(mask: ch.Mask) -> ch.Mask:
    return ch.Window(mask.before + 1, mask.after) if isinstance(mask, ch.Window) else mask


def _longer(mask: ch.Mask) -> ch.Mask:
    if isinstance(mask, ch.Padding):
        return ch.Padding(torch.where(mask.lengths < mask.lengths.amax(), mask.lengths + 1, mask.lengths))
    return mask


def _one_document_less(mask: ch.Mask) -> ch.Mask:
    return (
        ch.Documents(ids=mask.ids.clamp(max=max(0, int(mask.ids.max()) - 1)))
        if isinstance(mask, ch.Documents)
        else mask
    )


def _at_the_front(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    if options.get("query_offset") is not None:
        options["query_offset"] = 0
    return ch.attention(query, key, value, backend="reference", **options)


# The convention of torch.nn.MultiheadAttention ----------------------------------------------------------------------


class _DropsAlways(torch.nn.MultiheadAttention):
    def forward(self, *inputs: Any, **options: Any) -> Any:
        was = self.training
        self.train()
        try:
            return super().forward(*inputs, **options)
        finally:
            self.train(was)


class _KeyIsValue(torch.nn.MultiheadAttention):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        return super().forward(query, value, key, **options)


class _PaddingKept(torch.nn.MultiheadAttention):
    def forward(self, *inputs: Any, key_padding_mask: Tensor | None = None, **options: Any) -> Any:
        other = None if key_padding_mask is None else ~key_padding_mask
        return super().forward(*inputs, key_padding_mask=other, **options)


_LN_2 = 0.6931471805599453

BROKEN: dict[str, Broken] = {
    "inverted polarity": Broken(
        but(forbid=lambda s, m: take_forbid(s, ~m if m.dtype == torch.bool else m)), "mask polarity"
    ),
    "mask ignored": Broken(but(forbid=lambda s, m: s, clean=lambda q, t, m: t), "mask polarity"),
    "bool mask added as a number": Broken(but(forbid=_by_numbers), "mask polarity"),
    "float mask read as bool": Broken(but(forbid=_read_as_bool), "mask polarity"),
    "mask of the first batch member for all": Broken(but(forbid=_only_first(0)), "masks"),
    "mask of the first head for all": Broken(but(forbid=_only_first(1)), "masks"),
    "causal without the diagonal": Broken(but(causal=lambda q, k: take_causal(q, k).tril(-1)), "causal flag"),
    "bottom-right for top-left": Broken(
        but(causal=lambda q, k: torch.ones(q, k, dtype=torch.bool).tril(k - q)), "causal flag"
    ),
    "causal only while square": Broken(
        but(causal=lambda q, k: take_causal(q, k) if q == k else torch.ones(q, k, dtype=torch.bool)), "causal flag"
    ),
    "grouped heads repeated in the wrong order": Broken(
        but(groups=lambda t, heads: t.repeat(1, heads // t.shape[1], 1, 1)), "grouped heads"
    ),
    "first head of a group takes all gradient": Broken(but(groups=_FirstOfGroup.apply), "grouped heads"),
    "scale by the width of values": Broken(
        but(scores=lambda q, k, v, s: take_scores(q, k, v, v.shape[-1] ** -0.5 if s is None else s)), "scale"
    ),
    "scale by the head width without a root": Broken(
        but(scores=lambda q, k, v, s: take_scores(q, k, v, 1.0 / q.shape[-1] if s is None else s)), "default scale"
    ),
    "scale ignored": Broken(but(scores=lambda q, k, v, s: take_scores(q, k, v, None)), "scale"),
    "scale of 0 taken for none": Broken(but(scores=lambda q, k, v, s: take_scores(q, k, v, s or None)), "scale"),
    "scaled after masking": Broken(_scaled_after_masking, "scale under a mask"),
    "softmax over queries": Broken(but(softmax=lambda s: torch.softmax(s, dim=-2).nan_to_num()), "output"),
    "softmax without its maximum": Broken(but(softmax=_unsafe), "huge scores"),
    "last tile left out": Broken(but(softmax=_last_tile_left_out), "lengths"),
    "tiles not rescaled": Broken(but(softmax=_tiles_not_rescaled), "lengths"),
    "uniform rows for empty ones": Broken(but(forbid=_finite_fill(torch.finfo(torch.float32).min)), "empty rows"),
    "NaN for empty rows": Broken(but(softmax=lambda s: torch.softmax(s, dim=-1)), "empty rows"),
    "NaN gradients from empty rows": Broken(but(softmax=_zeroed_afterwards), "empty rows"),
    "forbids with -10000": Broken(but(forbid=_finite_fill(-1e4)), "huge scores under a mask"),
    "bfloat16 scores": Broken(but(scores=_half_precision), "output"),
    "bfloat16 sums": Broken(but(mix=lambda w, v: (w.bfloat16() @ v.bfloat16()).to(v.dtype)), "output"),
    "values cut to the key's width": Broken(
        lambda query, key, value, **o: F.pad(
            RIGHT(query, key, value[..., : key.shape[-1]], **o), (0, max(0, value.shape[-1] - key.shape[-1]))
        ),
        "value width",
    ),
    "output in float64": Broken(
        lambda query, key, value, **o: RIGHT(query, key, value, **o).double(), "shape and dtype"
    ),
    "output with heads last": Broken(
        lambda query, key, value, **o: RIGHT(query, key, value, **o).mT, "shape and dtype"
    ),
    "strides ignored": Broken(_ignores_strides, "layouts"),
    "keys centred over the batch": Broken(but(scores=_centred), "apart"),
    "a bias towards late keys": Broken(but(scores=_recency), "key order"),
    "noise": Broken(_noisy, "determinism"),
    "query scaled in place": Broken(_scales_in_place, "inputs unchanged"),
    "NaN passes the mask": Broken(but(clean=lambda q, t, m: t, mix=torch.matmul), "containment"),
    "NaN passes the mask in backward": Broken(
        _forward_of_one_backward_of_other(RIGHT, but(clean=lambda q, t, m: t, mix=torch.matmul)),
        "containment in gradients",
    ),
    "softmax backward without its sum": Broken(but(softmax=_BadSoftmax.apply), "gradients"),
    "gradients without the scale": Broken(
        _forward_of_one_backward_of_other(RIGHT, but(scores=lambda q, k, v, s: take_scores(q, k, v, 1.0))), "gradients"
    ),
    "leak only in gradients": Broken(
        _forward_of_one_backward_of_other(RIGHT, but(causal=_sees_next)), "no leak in gradients"
    ),
    "leak only across tile borders": Broken(but(causal=_leaks_at_borders), "no leak from the future"),
    "dropout while it is off": Broken(but(drop=lambda w, p: take_drop(w, p or 0.1)), "dropout off"),
    "dropout without rescaling": Broken(but(drop=lambda w, p: take_drop(w, p) * (1.0 - p)), "dropout"),
    "dropout keeps with probability p": Broken(but(drop=lambda w, p: take_drop(w, 1.0 - p) if p else w), "dropout"),
    "dropout renormalised": Broken(but(drop=_renormalised), "dropout"),
    "dropout alike in every head": Broken(
        but(drop=lambda w, p: w * (torch.rand_like(w[:, :1]) >= p) / (1.0 - p) if p else w), "dropout"
    ),
    "dropout of whole keys": Broken(
        but(drop=lambda w, p: w * (torch.rand_like(w[:, :, :1]) >= p) / (1.0 - p) if p else w), "dropout"
    ),
    "dropout of outputs": Broken(_dropped_outputs, "dropout"),
    "another dropout in backward": Broken(
        but(drop=lambda w, p: _ForgetfulDropout.apply(w, p) if p else w), "dropout in backward"
    ),
    "stale cache slot": Broken(_StaleCache(), "decode equals prefill"),
    "decoding ignores the mask": Broken(_decode_without_mask, "fixed cache"),
    "lse larger by ln 2": Broken(_with_lse(lambda lse, scores: lse + _LN_2), "log-sum-exp"),
    "lse in base 2": Broken(_with_lse(lambda lse, scores: lse / _LN_2), "log-sum-exp"),
    "lse without its maximum": Broken(_with_lse(lambda lse, scores: lse - scores.amax(dim=-1)), "split and merged"),
    "weights before normalisation": Broken(_with_weights(lambda w: w / w.amax(dim=-1, keepdim=True)), "weights"),
    "weights averaged over heads": Broken(_with_weights(lambda w: w.mean(dim=1, keepdim=True)), "weights"),
    "weights by key": Broken(_with_weights(lambda w: w.flip(-1)), "weights"),
    "entropy in bits": Broken(
        _observed(lambda observation: {"entropy": observation.entropy / _LN_2}), "entropy", "clearhead"
    ),
    "received as a mean": Broken(
        _observed(lambda observation: {"received": observation.received / observation.output.shape[2]}),
        "received",
        "clearhead",
    ),
    "window off by one": Broken(_other_mask(_wider), "masks", "clearhead"),
    "padding attended": Broken(_other_mask(_longer), "masks", "clearhead"),
    "last documents run together": Broken(_other_mask(_one_document_less), "packed equals padded", "clearhead"),
    "top-left for bottom-right": Broken(_at_the_front, "causal alignment", "clearhead"),
    "a module that drops at eval": Broken(_DropsAlways, "dropout off", "mha"),
    "a module that takes keys for values": Broken(_KeyIsValue, "output", "mha"),
    "a module that attends to padding": Broken(_PaddingKept, "masks", "mha"),
    **BROKEN_CALLS,
    **BROKEN_LIMITS,
    **BROKEN_CACHED,
    **BROKEN_SIZES,
}
"""Every broken function by its fault."""
