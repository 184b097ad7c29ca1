"""The tensors that backward reads without a copy when it recomputes scores, so that autograd can detect writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.backends.tiles import first_place, functions_of
from clearhead.closure import closed_over
from clearhead.errors import ClearheadError
from clearhead.problem import Problem
from clearhead.scores import check_reached, differentiated
from clearhead.torch_private import TorchDispatchMode, version_of

__all__ = ["BackwardReads", "backward_reads"]


@dataclass(frozen=True)
class BackwardReads:
    """The tensors that backward reads.

    Attributes:
        tensors: those of rules and mask, and those that users' functions read, learned or not.
        learned: those that are known to get a gradient.
    """

    tensors: list[Tensor]
    learned: list[Tensor]


class _Reads(TorchDispatchMode):
    """Records every tensor that an operation reads."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # The tensors are kept alive, so that no later one can have the same address.
        self.tensors: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            for one in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(one, Tensor):
                    self.tensors[id(one)] = one
        return func(*args, **(kwargs or {}))


def backward_reads(problem: Problem) -> BackwardReads:
    """The tensors of rules and mask that backward reads, and those that users' functions read at one place.

    Raises:
        UnsupportedError: a score function reads a learned tensor that it does not name.
    """
    tensors = [tensor for rule in problem.scores for tensor in rule.tensors()]
    tensors += [] if problem.mask is None else problem.mask.tensors()
    learned = list(tensors)
    if functions_of(problem) and min(problem.batch, problem.q_len, problem.k_len) > 0:
        # A tensor that the function itself writes, such as a count of its calls, is excluded.
        versions = {id(one): (one, version_of(one)) for one in _reachable_tensors(problem) if not one.is_inference()}
        with torch.enable_grad():
            read, grads = _tried(problem)
        tensors += [one for one, version in versions.values() if id(one) in read and version_of(one) == version]
        learned += grads
    return BackwardReads([tensor for tensor in tensors if not tensor.is_inference()], learned)


def _reachable_tensors(problem: Problem) -> Iterator[Tensor]:
    """The tensors that users' functions reach, and all tensors of the modules that they reach."""
    for function in functions_of(problem):
        yield from closed_over(function.fn) if function.reached is None else function.reached
        yield from (tensor for _, _, tensor in function.slots if tensor is not None)


def _tried(problem: Problem) -> tuple[dict[int, Tensor], list[Tensor]]:
    """The tensors that users' functions read at one place, and the learned ones that get a gradient there."""
    parameters, rules = problem.rule_parameters, problem.elementwise
    try:
        with _Reads() as reads:
            scores_in, scores_out, indices = first_place(problem)
        if scores_out is scores_in:
            return reads.tensors, []
        grads = differentiated(rules, scores_out, scores_in, parameters, torch.ones_like(scores_out), indices)
    except ClearheadError:  # a function that runs on the whole call may fail on one place
        return {}, []
    check_reached(rules, scores_out, scores_in, parameters)
    return reads.tensors, [parameter for parameter, grad in zip(parameters, grads[1:], strict=True) if grad is not None]
