"""What changes between the calls of a fused layer takes effect at the next call, on every thread."""

from __future__ import annotations

import copy
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
    output_and_gradients,
    same,
    tokens,
    upstream_of,
)
from tests.threads import on_threads

pytestmark = [needs_native, pytest.mark.covering(1)]


class TestChanges:
    """A call does not reuse stale data of an earlier call."""

    @pytest.mark.parametrize("where", ["in place", "data", "replaced"])
    @pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
    def test_changed_weights_take_effect(self, norm_first: bool, where: str) -> None:
        module, x = block(norm_first=norm_first), tokens()
        before = output_and_gradients(module, x)
        for _ in range(3):
            for name, part in list(module.named_parameters()):
                changed = part.detach() * (1.0 + 0.05 * torch.rand(part.shape)) + 0.01
                if where == "in place":
                    with torch.no_grad():
                        part.copy_(changed)
                elif where == "data":
                    part.data = changed
                else:
                    place, _, last = name.rpartition(".")
                    setattr(module.get_submodule(place), last, nn.Parameter(changed))
            after = output_and_gradients(module, x)
            assert not torch.equal(after[0], before[0])
            before = after
            same(after, output_and_gradients(copy.deepcopy(module), x))
        budget_of(module, x, None, before)

    @pytest.mark.parametrize(
        "change",
        [
            lambda module: setattr(module.attention_norm, "eps", 0.5),
            lambda module: setattr(module.feedforward_norm, "eps", 0.5),
            lambda module: setattr(module, "norm_first", False),
            lambda module: setattr(module.feedforward, "activation", nn.ReLU()),
            lambda module: setattr(module.attention, "scale", 2.0),
            lambda module: setattr(module, "attention_norm", nn.RMSNorm(32, eps=1e-5)),
        ],
        ids=["first eps", "second eps", "norm_first", "activation", "scale", "norm"],
    )
    def test_changed_options_take_effect(self, change: Callable[[Any], None]) -> None:
        module, other, x = block(bias=False), block(bias=False), tokens()
        change(other)
        for _ in range(2):
            budget_of(module, x, None, output_and_gradients(module, x))
            budget_of(other, x, None, output_and_gradients(other, x))

    @pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
    def test_layers_without_one_norm_tensor_match_the_formula(self, norm_first: bool) -> None:
        """Layers with equal numbers and shapes of tensors that have different roles."""
        layers = [block(norm_first=norm_first) for _ in range(3)]
        layers[0].attention_norm.bias = None
        layers[1].feedforward_norm.weight = None
        layers[2].feedforward_norm.bias = None
        x = tokens()
        for _ in range(2):
            for layer in layers:
                budget_of(layer, x, None, output_and_gradients(layer, x))

    @pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
    def test_layers_without_one_bias_match_the_formula(self, norm_first: bool) -> None:
        layers, x = [block(norm_first=norm_first) for _ in range(2)], tokens()
        layers[0].feedforward.contract.bias = None
        layers[1].feedforward_norm.bias = None
        for _ in range(2):
            for layer in layers:
                budget_of(layer, x, None, output_and_gradients(layer, x))

    @pytest.mark.parametrize("training", [True, False])
    def test_layers_without_one_projection_bias_match_the_formula(self, training: bool) -> None:
        layers, x = [block() for _ in range(2)], tokens()
        layers[0].attention.query_projection.bias = None
        layers[1].attention.value_projection.bias = None
        for _ in range(2):
            for layer in layers:
                if training:
                    budget_of(layer, x, None, output_and_gradients(layer, x))
                    continue
                with torch.no_grad():
                    torch.testing.assert_close(layer(x), formula(layer, x), rtol=1e-5, atol=1e-5)

    def test_shared_norm_weights_can_be_separated(self) -> None:
        module, x = block(), tokens()
        module.feedforward_norm.weight = module.attention_norm.weight
        for _ in range(2):
            budget_of(module, x, None, output_and_gradients(module, x))
        module.feedforward_norm.weight = nn.Parameter(module.attention_norm.weight.detach() * 2.0)
        checked(module, x)

    @pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
    def test_a_mask_modified_in_place_takes_effect(self, norm_first: bool) -> None:
        module, x, lengths = block(norm_first=norm_first), tokens(), torch.tensor([7, 3])
        mask = ch.Padding(lengths)
        for _ in range(2):
            output_and_gradients(module, x, mask)
        lengths[1] = 6
        for _ in range(2):
            budget_of(module, x, mask, output_and_gradients(module, x, mask))

    def test_alternating_masks_match_the_formula(self) -> None:
        module, x = block(), tokens()
        masks = [None, ch.Causal(), *(ch.Padding(torch.tensor(lengths)) for lengths in ([7, 3], [2, 7]))]
        for mask in masks * 4:
            budget_of(module, x, mask, output_and_gradients(module, x, mask))

    def test_packed_batches_with_different_masks_match_the_formula(self) -> None:
        module, x = block(), tokens(batch=1, length=13)
        for lengths in ([5, 8], [1, 12], [6, 7], [12, 1]):
            mask = ch.Documents(lengths=lengths)
            budget_of(module, x, mask, output_and_gradients(module, x, mask))

    @pytest.mark.usefixtures("_threads_as_before")
    def test_changing_the_number_of_threads_matches_the_formula(self) -> None:
        module, x = block(), tokens(batch=3, length=65)
        for count in (1, 2, 3, 1, 2, 1, 2, 1, 2):
            torch.set_num_threads(count)
            budget_of(module, x, None, output_and_gradients(module, x))

    @pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
    def test_concurrent_threads_give_the_same_bits(self, norm_first: bool) -> None:
        module = block(norm_first=norm_first)
        given = [draw(2, 33, 32, seed=seed) for seed in range(4)]
        parameters = list(module.parameters())

        def step(x: Tensor) -> list[Tensor]:
            leaf = x.detach().requires_grad_()
            output = module(leaf)
            return [output, *torch.autograd.grad(output, [leaf, *parameters], upstream_of(output))]

        right = [step(x) for x in given]
        wrong: list[int] = []

        def repeat(place: int) -> None:
            for _ in range(25):
                if not all(map(torch.equal, step(given[place]), right[place])):
                    wrong.append(place)

        on_threads(4, repeat)
        assert wrong == []
