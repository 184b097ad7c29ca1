"""Where a token stands, told to the model: rotary turns queries and keys, sinusoidal adds to embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from clearhead.arguments import FARTHEST, number, real_number, seen, tensor_of, whole, whole_number
from clearhead.backends.recorded import is_recorded
from clearhead.errors import ShapeError
from clearhead.ops.library import library
from clearhead.projection import are_plain
from clearhead.shapes import Float, Int

__all__ = ["MOST_POSITIONS", "Rotary", "as_rotary", "sinusoidal", "table_of", "turned"]

#: Positions that tables are kept for: 64 channels of so many are 32 MiB.
MOST_POSITIONS: Final = 2**17
#: Those of the smallest table.
_LEAST_POSITIONS: Final = 512


@dataclass(frozen=True, repr=False)
class Rotary:
    """Rotary position embedding: channel pairs of queries and keys turned by an angle that grows with position.

    Channel ``i`` and channel ``i + head_dim / 2`` form a pair, turned by ``position * base ** (-2 i / head_dim)``,
    so that ``query @ key`` depends on the difference of positions alone. Angles are computed in float64 and only
    their sine and cosine rounded, so far positions are as exact as near ones. Those of the first ``2**17`` positions
    are computed once and kept, and the CPU kernels do the turning; every module of one base and head size shares them.

    Args:
        base: the longest wavelength is nearly ``2 pi * base`` positions; larger for longer texts.

    Raises:
        ShapeError: base is not a number above 1; or, in a call, the number of channels is odd.

    Paper: Su et al. 2021, "RoFormer", section 3.2.2; the pairing of halves is that of GPT-NeoX and Llama.

    >>> import torch
    >>> Rotary().rotate(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    tensor([[1.0000, 0.0000],
            [0.5403, 0.8415]])
    """

    base: float = 10000.0

    def __post_init__(self) -> None:
        base = number(
            "Rotary",
            "base",
            self.base,
            must="be a number above 1",
            fits=lambda base: base > 1.0,
            then="The paper uses 10000.0.",
        )
        object.__setattr__(self, "base", base)

    def rotate(
        self, x: Float[Tensor, "*leading len head_dim"], first: int = 0
    ) -> Float[Tensor, "*leading len head_dim"]:
        """The same tensor, its tokens turned as those at positions ``first, first + 1, ...``."""
        if not isinstance(x, Tensor) or x.ndim < 2 or not x.is_floating_point():
            raise ShapeError.about(
                "Rotary.rotate",
                "x",
                must="be floating point [..., len, head_dim]",
                got=seen(x),
                then="Split the embedding into heads first.",
            )
        first = whole("Rotary.rotate", "first", first, low=-FARTHEST)
        length, channels = x.shape[-2:]
        if channels % 2:
            raise ShapeError.about(
                "Rotary.rotate",
                "x",
                must="have an even number of channels",
                got=tuple(x.shape),
                then="Choose an even head_dim.",
            )
        if are_plain(x) and library() is not None and x.numel() > 0:
            return turned(x, *_table_from(self, first, length, channels))
        work = torch.float64 if x.dtype == torch.float64 else torch.float32
        return _turned_by_torch(x, *(part.to(work) for part in _angles(self, first, length, channels, x.device)))

    def __repr__(self) -> str:
        return f"Rotary(base={self.base:g})"


def table_of(rotary: Rotary, head_dim: int, positions: int) -> Float[Tensor, "_positions head_dim"]:
    """Cosines and, behind them, sines of at least so many positions from 0 on, float32, cached.

    Args:
        rotary: what they are angles of.
        head_dim: channels of what is rotated, an even number.
        positions: at most ``MOST_POSITIONS``.
    """
    assert positions <= MOST_POSITIONS
    return _cached_table(rotary, head_dim, max(_LEAST_POSITIONS, 1 << (positions - 1).bit_length()))


@lru_cache(maxsize=8)
def _cached_table(rotary: Rotary, head_dim: int, count: int) -> Float[Tensor, "count head_dim"]:
    return _table(rotary, 0, count, head_dim)


def _table_from(rotary: Rotary, first: int, length: int, channels: int) -> tuple[Tensor, int]:
    """A table that has these positions, and where in it the first of them stands."""
    if 0 <= first <= MOST_POSITIONS - length:
        return table_of(rotary, channels, first + length), first
    return _table(rotary, first, length, channels), 0


def _table(rotary: Rotary, first: int, length: int, channels: int) -> Float[Tensor, "length channels"]:
    # What is made in inference mode could not be part of a gradient later.
    with torch.inference_mode(False):
        return torch.cat(_angles(rotary, first, length, channels, torch.device("cpu")), dim=-1).float()


def _angles(rotary: Rotary, first: int, length: int, channels: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines in float64, each ``[length, channels / 2]``."""
    position = torch.arange(first, first + length, dtype=torch.float64, device=device)
    rate = rotary.base ** (-torch.arange(0, channels, 2, dtype=torch.float64, device=device) / channels)
    angle = position[:, None] * rate
    return angle.cos(), angle.sin()


def turned(
    x: Float[Tensor, "*leading len head_dim"], table: Float[Tensor, "_positions head_dim"], first: int = 0
) -> Float[Tensor, "*leading len head_dim"]:
    """Tokens turned by the angles that a table has for positions ``first, first + 1, ...``, by the CPU kernels.

    Args:
        x: what these take, not empty.
        table: float32, contiguous: cosines and, behind them, sines of each position.
        first: position of the first token.
    """
    # The axes are changed out here: autograd forbids in-place changes of views that its functions return.
    heads = x[(None,) * (4 - x.ndim)] if x.ndim <= 4 else x.flatten(0, x.ndim - 4)
    output: Tensor
    if torch.is_grad_enabled() and x.requires_grad:
        output = _Turned.apply(heads, table, first)  # type: ignore[no-untyped-call]
    else:
        output = torch.ops.clearhead.rotary.default(heads, table, first, False)
    return output if x.ndim == 4 else output.reshape(x.shape)


def turned_by_token(
    x: Float[Tensor, "batch heads len head_dim"], angles: Float[Tensor, "_rows head_dim"]
) -> Float[Tensor, "batch heads len head_dim"]:
    """Tokens turned by angles of their own, which the sequences of a batch may share.

    Args:
        x: as in ``turned``.
        angles: as a table there, of ``len`` tokens, or of ``batch * len``, sequence by sequence.
    """
    if len(angles) == x.shape[2]:
        return turned(x, angles)
    rows = x.transpose(1, 2).flatten(0, 1).transpose(0, 1)
    found: Tensor = turned(rows, angles).transpose(0, 1).unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)
    return found


