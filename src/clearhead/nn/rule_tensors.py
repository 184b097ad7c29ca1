"""Tensors that the score rules of a step's attentions read, and angles that come with a call, among those that the step
reads."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final, Literal, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

from clearhead.backends.native_projection import lies_plainly
from clearhead.positions import Rotary
from clearhead.problem import Problem
from clearhead.projection import are_plain
from clearhead.scores import Alibi, RelativeBias, ScoreRule, Sink, SoftCap
from clearhead.shapes import Float

__all__ = ["NO_RULES", "RuleTensors", "Turning", "are_known", "as_read", "forms_of", "turning", "with_rules_on"]

#: Rules that mean the same at every position, and are nothing but their kind, a number and a tensor.
_KNOWN: Final = (Alibi, RelativeBias, Sink, SoftCap)


def are_known(rules: Sequence[ScoreRule]) -> bool:
    """Whether a call under these rules may be made again from what was written down for it."""
    return all(type(rule) in _KNOWN for rule in rules)


def forms_of(rules: Sequence[ScoreRule]) -> tuple[Hashable, ...]:
    """What tells known rules apart besides their tensors."""
    return tuple([(type(rule), rule.cap if isinstance(rule, SoftCap) else None) for rule in rules])


#: What turns an attention's queries and keys, the same at every call, or by ``"angles"`` that come with each.
Turning: TypeAlias = Rotary | Literal["angles"] | None


def turning(rotary: Turning, angles: Tensor | None) -> Rotary | Tensor | None:
    """What turns those of one call."""
    return angles if rotary == "angles" else rotary


class RuleTensors(NamedTuple):
    """Each tensor once: layers mostly have one rule between them, and a step reads no tensor twice.

    Attributes:
        tensors: of all attentions.
        places: of each attention, where its rules' tensors are among these.
        turned: whether the last one is no rule's: cosines and, behind them, sines of the angles by which attentions
            turn the queries and keys of a call's own tokens.
    """

    tensors: tuple[Tensor, ...] = ()
    places: tuple[tuple[int, ...], ...] = ()
    turned: bool = False

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

    def with_angles(self, angles: Float[Tensor, "_rows head_dim"]) -> Self:
        """These, of tensors of rules alone, and a call's angles."""
        return self._replace(tensors=(*self.tensors, angles), turned=True)

    def pairs(self) -> list[Tensor | None]:
        """As a step has its tensors: each beside a bias that is missing."""
        return [part for tensor in self.tensors for part in (tensor, None)]

    def are_plain(self) -> bool:
        """Whether a call may come again that reads these: of one dtype with a call's tokens they need not be."""
        return all(are_plain(tensor) and lies_plainly(tensor) for tensor in self.tensors)

    def learn(self) -> bool:
        """Whether a gradient is wanted of one, which a step does not have."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)


#: Of attentions without rules.
NO_RULES: Final = RuleTensors()


def as_read(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Such tensors as the kernels read them where they lie."""
    return [tensor.detach().to(torch.float32).contiguous() for tensor in tensors]


def with_rules_on(problem: Problem, tensors: Sequence[Tensor]) -> Problem:
    """The problem with its rules on other tensors."""
    if not tensors:
        return problem
    left = iter(tensors)
    return problem.with_scores(tuple(rule.mapped(lambda tensor: next(left)) for rule in problem.scores))
