"""Tables of blocks over many tiles of the CPU kernels, most of them empty: skipping them changes no result."""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from clearhead.ops import library as native_library

pytestmark = [
    pytest.mark.skipif(native_library.reason() is not None, reason="needs the CPU kernels"),
    pytest.mark.covering(1),
]

WANT = ch.Want(lse=True, entropy=True, received=True, heatmap=64)


@pytest.mark.parametrize("size", [8, 16, 100])
@pytest.mark.parametrize("share", [0.02, 0.2])
@pytest.mark.parametrize(
    ("q_len", "offset", "group"), [(1, 700, 4), (97, 5, 2), (97, 0, 3), (700, 0, 1), (300, 600, 2)]
)
def test_blocks_give_the_formula_over_many_tiles(size: int, share: float, q_len: int, offset: int, group: int) -> None:
    torch.manual_seed(0)
    k_len, heads = 900, 2 * group
    table = torch.rand(2, heads, -(-(offset + q_len) // size), -(-k_len // size)) < share
    mask = ch.Blocks(table, size)
    tensors = [
        torch.randn(2, count, length, 24, requires_grad=True)
        for count, length in ((heads, q_len), (2, k_len), (2, k_len))
    ]
    results = []
    for backend in ("native", "reference"):
        observation = ch.observe_attention(*tensors, mask=mask, query_offset=offset, backend=backend, want=WANT)
        output = ch.attention(*tensors, mask=mask, query_offset=offset, backend=backend)
        grads = torch.autograd.grad(output.square().sum(), tensors)
        statistics = (
            observation.lse,
            observation.entropy,
            observation.received,
            observation.heatmap_max,
            observation.heatmap_mean,
        )
        results.append([output, *statistics, *grads])
    torch.testing.assert_close(*results, rtol=2e-4, atol=2e-4)
