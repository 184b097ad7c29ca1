"""Public functions of attention as torch operators, each one node in graphs of ``torch.compile`` and ``torch.export``.

Masks, rules and the ``Want`` are encoded as a short text and a list of tensors (``record``). The operator's body
validates, dispatches and runs the call as an eager call does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from clearhead.closure import find_learned, learned_by
from clearhead.dispatch import run
from clearhead.errors import UnsupportedError
from clearhead.int8_rows import channels_of
from clearhead.masks import Mask
from clearhead.onnx_graph import exporting
from clearhead.problem import Problem
from clearhead.record import Record, decode
from clearhead.scores import ScoreFunction, ScoreRule
from clearhead.statistics import UNDIFFERENTIABLE, Observation, Want
from clearhead.torch_private import autograd_inside_operator

__all__ = ["Operator", "attention", "observe_attention", "output_like"]

#: The kinds of an operator's further tensors: of a mask or rule, with or without a gradient; or closed over by a user's
#: function, which finds them itself.
_LEARNED, _FIXED, _CLOSED_OVER = "1", "0", "c"
#: Computes results with axes batch and heads from a problem, the call's further arguments and a backend's name.
Compute = Callable[[Problem, Any, str], Sequence[Tensor]]
#: Makes fake results from query, key, value and the call's further arguments, with the leading axes of query.
Like = Callable[[Tensor, Tensor, Tensor, Any], Sequence[Tensor]]


class Operator:
    """A function as the operator ``clearhead::name``, whose backward computes the call a second time with gradients.

    Args:
        name: name of the function, with which its errors start.
        compute: computes the results.
        like: makes fake results of the same shapes and dtypes.
        fixed: the indices of the results without a gradient.
    """

    def __init__(
        self, name: str, compute: Compute, like: Like, *, fixed: Callable[[Any], Sequence[int]] = lambda asked: ()
    ) -> None:
        self._name, self._compute, self._like, self._fixed = name, compute, like, fixed
        forward = torch.library.custom_op(f"clearhead::{name}", self._forward, mutates_args=())
        backward = torch.library.custom_op(f"clearhead::{name}_backward", self._backward, mutates_args=())
        forward.register_fake(self._forward_like)
        backward.register_fake(self._backward_like)
        forward.register_autograd(self._pull, setup_context=self._keep)
        self._operator, self._backward_operator = (
            getattr(torch.ops.clearhead, one) for one in (name, f"{name}_backward")
        )

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, asked: Any = None, mask: Mask | None = None,
        scores: ScoreRule | Iterable[ScoreRule] | None = (), scale: float | None = None, dropout: float = 0.0,
        seed: int | None = None, query_offset: int | None = None, backend: str = "auto",
    ) -> list[Tensor]:  # fmt: skip
        """Call the operator with encoded arguments; the compiler traces this, so it reads no elements."""
        if exporting():
            raise UnsupportedError.about(
                self._name,
                "the call",
                must="be one that ONNX can express",
                got=f"{self._name} under torch.onnx.export",
                then="Export a model that calls ch.attention, or use torch.export.export.",
            )
        tensors: list[Tensor] = []
        rules = (scores,) if isinstance(scores, ScoreRule) else tuple(scores or ())
        mask_text = "None" if mask is None else mask.encode(tensors)
        rule_texts = "".join([rule.encode(tensors) + "," for rule in rules])
        asked_text = asked.encode(tensors) if isinstance(asked, Record) else repr(asked)
        kinds = [_LEARNED if tensor.requires_grad else _FIXED for tensor in tensors]
        if torch.is_grad_enabled():
            for rule in rules:
                if isinstance(rule, ScoreFunction):
                    kinds += [_CLOSED_OVER] * find_learned(rule)
                    tensors += rule.learned
        seeds = []
        if dropout > 0.0:
            seeds.append(
                torch.randint(2**62, ()) if seed is None else torch.tensor(seed - 2**64 if seed >= 2**63 else seed)
            )
        results: list[Tensor] = self._operator(
            query, key, value, tensors, "".join(kinds), mask_text, f"({rule_texts})", asked_text, seeds,
            scale, dropout, query_offset, backend,
        )  # fmt: skip
        return results

    def _results(
        self, query: Tensor, key: Tensor, value: Tensor, tensors: list[Tensor], mask: str, scores: str, asked: str,
        seeds: list[Tensor], scale: float | None, dropout: float, query_offset: int | None, backend: str,
    ) -> list[Tensor]:  # fmt: skip
        problem = Problem.of(
            self._name, query, key, value, mask=decode(mask, tensors), scores=decode(scores, tensors), scale=scale,
            dropout=dropout, seed=int(seeds[0]) % 2**64 if seeds else None, query_offset=query_offset,
        )  # fmt: skip
        results = self._compute(problem, decode(asked, tensors), backend)
        return [one.reshape(one.shape[2 - problem.leading :]) for one in results]

    def _forward(
        self, query: Tensor, key: Tensor, value: Tensor, tensors: list[Tensor], kinds: str, mask: str, scores: str,
        asked: str, seeds: list[Tensor], scale: float | None, dropout: float, query_offset: int | None, backend: str,
    ) -> list[Tensor]:  # fmt: skip
        call = (query, key, value, tensors, mask, scores, asked, seeds, scale, dropout, query_offset, backend)
        return [one.contiguous() for one in self._results(*call)]

    def _forward_like(
        self, query: Tensor, key: Tensor, value: Tensor, tensors: list[Tensor], *others: Any
    ) -> list[Tensor]:
        _, _, _, asked, *_ = others
        return list(self._like(query, key, value, decode(asked, tensors)))

    def _backward(
        self, grads: list[Tensor], given: str, query: Tensor, key: Tensor, value: Tensor, tensors: list[Tensor],
        kinds: str, mask: str, scores: str, asked: str, seeds: list[Tensor], scale: float | None, dropout: float,
        query_offset: int | None, backend: str,
    ) -> list[Tensor]:  # fmt: skip
        """Gradients of query, key, value, and of the further tensors."""
        functions = [rule for rule in decode(scores, tensors) if isinstance(rule, ScoreFunction)]
        inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        with autograd_inside_operator():
            reached = iter(_reached(self._name, functions, tensors, kinds))
            extra = [
                next(reached) if kind == _CLOSED_OVER else tensor.detach().requires_grad_(kind == _LEARNED)
                for tensor, kind in zip(tensors, kinds, strict=True)
            ]
            every = [*inputs, *extra]
            wanted = list({id(tensor): tensor for tensor in every if tensor.requires_grad}.values())
            others = [tensor for rule in functions for tensor in learned_by(rule.fn) if not _among(tensor, wanted)]
            call = (*inputs, extra, mask, scores, asked, seeds, scale, dropout, query_offset, backend)
            results = self._results(*call)  # type: ignore[arg-type]
            ends = [one for one, arrived in zip(results, given, strict=True) if arrived == "1"]
            pulled = torch.autograd.grad(ends, [*wanted, *others], grads, allow_unused=True)
        _check_all_compiled(self._name, pulled[len(wanted) :])
        grad_of = {id(tensor): grad for tensor, grad in zip(wanted, pulled, strict=False) if grad is not None}
        # A tensor that occurs twice gets its whole gradient at its first place.
        first_grads = (grad_of.pop(id(tensor), None) for tensor in every)
        return [
            torch.zeros_like(tensor) if grad is None else grad.contiguous()
            for tensor, grad in zip(every, first_grads, strict=True)
        ]

    def _backward_like(
        self, grads: list[Tensor], given: str, query: Tensor, key: Tensor, value: Tensor, tensors: list[Tensor],
        *others: Any,
    ) -> list[Tensor]:  # fmt: skip
        sources = (query, key, value, *tensors)
        return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in sources]

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        query, key, value, tensors, kinds, mask, scores, asked, seeds, *rest = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(output[place] for place in self._fixed(decode(asked, tensors))))
        ctx.save_for_backward(query, key, value, *tensors, *seeds)
        ctx.counts, ctx.texts, ctx.rest = (len(tensors), len(seeds)), (kinds, mask, scores, asked), rest

    def _pull(self, ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
        query, key, value, *others = ctx.saved_tensors
        tensors, seeds = others[: ctx.counts[0]], others[ctx.counts[0] :]
        given = "".join("0" if grad is None else "1" for grad in grads)
        arrived = [grad for grad in grads if grad is not None]
        pulled = self._backward_operator(arrived, given, query, key, value, tensors, *ctx.texts, seeds, *ctx.rest)
        extra = [None if kind == _FIXED else grad for grad, kind in zip(pulled[3:], ctx.texts[0], strict=True)]
        return (*pulled[:3], extra, None, None, None, None, [None] * ctx.counts[1], None, None, None, None)


def _reached(name: str, functions: Iterable[ScoreFunction], tensors: Sequence[Tensor], kinds: str) -> list[Tensor]:
    """The learned tensors that users' functions read; raises if they are not those of the compiled graph."""
    learned = [tensor for rule in functions if find_learned(rule) for tensor in rule.learned]
    compiled = [tensor for tensor, kind in zip(tensors, kinds, strict=True) if kind == _CLOSED_OVER]
    if [*map(_lies, learned)] != [*map(_lies, compiled)]:
        raise UnsupportedError.about(
            name,
            "scores",
            must="close over the learned tensors that they had when they were compiled",
            got="others",
            then="Write to them in place, or make a new ch.ScoreFunction.",
        )
    return learned


