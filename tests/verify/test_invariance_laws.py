"""The laws of bits can fail: each is broken by a function whose bits depend on what the law varies, and by no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.choices import is_invariant
from clearhead.errors import UnsupportedError
from clearhead.verify import law_names
from clearhead.verify.laws.invariance import difference

LAWS = law_names(invariance=True)
#: A step of a few units in the last place of float32.
STEP = 2.0**-20
Fault = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor | float]


def steady(fault: Fault | None = None) -> Callable[..., Tensor]:
    """Attention in float64, rounded to float32, so that the order of sums is lost; times a factor near 1."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        enable_gqa: bool = False,
    ) -> Tensor:
        shares = query.shape[1] // key.shape[1]
        keys, values = (tensor.double().repeat_interleave(shares, dim=1) for tensor in (key, value))
        scores = query.double() @ keys.mT * query.shape[-1] ** -0.5
        allowed = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril() if is_causal else attn_mask
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf) if allowed.dtype == torch.bool else scores + allowed
        output = (scores.softmax(dim=-1).nan_to_num() @ values).to(query.dtype)
        return output if fault is None else output * (1.0 + STEP * fault(query, key, output, attn_mask))

    return attention


def _scaled_backward(query: Tensor, key: Tensor, output: Tensor, mask: Tensor | None) -> float:
    if output.requires_grad and len(query) > 1:
        output.register_hook(lambda grad: grad * (1.0 + STEP))
    return 0.0


def _by_place(query: Tensor, key: Tensor, output: Tensor, mask: Tensor | None) -> Tensor:
    return torch.arange(len(query), dtype=torch.float32).view(-1, 1, 1, 1)


#: A fault for each law, and the laws that break with it.
FAULTS: dict[str, tuple[Fault, set[str]]] = {
    "bits alone": (
        lambda q, k, o, mask: float(len(q) > 1),
        {"bits at any place", "bits padded", "bits padded left", "bits of gradients"},
    ),
    "bits at any place": (
        _by_place,
        {"bits alone", "bits padded", "bits padded left", "bits of gradients"},
    ),
    "bits padded": (lambda q, k, o, mask: float(_hides_last(mask)), set()),
    "bits padded left": (lambda q, k, o, mask: float(_hides_first(mask)), {"bits packed"}),
    "bits packed": (lambda q, k, o, mask: float(_is_packed(mask)), set()),
    "bits in chunks": (
        lambda q, k, o, mask: float(1 < q.shape[2] < k.shape[2] or (mask is not None and q.shape[2] > 1)),
        {"bits padded", "bits padded left", "bits packed"},
    ),
    "bits decoded": (lambda q, k, o, mask: float(q.shape[2] == 1 and mask is None), {"bits packed"}),
    "bits in a fixed cache": (lambda q, k, o, mask: float(q.shape[2] == 1 and mask is not None), {"bits in chunks"}),
    "bits on threads": (lambda q, k, o, mask: float(torch.get_num_threads() == 7), set()),
    "bits of gradients": (_scaled_backward, set()),
}


def _hides_last(mask: Tensor | None) -> bool:
    return mask is not None and mask.shape[0] > 1 and not bool(mask[..., -1].all())


def _hides_first(mask: Tensor | None) -> bool:
    return mask is not None and mask.shape[2] > 1 and not bool(mask[..., 0].all())


def _is_packed(mask: Tensor | None) -> bool:
    return mask is not None and mask.shape[2] > 1 and not bool(mask[..., -1, :1].all()) and mask.shape[0] == 1


def test_every_law_of_bits_has_a_fault() -> None:
    assert set(FAULTS) == set(LAWS)


def test_function_with_one_order_of_sums_breaks_no_law() -> None:
    report = ch.verify(steady(), invariance=True, examples=0)
    assert report.ok, report
    assert all(finding.status == "holds" for finding in report.findings)


@pytest.mark.parametrize("law", LAWS)
def test_bits_that_depend_on_the_call_break_their_law(law: str) -> None:
    fault, _ = FAULTS[law]
    report = ch.verify(steady(fault), invariance=True, laws=[law], examples=0)
    assert report.broken == (law,), report
    assert "differs by" in report[law].detail
    assert report[law].example is not None


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
def test_bits_that_depend_on_the_call_break_no_other_law(law: str) -> None:
    fault, others = FAULTS[law]
    report = ch.verify(steady(fault), invariance=True, examples=0)
    assert set(report.broken) <= {law, *others}, report


def test_laws_of_bits_run_in_invariant_mode() -> None:
    seen = set()

    def watching(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen.add(is_invariant())
        return steady()(query, key, value)

    before = is_invariant()
    ch.verify(watching, invariance=True, laws=["bits alone"], examples=0)
    assert seen == {True}
    assert is_invariant() == before


def test_difference_counts_bits() -> None:
    one = torch.tensor([1.0, torch.nan, torch.inf])
    assert difference(one, one.clone()) is None
    assert difference(one, one + STEP) == STEP
    assert difference(torch.tensor([0.0]), torch.tensor([torch.nan])) is not None


@pytest.mark.parametrize(
    ("options", "text"),
    [({"laws": ["output"]}, "verify: laws must be names of laws"), ({"laws": ["bits alone"]}, "verify: laws")],
)
def test_law_of_another_set_is_refused(options: dict[str, Any], text: str) -> None:
    invariance = options["laws"] == ["output"]
    with pytest.raises(UnsupportedError, match=text):
        ch.verify(steady(), invariance=invariance, **options)
