"""The state of training as one file: model, average, optimizer and position, written atomically."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.errors import DataError
from clearhead.train.files import read_tensors, write_tensors
from clearhead.train.sharding import copy_whole

__all__ = ["Place", "load_state", "load_weights", "place_of", "save_state", "state_tensors", "weights_of"]


@dataclass
class Place:
    """The position of training: all state that is not a tensor."""

    step: int = 0
    best: float | None = None
    best_step: int = 0
    stale: int = 0
    loss_sum: float = 0.0
    correct: int = 0
    counted: int = 0
    tokens: int = 0
    seconds: float = 0.0
    log_bytes: int = 0
    stopped: bool = False


def save_state(
    path: Path, *, model: nn.Module, average: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, place: Place
) -> None:
    """Write the state as one safetensors file, with ``place`` as JSON in its header."""
    tensors = state_tensors(model, average, optimizer)
    write_tensors(path, tensors, {"place": json.dumps(asdict(place))})


def state_tensors(
    model: nn.Module,
    average: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    slots: Mapping[int, Mapping[str, Tensor]] | None = None,
) -> dict[str, Tensor]:
    """All tensors of the state by name.

    Args:
        model: the model.
        average: the averaged weights by name.
        optimizer: the optimizer.
        slots: other tensors in place of the optimizer's state, by the number of the parameter.
    """
    tensors = {f"model/{name}": value for name, value in _weights(model).items()}
    tensors |= {f"average/{name}": value for name, value in average.items()}
    state = optimizer.state_dict()["state"] if slots is None else slots
    for number, values in state.items():
        tensors |= {f"optimizer/{number}/{name}": value for name, value in values.items()}
    return tensors


def load_state(
    path: Path,
    *,
    model: nn.Module,
    average: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    function: str,
) -> Place:
    """Load the state of ``path`` into model, average and optimizer, and return the place."""
    tensors, note = read_tensors(path, function=function)
    place = place_of(path, note, function)
    load_weights(model, _part(tensors, "model/"), path=path, function=function)
    for name, value in _part(tensors, "average/").items():
        if name in average:
            average[name].copy_(value)
    slots: dict[int, dict[str, Tensor]] = {}
    for name, value in _part(tensors, "optimizer/").items():
        number, slot = name.split("/")
        slots.setdefault(int(number), {})[slot] = value
    optimizer.load_state_dict({"state": slots, "param_groups": optimizer.state_dict()["param_groups"]})
    return place


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], *, path: Path, function: str) -> None:
    """Load named weights into a model; raises ``DataError`` if a name or a shape differs."""
    expected = _weights(model)
    missing, foreign = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    wrong = [name for name in expected if name in weights and expected[name].shape != weights[name].shape]
    got = ""
    if missing or foreign:
        got = f"missing {missing[:2]}, unknown {foreign[:2]}"
    elif wrong:
        got = f"{wrong[0]} with shape {tuple(weights[wrong[0]].shape)}, not {tuple(expected[wrong[0]].shape)}"
    if got:
        must, then = "have the weights that config.json describes", "The run is damaged; train it again."
        raise DataError.about(function, str(path), must=must, got=got, then=then)
    with torch.no_grad():
        for name, value in weights.items():
            copy_whole(expected[name], value)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """The state of a model with each tensor once, as safetensors refuses tied weights under two names."""
    visited: set[int] = set()
    weights: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in visited:
            visited.add(id(value))
            weights[name] = value.detach()
    return weights


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a model to write, tied ones once."""
    return _weights(model)


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def place_of(path: Path, note: Mapping[str, str], function: str) -> Place:
    """The place in the text metadata of a checkpoint; raises ``DataError`` if there is none."""
    try:
        values: dict[str, Any] = json.loads(note["place"])
        if set(values) != {item.name for item in fields(Place)}:
            raise ValueError("a note with other fields")
        return Place(**values)
    except (KeyError, ValueError, TypeError) as error:
        must, then = "be a checkpoint", "Remove it and train again."
        raise DataError.about(function, str(path), must=must, got=str(error), then=then) from error
