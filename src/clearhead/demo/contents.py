"""The demo's page: one run of the model per digit, with its picture, and the results above."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from clearhead.benchmark.machine import versions
from clearhead.demo.digits import CLASSES, INTENSITIES, SIDE, TOKENS, Digits, token_name
from clearhead.demo.inside import influence, layers_on, most_influential
from clearhead.demo.training import log_probabilities
from clearhead.inspector import Page, view
from clearhead.observe.trace import Trace, trace

__all__ = ["LOST", "page_of", "pick"]

#: Name of a head score that only the demo computes.
LOST = "log-probability lost without it"


def pick(model: nn.Module, digits: Digits, *, mistakes: int) -> list[int]:
    """Indices of the digits to show: the first correct prediction of each class, then the most confident mistakes."""
    sure, predicted = log_probabilities(model, digits.ids).max(dim=-1)
    right = predicted == digits.labels
    places = []
    for label in range(CLASSES):
        of_class = (digits.labels == label).nonzero().flatten().tolist()
        # After a short training a class may have no correct prediction; then its first digit is shown.
        places.append(next((place for place in of_class if right[place]), of_class[0]))
    wrong = [place for place in (~right).nonzero().flatten().tolist() if place not in places]
    wrong.sort(key=lambda place: (-sure[place].item(), place))
    return places + wrong[:mistakes]


def page_of(model: nn.Module, shown: Digits, facts: list[dict[str, str]]) -> Page:
    """The page for these digits: every head on each digit, and the results above."""
    chances = log_probabilities(model, shown.ids)
    wrong = (chances.argmax(dim=-1) != shown.labels).tolist()
    names = [f"digit {number}{' ✗' * bad}" for number, bad in zip(shown.numbers.tolist(), wrong, strict=True)]
    traces = {name: _traced(model, ids[None]) for name, ids in zip(names, shown.ids, strict=True)}
    pictures = {name: _picture(ids) for name, ids in zip(names, shown.ids, strict=True)}
    page = view(
        traces,
        tokens=[token_name(token) for token in range(TOKENS)],
        image=pictures,
        grid=(SIDE, SIDE),
        title="What a digit classifier attends to",
    )
    installed = versions()
    made_by = (
        f"clearhead {installed['clearhead']}, torch {installed['torch']}, Python {installed['python']}. "
        "Digits: Alpaydin and Kaynak 1998, UCI machine learning repository, as carried by scikit-learn."
    )
    data = dict(page.data) | {"facts": facts, "made_by": made_by}
    layers = layers_on(model, shown.ids)
    for place, run in enumerate(data["runs"]):
        own_layers = [at for at, layer in enumerate(data["layers"]) if layer["run"] == place]
        predicted = int(chances[place].argmax())
        lost = influence(model, shown.ids[place], predicted)
        for at, row in zip(own_layers, lost, strict=True):
            # The page shows the run's name separately, so the layer's name is enough.
            data["layers"][at]["name"] = data["layers"][at]["name"].partition(": ")[2]
            for head in data["layers"][at]["heads"]:
                head["scores"][LOST] = row[head["head"]]
        focus = most_influential(layers, lost, place)
        run["start"] = {"layer": own_layers[focus.layer], "head": focus.head, "query": focus.token}
        run["bars"] = [
            {"label": str(label), "value": min(1.0, float(chance))}
            for label, chance in enumerate(chances[place].double().exp())
        ]
        run["says"] = _says(int(shown.labels[place]), predicted, run["bars"][predicted]["value"])
    return Page(data)


def _traced(model: nn.Module, ids: torch.Tensor) -> Trace:
    with torch.no_grad(), trace(model) as traced:
        model(ids)
    return traced


def _picture(ids: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    intensities = ids.view(SIDE, SIDE).numpy().astype(np.float64)
    picture: np.ndarray[Any, np.dtype[np.uint8]] = np.rint(intensities * 255 / (INTENSITIES - 1)).astype(np.uint8)
    return picture


def _says(truth: int, predicted: int, chance: float) -> str:
    verdict = "which is right" if truth == predicted else f"but it is a {truth}"
    return f"A held-out digit. The model predicts {predicted} with probability {chance:.3f}, {verdict}."
