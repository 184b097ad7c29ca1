"""Peers that run the model of transformers itself: clearhead, eager torch, torch.compile, zentorch and torchao."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch

from clearhead.benchmark.machine import machine
from clearhead.benchmark.model_peers.peer import CannotRunError, dtype_of
from clearhead.benchmark.model_peers.work import (
    ModelWork,
    decoding_call,
    encoder_call,
    prefill_call,
    training_call,
)
from clearhead.benchmark.peers import Call
from clearhead.integrations.freeze import freeze
from clearhead.integrations.swap import swap

__all__ = [
    "clearhead_call",
    "clearhead_integers_call",
    "compiled_call",
    "sdpa_call",
    "torchao_dynamic_call",
    "torchao_weights_call",
    "zen_call",
]


def clearhead_call(work: ModelWork, number_format: str) -> Call:
    """The model after ``swap``, and for inference after ``freeze`` with packed weights."""
    model = deepcopy(work.model).to(dtype_of(number_format))
    swap(model)
    if work.kind == "training":
        return training_call(model, work.ids, work.upstream, dropout=work.dropout)
    freeze(model, pack=True)
    return _call(work, model)


def clearhead_integers_call(work: ModelWork, number_format: str) -> Call:
    """The model in bfloat16 after torchao, ``swap`` and ``freeze``: weights in int8, and activations but for tokens; or
    weights in int4, in groups of 32."""
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        quantize_,
    )

    model = deepcopy(work.model).bfloat16()
    if number_format == "int4":
        quantize_(model, IntxWeightOnlyConfig(torch.int4, PerGroup(32)))  # type: ignore[attr-defined]
    else:
        quantize_(model, Int8WeightOnlyConfig() if work.kind == "token" else Int8DynamicActivationInt8WeightConfig())
    swap(model)
    freeze(model, pack=True)
    return _call(work, model)


def sdpa_call(work: ModelWork, number_format: str) -> Call:
    """The model as it is, with scaled_dot_product_attention."""
    model = deepcopy(work.model).to(dtype_of(number_format))
    if work.kind == "training":
        return training_call(model, work.ids, work.upstream, dropout=work.dropout)
    return _call(work, model)


def compiled_call(work: ModelWork, number_format: str) -> Call:
    """The model after ``torch.compile``; a token with transformers' static cache."""
    return _compiled(work, deepcopy(work.model).to(dtype_of(number_format)), torch.compile)


def zen_call(work: ModelWork, number_format: str) -> Call:
    """The model compiled by zentorch."""
    if "avx512f" not in machine()["instructions"]:
        raise CannotRunError("zentorch needs AVX-512")
    return _compiled(work, deepcopy(work.model).to(dtype_of(number_format)), partial(torch.compile, backend="zentorch"))


def torchao_weights_call(work: ModelWork, number_format: str) -> Call:
    """The model in bfloat16 with linear weights in int8, compiled."""
    from torchao.quantization import Int8WeightOnlyConfig

    return _quantised(work, Int8WeightOnlyConfig())


def torchao_dynamic_call(work: ModelWork, number_format: str) -> Call:
    """The model in bfloat16 with linear weights and activations in int8, compiled."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    return _quantised(work, Int8DynamicActivationInt8WeightConfig())


def _quantised(work: ModelWork, config: Any) -> Call:
    from torchao.quantization import quantize_

    model = deepcopy(work.model).bfloat16()
    quantize_(model, config)
    return _compiled(work, model, torch.compile)


def _call(work: ModelWork, model: Any) -> Call:
    """The call of a model, with transformers' dynamic cache."""
    if work.kind == "encoder":
        return encoder_call(model, work.ids, work.padding_mask)
    if work.kind == "prefill":
        return prefill_call(model, work.ids)
    from transformers import DynamicCache

    return _decoding(work, model, model, lambda: DynamicCache(config=model.config))


def _compiled(work: ModelWork, model: Any, wrap: Callable[[Any], Any]) -> Call:
    if work.kind == "training":
        return training_call(model, work.ids, work.upstream, dropout=work.dropout, wrap=wrap)
    step = wrap(model)
    if work.kind == "encoder":
        return encoder_call(step, work.ids, work.padding_mask)
    if work.kind == "prefill":
        return prefill_call(partial(step, use_cache=False), work.ids)
    from transformers import StaticCache

    return _decoding(work, model, step, lambda: StaticCache(config=model.config, max_cache_len=work.ids.shape[1]))


def _decoding(work: ModelWork, model: Any, step: Callable[..., Any], empty: Callable[[], Any]) -> Call:
    from clearhead.integrations.transformers.calls import cache_argument

    def prompt() -> dict[str, Any]:
        cached = cache_argument(model, empty())
        with torch.no_grad():
            model(input_ids=work.ids[:, : work.length], logits_to_keep=1, **cached)
        return cached

    return decoding_call(step, prompt, work.ids, work.length)
