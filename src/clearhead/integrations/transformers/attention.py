"""The attention interface of Hugging Face transformers, answered by ``attention``."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from clearhead.choices import is_invariant
from clearhead.errors import UnsupportedError
from clearhead.functional.paged import attend_to_pages
from clearhead.int8_rows import is_quantized
from clearhead.integrations.torch.attention_weights import WeightedCall, with_weights
from clearhead.integrations.torch.masks import may_look
from clearhead.integrations.torch.polarity import from_additive
from clearhead.integrations.transformers.deferred_tensor import RowsTensor
from clearhead.integrations.transformers.masks import MaskTensor, mask_of_tensor
from clearhead.integrations.transformers.paged import PagesTensor
from clearhead.masks import Causal, Dense, Mask
from clearhead.masks.parts import band_of
from clearhead.scores import DenseBias, RelativeBias, ScoreRule, Sink, SoftCap
from clearhead.shapes import Float
from clearhead.statistics import Want
from clearhead.tensors import without_overlap
from clearhead.torch_private import outputs_collected, supports_sdpa
from clearhead.watch import attend, attend_wanting, edited, watched

__all__ = ["NAME", "attend_for", "is_causal_alone", "own_scale", "planned", "scale_of", "weights_wanted"]

#: What transformers knows this implementation by.
NAME: Final = "clearhead"
#: Values that some models pass in place of a mask, for kernels of their own.
_OWN_KERNELS: Final = ("indices", "block_indices", "sinks", "cache")
_MODELS: Final = "transformers.models."
#: Attention whose ``position_bias`` is one number for each distance and head.
_BY_DISTANCE: Final = ("T5Attention", "MT5Attention", "UMT5Attention")


def attend_for(
    module: nn.Module,
    query: Float[Tensor, "batch heads q_len head_dim"],
    key: Float[Tensor, "batch kv_heads k_len head_dim"],
    value: Float[Tensor, "batch kv_heads k_len value_dim"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Float[Tensor, "*one heads q_len k_len"] | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, " heads"] | None = None,
    output_attentions: bool | None = None,
    **others: Any,
) -> tuple[Float[Tensor, "batch q_len heads value_dim"], Float[Tensor, "batch heads q_len k_len"] | None]:
    """transformers' attention interface, for the attention ``module``.

    Args:
        module: watchers know it by this.
        query: queries, positions already rotated in.
        key: keys, from the cache too.
        value: values, from the cache too.
        attention_mask: a ``MaskTensor``; or ``[batch | 1, heads | 1, q_len, k_len]``, bool where ``True`` allows, or
            float, which is added to scores; None allows everything, or is causal as ``is_causal`` says.
        dropout: probability with which a weight is dropped.
        scaling: factor on ``query @ key^T``.
        is_causal: read only without a mask; by default what the module says of itself.
        position_bias: ``[1, heads, q_len, k_len]``, added to scaled scores.
        softcap: cap of the scores, ``cap * tanh(score / cap)``.
        s_aux: one logit per head that joins the softmax and attends to nothing (a sink).
        output_attentions: whether to return the weights; transformers may also collect them around the call.
        **others: what does not change attention, windows among them, which are in the mask.

    Returns:
        The output, and the weights in the query's dtype where they are asked for, else None. As in eager attention the
        weights have gradients, are those after dropout in training, and leave a sink's weight out. A row that may
        attend to nothing has weights 0.

    Raises:
        UnsupportedError: something needs a kernel of the model's own.
    """
    for name in _OWN_KERNELS:
        if others.get(name) is not None:
            raise UnsupportedError.about(
                "clearhead attention",
                name,
                must="be absent, as it needs a kernel made for it",
                got=f"{name} from {type(module).__name__}",
                then="Run this model with eager attention.",
            )
    if isinstance(key, PagesTensor) and isinstance(value, PagesTensor):
        output = None
        if position_bias is None and dropout == 0.0 and not watched() and not edited():
            causal = is_causal_alone(module) if is_causal is None else is_causal
            scaled = own_scale(module, query.shape[-1]) if scaling is None else scaling
            output = _over_pages(query, key, value, attention_mask, causal, _simple_rules(softcap, s_aux), scaled)
        if output is not None:
            return output, None
        key, value = key.elements(), value.elements()
    weighted = output_attentions or weights_wanted()
    if isinstance(key, RowsTensor) and isinstance(value, RowsTensor) and query.dtype is key.dtype and not weighted:
        key, value = key.rows, value.rows
    else:
        query, key, value = _in_one_dtype(query, key, value)
    scaling, causal = own_scale(module, query.shape[-1]) if scaling is None else scaling, False
    if attention_mask is None:
        causal = query.shape[2] > 1 and (is_causal_alone(module) if is_causal is None else is_causal)
    rules: list[ScoreRule] = [] if softcap is None else [SoftCap(softcap)]
    if s_aux is not None:
        rules.append(Sink(s_aux.reshape(-1)))
    if weighted:
        bias = () if position_bias is None else (DenseBias(position_bias),)
        call = WeightedCall(query=query, key=key, value=value, scores=bias, dropout=dropout)
        # The formula reads tables, the kernels and observers read what they mean.
        tables = call.takes_formula and not watched()
        options = _options(
            module, query, key, attention_mask, None if tables else position_bias, scale=scaling, causal=causal,
            rules=[*bias, *rules] if tables else rules, dropout=dropout,
        )  # fmt: skip
        if tables and options["mask"] is not None and isinstance(attention_mask, MaskTensor):
            # All layers share one.
            options["table"] = attention_mask.opened()
        return _weighted(module, replace(call, **options))
    plain = None
    simple = softcap is None and s_aux is None and dropout == 0.0 and not is_quantized(key)
    if simple and _is_small(query, key, causal) and not edited():
        plain = _by_torch(query, key, value, attention_mask, position_bias, scaling, causal)
    if plain is not None and not watched():
        return plain, None
    output = planned(
        module, query, key, value, attention_mask, position_bias, rules=_simple_rules(softcap, s_aux), scale=scaling,
        causal=causal, dropout=dropout,
    )  # fmt: skip
    # Observers see the same attention; the output is bitwise identical to an unobserved one.
    return output if plain is None else plain, None


def _simple_rules(softcap: float | None, s_aux: Tensor | None) -> list[ScoreRule]:
    rules: list[ScoreRule] = [] if softcap is None else [SoftCap(softcap)]
    return rules if s_aux is None else [*rules, Sink(s_aux.reshape(-1))]


def _over_pages(
    query: Tensor,
    key: PagesTensor,
    value: PagesTensor,
    attention_mask: Tensor | None,
    causal: bool,
    rules: Sequence[ScoreRule],
    scale: float | None,
) -> Float[Tensor, "batch q_len heads value_dim"] | None:
    """Attention that reads a paged cache where it is; None if the mask is no band or the dtype is another one."""
    q_len, k_len = query.shape[2], key.shape[2]
    mask: Mask | None = None
    if isinstance(attention_mask, MaskTensor):
        mask = attention_mask.meaning()
        if mask is not None and (band_of(mask) is None or attention_mask.query_offset != k_len - q_len):
            return None
    elif attention_mask is not None or (causal and 1 < q_len < k_len):
        return None
    elif causal and q_len > 1:
        mask = Causal()
    if query.dtype is not key.dtype or query.shape[0] != key.shape[0]:
        return None
    tensors = (query, key.pages, value.pages)
    (output,) = attend_to_pages(NAME, tensors, key.table, mask=mask, scores=tuple(rules), scale=scale)
    return output.transpose(1, 2).contiguous()


def planned(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position_bias: Tensor | None = None,
    *,
    rules: Sequence[ScoreRule],
    scale: float | None,
    causal: bool,
    dropout: float,
) -> Float[Tensor, "batch q_len heads value_dim"]:
    """``attention`` of any size, as observers see it, with the arguments of ``attend_for``."""
    if isinstance(key, RowsTensor) and isinstance(value, RowsTensor):
        key, value = key.rows, value.rows
    options = _options(
        module, query, key, attention_mask, position_bias, rules=rules, scale=scale, causal=causal, dropout=dropout
    )
    # Without an offset the executor recognises plain calls; observers want to know where they are.
    aligned = options["query_offset"] == 0 and query.shape[2] == key.shape[2]
    positioned = options["mask"] is not None or any(rule.position_dependent for rule in options["scores"])
    if not watched() and (aligned or not positioned):
        options["query_offset"] = None
    return attend(module, query, key, value, **options).transpose(1, 2).contiguous()


def _options(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    position_bias: Tensor | None,
    *,
    rules: Sequence[ScoreRule],
    scale: float | None,
    causal: bool,
    dropout: float,
) -> dict[str, Any]:
    """The keyword arguments of ``attention`` for a call of ``attend_for``."""
    if attention_mask is None:
        meaning: tuple[Mask | None, int | None, list[ScoreRule]] = (Causal() if causal else None, 0, [])
    else:
        meaning = _meaning(attention_mask)
    mask, offset, biases = meaning
    return {
        "mask": mask,
        "scores": (*_rules(module, position_bias, offset), *biases, *rules),
        "scale": scale_of(scale, query.shape[-1]),
        "dropout": dropout,
        "query_offset": offset,
    }


def _weighted(
    module: nn.Module, call: WeightedCall
) -> tuple[Float[Tensor, "batch q_len heads value_dim"], Float[Tensor, "batch heads q_len k_len"]]:
    """Output and weights of a call; where an observer edits it, the weights after its edits and before dropout."""
    if watched():
        tensors = (call.query, call.key, call.value)
        options: dict[str, Any] = {
            name: getattr(call, name) for name in ("mask", "scores", "scale", "dropout", "query_offset")
        }
        if edited():
            want = Want(rows=torch.arange(call.query.shape[2]))
            observed = attend_wanting(module, *tensors, want=want, **options)
            assert observed.rows is not None
            return observed.output.transpose(1, 2).contiguous(), observed.rows.to(call.query.dtype)
        # Observers that edit nothing see the same attention beside the call.
        attend(module, *tensors, **{**options, "dropout": 0.0})
    output, weights = with_weights(call)
    return output.transpose(1, 2).contiguous(), weights


#: Multiplications of a call, and elements of a mask, up to which torch's function costs less than choosing a backend.
_SMALL_WORK: Final = 2**20
_SMALL_TABLE: Final = 2**16


def _is_small(query: Tensor, key: Tensor, causal: bool) -> bool:
    """Whether torch's function is as fast, and means the same."""
    if torch.compiler.is_compiling() or is_invariant() or not query.is_cpu:
        return False
    if causal and query.shape[2] != key.shape[2]:
        return False
    return query.numel() * key.shape[2] <= _SMALL_WORK and len(query) * query.shape[2] * key.shape[2] <= _SMALL_TABLE


