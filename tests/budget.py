"""The error budget: a result may be as wrong as the textbook formula in the same precision, twice over.

Both are held against float64. Nothing is tuned: the bound moves with the problem, as in the tests of
PyTorch's and FlashAttention's own kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def within_budget(
    name: str, result: Tensor, textbook: Tensor, exact: Tensor, *, terms: int = 1, size: float = 1.0
) -> None:
    """Assert that ``result`` is finite where ``exact`` is, and near enough to it.

    ``terms`` is how many numbers a sum has, ``size`` how large each of them is; see ``rounding``.
    """
    result, textbook, exact = result.double(), textbook.double(), exact.double()
    assert result.shape == exact.shape, f"{name}: shape {tuple(result.shape)}, not {tuple(exact.shape)}"
    assert torch.equal(torch.isfinite(result), torch.isfinite(exact)), f"{name}: not finite where it should be"
    finite = torch.isfinite(exact)
    if not bool(finite.any()):
        return
    error = (result - exact)[finite].abs().max().item()
    allowed = 2.0 * (textbook - exact)[finite].abs().max().item() + rounding(exact[finite], terms, size)
    assert error <= allowed, f"{name}: error {error:.3g} above its budget {allowed:.3g}"


def rounding(exact: Tensor, terms: int, size: float) -> float:
    """The floor under every budget: a few units in the last place of float32, at the size of the numbers summed.

    The textbook formula can be exact by luck (one key, a saturated softmax) where another order of the same sums
    rounds; errors of a sum of ``terms`` numbers grow with the square root of their number.
    """
    return 8.0 * torch.finfo(torch.float32).eps * max(1.0, size, exact.abs().max().item()) * terms**0.5
