"""Gradients of attention by the CPU kernels: of query, key, value and the rules' parameters, with NaN contained."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from clearhead.backends.containment import Contained, contained, only_finite
from clearhead.backends.recorded import recorded_attention
from clearhead.choices import is_invariant
from clearhead.ops.attention import Gradients, Saved, StatisticGradients, attend, attend_backward
from clearhead.problem import Problem
from clearhead.sequence_sums import sum_of_sequences
from clearhead.statistics import Want

__all__ = ["Arrived", "gradients", "parameter_gradient"]


@dataclass(frozen=True)
class Arrived:
    """Incoming gradients: of the output, the log-sum-exp, and statistics by name; forward's row statistics and want."""

    output: Tensor
    lse: Tensor | None = None
    statistics: dict[str, Tensor] = field(default_factory=dict)
    row_statistics: dict[str, Tensor] = field(default_factory=dict)
    want: Want = field(default_factory=Want)

    def finite(self) -> Arrived:
        """The same with 0 for NaN and infinity."""
        return replace(
            self,
            output=only_finite(self.output),
            lse=None if self.lse is None else only_finite(self.lse),
            statistics={name: only_finite(grad) for name, grad in self.statistics.items()},
            # Backward recognises an empty row by its largest score of -inf.
            row_statistics={
                name: values if values is None or name == "ties" else only_finite(values)
                for name, values in self.row_statistics.items()
            },
        )


def gradients(problem: Problem, rows: Saved, arrived: Arrived) -> list[Tensor]:
    """Gradients of query, key, value and the rules' parameters."""
    pulls = _Pulls.of(problem, rows, arrived)
    grads = _backward(problem, rows, arrived.output, pulls)
    if grads is None and _meets_infinity(problem):
        return _by_tiles(problem, arrived)
    if grads is None:
        # NaN under a mask is rare, so what it needs is not saved but recomputed.
        recomputed = attend(problem, Want(lse=True), for_backward=False)
        assert recomputed.lse is not None
        clean = contained(problem, recomputed.output, recomputed.lse, arrived.output, pulls.bad_rows)
        # A row maximum of infinity and a reciprocal sum of 0 make all weights of the row 0.
        gone = rows.softmax.new_tensor([torch.inf, 0.0])
        softmax = torch.where(clean.unweighted[..., None], gone, rows.softmax)
        finite = replace(rows, output=None if rows.output is None else only_finite(rows.output), softmax=softmax)
        arrived = arrived.finite()
        grads = _backward(clean.problem, finite, arrived.output, _Pulls.of(problem, rows, arrived).finite())
        assert grads is not None
        _spoil(clean, grads)
    return [
        *grads.tensors,
        *(parameter_gradient(problem, parameter, grads, rows.lse) for parameter in problem.rule_parameters),
    ]


def _meets_infinity(problem: Problem) -> bool:
    """Whether a query or a key of float16 is infinite: the largest float16 does not make weights of 0."""
    half = problem.query.dtype == torch.float16
    return half and bool(problem.query.isinf().any() or problem.key.isinf().any())


def _by_tiles(problem: Problem, arrived: Arrived) -> list[Tensor]:
    """Gradients of query, key, value and the rules' parameters, by tiles, which keep infinite scores."""
    # Imported here, since most programs do not need the module.
    from clearhead.backends import tiled

    leaves = [tensor.detach().requires_grad_() for tensor in (problem.query, problem.key, problem.value)]
    with torch.enable_grad():
        if not leaves[0].view_as(leaves[0]).requires_grad:
            # Within an operator of a graph autograd records nothing.
            return [torch.full_like(one, torch.nan) for one in (*leaves, *problem.rule_parameters)]
    grads = {"output": arrived.output, **({} if arrived.lse is None else {"lse": arrived.lse}), **arrived.statistics}
    want = replace(arrived.want, lse=True)
    needs = [True] * (3 + len(problem.rule_parameters))
    computed = recorded_attention(problem.with_tensors(*leaves), want, grads, needs, run=tiled.run)
    inputs = [*leaves, *problem.rule_parameters]
    return [torch.zeros_like(part) if grad is None else grad for part, grad in zip(inputs, computed, strict=True)]


