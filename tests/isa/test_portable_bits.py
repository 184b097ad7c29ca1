"""``set_invariant("portable")``: the same bits of float32 on every instruction set that this processor has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import clearhead as ch
from clearhead.choices import UNFUSED_ISA, is_invariant, is_portable
from clearhead.ops.library import isa_names
from tests.agreement import needs_native
from tests.processes import reported

pytestmark = needs_native

#: torch's own instruction set beside each of the kernels', as on processors that have no other.
_TORCH = {"avx2": "avx2"}
_PROGRAM = "import sys\nfrom tests.isa.digests import main\nmain(sys.argv[1:])"
#: A set with the dispatch level of torch: widest first. ``None`` leaves torch's to the processor.
_SETS = [(name, _TORCH.get(name)) for name in isa_names() if name != UNFUSED_ISA]
_SEVERAL = pytest.mark.skipif(len(_SETS) < 2, reason="this processor has one instruction set with fused multiply-add")


def lines(isa: str, torch_isa: str | None, *arguments: str) -> list[str]:
    """What ``tests.isa.digests`` prints on one set."""
    chosen = {"CLEARHEAD_ISA": isa, "CLEARHEAD_NATIVE": ""}
    if torch_isa is not None:
        chosen["ATEN_CPU_CAPABILITY"] = torch_isa
    done = reported(_PROGRAM, arguments, environment=chosen, timeout=1200)
    assert done.returncode == 0, done.stderr
    first, *others = done.stdout.splitlines()
    assert first.split()[0] == isa
    assert torch_isa is None or first.split()[1] == torch_isa.upper()
    return others


def differing(first: int, count: int, level: str = "portable") -> list[str]:
    """The calls whose bits differ between the sets."""
    expected, wrong = lines(*_SETS[0], str(first), str(count), level), list[str]()
    assert len(expected) == count
    for isa, torch_isa in _SETS[1:]:
        here = lines(isa, torch_isa, str(first), str(count), level)
        wrong += [f"{isa}: {one}" for one, other in zip(here, expected, strict=True) if one != other]
    return wrong


@_SEVERAL
@pytest.mark.parametrize(
    ("first", "count"), [(0, 24), *(pytest.param(1000 * part, 1000, marks=pytest.mark.slow) for part in range(1, 4))]
)
def test_every_instruction_set_gives_the_same_bits(first: int, count: int) -> None:
    wrong = differing(first, count)
    assert not wrong, "\n".join([f"{len(wrong)} calls differ:", *wrong[:5]])


@_SEVERAL
def test_comparison_detects_an_order_of_one_set() -> None:
    """Outside the setting, few rows are summed in lanes, of which sets have other numbers."""
    assert len(differing(0, 120, "off")) > 0


def test_level_is_a_level_of_invariance() -> None:
    before = is_invariant(), is_portable()
    with ch.invariant("portable"):
        assert (is_invariant(), is_portable()) == (True, True)
        with ch.invariant():
            assert (is_invariant(), is_portable()) == (True, False)
        assert is_portable()
        with ch.invariant(False):
            assert (is_invariant(), is_portable()) == (False, False)
    assert (is_invariant(), is_portable()) == before


def test_variable_sets_the_level() -> None:
    code = "from clearhead.choices import is_invariant, is_portable\nprint(is_invariant(), is_portable())"
    done = reported(code, environment={"CLEARHEAD_INVARIANT": "portable", "CLEARHEAD_NATIVE": ""})
    assert done.stdout.split() == ["True", "True"], done.stderr


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_raise(dtype: torch.dtype) -> None:
    query = torch.ones(1, 1, 3, 8, dtype=dtype)
    block, model = ch.nn.EncoderBlock(8, 2).to(dtype), ch.nn.LanguageModel(11, 8, 2, 1).to(dtype).eval()
    calls: list[Callable[[], object]] = [
        lambda: ch.attention(query, query, query),
        lambda: ch.attention(query, query, query, mask=ch.Causal()),
        lambda: ch.attention(query, query, query, mask=ch.Window(1, 0)),
        lambda: block(query[0]),
        lambda: model(torch.ones(1, 3, dtype=torch.long)),
        lambda: model.generate(torch.ones(1, 3, dtype=torch.long), 2),
    ]
    with ch.invariant("portable"):
        for call in calls:
            with pytest.raises(Exception, match=r"in float32 only|one order of sums under|Use plain float32"):
                call()
        layer = torch.nn.Linear(8, 8, dtype=dtype)
        assert len(ch.swap(layer).outside) == 1


@pytest.mark.slow
def test_compiled_attention_in_another_dtype_raises() -> None:
    query = torch.ones(1, 1, 3, 8, dtype=torch.bfloat16)
    compiled = torch.compile(lambda x: ch.attention(x, x, x), backend="eager")
    with ch.invariant("portable"), pytest.raises(Exception, match="in float32 only"):
        compiled(query)


def test_dispatch_says_that_a_dtype_is_not_portable() -> None:
    query = torch.ones(1, 1, 3, 8, dtype=torch.bfloat16)
    with ch.invariant("portable"):
        reasons = " ".join(ch.explain_dispatch(query, query, query).reasons["native"])
    assert "the same bits on all instruction sets in float32 only" in reasons


def test_set_without_fused_multiply_add_raises() -> None:
    code = """
import clearhead as ch
from clearhead.choices import is_invariant
try:
    ch.set_invariant("portable")
except ch.UnsupportedError as error:
    print(is_invariant(), error)
"""
    done = reported(code, environment={"CLEARHEAD_ISA": UNFUSED_ISA, "CLEARHEAD_NATIVE": ""})
    expected = "False set_invariant: invariant must be"
    assert done.stdout.startswith(expected), done.stderr
    assert "which has no fused multiply-add" in done.stdout
    by_variable = {"CLEARHEAD_ISA": UNFUSED_ISA, "CLEARHEAD_NATIVE": "", "CLEARHEAD_INVARIANT": "portable"}
    done = reported("import torch, clearhead as ch\nch.attention(*torch.ones(3, 1, 1, 2, 8))", environment=by_variable)
    assert done.returncode != 0
    assert "CLEARHEAD_INVARIANT must be 0 or 1 where the kernels have no fused multiply-add" in done.stderr
