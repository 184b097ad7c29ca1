"""varlen_attn: packed sequences of different lengths, against each sequence alone in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.functional import varlen_attn
from clearhead.masks.sequences import Ragged
from tests.budget import within_budget

HEADS, WIDTH = 4, 8
#: Query and key lengths of sequences, some of them empty.
LENGTHS: dict[str, tuple[list[int], list[int]]] = {
    "equal": ([3, 0, 5, 9], [3, 0, 5, 9]),
    "more keys": ([3, 2, 1, 1], [7, 2, 40, 9]),
    "fewer keys": ([7, 3, 20], [2, 0, 19]),
    "empty": ([0, 4, 0, 0, 2], [3, 0, 0, 0, 5]),
    "one": ([6], [11]),
    "tiles": ([70, 1, 300, 33], [130, 260, 300, 1]),
}
WINDOWS = [(-1, -1), (-1, 0), (2, 0), (3, -1), (-1, 2), (1, 1), (0, 0)]


def bounds(lengths: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


def drawn(lengths: tuple[list[int], list[int]], dtype: torch.dtype, kv_heads: int = HEADS) -> list[Tensor]:
    q_lens, k_lens = map(sum, lengths)
    shapes = [(q_lens, HEADS), (k_lens, kv_heads), (k_lens, kv_heads)]
    return [torch.randn(*shape, WIDTH, dtype=dtype).requires_grad_() for shape in shapes]


def allowed(q_len: int, k_len: int, window: tuple[int, int]) -> Tensor:
    """Which keys each query of one sequence may attend to."""
    beside = torch.arange(q_len)[:, None] + k_len - q_len
    keys = torch.arange(k_len)
    before, after = (10**6 if side == -1 else side for side in window)
    return (keys >= beside - before) & (keys <= beside + after)


def alone(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[list[int], list[int]], window: tuple[int, int] = (-1, -1)
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the textbook formula, one sequence after the other."""
    outputs, sums = [], []
    group = query.shape[1] // key.shape[1]
    sizes = zip(query.split(lengths[0]), key.split(lengths[1]), value.split(lengths[1]), strict=True)
    for q, k, v in sizes:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
        scores = scores.masked_fill(~allowed(len(q), len(k), window), -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0.0)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outputs), torch.cat(sums, 1)


def run(inputs: Sequence[Tensor], lengths: tuple[list[int], list[int]], **options: Any) -> Any:
    return varlen_attn(*inputs, bounds(lengths[0]), bounds(lengths[1]), *map(max, lengths), **options)


class Aux:
    lse = True


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("case", LENGTHS)
def test_equals_each_sequence_alone_in_float64(case: str, window: tuple[int, int]) -> None:
    torch.manual_seed(0)
    lengths = LENGTHS[case]
    inputs = drawn(lengths, torch.float64)
    output, lse = run(inputs, lengths, window_size=window, return_aux=Aux())
    expected, sums = alone(*inputs, lengths, window)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(lse, sums)
    upstream = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(output, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 1)], ids=str)
@pytest.mark.parametrize("case", ["equal", "more keys", "fewer keys", "empty", "tiles"])
def test_forward_and_gradients_are_within_budget(case: str, window: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    lengths = LENGTHS[case]
    inputs = drawn(lengths, dtype, kv_heads=2)
    upstream = torch.randn(inputs[0].shape).to(dtype)

    def results(output: Tensor, of: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
        return [output.detach(), *torch.autograd.grad(output, list(of), grad)]

    mine = results(run(inputs, lengths, window_size=window, enable_gqa=True), inputs, upstream)
    plain = results(alone(*inputs, lengths, window)[0], inputs, upstream)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact = results(alone(*wide, lengths, window)[0], wide, upstream.double())
    for name, got, textbook, true in zip(("output", "query", "key", "value"), mine, plain, exact, strict=True):
        assert got.dtype == dtype
        within_budget(name, got, textbook, true, terms=max(*lengths[0], *lengths[1]), size=4.0, dtype=dtype)


def test_empty_row_gives_zero_and_minus_infinity() -> None:
    inputs = drawn(([3, 2], [1, 0]), torch.float32)
    output, lse = run(inputs, ([3, 2], [1, 0]), window_size=(-1, 0), return_aux=Aux())
    assert output[[0, 1, 3, 4]].eq(0).all()
    assert lse[:, [0, 1, 3, 4]].eq(-torch.inf).all()
    assert lse.shape == (HEADS, 5)
    grads = torch.autograd.grad(output.sum(), inputs)
    assert all(grad.isfinite().all() for grad in grads)
    assert grads[0][[0, 1, 3, 4]].eq(0).all()


def test_nan_in_one_sequence_reaches_no_other() -> None:
    lengths = LENGTHS["more keys"]
    inputs = drawn(lengths, torch.float32)
    clean = run(inputs, lengths, window_size=(-1, 0))
    spoiled = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    with torch.no_grad():
        for tensor in spoiled[1:]:
            tensor[:7] = torch.nan
    output = run(spoiled, lengths, window_size=(-1, 0))
    torch.testing.assert_close(output[3:], clean[3:])
    assert output[:3].isnan().all()
    key_grad = torch.autograd.grad(output[3:].sum(), spoiled[1])[0]
    torch.testing.assert_close(key_grad[7:], torch.autograd.grad(clean[3:].sum(), inputs[1])[0][7:])


def test_gradient_reaches_the_inputs_through_the_log_sum_exp() -> None:
    lengths = ([3, 2], [5, 4])
    inputs = drawn(lengths, torch.float64)
    lse = run(inputs, lengths, return_aux=Aux())[1]
    grads = torch.autograd.grad(lse.sum(), inputs[:2])
    expected = torch.autograd.grad(alone(*inputs, lengths)[1].sum(), inputs[:2])
    for mine, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (1, 0)], ids=str)
