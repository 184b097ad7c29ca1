"""A case: one problem as a few parameters, which can be drawn, printed and shrunk."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["LAYOUTS", "Case", "laid_out"]

LAYOUTS = ("plain", "heads last", "slice", "every other", "expanded", "one head")

#: Random tensors with fewer elements in all are cached for the next law that draws them.
_CACHED_ELEMENTS = 2**16


@dataclass(frozen=True, kw_only=True)
class Case:
    """The sizes of a problem, its mask by name, and how its tensors are drawn.

    Attributes:
        batch: batch size.
        kv_heads: number of key heads.
        group: number of query heads per key head.
        q_len: number of queries.
        k_len: number of keys.
        head_dim: width of query and key.
        value_dim: width of value.
        mask: name of a mask in ``masks.KINDS``; "none" without a mask.
        form: the form of the mask argument: "flag", "bool", "float", "padding", "object"; "none" without a mask.
        end: whether the last query is aligned with the last key; else the first query with the first key.
        scale: factor of ``query @ key^T``; None for the default.
        size: standard deviation of query and key.
        layout: memory layout of the tensors, one of ``LAYOUTS``; "key: slice" is that of the key alone.
        poison: value of keys and values that no query may attend to: "nan" or "inf"; "none" for ordinary values.
        dropout: probability of dropping a weight.
        seed: seed of the random tensors.
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
        """Number of query heads."""
        return self.kv_heads * self.group

    @property
    def places(self) -> int:
        """The number of multiplications of all scores, as a measure of size."""
        return self.batch * self.heads * self.q_len * self.k_len * self.head_dim

    @property
    def offset(self) -> int:
        """Absolute position of the first query."""
        return self.k_len - self.q_len if self.end else 0

    def draw(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, deterministic in the case's seed."""
        shapes = (
            (self.batch, self.heads, self.q_len, self.head_dim),
            (self.batch, self.kv_heads, self.k_len, self.head_dim),
            (self.batch, self.kv_heads, self.k_len, self.value_dim),
        )
        cached = math.prod(shapes[0]) + math.prod(shapes[1]) + math.prod(shapes[2]) < _CACHED_ELEMENTS
        drawn = (_drawn if cached else _drawn.__wrapped__)(self.seed, shapes)
        sizes = (self.size, self.size, 1.0)
        alone, _, layout = self.layout.rpartition(": ")
        query, key, value = (
            laid_out((size * tensor).to(dtype=dtype, device=device), layout if alone in ("", name) else "plain")
            for name, size, tensor in zip(("query", "key", "value"), sizes, drawn, strict=True)
        )
        return query, key, value

    def to_dict(self) -> dict[str, Any]:
        """All parameters as plain values for JSON."""
        return {**asdict(self), "heads": self.heads, "query_offset": self.offset}

    def __str__(self) -> str:
        """The sizes, and the other parameters that differ from their defaults."""
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
    """Standard normal tensors in float64; callers must copy them, as a function under test may write to its inputs."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + 17)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The tensor in another memory layout.

    "expanded" repeats the first sequence of the batch without a copy, "one head" the first head.
    """
    if layout == "heads last":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "slice":
        larger = tensor.new_full((*tensor.shape[:2], tensor.shape[2] + 3, tensor.shape[3] + 5), torch.nan)
        larger[:, :, 2:-1, 1:-4] = tensor
        return larger[:, :, 2:-1, 1:-4]
    if layout == "every other":
        larger = tensor.new_full((*tensor.shape[:3], 2 * tensor.shape[3]), torch.nan)
        larger[..., ::2] = tensor
        return larger[..., ::2]
    if layout == "expanded":
        return tensor[:1].expand_as(tensor)
    if layout == "one head":
        return tensor[:, :1].expand_as(tensor)
    return tensor
