"""clearhead train, predict and generate as a user types them: what they print, write and refuse."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from tests.commands import called

SIZES = ["--embed-dim", "16", "--num-heads", "2", "--num-layers", "1"]
CLASSIFIER = [*SIZES, "--batch-size", "8", "--lr", "0.01"]
LANGUAGE = [*SIZES, "--context", "16", "--steps", "4", "--eval-every", "2"]


def refused(*words: object) -> str:
    """The one line on stderr of a command that must leave with 2 and print nothing else."""
    code, out, err = called(*words)
    assert (code, out, len(err)) == (2, "", 1), (code, out, err)
    return err[0]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "films.csv"
    rows = ["good,a fine and warm film", "poor,a dull and cold film"] * 20
    path.write_text("\n".join(["label,text", *rows]) + "\n")
    return path


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "play.txt"
    path.write_text("All:\nSpeak, speak.\n" * 40)
    return path


@pytest.fixture(scope="module")
def run(table: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "films"
    code, printed, _ = called(
        "train", "classify", "--data", table, "--test", table, "--out", out, "--epochs", 4, *CLASSIFIER
    )
    assert code == 0
    assert "test: accuracy 1.0000" in printed
    assert f"clearhead predict {out}" in printed
    return out


@pytest.fixture(scope="module")
def spoken(play: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "play"
    code, printed, _ = called("train", "lm", "--data", play, "--out", out, *LANGUAGE)
    assert code == 0
    assert "bits_per_character" in printed
    return out


def test_training_lists_every_option_once_with_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = called("train", "classify", "--help")
    assert code == 0
    for flag in ("--label-smoothing", "--precision", "--compile", "--checkpoint-activations", "--seed", "--resume"):
        assert out.count(f"{flag} ") == 1
    assert called("train", "lm", "--help")[0] == 0


def test_second_run_does_not_overwrite_the_first(run: Path, table: Path) -> None:
    line = refused("train", "classify", "--data", table, "--out", run, "--epochs", 4, *CLASSIFIER)
    assert line == (
        f"train classify: {run} must be a new or empty folder; got a folder with a run. "
        "Choose another --out, or add --resume to continue it."
    )


def test_resuming_a_finished_run_prints_its_numbers(run: Path, table: Path) -> None:
    words = ["train", "classify", "--data", table, "--test", table, "--out", run, "--epochs", 4, *CLASSIFIER]
    code, out, err = called(*words, "--resume")
    assert code == 0
    assert "test: accuracy 1.0000" in out
    assert err == ["this run has already finished"]


def test_default_folder_is_named_after_the_data(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert called("train", "classify", "--data", table, "--epochs", 1, *CLASSIFIER)[0] == 0
    assert (tmp_path / "runs" / "classify-films" / "metrics.json").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--embed-dim", "0"], "--embed-dim must be at least 1; got 0"),
        (["--embed-dim", "15"], "--embed-dim must be divisible by --num-heads 2; got 15"),
        (["--epochs", "-1"], "--epochs must be at least 0"),
        (["--batch-size", "-4"], "--batch-size must be at least 1"),
        (["--text-column", "words"], "must have the column 'words'; got the columns 'label', 'text' in line 1"),
        (["--precision", "fp8"], "--precision must be one of fp32, bf16"),
        (["--test", "nowhere.csv"], "nowhere.csv must be a readable file; got No such file or directory"),
    ],
)
def test_bad_options_print_one_line_and_create_no_folder(
    table: Path, tmp_path: Path, words: list[str], expected: str
) -> None:
    line = refused("train", "classify", "--data", table, "--out", tmp_path / "out", *CLASSIFIER, *words)
    assert line.startswith("train classify: ")
    assert expected in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [["--epochs", "many"], ["--no-such-flag", "1"]])
def test_unknown_options_are_usage_errors(table: Path, words: list[str]) -> None:
    assert "--help" in refused("train", "classify", "--data", table, *words)
    assert "--data" in refused("train", "classify")


def test_bad_text_prints_one_line_and_creates_no_folder(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes(b"caf\xe9\n" * 100)
    assert "must be UTF-8; got byte 0xe9 in line 1" in refused("train", "lm", "--data", path, "--out", tmp_path / "o")
    path.write_bytes(b"")
    assert "must have text" in refused("train", "lm", "--data", path, "--out", tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_predict_prints_a_table_or_json(run: Path) -> None:
    code, out, err = called("predict", run, "--text", "a fine and warm film", "--text", "a dull and cold film")
    assert (code, err) == (0, [])
    assert [line.split()[5] for line in out.splitlines()[1:]] == ["good", "poor"]
    code, out, _ = called("predict", run, "--text", "a fine and warm film", "--json")
    files = json.loads(out)
    assert code == 0
    assert files["prediction"] == "good"
    assert sum(files["probabilities"].values()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_predict_writes_a_file_and_prints_the_accuracy(run: Path, table: Path, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"found{suffix}"
    code, printed, _ = called("predict", run, "--data", table, "--out", out)
    assert code == 0
    assert "accuracy: 1.0000 (40 of 40)" in printed
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file)) if suffix == ".csv" else [json.loads(line) for line in file]
    assert len(rows) == 40
    assert all(row["prediction"] == row["label"] for row in rows)


def test_predict_needs_no_labels(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "a fine film"}\n')
    code, out, _ = called("predict", run, "--data", path, "--json")
    assert code == 0
    assert json.loads(out)["prediction"] == "good"
    assert "accuracy" not in out


def test_predict_refuses_in_one_line(run: Path, spoken: Path, table: Path, tmp_path: Path) -> None:
    assert "must be given, one of the two; got neither" in refused("predict", run)
    assert "got both" in refused("predict", run, "--text", "x", "--data", table)
    assert "must be a run folder; got no such folder" in refused("predict", tmp_path / "no", "--text", "x")
    assert "must be a run of train classify" in refused("predict", spoken, "--text", "x")
    assert "must have a token in every text; got none in text 1" in refused("predict", run, "--text", "  ")
    out = tmp_path / "found.xls"
    assert "must end in .csv or .jsonl" in refused("predict", run, "--text", "x", "--out", out)
    assert not out.exists()


def test_generate_continues_the_prompt_and_is_deterministic_for_a_seed(spoken: Path) -> None:
    words = ["generate", spoken, "--prompt", "Speak", "--max-new-tokens", 30]
    code, first, _ = called(*words, "--seed", 1)
    assert code == 0
    assert first.startswith("Speak")
    assert len(first) == len("Speak") + 30 + 1
    assert called(*words, "--seed", 1)[1] == first
    assert called(*words, "--seed", 2)[1] != first


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--prompt", "Zq7"], "must have only characters of the training text; got '7', 'Z', 'q'"),
        (["--prompt", ""], "must have at least one token"),
        (["--prompt", "S", "--max-new-tokens", "0"], "max_new_tokens must be at least 1; got 0"),
        (["--prompt", "S", "--temperature", "-1"], "temperature must be a number of at least 0"),
        (["--prompt", "S", "--top-k", "0"], "top_k must be a whole number of at least 1"),
    ],
)
def test_generate_refuses_in_one_line(spoken: Path, words: list[str], expected: str) -> None:
    line = refused("generate", spoken, *words)
    assert line.startswith("generate: ") or line.startswith("encode: ")
    assert expected in line


def test_generate_refuses_a_classifier(run: Path) -> None:
    assert "must be a run of train lm; got a run of train classify" in refused("generate", run, "--prompt", "x")


def test_text_without_a_token_is_counted_as_a_text(run: Path) -> None:
    line = refused("predict", run, "--text", "a film", "--text", "")
    assert line == "predict: --text must have a token in every text; got none in text 2. Remove that text."
