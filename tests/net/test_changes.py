"""After a change between two calls, the second call equals a first call of the changed model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from tests.covering import covering
from tests.net.calls import Call, as_tensor, distance, hooked, results
from tests.net.changes import CHANGES, OF_LAYERS
from tests.net.families import FAMILIES, TOKENS, TRANSFORMERS_4, by_structure
from tests.net.modules import MODULES, typical

FAR = 1e-4


@dataclass(frozen=True)
class Subject:
    """A model that computes with clearhead, and its reference: the original, or itself op by op."""

    name: str
    model: Callable[[], Any]
    right: Callable[[], Any]
    call: Call


@cache
def subject(name: str) -> Subject:
    if name in FAMILIES:
        family = FAMILIES[name]
        return Subject(name, family.swapped, family.plain, family.call(TOKENS, "none"))
    kind, place = name.split(" ")
    row = typical(kind)[int(place)]
    return Subject(name, row.make, row.make, row.call())


#: The subject without linear layers: it reads their weights itself.
LAYERLESS = "torch attention"
SUBJECTS = [*FAMILIES, *(f"{kind} {place}" for kind in MODULES for place in (0, 1))]


def _pairs() -> list[Any]:
    """Every subject with every change; all but one of each subject and change are marked slow."""
    pairs = [(name, change) for name in SUBJECTS for change in CHANGES if change not in OF_LAYERS or name != LAYERLESS]
    quick = {pairs[index] for index in covering(pairs, 1)}
    return [
        pytest.param(
            *pair,
            id=", ".join(pair),
            marks=[] if pair in quick else [pytest.mark.slow],
        )
        for pair in pairs
    ]


PAIRS = _pairs()


def _right(each: Subject, change: Callable[[nn.Module], None], gradients: bool) -> dict[str, torch.Tensor]:
    model = each.right()
    change(model)
    with hooked(model):
        return results(model, each.call, gradients=gradients)


def _takes_effect(name: str, change: str, gradients: bool) -> None:
    each = subject(name)
    model = each.model()
    before = [results(model, each.call, gradients=gradients) for _ in range(2)][1]
    CHANGES[change](model)
    actual = results(model, each.call, gradients=gradients)
    right = _right(each, CHANGES[change], gradients)
    assert distance({"output": before["output"]}, {"output": right["output"]}) > 10 * FAR, "the change shows"
    assert distance(actual, right) < FAR


@pytest.mark.parametrize(("name", "change"), PAIRS)
def test_change_takes_effect_at_the_next_call(name: str, change: str) -> None:
    _takes_effect(name, change, gradients=False)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "change"), PAIRS)
def test_change_takes_effect_at_the_next_training_step(name: str, change: str) -> None:
    _takes_effect(name, change, gradients=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", SUBJECTS)
def test_each_parameter_alone_takes_effect(name: str) -> None:
    each = subject(name)
    model, right = each.model(), each.right()
    wrong = []
    for path, part in dict(model.named_parameters()).items():
        for changed in (part, right.get_parameter(path)):
            with torch.no_grad():
                changed.mul_(0.5)
        actual = results(model, each.call, gradients=False)
        with hooked(right):
            if distance(actual, results(right, each.call, gradients=False)) >= FAR:
                wrong.append(path)
    assert not wrong


@pytest.mark.parametrize("name", by_structure(SUBJECTS))
def test_parameters_of_a_functional_call_are_used(name: str) -> None:
    each = subject(name)
    model, right = each.model(), each.right()
    results(model, each.call, gradients=False)
    scaled = {path: part.detach() * 0.8 for path, part in right.named_parameters()}

    def computed(of: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return as_tensor(torch.func.functional_call(of, scaled, (), dict(each.call.arguments)))

    with hooked(right):
        assert distance({"output": computed(model)}, {"output": computed(right)}) < FAR


def _varies(model: nn.Module, call: Call) -> bool:
    """Whether results depend on the seed."""
    first, second = (results(model, call, seed=seed, gradients=False)["output"] for seed in (1, 2))
    return not torch.equal(first, second)


def _dropouts(model: nn.Module) -> list[str]:
    return [path for path, part in model.named_modules() if isinstance(part, nn.Dropout)]


WITH_DROPOUT = [name for name, family in FAMILIES.items() if _dropouts(family.plain(0.4))]


@pytest.mark.parametrize("name", by_structure(WITH_DROPOUT))
def test_dropout_in_training_mode_drops_in_each_module_alone(name: str) -> None:
    family, call = FAMILIES[name], subject(name).call
    model, plain = family.swapped(0.4), family.plain(0.4)
    assert not _varies(model, call)
    wrong = []
    for path in _dropouts(plain):
        if path.endswith("attn_dropout") and TRANSFORMERS_4:
            # There GPT-2's attention passes no dropout in eval mode, whatever the mode of its dropout module.
            continue
        for each in (model, plain):
            each.get_submodule(path).train()
        with hooked(plain):
            if _varies(model, call) != _varies(plain, call):
                wrong.append(path)
        for each in (model, plain):
            each.get_submodule(path).eval()
    assert not wrong
    assert not _varies(model, call)


@pytest.mark.parametrize("name", FAMILIES)
def test_swapped_modules_keep_the_names_of_their_classes(name: str) -> None:
    plain, swapped = (
        [(type(part).__module__, type(part).__qualname__, type(part).__name__) for part in model.modules()]
        for model in (FAMILIES[name].plain(), FAMILIES[name].swapped())
    )
    assert swapped == plain