def _check_all_compiled(name: str, grads: Sequence[Tensor | None]) -> None:
    """Raise if a function reads, at some places only, a learned tensor that the compiled graph lacks."""
    if any(grad is not None for grad in grads):
        raise UnsupportedError.about(
            name,
            "scores",
            must="read the same learned tensors at every place under torch.compile",
            got="a function that reads others at the first",
            then="Use torch.where, or leave it uncompiled.",
        )


def _among(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    return any(tensor is other for other in others)


def _lies(tensor: Tensor) -> tuple[int, tuple[int, ...], torch.dtype]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.dtype


def _attention(problem: Problem, asked: None, backend: str) -> list[Tensor]:
    return [run("attention", problem, Want(), backend).output]


def output_like(query: Tensor, key: Tensor, value: Tensor, asked: object) -> list[Tensor]:
    """The output of attention without its elements."""
    return [query.new_empty((*query.shape[:-1], channels_of(value)))]


def _observe(problem: Problem, want: Want, backend: str) -> list[Tensor]:
    want.check("observe_attention", (problem.batch, problem.num_heads, problem.q_len, problem.k_len))
    observation = run("observe_attention", problem, want, backend)
    return [observation.output, *(getattr(observation, name) for name in want.shapes(problem.q_len, problem.k_len))]


def _observe_like(query: Tensor, key: Tensor, value: Tensor, want: Want) -> list[Tensor]:
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    shapes = want.shapes(query.shape[-2], key.shape[-2])
    return [
        *output_like(query, key, value, want),
        *(
            query.new_empty((*query.shape[:-2], *shape), dtype=torch.int64 if name == "top_indices" else work)
            for name, shape in shapes.items()
        ),
    ]


def _without_gradient(want: Want) -> list[int]:
    return [place for place, name in enumerate(want.shapes(0, 0), start=1) if name in UNDIFFERENTIABLE]


_ATTENTION: Final = Operator("attention", _attention, output_like)
_OBSERVE: Final = Operator("observe_attention", _observe, _observe_like, fixed=_without_gradient)


def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """``clearhead.attention`` as one operator."""
    (output,) = _ATTENTION(query, key, value, **options)
    return output


def observe_attention(query: Tensor, key: Tensor, value: Tensor, *, want: Want, **options: Any) -> Observation:
    """``clearhead.observe_attention`` as one operator."""
    output, *statistics = _OBSERVE(query, key, value, asked=want, **options)
    return Observation(output=output, **dict(zip(want.shapes(0, 0), statistics, strict=True)))
