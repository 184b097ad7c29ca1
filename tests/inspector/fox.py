"""A small model with a traced sentence, its page, and helpers of the browser tests."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

import clearhead as ch
from clearhead.inspector import Page
from tests.inspector.chromium import Opened

Open = Callable[..., Opened]
WORDS = ["The", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "then", "it", "sleeps"]
LAYERS, HEADS, T = 2, 3, len(WORDS)


def sample() -> tuple[Page, ch.observe.Trace, ch.nn.LanguageModel]:
    torch.manual_seed(3)
    model = ch.nn.LanguageModel(20, embed_dim=24, num_heads=HEADS, num_layers=LAYERS).eval()
    for name, weight in model.named_parameters():
        if "attention" in name and weight.ndim == 2:
            weight.data *= 2
    with torch.no_grad(), ch.trace(model) as traced:
        model(torch.arange(T)[None])
    return ch.view(traced, tokens=WORDS, title="A fox"), traced, model


PAGE, TRACED, MODEL = sample()
WEIGHTS = [TRACED[layer].weights[0].double().numpy() for layer in range(LAYERS)]

# Layer, head, query and key that a page shows.
AT = "[clearhead.state.layer, clearhead.state.head, clearhead.state.query, clearhead.state.key]"


def settle(opened: Opened) -> None:
    """Wait until the page has drawn its current state."""
    opened.read("(async () => { for (let turn = 0; turn < 4; turn++) await new Promise(requestAnimationFrame); })()")


def box(opened: Opened, layer: int, row: int, column: int) -> tuple[float, float]:
    """The position of the centre of a cell in the map's canvas."""
    look = opened.read("clearhead.app.views.map.matrix.look")
    return 132 + (column + 0.5 - look["left"]) * look["size"], 104 + (row + 0.5 - look["top"]) * look["size"]


def said_weight(text: str) -> float:
    match = re.search(r"weight ([^,]+)", text)
    assert match is not None, text
    return float(match[1].rstrip(".").replace("−", "-"))


HOSTILE = '</script><script>alert("ran")</script><img src=x onerror=alert("ran")>'
