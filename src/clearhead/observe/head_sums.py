"""Sums of each head's figures over the queries of a sequence, taken while a model runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from clearhead.errors import UnsupportedError
from clearhead.observe.band import band
from clearhead.observe.layers import not_called
from clearhead.observe.packed import sequences_of
from clearhead.statistics import Observation, Want
from clearhead.watch import Attend, Call, watching

__all__ = ["FIGURES", "head_sums"]

#: Figures of a head, each a sum over queries: entropy in nats, mean distance in tokens, and the weight on the first
#: token, the token before the query, the token after it, and (for queries after the first) the query's own token.
FIGURES: Final = ("entropy", "distance", "first", "previous", "following", "same")
_DISTANCES: Final = [1, -1, 0]
_WANT: Final = Want(entropy=True, distance=True, sink=1, lse=True)


def head_sums(
    function: str, model: nn.Module, ids: Tensor, layers: dict[str, nn.Module]
) -> dict[str, NDArray[np.float64]]:
    """Run a model on token ids ``[batch, length]`` without padding, and sum the figures of each head over queries.

    ``layers`` are attention layers of the model by name, from ``choose_layers``.

    Returns:
        For each call of such a layer, by its name and in the model's order, float64 ``[batch, heads, figures]``.

    Raises:
        UnsupportedError: no layer was called, or one is no self-attention.

    Cost: one pass for the statistics, and three diagonals; memory is linear in the length.
    """
    watcher = _Summing(function, layers)
    with torch.no_grad(), watching(watcher):
        model(ids)
    if not any(watcher.sums.values()):
        raise not_called(function, model, list(layers))
    return {
        name if len(calls) == 1 else f"{name} (call {place} of {len(calls)})": sums
        for name, calls in watcher.sums.items()
        for place, sums in enumerate(calls, start=1)
    }


class _Summing:
    """A ``Watcher`` that keeps nothing of a call but its sums."""

    edits = False

    def __init__(self, function: str, chosen: dict[str, nn.Module]) -> None:
        self._function = function
        self._names = {module: name for name, module in chosen.items()}
        self.sums: dict[str, list[NDArray[np.float64]]] = {name: [] for name in chosen}

    def attend(self, owner: object, call: Call, want: Want, inner: Attend) -> Observation:
        """Compute the call, and add its sums if the layer was chosen."""
        name = self._names.get(owner) if isinstance(owner, nn.Module) else None
        if name is None or call.silent:
            return inner(call, want)
        packed = sequences_of(call)
        if packed is None and not want.names:
            observed = inner(call, _WANT)
            self.sums[name].append(self._summed(call, observed))
            return observed
        unpacked = call if packed is None else packed.call(call)
        statistics = inner(replace(unpacked, silent=True).with_options(dropout=0.0), _WANT)
        self.sums[name].append(self._summed(unpacked, statistics))
        return inner(call, want)

    def _summed(self, call: Call, observed: Observation) -> NDArray[np.float64]:
        problem = call.problem()
        if problem.q_len != problem.k_len or problem.query_offset != 0:
            got = f"q_len {problem.q_len}, k_len {problem.k_len}"
            must, then = "have self-attention over whole texts", "Choose other layers."
            raise UnsupportedError.about(self._function, "model", must=must, got=got, then=then)
        assert observed.entropy is not None
        assert observed.distance is not None
        assert observed.sink is not None
        shape = (problem.batch, problem.num_heads, problem.q_len)
        assert observed.lse is not None
        lse = observed.lse.view(shape)
        weights, _ = band(problem, _DISTANCES, lse=lse)
        weights[:, :, 0, 2] = 0.0
        every = [observed.entropy.view(shape), observed.distance.view(shape), observed.sink.view(shape)]
        every += weights.unbind(dim=-1)
        # NumPy sums in the same order whatever the number of threads.
        return np.stack([each.double().cpu().numpy().sum(axis=-1) for each in every], axis=-1)
