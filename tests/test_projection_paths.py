"""The choice of paths of linear layers if oneDNN's operator or the kernels are missing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from clearhead import choices as sizes
from clearhead.errors import UnsupportedError
from clearhead.projection import choice, paths, project
from clearhead.testing import choices, processor
from tests.gemms import name_gemm
from tests.processes import reported

OTHERS = [name for name, path in paths.PATHS.items() if path.absent(torch.float32) is None and name != "torch"]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The table is read anew, no path is forced, and the smallest GEMM has a choice."""
    name_gemm(monkeypatch)
    monkeypatch.setattr(sizes, "SMALL", 1)
    monkeypatch.setattr(sizes, "SMALL_UNPREPARED", 1)
    with choices():
        yield


def test_missing_operator_or_kernels_limit_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    x, weight = torch.randn(4, 8), torch.randn(6, 8)
    there = " or ".join(["torch", *(name for name in OTHERS if name != "onednn")])
    name_gemm(monkeypatch, "onednn")
    with pytest.raises(
        UnsupportedError, match=rf"^project: CLEARHEAD_PROJECTION must be {there} for float32 here; got onednn, but"
    ):
        choice("input gradient")
    name_gemm(monkeypatch)
    monkeypatch.setattr(paths, "library", lambda: None)
    assert torch.equal(project(x, weight), F.linear(x, weight))
    with processor("AuthenticAMD", ["avx2"]):
        chosen = choice("forward")
    assert chosen.path == "torch"
    assert "; native: the CPU kernels are not installed" in chosen.reason
    assert "; onednn: " in chosen.reason
    name_gemm(monkeypatch, "native")
    refused = r"must be torch for float32 here; got native, but the CPU kernels are not installed\. Unset it\.$"
    with pytest.raises(UnsupportedError, match=refused):
        choice("input gradient")


def test_onednn_without_bfloat16_is_skipped_for_bfloat16_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its operator is there, and would raise."""

    def linear(x: torch.Tensor, *_: object) -> torch.Tensor:
        if x.dtype is torch.bfloat16:
            raise RuntimeError("mkldnn_linear: bf16 path needs the cpu support avx512bw, avx512vl and avx512dq")
        return x

    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(_linear_pointwise=SimpleNamespace(default=linear)))
    monkeypatch.setattr(paths, "onednn_has_bfloat16", paths.onednn_has_bfloat16.__wrapped__)
    assert [paths.ONEDNN.absent(dtype) for dtype in (torch.float32, torch.bfloat16)] == [
        None,
        "oneDNN has no bfloat16 on this processor",
    ]
    with processor("GenuineIntel", ["avx2", "avx512", "amx_bf16"]):
        assert choice("forward", torch.bfloat16).path == "torch"
    name_gemm(monkeypatch, "onednn")
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


def test_reason_names_missing_kernels_and_operator() -> None:
    done = reported(ALONE, environment={"CLEARHEAD_NATIVE": "0", "CLEARHEAD_PROJECTION": ""})
    assert done.returncode == 0, done.stderr
    choices = json.loads(done.stdout)
    assert [name for name, _ in choices] == ["torch"] * 3
    assert all("; native: the CPU kernels are not installed" in reason for _, reason in choices)
    assert all("; onednn: " in reason for _, reason in choices)
