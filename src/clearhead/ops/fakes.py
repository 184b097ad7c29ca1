"""The operators without elements: their results' shapes, strides and dtypes, for tracing and ``FakeTensor``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from clearhead.int8_rows import channels_of
from clearhead.ops.batching import batching_rule
from clearhead.ops.binary import signatures
from clearhead.ops.compiled_autograd import register_autograd
from clearhead.ops.flops import FLOPS
from clearhead.ops.kinds import Side
from clearhead.ops.layer_fakes import LAYER_FAKES, empty_heads
from clearhead.ops.layer_flops import LAYER_FLOPS

__all__ = ["register", "register_flops"]

#: ``CH_LINEAR_PAD`` of the native interface: the states of chunks are padded to a multiple of it.
_PAD: Final = 16
#: Bits of ``returns``, in the order of the results (native/torch/attention.cpp).
_LSE, _SOFTMAX, _OUTPUT32, _MAX_SCORE, _TIES, _ENTROPY, _DISTANCE, _SINK_MASS, _TOP_K, _RECEIVED, _HEATMAP = (
    1 << place for place in range(11)
)
_ROW_WEIGHTS, _ROWS = 1 << 11, 1 << 12


def _attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    returns: int,
    statistic_sizes: Sequence[int] | None = None,
    row_weights: Tensor | None = None,
    **others: Any,
) -> list[Tensor]:
    leading = (query.shape[0], query.shape[1])
    q_len, k_len = query.shape[2], key.shape[2]
    _, top_k, side, rows = statistic_sizes or (0, 0, 0, 0)

    def new(bit: int, *sizes: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [query.new_empty((*leading, *sizes), dtype=dtype)] if returns & bit else []

    tiles = (-(-q_len // side), -(-k_len // side)) if side else (0, 0)
    return [
        empty_heads(query, channels_of(value)),
        *new(_LSE, q_len),
        *new(_SOFTMAX, q_len, 2),
        *new(_OUTPUT32, q_len, channels_of(value)),
        *new(_MAX_SCORE, q_len),
        *new(_TIES, q_len, 2),
        *new(_ENTROPY, q_len),
        *new(_DISTANCE, q_len),
        *new(_SINK_MASS, q_len),
        *new(_TOP_K, q_len, top_k),
        *new(_TOP_K, q_len, top_k, dtype=torch.int64),
        *new(_RECEIVED, k_len),
        *new(_HEATMAP, *tiles),
        *new(_HEATMAP, *tiles),
        *(new(_ROW_WEIGHTS, row_weights.shape[2], k_len) if row_weights is not None else []),
        *new(_ROWS, rows, k_len),
    ]


def _attention_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule_tables: Sequence[Tensor] | None = None,
    rule_slots: Sequence[int] | None = None,
    side: int = Side.BOTH,
    **others: Any,
) -> tuple[list[Tensor], bool]:
    """Without elements all are finite."""
    learned: dict[int, Tensor] = {}
    for slot, table in zip(rule_slots or (), rule_tables or (), strict=False):
        if slot >= 0:
            learned.setdefault(slot, table)
    rows = query.new_empty((query.shape[0], query.shape[1], query.shape[2]), dtype=torch.float32)
    of_queries, of_keys = ([query] if side != Side.KEYS else []), ([key, value] if side != Side.QUERIES else [])
    grads = [empty_heads(part, part.shape[3]) for part in (*of_queries, *of_keys)]
    of_rules = [table.new_empty(tuple(table.shape), dtype=torch.float32) for _, table in sorted(learned.items())]
    return [*grads, rows, *of_rules], True


def _attention_paged(query: Tensor, value: Tensor, lse: bool = False, **others: Any) -> list[Tensor]:
    output = empty_heads(query, channels_of(value))
    return [output, query.new_empty(tuple(query.shape[:3]), dtype=torch.float32)] if lse else [output]


def _linear_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, chunk: int, normalized: bool, for_backward: bool, **others: Any
) -> tuple[Tensor | None, ...]:
    batch, kv_heads, length, features = key.shape
    value_dim, chunks = value.shape[3], -(-length // chunk)

    def new(needed: bool, *sizes: int) -> Tensor | None:
        return query.new_empty((batch, *sizes)) if needed else None

    return (
        empty_heads(query, value_dim),
        new(True, kv_heads, features, value_dim),
        new(normalized, kv_heads, features),
        new(normalized, query.shape[1], length),
        new(for_backward, kv_heads, chunks, features, _padded(value_dim)),
        new(for_backward and normalized, kv_heads, chunks, _padded(features)),
    )


def _padded(count: int) -> int:
    return -(-count // _PAD) * _PAD


def _linear_attention_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor | None,
    rate: Tensor | None,
    shares: Tensor | None,
    **others: Any,
) -> tuple[Tensor | None, ...]:
    batch, kv_heads, _, features = key.shape
    return (
        *(empty_heads(part, part.shape[3]) for part in (query, key, value)),
        *(None if part is None else part.new_empty(tuple(part.shape)) for part in (log_decay, rate)),
        query.new_empty((batch, kv_heads, features, value.shape[3])),
        None if shares is None else query.new_empty((batch, kv_heads, features)),
    )


FAKES: Final[dict[str, Callable[..., Any]]] = {
    "attention_forward": _attention_forward,
    "attention_compiled": _attention_forward,
    "attention_gradients": _attention_gradients,
    "attention_paged": _attention_paged,
    "linear_attention_forward": _linear_attention_forward,
    "linear_attention_gradients": _linear_attention_gradients,
    **LAYER_FAKES,
}
"""Every operator's results by its name, from the arguments that it reads, by the names of its schema."""


def _on_one_device(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """The fake, for tensors of one device: torch calls it for CPU tensors beside one on the meta device too."""
    function = re.sub("_(forward|compiled|backward|gradients)$", "", name)

    @wraps(fake)
    def checked(**given: Any) -> Any:
        lists = [part for part in given.values() if isinstance(part, (list, tuple))]
        tensors = [part for part in itertools.chain(given.values(), *lists) if isinstance(part, Tensor)]
        if len(devices := {str(part.device) for part in tensors}) > 1:
            raise RuntimeError(
                f"{function}: every tensor must be on one device; got {' and '.join(sorted(devices))}. "
                "Move them with .to(device)."
            )
        return fake(**given)

    return checked


def _by_name(names: Sequence[str], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called as torch calls it, with arguments at the places of an operator's schema."""

    @wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        return function(**dict(zip(names, arguments, strict=False)), **options)

    return called


def register_flops(name: str, names: Sequence[str]) -> None:
    """Let ``FlopCounterMode`` count an operator whose arguments have these names."""
    register_flop_formula(getattr(torch.ops.clearhead, name))(_by_name(names, {**FLOPS, **LAYER_FLOPS}[name]))


def register() -> None:
    """Register what torch needs of the operators besides the kernels: fakes, rules for vmap, FLOP counts, autograd."""
    for name, names in signatures().items():
        torch.library.register_fake(f"clearhead::{name}", _by_name(names, _on_one_device(name, FAKES[name])))
        torch.library.register_vmap(f"clearhead::{name}", batching_rule(name, names))
        register_flops(name, names)
        if name == "attention_compiled":
            register_autograd(names)
