"""The small parts of torch's transformer layers that take time beside attention: products and dropout."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.fx import Proxy, Tracer

from clearhead.nn.dropout import Dropout, is_plain
from clearhead.projection import project

__all__ = ["SwappedDropout", "SwappedLinear", "is_plain", "leaf"]


class SwappedLinear(nn.Linear):
    """``nn.Linear`` through the faster product; put in place by ``swap``, not made directly."""

    def forward(self, input: Tensor) -> Tensor:
        # What is not plain is torch's there.
        return project(input, self.weight, self.bias)


class SwappedDropout(Dropout):
    """``nn.Dropout``, faster; put in place by ``swap``, not made directly."""


def leaf(module: nn.Module, *args: object, **kwargs: object) -> Any:
    """A call of ``module``, one argument at least a proxy, as one node of the graph that ``torch.fx`` records: what
    its tracer makes of torch's own modules."""
    tracer = next(each.tracer for each in args if isinstance(each, Proxy))
    assert isinstance(tracer, Tracer)
    return tracer.create_proxy("call_module", tracer.path_of_module(module), args, kwargs)
