"""The CPU kernels' product of linear layers against float64, and how it stands in the choice between paths."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead import choices as sizes
from clearhead.backends import native_header, native_library, native_projection
from clearhead.backends.native_projection import MAX_TERMS, Product, product
from clearhead.errors import UnsupportedError
from clearhead.projection import choice, paths, project
from clearhead.testing import choices, processor
from tests.budget import within_budget
from tests.processes import told

needs_native = pytest.mark.skipif(native_projection.absent() is not None, reason=f"{native_projection.absent()}")
OTHERS = [name for name, path in paths.PATHS.items() if path.absent(torch.float32) is None and name != "torch"]
needs_another = pytest.mark.skipif(not OTHERS, reason="there is no path but torch's")
SETS = native_library.isa_names()
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
#: Whether left and right lie turned.
TURNS = pytest.mark.parametrize(
    ("left_turned", "right_turned"), [(False, False), (False, True), (True, False), (True, True)]
)
#: Rows, columns, and the steps of each term.
SIZES = [
    (1, 1, [1]), (67, 35, [41]), (5, 130, [33, 1]), (130, 3, [7, 64, 19]), (12, 64, [31, 2, 513, 5]),
    (3, 17, [0]), (9, 16, [0, 12, 0]), (2, 5, [8300]), (17, 4100, [3]), (0, 8, [8]), (8, 0, [8]), (0, 0, [0]),
]  # fmt: skip


STRIDES = {
    "as it is": lambda x: x,
    "every second column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "columns of a wider tensor": lambda x: F.pad(x, (3, 6))[:, 3:-6],
    "columns of a tensor that is wider by one": lambda x: F.pad(x, (1, 0))[:, 1:],
    "every second row": lambda x: x.repeat_interleave(2, 0)[::2],
    "transposed": lambda x: x.t().contiguous().t(),
    "one row for all": lambda x: x[:1].expand_as(x),
    "one column for all": lambda x: x[:, :1].expand_as(x),
    "one number for all": lambda x: x[:1, :1].expand_as(x),
    "an odd address": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "negated in the mind": lambda x: torch._neg_view(x),
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The table read anew, nothing forced, and the smallest product large enough."""
    monkeypatch.delenv("CLEARHEAD_PROJECTION", raising=False)
    monkeypatch.setattr(sizes, "SMALL", 1)
    monkeypatch.setattr(sizes, "SMALL_UNPREPARED", 1)
    with choices():
        yield


def _numbers(*shape: int, seed: int = 0, whole: bool = False) -> Tensor:
    """Normal ones; or small whole ones, whose sums are exact in float32 in whatever order they are added."""
    generator = torch.Generator().manual_seed(seed)
    if whole:
        return torch.randint(-4, 5, shape, generator=generator).float()
    return torch.randn(shape, generator=generator)


def _terms(
    rows: int, columns: int, steps: Sequence[int], left_turned: bool, right_turned: bool, whole: bool = False
) -> list[tuple[Tensor, Tensor]]:
    found = []
    for seed, count in enumerate(steps):
        left = (count, rows) if left_turned else (rows, count)
        right = (columns, count) if right_turned else (count, columns)
        found.append((_numbers(*left, seed=2 * seed, whole=whole), _numbers(*right, seed=2 * seed + 1, whole=whole)))
    return found