def _turned_by_torch(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    left, right = x.to(cosine.dtype).chunk(2, dim=-1)
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1).to(x.dtype)


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, first: int) -> Tensor:
        ctx.table, ctx.first = table, first
        output: Tensor = torch.ops.clearhead.rotary.default(x, table, first, False)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if is_recorded(grad):
            cosine, sine = ctx.table[ctx.first : ctx.first + grad.shape[-2]].chunk(2, dim=-1)
            return _turned_by_torch(grad, cosine, -sine), None, None
        return torch.ops.clearhead.rotary.default(grad, ctx.table, ctx.first, True), None, None


def as_rotary(function: str, rotary: Rotary | bool | float | None) -> Rotary | None:
    """What a module's ``rotary=`` means: a ``Rotary``, ``True`` for the usual one, a number for its base, or none."""
    if rotary is None or rotary is False:
        return None
    if isinstance(rotary, Rotary):
        return rotary
    if rotary is True:
        return Rotary()
    if real_number(rotary) is None:
        raise ShapeError.about(
            function,
            "rotary",
            must="be a Rotary, True, a base or None",
            got=seen(rotary),
            then="Pass rotary=True for the usual base of 10000.",
        )
    return Rotary(rotary)


def sinusoidal(
    positions: int | Int[Tensor, "*positions"], dim: int, *, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*positions dim"]:
    """Fixed position embeddings to add to token embeddings.

    ``out[p, 2 i] = sin(p / 10000 ** (2 i / dim))`` and ``out[p, 2 i + 1]`` the cosine of the same.

    Args:
        positions: how many positions, counted from 0; or whole numbers, the positions themselves.
        dim: channels, an even number.
        dtype: of the result; angles are computed in float64.

    Returns:
        ``[positions, dim]``, with the axes of ``positions`` where it is a tensor.

    Raises:
        ShapeError: ``dim`` is not a positive even number.

    Paper: Vaswani et al. 2017, "Attention is all you need", section 3.5.

    >>> sinusoidal(2, 2).tolist()[0]
    [0.0, 1.0]
    """
    channels = whole_number(dim)
    if channels is None or not 2 <= channels <= FARTHEST or channels % 2:
        raise ShapeError.about(
            "sinusoidal", "dim", must="be a positive even number", got=seen(dim), then="Sines and cosines alternate."
        )
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ShapeError.about(
            "sinusoidal", "dtype", must="be a floating point torch.dtype", got=seen(dtype), then="Pass torch.float32."
        )
    place = _places(positions)
    rate = 10000.0 ** (-torch.arange(0, channels, 2, dtype=torch.float64, device=place.device) / channels)
    angle = place.to(torch.float64)[..., None] * rate
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2).to(dtype)


def _places(positions: object) -> Int[Tensor, "*positions"]:
    """The positions themselves, where a count was given those from 0 on."""
    if not isinstance(positions, Tensor) and whole_number(positions) is not None:
        return torch.arange(whole("sinusoidal", "positions", positions, low=0))
    place = tensor_of(positions)
    if place is None or place.is_floating_point() or place.is_complex() or place.dtype == torch.bool:
        raise ShapeError.about(
            "sinusoidal", "positions", must="be how many, or whole numbers", got=seen(positions), then="Pass an int."
        )
    return place