def test_used_keys_are_the_first_of_each_sequence(window: tuple[int, int]) -> None:
    q_lens, slots, used = [2, 1, 3], [6, 6, 6], [4, 0, 6]
    inputs = drawn((q_lens, slots), torch.float64)
    output = run(inputs, (q_lens, slots), window_size=window, seqused_k=torch.tensor(used, dtype=torch.int32))
    short = [inputs[0], *(torch.cat([x[6 * n : 6 * n + m] for n, m in enumerate(used)]) for x in inputs[1:])]
    expected, _ = alone(*short, (q_lens, used), window)
    torch.testing.assert_close(output, expected)
    grads = torch.autograd.grad(output.sum(), inputs)
    assert grads[1][6:12].eq(0).all()
    for mine, theirs in zip(grads, torch.autograd.grad(expected.sum(), inputs), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("given", ["used", "bounds", "both"])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)], ids=str)
def test_block_table_reads_pages(window: tuple[int, int], given: str) -> None:
    torch.manual_seed(2)
    q_lens, k_lens = [2, 3, 1], [5, 9, 0]
    query = torch.randn(6, HEADS, WIDTH, dtype=torch.float64)
    pools = torch.randn(2, 10, 4, HEADS, WIDTH, dtype=torch.float64)  # pages of 4 tokens
    table = torch.tensor([[7, 2, -1], [0, 9, 4], [-1, -1, -1]], dtype=torch.int32)
    named = [[7, 2], [0, 9, 4], []]
    packed = [
        torch.cat([pool[pages].flatten(0, 1)[:length] for pages, length in zip(named, k_lens, strict=True)])
        for pool in pools
    ]
    output = varlen_attn(
        query, *pools, bounds(q_lens), None if given == "used" else bounds(k_lens), 3, 9, window_size=window,
        seqused_k=None if given == "bounds" else torch.tensor(k_lens), block_table=table,
    )  # fmt: skip
    torch.testing.assert_close(output, alone(query, *packed, (q_lens, k_lens), window)[0])


def test_tokens_after_the_last_boundary_give_zero() -> None:
    inputs = drawn(([5], [5]), torch.float32)
    boundaries = bounds([3])
    output = varlen_attn(*inputs, boundaries, boundaries, 3, 3)
    expected, _ = alone(*(x[:3] for x in inputs), ([3], [3]))
    torch.testing.assert_close(output[:3], expected)
    assert output[3:].eq(0).all()


def test_no_sequences_and_no_tokens() -> None:
    inputs = drawn(([0], [0]), torch.float32)
    for boundaries in (torch.tensor([0]), torch.tensor([0, 0, 0])):
        output = varlen_attn(*inputs, boundaries, boundaries, 0, 0)
        assert output.shape == (0, HEADS, WIDTH)
        assert all(
            grad.shape == x.shape for grad, x in zip(torch.autograd.grad(output.sum(), inputs), inputs, strict=True)
        )


def test_strided_inputs_and_other_value_width() -> None:
    lengths = ([3, 4], [2, 9])
    query = torch.randn(HEADS, 7, WIDTH, dtype=torch.float64).transpose(0, 1)
    key, value = torch.randn(11, HEADS, WIDTH, 2, dtype=torch.float64).unbind(-1)
    torch.testing.assert_close(run([query, key, value], lengths), alone(query, key, value, lengths)[0])
    narrow = value[..., :3]
    torch.testing.assert_close(run([query, key, narrow], lengths), alone(query, key, narrow, lengths)[0])


