"""Autograd of ``clearhead::attention_compiled``, for graphs of the compiler and exported programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["register_autograd"]

#: The bit of ``returns`` for what backward reads of each row (native/torch/attention.cpp).
_SOFTMAX: Final = 2


def register_autograd(names: Sequence[str]) -> None:
    """Register it.

    Args:
        names: those of the operator's arguments.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        _save(ctx, dict(zip(names, inputs, strict=False)), output)

    def backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
        # The dispatcher leaves out trailing arguments that equal their defaults.
        needs = dict(zip(names, ctx.needs_input_grad, strict=False))
        gradients = _gradients(ctx, grads[0], needs)
        return tuple(gradients.get(name) for name in needs)

    torch.library.register_autograd("clearhead::attention_compiled", backward, setup_context=save)


def _save(ctx: Any, given: Mapping[str, Any], output: list[Tensor]) -> None:
    tables, sink = given.get("rule_tables") or [], given.get("sink")
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    others = [*output[1:], *tables, *([] if sink is None else [sink])]
    ctx.save_for_backward(given["query"], given["key"], given["value"], *others)
    ctx.counts, ctx.has_sink, ctx.returns = (len(output) - 1, len(tables)), sink is not None, given["returns"]
    lists = ([*(given.get(name) or ())] for name in ("rule_kinds", "rule_values"))
    ctx.numbers = (given["scale"], given.get("before"), given.get("after"), given.get("query_offset", 0), *lists)


def _gradients(ctx: Any, grad: Tensor | None, needs: Mapping[str, Any]) -> dict[str, Any]:
    """Gradients by the argument's name; a list of tensors has a list of them."""
    saved, tables = ctx.counts
    options: dict[str, Any] = {"rule_tables": [None] * tables} if tables else {}
    if grad is None:
        return options
    if not ctx.returns & _SOFTMAX:
        raise RuntimeError(
            "attention: a call under torch.no_grad must have no backward; got one. Trace it with gradients enabled."
        )
    query, key, value, *others = ctx.saved_tensors
    rows, parts = others[:saved], others[saved:]
    sink = parts.pop() if ctx.has_sink else None
    learned = [bool(each) for each in needs["rule_tables"]] if tables else []
    of_sink = sink is not None and bool(needs["sink"])
    of_query, of_key, of_value, *rest = torch.ops.clearhead.attention_compiled_gradients(
        grad, query, key, value, rows, *ctx.numbers, parts, sink, [*learned, of_sink]
    )
    options.update(query=of_query, key=of_key, value=of_value)
    if tables:
        options["rule_tables"] = [rest.pop(0) if each else None for each in learned]
    if of_sink:
        (options["sink"],) = rest
    return options
