"""The learning rate's shape, where decay falls, and the running average."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from clearhead.train.optimizer import Average, adamw, learning_rate
from clearhead.train.options import TrainingOptions


def test_learning_rate_rises_linearly_and_falls_by_half_a_cosine() -> None:
    options = TrainingOptions(lr=2.0, warmup=0.1, final_lr=0.25)
    rates = [learning_rate(step, 1000, options) for step in range(1001)]
    assert rates[:100] == pytest.approx([2.0 * (step + 1) / 100 for step in range(100)])
    assert rates[100] == pytest.approx(2.0)
    assert rates[550] == pytest.approx((2.0 + 0.5) / 2)
    assert rates[1000] == pytest.approx(0.5)
    assert all(first >= second for first, second in pairwise(rates[100:]))


def test_warmup_0_starts_at_the_highest_rate() -> None:
    assert learning_rate(0, 10, TrainingOptions(lr=1.0, warmup=0.0)) == 1.0


def test_decay_acts_on_matrices_only() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 3), nn.LayerNorm(3))
    optimizer = adamw(model, TrainingOptions(weight_decay=0.3))
    decay = {id(item): group["weight_decay"] for group in optimizer.param_groups for item in group["params"]}
    by_name = {name: decay[id(item)] for name, item in model.named_parameters()}
    assert by_name == {"0.weight": 0.0, "1.weight": 0.3, "1.bias": 0.0, "2.weight": 0.0, "2.bias": 0.0}


def test_average_follows_its_recursion_and_is_lent() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    average = Average(model, 0.5)
    expected = 0.0
    for step in range(20):
        with torch.no_grad():
            model.weight.fill_(step)
        average.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
    with average.lent():
        assert math.isclose(model.weight.item(), expected, rel_tol=1e-5)
    assert model.weight.item() == 19


def test_average_0_lends_the_weights_of_the_model() -> None:
    model = nn.Linear(1, 1)
    original = model.weight.item()
    average = Average(model, 0.0)
    average.update(0)
    with average.lent():
        assert model.weight.item() == original