def _textbook(
    terms: Sequence[tuple[Tensor, Tensor]], left_turned: bool, right_turned: bool, bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    total = sum(
        (left.t() if left_turned else left).to(dtype) @ (right.t() if right_turned else right).to(dtype)
        for left, right in terms
    )
    assert isinstance(total, Tensor)
    return total if bias is None else total + bias.to(dtype)


def _check(
    terms: Sequence[tuple[Tensor, Tensor]], left_turned: bool = False, right_turned: bool = False,
    bias: Tensor | None = None, sums: bool = False,
) -> None:  # fmt: skip
    """The product, and a left's sums, within the budget of the same in float32, rounded once."""
    left, _ = terms[0]
    row_sums = left.new_full((left.shape[1],), torch.nan) if sums else None
    result = product(terms, left_turned=left_turned, right_turned=right_turned, bias=bias, row_sums=row_sums)
    assert result.dtype == left.dtype
    own, exact = (_textbook(terms, left_turned, right_turned, bias, dtype) for dtype in (torch.float32, torch.float64))
    steps = sum(one.shape[0 if left_turned else 1] for one, _ in terms)
    within_budget("product", result, own.to(left.dtype), exact, terms=max(steps, 1))
    if row_sums is not None:
        own_sums = left.float().sum(0).to(left.dtype)
        within_budget("sums", row_sums, own_sums, left.double().sum(0), terms=max(steps, 1))


@needs_native
class TestProduct:
    """On the best instruction set that this processor has."""

    @BOTH
    @TURNS
    @pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
    @pytest.mark.parametrize(("rows", "columns", "steps"), SIZES, ids=str)
    def test_sizes(
        self, rows: int, columns: int, steps: list[int], biased: bool, left_turned: bool, right_turned: bool,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        terms = _terms(rows, columns, steps, left_turned, right_turned)
        terms = [(left.to(dtype), right.to(dtype)) for left, right in terms]
        bias = _numbers(columns, seed=99).to(dtype) if biased else None
        # Sums are those of one left, and come with a product.
        sums = left_turned and len(steps) == 1 and columns > 0
        _check(terms, left_turned, right_turned, bias, sums)

    @BOTH
    @TURNS
    @pytest.mark.parametrize(("rows", "columns", "steps"), SIZES, ids=str)
    def test_it_is_rounded_once(
        self, rows: int, columns: int, steps: list[int], left_turned: bool, right_turned: bool, dtype: torch.dtype
    ) -> None:
        """Not between the terms, not between the stretches of a long sum, and not before the bias."""
        terms = _terms(rows, columns, steps, left_turned, right_turned, whole=True)
        # Finer than what bfloat16 can hold beside the sums.
        bias = _numbers(columns, seed=99, whole=True) / 64
        exact = _textbook(terms, left_turned, right_turned, bias, torch.float32).to(dtype)
        sums = left_turned and len(steps) == 1 and columns > 0
        row_sums = torch.full((rows,), torch.nan, dtype=dtype) if sums else None
        found = product(
            [(left.to(dtype), right.to(dtype)) for left, right in terms], left_turned=left_turned,
            right_turned=right_turned, bias=bias.to(dtype), row_sums=row_sums,
        )  # fmt: skip
        assert torch.equal(found, exact)
        if row_sums is not None:
            assert torch.equal(row_sums, terms[0][0].sum(0).to(dtype))

    @BOTH
    @TURNS
    @pytest.mark.parametrize("steps", [40, 41])
    @pytest.mark.parametrize("which", ["left", "right"])
    @pytest.mark.parametrize("stride", STRIDES)
    def test_strides(
        self, stride: str, which: str, steps: int, left_turned: bool, right_turned: bool, dtype: torch.dtype
    ) -> None:
        terms = [
            (left.to(dtype), right.to(dtype)) for left, right in _terms(37, 50, [steps, 24], left_turned, right_turned)
        ]
        changed = STRIDES[stride]
        # One of two terms: the other's strides are its own.
        left, right = terms[0]
        terms[0] = (changed(left), right) if which == "left" else (left, changed(right))
        _check(terms, left_turned, right_turned)
        if left_turned:
            _check(terms[:1], left_turned, right_turned, sums=True)

    @BOTH
    @pytest.mark.parametrize(
        "bias",
        [
            lambda x: x[::2], lambda x: x[:1].expand(50), lambda x: x[1:51], lambda x: torch._neg_view(x[:50]),
        ],
        ids=["every second", "one for all", "an odd address", "negated in the mind"],
    )  # fmt: skip
    def test_strides_of_a_bias(self, bias: object, dtype: torch.dtype) -> None:
        terms = [tuple(each.to(dtype) for each in term) for term in _terms(7, 50, [9], False, True)]
        _check(terms, right_turned=True, bias=bias(_numbers(100, seed=9).to(dtype)))  # type: ignore[operator, arg-type]

    @pytest.mark.parametrize("one", [1, 2])
    def test_a_single_row_may_have_any_stride(self, one: int) -> None:
        left, right = _numbers(1, 8), _numbers(8, 5, seed=1)
        strange = left.as_strided((1, 8), (2**40, 1)) if one == 1 else left
        other = right[:, :1].t().contiguous().as_strided((1, 8), (2**40, 1)) if one == 2 else right.t().contiguous()
        _check([(strange, other)], right_turned=True)

    def test_infinity_and_nan_stay_in_their_rows(self) -> None:
        """Nor do numbers beside the tensor, in what is laid out to whole vectors, reach the sum."""
        around = torch.full((40, 24), torch.nan)
        left, right = around[3:36, 2:21], torch.full((19, 70), torch.inf)[:, 5:42]
        left.copy_(_numbers(33, 19))
        right.copy_(_numbers(19, 37, seed=1))
        left[4, 7], right[2, 30] = torch.nan, torch.inf
        found = product([(left, right)])
        assert torch.equal(torch.isfinite(found), torch.isfinite(left @ right))
        found = product([(left.t().contiguous(), right)], left_turned=True)
        assert torch.equal(torch.isfinite(found), torch.isfinite(left @ right))

    def test_what_the_kernels_refuse_is_an_error(self) -> None:
        left, right = torch.ones(3, 3), torch.ones(3, 3)
        with pytest.raises(RuntimeError, match=r"^clearhead: a linear layer's product failed: "):
            product([(left, right)], row_sums=torch.empty(3))
        with pytest.raises(RuntimeError, match=r"^clearhead: a linear layer's product failed: "):
            product([(left, right)] * 2, left_turned=True, row_sums=torch.empty(3))
        with pytest.raises(IndexError):
            product([(left, right)] * (MAX_TERMS + 1))

    @pytest.fixture
    def threads(self) -> Iterator[None]:
        before = torch.get_num_threads()
        yield
        torch.set_num_threads(before)

    @BOTH
    @TURNS
    @pytest.mark.parametrize(
        ("rows", "columns", "steps"), [(301, 130, [520, 77]), (70, 700, [1100]), (40, 33, [9000])], ids=str
    )
    def test_same_bits_with_any_number_of_threads(
        self, rows: int, columns: int, steps: list[int], left_turned: bool, right_turned: bool, dtype: torch.dtype,
        threads: None,
    ) -> None:  # fmt: skip
        terms = [
            (left.to(dtype), right.to(dtype)) for left, right in _terms(rows, columns, steps, left_turned, right_turned)
        ]
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            row_sums = torch.empty(rows, dtype=dtype) if left_turned and len(steps) == 1 else None
            result = product(terms, left_turned=left_turned, right_turned=right_turned, row_sums=row_sums)
            found.append([result] if row_sums is None else [result, row_sums])
        assert all(all(map(torch.equal, found[0], other)) for other in found[1:])


BITS = """
import hashlib, torch
from clearhead.backends.native_projection import product
found = []
for dtype in (torch.float32, torch.bfloat16):
    x = torch.linspace(-2.0, 2.0, 70_000).sin().view(100, 700).to(dtype)
    sums = torch.empty(700, dtype=dtype)
    for result in (product([(x, x)] * 2, right_turned=True), product([(x, x)], left_turned=True, row_sums=sums), sums):
        found.append(hashlib.sha256(result.float().numpy().tobytes()).hexdigest())
"""


def _force(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every description ask for one instruction set."""
    library = native_library.library()
    assert library is not None
    index = next(place for place in range(99) if library.ch_isa_name(place) == name.encode())
    monkeypatch.setattr(native_library, "isa_index", lambda: index)
    assert native_library.new_description(native_header.ProjectionDescription).isa == index


@needs_native
@pytest.mark.parametrize("name", SETS)
class TestInstructionSets:
    """Each set that this processor has."""

    @BOTH
    @TURNS
    def test_sizes(
        self, name: str, left_turned: bool, right_turned: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _force(name, monkeypatch)
        for rows, columns, steps in SIZES:
            terms = [
                (left.to(dtype), right.to(dtype))
                for left, right in _terms(rows, columns, steps, left_turned, right_turned)
            ]
            sums = left_turned and len(steps) == 1 and columns > 0
            _check(terms, left_turned, right_turned, _numbers(columns, seed=99).to(dtype), sums)

    def test_the_variable_reaches_the_product(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The bits of a process that was started with it are those of the same set, asked for by hand."""
        done = told(f"{BITS}\nprint(*found)", environment={"CLEARHEAD_ISA": name, "CLEARHEAD_NATIVE": ""})
        assert done.returncode == 0, done.stderr
        _force(name, monkeypatch)
        here: dict[str, list[str]] = {}
        exec(BITS, here)  # type: ignore[arg-type]
        assert done.stdout.split() == here["found"]


def test_without_the_operator_or_the_kernels_there_is_less_to_choose_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    x, weight = _numbers(4, 8), _numbers(6, 8, seed=1)
    there = " or ".join(["torch", *(name for name in OTHERS if name != "onednn")])
    monkeypatch.setenv("CLEARHEAD_PROJECTION", "onednn")
    with pytest.raises(
        UnsupportedError, match=rf"^project: CLEARHEAD_PROJECTION must be {there} for float32 here; got onednn, but"
    ):
        choice("input gradient")
    monkeypatch.delenv("CLEARHEAD_PROJECTION")
    monkeypatch.setattr(native_projection, "library", lambda: None)
    assert torch.equal(project(x, weight), F.linear(x, weight))
    with processor("AuthenticAMD", ["avx2"]):
        found = choice("forward")
    assert found.path == "torch"
    assert "; native: the CPU kernels are not here" in found.reason
    assert "; onednn: " in found.reason
    monkeypatch.setenv("CLEARHEAD_PROJECTION", "native")
    refused = r"must be torch for float32 here; got native, but the CPU kernels are not here\. Unset it\.$"
    with pytest.raises(UnsupportedError, match=refused):
        choice("input gradient")


def test_a_processor_without_bfloat16_in_onednn_leaves_it_out_for_that_dtype_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its operator is there, and would raise."""
    theirs = SimpleNamespace(_linear_pointwise=None, _is_mkldnn_bf16_supported=lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", theirs)
    assert [paths.ONEDNN.absent(dtype) for dtype in (torch.float32, torch.bfloat16)] == [
        None,
        "oneDNN has no bfloat16 products on this processor",
    ]
    with processor("GenuineIntel", ["avx2", "avx512", "amx_bf16"]):
        assert choice("forward", torch.bfloat16).path == "torch"
    monkeypatch.setenv("CLEARHEAD_PROJECTION", "onednn")
    assert choice("forward").path == "onednn"
    with pytest.raises(UnsupportedError, match=r"CLEARHEAD_PROJECTION must be torch.* for bfloat16 here; got onednn"):
        choice("input gradient", torch.bfloat16)


ALONE = """
import json, torch
torch.ops.mkldnn = None
from clearhead.projection import KINDS, choice
from clearhead.testing import choices, processor
with processor("AuthenticAMD", ["avx2"]):
    print(json.dumps([[choice(kind).path, choice(kind).reason] for kind in KINDS]))
"""


def test_without_kernels_and_operator_the_reason_says_so() -> None:
    done = told(ALONE, environment={"CLEARHEAD_NATIVE": "0", "CLEARHEAD_PROJECTION": ""})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [name for name, _ in found] == ["torch"] * 3
    assert all("; native: the CPU kernels are not here" in reason for _, reason in found)
    assert all("; onednn: " in reason for _, reason in found)


def test_a_weight_that_lies_the_other_way_is_read_where_it_is() -> None:
    """GPT-2's layers hold theirs as ``[in, out]``."""
    x, weight = torch.randn(9, 20), torch.randn(20, 33)
    forward = Product([(x, weight.t())], right_turned=True)
    assert forward.description.terms[0].right == weight.data_ptr()
    torch.testing.assert_close(forward.run(), x @ weight)
    grad = torch.randn(9, 33)
    backward = Product([(grad, weight.t())])
    assert backward.description.terms[0].right == weight.data_ptr()
    torch.testing.assert_close(backward.run(), grad @ weight.t())
    # One of two that lies as it should: the other is laid out anew.
    torch.testing.assert_close(product([(grad, weight.t()), (grad, weight.t().contiguous())]), 2 * grad @ weight.t())
