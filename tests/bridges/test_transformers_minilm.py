"""A pretrained MiniLM with clearhead attention: what its heads attend to."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import minilm_heads

import clearhead as ch

WHY = minilm_heads.missing()
pytestmark = pytest.mark.skipif(WHY is not None, reason=WHY or "")


@pytest.fixture(scope="module")
def minilm() -> tuple[Any, Any]:
    return minilm_heads.load(minilm_heads.folder())


def test_layer_0_head_2_attends_to_the_previous_token(minilm: tuple[Any, Any]) -> None:
    scores = minilm_heads.scores(*minilm, minilm_heads.TEXT)
    assert len(scores) == 6
    previous = torch.stack([layer.previous[0] for layer in scores])
    assert round(previous[0, 2].item(), 2) == 1.00
    previous[0, 2] = 0.0
    assert previous.max().item() < 0.9
    tokens, square = minilm_heads.weights(*minilm, minilm_heads.TEXT, layer=0, head=2)
    before = square.diagonal(-1)
    assert len(before) == len(tokens) - 1
    assert before.min().item() > 0.99


def test_observed_weights_match_eager(minilm: tuple[Any, Any]) -> None:
    model, tokenizer = minilm
    batch = tokenizer([minilm_heads.TEXT, "Short."], return_tensors="pt", padding=True)
    rows = torch.arange(batch["input_ids"].shape[1])
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        with ch.observe(model, ch.Want(rows=rows)) as observations:
            output = model(**batch).last_hidden_state
        ch.unswap(model)
        model.set_attn_implementation("eager")
        try:
            eager = model(**batch, output_attentions=True)
        finally:
            ch.swap(model)
    torch.testing.assert_close(output[real], eager.last_hidden_state[real], rtol=1e-4, atol=1e-5)
    for layer, wanted in enumerate(eager.attentions):
        weights = observations[layer].rows
        assert weights is not None
        torch.testing.assert_close(weights.transpose(1, 2)[real], wanted.transpose(1, 2)[real], rtol=1e-4, atol=1e-5)


def test_weights_with_another_hash_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minilm_heads, "SHA256", "0" * 64)
    with pytest.raises(SystemExit, match=r"has sha256 53aa5117\w+, not 0000"):
        minilm_heads.folder()


def test_the_script_prints_the_documented_values(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["minilm_heads.py"])
    runpy.run_path(str(Path(minilm_heads.__file__)), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(r"layer 0: \d\.\d\d \d\.\d\d 1\.00", printed)
    assert re.search(r"word looks at every +0\.99", printed)
