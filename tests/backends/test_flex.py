"""Masks and rules as FlexAttention's; the uncompiled function replaces the GPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import clearhead as ch
from clearhead.backends import flex
from clearhead.problem import Problem
from clearhead.statistics import Want
from tests.problems import MASKS, RULES, NamedMask, tensors


def _flex(*arguments: Any, **options: Any) -> Any:
    return flex_attention(*arguments, **options)


@pytest.mark.covering(0)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:.*return_lse")
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("rule", ["none", "alibi", "function"])
def test_masks_and_rules_translate_to_flex(mask: NamedMask, rule: str) -> None:
    query, key, value = (tensor.detach() for tensor in tensors(value_dim=8))
    rules = RULES[rule].rules
    problem = Problem.of("attention", query, key, value, mask=mask.mask, scores=rules)
    observation = flex.run(problem, Want(lse=True), call=_flex)
    want = ch.Want(lse=True)
    right = ch.observe_attention(query, key, value, mask=mask.mask, scores=rules, want=want, backend="reference")
    torch.testing.assert_close(observation.output, right.output, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:.*return_lse")
def test_query_offset_translates_to_flex() -> None:
    query, key, value = (tensor.detach() for tensor in tensors(q_len=4, value_dim=8))
    problem = Problem.of("attention", query, key, value, mask=ch.Causal(), query_offset=9)
    observation = flex.run(problem, Want(), call=_flex)
    right = ch.attention(query, key, value, mask=ch.Causal(), query_offset=9, backend="reference")
    torch.testing.assert_close(observation.output, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "reason"), [((8, 16, 2), "from 16"), ((16, 8, 2), "from 16"), ((16, 16, 1), "share")]
)
def test_flex_refuses_what_torch_does_not_compile(sizes: tuple[int, int, int], reason: str) -> None:
    head_dim, value_dim, kv_heads = sizes
    inputs = tensors(head_dim=head_dim, value_dim=value_dim, kv_heads=kv_heads, heads=6 * kv_heads)
    (why,) = flex.BACKEND.capability.also(Problem.of("attention", *inputs))
    assert reason in why


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_device() -> None:
    query, key, value = (tensor.detach().cuda() for tensor in tensors(head_dim=16, value_dim=16))
    output = ch.attention(query, key, value, mask=ch.Window(3), backend="flex")
    right = ch.attention(query, key, value, mask=ch.Window(3), backend="reference")
    torch.testing.assert_close(output, right, rtol=1e-2, atol=1e-2)