def test_mask_with_equal_boundaries_is_a_band() -> None:
    """The kernels read bands faster than intervals of each row."""
    packed = torch.randn(8, HEADS, WIDTH)
    layout = ch.functional.varlen.VarlenLayout(bounds([3, 5]), bounds([3, 5]), None, 5, 5)
    mask = ch.functional.varlen.PackedCall.of("varlen_attn", packed, packed, packed, layout).mask(None, 0)
    assert repr(mask).endswith("& Causal()")


def test_nothing_is_computed_between_sequences() -> None:
    """Every query's keys are one interval of its own sequence, from which the kernels make one task each."""
    ragged = Ragged(bounds([3, 2], torch.int64), bounds([4, 6], torch.int64))
    index = (torch.zeros(1, 1, 1, 1, dtype=torch.long),) * 2
    rows = ragged.intervals(*index, torch.arange(5).view(1, 1, 5, 1), 10)
    assert rows.start.flatten().tolist() == [0, 0, 0, 4, 4]
    assert rows.stop.flatten().tolist() == [4, 4, 4, 10, 10]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_into_one_graph(backend: str) -> None:
    lengths = LENGTHS["more keys"]
    inputs = drawn(lengths, torch.float32)
    boundaries = [bounds(each) for each in lengths]

    def call(*given: Tensor) -> Any:
        return varlen_attn(*given, 3, 40, window_size=(-1, 0), return_aux=Aux())  # type: ignore[misc]

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    for mine, theirs in zip(compiled(*inputs, *boundaries), call(*inputs, *boundaries), strict=True):
        torch.testing.assert_close(mine, theirs)
    grads = torch.autograd.grad(compiled(*inputs, *boundaries)[0].sum(), inputs)
    for mine, theirs in zip(grads, torch.autograd.grad(call(*inputs, *boundaries)[0].sum(), inputs), strict=True):
        torch.testing.assert_close(mine, theirs)
    with pytest.raises(ch.ShapeError, match="cu_seq_q must never fall"):
        compiled(*inputs, torch.tensor([0, 3, 2, 6, 7], dtype=torch.int32), boundaries[1])


