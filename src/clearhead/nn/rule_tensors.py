"""Tensors that the score rules of a step's attentions read, among those that the step reads."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple, Self

import torch
from torch import Tensor

from clearhead.problem import Problem
from clearhead.scores import Alibi, RelativeBias, ScoreRule, Sink, SoftCap

__all__ = ["NO_RULES", "RuleTensors", "are_known", "as_read", "forms_of", "with_rules_on"]

#: Rules that mean the same at every position, and are nothing but their kind, a number and a tensor.
_KNOWN: Final = (Alibi, RelativeBias, Sink, SoftCap)


def are_known(rules: Sequence[ScoreRule]) -> bool:
    """Whether a call under these rules may be made again from what was written down for it."""
    return all(type(rule) in _KNOWN for rule in rules)


def forms_of(rules: Sequence[ScoreRule]) -> tuple[Hashable, ...]:
    """What tells known rules apart besides their tensors."""
    return tuple([(type(rule), rule.cap if isinstance(rule, SoftCap) else None) for rule in rules])


class RuleTensors(NamedTuple):
    """Each tensor once: layers mostly have one rule between them, and a step reads no tensor twice.

    Attributes:
        tensors: of all attentions.
        places: of each attention, where its rules' tensors are among these.
    """

    tensors: tuple[Tensor, ...] = ()
    places: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, rules: Sequence[Sequence[ScoreRule]]) -> Self:
        """Those of each attention's rules."""
        if not any(rules):
            return cls(places=((),) * len(rules))
        found: dict[int, Tensor] = {}
        own = [[tensor for rule in each for tensor in rule.tensors()] for each in rules]
        for tensor in (tensor for each in own for tensor in each):
            found.setdefault(id(tensor), tensor)
        order = {key: place for place, key in enumerate(found)}
        return cls(tuple(found.values()), tuple(tuple(order[id(tensor)] for tensor in each) for each in own))

    def pairs(self) -> list[Tensor | None]:
        """As a step has its tensors: each beside a bias that is missing."""
        return [part for tensor in self.tensors for part in (tensor, None)]

    def learn(self) -> bool:
        """Whether a gradient is wanted of one, which a step does not have."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)


#: Of attentions without rules.
NO_RULES: Final = RuleTensors()


def as_read(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Rules' tensors as the kernels read them where they lie."""
    return [tensor.detach().to(torch.float32).contiguous() for tensor in tensors]


def with_rules_on(problem: Problem, tensors: Sequence[Tensor]) -> Problem:
    """The problem with its rules on other tensors."""
    if not tensors:
        return problem
    left = iter(tensors)
    return problem.with_scores(tuple(rule.mapped(lambda tensor: next(left)) for rule in problem.scores))
