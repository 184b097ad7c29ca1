"""Packed sequences run by torch's attention where the table of processors says so, each sequence a call of its own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead import choices
from clearhead.backends import sdpa
from clearhead.choices import INTEL, padded_keys
from clearhead.functional import varlen_attn
from clearhead.masks.segments import Segment, segments_of
from clearhead.masks.sequences import Ragged
from clearhead.testing import choices as named
from clearhead.testing import processor
from tests.agreement import needs_native
from tests.budget import within_budget
from tests.test_varlen import WIDTH, Aux, alone, bounds, drawn, run

BF16 = torch.bfloat16
AMX = frozenset({"avx2", "avx512", "amx_bf16"})
CASES = {
    "equal": ([30, 30, 30], [30, 30, 30]),
    "mixed": ([70, 0, 33, 70, 1], [70, 3, 33, 70, 1]),
    "more keys": ([3, 20, 1], [70, 20, 31]),
    "empty": ([0, 24, 0, 5], [3, 24, 0, 0]),
    "nothing": ([3, 0], [0, 4]),
}


@pytest.fixture(autouse=True)
def _nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLEARHEAD_ISA", raising=False)


def calls_of_torch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], int, bool]]:
    """Query's shape, the number of keys and ``is_causal`` of each call of torch's attention from now on."""
    calls: list[tuple[tuple[int, ...], int, bool]] = []
    torchs = sdpa.scaled_dot_product_attention

    def recorded(query: Tensor, key: Tensor, *args: object, **options: object) -> Tensor:
        calls.append((tuple(query.shape), key.shape[2], bool(options["is_causal"])))
        return torchs(query, key, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", recorded)
    return calls


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, BF16], ids=str)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (4, 1)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_forward_and_gradients_by_torch_are_within_budget(
    case: str, window: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    lengths = CASES[case]
    inputs = drawn(lengths, dtype, kv_heads=2)
    upstream = torch.randn(inputs[0].shape).to(dtype)

    def results(output: Tensor, of: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
        return [output.detach(), *torch.autograd.grad(output, list(of), grad)]

    with named(attention="sdpa"):
        mine = results(run(inputs, lengths, window_size=window, enable_gqa=True), inputs, upstream)
        with torch.no_grad():
            plain_forward = run(inputs, lengths, window_size=window, enable_gqa=True)
    plain = results(alone(*inputs, lengths, window)[0], inputs, upstream)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact = results(alone(*wide, lengths, window)[0], wide, upstream.double())
    options = {"terms": max(*lengths[0], *lengths[1]), "size": 4.0, "dtype": dtype}
    for name, got, textbook, true in zip(("output", "query", "key", "value"), mine, plain, exact, strict=True):
        within_budget(name, got, textbook, true, **options)  # type: ignore[arg-type]
    within_budget("output without gradients", plain_forward, plain[0], exact[0], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_sequences_of_equal_lengths_share_a_call_without_a_mask(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    calls = calls_of_torch(monkeypatch)
    inputs = drawn(CASES["mixed"], torch.float32)
    with named(attention="sdpa"), torch.no_grad():
        run(inputs, CASES["mixed"], window_size=(-1, 0 if causal else -1))
    assert sorted(calls) == [
        ((1, 4, 1, WIDTH), 1, False),
        ((1, 4, 33, WIDTH), 33, causal),
        ((2, 4, 70, WIDTH), 70, causal),
    ]


@needs_native
@pytest.mark.parametrize(
    ("dtype", "lengths", "causal", "chosen"),
    [
        (BF16, [300, 200, 100], False, "sdpa"),
        (BF16, [300, 200, 100], True, "native"),
        (BF16, [700, 600], True, "sdpa"),
        (BF16, [60] * 10, False, "native"),
        (torch.float32, [700, 600], False, "native"),
    ],
    ids=str,
)  # fmt: skip
def test_the_table_decides_by_the_lengths_of_sequences(
    dtype: torch.dtype, lengths: list[int], causal: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packed length is above every threshold, so it is not what the table is asked about."""
    calls = calls_of_torch(monkeypatch)
    inputs = [torch.randn(sum(lengths), 2, WIDTH).to(dtype) for _ in range(3)]
    mask: ch.Mask = ch.Documents(lengths)
    mask = mask & ch.Causal() if causal else mask
    with processor(INTEL, AMX):
        heads = [tensor.transpose(0, 1)[None] for tensor in inputs]
        assert ch.explain_dispatch(*heads, mask=mask).choice == chosen
        varlen_attn(*inputs, bounds(lengths), bounds(lengths), 700, 700, window_size=(-1, 0 if causal else -1))
        assert bool(calls) == (chosen == "sdpa")
        learned = [tensor.requires_grad_() for tensor in heads]
        assert ch.explain_dispatch(*learned, mask=mask).choice == "native"


