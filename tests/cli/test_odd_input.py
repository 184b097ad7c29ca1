"""What no terminal, file or disk should turn into a traceback: each is one line, and what can be done is done."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.commands import texts_of

SIZES = ["--embed-dim", "16", "--num-heads", "2", "--num-layers", "1"]


def refused(*words: object) -> str:
    code, _, err = texts_of(*words)
    assert code == 2
    assert err.count("\n") == 1, err
    return err


def classify(data: Path, out: Path, *more: object) -> list[object]:
    return ["train", "classify", "--data", data, "--out", out, "--epochs", 1, "--batch-size", 8, *SIZES, *more]


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("films")
    rows = ["good,a fine :cat: film", "poor,a dull :fire: film"] * 10
    (folder / "films.csv").write_text("\n".join(["label,text", *rows]) + "\n")
    assert texts_of(*classify(folder / "films.csv", folder / "run"))[0] == 0
    return folder


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("play")
    (folder / "play.txt").write_bytes(b"\xef\xbb\xbf" + b"All:\r\nSpeak, speak.\r\n" * 40)
    words = ["--steps", 2, "--eval-every", 2, "--context", 16, *SIZES]
    assert texts_of("train", "lm", "--data", folder / "play.txt", "--out", folder / "run", *words)[0] == 0
    return folder


def test_file_is_read_like_the_training_file(play: Path) -> None:
    out = play / "seen.json"
    assert texts_of("observe", play / "run", "--file", play / "play.txt", "--json", out)[0] == 0
    assert json.loads(out.read_text())["tokens"].count("\r") == 80


def test_unknown_characters_at_the_end_are_refused(play: Path) -> None:
    (play / "late.txt").write_text("All:\nSpeak, speak.\n" * 300 + "€")
    assert "only characters of the training text; got '€'" in refused(
        "observe", play / "run", "--file", play / "late.txt"
    )


def test_unwritable_outputs_are_refused_before_the_work(films: Path) -> None:
    place = films / "films.csv" / "x"
    run = films / "run"
    assert "predict: --out must be writable" in refused("predict", run, "--text", "a", "--out", f"{place}.csv")
    assert "train classify: --out must be writable" in refused(*classify(films / "films.csv", place))
    assert "bench: --out must be writable" in refused("bench", "--quick", "--out", place)
    assert "view: --out must be writable" in refused("view", run, "--text", "a film", "--out", place)
    same = ("predict", run, "--data", films / "films.csv", "--out", films / "films.csv")
    assert "must not be the file of --data" in refused(*same)
    assert texts_of("predict", run, "--text", "a film", "--out", films / "NEW.CSV")[0] == 0


@pytest.mark.slow
def test_full_disk_is_one_line() -> None:
    script = "from clearhead.cli.app import main; main()"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script, "explain", "--text", "a b"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    wanted = "output must be writable; got No space left on device. Free some space, or write to another place.\n"
    assert done.stderr.partition(": ")[2] == wanted


def test_invalid_utf8_is_refused(films: Path, play: Path) -> None:
    odd = "caf\udce9 film"
    for words in (
        ("explain", "--text", odd),
        ("predict", films / "run", "--text", odd),
        ("observe", play / "run", "--text", odd),
        ("view", films / "run", "--text", odd),
        ("generate", play / "run", "--prompt", odd),
    ):
        assert "must be UTF-8; got an invalid byte at character 3" in refused(*words)


def test_texts_are_printed_verbatim(films: Path) -> None:
    _, out, _ = texts_of("predict", films / "run", "--text", "a :cat: film that is longer than eighty columns " * 2)
    assert ":cat: film that is longer than eighty columns a :cat:" in out


@pytest.mark.parametrize(
    "words",
    [("--vocab-size", 10**22), ("--min-count", 10**22), ("--max-len", 10**12), ("--embed-dim", 10**7)],
)
def test_invalid_sizes_are_refused(films: Path, words: tuple[object, ...]) -> None:
    said = refused(*classify(films / "films.csv", films / "large", *words))
    assert f"train classify: {words[0]} must be at most" in said


def test_failed_run_can_be_restarted(films: Path) -> None:
    repeated = films / "again"
    code, _, err = texts_of(*classify(films / "films.csv", repeated, "--lr", "inf"))
    assert (code, "be finite" in err) == (2, True)
    assert texts_of(*classify(films / "films.csv", repeated))[0] == 0
    assert "a folder with a run" in refused(*classify(films / "films.csv", repeated))
    (repeated / "metrics.json").write_text("{}")
    assert "must have held_out, best_step" in refused(*classify(films / "films.csv", repeated, "--resume"))


def test_group_without_subcommand_is_an_error() -> None:
    assert (
        texts_of("train")[2] == "clearhead train: a command is missing. Run 'clearhead train --help' for its options.\n"
    )


def test_word_takes_precedence_over_index() -> None:
    _, out, _ = texts_of("explain", "--text", "I have 5 cats and dogs here", "--token", "5")
    assert "token 2 '5'" in out


def test_file_is_not_reported_as_missing_folder(films: Path) -> None:
    assert "got a file" in refused("predict", films / "films.csv", "--text", "a")
