"""The suite can fail: every broken attention is caught by the law that it breaks, and the correct one by none."""

from __future__ import annotations

import pytest

import clearhead as ch
from clearhead.verify import law_names
from tests.verify.broken import BROKEN, Broken
from tests.verify.steps import RIGHT

WITHOUT_MEMORY = [name for name in law_names() if name != "memory"]

#: Faults in one respect, which break these laws and no others.
ALONE = {
    "bottom-right for top-left": {"causal flag"},
    "grouped heads repeated in the wrong order": {"grouped heads"},
    "first head of a group takes all gradient": {"grouped heads"},
    "scale ignored": {"scale", "scale under a mask"},
    "values cut to the key's width": {"value width"},
    "output in float64": {"shape and dtype"},
    "NaN passes the mask": {
        "containment",
        "containment in gradients",
        "NaN is not spread",
        "NaN is not spread in gradients",
    },
    "NaN in a gradient reaches later values": {"NaN is not spread in gradients"},
    "dropout alike in every head": {"dropout"},
    "another dropout in backward": {"dropout in backward", "dropout under a mask"},
    "dropout alike at every call": {"dropout draws"},
    "float mask without a gradient": {"float mask in gradients"},
    "heads cut to 64": {"long and wide", "widths"},
    "strides of the gradient ignored": {"gradient layouts"},
    "no gradient where only key wants one": {"gradients alone"},
    "second backward wrong": {"backward twice"},
    "output in one buffer": {"earlier results", "kinds in turn"},
    "keys of head h % 32": {"many heads and sequences", "grouped heads"},
    "keys of sequence b % 8": {"many heads and sequences"},
    "mask of the first head of a group for the group": {"grouped heads"},
    "a random number without dropout": {"process state"},
    "a random number in backward": {"process state"},
    "default dtype changed": {"process state"},
    "strides of the mask ignored": {"mask layouts"},
    "causal mask cached by its number of elements": {
        "calls in turn",
        "NaN is not spread",
        "NaN is not spread in gradients",
    },
    "weights for backward in one buffer": {"backward later", "gradients of gradients"},
    "constant weights in the second derivative": {"gradients of gradients"},
    "value returned as output": {"output written to"},
    "scale ignored in grouped heads": {"scale"},
    "no dropout in grouped heads": {"dropout under a mask"},
    "widths not divisible by four": {"widths"},
    "gradients clipped": {"gradient layouts"},
    "autocast left on": {"process state"},
    "lse larger by ln 2": {"log-sum-exp"},
    "weights averaged over heads": {"weights"},
    "entropy in bits": {"entropy"},
    "received as a mean": {"received"},
}


def test_broken_functions_cover_the_laws() -> None:
    assert len(BROKEN) >= 181
    assert len({broken.law for broken in BROKEN.values()}) >= 56


def test_correct_attention_breaks_no_law() -> None:
    report = ch.verify(RIGHT, laws=WITHOUT_MEMORY, examples=5)
    assert report.ok, report


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_broken_function_fails_its_law(broken: Broken) -> None:
    report = ch.verify(
        broken.fn,
        signature=broken.signature,
        laws=[broken.law],
        linear_memory=broken.linear_memory,
        examples=0,
        dtype=broken.dtype,
    )
    assert not report.ok
    assert report.broken == (broken.law,), report
    finding = report[broken.law]
    assert finding.example is not None
    assert not finding.detail.startswith("raises"), "caught because it does not run"


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_fault_in_one_respect_breaks_its_laws_alone(name: str) -> None:
    broken = BROKEN[name]
    report = ch.verify(broken.fn, signature=broken.signature, laws=WITHOUT_MEMORY, examples=0)
    assert set(report.broken) == ALONE[name], report


@pytest.mark.slow
def test_quadratic_memory_is_reported_with_its_sizes() -> None:
    claimed = ch.verify(RIGHT, laws=["memory"], linear_memory=True, examples=0)
    assert claimed["memory"].detail.startswith("memory grows as length **")


@pytest.mark.slow
def test_memory_is_only_measured_without_a_claim() -> None:
    measured = ch.verify(RIGHT, laws=["memory"], examples=0)["memory"]
    assert measured.status == "does not apply"
    assert measured.detail.startswith("measured: ")


SMALLEST = {
    "inverted polarity": ("mask polarity", "batch=1 heads=1 q_len=1 k_len=1"),
    "leak only in gradients": ("no leak in gradients", "batch=1 heads=1 q_len=2 k_len=2"),
    "softmax over queries": ("output", "batch=1 heads=1 q_len=1 k_len=2"),
    "stale cache slot": ("decode equals prefill", "batch=1 heads=1 q_len=2 k_len=2"),
    "NaN for empty rows": ("empty rows", "batch=1 heads=1 q_len=1 k_len=1"),
    "leak only across tile borders": ("no leak from the future", "batch=1 heads=1 q_len=65 k_len=65"),
}


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", SMALLEST)
def test_the_failing_example_is_the_smallest(name: str) -> None:
    law, example = SMALLEST[name]
    report = ch.verify(BROKEN[name].fn, laws=[law])
    assert report.searched
    assert str(report[law].example).startswith(example), report
