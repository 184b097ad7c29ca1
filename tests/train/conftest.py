"""Small tables and runs that the tests of training share."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from clearhead.train import ClassifierOptions, LanguageOptions, train_text_classifier, train_text_language_model

TINY: dict[str, Any] = {"embed_dim": 16, "num_heads": 2, "num_layers": 1, "batch_size": 8, "max_len": 16}
GOOD = ("a good and warm film", "fine acting , good story", "warm and clever", "clever and fine", "good , good")
POOR = ("a bad and cold film", "dull acting , bad story", "cold and silly", "silly and dull", "bad , bad")


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 rows of two classes."""
    path = tmp_path_factory.mktemp("data") / "films.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["label", "text"])
        for number in range(40):
            writer.writerow(["good", GOOD[number % 5]])
            writer.writerow(["poor", POOR[number % 5]])
    return path


@pytest.fixture(scope="session")
def play(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of some two thousand characters."""
    path = tmp_path_factory.mktemp("data") / "play.txt"
    path.write_text("First Citizen:\nSpeak, speak.\n\nAll:\nWe know it, we know it.\n" * 35)
    return path


@pytest.fixture(scope="session")
def classifier_run(table: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of train classify."""
    out = tmp_path_factory.mktemp("runs") / "films"
    options = ClassifierOptions(**TINY, epochs=12, lr=1e-2, held_out=0.2)
    train_text_classifier(table, out=out, test=table, options=options)
    return out


@pytest.fixture(scope="session")
def language_run(play: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of train lm."""
    out = tmp_path_factory.mktemp("runs") / "play"
    options = LanguageOptions(embed_dim=16, num_heads=2, num_layers=1, context=16, steps=60, eval_every=30, lr=1e-2)
    train_text_language_model(play, out=out, options=options)
    return out
