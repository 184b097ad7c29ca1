"""A case: one problem as a few numbers, which can be drawn, printed and made smaller."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["LAYOUTS", "Case", "laid_out"]

LAYOUTS = ("plain", "heads last", "slice", "every other", "expanded", "one head")

#: Numbers of fewer than so many are kept for the next law that draws them.
_KEPT = 2**16


@dataclass(frozen=True, kw_only=True)
class Case:
    """The sizes of a problem, its mask by name, and how its numbers are drawn.

    Attributes:
        batch: batch size.
        kv_heads: key heads.
        group: query heads to a key head.
        q_len: queries.
        k_len: keys.
        head_dim: width of query and key.
        value_dim: width of value.
        mask: name of a mask, see ``masks.KINDS``.
        form: how the mask is handed over: "flag", "bool", "float", "padding", "object"; "none" without a mask.
        end: the last query stands beside the last key; else the first beside the first.
        scale: factor on ``query @ key^T``; None for the default.
        size: standard deviation of query and key.
        layout: how tensors lie in memory, one of ``LAYOUTS``; "key: slice" is that of the key alone.
        poison: what stands in keys and values that nobody may attend to: "nan" or "inf"; "none" for ordinary numbers.
        dropout: probability of dropping a weight.
        seed: of the numbers.
    """

    batch: int = 1
    kv_heads: int = 1
    group: int = 1
    q_len: int = 5
    k_len: int = 5
    head_dim: int = 8
    value_dim: int = 8
    mask: str = "none"
    form: str = "none"
    end: bool = False
    scale: float | None = None
    size: float = 1.0
    layout: str = "plain"
    poison: str = "none"
    dropout: float = 0.0
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def places(self) -> int:
        """How large the problem is."""
        return self.batch * self.heads * self.q_len * self.k_len * self.head_dim

    @property
    def offset(self) -> int:
        """Absolute position of the first query."""
        return self.k_len - self.q_len if self.end else 0

    def draw(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, the same ones every time."""
        shapes = (
            (self.batch, self.heads, self.q_len, self.head_dim),
            (self.batch, self.kv_heads, self.k_len, self.head_dim),
            (self.batch, self.kv_heads, self.k_len, self.value_dim),
        )
        kept = math.prod(shapes[0]) + math.prod(shapes[1]) + math.prod(shapes[2]) < _KEPT
        drawn = (_drawn if kept else _drawn.__wrapped__)(self.seed, shapes)
        sizes = (self.size, self.size, 1.0)
        alone, _, layout = self.layout.rpartition(": ")
        query, key, value = (
            laid_out((size * tensor).to(dtype=dtype, device=device), layout if alone in ("", name) else "plain")
            for name, size, tensor in zip(("query", "key", "value"), sizes, drawn, strict=True)
        )
        return query, key, value

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "heads": self.heads, "query_offset": self.offset}

    def __str__(self) -> str:
        """Sizes always, the rest where it differs from the default."""
        parts = [f"batch={self.batch}", f"heads={self.heads}"]
        parts += [f"kv_heads={self.kv_heads}"] if self.group > 1 else []
        parts += [f"q_len={self.q_len}", f"k_len={self.k_len}", f"head_dim={self.head_dim}"]
        parts += [f"value_dim={self.value_dim}"] if self.value_dim != self.head_dim else []
        for field in fields(self):
            if field.name in ("mask", "form", "scale", "size", "layout", "poison", "dropout"):
                value = getattr(self, field.name)
                parts += [f"{field.name}={value}"] if value != field.default else []
        parts += [f"query_offset={self.offset}"] if self.offset else []
        return " ".join(parts)


@lru_cache(maxsize=512)
def _drawn(seed: int, shapes: tuple[tuple[int, ...], ...]) -> tuple[Tensor, ...]:
    """Standard normal numbers in float64, never handed out themselves: who is handed a tensor may write to it."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + 17)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same numbers in another order of memory; "expanded" repeats the first of the batch without a copy,
    "one head" the first head."""
    if layout == "heads last":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "slice":
        roomy = tensor.new_full((*tensor.shape[:2], tensor.shape[2] + 3, tensor.shape[3] + 5), torch.nan)
        roomy[:, :, 2:-1, 1:-4] = tensor
        return roomy[:, :, 2:-1, 1:-4]
    if layout == "every other":
        roomy = tensor.new_full((*tensor.shape[:3], 2 * tensor.shape[3]), torch.nan)
        roomy[..., ::2] = tensor
        return roomy[..., ::2]
    if layout == "expanded":
        return tensor[:1].expand_as(tensor)
    if layout == "one head":
        return tensor[:, :1].expand_as(tensor)
    return tensor
