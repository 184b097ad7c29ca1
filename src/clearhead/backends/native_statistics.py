"""What the CPU kernels gather besides the output: a ``Want`` written down for them, and gradients of what they gave."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from clearhead.backends.native_header import Statistics
from clearhead.problem import Problem
from clearhead.statistics import Want

__all__ = ["DIFFERENTIABLE", "Gathered", "Grads", "kernel_gives"]

#: Statistics that backward takes gradients of.
DIFFERENTIABLE: Final = ("max_score", "entropy", "distance", "sink", "received")
#: One number a row, written under the statistic's own name.
_ROW_NUMBERS: Final = ("max_score", "entropy", "distance", "sink")


def kernel_gives(want: Want) -> bool:
    """Whether the kernels have to gather anything; the log-sum-exp is at hand anyway."""
    return bool(want.names - {"lse"})


class Gathered:
    """A ``ch_statistics`` for one call and the tensors that the kernel fills, by their names in ``Observation``.

    ``structure`` must outlive the call. ``found`` is complete once the kernel has returned; ``for_backward`` adds what
    ``Grads`` needs.
    """

    def __init__(self, problem: Problem, want: Want, *, for_backward: bool) -> None:
        self.problem = problem
        self.structure = Statistics()
        self.found: dict[str, Tensor] = {}
        self._rows_again: Tensor | None = None
        names = want.names
        for name in _ROW_NUMBERS:
            if name in names:
                self._result(name, name, problem.q_len)
        if "max_score" in names and for_backward:
            self._result("ties", "ties", problem.q_len, 2)
        self.structure.sink_keys = want.sink
        if want.top_k:
            self.structure.top_k = want.top_k
            self._result("top_weights", "top_weights", problem.q_len, want.top_k)
            self._result("top_indices", "top_indices", problem.q_len, want.top_k, dtype=torch.int64)
        if want.received:
            self._result("received", "received", problem.k_len)
        if want.row_weights is not None:
            self._row_weights(want.row_weights)
        if want.heatmap:
            # A tile larger than the whole is the whole.
            side = self.structure.heatmap = min(want.heatmap, max(1, problem.q_len, problem.k_len))
            tiles = (-(-problem.q_len // side), -(-problem.k_len // side))
            for name in ("heatmap_max", "heatmap_mean"):
                self._result(name, name, *tiles)
        if want.rows is not None:
            self._rows(want.rows_on(problem.query.device))

    def _result(self, field: str, name: str, *sizes: int, dtype: torch.dtype = torch.float32) -> None:
        tensor = self.problem.query.new_empty((self.problem.batch, self.problem.num_heads, *sizes), dtype=dtype)
        self.found[name] = tensor
        setattr(self.structure, field, tensor.data_ptr())

    def _row_weights(self, weights: Tensor) -> None:
        self._weights = weights.detach().to(torch.float32).contiguous()
        count = weights.shape[2]
        self.structure.row_weights, self.structure.num_weights = self._weights.data_ptr(), count
        batch, head = self._weights.stride()[:2]
        self.structure.weight_batch = batch if weights.shape[0] > 1 else 0
        self.structure.weight_head = head if weights.shape[1] > 1 else 0
        self._result("weighted", "row_weights", count, self.problem.k_len)

    def _rows(self, rows: Tensor) -> None:
        chosen, self._rows_again = torch.unique(rows, return_inverse=True)
        self._slots = rows.new_full((self.problem.q_len,), -1, dtype=torch.int32)
        self._slots[chosen] = torch.arange(chosen.numel(), dtype=torch.int32, device=rows.device)
        self.structure.row_slots, self.structure.num_rows = self._slots.data_ptr(), chosen.numel()
        self._result("rows", "rows", chosen.numel(), self.problem.k_len)

    def results(self) -> dict[str, Tensor]:
        """The statistics by their names in ``Observation``, rows in the order they were asked for."""
        if self._rows_again is None:
            return self.found
        return {**self.found, "rows": self.found["rows"][:, :, self._rows_again]}


class Grads:
    """Gradients of statistics as the kernels take them: some as they are, and all in the rows' sums.

    With weights ``P`` of a row and ``G_j`` what statistics add to the gradient of ``P_j``, a score's gradient is
    ``P_j (G_j - sum_k P_k G_k)``. The kernels make ``G_j``; ``row_sums`` is the sum.
    """

    def __init__(
        self, problem: Problem, given: Mapping[str, Tensor], found: Mapping[str, Tensor], lse: Tensor, sink_keys: int
    ) -> None:
        self.structure = Statistics(sink_keys=sink_keys)
        self.row_sums = torch.zeros_like(lse)
        self._held: list[Tensor] = []
        if "max_score" in given:
            self._keep("grad_max", given["max_score"])
            self._keep("ties", found["ties"])
        if "entropy" in given:
            self._add_row("entropy", given["entropy"], found["entropy"] - _mass(problem, lse))
        for name in ("distance", "sink"):
            if name in given:
                self._add_row(name, given[name], found[name])
        if "received" in given:
            self._keep("grad_received", given["received"])
            self.row_sums += found["received_mean"]

    def _keep(self, name: str, grad: Tensor) -> None:
        grad = grad.to(torch.float32).contiguous()
        self._held.append(grad)
        setattr(self.structure, name, grad.data_ptr())

    def _add_row(self, name: str, grad: Tensor, factor: Tensor) -> None:
        self._keep(f"grad_{name}", grad)
        self.row_sums += grad * factor

    def pointer(self) -> int:
        """Where the structure lies."""
        return ctypes.addressof(self.structure)


def _mass(problem: Problem, lse: Tensor) -> Tensor:
    """The sum of each row's weights: 1, less what a sink takes; 0 for a row without keys."""
    mass = (lse != -torch.inf).to(torch.float32)
    if problem.sink is None:
        return mass
    logits = problem.sink.logits.detach().to(torch.float32).view(1, -1, 1)
    return mass - torch.exp(logits - lse).masked_fill(logits == -torch.inf, 0.0)