def _by_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    bias: Tensor | None,
    scale: float | None,
    causal: bool,
) -> Tensor | None:
    """Attention by torch's function; None where NaN or infinity may meet a mask, which ``attention`` contains."""
    mask = attention_mask
    if isinstance(attention_mask, MaskTensor):
        mask = None if attention_mask.meaning() is None else attention_mask.read()
    if mask is not None and mask.is_floating_point():
        mask = mask.to(query.dtype)
    if bias is not None:
        if causal:
            return None
        bias = bias.to(query.dtype)
        if mask is None:
            mask = bias
        else:
            mask = bias + mask if mask.is_floating_point() else bias.masked_fill(~mask, -torch.inf)
    grouped = query.shape[1] != key.shape[1]
    query, key, value = without_overlap(query), without_overlap(key), without_overlap(value)
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    # NaN or infinity in a masked key gives NaN.
    if (mask is not None or causal) and not math.isfinite(output.sum().item()):
        return None
    return output.transpose(1, 2).contiguous()


def is_causal_alone(module: nn.Module) -> bool:
    """Whether an attention without a mask is causal: its ``is_causal``; without that attribute as in transformers,
    where sdpa is causal by default and eager attention, the only one of some models, is not."""
    said = getattr(module, "is_causal", None)
    if said is not None:
        return bool(said)
    return _has_sdpa(
        next((base.__module__ for base in type(module).__mro__ if base.__module__.startswith(_MODELS)), "")
    )


