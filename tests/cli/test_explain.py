"""clearhead explain from outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.commands import texts_of
from typer.testing import CliRunner

from clearhead.cli.app import app

TEXT = "The cat sat on the mat"


def run(*arguments: str) -> tuple[int, str, str]:
    return texts_of("explain", *arguments)


def test_explain_without_run_says_that_weights_are_random() -> None:
    code, out, err = run("--text", TEXT)
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "an untrained encoder of 2 layers: its weights are random (seed 0)"
    for words in ("token 5 'mat'", "q = Wq x[5] + b", "p[j] = exp(s[j]) / Σ exp(s)", "worst difference from float64"):
        assert words in out


def test_explain_is_deterministic_for_a_seed() -> None:
    first, repeated, other = (run("--text", TEXT, "--json", "--seed", seed)[1] for seed in ("1", "1", "2"))
    assert first == repeated
    assert first != other


@pytest.mark.parametrize(("token", "index"), [("cat", 1), ("2", 2), ("The", 0), ("the", 4), ("MAT", 5)])
def test_token_is_a_word_or_an_index(token: str, index: int) -> None:
    code, out, _ = run("--text", TEXT, "--token", token, "--layer", "1", "--head", "3", "--json")
    read = json.loads(out)
    assert (code, read["token"], read["head"], read["layer"]) == (0, index, 3, "encoder.blocks.1.attention")
    assert read["tokens"] == TEXT.split()
    assert read["worst_difference"] < 1e-5


def test_punctuation_and_other_scripts_are_tokens_too() -> None:
    code, out, _ = run("--text", "猫が坐る。 Ça va?", "--json")
    assert code == 0
    assert json.loads(out)["tokens"] == ["猫が坐る", "。", "Ça", "va", "?"]


def test_all_rows_prints_every_key() -> None:
    text = " ".join(f"w{place}" for place in range(40))
    assert "heaviest of 40 keys" in run("--text", text)[1]
    assert "heaviest" not in run("--text", text, "--all-rows")[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--text", TEXT, "--layer", "2"), "layer must be one of 0 (encoder.blocks.0.attention), 1 (encoder."),
        (("--text", TEXT, "--layer", "-1"), "layer must be one of"),
        (("--text", TEXT, "--head", "4"), "head must be a whole number from 0 to 3; got 4"),
        (("--text", TEXT, "--token", "dog"), "0 'The', 1 'cat', 2 'sat', 3 'on', 4 'the', 5 'mat'; got 'dog'"),
        (("--text", TEXT, "--token", "6"), "token must be one of"),
        (("--text", "go go", "--token", "go"), "occur exactly once in the text; got 'go' at 0, 1"),
        (("--text", " \n"), "--text must contain a word"),
        (("--text", TEXT, "--seed", "-1"), "--seed must lie from 0"),
        (("--text", TEXT, "--run", "no/such/run"), "no/such/run must be a run folder"),
        ((), "Missing option '--text'"),
        (("--text", TEXT, "--layer", "two"), "--layer"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], words: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert words in err


def test_trained_run_is_explained_with_its_tokens(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs the extra train")
    table = tmp_path / "films.csv"
    rows = [
        f"{label},a {word} film number {n % 7}" for n in range(40) for label, word in (("up", "fine"), ("down", "dull"))
    ]
    table.write_text("label,text\n" + "\n".join(rows) + "\n", encoding="utf-8")
    folder = tmp_path / "run"
    trained = CliRunner().invoke(
        app, ["train", "classify", "--data", str(table), "--out", str(folder), "--epochs", "1"]
    )
    assert trained.exit_code == 0, trained.stderr
    code, out, err = run("--run", str(folder), "--text", "a fine film", "--token", "fine", "--json")
    assert (code, err) == (0, "")
    read = json.loads(out)
    assert read["source"] == f"the trained model in {folder}"
    assert read["label"] == "fine"
    assert read["worst_difference"] < 1e-4
    assert run("--run", str(folder), "--text", "")[0] == 2