@needs_native
def test_windows_and_the_log_sum_exp_run_by_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of_torch(monkeypatch)
    inputs = [torch.randn(1300, 2, WIDTH).to(BF16) for _ in range(3)]
    ends = bounds([700, 600])
    with processor(INTEL, AMX):
        varlen_attn(*inputs, ends, ends, 700, 700, window_size=(9, 0))
        varlen_attn(*inputs, ends, ends, 700, 700, return_aux=Aux())
        assert not calls
        varlen_attn(*inputs, ends, ends, 700, 700)
        assert len(calls) == 2


@pytest.mark.parametrize("spoiled", [torch.nan, torch.inf])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_not_finite_values_reach_no_other_sequence(causal: bool, spoiled: float) -> None:
    lengths = ([40, 30], [40, 30])
    inputs = drawn(lengths, torch.float32)
    window = (-1, 0 if causal else -1)
    with named(attention="sdpa"):
        clean = run(inputs, lengths, window_size=window)
        with torch.no_grad():
            inputs[1][3] = inputs[2][3] = spoiled
        output = run(inputs, lengths, window_size=window)
        grads = torch.autograd.grad(output[40:].sum(), inputs)
    assert output[3:40].isnan().all()
    torch.testing.assert_close(output[40:], clean[40:])
    assert all(grad[40:].isfinite().all() for grad in grads)
    if causal:
        torch.testing.assert_close(output[:3], clean[:3])


def test_jagged_tensors_are_packed_sequences_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of_torch(monkeypatch)
    parts = [torch.randn(2, length, WIDTH) for length in (40, 17)]
    nested = torch.nested.nested_tensor([part.transpose(0, 1) for part in parts], layout=torch.jagged).transpose(1, 2)
    with named(attention="sdpa"):
        output = ch.attention(nested, nested, nested, mask=ch.Causal())
    assert [keys for _, keys, _ in calls] == [40, 17]
    for got, part in zip(output.unbind(), parts, strict=True):
        torch.testing.assert_close(got, ch.attention(part, part, part, mask=ch.Causal(), backend="reference"))


def test_equal_calls_give_equal_bits() -> None:
    inputs = drawn(CASES["mixed"], BF16)
    with named(attention="sdpa"), torch.no_grad():
        first, second = (run(inputs, CASES["mixed"]) for _ in range(2))
    assert torch.equal(first, second)


def test_segments_know_which_flag_serves() -> None:
    queries, keys = torch.tensor([0, 2, 3, 6]), torch.tensor([0, 4, 9, 12])
    causal = segments_of(Ragged(queries, keys, after=0), 6, 12)
    assert causal is not None
    assert causal.segments == (Segment(0, 2, 0, 4), Segment(2, 1, 4, 5), Segment(3, 3, 9, 3))
    # Two queries beside the last of four keys need a mask; one query sees all; as many queries as keys are causal.
    assert causal.orders == ("masked", "all", "causal")
    assert not causal.asks_flags
    used = segments_of(Ragged(queries, keys, torch.tensor([4, 0, 2])), 6, 12)
    assert used is not None
    assert used.segments == (Segment(0, 2, 0, 4), Segment(3, 3, 9, 2))
    assert used.sees_all
    assert segments_of(ch.Causal(), 6, 6) is None
    assert segments_of(ch.Documents(ids=torch.tensor([0, 1, 0])), 3, 3) is None


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_keys_are_filled_up_where_the_table_says_so(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    """The padding has no weight: results are those of the textbook formula."""
    torch.manual_seed(2)
    calls = calls_of_torch(monkeypatch)
    query, key, value = torch.randn(3, 1, 2, 130, WIDTH).to(BF16)
    mask = ch.Causal() if causal else None
    with processor(INTEL, AMX):
        output = ch.attention(query, key, value, mask=mask, backend="sdpa")
        # Keys of weight would take a tenth of the sum.
        assert (
            ch.attention(query, key, torch.ones_like(value), mask=mask, backend="sdpa").float().sub(1).abs().max()
            < 0.01
        )
    assert [keys for _, keys, _ in calls] == [144, 144]
    wide = [tensor.double() for tensor in (query, key, value)]
    true = ch.attention(*wide, mask=mask, backend="reference")
    plain = ch.attention(query, key, value, mask=mask, backend="reference")
    within_budget("output", output, plain, true, terms=130, size=4.0, dtype=BF16)


def test_the_table_says_how_many_keys_are_filled_up() -> None:
    with processor(INTEL, AMX):
        sizes = {length: padded_keys(BF16, length) for length in (63, 64, 65, 511, 513)}
        assert sizes == {63: 63, 64: 64, 65: 80, 511: 512, 513: 513}
        assert padded_keys(torch.float32, 65) == 65
    with processor("AuthenticAMD", frozenset({"avx2"})):
        assert padded_keys(BF16, 65) == 65
    assert all(row.sdpa_from is not None for row in choices.TABLE if row.sdpa_padding is not None)
