"""clearhead view from outside: the page it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.commands import lines_of
from tests.inspector.sample import TOLERANCE, page_weights

import clearhead as ch
from clearhead.inspector import Page
from clearhead.train.saved import load_run

SIZES = ["--embed-dim", "16", "--num-heads", "2", "--num-layers", "2"]
TEXT = "Speak, speak.\nAll:"


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("play")
    (folder / "play.txt").write_text("All:\nSpeak, speak.\n" * 40)
    code, _, _ = lines_of(
        "train", "lm", "--data", folder / "play.txt", "--out", folder / "run", "--steps", 2, "--eval-every", 2,
        "--context", 16, *SIZES,
    )  # fmt: skip
    assert code == 0
    return folder / "run"


def test_view_page_has_the_weights_of_the_model(speaker: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "page.html"
    code, said, err = lines_of("view", speaker, "--text", TEXT[:8], "--out", out, "--title", "A play")
    assert (code, err) == (0, [])
    assert said == [f"wrote {out}: 8 tokens, Page('A play', 2 layers, 4 heads)"]
    data = dict(Page.open(out).data)
    run = load_run(speaker)
    ids = run.encode(TEXT[:8])
    assert data["texts"] == [[run.tokenizer.decode([identity]) for identity in ids]]
    with torch.no_grad(), ch.trace(run.model) as traced:
        run.model(torch.tensor([ids]))
    for layer, name in enumerate(traced):
        assert data["layers"][layer]["name"] == name
        for head in range(2):
            gap = page_weights(data, layer, head) - traced[name].weights[0, head].numpy()
            assert np.abs(gap).max() <= TOLERANCE


def test_view_selects_layers_and_heads_and_truncates(speaker: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "long.txt", tmp_path / "page.html"
    text.write_text(TEXT * 5)
    code, said, err = lines_of("view", speaker, "--file", text, "--layer", 1, "--head", 0, "--out", out)
    assert code == 0
    assert err == ["the first 16 of 90 tokens, the model's limit"]
    assert said[0].endswith("1 layers, 1 heads)")
    data = Page.open(out).data
    assert data["title"] == "run: Speak, speak. All:Speak, speak. All:Speak, speak. All:Speak,"
    assert [head["head"] for head in data["layers"][0]["heads"]] == [0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "view: --text or --file must be given, one of the two; got neither."),
        (["--text", ""], "view: text must have at least one token"),
        (["--text", "Speak", "--head", "5"], "view: heads must lie from 0 to 1; got 5."),
        (["--text", "Speak", "--layer", "7"], "trace: layers must be one of 0"),
        (["--file", "none.txt"], "view: none.txt must be a readable file; got No such file or directory."),
    ],
)
def test_view_errors_are_one_line(speaker: Path, words: list[str], says: str) -> None:
    code, out, err = lines_of("view", speaker, *words)
    assert (code, out, len(err)) == (2, [], 1)
    assert err[0].startswith(says)


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    code, _, err = lines_of("view", tmp_path, "--text", "a")
    assert code == 2
    assert err[0].startswith("view: ")
    assert lines_of("view", tmp_path, "--text", "a", "--out", tmp_path)[2][0].startswith("view: --out must be a file")


def test_hugging_face_folder_is_viewed(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="clearhead[hf] is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="clearhead[hf] is not installed")
    folder, words = tmp_path / "model", ["[UNK]", "a", "cold", "film"]
    config = transformers.GPT2Config(vocab_size=4, n_embd=16, n_layer=2, n_head=2, n_positions=12)
    torch.manual_seed(0)
    transformers.GPT2Model(config).save_pretrained(folder)
    level = tokenizers.models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(level)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    out = tmp_path / "page.html"
    code, _, err = lines_of("view", folder, "--text", "a cold film", "--out", out)
    assert (code, err) == (0, [])
    data = dict(Page.open(out).data)
    assert data["texts"] == [["a", "cold", "film"]]
    assert len(data["layers"]) == 2
    weights = page_weights(data, 1, 1)
    assert np.allclose(weights.sum(axis=1), 1, atol=1e-3)
    assert np.allclose(np.triu(weights, 1), 0)


def test_earlier_page_is_rewritten_with_this_viewer(tmp_path: Path) -> None:
    old = Path(__file__).parent.parent / "inspector" / "version_1.json"
    page, out = tmp_path / "old.html", tmp_path / "new.html"
    remaining = json.dumps(json.loads(old.read_text())["page"])
    page.write_text(f'<script type="application/json" id="data">{remaining}</script>')
    code, said, err = lines_of("view", page, "--out", out, "--title", "Again")
    assert (code, err) == (0, [])
    assert said[0].startswith(f"wrote {out}: Page('Again', ")
    assert Page.open(out).data["layers"] == Page.open(page).data["layers"]


@pytest.mark.parametrize(
    ("content", "words", "says"),
    [
        ("no page", [], "Page.open: "),
        (
            "no page",
            ["--text", "a"],
            "view: --text must be left out with a page; got 'a'. A page already contains its text and layers.",
        ),
        ("no page", ["--head", "1"], "view: --head must be left out with a page; got [1]."),
    ],
)
def test_file_that_is_no_page_is_refused(content: str, words: list[str], says: str, tmp_path: Path) -> None:
    file = tmp_path / "some.html"
    file.write_text(content)
    code, out, err = lines_of("view", file, *words, "--out", tmp_path / "new.html")
    assert (code, out, len(err)) == (2, [], 1)
    assert err[0].startswith(says)
    assert not (tmp_path / "new.html").exists()
