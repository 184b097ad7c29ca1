"""What changes between the calls of a fused layer takes effect at the next call, on every thread."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from tests.agreement import needs_native
from tests.nn.layers.definition import (
    block,
    budget_of,
    checked,
    draw,
    formula,
    numbers,
    same,
    tokens,
    upstream_of,
)

pytestmark = needs_native


class TestChanges:
    """Nothing of an earlier call is read."""

    @pytest.mark.parametrize("where", ["in place", "data", "replaced"])
    @pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
    def test_weights_that_change(self, norm_first: bool, where: str) -> None:
        own, x = block(norm_first=norm_first), tokens()
        before = numbers(own, x)
        for _ in range(3):
            for name, part in list(own.named_parameters()):
                changed = part.detach() * (1.0 + 0.05 * torch.rand(part.shape)) + 0.01
                if where == "in place":
                    with torch.no_grad():
                        part.copy_(changed)
                elif where == "data":
                    part.data = changed
                else:
                    place, _, last = name.rpartition(".")
                    setattr(own.get_submodule(place), last, nn.Parameter(changed))
            after = numbers(own, x)
            assert not torch.equal(after[0], before[0])
            before = after
            same(after, numbers(copy.deepcopy(own), x))
        budget_of(own, x, None, before)

    @pytest.mark.parametrize(
        "change",
        [
            lambda own: setattr(own.attention_norm, "eps", 0.5),
            lambda own: setattr(own.feedforward_norm, "eps", 0.5),
            lambda own: setattr(own, "norm_first", False),
            lambda own: setattr(own.feedforward, "activation", nn.ReLU()),
            lambda own: setattr(own.attention, "scale", 2.0),
            lambda own: setattr(own, "attention_norm", nn.RMSNorm(32, eps=1e-5)),
        ],
        ids=["first eps", "second eps", "norm_first", "activation", "scale", "norm"],
    )
    def test_what_else_a_layer_is(self, change: Callable[[Any], None]) -> None:
        own, other, x = block(bias=False), block(bias=False), tokens()
        change(other)
        for _ in range(2):
            budget_of(own, x, None, numbers(own, x))
            budget_of(other, x, None, numbers(other, x))

    @pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
    def test_tensors_that_are_missing_elsewhere(self, norm_first: bool) -> None:
        """Layers of as many tensors, of the same shapes in the same order, that do not mean the same."""
        layers = [block(norm_first=norm_first) for _ in range(3)]
        layers[0].attention_norm.bias = None
        layers[1].feedforward_norm.weight = None
        layers[2].feedforward_norm.bias = None
        x = tokens()
        for _ in range(2):
            for own in layers:
                budget_of(own, x, None, numbers(own, x))

    @pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
    def test_a_bias_that_is_missing_elsewhere(self, norm_first: bool) -> None:
        layers, x = [block(norm_first=norm_first) for _ in range(2)], tokens()
        layers[0].feedforward.contract.bias = None
        layers[1].feedforward_norm.bias = None
        for _ in range(2):
            for own in layers:
                budget_of(own, x, None, numbers(own, x))

    @pytest.mark.parametrize("training", [True, False])
    def test_projections_whose_bias_is_missing_elsewhere(self, training: bool) -> None:
        layers, x = [block() for _ in range(2)], tokens()
        layers[0].attention.query_projection.bias = None
        layers[1].attention.value_projection.bias = None
        for _ in range(2):
            for own in layers:
                if training:
                    budget_of(own, x, None, numbers(own, x))
                    continue
                with torch.no_grad():
                    torch.testing.assert_close(own(x), formula(own, x), rtol=1e-5, atol=1e-5)

    def test_weights_that_are_one(self) -> None:
        """And later are not."""
        own, x = block(), tokens()
        own.feedforward_norm.weight = own.attention_norm.weight
        for _ in range(2):
            budget_of(own, x, None, numbers(own, x))
        own.feedforward_norm.weight = nn.Parameter(own.attention_norm.weight.detach() * 2.0)
        checked(own, x)

    @pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
    def test_a_mask_that_is_written_to(self, norm_first: bool) -> None:
        own, x, lengths = block(norm_first=norm_first), tokens(), torch.tensor([7, 3])
        mask = ch.Padding(lengths)
        for _ in range(2):
            numbers(own, x, mask)
        lengths[1] = 6
        for _ in range(2):
            budget_of(own, x, mask, numbers(own, x, mask))

    def test_masks_in_turn(self) -> None:
        own, x = block(), tokens()
        masks = [None, ch.Causal(), *(ch.Padding(torch.tensor(lengths)) for lengths in ([7, 3], [2, 7]))]
        for mask in masks * 4:
            budget_of(own, x, mask, numbers(own, x, mask))

    def test_packed_sequences_each_batch_with_a_mask_of_its_own(self) -> None:
        own, x = block(), tokens(batch=1, length=13)
        for lengths in ([5, 8], [1, 12], [6, 7], [12, 1]):
            mask = ch.Documents(lengths=lengths)
            budget_of(own, x, mask, numbers(own, x, mask))

    def test_other_numbers_of_threads(self) -> None:
        own, x = block(), tokens(batch=3, length=65)
        before = torch.get_num_threads()
        try:
            for count in (1, 2, 3, 1, 2, 1, 2, 1, 2):
                torch.set_num_threads(count)
                budget_of(own, x, None, numbers(own, x))
        finally:
            torch.set_num_threads(before)

    @pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
    def test_several_threads_at_once(self, norm_first: bool) -> None:
        own = block(norm_first=norm_first)
        given = [draw(2, 33, 32, seed=seed) for seed in range(4)]
        parameters = list(own.parameters())

        def once(x: Tensor) -> list[Tensor]:
            leaf = x.detach().requires_grad_()
            output = own(leaf)
            return [output, *torch.autograd.grad(output, [leaf, *parameters], upstream_of(output))]

        right = [once(x) for x in given]
        wrong: list[int] = []

        def often(place: int) -> None:
            for _ in range(25):
                if not all(map(torch.equal, once(given[place]), right[place])):
                    wrong.append(place)

        threads = [threading.Thread(target=often, args=(place,)) for place in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