Q, K = bounds([3, 2]), bounds([4, 6])
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "falls": ({"cu_seq_q": torch.tensor([0, 4, 3])}, r"cu_seq_q must never fall; got 4 and then 3 at place 2\."),
    "start": ({"cu_seq_k": torch.tensor([1, 4, 10])}, r"cu_seq_k must start at 0; got 1\."),
    "negative": ({"cu_seq_k": torch.tensor([0, -4, 10])}, r"cu_seq_k must never fall; got 0 and then -4"),
    "beyond queries": ({"cu_seq_q": torch.tensor([0, 3, 6])}, r"cu_seq_q must end within the 5 tokens; got 6\."),
    "beyond keys": ({"cu_seq_k": torch.tensor([0, 4, 2**40])}, r"cu_seq_k must end within the 10 tokens"),
    "dtype": ({"cu_seq_q": torch.tensor([0.0, 3.0, 5.0])}, r"cu_seq_q must be int32 or int64 of .*; got float32"),
    "list": ({"cu_seq_q": [0, 3, 5]}, r"cu_seq_q must be int32 or int64 of .*; got \[0, 3, 5\]"),
    "no boundary": ({"cu_seq_q": torch.tensor([], dtype=torch.int32)}, r"cu_seq_q must begin with 0"),
    "axes": ({"cu_seq_k": Q[None]}, r"cu_seq_k must be int32 or int64 of shape \[3\]; got int32 of shape \(1, 3\)"),
    "sequences": ({"cu_seq_k": bounds([4, 6, 0])}, r"cu_seq_k must be int32 or int64 of shape \[3\]"),
    "no keys": ({"cu_seq_k": None}, r"cu_seq_k must be int32 or int64 of shape \[3\]; got None"),
    "meta": ({"cu_seq_q": Q.to("meta")}, r"cu_seq_q must be on query's device cpu; got meta"),
    "max_q": ({"max_q": 2}, r"max_q must be at least the longest sequence; got 2 for a sequence of 3 tokens\."),
    "max_k": ({"max_k": 5}, r"max_k must be at least the longest sequence; got 5 for a sequence of 6 tokens\."),
    "max_q kind": ({"max_q": 2.5}, r"max_q must be a whole number"),
    "window": ({"window_size": (-2, 0)}, r"window_size must be two whole numbers of at least -1; got \(-2, 0\)\."),
    "window kind": ({"window_size": 3}, r"window_size must be two whole numbers of at least -1; got 3\."),
    "used": ({"seqused_k": torch.tensor([4, 7])}, r"seqused_k must lie from 0 to .*, 6 in sequence 1; got 7"),
    "used negative": ({"seqused_k": torch.tensor([-1, 2])}, r"seqused_k must lie from 0 .*; got -1"),
    "used shape": ({"seqused_k": torch.tensor([4])}, r"seqused_k must be int32 or int64 of shape \[2\]"),
    "splits": ({"num_splits": -1}, r"num_splits must be a whole number of at least 0"),
    "scale": ({"scale": float("nan")}, r"scale must be a finite number"),
    "query axes": ({"query": torch.randn(1, 5, 2, 8)}, r"query must have axes \[total, heads, head_dim\]"),
    "value": ({"value": torch.randn(9, 2, 8)}, r"value must have key's tokens and heads \(10, 2\)"),
    "heads": ({"query": torch.randn(5, 4, 8)}, r"key must have query's 4 heads; got 2 heads\. Pass enable_gqa=True"),
    "uneven heads": ({"query": torch.randn(5, 3, 8), "enable_gqa": True}, r"key must have a number of heads that"),
    "dtypes": ({"key": torch.randn(10, 2, 8).double()}, r"key must have query's dtype torch\.float32"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_raises_one_line(name: str) -> None:
    changed, text = WRONG[name]
    arguments: dict[str, Any] = {
        "query": torch.randn(5, 2, 8), "key": torch.randn(10, 2, 8), "value": torch.randn(10, 2, 8),
        "cu_seq_q": Q, "cu_seq_k": K, "max_q": 3, "max_k": 6,
    }  # fmt: skip
    with pytest.raises(ch.ClearheadError, match=rf"^varlen_attn: {text}") as raised:
        varlen_attn(**(arguments | changed))
    assert "\n" not in str(raised.value)


PAGED: dict[str, tuple[dict[str, Any], str]] = {
    "outside": ({"block_table": torch.tensor([[0, 7], [1, 2]])}, r"block_table must name pages .*; got 7\."),
    "negative": ({"block_table": torch.tensor([[0, 1], [-3, 2]])}, r"block_table must name pages from 0 to 4 .*-3"),
    "dtype": ({"block_table": torch.zeros(2, 2)}, r"block_table must be int32 or .*; got float32"),
    "rows": ({"block_table": torch.zeros(3, 2, dtype=torch.int32)}, r"block_table must be .* of shape \[2, any\]"),
    "too long": ({"seqused_k": torch.tensor([3, 9])}, r"seqused_k must lie from 0 to the 8 keys of 2 pages; got 9\."),
    "negative length": ({"seqused_k": torch.tensor([3, -1])}, r"seqused_k must lie from 0 to the 8 keys .*-1"),
    "no length": ({"seqused_k": None}, r"seqused_k must be given with block_table; got None"),
    "by bounds": ({"seqused_k": None, "cu_seq_k": bounds([9, 1])}, r"cu_seq_k must .*8 of 2 pages; got 9"),
    "pool": ({"key": torch.randn(20, 2, 8)}, r"key must have axes \[pages, page_size, kv_heads, head_dim\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", PAGED)
def test_bad_block_table_raises_one_line(name: str) -> None:
    changed, text = PAGED[name]
    pool = torch.randn(5, 4, 2, 8)
    arguments: dict[str, Any] = {
        "query": torch.randn(5, 2, 8), "key": pool, "value": pool, "cu_seq_q": Q, "cu_seq_k": None, "max_q": 3,
        "max_k": 8, "seqused_k": torch.tensor([5, 6]), "block_table": torch.tensor([[0, 1], [3, 2]]),
    }  # fmt: skip
    with pytest.raises(ch.ClearheadError, match=rf"^varlen_attn: {text}") as raised:
        varlen_attn(**(arguments | changed))
    assert "\n" not in str(raised.value)


def test_signature_is_that_of_torch() -> None:
    theirs = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no varlen_attn")
    import inspect

    mine = inspect.signature(varlen_attn).parameters
    for name, parameter in inspect.signature(theirs.varlen_attn).parameters.items():
        assert name in mine
        assert (mine[name].kind, mine[name].default) == (parameter.kind, parameter.default)


def test_aux_request_of_torch_is_taken() -> None:
    theirs = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no varlen_attn")
    make: Callable[..., Any] = getattr(theirs, "AuxRequest", Aux)
    inputs = drawn(([2], [2]), torch.float32)
    assert len(run(inputs, ([2], [2]), return_aux=make(lse=True) if make is not Aux else Aux())) == 2
    assert isinstance(run(inputs, ([2], [2]), return_aux=None), Tensor)
