"""Run folders: what stands in them, how they are read, and what a damaged one says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead.errors import ClearheadError, DataError
from clearhead.train import (
    ClassifierOptions,
    LanguageOptions,
    load_run,
    train_text_classifier,
    train_text_language_model,
)
from clearhead.train.files import read_json, write_json, write_tensors
from clearhead.train.sampling import stream

from .conftest import TINY


def test_run_folder_has_the_documented_files(classifier_run: Path) -> None:
    names = {item.name for item in classifier_run.iterdir()}
    assert names == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "checkpoint",
        "log.jsonl",
        "metrics.json",
        "tensorboard",
    }
    config = json.loads((classifier_run / "config.json").read_text())
    assert config["labels"] == ["good", "poor"]
    assert {"python", "torch", "tokenizers"} <= config["versions"].keys()
    assert list((classifier_run / "tensorboard").iterdir())
    records = [json.loads(line) for line in (classifier_run / "log.jsonl").read_text().splitlines()]
    assert {record["kind"] for record in records} == {"train", "held_out"}


def test_tensorboard_has_the_metrics_of_the_log(classifier_run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(classifier_run / "tensorboard"))
    events.Reload()
    logged = [json.loads(line) for line in (classifier_run / "log.jsonl").read_text().splitlines()]
    expected = [(record["step"], record["accuracy"]) for record in logged if record["kind"] == "held_out"]
    scalars = [(event.step, event.value) for event in events.Scalars("held_out/accuracy")]
    assert scalars == [(step, pytest.approx(value)) for step, value in expected]


def test_predictions_are_right_and_probabilities_sum_to_one(classifier_run: Path) -> None:
    run = load_run(classifier_run)
    predictions = run.predict(["a warm and clever story", "a cold and dull story", "fine"])
    assert [label for label, _ in predictions] == ["good", "poor", "good"]
    for label, chances in predictions:
        assert sum(chances) == pytest.approx(1.0)
        assert run.labels[chances.index(max(chances))] == label
    assert run.predict([]) == []


def test_predict_reports_weights_that_are_not_finite(classifier_run: Path) -> None:
    run = load_run(classifier_run)
    with torch.no_grad():
        next(run.model.parameters()).fill_(torch.nan)
    with pytest.raises(DataError, match=r"must have finite weights; got scores of NaN"):
        run.predict(["a warm and clever story"])


def test_predictions_are_independent_of_the_batch(classifier_run: Path) -> None:
    run = load_run(classifier_run)
    texts = ["good", "a cold and dull story , silly and bad", "warm film"]
    together = run.predict(texts)
    for text, (label, chances) in zip(texts, together, strict=True):
        alone_label, alone = run.predict([text])[0]
        assert alone_label == label
        assert alone == pytest.approx(chances, abs=1e-5)


def test_long_text_is_truncated(classifier_run: Path) -> None:
    run = load_run(classifier_run)
    assert run.encode("good " * 100) == run.encode("good " * 16)
    assert len(run.predict(["good " * 100])) == 1


@pytest.mark.parametrize("text", ["", "  ", "\n"])
def test_text_without_tokens_raises(classifier_run: Path, text: str) -> None:
    with pytest.raises(DataError, match=r"^encode: text must have at least one token"):
        load_run(classifier_run).predict([text])


def _truncate(run: Path) -> None:
    content = (run / "model.safetensors").read_bytes()
    (run / "model.safetensors").write_bytes(content[: len(content) // 2])


def _edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        config = read_json(run / "config.json", function="test")
        for name, value in changes.items():
            if isinstance(value, dict):
                config[name] |= value
            else:
                config[name] = value
        write_json(run / "config.json", config)

    return edit


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut weights": (_truncate, "model.safetensors must be a complete safetensors file"),
    "empty weights": (lambda run: (run / "model.safetensors").write_bytes(b""), "must be a complete safetensors file"),
    "no weights": (lambda run: (run / "model.safetensors").unlink(), "must have trained weights; got none yet"),
    "no config": (lambda run: (run / "config.json").unlink(), "must be a readable JSON file; got no such file"),
    "broken config": (lambda run: (run / "config.json").write_text("{"), "must be a readable JSON file; got Expecting"),
    "list config": (lambda run: (run / "config.json").write_text("[]"), "config.json must describe a run"),
    "other task": (_edit_config(task="dance"), "must be of the task classify or lm; got 'dance'"),
    "no labels": (_edit_config(labels=[]), "config.json must have 'labels'"),
    "other width": (_edit_config(options={"embed_dim": 32}), "must have the weights that config.json describes"),
    "more layers": (_edit_config(options={"num_layers": 2}), "must have the weights that config.json describes"),
    "bad width": (_edit_config(options={"embed_dim": -1}), "--embed-dim must be at least 1"),
    "word width": (_edit_config(options={"embed_dim": "x"}), "must have known options of the right type"),
    "other vocabulary": (_edit_config(vocab_size=5), "must have 5 tokens"),
    "no tokenizer": (lambda run: (run / "tokenizer.json").unlink(), "must be a complete tokenizer file"),
    "foreign weights": (
        lambda run: write_tensors(run / "model.safetensors", {"x": torch.zeros(2)}),
        "must have the weights that config.json describes; got missing",
    ),
    "a pickle": (
        lambda run: torch.save({"x": torch.zeros(2)}, run / "model.safetensors"),
        "must be a complete safetensors file",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_run_raises_one_line(classifier_run: Path, tmp_path: Path, name: str) -> None:
    damage, expected = DAMAGE[name]
    run = tmp_path / "run"
    shutil.copytree(classifier_run, run)
    damage(run)
    with pytest.raises(ClearheadError) as caught:
        load_run(run)
    assert expected in str(caught.value)
    assert str(caught.value).startswith("load_run: ")
    assert "\n" not in str(caught.value)


def test_absent_folder_raises(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"must be a run folder; got no such folder"):
        load_run(tmp_path / "none")


def test_run_of_the_other_task_raises(classifier_run: Path, language_run: Path) -> None:
    with pytest.raises(DataError, match=r"^predict: .* must be a run of train classify; got a run of train lm"):
        load_run(language_run).predict(["x"])
    with pytest.raises(DataError, match=r"^generate: .* must be a run of train lm; got a run of train classify"):
        stream(load_run(classifier_run), "x")


def test_bad_data_leaves_no_folder(tmp_path: Path, table: Path) -> None:
    options = ClassifierOptions(**TINY)
    one_class = tmp_path / "one.csv"
    one_class.write_text("label,text\na,b c\na,d e\n")
    blank = tmp_path / "blank.csv"
    blank.write_text("label,text\na,b c\nb,d e\na,   \nb,x\n")
    odd = tmp_path / "odd.csv"
    odd.write_text("label,text\nnew,b c\n")
    cases: list[tuple[Path, Path | None, str]] = [
        (one_class, None, "must have two classes or more; got one, 'a'"),
        (blank, None, "must have a token in every text; got none in line 4"),
        (table, odd, "must have only labels of the training data; got 'new' in line 2"),
    ]
    for data, test, expected in cases:
        with pytest.raises(DataError, match=r"^train classify: ") as caught:
            train_text_classifier(data, out=tmp_path / "out", test=test, options=options)
        assert expected in str(caught.value)
        assert not (tmp_path / "out").exists()


def test_folder_with_files_is_not_written_to(tmp_path: Path, table: Path, classifier_run: Path) -> None:
    before = {item: item.stat().st_mtime_ns for item in classifier_run.rglob("*")}
    with pytest.raises(DataError, match=r"must be a new or empty folder; got a folder with a run"):
        train_text_classifier(table, out=classifier_run, options=ClassifierOptions(**TINY))
    assert {item: item.stat().st_mtime_ns for item in classifier_run.rglob("*")} == before
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(DataError, match=r"got a folder with other files"):
        train_text_classifier(table, out=tmp_path, options=ClassifierOptions(**TINY))
    with pytest.raises(DataError, match=r"must be a folder; got a file"):
        train_text_classifier(table, out=tmp_path / "thesis.txt", options=ClassifierOptions(**TINY))


def test_non_finite_loss_leaves_the_checkpoint(tmp_path: Path, table: Path) -> None:
    options = ClassifierOptions(**TINY, epochs=3, lr=1e30, checkpoint_every=1)
    with pytest.raises(DataError, match=r"^train classify: loss must be finite; got nan at step \d+"):
        train_text_classifier(table, out=tmp_path / "out", options=options)
    assert (tmp_path / "out" / "checkpoint" / "last.safetensors").exists()
    assert not (tmp_path / "out" / "metrics.json").exists()


def test_short_text_raises_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("abc" * 50)
    with pytest.raises(DataError, match=r"must have more than --context 64 tokens in its held-out part; got 15"):
        train_text_language_model(path, out=tmp_path / "out", options=LanguageOptions())
    assert not (tmp_path / "out").exists()


def test_stream_equals_generate(language_run: Path) -> None:
    run = load_run(language_run)
    numbers = {"max_new_tokens": 40, "temperature": 0.8, "top_k": 5, "seed": 3}
    ids = torch.tensor([run.encode("First")])
    expected = run.tokenizer.decode(run.model.generate(ids, **numbers)[0].tolist())  # type: ignore[operator]
    assert "First" + "".join(stream(run, "First", **numbers)) == expected  # type: ignore[arg-type]


def test_prompt_outside_the_vocabulary_raises(language_run: Path) -> None:
    run = load_run(language_run)
    with pytest.raises(DataError, match=r"must have only characters of the training text; got '7', 'é'"):
        stream(run, "é7 First")
    with pytest.raises(DataError, match=r"must have at least one token"):
        stream(run, "")
