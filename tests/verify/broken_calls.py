"""Attention functions with faults in one kind of call, in one gradient, or caused by an earlier call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import clearhead as ch
from tests.verify.steps import RIGHT, Broken, Mix, but, take_drop, take_forbid, take_scores

__all__ = ["BROKEN_CALLS", "Attention", "as_torch_s", "only_where"]

Attention = Callable[..., Tensor]


def as_torch_s(fn: Attention) -> Attention:
    """``fn`` with the parameters of torch's function, so that every argument is passed."""
    fn.__signature__ = inspect.signature(RIGHT)  # type: ignore[attr-defined]
    return fn


def only_where(condition: Callable[..., bool], wrong: Attention) -> Attention:
    """The wrong attention if a condition on query, key, value and options holds, else the correct one."""

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return (wrong if condition(query, key, value, options) else RIGHT)(query, key, value, **options)

    return as_torch_s(attention)


# Float masks ------------------------------------------------------------------------------------------------------


def _float_mask_scaled(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """``scale * (query @ key^T + mask)``."""
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask * query.shape[-1] ** -0.5
    return RIGHT(query, key, value, attn_mask, is_causal=is_causal)


def _binarised(scores: Tensor, mask: Tensor) -> Tensor:
    return take_forbid(scores, mask if mask.dtype == torch.bool else mask == 0.0)


def _bool_threshold(scores: Tensor, mask: Tensor) -> Tensor:
    return take_forbid(scores, mask if mask.dtype == torch.bool else mask > -1e4)


def _detached_mask(scores: Tensor, mask: Tensor) -> Tensor:
    return take_forbid(scores, mask.detach())


# Sizes ------------------------------------------------------------------------------------------------------------


def _cut_keys(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    if options.get("attn_mask") is not None:
        return RIGHT(query, key, value, **options)
    return RIGHT(query, key[:, :, :1024], value[:, :, :1024], **options)


def _cut_width(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    return take_scores(query[..., :64], key[..., :64], value, factor)


def _one_group_in_decode(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """With one query, all sequences use the keys of the first, as if the batch stride were ignored."""
    if query.shape[2] == 1 and key.shape[1] != query.shape[1]:
        key, value = key[:1].expand_as(key), value[:1].expand_as(value)
    return RIGHT(query, key, value, **options)


# Score rules, by the convention of clearhead.attention ------------------------------------------------------------


def _without_rule(kind: type[ch.ScoreRule]) -> Callable[..., Tensor]:
    def attention(query: Tensor, key: Tensor, value: Tensor, scores: Any = (), **options: Any) -> Tensor:
        remaining = tuple(rule for rule in scores if not isinstance(rule, kind))
        return ch.attention(query, key, value, scores=remaining, backend="reference", **options)

    return attention


def _rules_at_the_front(query: Tensor, key: Tensor, value: Tensor, scores: Any = (), **options: Any) -> Tensor:
    if scores and options.get("query_offset") is not None and options.get("mask") is None:
        options["query_offset"] = 0
    return ch.attention(query, key, value, scores=scores, backend="reference", **options)


def _rules_detached(query: Tensor, key: Tensor, value: Tensor, scores: Any = (), **options: Any) -> Tensor:
    detached = tuple(rule.mapped(torch.Tensor.detach) for rule in scores)
    return ch.attention(query, key, value, scores=detached, backend="reference", **options)


# Backward ---------------------------------------------------------------------------------------------------------


class _Handed(torch.autograd.Function):
    """Identity; backward changes the gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return output.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.change(grad), None


def _bent(change: Callable[[Tensor], Tensor]) -> Attention:
    return as_torch_s(lambda query, key, value, **options: _Handed.apply(RIGHT(query, key, value, **options), change))


def _dense_grad(grad: Tensor) -> Tensor:
    """Read contiguously from the first element, ignoring strides, and wrap at the end of the storage."""
    elements = grad.untyped_storage().nbytes() // grad.element_size()
    flat = torch.as_strided(grad, (elements,), (1,), 0)
    return flat[torch.arange(grad.numel()) % elements].view(grad.shape)


def _writing_grad(grad: Tensor) -> Tensor:
    copy = grad.clone()
    grad.mul_(0.5)
    return copy


def _zero_alone(place: int) -> Attention:
    """The gradient of one input is 0 if no other input requires one."""

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        output = RIGHT(query, key, value, **options)
        wants = [tensor.requires_grad for tensor in (query, key, value)]
        return _bent(torch.zeros_like)(query, key, value, **options) if wants[place] and sum(wants) == 1 else output

    return as_torch_s(attention)


def _lost_without(place: int) -> Attention:
    """The output has no graph if one input alone requires a gradient."""

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        wants = [tensor.requires_grad for tensor in (query, key, value)]
        if wants[place] and sum(wants) == 1:
            return RIGHT(query.detach(), key.detach(), value.detach(), **options)
        return RIGHT(query, key, value, **options)

    return as_torch_s(attention)


class _Spent(torch.autograd.Function):
    """Backward writes to a saved tensor."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.factor = torch.ones(())
        return output.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        result = grad * ctx.factor
        ctx.factor.mul_(0.5)
        return result


def _once_right(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    return _Spent.apply(RIGHT(query, key, value, **options))  # type: ignore[no-any-return]


# Between calls ----------------------------------------------------------------------------------------------------


def _handing_out_one_buffer() -> Attention:
    """The output is a buffer that the next call of the same shape overwrites."""
    buffers: dict[tuple[int, ...], Tensor] = {}

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        output = RIGHT(query, key, value, **options)
        if output.requires_grad:
            return output
        place = buffers.setdefault(tuple(output.shape), torch.empty_like(output))
        return place.copy_(output)

    return as_torch_s(attention)


def _leaves_changed(change: Callable[[], Any]) -> Attention:
    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        output = RIGHT(query, key, value, **options)
        change()
        return output

    return as_torch_s(attention)


def _same_dropout(weights: Tensor, p: float) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return take_drop(weights, p)


def _same_dropout_within_seed(weights: Tensor, p: float) -> Tensor:
    with torch.random.fork_rng():
        return take_drop(weights, p)


# Kinds of calls ---------------------------------------------------------------------------------------------------


def _rounding_unrecorded(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Runs in bfloat16 if gradients are disabled."""
    if torch.is_grad_enabled():
        return RIGHT(query, key, value, **options)
    return RIGHT(query.bfloat16(), key.bfloat16(), value.bfloat16(), **options).to(query.dtype)


def _dropless_causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> Tensor:
    return RIGHT(query, key, value, attn_mask, dropout_p=0.0 if is_causal else dropout_p, is_causal=is_causal)


def _hides_nan(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    return torch.nan_to_num(RIGHT(query, key, value, **options))


class _FiniteGradient(torch.autograd.Function):
    """The identity, whose gradient is 0 in place of NaN."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.nan_to_num(grads[0])


def _hides_nan_in_gradients(place: int) -> Callable[..., Any]:
    def attention(*tensors: Tensor, **options: Any) -> Tensor:
        inputs = list(tensors)
        inputs[place] = _FiniteGradient.apply(inputs[place])  # type: ignore[no-untyped-call]
        return RIGHT(*inputs, **options)

    return attention


def _nan_for_infinity(place: int) -> Callable[..., Any]:
    def attention(*tensors: Tensor, **options: Any) -> Tensor:
        inputs = list(tensors)
        inputs[place] = inputs[place].masked_fill(inputs[place].isinf(), torch.nan)
        return RIGHT(*inputs, **options)

    return attention


def _largest_for_infinity(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    most = torch.finfo(value.dtype).max
    return RIGHT(query, key, value.clamp(-most, most), **options)


def _adds_to_nan(scores: Tensor, mask: Tensor) -> Tensor:
    """Adds -inf, and NaN plus -inf is NaN."""
    return (
        scores + torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, -torch.inf)
        if (mask.dtype == torch.bool)
        else scores + mask
    )


def _spreads_over_batch(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Scores are shifted by the maximum of the whole batch."""
    output = RIGHT(query, key, value, **options)
    return output + 0.0 * key.detach().amax()


class _MixedPlainlyBackward(Mix):
    """In backward, 0 times NaN is NaN."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        weights, value = ctx.saved_tensors
        return grads[0] @ value.mT, weights.mT @ grads[0]


def _clips_gradients_together(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """The gradient is divided by its norm over the batch if that is large."""
    output = RIGHT(query, key, value, **options)
    if output.requires_grad:
        output.register_hook(lambda grad: grad / (grad.norm() / 1e6).clamp_min(1.0))
    return output


def _symmetric_when_shared(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """If query and key are one tensor, its gradient is that of the query alone."""
    return RIGHT(query, key.detach() if key is query else key, value, **options)


# Under one kind of call only ----------------------------------------------------------------------------------------


def _causal(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
    return bool(options.get("is_causal"))


def _masked(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
    return options.get("attn_mask") is not None


_WRONG_GROUPS = but(groups=lambda tensor, heads: tensor.repeat(1, heads // tensor.shape[1], 1, 1))


def _narrow_values(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Channels of a value beyond the key's are lost."""
    lost = torch.arange(value.shape[-1]) >= key.shape[-1]
    return RIGHT(query, key, value.masked_fill(lost, 0.0), **options)


def _packed_if(place: int) -> Attention:
    """The strides of one of query, key and value are ignored."""

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        tensors = [query, key, value]
        odd = [not tensor.is_contiguous() for tensor in tensors]
        if odd[place] and sum(odd) == 1 and not query.requires_grad:
            strided = tensors[place]
            elements = strided.untyped_storage().nbytes() // strided.element_size() - strided.storage_offset()
            flat = torch.as_strided(strided, (elements,), (1,), strided.storage_offset())
            tensors[place] = flat[torch.arange(strided.numel()) % elements].view(strided.shape)
        return RIGHT(tensors[0], tensors[1], tensors[2], **options)

    return as_torch_s(attention)


BROKEN_CALLS: dict[str, Broken] = {
    "float mask scaled with the scores": Broken(_float_mask_scaled, "float mask"),
    "float mask that forbids all but 0": Broken(but(forbid=_binarised), "float mask"),
    "float mask that forbids what is very small, and adds nothing": Broken(but(forbid=_bool_threshold), "float mask"),
    "float mask without a gradient": Broken(but(forbid=_detached_mask), "float mask in gradients"),
    "grouped heads wrong under a causal flag": Broken(only_where(_causal, _WRONG_GROUPS), "grouped heads"),
    "grouped heads wrong under a mask": Broken(only_where(_masked, _WRONG_GROUPS), "grouped heads"),
    "grouped heads of the first of the batch in decode": Broken(_one_group_in_decode, "grouped heads"),
    "wide values cut under a causal flag": Broken(only_where(_causal, _narrow_values), "value width"),
    "wide values cut under a mask": Broken(only_where(_masked, _narrow_values), "value width"),
    "Alibi ignored": Broken(_without_rule(ch.Alibi), "alibi", "clearhead"),
    "RelativeBias ignored": Broken(_without_rule(ch.RelativeBias), "relative bias", "clearhead"),
    "SoftCap ignored": Broken(_without_rule(ch.SoftCap), "soft cap", "clearhead"),
    "Sink ignored": Broken(_without_rule(ch.Sink), "sink", "clearhead"),
    "Alibi from the first row on": Broken(_rules_at_the_front, "alibi", "clearhead"),
    "rules without a gradient": Broken(_rules_detached, "relative bias", "clearhead"),
    "keys beyond 1024 left out": Broken(_cut_keys, "long and wide"),
    "heads cut to 64": Broken(but(scores=_cut_width), "long and wide"),
    "strides of the gradient ignored": Broken(_bent(_dense_grad), "gradient layouts"),
    "gradient written to": Broken(_bent(_writing_grad), "gradient layouts"),
    **{
        f"no gradient where only {name} wants one": Broken(_zero_alone(place), "gradients alone")
        for place, name in enumerate(("query", "key", "value"))
    },
    "no graph where only value wants a gradient": Broken(_lost_without(2), "gradients alone"),
    "second backward wrong": Broken(_once_right, "backward twice"),
    "output in one buffer": Broken(_handing_out_one_buffer(), "earlier results"),
    "strides of the key alone ignored": Broken(_packed_if(1), "layouts"),
    "strides of the value alone ignored": Broken(_packed_if(2), "layouts"),
    "bfloat16 under no_grad": Broken(_rounding_unrecorded, "unrecorded"),
    "dropout alike at every call": Broken(but(drop=_same_dropout), "dropout draws"),
    "dropout alike until the next seed": Broken(but(drop=_same_dropout_within_seed), "dropout draws"),
    "no dropout under a causal flag": Broken(_dropless_causal, "dropout under a mask"),
    "NaN hidden": Broken(_hides_nan, "NaN is shown"),
    **{
        f"NaN hidden in the gradient of {name}": Broken(_hides_nan_in_gradients(place), "NaN is shown in gradients")
        for place, name in enumerate(("query", "key", "value"))
    },
    "NaN for an infinite key": Broken(_nan_for_infinity(1), "infinity"),
    "NaN for an infinite value": Broken(_nan_for_infinity(2), "infinity"),
    "infinite values clamped": Broken(_largest_for_infinity, "infinity"),
    "NaN of a later value reaches earlier rows": Broken(but(mix=torch.matmul), "NaN is not spread"),
    "NaN of a later key reaches earlier rows": Broken(but(forbid=_adds_to_nan), "NaN is not spread"),
    "NaN over the batch": Broken(_spreads_over_batch, "NaN is not spread"),
    "NaN in a gradient reaches later values": Broken(
        but(mix=_MixedPlainlyBackward.apply), "NaN is not spread in gradients"
    ),
    "NaN that arrives reaches the batch": Broken(_clips_gradients_together, "NaN is not spread in gradients"),
    "half the gradient where query is key": Broken(_symmetric_when_shared, "one tensor"),
    "gradients switched off": Broken(_leaves_changed(lambda: torch.set_grad_enabled(False)), "process state"),
    "default dtype changed": Broken(_leaves_changed(lambda: torch.set_default_dtype(torch.float64)), "process state"),
    "determinism switched on": Broken(
        _leaves_changed(lambda: torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())),
        "process state",
    ),
    "threads changed": Broken(
        _leaves_changed(lambda: torch.set_num_threads(torch.get_num_threads() + 1)), "process state"
    ),
}
"""Every one of these by what is wrong with it."""
