"""ONNX Runtime's operators compute what torch's function does, on the same memory."""

from __future__ import annotations

import sys

import pytest
import torch

from clearhead.benchmark import onnx_runtime
from clearhead.benchmark.onnx_runtime import ONNX_OPERATORS, onnx_calls


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn((2, 3, 33, 8), generator=generator) for _ in range(3)]


@pytest.mark.parametrize("causal", [False, True])
def test_both_operators_equal_torch_and_read_current_inputs(causal: bool) -> None:
    for package in ("onnx", "onnxruntime"):
        pytest.importorskip(package, reason="needs the extra bench")
    tensors = inputs()
    calls, left_out = onnx_calls(tensors, causal=causal)
    assert tuple(calls) == ONNX_OPERATORS
    assert left_out == {}
    for call in calls.values():
        expected = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal)
        torch.testing.assert_close(call()[0][0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_missing_packages_are_given_as_reason(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    calls, left_out = onnx_calls(inputs(), causal=False)
    assert calls == {}
    assert set(left_out) == set(ONNX_OPERATORS)
    assert "install clearhead[bench]" in left_out[ONNX_OPERATORS[0]]


def test_scores_beyond_half_of_the_memory_are_given_as_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("onnx", "onnxruntime"):
        pytest.importorskip(package, reason="needs the extra bench")
    monkeypatch.setattr(onnx_runtime, "machine", lambda: {"memory": 10_000})
    calls, left_out = onnx_calls(inputs(), causal=False)
    assert calls == {}
    assert "GiB of scores" in left_out[ONNX_OPERATORS[1]]
