"""Position encodings: rotary embedding (RoPE) of queries and keys, and sinusoidal embeddings to add to tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from clearhead.arguments import FARTHEST, number, real_number, repr_of, tensor_of, whole, whole_number
from clearhead.backends.recorded import is_recorded
from clearhead.errors import ShapeError
from clearhead.ops.library import library
from clearhead.projection import are_plain
from clearhead.shapes import Float, Int

__all__ = ["MOST_POSITIONS", "Rotary", "as_rotary", "rotated", "sinusoidal", "table_of"]

#: Positions of the largest cached table: with 64 channels it takes 32 MiB.
MOST_POSITIONS: Final = 2**17
#: Positions of the smallest table.
_LEAST_POSITIONS: Final = 512


@dataclass(frozen=True, repr=False)
class Rotary:
    """Rotary position embedding (RoPE): pairs of channels of queries and keys, rotated by an angle of the position.

    Channels ``i`` and ``i + head_dim / 2`` form a pair, which is rotated by ``position * base ** (-2 i / head_dim)``,
    so that ``query @ key`` depends on the difference of positions alone. Angles are computed in float64 and only their
    sine and cosine are rounded, so large positions are as exact as small ones. Sines and cosines of the first ``2**17``
    positions are cached, and modules of equal base and head size share them. On a CPU the kernels rotate.

    Args:
        base: the longest wavelength is nearly ``2 pi * base`` positions; choose a larger one for longer texts.

    Raises:
        ShapeError: ``base`` is not a number above 1; in ``rotate``, the number of channels is odd.

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
        """Rotate tokens at positions ``first, first + 1, ...``.

        Args:
            x: queries or keys, ``[..., len, head_dim]``, floating point, with an even ``head_dim``.
            first: position of the first token.

        Returns:
            The rotated tokens, in the shape and dtype of ``x``.

        Raises:
            ShapeError: ``x`` is not floating point with at least 2 axes, or ``head_dim`` is odd.
        """
        if not isinstance(x, Tensor) or x.ndim < 2 or not x.is_floating_point():
            raise ShapeError.about(
                "Rotary.rotate",
                "x",
                must="be floating point [..., len, head_dim]",
                got=repr_of(x),
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
            return rotated(x, *_table_from(self, first, length, channels))
        work = torch.float64 if x.dtype == torch.float64 else torch.float32
        return _rotated_by_torch(x, *(part.to(work) for part in _angles(self, first, length, channels, x.device)))

    def rotate_at(
        self, x: Float[Tensor, "*leading len head_dim"], positions: Int[Tensor, " len"]
    ) -> Float[Tensor, "*leading len head_dim"]:
        """Rotate tokens at any positions, such as the new tokens of several sequences that are packed.

        Args:
            x: queries or keys, ``[..., len, head_dim]``, floating point, with an even ``head_dim``.
            positions: int64 ``[len]``, the position of every token.

        Returns:
            The rotated tokens, in the shape and dtype of ``x``.

        >>> import torch
        >>> x = torch.randn(3, 4)
        >>> torch.allclose(Rotary().rotate_at(x, torch.tensor([5, 6, 7])), Rotary().rotate(x, 5), atol=1e-6)
        True
        """
        count = int(positions.max()) + 1 if positions.numel() else 0
        if are_plain(x) and library() is not None and x.numel() > 0 and count <= MOST_POSITIONS:
            return rotated(x, table_of(self, x.shape[-1], count)[positions])
        work = torch.float64 if x.dtype == torch.float64 else torch.float32
        cosine, sine = (part.to(work)[positions] for part in _angles(self, 0, count, x.shape[-1], x.device))
        return _rotated_by_torch(x, cosine, sine)

    def __repr__(self) -> str:
        return f"Rotary(base={self.base:g})"


def table_of(rotary: Rotary, head_dim: int, positions: int) -> Float[Tensor, "_positions head_dim"]:
    """The cached table of cosines and sines of at least the first ``positions`` positions, float32.

    Args:
        rotary: the rotary embedding.
        head_dim: channels of a head, an even number.
        positions: at most ``MOST_POSITIONS``.

    Returns:
        ``[positions or more, head_dim]``; of each position first the cosines, then the sines.
    """
    assert positions <= MOST_POSITIONS
    return _cached_table(rotary, head_dim, max(_LEAST_POSITIONS, 1 << (positions - 1).bit_length()))


@lru_cache(maxsize=8)
def _cached_table(rotary: Rotary, head_dim: int, count: int) -> Float[Tensor, "count head_dim"]:
    return _table(rotary, 0, count, head_dim)


def _table_from(rotary: Rotary, first: int, length: int, channels: int) -> tuple[Tensor, int]:
    """A table that contains these positions, and the row of the first of them."""
    if 0 <= first <= MOST_POSITIONS - length:
        return table_of(rotary, channels, first + length), first
    return _table(rotary, first, length, channels), 0


def _table(rotary: Rotary, first: int, length: int, channels: int) -> Float[Tensor, "length channels"]:
    # A tensor made in inference mode could not be saved for backward later.
    with torch.inference_mode(False):
        return torch.cat(_angles(rotary, first, length, channels, torch.device("cpu")), dim=-1).float()


def _angles(rotary: Rotary, first: int, length: int, channels: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines in float64, each ``[length, channels / 2]``."""
    position = torch.arange(first, first + length, dtype=torch.float64, device=device)
    rate = rotary.base ** (-torch.arange(0, channels, 2, dtype=torch.float64, device=device) / channels)
    angle = position[:, None] * rate
    return angle.cos(), angle.sin()


def rotated(
    x: Float[Tensor, "*leading len head_dim"], table: Float[Tensor, "_positions head_dim"], first: int = 0
) -> Float[Tensor, "*leading len head_dim"]:
    """Rotate tokens by the rows ``first, first + 1, ...`` of a table, by the CPU kernels.

    Args:
        x: ``[..., len, head_dim]``, not empty, of a dtype of the kernels.
        table: float32, contiguous: of each position the cosines, then the sines.
        first: row of the first token.

    Returns:
        The rotated tokens, in the shape and dtype of ``x``.
    """
    # Reshape outside of the autograd function: autograd forbids in-place changes of views that a function returns.
    heads = x[(None,) * (4 - x.ndim)] if x.ndim <= 4 else x.flatten(0, x.ndim - 4)
    output: Tensor
    if torch.is_grad_enabled() and x.requires_grad:
        output = _Rotation.apply(heads, table, first)  # type: ignore[no-untyped-call]
    else:
        output = torch.ops.clearhead.rotary.default(heads, table, first, False)
    return output if x.ndim == 4 else output.reshape(x.shape)


def rotated_by_token(
    x: Float[Tensor, "batch heads len head_dim"], angles: Float[Tensor, "_rows head_dim"]
) -> Float[Tensor, "batch heads len head_dim"]:
    """Rotate each token by a row of cosines and sines, which the sequences of a batch may share.

    Args:
        x: ``[batch, heads, len, head_dim]``, not empty, of a dtype of the kernels.
        angles: float32, contiguous: of each token the cosines, then the sines; ``[len, head_dim]`` for all sequences,
            or ``[batch * len, head_dim]``, sequence by sequence.

    Returns:
        The rotated tokens, in the shape and dtype of ``x``.
    """
    if len(angles) == x.shape[2]:
        return rotated(x, angles)
    rows = x.transpose(1, 2).flatten(0, 1).transpose(0, 1)
    heads: Tensor = rotated(rows, angles).transpose(0, 1).unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)
    return heads


def _rotated_by_torch(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    left, right = x.to(cosine.dtype).chunk(2, dim=-1)
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1).to(x.dtype)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, first: int) -> Tensor:
        ctx.table, ctx.first = table, first
        output: Tensor = torch.ops.clearhead.rotary.default(x, table, first, False)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if is_recorded(grad):
            cosine, sine = ctx.table[ctx.first : ctx.first + grad.shape[-2]].chunk(2, dim=-1)
            return _rotated_by_torch(grad, cosine, -sine), None, None
        return torch.ops.clearhead.rotary.default(grad, ctx.table, ctx.first, True), None, None


def as_rotary(function: str, rotary: Rotary | bool | float | None) -> Rotary | None:
    """A module's ``rotary=`` as a ``Rotary`` or None; ``True`` means the default base, a number is the base."""
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
            got=repr_of(rotary),
            then="Pass rotary=True for the usual base of 10000.",
        )
    return Rotary(rotary)


def sinusoidal(
    positions: int | Int[Tensor, "*positions"], dim: int, *, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*positions dim"]:
    """Fixed position embeddings to add to token embeddings.

    ``out[p, 2 i] = sin(p / 10000 ** (2 i / dim))`` and ``out[p, 2 i + 1] = cos(p / 10000 ** (2 i / dim))``.

    Args:
        positions: number of positions, counted from 0, or a tensor of positions.
        dim: number of channels, an even number.
        dtype: dtype of the result; angles are computed in float64.

    Returns:
        ``[positions, dim]``, or ``[*positions.shape, dim]`` for a tensor of positions.

    Raises:
        ShapeError: ``dim`` is not a positive even number, ``positions`` is no number or tensor of whole numbers, or
            ``dtype`` is not floating point.

    Paper: Vaswani et al. 2017, "Attention is all you need", section 3.5.

    >>> sinusoidal(2, 2).tolist()[0]
    [0.0, 1.0]
    """
    channels = whole_number(dim)
    if channels is None or not 2 <= channels <= FARTHEST or channels % 2:
        raise ShapeError.about(
            "sinusoidal", "dim", must="be a positive even number", got=repr_of(dim), then="Sines and cosines alternate."
        )
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ShapeError.about(
            "sinusoidal",
            "dtype",
            must="be a floating point torch.dtype",
            got=repr_of(dtype),
            then="Pass torch.float32.",
        )
    place = _places(positions)
    rate = 10000.0 ** (-torch.arange(0, channels, 2, dtype=torch.float64, device=place.device) / channels)
    angle = place.to(torch.float64)[..., None] * rate
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2).to(dtype)


def _places(positions: object) -> Int[Tensor, "*positions"]:
    """Positions as a tensor; a number stands for those from 0 on."""
    if not isinstance(positions, Tensor) and whole_number(positions) is not None:
        return torch.arange(whole("sinusoidal", "positions", positions, low=0))
    place = tensor_of(positions)
    if place is None or place.is_floating_point() or place.is_complex() or place.dtype == torch.bool:
        raise ShapeError.about(
            "sinusoidal", "positions", must="be a count or whole numbers", got=repr_of(positions), then="Pass an int."
        )
    return place
