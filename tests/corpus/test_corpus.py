"""Figures of a corpus are the same bits with any number of ranks and after any interruption."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import clearhead as ch
from clearhead.corpus import CorpusOptions, CorpusProgress, CorpusSummary, observe_corpus
from clearhead.distributed.launch import RankError, run_ranks
from clearhead.errors import DataError, ShapeError
from clearhead.observe import head_scores
from clearhead.ops.library import isa_name
from clearhead.readers import reader_of
from clearhead.train import LanguageOptions, load_run, train_text_language_model
from clearhead.train.lock import one_writer
from tests.commands import called
from tests.corpus import jobs

TEXT = "All:\nSpeak, speak.\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("play")
    (folder / "play.txt").write_text(TEXT * 40)
    sizes = {"embed_dim": 16, "num_heads": 2, "num_layers": 2, "context": 16}
    options = LanguageOptions(steps=1, eval_every=1, **sizes)
    train_text_language_model(folder / "play.txt", out=folder / "run", options=options)
    return folder / "run"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of ten blocks, with texts of 1 to 57 characters; the model's limit is 16."""
    path, draw = tmp_path_factory.mktemp("texts") / "texts.jsonl", random.Random(0)
    texts = [(TEXT * 3)[: draw.choice([1, 4, 16, 40, 57])] for _ in range(300)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def alone(model: Path, data: Path) -> dict[str, Any]:
    """The summary of one process."""
    return observe_corpus(model, data).to_dict()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_ranks_gives_the_same_bits(
    model: Path, data: Path, alone: dict[str, Any], tmp_path: Path, ranks: int
) -> None:
    results = run_ranks(jobs.figures, ranks, model, data, tmp_path / "out", threads=torch.get_num_threads())
    assert [summary for summary, _ in results] == [alone] * ranks
    written = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert written == json.loads(json.dumps(alone))


@pytest.mark.slow
@pytest.mark.usefixtures("_threads_as_before")
@pytest.mark.skipif(isa_name() is None, reason="torch's kernels may round by the number of threads")
def test_the_number_of_threads_has_no_influence(model: Path, data: Path, alone: dict[str, Any]) -> None:
    torch.set_num_threads(3 if torch.get_num_threads() != 3 else 2)
    assert observe_corpus(model, data).to_dict() == alone


def test_figures_are_those_of_observe_and_head_scores(model: Path, tmp_path: Path) -> None:
    texts = [TEXT[:12], TEXT[2:9], (TEXT * 2)[:24]]
    (tmp_path / "t.txt").write_text("\n".join(text.replace("\n", " ") for text in texts))
    summary = observe_corpus(model, tmp_path / "t.txt")
    assert (summary.texts, summary.tokens, summary.parts) == (3, 43, 4)
    assert (summary.longest, summary.longest_line) == (24, 3)
    run = load_run(model)
    ids = [run.tokenizer.encode_long(text.replace("\n", " ")) for text in texts]
    parts = [ids[0], ids[1], ids[2][:16], ids[2][16:]]
    sums: dict[str, float] = dict.fromkeys(("entropy", "distance", "first", "previous", "same"), 0.0)
    for part in parts:
        want = ch.Want(entropy=True, distance=True, sink=1)
        with torch.no_grad(), ch.observe(run.model, want) as observed, ch.trace(run.model) as traced:
            run.model(torch.tensor([part]))
        record, scores = observed[1], head_scores(traced[1])
        assert record.entropy is not None
        assert record.distance is not None
        assert record.sink is not None
        for name, value in (("entropy", record.entropy), ("distance", record.distance), ("first", record.sink)):
            sums[name] += float(value[0, 1].double().sum())
        sums["previous"] += float(scores.previous[0, 1]) * (len(part) - 1)
        sums["same"] += float(scores.same[0, 1]) * (len(part) - 1)
    head = summary.heads[3]
    assert (head.layer, head.head) == ("decoder.blocks.1.attention", 1)
    for name, value in sums.items():
        count = 43 - 4 * (name in ("previous", "same"))
        assert getattr(head, name) == pytest.approx(value / count, rel=1e-6), name
    assert head.following == 0.0
    assert all(error is not None and error >= 0 for error in head.errors.values())


@pytest.mark.slow
def test_a_killed_job_goes_on_with_other_ranks(model: Path, data: Path, alone: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(RankError, match=r"rank [01] died"):
        run_ranks(jobs.killed, 2, model, data, out)
    saved = sorted(path.name for path in (out / "state").iterdir())
    assert saved
    assert not (out / "summary.json").exists()
    results = run_ranks(jobs.figures, 3, model, data, out, threads=torch.get_num_threads())
    assert [summary for summary, _ in results] == [alone] * 3
    # Two blocks of 32 rows were saved, so the first report of this run is of the third at the earliest.
    assert results[0][1] > 64
    assert sorted(path.name for path in out.iterdir()) == ["corpus.json", "summary.json", "summary.txt"]


@pytest.fixture
def stopped(model: Path, data: Path, tmp_path: Path) -> Path:
    """The folder of a job that was interrupted after its second block, with figures per text."""

    def stop(shown: CorpusProgress) -> None:
        if shown.step >= 128:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        observe_corpus(model, data, out=tmp_path / "out", options=CorpusOptions(per_text=True), progress=stop)
    return tmp_path / "out"


@pytest.mark.slow
def test_an_interrupted_job_goes_on_and_ends_with_every_text(
    model: Path, data: Path, alone: dict[str, Any], stopped: Path
) -> None:
    half = stopped / "state" / ".half-written-1"
    half.write_bytes(b"{")
    code, out, err = called("observe", model, "--data", data, "--out", stopped, "--per-text")
    assert (code, err) == (0, ["going on after 128 of 300 texts", f"wrote {stopped}"])
    assert json.loads((stopped / "summary.json").read_text())["heads"] == json.loads(json.dumps(alone["heads"]))
    assert (stopped / "summary.txt").read_text() == out
    lines = [json.loads(line) for line in (stopped / "texts.jsonl").read_text().splitlines()]
    assert [line["line"] for line in lines] == list(range(1, 301))
    layer = "decoder.blocks.0.attention"
    total = sum(line["layers"][layer]["entropy"][0] * line["tokens"] for line in lines)
    assert alone["heads"][0]["entropy"] == pytest.approx(total / alone["tokens"], rel=1e-12)
    code, repeated, err = called("observe", model, "--data", data, "--out", stopped, "--per-text")
    assert (code, repeated, err[0]) == (0, out, "this corpus has already been read")


@pytest.mark.slow
def test_ranks_files_that_the_base_has_count_once(
    model: Path, data: Path, alone: dict[str, Any], stopped: Path
) -> None:
    """As a run leaves them that is killed between writing the base and removing the ranks' files."""
    state = stopped / "state"
    (state / "base.json").write_bytes((state / "rank-0.json").read_bytes())
    options = CorpusOptions(per_text=True)
    assert observe_corpus(model, data, out=stopped, options=options).to_dict() == alone


def test_a_folder_of_another_job_is_refused(model: Path, data: Path, stopped: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "All:"}\n')
    for words, expected in (
        (
            ("--data", other, "--per-text"),
            f"{stopped} must be continued with the same model, data and options; got data",
        ),
        (("--data", data), "got per_text False instead of True"),
        (("--data", data, "--per-text", "--layer", "1"), "got layers [1] instead of None"),
        (("--data", data, "--per-text", "--chunk", "8"), "got chunk 8 instead of None"),
    ):
        code, out, err = called("observe", model, *words, "--out", stopped)
        assert (code, out, len(err)) == (2, "", 1), err
        assert expected in err[0]
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    code, _, err = called("observe", model, "--data", data, "--out", tmp_path / "foreign")
    assert (code, len(err)) == (2, 1)
    assert "must be a new or empty folder; got a folder with other files" in err[0]
    with one_writer(stopped, function="test", say=print):
        code, _, err = called("observe", model, "--data", data, "--per-text", "--out", stopped)
    assert (code, len(err)) == (2, 1)
    assert "must have one writer at a time" in err[0]


def test_bad_rows_raise_with_their_line_or_are_counted(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = ['{"text": "All:"}', '{"text": "Speak #"}', '{"text": ""}', '{"text": 1.5}', "{", '{"text": "Speak"}']
    for bad, words in (
        (rows[1], "line 2: text must have only characters of the training text; got '#'"),
        (rows[2], "text in line 2 must have at least one token; got none"),
        (rows[3], "must have text in the column 'text'; got float in line 2"),
        (rows[4], "must be JSON lines; got Expecting property name enclosed in double quotes in line 2"),
    ):
        path.write_text(f"{rows[0]}\n{bad}\n")
        code, out, err = called("observe", model, "--data", path)
        assert (code, out, len(err)) == (2, "", 1)
        assert words in err[0]
    path.write_text("\n".join(rows))
    summary = observe_corpus(model, path, options=CorpusOptions(skip_bad=True))
    assert (summary.texts, summary.bad) == (2, 4)
    assert summary.first_bad is not None
    assert "line 2" in summary.first_bad
    assert "skipped 4 rows; the first: observe_corpus: line 2" in str(summary)


def test_every_rank_raises_the_error_of_one(model: Path, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    # The bad text is in the second block, which the second rank reads.
    path.write_text(data.read_text() + '{"text": "#"}\n')
    errors = run_ranks(jobs.error, 2, model, path, tmp_path / "out")
    assert errors[0] == errors[1]
    assert "line 301: text must have only characters of the training text" in errors[0]
    errors = run_ranks(jobs.error, 2, model, tmp_path / "none.txt")
    assert errors[0] == errors[1]
    assert "none.txt must be a readable file" in errors[0]


def test_what_cannot_be_read_is_refused(model: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.csv").write_text("text\n")
    for name in ("empty.jsonl", "empty.txt", "blank.csv"):
        with pytest.raises(DataError, match=f"{name} must have at least one text; got none"):
            observe_corpus(model, tmp_path / name)
    (tmp_path / "bad.txt").write_text("#\n")
    with pytest.raises(DataError, match="must have at least one text that the model reads"):
        observe_corpus(model, tmp_path / "bad.txt", options=CorpusOptions(skip_bad=True))
    with pytest.raises(ShapeError, match="layers must be one of"):
        observe_corpus(model, data, options=CorpusOptions(layers=9))
    with pytest.raises(ShapeError, match="chunk must lie from 1 to 16, the model's limit; got 17"):
        observe_corpus(model, data, options=CorpusOptions(chunk=17))
    with pytest.raises(DataError, match="out must be given with figures per text"):
        observe_corpus(model, data, options=CorpusOptions(per_text=True))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--text", "All"), "--text must be left out with --data; got All"),
        (("--edges", "3"), "--edges must be left out with --data"),
        (("--text-column", "other"), "must have the column 'other'; got the columns 'text' in line 1"),
    ],
)
def test_options_of_the_other_kind_are_refused(model: Path, data: Path, words: tuple[str, ...], expected: str) -> None:
    code, out, err = called("observe", model, "--data", data, *words)
    assert (code, out, len(err)) == (2, "", 1)
    assert expected in err[0]


def test_options_of_a_corpus_need_data(model: Path, tmp_path: Path) -> None:
    for words in (("--out", tmp_path / "out"), ("--skip-bad",), ("--per-text",)):
        code, _, err = called("observe", model, "--text", "All:", *words)
        assert (code, len(err)) == (2, 1)
        assert f"{words[0]} must be left out without --data" in err[0]


def test_standard_input_is_json_lines_of_one_process(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = b'{"text": "All:"}\n{"text": "Speak"}\n'
    code, out, _ = called("observe", model, "--data", "-", "--json", "-", stdin=rows)
    assert code == 0
    read = json.loads(out)
    assert (read["texts"], read["tokens"], read["data"]) == (2, 9, "standard input")
    assert CorpusSummary.from_dict(read).to_dict() == read
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    code, _, err = called("observe", model, "--text", "All:")
    assert (code, len(err)) == (2, 1)
    assert "--data must be given for several processes" in err[0]


def test_a_text_on_which_the_model_gives_nan_is_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = reader_of("test", model)
    place = reader.encode("k")[0]
    with torch.no_grad():
        reader.model.get_parameter(next(name for name, _ in reader.model.named_parameters()))[place] = torch.nan
    monkeypatch.setattr("clearhead.corpus.run.reader_of", lambda *_: reader)
    (tmp_path / "t.txt").write_text("All:\nSpeak\n")
    with pytest.raises(DataError, match="text in line 2 must give finite weights of attention; got NaN or infinity"):
        observe_corpus(model, tmp_path / "t.txt")
    summary = observe_corpus(model, tmp_path / "t.txt", options=CorpusOptions(skip_bad=True))
    assert (summary.texts, summary.bad) == (1, 1)
