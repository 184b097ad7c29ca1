"""The function under test: called on a case, and compared with the oracle."""

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
from clearhead.verify.signatures import Answer, AttentionCall, CallingConvention

__all__ = ["NAMES", "Expected", "Rule", "Subject", "Tensors", "expected", "expected_of"]

Tensors = tuple[Tensor, Tensor, Tensor]

NAMES = ("dQ", "dK", "dV", "the gradient of what is learned")


@dataclass(frozen=True, eq=False)
class Rule:
    """A score rule as the oracle applies it.

    Attributes:
        learned: the rule's learned tensor, or None.
        meaning: a function from that tensor to options of ``attend``.
    """

    learned: Tensor | None
    meaning: Callable[[Tensor], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Expected:
    """The expected results of a case: in float64, by the textbook in the call's dtype, and the floor of each budget.

    Each tuple has the output, dQ, dK, dV, and the gradient of a rule's learned tensor if there is one.
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
    """The exact results, the textbook's and the budgets of one call, for the gradient ``grad`` of its output."""
    dtype = tensors[0].dtype
    inputs = tensors if rule is None or rule.learned is None else (*tensors, rule.learned)
    results = []
    for computed in (torch.float64, dtype):
        leaves = tuple(tensor.detach().to(computed).requires_grad_() for tensor in inputs)
        options = {} if rule is None else rule.meaning(leaves[-1])
        factors = None if keep is None else keep.to(computed)
        done = attend(leaves[0], leaves[1], leaves[2], allowed=allowed, scale=scale, keep=factors, **options)
        handed = slope(done.output) if grad is None else grad.to(computed)
        results.append((done, (done.output.detach(), *torch.autograd.grad(done.output, leaves, handed))))
    (truth, exact), (_, textbook) = results
    sizes, terms = _sums(inputs)
    floors = tuple(
        rounding(one, count, size, dtype=dtype, largest_score=truth.largest_score) if one.numel() else 0.0
        for one, size, count in zip(exact, sizes, terms, strict=True)
    )
    return Expected(exact, tuple(one.double() for one in textbook), floors, truth.weights.detach(), truth.lse.detach())


def _sums(inputs: tuple[Tensor, ...]) -> tuple[list[float], list[int]]:
    """The magnitude and number of the summed values, for output, dQ, dK, dV and the gradient of a learned tensor."""
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
    """The expected results of a case; poisoned tokens are masked and do not matter.

    The form of the mask and the memory layout do not matter either, so cases that differ only in them share an oracle.
    """
    return _expected(_meant(case), dtype, device)


@lru_cache(maxsize=4096)
def _meant(case: Case) -> Case:
    """The case, reduced to the parameters that decide its results."""
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
    """A function under test, its calling convention, dtype and device.

    Attributes:
        fn: the attention function, or the factory of modules.
        signature: the calling convention.
        dtype: dtype of query, key and value.
        device: device of query, key and value.
        linear_memory: whether the function must use memory linear in the lengths.
    """

    fn: Callable[..., Any]
    signature: CallingConvention
    dtype: torch.dtype
    device: torch.device
    linear_memory: bool = False

    def draw(self, case: Case) -> Tensors:
        """Query, key and value of a case, in the subject's dtype and on its device."""
        return case.draw(self.dtype, self.device)

    def spoken(self, case: Case) -> Spoken | None:
        """The mask of a case on the subject's device, or None."""
        mask = spoken(case)
        return None if mask is None else Spoken(mask.allowed.to(self.device), mask.ours)

    def call(self, case: Case, tensors: Tensors, **changes: Any) -> Answer:
        """Run the function on these tensors under the case's mask.

        The random state is that of the case's seed, or of ``seed``; None leaves it. The global state is restored, and
        descriptions of its changes are appended to the list ``changed``. The construction of a module is not counted.
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
        with undisturbed() as disturbed, nullcontext() if seed is None else self._seeded(seed):
            asked = AttentionCall(query=query, key=key, value=value, **settings)
            made = self.signature.made(self.fn, asked)
            with self._watched(asked.dropout, asked.training) as drawn:
                answer = self.signature.call(made, asked)
        changed += [*disturbed, *drawn]
        return answer

    def _watched(self, dropout: float, training: bool) -> AbstractContextManager[list[str]]:
        """Detect changes of the random state, unless dropout is active."""
        return nullcontext([]) if dropout and training else undrawn(self.device)

    @contextmanager
    def _seeded(self, seed: int) -> Iterator[None]:
        """Set the random state to ``seed``, and restore it at the end."""
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            # torch.manual_seed also records its caller for CUDA, which takes longer than a small call.
            torch.default_generator.manual_seed(seed)
            if self.device.type == "cuda":
                torch.cuda.manual_seed(seed)
            yield

    def gradients(
        self, case: Case, tensors: Tensors, grad: Tensor | None = None, learned: Tensor | None = None, **changes: Any
    ) -> list[Tensor] | None:
        """Output, dQ, dK, dV and the gradient of ``learned``; None if the output does not require a gradient."""
        query, key, value = (tensor.detach().requires_grad_() for tensor in tensors)
        leaves = (query, key, value) if learned is None else (query, key, value, learned)
        output = self.call(case, (query, key, value), **changes).output
        if not output.requires_grad:
            return None
        handed = slope(output) if grad is None else grad
        with undisturbed() as disturbed, self._watched(case.dropout, changes.get("training", False)) as drawn:
            gradients = torch.autograd.grad(output, leaves, handed, allow_unused=True)
        changes.get("changed", []).extend([*disturbed, *drawn])
        return [
            output.detach(),
            *(torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, gradients, strict=True)),
        ]

    def expected(self, case: Case) -> Expected:
        """The expected results of a case."""
        return expected(case, self.dtype, self.device)

    def off_budget(self, results: list[Tensor], wanted: Expected) -> str | None:
        """A description of the first of output, dQ, dK, dV and the learned gradient over its budget, or None."""
        return next((wrong for place, one in enumerate(results) if (wrong := _off(place, one, wanted))), None)

    def off_gradient(self, place: int, gradient: Tensor, wanted: Expected) -> str | None:
        """A description of one gradient, named ``NAMES[place]``, if it exceeds its budget; else None."""
        return _off(place + 1, gradient, wanted)


def _off(place: int, result: Tensor, wanted: Expected) -> str | None:
    wrong = excess(result, wanted.textbook[place], wanted.exact[place], wanted.floors[place])
    return None if wrong is None else f"{('output', *NAMES)[place]} is {wrong}"
