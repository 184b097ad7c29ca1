"""The speed of one attention module of the model against torch's module with the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.benchmark.machine import machine, threads, versions
from clearhead.benchmark.timing import Timing, interleaved
from clearhead.demo.inside import Layer
from clearhead.nn.attention import MultiHeadAttention

__all__ = ["Speed", "as_torch", "measure"]

OURS, TORCH = "clearhead", "torch.nn.MultiheadAttention"


@dataclass(frozen=True)
class Speed:
    """Seconds per call of both modules on the same input, and the largest difference of their outputs."""

    shape: tuple[int, ...]
    ours: Timing
    torch: Timing
    difference: float
    threads: int

    @property
    def times(self) -> float:
        """Torch's median time divided by clearhead's."""
        return self.torch.median / self.ours.median

    def conditions(self) -> str:
        """Description of the measurement: runs, shape, versions, threads, processor."""
        package_versions = versions()
        return (
            f"medians of {len(self.ours.runs)} interleaved runs, eval, float32, [batch, tokens, width] "
            f"{list(self.shape)}, torch {package_versions['torch']}, {self.threads} thread{'s' * (self.threads != 1)}, "
            f"{machine()['processor']}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The speeds as JSON values."""
        return {
            "shape": list(self.shape),
            "seconds": {OURS: self.ours.to_dict(), TORCH: self.torch.to_dict()},
            "times_as_fast": self.times,
            "largest_difference": self.difference,
            "versions": versions(),
            "threads": threads(),
            "machine": machine(),
        }


def as_torch(module: MultiHeadAttention) -> nn.MultiheadAttention:
    """A ``torch.nn.MultiheadAttention`` with the weights of ``module``."""
    assert module.output_projection is not None
    parts = (module.query_projection, module.key_projection, module.value_projection)
    new = nn.MultiheadAttention(module.embed_dim, module.num_heads, batch_first=True)
    with torch.no_grad():
        new.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        new.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
        new.out_proj.weight.copy_(module.output_projection.weight)
        new.out_proj.bias.copy_(module.output_projection.bias)
    return new.eval()


def measure(layer: Layer, *, repeats: int, seconds: float) -> Speed:
    """Time both modules on the input of the model's attention."""
    ours, theirs, x = layer.module.eval(), as_torch(layer.module), layer.x

    def run_ours() -> Tensor:
        output: Tensor = ours(x)
        return output

    def run_torch() -> Tensor:
        output: Tensor = theirs(x, x, x, need_weights=False)[0]
        return output

    with torch.no_grad():
        difference = (run_ours() - run_torch()).abs().max().item()
        timings = interleaved({OURS: run_ours, TORCH: run_torch}, repeats=repeats, seconds=seconds)
    return Speed(tuple(x.shape), timings[OURS], timings[TORCH], difference, torch.get_num_threads())