@functools.cache
def _has_sdpa(file: str) -> bool:
    """Whether the models of a file of transformers may use sdpa."""
    names = vars(sys.modules[file]).values() if file else ()
    models = [value for value in names if isinstance(value, type) and issubclass(value, PreTrainedModel)]
    defined_here = [model for model in models if model.__module__ == file]
    return not defined_here or any(map(supports_sdpa, defined_here))


def weights_wanted() -> bool:
    """Whether transformers collects weights around this call; not every model says so to its attention."""
    return any("attentions" in name for name in outputs_collected())


def _in_one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors in one dtype, which autocast may not have given them, and with one batch size."""
    if not query.dtype == key.dtype == value.dtype:
        device = query.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    batch = max(query.shape[0], key.shape[0])
    query, key, value = (
        part if part.shape[0] == batch else part.expand(batch, -1, -1, -1) for part in (query, key, value)
    )
    return query, key, value


def own_scale(module: Any, head_dim: int) -> float | None:
    """The scale that GPT-2's eager attention applies before transformers 5, which passes none; None of others."""
    if not hasattr(module, "scale_attn_by_inverse_layer_idx"):
        return None
    scale: float = head_dim**-0.5 if module.scale_attn_weights else 1.0
    return scale / (module.layer_idx + 1) if module.scale_attn_by_inverse_layer_idx else scale


