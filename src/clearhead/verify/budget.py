"""The error budget: twice the error of the textbook formula in the same precision, plus rounding.

Both errors are relative to float64. No bound is tuned: it follows from the problem, as in the kernel tests of PyTorch
and FlashAttention.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["excess", "rounding", "within_budget"]

_HALF = (torch.float16, torch.bfloat16)


def rounding(
    exact: Tensor, terms: int, size: float, *, dtype: torch.dtype = torch.float32, largest_score: float = 0.0
) -> float:
    """The lower bound of every budget: a few ULPs at the magnitude of the summed values.

    The textbook formula can be exact by chance (one key, a saturated softmax) when another order of the same sums
    rounds. The error of a sum of ``terms`` values grows with the square root of their number. The rounding of a score,
    ``eps * |score|``, becomes a relative error of its weight in every implementation.
    """
    reach = max(1.0, size, float(exact.abs().max()))
    unit = float(torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps)
    floor = 8.0 * unit * reach * math.sqrt(terms) + 4.0 * unit * largest_score * max(1.0, size)
    return floor + (float(torch.finfo(dtype).eps) * reach if dtype in _HALF else 0.0)


def excess(result: Tensor, textbook: Tensor, exact: Tensor, floor: float) -> str | None:
    """A description of a result's largest error and its index; None if the result is within budget."""
    if result.shape != exact.shape:
        return f"shape {tuple(result.shape)}, not {tuple(exact.shape)}"
    if exact.numel() == 0:
        return None
    result, textbook, exact = (tensor.detach().double() for tensor in (result, textbook, exact))
    # The common case, finite and within budget, in few operations; a comparison with NaN is False.
    if (result - exact).abs().max().item() <= 2.0 * (textbook - exact).abs().max().item() + floor < math.inf:
        return None
    finite = torch.isfinite(exact)
    strange = torch.isfinite(result) != finite
    if bool(strange.any()):
        place = tuple(strange.nonzero()[0].tolist())
        how = "not" if bool(torch.isfinite(result[place])) else "expected"
        return f"{result[place].item():.4g} at {list(place)}, {how} {exact[place].item():.4g}"
    error = (result - exact).masked_fill(~finite, 0.0).abs()
    allowed = 2.0 * (textbook - exact).masked_fill(~finite, 0.0).nan_to_num().abs().max().item() + floor
    if error.max().item() <= allowed:
        return None
    place = tuple(torch.unravel_index(error.argmax(), error.shape))
    at = [int(index) for index in place]
    return (
        f"{result[place].item():.6g} at {at}, not {exact[place].item():.6g} "
        f"(error {error.max().item():.2g} above its budget {allowed:.2g})"
    )


def within_budget(
    name: str,
    result: Tensor,
    textbook: Tensor,
    exact: Tensor,
    *,
    terms: int = 1,
    size: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Assert that ``result`` is finite where ``exact`` is, and within the error budget.

    ``terms`` is the number of values in a sum, ``size`` the magnitude of each, ``dtype`` the dtype of results; the
    lower bound of the budget is ``rounding(exact, terms, size, dtype=dtype)``.
    """
    finite = exact[torch.isfinite(exact)]
    floor = rounding(finite, terms, size, dtype=dtype) if finite.numel() else 0.0
    wrong = excess(result, textbook, exact, floor)
    assert wrong is None, f"{name}: {wrong}"
