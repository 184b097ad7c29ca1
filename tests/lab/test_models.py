""" "Your model" against the library: what it says, under which edits, on which page, and what it refuses."""

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


def before(found: Any) -> dict[str, float]:
    return {row["text"]: row["before"] for row in found["said"]["rows"]}


def after(found: Any) -> dict[str, float]:
    return {row["text"]: row["after"] for row in found["said"]["rows"]}


def test_the_choices_are_the_example_and_the_folders_by_name(ask: Asking, folders: list[Path]) -> None:
    listed = ask("models")["models"]
    assert [each["name"] for each in listed] == [example.NAME, *(folder.name for folder in folders)]


def test_a_look_says_what_the_model_says(ask: Asking, play: Reader) -> None:
    found = ask("look", model=PLAY, text=TEXT[PLAY])
    assert found["tokens"] == list(TEXT[PLAY])
    assert found["layers"] == [{"name": f"decoder.blocks.{layer}.attention", "heads": 2} for layer in range(2)]
    with torch.no_grad():
        exact = chances(play.model(ids_of(play, TEXT[PLAY]))[0, -1])
    top = exact.topk(10)
    said = before(found)
    assert list(said) == play.words(top.indices.tolist())
    assert list(said.values()) == pytest.approx(top.values.tolist(), abs=1e-7)
    assert all(row["after"] is None for row in found["said"]["rows"])


def test_a_look_shows_every_weight_of_the_model(ask: Asking, play: Reader) -> None:
    data = ask.page(ask("look", model=PLAY, text=TEXT[PLAY])["view"])
    with torch.no_grad(), ch.trace(play.model) as traced:
        play.model(ids_of(play, TEXT[PLAY]))
    assert [layer["name"] for layer in data["layers"]] == list(traced)
    assert data["texts"] == [list(TEXT[PLAY])]
    for place, name in enumerate(traced):
        for head in range(2):
            gap = page_weights(data, place, head) - traced[name].weights[0, head].numpy()
            assert np.abs(gap).max() <= TOLERANCE


def test_layers_are_chosen_by_number(ask: Asking) -> None:
    data = ask.page(ask("look", model=PLAY, text="Speak", layers=[1])["view"])
    assert [layer["name"] for layer in data["layers"]] == ["decoder.blocks.1.attention"]


@pytest.mark.parametrize("place", [0, 3])
def test_the_prediction_is_shown_at_the_place_asked_for(ask: Asking, play: Reader, place: int) -> None:
    found = ask("look", model=PLAY, text=TEXT[PLAY], place=place)
    with torch.no_grad():
        exact = chances(play.model(ids_of(play, TEXT[PLAY]))[0, place])
    assert next(iter(before(found).values())) == pytest.approx(float(exact.max()), abs=1e-7)
    assert (found["place"], found["said"]["at"]) == (place, TEXT[PLAY][place])


def test_heads_off_and_temperature_are_those_of_trace(ask: Asking, play: Reader) -> None:
    edits = [{"layer": 0, "off": [1]}, {"layer": 1, "temperature": 0.25, "off": []}]
    found = ask("edit", model=PLAY, text=TEXT[PLAY], edits=edits)
    with torch.no_grad(), ch.trace(play.model) as traced:
        traced.switch_off(1, layers=0)
        traced.temperature(0.25, layers=1)
        exact = chances(play.model(ids_of(play, TEXT[PLAY]))[0, -1])
    said = after(found)
    for text, chance in said.items():
        assert chance == pytest.approx(float(exact[play.encode(text)[0]]), abs=1e-7)
    with torch.no_grad():
        plain = chances(play.model(ids_of(play, TEXT[PLAY]))[0, -1])
    assert found["said"]["moved"] == pytest.approx(float((plain - exact).abs().sum() / 2), abs=1e-7)
    assert found["said"]["moved"] > 1e-3


@pytest.mark.parametrize(
    ("mask", "own"),
    [
        ({"mask": "window", "reach": 2}, ch.Window(2, 2)),
        ({"mask": "window", "reach": 0}, ch.Window(0)),
        ({"mask": "causal"}, ch.Causal()),
    ],
)
@pytest.mark.parametrize("model", [PLAY, FILMS])
def test_masks_are_those_that_the_model_itself_can_be_given(
    ask: Asking, folders: list[Path], model: int, mask: dict[str, Any], own: ch.Causal
) -> None:
    reader = reader_of("test", folders[model - 1])
    layers = ask("edit", model=model, text=TEXT[model])["layers"]
    edits = [{"layer": layer, **mask} for layer in range(len(layers))]
    found = ask("edit", model=model, text=TEXT[model], edits=edits)
    with torch.no_grad():
        logits = reader.model(ids_of(reader, TEXT[model]), mask=own)
    exact = sorted(chances(logits[0, -1] if logits.ndim == 3 else logits[0]).tolist(), reverse=True)
    assert max(after(found).values()) == pytest.approx(exact[0], abs=1e-6)
    plain = before(found)
    assert (found["said"]["moved"] > 0) == (plain != after(found))


