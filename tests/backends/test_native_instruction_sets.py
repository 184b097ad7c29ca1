"""The CPU kernels on every instruction set that this processor has.

Every mask, rule, dtype and size on the best one is in test_agreement.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import clearhead as ch
from clearhead.backends.dropout import keep_mask
from clearhead.masks.base import index_tensors
from clearhead.ops.library import isa_names
from tests.agreement import compare, needs_native
from tests.instruction_sets import use_set
from tests.problems import MASKS, RULES, tensors
from tests.processes import reported

pytestmark = [needs_native, pytest.mark.covering(1)]
SETS = isa_names()


class TestInstructionSets:
    """Each set that this processor has, forward and backward."""

    @pytest.fixture(params=SETS, autouse=True)
    def _use(self, request: pytest.FixtureRequest) -> None:
        use_set(request.param)

    @pytest.mark.parametrize(
        ("mask", "rule"),
        [
            ("none", "none"), ("causal", "alibi"), ("window", "relative, then cap"),
            ("causal window", "cap, then dense bias"), ("prefix", "sink"), ("padding to nothing", "none"),
            ("causal documents", "alibi"), ("document ids", "none"), ("global", "relative, then cap"),
            ("strided", "none"), ("blocks", "sink"), ("dense", "cap, then dense bias"), ("not either", "none"),
            ("nothing", "sink"),
        ],
    )  # fmt: skip
    def test_every_set_agrees_under_masks_and_rules(self, mask: str, rule: str) -> None:
        compare("native", tensors(), mask=MASKS[mask].mask, scores=RULES[rule].rules)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("mask", ["none", "causal", "padding to nothing", "dense", "blocks"])
    def test_every_set_agrees_in_all_dtypes(self, mask: str, dtype: torch.dtype) -> None:
        compare("native", tensors(dtype=dtype), mask=MASKS[mask].mask)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize(
        "sizes",
        [
            {"q_len": 31, "k_len": 7, "head_dim": 1, "value_dim": 1},
            {"q_len": 97, "k_len": 259, "head_dim": 67, "value_dim": 130},
            {"q_len": 5, "k_len": 1100, "head_dim": 64, "value_dim": 64, "heads": 6, "kv_heads": 2},
            {"q_len": 130, "k_len": 1, "head_dim": 256, "value_dim": 3},
            {"q_len": 61, "k_len": 67, "heads": 6, "kv_heads": 1, "head_dim": 31, "value_dim": 17},
        ],
        ids=str,
    )
    def test_every_set_agrees_in_odd_sizes(self, sizes: dict[str, int], dtype: torch.dtype) -> None:
        inputs = tensors(dtype=dtype, **sizes)
        compare("native", inputs, mask=None)
        compare("native", inputs, mask=ch.Causal() & ch.Window(50), query_offset=sizes["k_len"] - sizes["q_len"])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize(("q_len", "heads"), [(1, 2), (1, 4), (3, 2), (2, 4), (5, 2), (4, 6)], ids=str)
    def test_few_rows_read_keys_without_packing(self, q_len: int, heads: int, dtype: torch.dtype) -> None:
        """One row to twelve for a key head, as many at a time as have registers; keys in fours and a rest."""
        inputs = tensors(dtype=dtype, q_len=q_len, k_len=1103, heads=heads, kv_heads=2, head_dim=64, value_dim=96)
        compare("native", inputs, mask=None)
        compare("native", inputs, mask=ch.Causal() & ch.Window(700), query_offset=1103 - q_len)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize(("head_dim", "value_dim"), [(80, 48), (48, 80), (24, 40), (16, 16), (96, 112)], ids=str)
    def test_head_sizes_of_odd_numbers_of_vectors(self, head_dim: int, value_dim: int, dtype: torch.dtype) -> None:
        """Vectors that come two by two, and one more; panels as wide as each other."""
        for q_len in (2, 40):
            inputs = tensors(dtype=dtype, q_len=q_len, k_len=301, head_dim=head_dim, value_dim=value_dim)
            compare("native", inputs, mask=None)
            compare("native", inputs, mask=ch.Causal(), query_offset=301 - q_len)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_tensors_read_in_place_and_packed_ones_agree(self, dtype: torch.dtype) -> None:
        """A tile with a masked NaN is packed without it, the others are read in place, for the same queries."""
        query, key, value = tensors(dtype=dtype, q_len=2, k_len=1103, head_dim=64, value_dim=64)
        spoiled = value.detach().clone()
        spoiled[..., 1101, 5] = torch.nan
        compare("native", (query, key, spoiled.requires_grad_()), mask=ch.Padding([1100] * len(query)))

    @pytest.mark.parametrize("width", [3, 16, 19])
    def test_subnormal_float16_inputs_agree(self, width: int) -> None:
        """They are normal floats, which attention does not take for 0; nor does it write them as 0."""
        query, key, value = (torch.full((1, 2, 40, width), 2.0**-place).half() for place in (1, 20, 24))
        output = ch.attention(query, key, value, scale=2.0**10, backend="native")
        assert torch.equal(output, value)
        lse = ch.observe_attention(query, key, value, scale=2.0**10, want=ch.Want(lse=True), backend="native").lse
        assert lse is not None
        exact = torch.full_like(lse, width * 2.0**-11 + math.log(40))
        torch.testing.assert_close(lse, exact, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_dropout_drops_the_same(self, dtype: torch.dtype) -> None:
        query, value = torch.zeros(2, 3, 7, 8, dtype=dtype), torch.eye(71, dtype=dtype).expand(2, 3, 71, 71)
        key = torch.zeros(2, 3, 71, 8, dtype=dtype)
        output = ch.attention(query, key, value, dropout=0.5, seed=2**40 + 3, query_offset=9, backend="native")
        right = keep_mask(2**40 + 3, 0.5, *index_tensors(2, 3, 7, 71, 9, torch.device("cpu")))
        assert torch.equal(output != 0, right)


BITS = """
import hashlib, torch, clearhead as ch
x = torch.linspace(-2.0, 2.0, 24_000).sin().view(1, 2, 300, 40).bfloat16()
found = hashlib.sha256(ch.attention(x, x, x, scale=3.0, backend="native").float().numpy().tobytes()).hexdigest()
"""


def _bits() -> str:
    names: dict[str, Any] = {}
    exec(BITS, names)
    return str(names["found"])


@pytest.mark.skipif(
    not SETS or not SETS[0].endswith("bf16"), reason="only products in bfloat16 are sure to differ between sets"
)
def test_the_variable_reaches_the_kernels() -> None:
    name = SETS[-1]
    done = reported(f"{BITS}\nprint(found)", environment={"CLEARHEAD_ISA": name, "CLEARHEAD_NATIVE": ""})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() != _bits_of(SETS[0])
    assert done.stdout.strip() == _bits_of(name)


def _bits_of(name: str) -> str:
    use_set(name)
    return _bits()
