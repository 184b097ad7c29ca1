"""Options: limits are checked with one line that names the flag; they survive config.json."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from clearhead.errors import ClearheadError, DataError
from clearhead.train.options import ClassifierOptions, LanguageOptions

BAD: list[tuple[dict[str, Any], str]] = [
    ({"embed_dim": 0}, "--embed-dim must be at least 1; got 0"),
    ({"embed_dim": 130}, "--embed-dim must be divisible by --num-heads 4; got 130"),
    ({"num_heads": 0}, "--num-heads must be at least 1"),
    ({"epochs": -1}, "--epochs must be at least 0"),
    ({"batch_size": 0}, "--batch-size must be at least 1"),
    ({"lr": 0.0}, "--lr must be above 0"),
    ({"lr": float("nan")}, "--lr must be above 0; got nan"),
    ({"dropout": 1.0}, "--dropout must be below 1"),
    ({"precision": "fp8"}, "--precision must be one of fp32, bf16; got fp8"),
    ({"patience": 0}, "--patience must be at least 1"),
]


@pytest.mark.parametrize(("change", "expected"), BAD)
def test_option_out_of_limits_raises_one_line(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ClearheadError) as caught:
        ClassifierOptions(**change).checked("train classify")
    assert str(caught.value).startswith(f"train classify: {expected}")


@pytest.mark.parametrize("kind", [ClassifierOptions, LanguageOptions])
def test_defaults_are_within_limits_and_every_field_has_a_help_text(kind: type[ClassifierOptions]) -> None:
    kind().checked("x")
    assert all(item.metadata["help"].endswith(".") for item in dataclasses.fields(kind))


def test_options_survive_as_dict() -> None:
    options = ClassifierOptions(embed_dim=64, lr=0.5)
    assert ClassifierOptions.from_dict(options.as_dict(), function="x") == options


@pytest.mark.parametrize("change", [{"embed_dim": "wide"}, {"embed_dim": None}, {"no_such": 1}, {"compile": 1}])
def test_damaged_options_raise(change: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"^load: config.json must have known options of the right type; got "):
        ClassifierOptions.from_dict(ClassifierOptions().as_dict() | change, function="load")


def test_cuda_without_a_gpu_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ClearheadError, match=r"--device must be usable here; got cuda without a GPU"):
        ClassifierOptions(device="cuda").chosen_device("train classify")
