"""The function under test: called on a case, and held against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from clearhead.verify.budget import excess, rounding
from clearhead.verify.case import Case
from clearhead.verify.masks import Spoken, spoken
from clearhead.verify.oracle import attend, slope
from clearhead.verify.signatures import Answer, Call, Signature

__all__ = ["NAMES", "Expected", "Subject", "Tensors", "expected", "expected_of"]

Tensors = tuple[Tensor, Tensor, Tensor]

NAMES = ("dQ", "dK", "dV")


@dataclass(frozen=True, eq=False)
class Expected:
    """What a case should give: in float64, by the textbook in the call's dtype, and the floor of each budget.

    The four of each are output, dQ, dK, dV.
    """

    exact: tuple[Tensor, ...]
    textbook: tuple[Tensor, ...]
    floors: tuple[float, ...]
    weights: Tensor
    lse: Tensor


def expected_of(
    tensors: Tensors, *, allowed: Tensor | None = None, scale: float | None = None, bias: Tensor | None = None,
    keep: Tensor | None = None,
) -> Expected:  # fmt: skip
    """The truth, the textbook and the budgets of one call."""
    dtype = tensors[0].dtype
    found = []
    for own in (torch.float64, dtype):
        leaves = tuple(tensor.detach().to(own).requires_grad_() for tensor in tensors)
        kept = None if keep is None else keep.to(own)
        done = attend(*leaves, allowed=allowed, scale=scale, keep=kept, bias=None if bias is None else bias.to(own))
        gradients = torch.autograd.grad(done.output, leaves, slope(done.output))
        found.append((done, (done.output.detach(), *gradients)))
    (truth, exact), (_, textbook) = found
    query, key, value = (_rms(tensor) for tensor in tensors)
    sizes = (value, value * key, value * query, 1.0)
    terms = max(tensors[0].shape[2] * max(1, tensors[0].shape[1] // max(1, tensors[1].shape[1])), tensors[1].shape[2])
    floors = tuple(
        rounding(one, terms, size, dtype=dtype, largest_score=truth.largest_score) if one.numel() else 0.0
        for one, size in zip(exact, sizes, strict=True)
    )
    return Expected(exact, textbook, floors, truth.weights.detach(), truth.lse.detach())


@lru_cache(maxsize=512)
def expected(case: Case, dtype: torch.dtype, device: torch.device) -> Expected:
    """What a case should give; poisoned places count as 0, and nobody may attend to them."""
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
        """Run the function on these tensors under the case's mask; random numbers begin at the case's seed."""
        settings: dict[str, Any] = {
            "mask": self.spoken(case), "form": case.form, "offset": case.offset, "scale": case.scale,
            "dropout": case.dropout,
        } | changes  # fmt: skip
        seed = settings.pop("seed", case.seed)
        query, key, value = tensors
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            # torch.manual_seed would also note where it was called from, for CUDA, which takes longer than the call.
            torch.default_generator.manual_seed(seed)
            if self.device.type == "cuda":
                torch.cuda.manual_seed(seed)
            return self.signature.call(self.fn, Call(query=query, key=key, value=value, **settings))

    def gradients(
        self, case: Case, tensors: Tensors, grad: Tensor | None = None, **changes: Any
    ) -> list[Tensor] | None:
        """Output, dQ, dK and dV; None where the output carries no gradient."""
        query, key, value = (tensor.detach().requires_grad_() for tensor in tensors)
        leaves = (query, key, value)
        output = self.call(case, leaves, **changes).output
        if not output.requires_grad:
            return None
        handed = slope(output) if grad is None else grad
        found = torch.autograd.grad(output, leaves, handed, allow_unused=True)
        return [
            output.detach(),
            *(torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, found, strict=True)),
        ]

    def expected(self, case: Case) -> Expected:
        return expected(case, self.dtype, self.device)

    def off_budget(self, found: list[Tensor], wanted: Expected) -> str | None:
        """The first of output, dQ, dK, dV that is not within its budget, in words."""
        names = ("output", *NAMES)
        for place, one in enumerate(found):
            wrong = excess(one, wanted.textbook[place], wanted.exact[place], wanted.floors[place])
            if wrong is not None:
                return f"{names[place]} is {wrong}"
        return None
