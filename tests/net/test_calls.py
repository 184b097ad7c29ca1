"""The test helpers detect the faults that they are meant to detect."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from tests.net.calls import Call, agree, distance, equal, hooked, observed, results
from tests.net.changes import CHANGES
from tests.net.covering import covering
from tests.net.modules import MODULES, modules, typical

ONES = {"output": torch.ones(4), "gradient": torch.ones(3)}


def test_equal_and_agree_fail_on_a_difference() -> None:
    off = {"output": torch.ones(4), "gradient": torch.tensor([1.0, 1.0, 1.0 + 1e-3])}
    nearly = {"output": torch.ones(4), "gradient": torch.tensor([1.0, 1.0, 1.0 + 2**-23])}
    equal(ONES, ONES)
    with pytest.raises(AssertionError, match="gradient"):
        equal(nearly, ONES)
    agree(nearly, ONES, ONES, 1)
    with pytest.raises(AssertionError, match="gradient"):
        agree(off, ONES, ONES, 1)
    assert distance(off, ONES) == pytest.approx(1e-3 / 3**0.5, rel=1e-3)
    with pytest.raises(AssertionError):
        distance({"output": torch.ones(4)}, ONES)


def test_covering_has_every_pair_and_triple() -> None:
    options = {"a": (1, 2, 3), "b": (4, 5), "c": (6, 7), "d": (8, 9)}
    for strength, names in ((2, ("a", "c")), (3, ("a", "b", "d"))):
        rows = covering(options, strength)
        assert len(rows) < 24
        actual = {tuple(row[name] for name in names) for row in rows}
        assert actual == {*product(*(options[name] for name in names))}


@pytest.mark.parametrize("kind", MODULES)
def test_every_class_is_called_with_hooks_and_gives_all_gradients(kind: str) -> None:
    row = modules(kind)[0]
    module = row.make()
    called = []
    with hooked(module):
        for part in module.modules():
            part.register_forward_hook(lambda part, *_: called.append(part))
        actual = results(module, row.call())
    assert len(called) > 3
    assert len(actual) > len([*module.parameters()])


class _Stale(nn.Linear):
    """Computes with a copy of its weight, cached under the parameter's identity and version."""

    copied: tuple[object, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        mark = (id(self.weight), self.weight._version)
        if self.copied is None or self.copied[0] != mark:
            self.copied = (mark, self.weight.detach().clone())
        return nn.functional.linear(x, self.copied[1], self.bias)


@pytest.mark.parametrize(("change", "shows"), [("data assigned", True), ("written in place", False)])
def test_stale_weight_is_detected(change: str, shows: bool) -> None:
    call = Call({"input": torch.ones(1, 4)})

    class Model(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, input: Tensor) -> Tensor:
            output: Tensor = self.layer(input)
            return output

    torch.manual_seed(0)
    stale, right = Model(_Stale(4, 4)), Model(nn.Linear(4, 4))
    right.load_state_dict(stale.state_dict())
    results(stale, call, gradients=False)
    actual = []
    for model in (stale, right):
        CHANGES[change](model)
        actual.append(results(model, call, gradients=False))
    assert (distance(*actual) > 1e-4) == shows


def test_observing_a_model_that_is_not_called_raises() -> None:
    with pytest.raises(ValueError, match="observe"), observed(typical("Encoder")[0].make()):
        pass