def scale_of(scaling: float | None, head_dim: int) -> float | None:
    """None where it is the default, which plain calls are recognised by."""
    return None if scaling is None or scaling == head_dim**-0.5 else float(scaling)


def _meaning(attention_mask: Tensor) -> tuple[Mask | None, int | None, list[ScoreRule]]:
    """The mask, where the first query stands if that is known, and what is added to scores."""
    if isinstance(attention_mask, MaskTensor):
        return attention_mask.meaning(), attention_mask.query_offset, []
    if is_invariant() and may_look(attention_mask):
        # Sums run from the start of a sequence, which a table does not tell.
        offset = attention_mask.shape[3] - attention_mask.shape[2]
        with suppress(ValueError):
            return mask_of_tensor(attention_mask, offset), offset, []
    if attention_mask.dtype == torch.bool:
        return Dense(attention_mask), None, []
    if not may_look(attention_mask):
        return None, None, [DenseBias(attention_mask)]
    mask, rules = from_additive(attention_mask)
    return mask, None, list(rules)


def _rules(module: nn.Module, bias: Tensor | None, query_offset: int | None) -> list[ScoreRule]:
    """``position_bias`` as a rule: by distance for T5's attention, none if all elements are 0."""
    if bias is None:
        return []
    if may_look(bias) and not bias.requires_grad and not bool(bias.any()):
        return []
    by_distance = type(module).__name__ in _BY_DISTANCE and type(module).__module__.startswith("transformers.")
    if not by_distance or query_offset is None or bias.shape[2] == 1:
        return [DenseBias(bias)]
    # Every distance there is, from the last key's to the first: the first row backwards, then down the first column.
    row = torch.cat([bias[0, :, 0, :].flip(-1), bias[0, :, 1:, 0]], dim=-1)
    lowest, highest = query_offset - bias.shape[3] + 1, query_offset + bias.shape[2] - 1
    reach = max(-lowest, highest)
    return [RelativeBias(nn.functional.pad(row, (reach + lowest, reach - highest)))]
