"""Attention as one torch operator, so that ``torch.compile`` and ``torch.export`` carry it whole.

Masks and rules travel as a short text plus their tensors (``record``); inside, the operator validates,
chooses and runs exactly as an eager call does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from clearhead.dispatch import run
from clearhead.errors import UnsupportedError
from clearhead.masks import Mask
from clearhead.problem import Problem
from clearhead.record import decode
from clearhead.scores import ScoreFunction, ScoreRule, closes_over_learned
from clearhead.statistics import Want

__all__ = ["attention"]


def attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Mask | None, scores: ScoreRule | Iterable[ScoreRule],
    scale: float | None, dropout: float, seed: int | None, query_offset: int | None, backend: str,
) -> Tensor:  # fmt: skip
    """The call as the operator's arguments; traced by the compiler, so it only writes things down."""
    tensors: list[Tensor] = []
    rules = (scores,) if isinstance(scores, ScoreRule) else tuple(scores)
    for rule in rules:
        if isinstance(rule, ScoreFunction) and torch.is_grad_enabled() and closes_over_learned(rule.fn):
            raise UnsupportedError.about(
                "attention", "scores", must="not close over learned tensors under torch.compile or export",
                got=repr(rule), then="Use ch.RelativeBias or ch.DenseBias, or leave the call outside compilation.",
            )  # fmt: skip
    mask_text = "None" if mask is None else mask.encode(tensors)
    rule_texts = [rule.encode(tensors) for rule in rules]
    seeds = []
    if dropout > 0.0:
        seeds.append(
            torch.randint(2**62, ()) if seed is None else torch.tensor(seed - 2**64 if seed >= 2**63 else seed)
        )
    output: Tensor = torch.ops.clearhead.attention(
        query, key, value, tensors, "".join("1" if tensor.requires_grad else "0" for tensor in tensors), mask_text,
        "(" + "".join(text + "," for text in rule_texts) + ")", seeds, scale, dropout, query_offset, backend,
    )  # fmt: skip
    return output


def _run(
    query: Tensor, key: Tensor, value: Tensor, tensors: list[Tensor], mask: str, scores: str, seeds: list[Tensor],
    scale: float | None, dropout: float, query_offset: int | None, backend: str,
) -> Tensor:  # fmt: skip
    problem = Problem.of(
        "attention", query, key, value, mask=decode(mask, tensors), scores=decode(scores, tensors), scale=scale,
        dropout=dropout, seed=int(seeds[0]) % 2**64 if seeds else None, query_offset=query_offset,
    )  # fmt: skip
    output = run("attention", problem, Want(), backend).output
    return output.reshape(output.shape[2 - problem.leading :])


@torch.library.custom_op("clearhead::attention", mutates_args=())
def _attention(
    query: Tensor, key: Tensor, value: Tensor, tensors: list[Tensor], learned: str, mask: str, scores: str,
    seeds: list[Tensor], scale: float | None, dropout: float, query_offset: int | None, backend: str,
) -> Tensor:  # fmt: skip
    output = _run(query, key, value, tensors, mask, scores, seeds, scale, dropout, query_offset, backend)
    return output.contiguous()


@_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, tensors: list[Tensor], learned: str, mask: str, scores: str,
    seeds: list[Tensor], scale: float | None, dropout: float, query_offset: int | None, backend: str,
) -> Tensor:  # fmt: skip
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


@contextmanager
def _recording() -> Iterator[None]:
    """Autograd inside an operator's body, where torch has switched it off for the thread."""
    keys = (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView)
    with ExitStack() as stack:
        for key in keys:
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        stack.enter_context(torch.enable_grad())
        yield


@torch.library.custom_op("clearhead::attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, tensors: list[Tensor], learned: str, mask: str,
    scores: str, seeds: list[Tensor], scale: float | None, dropout: float, query_offset: int | None, backend: str,
) -> list[Tensor]:  # fmt: skip
    """Gradients of query, key, value and the tensors of mask and rules, by running forward again."""
    inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    extra = [tensor.detach().requires_grad_(wants == "1") for tensor, wants in zip(tensors, learned, strict=True)]
    wanted = [*inputs, *(tensor for tensor in extra if tensor.requires_grad)]
    with _recording():
        output = _run(*inputs, extra, mask, scores, seeds, scale, dropout, query_offset, backend)  # type: ignore[call-arg, arg-type]
        found = torch.autograd.grad(output, wanted, grad, allow_unused=True)
    filled = iter(
        torch.zeros_like(tensor) if own is None else own.contiguous() for own, tensor in zip(found, wanted, strict=True)
    )
    return [next(filled) if tensor.requires_grad else torch.zeros_like(tensor) for tensor in [*inputs, *extra]]


@_attention_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, tensors: list[Tensor], learned: str, mask: str,
    scores: str, seeds: list[Tensor], scale: float | None, dropout: float, query_offset: int | None, backend: str,
) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (query, key, value, *tensors)]


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    query, key, value, tensors, learned, mask, scores, seeds, *rest = inputs
    ctx.save_for_backward(query, key, value, *tensors, *seeds)
    ctx.counts, ctx.texts, ctx.rest = (len(tensors), len(seeds)), (learned, mask, scores), rest


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    query, key, value, *others = ctx.saved_tensors
    tensors, seeds = others[: ctx.counts[0]], others[ctx.counts[0] :]
    found = torch.ops.clearhead.attention_backward(grad, query, key, value, tensors, *ctx.texts, seeds, *ctx.rest)
    rule_grads = [own if wants == "1" else None for own, wants in zip(found[3:], ctx.texts[0], strict=True)]
    return (*found[:3], rule_grads, None, None, None, [None] * ctx.counts[1], None, None, None, None)


_attention.register_autograd(_backward, setup_context=_setup)