def test_without_a_mask_the_past_sees_the_future(ask: Asking) -> None:
    last, first = ({"layer": layer, "mask": "none"} for layer in (1, 0))
    # The last token sees all others anyway; what these are made of changes when the layer below is opened.
    assert ask("edit", model=PLAY, text=TEXT[PLAY], edits=[last])["said"]["moved"] < 1e-6
    assert ask("edit", model=PLAY, text=TEXT[PLAY], edits=[first])["said"]["moved"] > 1e-4


def test_no_edit_moves_nothing(ask: Asking) -> None:
    for model, text in TEXT.items():
        edits = [{"layer": 0, "off": [], "temperature": 1, "mask": "own"}]
        assert ask("edit", model=model, text=text, edits=edits)["said"]["moved"] == 0.0


def test_a_comparison_shows_both_runs(ask: Asking, play: Reader) -> None:
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


def test_a_classifier_names_its_classes(ask: Asking, folders: list[Path]) -> None:
    from clearhead.train.saved import load_run

    label, exact = load_run(folders[FILMS - 1]).predict([TEXT[FILMS]])[0]
    found = ask("look", model=FILMS, text=TEXT[FILMS])
    assert found["said"]["kind"] == "class"
    said = before(found)
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
def test_a_model_of_transformers_speaks_through_its_own_head(
    ask: Asking, folders: list[Path], model: int, kind: str, head: str
) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")
    found = ask("look", model=model, text=TEXT[model])
    assert found["said"]["kind"] == kind
    folder = folders[model - 1]
    whole = getattr(transformers, head).from_pretrained(folder).eval()
    ids = transformers.AutoTokenizer.from_pretrained(folder)(TEXT[model], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = whole(ids).logits[0]
    row = logits if kind == "class" else logits[found["place"]]
    said = list(before(found).values())
    assert said[0] == pytest.approx(float(chances(row)[0 if kind == "class" else row.argmax()]), abs=1e-5)
    if kind == "mask":
        assert (found["mask"], found["said"]["at"]) == ("[MASK]", "[MASK]")
    if kind == "class":
        assert list(before(found)) == ["good", "bad", "odd"]


def test_a_model_without_a_head_says_which_states_move(ask: Asking, folders: list[Path]) -> None:
    assert ask("look", model=BARE, text=TEXT[BARE])["said"] == {"kind": "states", "moved": None, "rows": []}
    found = ask("edit", model=BARE, text=TEXT[BARE], edits=[{"layer": 1, "off": [0]}])
    reader = reader_of("test", folders[BARE - 1])
    ids = ids_of(reader, TEXT[BARE])
    with torch.no_grad():
        plain = reader.model(ids).last_hidden_state[0].double()
        with ch.trace(reader.model) as traced:
            traced.switch_off(0, layers=1)
            moved = reader.model(ids).last_hidden_state[0].double()
    far = (moved - plain).norm(dim=-1) / plain.norm(dim=-1)
    rows = found["said"]["rows"]
    assert [row["moved"] for row in rows] == pytest.approx(far.sort(descending=True).values.tolist(), rel=1e-5)
    assert [row["place"] for row in rows] == far.argsort(descending=True).tolist()
    assert found["said"]["moved"] == pytest.approx(float((moved - plain).norm() / plain.norm()), rel=1e-5)


def test_a_text_longer_than_the_model_is_cut_and_said_to_be(ask: Asking) -> None:
    found = ask("look", model=PLAY, text="Speak, " * 10)
    assert len(found["tokens"]) == 24
    assert found["note"] == "the first 24 of 70 tokens, the most that the model reads at once"


def test_the_example_has_learned_which_verb_takes_an_s(ready_example: Reader) -> None:
    ask = Asking([])
    one, many = {"sleeps", "sings", "waits", "runs"}, {"sleep", "sing", "wait", "run"}

    def share(said: dict[str, float], of: set[str]) -> float:
        return sum(chance for text, chance in said.items() if text in of)

    for subject, right, wrong in (("birds", many, one), ("bird", one, many)):
        for other in ("fox", "foxes"):
            found = ask("look", model=0, text=f"the old {subject} behind the {other} beside the {other}")
            assert share(before(found), right) > 0.6, (subject, other)
            assert share(before(found), wrong) < 0.3, (subject, other)
    # Some head carries it: without it, the nearer noun has more of a say.
    losses = []
    for head in range(4):
        edits = [{"layer": 0, "off": [head]}]
        found = ask("edit", model=0, text="the old birds behind the fox beside the fox", edits=edits)
        losses.append(share(before(found), many) - share(after(found), many))
    assert max(losses) > 0.4


def test_the_example_says_which_words_it_knows(ready_example: Reader) -> None:
    with pytest.raises(ClearheadError, match=r"must have only words that the small example knows .*got 'zebra'\."):
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


def test_work_ends_between_layers(folders: list[Path]) -> None:
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
    # What was left in the middle leaves nothing behind.
    assert ask("edit", model=PLAY, text="Speak", edits=[])["said"]["moved"] == 0.0
