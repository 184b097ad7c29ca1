"""The tab "Your model" against the library: predictions, edits, pages and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.errors import ClearheadError
from clearhead.lab import example
from clearhead.lab.work import Cancelled
from clearhead.readers import Reader, reader_of
from tests.inspector.sample import TOLERANCE, page_weights
from tests.lab.asking import BARE, BERT, CLASSES, FILMS, GPT2, PLAY, TEXT, Asking, model_folders

pytest.importorskip("safetensors", reason="needs the extra 'train'")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return model_folders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def ask(folders: list[Path]) -> Asking:
    return Asking(folders)


@pytest.fixture(scope="module")
def play(folders: list[Path]) -> Reader:
    return reader_of("test", folders[0])


def ids_of(reader: Reader, text: str) -> torch.Tensor:
    return torch.tensor([reader.framed(reader.encode(text))])


def chances(logits: torch.Tensor) -> torch.Tensor:
    return logits.double().softmax(-1)


def probabilities_before(answer: Any) -> dict[str, float]:
    return {row["text"]: row["before"] for row in answer["said"]["rows"]}


def probabilities_after(answer: Any) -> dict[str, float]:
    return {row["text"]: row["after"] for row in answer["said"]["rows"]}


def test_models_are_the_example_and_the_folders(ask: Asking, folders: list[Path]) -> None:
    listed = ask("models")["models"]
    assert [each["name"] for each in listed] == [example.NAME, *(folder.name for folder in folders)]


def test_look_gives_the_prediction_of_the_model(ask: Asking, play: Reader) -> None:
    answer = ask("look", model=PLAY, text=TEXT[PLAY])
    assert answer["tokens"] == list(TEXT[PLAY])
    assert answer["layers"] == [{"name": f"decoder.blocks.{layer}.attention", "heads": 2} for layer in range(2)]
    with torch.no_grad():
        exact = chances(play.model(ids_of(play, TEXT[PLAY]))[0, -1])
    top = exact.topk(10)
    said = probabilities_before(answer)
    assert list(said) == play.words(top.indices.tolist())
    assert list(said.values()) == pytest.approx(top.values.tolist(), abs=1e-7)
    assert all(row["after"] is None for row in answer["said"]["rows"])


def test_look_shows_every_weight_of_the_model(ask: Asking, play: Reader) -> None:
    data = ask.page(ask("look", model=PLAY, text=TEXT[PLAY])["view"])
    with torch.no_grad(), ch.trace(play.model) as traced:
        play.model(ids_of(play, TEXT[PLAY]))
    assert [layer["name"] for layer in data["layers"]] == list(traced)
    assert data["texts"] == [list(TEXT[PLAY])]
    for place, name in enumerate(traced):
        for head in range(2):
            gap = page_weights(data, place, head) - traced[name].weights[0, head].numpy()
            assert np.abs(gap).max() <= TOLERANCE


def test_layers_are_selected_by_number(ask: Asking) -> None:
    data = ask.page(ask("look", model=PLAY, text="Speak", layers=[1])["view"])
    assert [layer["name"] for layer in data["layers"]] == ["decoder.blocks.1.attention"]


@pytest.mark.parametrize("place", [0, 3])
def test_prediction_is_at_the_requested_token(ask: Asking, play: Reader, place: int) -> None:
    answer = ask("look", model=PLAY, text=TEXT[PLAY], place=place)
    with torch.no_grad():
        exact = chances(play.model(ids_of(play, TEXT[PLAY]))[0, place])
    assert next(iter(probabilities_before(answer).values())) == pytest.approx(float(exact.max()), abs=1e-7)
    assert (answer["place"], answer["said"]["at"]) == (place, TEXT[PLAY][place])


def test_heads_off_and_temperature_equal_trace(ask: Asking, play: Reader) -> None:
    edits = [{"layer": 0, "off": [1]}, {"layer": 1, "temperature": 0.25, "off": []}]
    answer = ask("edit", model=PLAY, text=TEXT[PLAY], edits=edits)
    with torch.no_grad(), ch.trace(play.model) as traced:
        traced.switch_off(1, layers=0)
        traced.temperature(0.25, layers=1)
        exact = chances(play.model(ids_of(play, TEXT[PLAY]))[0, -1])
    said = probabilities_after(answer)
    for text, chance in said.items():
        assert chance == pytest.approx(float(exact[play.encode(text)[0]]), abs=1e-7)
    with torch.no_grad():
        plain = chances(play.model(ids_of(play, TEXT[PLAY]))[0, -1])
    assert answer["said"]["moved"] == pytest.approx(float((plain - exact).abs().sum() / 2), abs=1e-7)
    assert answer["said"]["moved"] > 1e-3


@pytest.mark.parametrize(
    ("mask", "equivalent"),
    [
        ({"mask": "window", "reach": 2}, ch.Window(2, 2)),
        ({"mask": "window", "reach": 0}, ch.Window(0)),
        ({"mask": "causal"}, ch.Causal()),
    ],
)
@pytest.mark.parametrize("model", [PLAY, FILMS])
def test_edited_masks_equal_masks_passed_to_the_model(
    ask: Asking, folders: list[Path], model: int, mask: dict[str, Any], equivalent: ch.Causal
) -> None:
    reader = reader_of("test", folders[model - 1])
    layers = ask("edit", model=model, text=TEXT[model])["layers"]
    edits = [{"layer": layer, **mask} for layer in range(len(layers))]
    answer = ask("edit", model=model, text=TEXT[model], edits=edits)
    with torch.no_grad():
        logits = reader.model(ids_of(reader, TEXT[model]), mask=equivalent)
    exact = sorted(chances(logits[0, -1] if logits.ndim == 3 else logits[0]).tolist(), reverse=True)
    assert max(probabilities_after(answer).values()) == pytest.approx(exact[0], abs=1e-6)
    plain = probabilities_before(answer)
    assert (answer["said"]["moved"] > 0) == (plain != probabilities_after(answer))


def test_removing_the_mask_changes_earlier_tokens(ask: Asking) -> None:
    last, first = ({"layer": layer, "mask": "none"} for layer in (1, 0))
    # The last token attends to all others anyway; their states change only if an earlier layer has no mask.
    assert ask("edit", model=PLAY, text=TEXT[PLAY], edits=[last])["said"]["moved"] < 1e-6
    assert ask("edit", model=PLAY, text=TEXT[PLAY], edits=[first])["said"]["moved"] > 1e-4


def test_empty_edits_change_nothing(ask: Asking) -> None:
    for model, text in TEXT.items():
        edits = [{"layer": 0, "off": [], "temperature": 1, "mask": "own"}]
        assert ask("edit", model=model, text=text, edits=edits)["said"]["moved"] == 0.0


def test_compare_shows_both_runs(ask: Asking, play: Reader) -> None:
    edits = [{"layer": 0, "mask": "window", "reach": 1, "temperature": 2.0}]
    data = ask.page(ask("compare", model=PLAY, text=TEXT[PLAY], edits=edits)["view"])
    names = [layer["name"] for layer in data["layers"]]
    assert names == [f"{run}: decoder.blocks.{layer}.attention" for run in ("before", "after") for layer in range(2)]
    with torch.no_grad(), ch.trace(play.model) as plain:
        play.model(ids_of(play, TEXT[PLAY]))
    first = plain[0]
    changed = ch.observe_attention(
        first.query / 2, first.key, first.value, want=ch.Want(rows=list(range(9))), mask=ch.Causal() & ch.Window(1, 1)
    ).rows
    assert changed is not None
    for head in range(2):
        assert np.abs(page_weights(data, 0, head) - first.weights[0, head].numpy()).max() <= TOLERANCE
        assert np.abs(page_weights(data, 2, head) - changed[0, head].numpy()).max() <= TOLERANCE


def test_classifier_gives_its_classes(ask: Asking, folders: list[Path]) -> None:
    from clearhead.train.saved import load_run

    label, exact = load_run(folders[FILMS - 1]).predict([TEXT[FILMS]])[0]
    answer = ask("look", model=FILMS, text=TEXT[FILMS])
    assert answer["said"]["kind"] == "class"
    said = probabilities_before(answer)
    assert max(said, key=lambda name: said[name]) == label
    assert list(said.values()) == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize(
    ("model", "kind", "head"),
    [
        (BERT, "mask", "BertForMaskedLM"),
        (GPT2, "next", "GPT2LMHeadModel"),
        (CLASSES, "class", "BertForSequenceClassification"),
    ],
)
def test_transformers_model_uses_its_head(ask: Asking, folders: list[Path], model: int, kind: str, head: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")
    answer = ask("look", model=model, text=TEXT[model])
    assert answer["said"]["kind"] == kind
    folder = folders[model - 1]
    whole = getattr(transformers, head).from_pretrained(folder).eval()
    ids = transformers.AutoTokenizer.from_pretrained(folder)(TEXT[model], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = whole(ids).logits[0]
    row = logits if kind == "class" else logits[answer["place"]]
    said = list(probabilities_before(answer).values())
    assert said[0] == pytest.approx(float(chances(row)[0 if kind == "class" else row.argmax()]), abs=1e-5)
    if kind == "mask":
        assert (answer["mask"], answer["said"]["at"]) == ("[MASK]", "[MASK]")
    if kind == "class":
        assert list(probabilities_before(answer)) == ["good", "bad", "odd"]


def test_model_without_a_head_gives_changed_states(ask: Asking, folders: list[Path]) -> None:
    assert ask("look", model=BARE, text=TEXT[BARE])["said"] == {"kind": "states", "moved": None, "rows": []}
    answer = ask("edit", model=BARE, text=TEXT[BARE], edits=[{"layer": 1, "off": [0]}])
    reader = reader_of("test", folders[BARE - 1])
    ids = ids_of(reader, TEXT[BARE])
    with torch.no_grad():
        plain = reader.model(ids).last_hidden_state[0].double()
        with ch.trace(reader.model) as traced:
            traced.switch_off(0, layers=1)
            moved = reader.model(ids).last_hidden_state[0].double()
    far = (moved - plain).norm(dim=-1) / plain.norm(dim=-1)
    rows = answer["said"]["rows"]
    assert [row["moved"] for row in rows] == pytest.approx(far.sort(descending=True).values.tolist(), rel=1e-5)
    assert [row["place"] for row in rows] == far.argsort(descending=True).tolist()
    assert answer["said"]["moved"] == pytest.approx(float((moved - plain).norm() / plain.norm()), rel=1e-5)


def test_text_beyond_the_context_is_truncated_with_a_note(ask: Asking) -> None:
    answer = ask("look", model=PLAY, text="Speak, " * 10)
    assert len(answer["tokens"]) == 24
    assert answer["note"] == "the first 24 of 70 tokens, the model's context length"


@pytest.mark.slow
def test_example_has_learned_agreement(ready_example: Reader) -> None:
    ask = Asking([])
    one, many = {"sleeps", "sings", "waits", "runs"}, {"sleep", "sing", "wait", "run"}

    def share(said: dict[str, float], of: set[str]) -> float:
        return sum(chance for text, chance in said.items() if text in of)

    for subject, right, wrong in (("birds", many, one), ("bird", one, many)):
        for other in ("fox", "foxes"):
            answer = ask("look", model=0, text=f"the old {subject} behind the {other} beside the {other}")
            assert share(probabilities_before(answer), right) > 0.6, (subject, other)
            assert share(probabilities_before(answer), wrong) < 0.3, (subject, other)
    # Without the relevant head, the nearer noun has more influence.
    losses = []
    for head in range(4):
        edits = [{"layer": 0, "off": [head]}]
        answer = ask("edit", model=0, text="the old birds behind the fox beside the fox", edits=edits)
        losses.append(share(probabilities_before(answer), many) - share(probabilities_after(answer), many))
    assert max(losses) > 0.4


@pytest.mark.slow
def test_example_lists_its_vocabulary(ready_example: Reader) -> None:
    with pytest.raises(
        ClearheadError, match=r"must have only words in the vocabulary of the small example .*got 'zebra'\."
    ):
        Asking([])("look", model=0, text="the zebra sleeps")


def test_training_the_example_can_be_cancelled() -> None:
    class Ends:
        steps = 0

        def step(self, done: float, text: str = "") -> None:
            self.steps += 1
            if self.steps == 5:
                raise Cancelled

    ticket = Ends()
    with pytest.raises(Cancelled):
        example.made(ticket)
    assert ticket.steps == 5


def test_job_can_be_cancelled_between_layers(folders: list[Path]) -> None:
    ask = Asking(folders)
    ask("look", model=PLAY, text="Speak")
    said: list[str] = []

    class Ends:
        def step(self, done: float, text: str = "") -> None:
            said.append(text)
            if text == "writing the page, layer 2 of 2":
                raise Cancelled

    with pytest.raises(Cancelled):
        ask.works["look"].run({"model": PLAY, "text": "Speak"}, Ends())
    assert said[:2] == ["running the model, layer 1", "running the model, layer 2"]
    assert len(ask.views) == 1
    # A cancelled job leaves no state.
    assert ask("edit", model=PLAY, text="Speak", edits=[])["said"]["moved"] == 0.0
