"""A module called several times, blocks that end in any order, other threads, and numbers of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.errors import ClearheadError
from clearhead.nn import MultiHeadAttention
from clearhead.observe import contributions, rollout
from clearhead.observe.summary import Summary
from clearhead.observe.trace import CallTracer, Trace
from clearhead.watch import watched


class Shared(nn.Module):
    """One attention, used three times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = MultiHeadAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.attention(x)
        return x


X = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(1))


def traced_shared(keep: str, runs: int = 1) -> Trace:
    model = Shared().eval()
    with torch.no_grad(), ch.trace(model, keep=keep) as traced:
        for _ in range(runs):
            model(X)
    return traced


@pytest.mark.parametrize("runs", [1, 2])
def test_rollout_uses_every_call_of_the_last_pass(runs: int) -> None:
    traced = traced_shared("all", runs)
    expected = torch.eye(5)
    for points in traced.calls(0)[-3:]:
        expected = (0.5 * torch.eye(5) + 0.5 * points.weights.mean(dim=1)[0]) @ expected
    torch.testing.assert_close(rollout(traced, range(5))[0], expected)


def test_rollout_raises_if_calls_were_not_recorded() -> None:
    with pytest.raises(ClearheadError, match=r"got attention \(last of 3 calls\)\. Trace with keep='all'"):
        rollout(traced_shared("last"))


def test_pages_and_summaries_name_the_calls() -> None:
    names = [f"attention (call {place} of 3)" for place in (1, 2, 3)]
    assert [layer["name"] for layer in ch.view(Shared(), X).data["layers"]] == names
    last = ch.view(traced_shared("last")).data["layers"]
    assert [layer["name"] for layer in last] == ["attention (last of 3 calls)"]
    model, summary = Shared().eval(), Summary(1)
    with torch.no_grad(), ch.observe(model, summary.want(5), keep="all") as records:
        model(X)
    summary.add(records, 0)
    assert [head.layer for head in summary.heads()] == [name for name in names for _ in range(2)]


def test_blocks_may_end_in_any_order() -> None:
    model = Shared()
    first, second = ch.observe(model, ch.Want(entropy=True)), ch.observe(model, ch.Want(lse=True))
    ended, going_on = first.__enter__(), second.__enter__()
    model(X)
    entropy, lse = ended[0].entropy, going_on[0].lse
    first.__exit__(None, None, None)
    model(2 * X)
    assert ended[0].entropy is entropy
    assert not torch.equal(going_on[0].lse, lse)
    second.__exit__(None, None, None)
    assert not watched()


def test_the_hook_of_another_thread_may_come_without_options() -> None:
    model = Shared()
    other = CallTracer(Trace([""], [""], "last"), {"": model.attention}, record=True, detach=True)
    other.entered(model.attention, (X,))


MODULE = MultiHeadAttention(8, 2)


def observed(**options: Any) -> Any:
    with torch.no_grad(), ch.observe(MODULE, ch.Want(entropy=True), **options) as records:
        MODULE(X)
    return records[0].entropy


def points() -> Any:
    with torch.no_grad(), ch.trace(MODULE) as traced:
        MODULE(X)
    return traced


def switched_off(heads: Any) -> Tensor:
    with torch.no_grad(), ch.trace(MODULE) as traced:
        traced.switch_off(heads)
        MODULE(X)
    return traced[0].head_outputs


@pytest.mark.parametrize("one", [np.int64(1), torch.tensor(1), np.array(1)], ids=repr)
def test_integers_of_other_libraries_are_accepted(one: Any) -> None:
    assert observed(heads=one).shape == (1, 1, 5)
    assert observed(queries=one).shape == (1, 2, 1)
    assert observed(layers=one - 1).shape == (1, 2, 5)
    assert switched_off(one)[:, 1].abs().max() == 0
    assert contributions(points()[0], MODULE, one).shape == (1, 2, 1, 5)
    assert rollout(points(), one).shape == (1, 1, 5)


WRONG: dict[str, Callable[[], object]] = {
    "heads": lambda: observed(heads=1.5),
    "queries": lambda: observed(queries=1.5),
    "layers": lambda: observed(layers=1.5),
    "layers must name at least one": lambda: observed(layers=[]),
    "heads must be whole": lambda: switched_off(torch.tensor(1.5)),
    "queries must lie": lambda: contributions(points()[0], MODULE, 1.5),  # type: ignore[arg-type]
    "tokens must lie": lambda: rollout(points(), 1.5),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("said", WRONG)
def test_non_integers_raise_one_sentence(said: str) -> None:
    with pytest.raises(ClearheadError, match=said):
        WRONG[said]()
