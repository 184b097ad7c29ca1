"""The function under test: called on a case, and held against the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from clearhead.verify.budget import excess, rounding
from clearhead.verify.case import Case
from clearhead.verify.masks import Spoken, spoken
from clearhead.verify.oracle import attend, slope
from clearhead.verify.process import undisturbed, undrawn
from clearhead.verify.signatures import Answer, Call, Signature

__all__ = ["NAMES", "Expected", "Rule", "Subject", "Tensors", "expected", "expected_of"]

Tensors = tuple[Tensor, Tensor, Tensor]

NAMES = ("dQ", "dK", "dV", "the gradient of what is learned")


@dataclass(frozen=True, eq=False)
class Rule:
    """Something that changes scores, in the oracle's words.

    Attributes:
        learned: the tensor it learns, if any.
        meaning: options of ``attend``, given that tensor.
    """

    learned: Tensor | None
    meaning: Callable[[Tensor], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Expected:
    """What a case should give: in float64, by the textbook in the call's dtype, and the floor of each budget.

    The four of each are output, dQ, dK, dV; a fifth is the gradient of what a rule learns.
    """

    exact: tuple[Tensor, ...]
    textbook: tuple[Tensor, ...]
    floors: tuple[float, ...]
    weights: Tensor
    lse: Tensor


def expected_of(
    tensors: Tensors,
    *,
    allowed: Tensor | None = None,
    scale: float | None = None,
    keep: Tensor | None = None,
    grad: Tensor | None = None,
    rule: Rule | None = None,
) -> Expected:
    """The truth, the textbook and the budgets of one call, for the gradient ``grad`` of its output."""
    dtype = tensors[0].dtype
    inputs = tensors if rule is None or rule.learned is None else (*tensors, rule.learned)
    found = []
    for own in (torch.float64, dtype):
        leaves = tuple(tensor.detach().to(own).requires_grad_() for tensor in inputs)
        options = {} if rule is None else rule.meaning(leaves[-1])
        kept = None if keep is None else keep.to(own)
        done = attend(leaves[0], leaves[1], leaves[2], allowed=allowed, scale=scale, keep=kept, **options)
        handed = slope(done.output) if grad is None else grad.to(own)
        found.append((done, (done.output.detach(), *torch.autograd.grad(done.output, leaves, handed))))
    (truth, exact), (_, textbook) = found
    sizes, terms = _sums(inputs)
    floors = tuple(
        rounding(one, count, size, dtype=dtype, largest_score=truth.largest_score) if one.numel() else 0.0
        for one, size, count in zip(exact, sizes, terms, strict=True)
    )
    return Expected(exact, tuple(one.double() for one in textbook), floors, truth.weights.detach(), truth.lse.detach())


def _sums(inputs: tuple[Tensor, ...]) -> tuple[list[float], list[int]]:
    """Of output, dQ, dK, dV and the gradient of what a rule learns: the size of the numbers summed, and how many."""
    query, key, value = (_rms(tensor) for tensor in inputs[:3])
    batch, heads, q_len, _ = inputs[0].shape
    k_len = inputs[1].shape[2]
    most = max(q_len * max(1, heads // max(1, inputs[1].shape[1])), k_len)
    sizes, terms = [value, value * key, value * query, 1.0], [most] * 4
    for learned in inputs[3:]:
        sizes.append(value * inputs[2].shape[3] ** 0.5)
        terms.append(max(most, batch * heads * q_len * k_len // max(1, learned.numel())))
    return sizes, terms


def expected(case: Case, dtype: torch.dtype, device: torch.device) -> Expected:
    """What a case should give; poisoned places count as 0, and nobody may attend to them.

    How a mask is handed over and how tensors lie in memory change no number, so that one oracle serves them all.
    """
    return _expected(_meant(case), dtype, device)


@lru_cache(maxsize=4096)
def _meant(case: Case) -> Case:
    """The case by what decides its numbers."""
    repeated = case.layout.rpartition(": ")[2] in ("expanded", "one head")
    return replace(
        case,
        form="none",
        poison="none",
        dropout=0.0,
        layout=case.layout if repeated else "plain",
        end=case.end and case.mask != "none" and case.q_len != case.k_len,
    )


@lru_cache(maxsize=512)
def _expected(case: Case, dtype: torch.dtype, device: torch.device) -> Expected:
    mask = spoken(case)
    return expected_of(
        case.draw(dtype, device), allowed=None if mask is None else mask.allowed.to(device), scale=case.scale
    )


def _rms(tensor: Tensor) -> float:
    return tensor.detach().double().square().mean().sqrt().item() if tensor.numel() else 0.0


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A function, the convention it is called by, and the numbers it is tried on.

    Attributes:
        fn: the attention, or the factory of modules.
        signature: how it is called.
        dtype: of query, key and value.
        device: where they lie.
        linear_memory: whether the function is held to memory that grows with the lengths, not with their product.
    """

    fn: Callable[..., Any]
    signature: Signature
    dtype: torch.dtype
    device: torch.device
    linear_memory: bool = False

    def draw(self, case: Case) -> Tensors:
        return case.draw(self.dtype, self.device)

    def spoken(self, case: Case) -> Spoken | None:
        mask = spoken(case)
        return None if mask is None else Spoken(mask.allowed.to(self.device), mask.ours)

    def call(self, case: Case, tensors: Tensors, **changes: Any) -> Answer:
        """Run the function on these tensors under the case's mask.

        Random numbers begin at the case's seed, or at ``seed``, and go on from where they are with None. The state of
        the process is put back; ``changed``, a list, is told what had become of it. What is drawn to make a module is
        no part of its call.
        """
        settings: dict[str, Any] = {
            "mask": self.spoken(case),
            "form": case.form,
            "offset": case.offset,
            "scale": case.scale,
            "dropout": case.dropout,
        } | changes
        seed, changed = settings.pop("seed", case.seed), settings.pop("changed", [])
        query, key, value = tensors
        with undisturbed() as found, nullcontext() if seed is None else self._seeded(seed):
            asked = Call(query=query, key=key, value=value, **settings)
            made = self.signature.made(self.fn, asked)
            with self._watched(asked.dropout, asked.training) as drawn:
                answer = self.signature.call(made, asked)
        changed += [*found, *drawn]
        return answer

    def _watched(self, dropout: float, training: bool) -> AbstractContextManager[list[str]]:
        """Random numbers stay where they are, but for those of dropout."""
        return nullcontext([]) if dropout and training else undrawn(self.device)

    @contextmanager
    def _seeded(self, seed: int) -> Iterator[None]:
        """Random numbers begin at ``seed``, and afterwards where they were."""
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            # torch.manual_seed would also note where it was called from, for CUDA, which takes longer than the call.
            torch.default_generator.manual_seed(seed)
            if self.device.type == "cuda":
                torch.cuda.manual_seed(seed)
            yield

    def gradients(
        self, case: Case, tensors: Tensors, grad: Tensor | None = None, learned: Tensor | None = None, **changes: Any
    ) -> list[Tensor] | None:
        """Output, dQ, dK, dV and the gradient of ``learned``; None where the output carries no gradient."""
        query, key, value = (tensor.detach().requires_grad_() for tensor in tensors)
        leaves = (query, key, value) if learned is None else (query, key, value, learned)
        output = self.call(case, (query, key, value), **changes).output
        if not output.requires_grad:
            return None
        handed = slope(output) if grad is None else grad
        with undisturbed() as disturbed, self._watched(case.dropout, changes.get("training", False)) as drawn:
            found = torch.autograd.grad(output, leaves, handed, allow_unused=True)
        changes.get("changed", []).extend([*disturbed, *drawn])
        return [
            output.detach(),
            *(torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, found, strict=True)),
        ]

    def expected(self, case: Case) -> Expected:
        return expected(case, self.dtype, self.device)

    def off_budget(self, found: list[Tensor], wanted: Expected) -> str | None:
        """The first of output, dQ, dK, dV, and what is learned, that is not within its budget, in words."""
        return next((wrong for place, one in enumerate(found) if (wrong := _off(place, one, wanted))), None)

    def off_gradient(self, place: int, found: Tensor, wanted: Expected) -> str | None:
        """The same for one gradient, the one that ``NAMES[place]`` names."""
        return _off(place + 1, found, wanted)


def _off(place: int, found: Tensor, wanted: Expected) -> str | None:
    wrong = excess(found, wanted.textbook[place], wanted.exact[place], wanted.floors[place])
    return None if wrong is None else f"{('output', *NAMES)[place]} is {wrong}"
