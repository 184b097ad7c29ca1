"""``Execution``: computes a batch of sequences by one of the forms, or zeros if there are no tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from clearhead.linear import native
from clearhead.linear.forms import FORMS, whole
from clearhead.linear.recurrence import Recurrence
from clearhead.linear.state import LinearState

__all__ = ["Execution", "zeros"]

#: Up to this number of tokens the recurrent form is faster than the chunked form by torch's operations.
_ONE_BY_ONE: Final = 4


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How sequences are computed.

    Attributes:
        function: the public name in errors.
        causal: whether a query attends only to keys up to its own position.
        form: ``"auto"`` or the name of a form.
        chunk: tokens per chunk.
        features: number of features of a token.
    """

    function: str
    causal: bool
    form: str
    chunk: int
    features: int

    def run(self, call: Recurrence, state: LinearState | None) -> tuple[Tensor, LinearState]:
        """The output of one batch of sequences and the state after it."""
        start, length = call.start(state, self.features), call.key.shape[2]
        form = self.form
        if not self.causal:
            return whole(call, start, form, self.chunk)
        if 0 in call.key.shape[:3]:
            return zeros(call), start
        # A chunk larger than the sequence would be padded.
        chunk = min(self.chunk, 1 << (length - 1).bit_length())
        if form == "auto":
            form = "recurrent" if length <= _ONE_BY_ONE and not native.takes(call, chunk) else "chunked"
        return FORMS[form](call, start, chunk)


def zeros(call: Recurrence) -> Tensor:
    """An output of zeros: empty sums of the call's tensors, so that it has a graph and gradients of 0."""
    parts = (call.query, call.key, call.value, call.log_decay, call.rate)
    nothing = torch.stack([part[:, :, :0].sum() for part in parts if part is not None]).sum()
    return nothing.expand(*call.query.shape[:3], call.value.shape[-1])
