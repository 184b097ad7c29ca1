"""The operator ``token_angles``: cosines and sines of each token, as the kernels read them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.agreement import needs_native

pytestmark = needs_native


def token_angles(cosine: Tensor, sine: Tensor) -> Tensor:
    output: Tensor = torch.ops.clearhead.token_angles.default(cosine, sine)
    return output


@pytest.mark.parametrize("size", [(1, 1, 2), (1, 7, 8), (3, 5, 6)])
def test_first_halves_of_cosines_and_sines_lie_side_by_side(size: tuple[int, int, int]) -> None:
    half = torch.randn(*size[:2], size[2] // 2)
    cosine, sine = half.cos(), half.sin()
    angles = token_angles(cosine.repeat(1, 1, 2), sine.repeat(1, 1, 2))
    assert torch.equal(angles, torch.cat((cosine, sine), -1).flatten(0, 1))


def test_sequences_with_the_same_angles_share_rows() -> None:
    half = torch.randn(1, 5, 4)
    twice = half.cos().repeat(1, 1, 2), half.sin().repeat(1, 1, 2)
    expected = token_angles(*twice)
    assert expected.shape == (5, 8)
    assert torch.equal(token_angles(*(part.expand(3, 5, 8) for part in twice)), expected)
    others = [part.expand(3, 5, 8).clone() for part in twice]
    others[1][2, 4, 1] += 1
    others[1][2, 4, 5] += 1
    assert torch.equal(token_angles(*others)[-5:], torch.cat((others[0][2, :, :4], others[1][2, :, :4]), -1))


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("place", [(0, 0, 0), (1, 4, 3), (1, 2, 5)])
def test_other_halves_have_no_rows(which: int, place: tuple[int, int, int]) -> None:
    given = [torch.randn(2, 5, 4).repeat(1, 1, 2) for _ in range(2)]
    assert len(token_angles(*given)) == 10
    given[which][place] += 1
    assert token_angles(*given).shape == (0, 8)


def test_strided_cosines_are_read_in_their_order() -> None:
    cosine, sine = (torch.randn(2, 5, 4).repeat(1, 1, 2) for _ in range(2))
    strided = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in (cosine, sine)]
    assert not strided[0].is_contiguous()
    assert torch.equal(token_angles(*strided), token_angles(cosine, sine))


@pytest.mark.parametrize("size", [(0, 5, 8), (2, 0, 8), (2, 5, 0)])
def test_nothing_gives_nothing(size: tuple[int, int, int]) -> None:
    assert token_angles(torch.zeros(size), torch.zeros(size)).numel() == 0
