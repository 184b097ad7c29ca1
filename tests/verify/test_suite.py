"""``verify``: what passes, what is reported, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead as ch
from clearhead.errors import UnsupportedError
from clearhead.ops import library as native_library
from clearhead.verify import law_names, search
from clearhead.verify.case import LAYOUTS, Case, laid_out
from clearhead.verify.masks import KINDS, spoken
from clearhead.verify.oracle import attend
from tests import oracle
from tests.verify.broken import BROKEN
from tests.verify.steps import RIGHT

STATISTICS = {"native": True, "tiled": True, "reference": True, "sdpa": False, "auto": True}


def through(backend: str) -> Callable[..., ch.Observation | Tensor]:
    """``ch.attention`` on one backend, with every statistic that the suite can check."""

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> ch.Observation | Tensor:
        if not STATISTICS[backend]:
            return ch.attention(query, key, value, backend=backend, **options)
        want = ch.Want(lse=True, entropy=True, received=True, rows=range(query.shape[2]))
        return ch.observe_attention(query, key, value, want=want, backend=backend, **options)

    return attention


@pytest.mark.slow
@pytest.mark.parametrize("backend", STATISTICS)
def test_backends_break_no_law(backend: str) -> None:
    if backend == "native" and native_library.reason() is not None:
        pytest.skip(str(native_library.reason()))
    report = ch.verify(through(backend), signature="clearhead", examples=2)
    assert report.ok, report
    assert report["log-sum-exp"].status == ("holds" if STATISTICS[backend] else "does not apply")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_attention_breaks_no_law_in_other_dtypes(dtype: torch.dtype) -> None:
    report = ch.verify(ch.attention, signature="clearhead", dtype=dtype, examples=0)
    assert report.ok, report


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "tiled"])
def test_linear_memory_holds_for_the_kernels_and_the_tiles(backend: str) -> None:
    attention = partial(ch.attention, backend=backend)
    report = ch.verify(attention, signature="clearhead", laws=["memory"], linear_memory=True, examples=0)
    assert report["memory"].status == "holds", report


@pytest.mark.slow
def test_torch_function_breaks_only_known_laws() -> None:
    """NaN passes its mask, a NaN query over few keys becomes an empty row, and it scales after masking."""
    report = ch.verify(F.scaled_dot_product_attention, examples=0)
    faults = {"containment", "containment in gradients", "NaN is not spread", "NaN is not spread in gradients"}
    faults |= {"scale under a mask", "NaN is shown"}
    assert set(report.broken) <= faults, report


@pytest.mark.slow
def test_torch_module_breaks_no_law_under_mha() -> None:
    laws = ["output", "gradients", "mask polarity", "masks", "dropout", "dropout off", "dropout in backward"]
    laws += ["many heads and sequences", "process state", "threads"]
    report = ch.verify(torch.nn.MultiheadAttention, signature="mha", laws=laws, examples=0)
    assert report.ok, report


def test_half_precision_is_caught_where_float64_is_claimed() -> None:
    def hidden(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return RIGHT(query.float(), key.float(), value.float()).double()

    assert ch.verify(hidden, laws=["output"], examples=0).ok
    assert not ch.verify(hidden, laws=["output"], dtype=torch.float64, examples=0).ok


def test_law_does_not_apply_without_its_argument() -> None:
    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return RIGHT(query, key, value)

    laws = ["masks", "causal flag", "scale", "grouped heads", "dropout", "weights", "split and merged"]
    report = ch.verify(plain, laws=["output", *laws], examples=0)
    assert report.ok, report
    for law in laws:
        assert report[law].status == "does not apply", law
        assert report[law].detail


def test_refusal_is_no_failure_and_an_error_is() -> None:
    def forward_only(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if query.requires_grad:
            raise NotImplementedError("no backward here")
        return RIGHT(query, key, value)

    def untrained(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if query.requires_grad:
            raise IndexError("no backward here")
        return RIGHT(query, key, value)

    refused = ch.verify(forward_only, laws=[name for name in law_names() if name != "memory"], examples=0)
    assert refused.ok, refused
    assert refused["gradients"].detail == "refused: no backward here"
    failed = ch.verify(untrained, laws=["gradients"], examples=0)
    assert failed.broken == ("gradients",)
    assert failed["gradients"].detail == "raises IndexError: no backward here"


def test_function_that_refuses_everything_is_not_ok() -> None:
    def nothing(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        raise NotImplementedError("not yet")

    report = ch.verify(nothing, examples=0)
    assert not report.ok
    assert report.verdict == "no law could be tried."


def test_intermittent_failure_is_reported() -> None:
    calls = [0]

    def moody(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        calls[0] += 1
        return RIGHT(query, key, value) + (calls[0] % 5 == 0)

    report = ch.verify(moody, laws=["output", "lengths"])
    assert report.broken == ("output", "lengths"), report
    assert report["output"].detail


@pytest.mark.slow
def test_causal_flag_alone_is_tested_for_leaks() -> None:
    def peeking(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
        allowed = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(1)
        return RIGHT(query, key, value, allowed if is_causal else None)

    caught = ("causal flag", "no leak from the future", "no leak in gradients")
    report = ch.verify(peeking, laws=[*caught, "masks"])
    assert report.broken == caught, report
    assert report["masks"].status == "does not apply"


def test_module_receives_the_arguments_of_its_forward() -> None:
    class Module(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
            return RIGHT(query, key, value, is_causal=is_causal)

    report = ch.verify(Module(), laws=["output", "masks", "scale", "causal flag", "dropout"], examples=0)
    assert report.ok, report
    assert {finding.law for finding in report.findings if finding.status == "holds"} == {"output", "causal flag"}


def test_positional_only_argument_is_not_passed_by_name() -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, /) -> Tensor:
        return RIGHT(query, key, value, attn_mask)

    report = ch.verify(attention, laws=["output", "masks"], examples=0)
    assert report.ok, report
    assert report["masks"].status == "does not apply"


def test_required_argument_receives_the_default_of_torch() -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        return RIGHT(query, key, value, attn_mask, is_causal=is_causal)

    report = ch.verify(attention, laws=["output", "masks", "causal flag"], examples=0)
    assert report.ok, report
    assert {finding.status for finding in report.findings} == {"holds"}


def test_argument_under_another_name_is_noted() -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, block: int = 64) -> Tensor:
        return RIGHT(query, key, value, mask)

    report = ch.verify(attention, laws=["output"], examples=0)
    assert report.unheard == ("mask",)
    assert "Never passed, so not tested: mask. The convention sdpa passes attn_mask," in " ".join(report.lines())
    assert report.to_dict()["notes"] == list(report.notes)
    assert ch.verify(RIGHT, laws=["output"], examples=0).unheard == ()


def test_mask_is_passed_without_query_offset_if_unsupported() -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor, mask: ch.Mask | None = None) -> Tensor:
        return ch.attention(query, key, value, mask=mask, backend="reference")

    report = ch.verify(attention, signature="clearhead", laws=["masks", "causal alignment"], examples=0)
    assert report["masks"].status == "holds", report
    assert report["causal alignment"].detail == "refused: it has no query_offset"


def test_mha_module_receives_only_supported_arguments() -> None:
    class Attention(torch.nn.MultiheadAttention):
        def __init__(self, embed_dim: int, num_heads: int) -> None:
            super().__init__(embed_dim, num_heads, batch_first=True)

        def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Any:
            return super().forward(query, key, value, attn_mask=attn_mask)[0]

    laws = ["output", "mask polarity", "mask layouts", "packed equals padded", "dropout", "weights"]
    report = ch.verify(Attention, signature="mha", laws=laws, examples=0)
    assert report.ok, report
    applies = {finding.law for finding in report.findings if finding.status == "holds"}
    assert applies == {"output", "mask polarity", "mask layouts", "packed equals padded"}


def test_heads_after_lengths_are_diagnosed() -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return RIGHT(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)).transpose(1, 2)

    said = ch.verify(attention, laws=["output"], examples=0)["output"].detail
    assert said == "it expects [batch, len, heads, head_dim]; here tensors are [batch, heads, len, head_dim]"


def test_refused_second_derivative_is_no_failure() -> None:
    finding = ch.verify(F.scaled_dot_product_attention, laws=["gradients of gradients"], examples=0).findings[0]
    assert finding.status == "does not apply"
    assert finding.detail.startswith("second derivatives are refused: ")


def test_progress_names_each_law_before_it_is_tried() -> None:
    names: list[str] = []
    ch.verify(RIGHT, laws=["gradients", "output"], examples=0, progress=names.append)
    assert names == ["output", "gradients"]


def test_function_that_exits_fails() -> None:
    def leaving(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        raise SystemExit(0)

    report = ch.verify(leaving, laws=["output"], examples=0)
    assert report.broken == ("output",)
    assert report["output"].detail == "ends the process: sys.exit(0)"


@pytest.mark.parametrize("extra", [(0, 1), (1, 0)], ids=["lse first", "lse last"])
def test_log_sum_exp_is_distinguished_from_averaged_weights_by_shape(extra: tuple[int, int]) -> None:
    def averaged(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        done = attend(query, key, value)
        return done.output, done.weights.mean(dim=1)

    def both(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        done = attend(query, key, value)
        extras = (done.lse, done.weights.mean(dim=1))
        return done.output, *(extras[place] for place in extra)

    report = ch.verify(averaged, laws=["log-sum-exp", "split and merged", "output"])
    assert report.ok, report
    assert report["log-sum-exp"].status == "does not apply"
    report = ch.verify(both, laws=["log-sum-exp", "split and merged"])
    assert report.ok, report
    assert report["log-sum-exp"].status == "holds"


def test_first_of_two_equal_shapes_is_the_log_sum_exp() -> None:
    def with_maximum(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        done = attend(query, key, value)
        return done.output, done.lse, done.lse * 0.0

    assert ch.verify(with_maximum, laws=["log-sum-exp"], examples=0)["log-sum-exp"].status == "holds"


def test_global_state_is_restored_after_the_function() -> None:
    def meddling(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = RIGHT(query, key, value)
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        return output

    report = ch.verify(meddling, laws=["output", "gradients", "process state"], examples=0)
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32
    assert report.broken == ("process state",), report
    said = report["process state"].detail
    assert said.startswith("a call changes whether gradients are recorded from True to False, the default dtype from")


def test_number_of_threads_is_restored_if_its_law_fails() -> None:
    def alone(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return RIGHT(query, key, value) * (torch.get_num_threads() > 1)

    before = torch.get_num_threads()
    report = ch.verify(alone, laws=["threads"], examples=0)
    assert torch.get_num_threads() == before
    assert report.broken == ("threads",)
    assert report["threads"].detail.startswith("at 1 thread, output is 0")


def test_random_state_is_restored() -> None:
    """Also if dropout, its backward, or a function without dropout draws random numbers."""
    drawing = BROKEN["a random number in backward"].fn, BROKEN["another dropout in backward"].fn
    for attention in (RIGHT, *drawing):
        before = torch.get_rng_state()
        ch.verify(attention, laws=["gradients", "dropout", "dropout draws", "dropout in backward"], examples=0)
        assert torch.equal(torch.get_rng_state(), before)


def test_changed_random_state_is_reported() -> None:
    report = ch.verify(BROKEN["a random number without dropout"].fn, laws=["process state"], examples=0)
    assert report["process state"].detail == "a call changes which random numbers come next"


def test_dense_mask_differs_between_heads_and_sequences() -> None:
    mask = spoken(Case(batch=17, kv_heads=33, q_len=7, k_len=7, mask="dense"))
    assert mask is not None
    for axis, sizes in ((0, (2, 4, 8, 16)), (1, (2, 4, 8, 16, 32))):
        for size in sizes:
            assert not torch.equal(mask.allowed.select(axis, 0), mask.allowed.select(axis, size)), (axis, size)


def test_gradients_are_tested_under_no_grad() -> None:
    with torch.no_grad():
        report = ch.verify(RIGHT, laws=["gradients"], examples=0)
        assert not torch.is_grad_enabled()
    assert report["gradients"].status == "holds"


def test_json_holds_what_the_table_shows() -> None:
    report = ch.verify(lambda query, key, value: value * 0.0, laws=["output", "masks"], name="nothing")
    read = json.loads(report.to_json())
    assert read["ok"] is False
    assert [finding["status"] for finding in read["findings"]] == ["fails", "does not apply"]
    assert read["findings"][0]["example"]["heads"] == 1
    assert read["versions"]["torch"] == torch.__version__
    text = str(report)
    for finding in read["findings"]:
        assert finding["law"] in text
    assert str(report["output"].example) in text


def test_without_hypothesis_the_fixed_cases_run_and_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "find_spec", lambda name: None)
    report = ch.verify(RIGHT, laws=["output", "lengths"])
    assert report.ok
    assert not report.searched
    assert "failing examples were not shrunk" in str(report)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"signature": "onnx"}, "verify: signature must be one of 'sdpa', 'clearhead', 'mha'; got 'onnx'."),
        ({"laws": ["gravity"]}, "verify: laws must be names of laws; got 'gravity'."),
        ({"dtype": torch.int64}, "verify: dtype must be floating point; got torch.int64."),
        ({"fn": 3}, "verify: fn must be callable; got int."),
        (
            {"fn": lambda *, query, key, value: value},
            "verify: fn must be callable as fn(query, key, value); got <lambda>(*, query, key, value).",
        ),
        ({"fn": lambda query: query, "signature": "mha"}, "verify: fn must be callable as fn(embed_dim, num_heads);"),
    ],
)
def test_wrong_call_raises_one_line(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError) as raised:
        ch.verify(**{"fn": RIGHT} | arguments)
    assert str(raised.value).startswith(said)
    assert "\n" not in str(raised.value)


def test_oracle_equals_the_formula_in_loops() -> None:
    case = Case(batch=2, kv_heads=2, group=2, q_len=5, k_len=7, mask="dense", value_dim=3)
    query, key, value = case.draw(torch.float64, torch.device("cpu"))
    mask = spoken(case)
    assert mask is not None
    allowed = mask.allowed.expand(2, 4, 5, 7)
    done = attend(query, key, value, allowed=mask.allowed)
    exact = oracle.attend(
        *(tensor.numpy() for tensor in (query, key, value)), allowed=lambda b, h, i, j: bool(allowed[b, h, i, j])
    )
    for actual, expected in zip((done.output, done.weights, done.lse), exact, strict=True):
        torch.testing.assert_close(actual, torch.from_numpy(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("q_len", "k_len", "end"), [(9, 9, False), (5, 9, True)])
def test_each_mask_equals_its_predicate(kind: str, q_len: int, k_len: int, end: bool) -> None:
    if KINDS[kind].square and q_len != k_len:
        pytest.skip("documents have as many queries as keys")
    case = Case(batch=3, kv_heads=2, q_len=q_len, k_len=k_len, mask=kind, end=end)
    mask = spoken(case)
    assert mask is not None
    dense = mask.ours.dense(q_len, k_len, query_offset=case.offset, batch=3, num_heads=2)
    assert torch.equal(dense.expand(3, 2, q_len, k_len), mask.allowed.expand(3, 2, q_len, k_len))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_strides_and_no_value(layout: str) -> None:
    tensor = torch.randn(3, 2, 5, 4)
    laid = laid_out(tensor, layout)
    repeated = {"expanded": tensor[:1], "one head": tensor[:, :1]}
    assert torch.equal(laid, repeated.get(layout, tensor).expand_as(tensor))
    assert (laid.stride() == tensor.stride()) == (layout == "plain")


def test_law_names_are_distinct() -> None:
    assert len(set(law_names())) == len(law_names())
