"""What goes on the demo's page: examples with everything the browser needs to recompute their attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from clearhead.benchmark.machine import versions
from clearhead.demo.digits import CLASSES, INTENSITIES, SIDE, Digits
from clearhead.demo.exact import exact
from clearhead.demo.inside import Layer, influence, layers_on, most_telling
from clearhead.demo.training import log_probabilities
from clearhead.functional import observe_attention
from clearhead.inspector.schema import FORMAT, VERSION, pack_floats
from clearhead.statistics import Want

__all__ = ["page_data", "pick"]


def pick(model: nn.Module, digits: Digits, *, mistakes: int) -> list[int]:
    """Places of digits to show: the first of each class that is predicted right, then the surest mistakes."""
    sure, predicted = log_probabilities(model, digits.ids).max(dim=-1)
    right = predicted == digits.labels
    places = []
    for label in range(CLASSES):
        of_class = (digits.labels == label).nonzero().flatten().tolist()
        # A short training may get no digit of a class right; then its first one is shown all the same.
        places.append(next((place for place in of_class if right[place]), of_class[0]))
    wrong = [place for place in (~right).nonzero().flatten().tolist() if place not in places]
    wrong.sort(key=lambda place: (-sure[place].item(), place))
    return places + wrong[:mistakes]


def page_data(model: nn.Module, shown: Digits, facts: list[dict[str, str]]) -> dict[str, Any]:
    """The page's data for these digits, by ``inspector.schema``."""
    layers = layers_on(model, shown.ids)
    module = layers[0].module
    chances = log_probabilities(model, shown.ids)
    known = versions()
    return {
        "format": FORMAT,
        "version": VERSION,
        "title": "What a digit classifier looks at",
        "made_by": f"clearhead {known['clearhead']}, torch {known['torch']}, Python {known['python']}. "
        "Digits: Alpaydin and Kaynak 1998, UCI machine learning repository, as carried by scikit-learn.",
        "facts": facts,
        "classes": [str(label) for label in range(CLASSES)],
        "grid": {"rows": SIDE, "columns": SIDE, "max_value": INTENSITIES - 1},
        "attention": {
            "num_layers": len(layers), "num_heads": module.num_heads, "head_dim": module.head_dim,
            "embed_dim": module.embed_dim, "scale": layers[0].scale,
        },
        "output_weights": [pack_floats(_output_weight(layer)) for layer in layers],
        "examples": [_example(model, shown, place, layers, chances[place]) for place in range(len(shown))],
    }  # fmt: skip


def _example(model: nn.Module, shown: Digits, place: int, layers: list[Layer], chances: torch.Tensor) -> dict[str, Any]:
    predicted = int(chances.argmax())
    lost = influence(model, shown.ids[place], predicted)
    telling = most_telling(layers, lost, place)
    return {
        "name": f"Digit {int(shown.numbers[place])}",
        "truth": int(shown.labels[place]),
        "predicted": predicted,
        "probabilities": [min(1.0, float(chance)) for chance in chances.double().exp()],
        "values": shown.ids[place].tolist(),
        "telling": {"layer": telling.layer, "head": telling.head, "token": telling.token},
        "influence": lost,
        "layers": [_layer(layer, place) for layer in layers],
    }


def _layer(layer: Layer, place: int) -> dict[str, str]:
    query, key, value, heads = (
        part[place : place + 1].detach() for part in (layer.query, layer.key, layer.value, layer.heads)
    )
    with torch.no_grad():
        want = Want(lse=True, rows=range(query.shape[2]))
        seen = observe_attention(query, key, value, want=want, scale=layer.scale)
    assert seen.lse is not None
    assert seen.rows is not None
    return {
        "query": pack_floats(query[0]),
        "key": pack_floats(key[0]),
        "value": pack_floats(value[0]),
        "lse": pack_floats(seen.lse[0]),
        "output": pack_floats(heads[0]),
        "differences": pack_floats(_differences(layer, query, key, value, heads, seen.rows)),
    }


def _differences(
    layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: torch.Tensor,
    weights: torch.Tensor,
) -> np.ndarray[Any, Any]:  # fmt: skip
    """Largest difference from float64 of each step, for each head and token, in the order of ``schema.STEPS``."""
    sure = exact(query, key, value, layer.scale)
    scores = query @ key.transpose(-2, -1)
    # The last projection by head: [heads, head_dim, embed_dim].
    project = _output_weight(layer).T.unflatten(0, (layer.module.num_heads, layer.module.head_dim))
    pairs = (
        (scores, sure.scores),
        (scores * layer.scale, sure.scaled),
        (weights, sure.weights),
        (heads, sure.output),
        (heads @ project, sure.output @ project.double().numpy()),
    )
    return np.stack([np.abs(ours.double().numpy() - theirs)[0].max(axis=-1) for ours, theirs in pairs])


def _output_weight(layer: Layer) -> torch.Tensor:
    assert layer.module.output_projection is not None
    return layer.module.output_projection.weight.detach()
