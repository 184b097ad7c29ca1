"""Differentiable gradients by torch's operations: for second derivatives and batched gradients.

The kernels' gradients have no graph. If a gradient must be differentiable (``create_graph=True``, or forward-mode
differentiation) or gradients are batched (``is_grads_batched=True``), forward is recomputed by torch's operations and
differentiated by autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from clearhead.backends import reference
from clearhead.choices import refuse_if_invariant
from clearhead.problem import Problem
from clearhead.statistics import Observation, Want
from clearhead.tensors import has_memory
from clearhead.torch_private import differentiates_forward

__all__ = ["is_recorded", "recorded_attention", "recorded_gradients", "with_learned"]


def is_recorded(*grads: Tensor | None) -> bool:
    """Whether a backward pass with these gradients must consist of torch's operations."""
    return (
        torch.is_grad_enabled()
        or differentiates_forward()
        or any(grad is not None and not has_memory(grad) for grad in grads)
    )


def recorded_gradients(
    compute: Callable[[list[Tensor | None]], Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of each input of ``compute``, None for those that are not needed.

    Args:
        compute: forward by torch's operations.
        inputs: the inputs of forward.
        grads: gradients of its outputs, None for those without one.
        needs: whether each input's gradient is needed.
    """
    refuse_if_invariant(
        "backward",
        "the gradient",
        got="create_graph=True, batched gradients, forward-mode differentiation, or NaN or infinity under a mask",
        then="Use ch.invariant(False) for this call.",
    )
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, so that an input that is given twice has two gradients.
        copies = [
            part.view_as(part) if part is not None and needed else part
            for part, needed in zip(inputs, needs, strict=True)
        ]
        wanted = [part for part, needed in zip(copies, needs, strict=True) if part is not None and needed]
        outputs = compute(copies)
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if grad is not None and output.requires_grad
        ]
        computed = iter(
            torch.autograd.grad(
                [output for output, _ in pairs],
                wanted,
                [grad for _, grad in pairs],
                create_graph=create_graph,
                allow_unused=True,
                is_grads_batched=False,
            )
            if pairs
            else [None] * len(wanted)
        )
    return [next(computed) if part is not None and needed else None for part, needed in zip(inputs, needs, strict=True)]


def with_learned(problem: Problem, copies: Sequence[Tensor | None]) -> Problem:
    """The problem with other tensors in place of ``problem.rule_parameters``."""
    pairs = zip(problem.rule_parameters, copies, strict=True)
    by_identity = {id(parameter): copy for parameter, copy in pairs if copy is not None}
    return problem.with_scores(
        tuple(rule.mapped(lambda tensor: by_identity.get(id(tensor), tensor)) for rule in problem.scores)
    )


def recorded_attention(
    problem: Problem,
    want: Want,
    grads: Mapping[str, Tensor],
    needs: Sequence[bool],
    run: Callable[[Problem, Want], Observation] = reference.run,
) -> list[Tensor | None]:
    """Gradients of query, key, value and the rules' parameters, by another backend.

    Args:
        problem: the problem.
        want: the statistics that forward computed.
        grads: gradients of forward's results, by their names in ``Observation``.
        needs: whether the gradient is needed: of query, key, value, ``want.row_weights`` if it can have one, and each
            of ``problem.rule_parameters``.
        run: the other backend; by default ``reference``, whose memory grows with ``q_len * k_len``.
    """
    learned = problem.rule_parameters
    mixing = [want.row_weights] if len(needs) > 3 + len(learned) else []

    def compute(inputs: list[Tensor | None]) -> list[Tensor]:
        tensors = [part for part in inputs[:3] if part is not None]
        copied = with_learned(problem, inputs[3 + len(mixing) :]).with_tensors(*tensors)
        done = run(copied, replace(want, row_weights=inputs[3]) if mixing else want)
        return [getattr(done, name) for name in grads]

    inputs = [problem.query, problem.key, problem.value, *mixing, *learned]
    return recorded_gradients(compute, inputs, [*grads.values()], needs)