def _spoil(clean: Contained, grads: Gradients) -> None:
    """Write NaN into the gradients that the kernel computed from finite tensors."""
    grads.tensors = clean.spoil(grads.tensors)
    grads.delta = grads.delta.masked_fill(clean.spoiled, torch.nan)
    for rule in clean.problem.elementwise:
        for learned in rule.parameters():
            if learned.requires_grad:
                grads.rules[id(learned)] = clean.spoil_learned(rule, grads.rules[id(learned)])


def _received_mean(problem: Problem, grad: Tensor) -> Tensor:
    """Each row's weighted mean of one value per key, ``[batch, heads, q_len]``: attention with ``value_dim`` 1."""
    group = problem.num_heads // problem.num_kv_heads
    query, key = (tensor.detach().to(torch.float32) for tensor in (problem.query, problem.key))
    values = grad.to(torch.float32)[..., None]
    alone = replace(problem, query=query, key=key.repeat_interleave(group, dim=1), value=values, dropout=0.0)
    if problem.mask is not None:
        # Forward's parts of the mask, so that a user's function is not called a second time.
        alone.__dict__["mask_parts"] = problem.mask_parts
    return attend(alone, Want(), for_backward=False).output[..., 0]


@dataclass(frozen=True)
class _Pulls:
    """The effect of gradients other than the output's: a sum for each row, and what statistics add key by key."""

    row_sums: Tensor | None
    by_key: StatisticGradients | None = None
    received: Tensor | None = None

    @classmethod
    def of(cls, problem: Problem, rows: Saved, arrived: Arrived) -> _Pulls:
        if not arrived.statistics:
            return cls(arrived.lse)
        row_statistics, received = arrived.row_statistics, arrived.statistics.get("received")
        if received is not None:
            row_statistics = {**row_statistics, "received_mean": _received_mean(problem, received)}
        assert rows.lse is not None
        by_key = StatisticGradients(problem, arrived.statistics, row_statistics, rows.lse, arrived.want.sink)
        return cls(-by_key.row_sums if arrived.lse is None else arrived.lse - by_key.row_sums, by_key, received)

    @property
    def bad_rows(self) -> Tensor | None:
        """Rows with a gradient of NaN or infinity."""
        return None if self.row_sums is None else ~torch.isfinite(self.row_sums)

    def finite(self) -> _Pulls:
        """The same with 0 for sums that are not finite."""
        return replace(self, row_sums=None if self.row_sums is None else only_finite(self.row_sums))


def _backward(problem: Problem, rows: Saved, grad_output: Tensor, pulls: _Pulls) -> Gradients | None:
    """The kernel's call; None if there is NaN or infinity under a mask."""
    # The kernel checks tokens and rows; the gradient of a key that no query may attend to is in no row's sum.
    received = pulls.received
    if problem.mask is not None and received is not None and not bool(torch.isfinite(received).all()):
        return None
    return attend_backward(problem, rows, grad_output, pulls.row_sums, pulls.by_key)


def parameter_gradient(problem: Problem, parameter: Tensor, grads: Gradients, lse: Tensor | None) -> Tensor:
    """One parameter's gradient in its own dtype."""
    if problem.sink is not None and parameter is problem.sink.logits:
        assert lse is not None
        # A sink's weight is exp(logit - lse) and its value 0, so its gradient is -weight * delta.
        logits = parameter.detach().to(torch.float32).view(1, -1, 1)
        # In an empty row a logit of -inf gives -inf - -inf, which is NaN.
        weight = torch.exp(logits - lse).masked_fill(logits == -torch.inf, 0.0)
        rows = weight * grads.delta
        per_head = -(sum_of_sequences(rows.sum(2)) if is_invariant() else rows.sum(dim=(0, 2)))
        grad = per_head if parameter.shape == per_head.shape else per_head.sum().view(1)
    else:
        grad = grads.rules[id(parameter)]
    return grad.to(parameter.dtype)
