"""Where a token stands, told to the model: rotary turns queries and keys, sinusoidal adds to embeddings."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clearhead.errors import ShapeError
from clearhead.shapes import Float, Int

__all__ = ["Rotary", "as_rotary", "sinusoidal"]


class Rotary:
    """Rotary position embedding: channel pairs of queries and keys turned by an angle that grows with position.

    Channel ``i`` and channel ``i + head_dim / 2`` form a pair, turned by ``position * base ** (-2 i / head_dim)``,
    so that ``query @ key`` depends on the difference of positions alone. Angles are computed in float64 and only
    their sine and cosine rounded, so far positions are as exact as near ones.

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

    def __init__(self, base: float = 10000.0) -> None:
        number = isinstance(base, (int, float)) and not isinstance(base, bool)
        if not number or not math.isfinite(base) or base <= 1.0:
            raise ShapeError.about(
                "Rotary", "base", must="be a number above 1", got=repr(base)[:80], then="The paper uses 10000.0."
            )
        self.base = float(base)

    def rotate(
        self, x: Float[Tensor, "*leading len head_dim"], first: int = 0
    ) -> Float[Tensor, "*leading len head_dim"]:
        """The same tensor, its tokens turned as those at positions ``first, first + 1, ...``."""
        length, channels = x.shape[-2:]
        if channels % 2:
            raise ShapeError.about(
                "Rotary.rotate", "x", must="have an even number of channels", got=tuple(x.shape),
                then="Choose an even head_dim.",
            )  # fmt: skip
        position = torch.arange(first, first + length, dtype=torch.float64, device=x.device)
        rate = self.base ** (-torch.arange(0, channels, 2, dtype=torch.float64, device=x.device) / channels)
        angle = position[:, None] * rate
        work = torch.float64 if x.dtype == torch.float64 else torch.float32
        cosine, sine = angle.cos().to(work), angle.sin().to(work)
        left, right = x.to(work).chunk(2, dim=-1)
        turned = torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1)
        return turned.to(x.dtype)

    def __repr__(self) -> str:
        return f"Rotary(base={self.base:g})"


def as_rotary(function: str, rotary: Rotary | bool | float | None) -> Rotary | None:
    """What a module's ``rotary=`` means: a ``Rotary``, ``True`` for the usual one, a number for its base, or none."""
    if rotary is None or rotary is False:
        return None
    if isinstance(rotary, Rotary):
        return rotary
    if rotary is True:
        return Rotary()
    if not isinstance(rotary, (int, float)):
        raise ShapeError.about(
            function, "rotary", must="be a Rotary, True, a base or None", got=repr(rotary)[:80],
            then="Pass rotary=True for the usual base of 10000.",
        )  # fmt: skip
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
    if not isinstance(dim, int) or dim < 2 or dim % 2:
        raise ShapeError.about(
            "sinusoidal", "dim", must="be a positive even number", got=repr(dim), then="Sines and cosines alternate."
        )
    place = torch.arange(positions) if isinstance(positions, int) else positions
    rate = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=place.device) / dim)
    angle = place.to(torch.float64)[..., None] * rate
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2).to(dtype)
