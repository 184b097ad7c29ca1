"""Contenders compute the same numbers, and one that does not is refused before a clock starts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from clearhead.benchmark import Comparison, Setting, comparison_of, grid
from clearhead.benchmark.cases import chosen_backend, errors_against
from clearhead.benchmark.peers import OURS
from clearhead.errors import UnsupportedError

SMALL = (2, 2, 33, 8)
SETTINGS = grid([SMALL], [torch.float32, torch.bfloat16])


def test_grid_has_every_combination_once() -> None:
    assert len(SETTINGS) == len(set(SETTINGS)) == 2 * 2 * 2 * 2


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.title)
def test_all_contenders_do_the_same_work(setting: Setting) -> None:
    comparison = comparison_of(setting)
    errors = comparison.check()
    assert set(errors) == set(comparison.calls)
    assert OURS in errors
    assert len(comparison.calls) == {"attention": 3, "module": 4}[setting.level]
    groups = {name: [len(group) for group in call()] for name, call in comparison.calls.items()}
    assert len({len(shape) for shape in groups.values()}) == 1
    worst = {torch.float32: 1e-5, torch.bfloat16: 6e-2}[setting.dtype]
    assert max(errors.values()) < worst


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.mode == "training"], ids=lambda setting: setting.title)
def test_wrong_gradient_raises(setting: Setting) -> None:
    comparison = comparison_of(setting)
    honest = comparison.calls[OURS]

    def wrong():  # type: ignore[no-untyped-def]
        groups = honest()
        return (*groups[:-1], tuple(1.5 * tensor for tensor in groups[-1]))

    with pytest.raises(UnsupportedError, match="contender 'clearhead' must compute the same"):
        replace(comparison, calls={**comparison.calls, OURS: wrong}).check()


def test_contender_without_mask_or_gradients_raises() -> None:
    setting = Setting("attention", "forward", SMALL, torch.float32, True)
    causal, full = comparison_of(setting), comparison_of(replace(setting, causal=False))
    with pytest.raises(UnsupportedError, match="Different work is not timed"):
        replace(causal, calls={"cheat": full.calls[OURS]}).check()
    with pytest.raises(UnsupportedError, match="inf"):
        replace(causal, calls={"half": lambda: ((causal.calls[OURS]()[0][0][:1],),)}).check()
    with pytest.raises(UnsupportedError, match="nan"):
        replace(causal, calls={"nan": lambda: ((causal.calls[OURS]()[0][0] * torch.nan,),)}).check()


def test_forward_only_contender_raises_in_training() -> None:
    setting = Setting("attention", "training", SMALL, torch.float32, False)
    comparison, forward = comparison_of(setting), comparison_of(replace(setting, mode="forward"))
    with pytest.raises(UnsupportedError):
        replace(comparison, calls={"forward": forward.calls[OURS]}).check()


def test_exact_equals_torch_in_float64() -> None:
    setting = Setting("attention", "training", (1, 2, 300, 8), torch.float32, True)
    comparison = comparison_of(setting)
    query, key, value = (tensor.detach().double().requires_grad_() for tensor in _inputs(comparison))
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    exact = comparison.exact()
    torch.testing.assert_close(exact[0][0], output, rtol=0, atol=1e-12)
    assert [group.__len__() for group in exact] == [1, 3]


def _inputs(comparison: Comparison) -> list[torch.Tensor]:
    """The inputs that the case's seed draws."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn((1, 2, 300, 8), generator=generator) for _ in range(3)]


def test_large_scores_leave_out_the_textbook_formula() -> None:
    setting = Setting("attention", "forward", (1, 1, 20_000, 1), torch.float32, False)
    comparison = comparison_of(setting)
    assert list(comparison.left_out) == ["textbook formula"]
    assert "GiB of scores" in comparison.left_out["textbook formula"]
    assert "textbook formula" not in comparison.calls


def test_operations_equal_the_formula() -> None:
    full = Setting("attention", "forward", (2, 3, 10, 8), torch.float32, False)
    assert full.operations == 4 * 2 * 3 * 10 * 10 * 8
    assert replace(full, causal=True).operations == 4 * 2 * 3 * 55 * 8
    assert replace(full, mode="training").operations == 3.5 * full.operations
    assert replace(full, level="module").operations == full.operations + 8 * 2 * 10 * 24**2


def test_errors_are_relative_to_the_largest_of_each_group() -> None:
    exact = ((torch.tensor([100.0, 1.0]),), (torch.tensor([1.0]), torch.tensor([2.0])))
    perturbed = ((torch.tensor([101.0, 1.0]),), (torch.tensor([1.5]), torch.tensor([2.0])))
    assert errors_against(exact, perturbed) == [0.01, 0.25]


def test_chosen_backend_exists() -> None:
    assert chosen_backend(SETTINGS[0]) in {"sdpa", "tiled", "reference", "flex", "native"}
