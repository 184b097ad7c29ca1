"""clearhead observe from outside: the table, the files, long texts in parts, and what it refuses."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.commands import called

import clearhead as ch
from clearhead.train.saved import load_run

SIZES = ["--embed-dim", "16", "--num-heads", "2", "--num-layers", "2"]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("films")
    rows = ["good,a fine and warm film", "poor,a dull and cold film"] * 10
    (folder / "films.csv").write_text("\n".join(["label,text", *rows]) + "\n")
    sizes = [*SIZES, "--max-len", 16]
    code, _, _ = called(
        "train", "classify", "--data", folder / "films.csv", "--out", folder / "run", "--epochs", 1, *sizes
    )
    assert code == 0
    return folder / "run"


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("play")
    (folder / "play.txt").write_text("All:\nSpeak, speak.\n" * 40)
    code, _, _ = called(
        "train", "lm", "--data", folder / "play.txt", "--out", folder / "run", "--steps", 2, "--eval-every", 2,
        "--context", 16, *SIZES,
    )  # fmt: skip
    assert code == 0
    return folder / "run"


def test_observe_prints_the_statistics_of_each_head(classifier: Path) -> None:
    text = "a fine and cold film"
    code, out, err = called("observe", classifier, "--text", text)
    assert (code, err) == (0, [])
    lines = out.splitlines()
    assert lines[0] == f"{classifier}: 5 tokens"
    assert lines[1].split() == ["layer", "head", "entropy", "distance", "first", "strongest", "edges"]
    assert [line.split()[:2] for line in lines[2:]] == [
        [f"encoder.blocks.{layer}.attention", str(head)] for layer in range(2) for head in range(2)
    ]
    run = load_run(classifier)
    with (
        torch.no_grad(),
        ch.observe(run.model, ch.Want(entropy=True, distance=True, sink=1, rows=range(5))) as observed,
    ):
        run.model(torch.tensor([run.encode(text)]))
    for place, line in enumerate(lines[2:]):
        layer, head = observed[place // 2], place % 2
        assert layer.entropy is not None
        assert layer.distance is not None
        assert layer.sink is not None
        assert layer.rows is not None
        numbers = [f"{layer.entropy[0, head].mean():.2f}", f"{layer.distance[0, head].mean():.1f}"]
        assert line.split()[2:5] == [*numbers, f"{layer.sink[0, head].mean():.2f}"]
        weight, pair = layer.rows[0, head, 1:].flatten().max(dim=0)
        words = text.split()
        assert f"{words[int(pair) // 5 + 1]} > {words[int(pair) % 5]} {weight:.2f}" in line


def test_long_file_is_read_in_parts(speaker: Path, tmp_path: Path) -> None:
    text, out_json, out_tensors = tmp_path / "long.txt", tmp_path / "new" / "heads.json", tmp_path / "all.safetensors"
    text.write_text("Speak, speak.\nAll:\n" * 2)
    arguments = ("--file", text, "--json", out_json, "--safetensors", out_tensors, "--edges", 4)
    code, out, err = called("observe", speaker, *arguments)
    assert code == 0
    assert out.splitlines()[0] == (
        f"{speaker}: 38 tokens in 3 parts of at most 16, the model's limit; no edge goes from part to part"
    )
    assert err == [f"wrote {out_json}", f"wrote {out_tensors}"]
    read = json.loads(out_json.read_text())
    assert read["read"] == out.splitlines()[0]
    assert "".join(read["tokens"]) == text.read_text()
    from clearhead.train.files import read_tensors

    tensors, note = read_tensors(out_tensors, function="test")
    assert note["read"] == read["read"]
    assert len(read["heads"]) == 4
    for head in read["heads"]:
        name, place = head["layer"], head["head"]
        entropy = tensors[f"{name}.entropy"][place]
        assert entropy.shape == (38,)
        assert head["entropy"] == pytest.approx(float(entropy.double().mean()), abs=1e-6)
        assert head["first"] == pytest.approx(float(tensors[f"{name}.sink"][place].double().mean()), abs=1e-6)
        indices, weights = tensors[f"{name}.top_indices"][place], tensors[f"{name}.top_weights"][place]
        assert indices.shape == weights.shape == (38, 4)
        for query in range(38):
            # Keys of its own part alone, counted from the start of the text.
            assert query // 16 * 16 <= int(indices[query, 0]) <= query
        strongest = [float(weights[query].max()) for query in range(38) if query % 16]
        edges = head["edges"]
        assert [pair["weight"] for pair in edges] == sorted((pair["weight"] for pair in edges), reverse=True)
        assert edges[0]["weight"] == pytest.approx(max(strongest))
        assert float(tensors[f"{name}.received"][place].sum()) == pytest.approx(38, abs=1e-3)
    run = load_run(speaker)
    ids = run.tokenizer.encode_long(text.read_text())
    with torch.no_grad(), ch.observe(run.model, ch.Want(entropy=True)) as observed:
        run.model(torch.tensor([ids[16:32]]))
    name = read["heads"][0]["layer"]
    entropy = observed[name].entropy
    assert entropy is not None
    torch.testing.assert_close(tensors[f"{name}.entropy"][:, 16:32], entropy[0], rtol=1e-4, atol=1e-5)


def test_chunk_and_layer_options(speaker: Path) -> None:
    code, out, _ = called("observe", speaker, "--text", "Speak, speak.", "--chunk", 5, "--layer", 1, "--json", "-")
    assert code == 0
    read = json.loads(out)
    assert "13 tokens in 3 parts of at most 5, as --chunk says" in read["read"]
    assert {head["layer"] for head in read["heads"]} == {"decoder.blocks.1.attention"}
    assert all(pair["query"] % 5 > 0 for head in read["heads"] for pair in head["edges"])


def test_one_token_has_no_edges(classifier: Path) -> None:
    code, out, _ = called("observe", classifier, "--text", "film")
    assert code == 0
    assert out.splitlines()[0].endswith(": 1 token")
    assert out.splitlines()[2].split()[2:] == ["0.00", "0.0", "1.00"]


def test_observe_help_shows_an_example() -> None:
    code, out, _ = called("observe", "--help")
    assert code == 0
    for words in ("entropy", "strongest edges", "clearhead observe runs/plays --file plays.txt", "--safetensors"):
        assert words in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--text, --file or --data must be given, one of the three; got none"),
        (("--text", "film", "--file", "x.txt"), "got both"),
        (("--file", "no/such.txt"), "no/such.txt must be a readable file; got No such file or directory"),
        (("--text", ""), "text must have at least one token"),
        (("--text", "film", "--layer", "2"), "layers must be one of 0 (encoder.blocks.0.attention), 1 (encoder."),
        (("--text", "film", "--layer", "*.9.*"), "got '*.9.*'"),
        (("--text", "film", "--edges", "0"), "--edges must be at least 1; got 0"),
        (("--text", "film", "--chunk", "17"), "--chunk must lie from 1 to 16, the model's limit; got 17"),
        (("--text", "film", "--json", "."), "--json must be a file; got the folder ."),
        (("--text", "film", "--safetensors", "/proc/none/x"), "must be writable"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(classifier: Path, arguments: tuple[str, ...], words: str) -> None:
    code, out, err = called("observe", classifier, *arguments)
    assert (code, out, len(err)) == (2, "", 1), (code, out, err)
    assert words in err[0]


def test_folders_without_a_model_give_distinct_errors(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    # Libraries that it brings may write lines of their own when they are imported.
    import_module("clearhead.bridges.transformers")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    for arguments, words in (
        ((tmp_path / "nothing", "--text", "a"), "must be a run folder; got no such folder"),
        ((tmp_path / "nothing", "--file", tmp_path / "latin.txt"), "must be UTF-8; got byte 0xe9 in line 1"),
        ((tmp_path, "--text", "a"), "must hold a model and a tokenizer that transformers reads"),
    ):
        code, out, err = called("observe", *arguments)
        assert (code, out, len(err)) == (2, "", 1), (code, out, err)
        assert words in err[0]


def test_unknown_character_is_refused(speaker: Path) -> None:
    code, out, err = called("observe", speaker, "--text", "Speak #")
    assert (code, out, len(err)) == (2, "", 1)
    assert "must have only characters of the training text; got '#'" in err[0]


@pytest.fixture
def hugging_face(tmp_path: Path) -> Path:
    """A small untrained BERT in a folder, as from_pretrained takes it."""
    transformers: Any = pytest.importorskip("transformers")
    tokenizers: Any = pytest.importorskip("tokenizers")
    from clearhead.bridges import transformers as bridge
    from clearhead.observe import attention_layers

    vocabulary = {word: place for place, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "film", "fine"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]"
    ).save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=7,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
    )
    model = transformers.BertModel(config)
    model.save_pretrained(tmp_path)
    ch.swap(model)
    if not attention_layers(model):
        pytest.skip(f"{bridge.__name__} does not say yet which modules can be watched")
    return tmp_path


def test_hugging_face_folder_is_read_with_special_tokens(hugging_face: Path) -> None:
    code, out, _ = called("observe", hugging_face, "--text", "a fine film " * 3, "--json", "-")
    assert code == 0
    read = json.loads(out)
    assert "9 tokens in 2 parts of at most 6" in read["read"]
    assert read["tokens"] == [
        "[CLS]", "a", "fine", "film", "a", "fine", "film", "[SEP]", "[CLS]", "a", "fine", "film", "[SEP]",
    ]  # fmt: skip
    assert len(read["heads"]) == 4
    assert "attention" in read["heads"][0]["layer"]
