"""The laws of ranks can fail: every broken function is caught by the law that it breaks, the correct one by none."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead as ch
from clearhead.errors import ShapeError, UnsupportedError
from clearhead.verify import Distributed, law_names
from tests.verify.broken_ranks import BROKEN_ON_RANKS, BrokenOnRanks, waits_forever
from tests.verify.rank_steps import RIGHT_ON_RANKS, Sharding, take_places, take_whole
from tests.verify.steps import RIGHT

QUICK = ["documents across ranks", "unequal parts", "sink", "NaN on one rank", "dropout of one rank"]


def report_on(function: Callable[..., Any], laws: list[str] | None = None, **options: Any) -> ch.verify.Report:
    return ch.verify(Distributed(function, **options), signature="clearhead", laws=laws)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if "did not end" in broken.says else name
        for name, broken in BROKEN_ON_RANKS.items()
    ],
)
def test_broken_function_fails_its_law(name: str) -> None:
    broken: BrokenOnRanks = BROKEN_ON_RANKS[name]
    report = report_on(broken.fn, [broken.law], ranks=broken.ranks, layout=broken.layout, timeout=broken.timeout)
    assert report.broken == (broken.law,), report
    detail = report[broken.law].detail
    assert broken.says in detail
    if "died" not in broken.says and "did not end" not in broken.says:
        assert not detail.startswith("raises"), "caught because it does not run"


@pytest.mark.slow
def test_correct_function_breaks_no_law() -> None:
    report = report_on(RIGHT_ON_RANKS, QUICK, layout="zigzag")
    assert report.ok, report
    assert all(report[law].status == "holds" for law in QUICK), report


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_correct_function_breaks_no_law_on_any_number_of_ranks(ranks: int, layout: str) -> None:
    report = report_on(RIGHT_ON_RANKS, ranks=ranks, layout=layout)
    assert report.ok, report
    skipped = [finding.law for finding in report.findings if finding.status != "holds"]
    assert skipped == (["log-sum-exp"] if ranks > 1 else ["NaN on one rank", "log-sum-exp"]), report


@pytest.mark.slow
def test_waiting_ranks_fail_in_bounded_time() -> None:
    start = time.monotonic()
    report = report_on(waits_forever, ["output and gradients", "causal", "windows", "masks"], timeout=5.0)
    assert time.monotonic() - start < 60.0
    assert report.broken == ("output and gradients", "causal", "windows")
    assert report["causal"].detail == "raises RankError: rank 1 did not end within 5 s"
    assert report["masks"].detail == "not tried: in 3 calls before, ranks died or did not answer"


def gathers_keys(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """Torch's convention: ``attn_mask`` has the rows of the rank's queries, and all keys."""
    if attn_mask is not None:
        assert attn_mask.shape[-2] in (1, query.shape[2])
    key, value, _ = take_whole(key, value, Sharding(take_places(query.shape[2], "contiguous")))
    return RIGHT(query, key, value, attn_mask)


@pytest.mark.slow
def test_torch_convention_passes_the_rows_of_the_rank() -> None:
    laws = ["windows", "float mask in gradients", "empty rows on one rank"]
    report = ch.verify(Distributed(gathers_keys), laws=[*laws, "sink", "dropout"])
    assert [report[law].status for law in laws] == ["holds"] * 3, report
    assert report["sink"].detail == "it does not support score rules"


def refuses(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    raise ch.UnsupportedError("no attention here")


def test_refusal_on_every_rank_is_no_failure() -> None:
    report = ch.verify(Distributed(refuses), laws=["output and gradients"])
    assert report["output and gradients"].status == "does not apply"
    assert "no attention here" in report["output and gradients"].detail


def test_report_names_the_ranks() -> None:
    assert Distributed(F.scaled_dot_product_attention, ranks=3).__name__ == (
        "scaled_dot_product_attention on 3 ranks, contiguous"
    )


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="function must be a function that other processes can import"):
        Distributed(lambda query, key, value: query)
    with pytest.raises(ShapeError, match="layout must be 'contiguous'"):
        Distributed(refuses, layout="striped")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="ranks must be a number of processes"):
        Distributed(refuses, ranks=0)
    with pytest.raises(UnsupportedError, match="signature must be 'sdpa' or 'clearhead'"):
        ch.verify(Distributed(refuses), signature="mha")
    with pytest.raises(UnsupportedError, match="laws must be names of laws"):
        ch.verify(Distributed(refuses), laws=["no leak from the future"])
    if torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="device must be the CPU"):
            ch.verify(Distributed(refuses), device="cuda")


def test_laws_of_ranks_have_names_of_their_own_list() -> None:
    names = law_names(distributed=True)
    assert len(set(names)) == len(names)
    assert {broken.law for broken in BROKEN_ON_RANKS.values()} <= set(names)
    assert len(BROKEN_ON_RANKS) >= 12


METHODS = ("gather", "ring", "heads")


def ours(method: str) -> Callable[..., Any]:
    """``ch.distributed.observe_attention`` by one method, with the log-sum-exp."""
    return partial(ch.distributed.observe_attention, method=method, want=ch.Want(lse=True))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_distributed_attention_breaks_no_law_of_a_few(method: str) -> None:
    report = report_on(ours(method), ["documents across ranks", "sink", "NaN on one rank"], layout="zigzag")
    assert report.ok, report


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_distributed_attention_breaks_no_law(ranks: int, method: str, layout: str) -> None:
    report = report_on(ours(method), ranks=ranks, layout=layout)
    assert report.ok, report
