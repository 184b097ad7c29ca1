"""The shapes in public signatures hold: jaxtyping checks them while a grid of calls runs in another process."""

from __future__ import annotations

import pytest

from tests.processes import with_torch_alone

PROGRAM = """
import sys
from jaxtyping import install_import_hook, TypeCheckError
with install_import_hook(["clearhead.functional.exact", "clearhead.statistics"], "beartype.beartype"):
    import clearhead as ch
    import clearhead.functional.exact
import torch

want = ch.Want(lse=True, max_score=True, entropy=True, top_k=2, received=True, heatmap=2, sink=1, distance=True,
               rows=torch.tensor([0, 1]), row_weights=torch.ones(1, 1, 2, 5))
for leading, kv in (((), ()), ((4,), (2,)), ((3, 4), (3, 2))):
    for k_len, value_dim in ((5, 6), (9, 3)):
        query = torch.randn(*leading, 5, 6)
        key, value = torch.randn(*kv, k_len, 6), torch.randn(*kv, k_len, value_dim)
        ch.attention(query, key, value)
        ch.observe_attention(query, key, value, want=want)
try:
    ch.attention(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3), torch.zeros(2, 3))
except TypeCheckError:
    print("checked")
"""


def test_annotated_shapes_are_checked() -> None:
    pytest.importorskip("jaxtyping")
    pytest.importorskip("beartype")
    done = with_torch_alone(PROGRAM)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "checked"
