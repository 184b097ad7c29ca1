"""Linear attention and its variants against full attention, over growing lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final, Self

import torch
from torch import Tensor

from clearhead import linear
from clearhead.benchmark.cases import Comparison, PlainRow
from clearhead.benchmark.peers import OURS, Call, Groups
from clearhead.benchmark.product import PRODUCT, yardsticks
from clearhead.functional.exact import attention
from clearhead.masks import Causal

__all__ = ["FULL", "LENGTHS", "LinearRow", "linear_rows"]

FULL: Final = "clearhead attention, causal"
"""Name of full attention among the contenders; it computes different numbers for the same tokens."""

LENGTHS: Final = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
#: Length from which the floors require linear attention to be faster.
CROSSING: Final = 1024

_FUNCTIONS: Final[Mapping[str, tuple[Callable[..., Any], Mapping[str, object]]]] = {
    "linear": (linear.linear_attention, {"causal": True}),
    "retention": (linear.retention, {}),
    "gated": (linear.gated_linear_attention, {}),
    "delta": (linear.delta_attention, {}),
}
#: Longest sequence whose exact numbers come from the parallel form; longer ones use chunks in float64.
_ALL_PAIRS: Final = 1024


@dataclass(frozen=True, kw_only=True)
class LinearRow(PlainRow):
    """A causal call of a linear attention function in its chunked form.

    Args:
        verb: ``"linear"`` (elu + 1, normalised), ``"retention"``, ``"gated"`` or ``"delta"``.
        shape: ``(batch, heads, length, head_dim)``.
        training: whether the backward pass is included.
        dtype: of the tensors.
        memory: whether peak memory is measured too.
    """

    verb: str
    shape: tuple[int, int, int, int]
    training: bool
    dtype: torch.dtype = torch.float32
    memory: bool = False

    @property
    def title(self) -> str:
        """Description of the work."""
        mode = "forward+backward" if self.training else "forward"
        return f"{self.verb} {'x'.join(map(str, self.shape))} {mode} {str(self.dtype)[6:]}"

    @property
    def group(self) -> str:
        """The function, the mode, and whether the length is below ``CROSSING``."""
        mode = "training" if self.training else "forward"
        return f"{self.verb}, {mode}, {'from' if self.shape[2] >= CROSSING else 'below'} {CROSSING} tokens"

    @property
    def operations(self) -> float | None:
        """Operations of ``linear``: products within the chunks (full squares) and products with the states.

        Forward: two of each kind. Backward: five within the chunks, one of them recomputed, and four with the states.
        None for the other functions, whose solves and decays are not counted.
        """
        if self.verb != "linear":
            return None
        batch, heads, length, dim = self.shape
        chunk = min(linear.CHUNK, length)
        within, states = (7, 6) if self.training else (2, 2)
        return 2.0 * batch * heads * length * (within * chunk * dim + states * dim * dim)

    def comparison(self) -> Comparison:
        """The contenders; full attention is timed but not compared, because it computes different numbers."""
        drawn, upstream = self._drawn()

        def by(dtype: torch.dtype, **options: object) -> Groups:
            leaves = {name: part.detach().to(dtype).requires_grad_(self.training) for name, part in drawn.items()}
            return self._call(leaves, upstream.to(dtype), lambda parts: self._ours(parts, **options))()

        form = "parallel" if self.shape[2] <= _ALL_PAIRS else "chunked"
        calls = {
            OURS: self._call(drawn, upstream, lambda parts: self._ours(parts, form="chunked")),
            FULL: self._call(
                drawn, upstream, lambda parts: attention(parts["query"], parts["key"], parts["value"], mask=Causal())
            ),
        }
        measure, unmeasured = yardsticks(self.dtype)
        return Comparison(
            title=self.title,
            calls=calls,
            checked={OURS: calls[OURS]},
            left_out=unmeasured,
            exact=lambda: by(torch.float64, form=form, chunk_size=2 * linear.CHUNK),
            plain=lambda: by(self.dtype, form=form, chunk_size=2 * linear.CHUNK),
            yardsticks=measure,
            isolated=(PRODUCT,),
            backend=lambda: "chunked",
        )

    def _drawn(self) -> tuple[dict[str, Tensor], Tensor]:
        generator = torch.Generator().manual_seed(0)
        shape = self.shape

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(self.dtype)

        drawn = {name: normal(*shape) for name in ("query", "key", "value")}
        if self.verb == "gated":
            drawn["log_gate"] = torch.nn.functional.logsigmoid(normal(*shape)) / 16
        if self.verb == "delta":
            drawn["rate"] = torch.sigmoid(normal(*shape[:3]))
        return {name: part.requires_grad_(self.training) for name, part in drawn.items()}, normal(*shape)

    def _ours(self, parts: Mapping[str, Tensor], **options: object) -> Tensor:
        verb, fixed = _FUNCTIONS[self.verb]
        output: Tensor = verb(**parts, **fixed, **options)[0]
        return output

    def _call(
        self, parts: Mapping[str, Tensor], upstream: Tensor, run: Callable[[Mapping[str, Tensor]], Tensor]
    ) -> Call:
        asked = [parts[name] for name in ("query", "key", "value")]

        def forward() -> Groups:
            return ((run(parts),),)

        def training() -> Groups:
            output = run(parts)
            return (output.detach(),), torch.autograd.grad(output, asked, upstream)

        return training if self.training else forward

    def small(self) -> Self:
        """At most 160 tokens."""
        _, heads, length, dim = self.shape
        return replace(self, shape=(1, min(heads, 3), min(length, 160 if length >= CROSSING else 80), min(dim, 16)))


def linear_rows() -> list[LinearRow]:
    """``linear`` at every length, training and forward; the other functions in training at three lengths."""
    longest = LENGTHS[-1]
    plain = [
        LinearRow(verb="linear", shape=(1, 12, length, 64), training=training, memory=training and length == longest)
        for training, length in product((True, False), LENGTHS)
    ]
    others = [
        LinearRow(verb=verb, shape=(1, 12, length, 64), training=True)
        for verb, length in product(("retention", "gated", "delta"), (1024, 4096, 16384))
    ]
    return [*plain, *others]
