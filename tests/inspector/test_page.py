"""``view``: the page's weights are the library's, and what a page cannot show is refused."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.errors import ClearheadError, DataError, ShapeError, UnsupportedError
from clearhead.inspector import Page
from clearhead.inspector.arrays import unpack
from clearhead.inspector.schema import validate
from tests.inspector.sample import TOLERANCE, cases, page_weights

CASES = cases()
WORDS = ["one", "two", "three", "four", "five", "six"]


@pytest.mark.parametrize("name", CASES)
def test_page_weights_equal_the_library(name: str) -> None:
    case = CASES[name]
    exact = case.weights()
    for batch in range(exact.shape[0]):
        data = json.loads(json.dumps(ch.view(case.query, case.key, batch=batch, **case.options).data))
        validate(data, function="test")
        for place, head in enumerate(data["layers"][0]["heads"]):
            weights = page_weights(data, 0, place)
            gap = np.abs(weights - exact[batch, place]).max()
            # Row sums must match too, not only each weight.
            sums = np.abs(weights.sum(axis=1) - exact[batch, place].sum(axis=1)).max()
            assert sums <= (TOLERANCE if weights.shape[1] <= 512 else 10 * TOLERANCE)
            # The page states its largest error; the library's float32 rounding comes on top.
            assert gap <= head["error"]["weight"] + 5e-6
            assert gap <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_page_weights_equal_the_library_in_other_dtypes(dtype: torch.dtype) -> None:
    query, key = (torch.randn(1, 2, 30, 16, dtype=dtype) for _ in range(2))
    rows = ch.observe_attention(query, key, key, want=ch.Want(rows=range(30)), mask=ch.Causal()).rows
    assert rows is not None
    data = ch.view(query, key, mask=ch.Causal()).data
    for head in range(2):
        assert np.abs(page_weights(dict(data), 0, head) - rows[0, head].double().numpy()).max() <= TOLERANCE


def test_nan_in_a_masked_key_reaches_no_weight() -> None:
    query, key = torch.randn(1, 1, 6, 4), torch.randn(1, 1, 6, 4)
    key[0, 0, 5] = torch.nan
    rows = ch.observe_attention(query, key, key, want=ch.Want(rows=range(6)), mask=ch.Causal()).rows
    assert rows is not None
    weights = page_weights(dict(ch.view(query, key, mask=ch.Causal()).data), 0, 0)
    assert np.abs(weights[:5] - rows[0, 0, :5].numpy()).max() <= TOLERANCE


@pytest.mark.covering(0)
@pytest.mark.parametrize("sharp", [0.3, 1.5, 4.0, 30.0])
def test_long_rows_are_quantised_and_large_weights_corrected(sharp: float) -> None:
    query, key = torch.randn(2, 1, 1, 900, 32, generator=torch.Generator().manual_seed(1))
    rows = ch.observe_attention(sharp * query, key, key, want=ch.Want(rows=range(900)), mask=ch.Causal()).rows
    assert rows is not None
    data = dict(ch.view(sharp * query, key, key, mask=ch.Causal()).data)
    validate(data, function="test")
    head = data["layers"][0]["heads"][0]
    assert head["query"]["type"] == "i16"
    weights = page_weights(data, 0, 0)
    gap = np.abs(weights - rows[0, 0].double().numpy()).max()
    assert gap <= head["error"]["weight"] + 5e-6
    assert gap <= TOLERANCE
    output = ch.attention(sharp * query, key, key, mask=ch.Causal())[0, 0].double().numpy()
    sums = weights @ unpack(data["layers"][0]["values"][0]) + unpack(head["rest"])
    assert np.abs(sums - output).max() <= TOLERANCE


def _model() -> ch.nn.LanguageModel:
    torch.manual_seed(0)
    return ch.nn.LanguageModel(40, embed_dim=16, num_heads=2, num_layers=3).eval()


def test_a_model_a_trace_and_its_points_give_the_same_page() -> None:
    model, ids = _model(), torch.tensor([[3, 1, 4, 1, 5, 9]])
    with torch.no_grad(), ch.trace(model) as traced:
        model(ids)
    pages = [ch.view(model, ids, tokens=WORDS), ch.view(traced, tokens=WORDS)]
    assert pages[0].data == pages[1].data
    assert [layer["name"] for layer in pages[0].data["layers"]] == list(traced)
    for layer in range(3):
        for head in range(2):
            gap = np.abs(page_weights(dict(pages[0].data), layer, head) - traced[layer].weights[0, head].numpy())
            assert gap.max() <= TOLERANCE
    one = ch.view(traced[1], tokens=WORDS).data["layers"]
    assert one == [pages[0].data["layers"][1]]
    assert pages[0].data["texts"] == [WORDS]


def test_several_runs_are_on_one_page() -> None:
    model, ids = _model(), torch.tensor([[3, 1, 4, 1, 5, 9]])
    runs = {}
    for name, factor in (("before", 1.0), ("after", 0.25)):
        with torch.no_grad(), ch.trace(model, layers=1) as traced:
            traced.temperature(factor)
            model(ids)
        runs[name] = traced
    data = dict(ch.view(runs, tokens=WORDS).data)
    layer = next(iter(traced))
    assert [each["name"] for each in data["layers"]] == [f"before: {layer}", f"after: {layer}"]
    for place, run in enumerate(runs.values()):
        assert np.abs(page_weights(data, place, 1) - run[layer].weights[0, 1].numpy()).max() <= TOLERANCE
    with pytest.raises(UnsupportedError, match="several by name"):
        ch.view({"before": model})  # type: ignore[dict-item]


def test_several_masks_are_on_one_page() -> None:
    query, key = torch.randn(2, 1, 1, 8, 4, generator=torch.Generator().manual_seed(0))
    masks = {"all": None, "near": ch.Window(2)}
    data = dict(ch.view(query, key, mask=masks).data)
    assert [run["name"] for run in data["runs"]] == list(masks)
    for place, mask in enumerate(masks.values()):
        assert data["layers"][place]["run"] == place
        rows = ch.observe_attention(query, key, key, mask=mask, want=ch.Want(rows=range(8))).rows
        assert rows is not None
        assert np.abs(page_weights(data, place, 0) - rows[0, 0].numpy()).max() <= TOLERANCE


@pytest.mark.parametrize("kind", ["bytes", "floats", "colours", "array"])
def test_image_is_stored_with_its_patches(kind: str) -> None:
    image = torch.arange(24.0).reshape(4, 6)
    given: Any = {
        "bytes": image.to(torch.uint8),
        "floats": image / 10 - 3,
        "colours": image[..., None].expand(4, 6, 3),
        "array": image.numpy(),
    }[kind]
    data = ch.view(torch.eye(7), torch.eye(7), image=given, grid=(2, 3), grid_first=1).data
    (picture,) = data["images"]
    assert (picture["rows"], picture["columns"], picture["first"]) == (2, 3, 1)
    expected = image.numpy() if kind == "bytes" else np.rint(image.numpy() / 23 * 255)
    assert np.array_equal(unpack(picture["pixels"])[..., 0], expected)
    assert unpack(picture["pixels"]).shape[2] == (3 if kind == "colours" else 1)
    assert data["layers"][0]["image"] == 0
    assert ch.view(torch.eye(24), torch.eye(24), image=image).data["images"][0]["rows"] == 4


def test_only_chosen_layers_and_heads_are_shown() -> None:
    model, ids = _model(), torch.tensor([[3, 1, 4]])
    data = ch.view(model, ids, layers=[0, 2], heads=1).data
    assert [[head["head"] for head in layer["heads"]] for layer in data["layers"]] == [[1], [1]]
    with torch.no_grad(), ch.trace(model) as traced:
        model(ids)
    assert [layer["name"] for layer in ch.view(traced, layers="*.2.*").data["layers"]] == [list(traced)[2]]


def test_model_and_random_state_are_unmodified() -> None:
    model = _model().train()
    before = torch.random.get_rng_state()
    ch.view(model, torch.tensor([[3, 1, 4]]))
    assert model.training
    assert all(part.training for part in model.modules())
    assert torch.equal(before, torch.random.get_rng_state())


def test_head_scores_equal_the_library() -> None:
    model, ids = _model(), torch.tensor([[3, 1, 4, 1, 5, 9]])
    with torch.no_grad(), ch.trace(model) as traced:
        model(ids)
    scores = ch.observe.head_scores(traced[0])
    with torch.no_grad(), ch.observe(model, ch.Want(entropy=True)) as records:
        model(ids)
    assert records[0].entropy is not None
    for head in ch.view(traced).data["layers"][0]["heads"]:
        assert head["scores"]["previous"] == pytest.approx(float(scores.previous[0, head["head"]]), abs=1e-6)
        entropy = float(records[0].entropy[0, head["head"]].mean())
        assert head["scores"]["entropy"] == pytest.approx(entropy, abs=1e-5)


def test_repeated_text_has_an_induction_score() -> None:
    model, ids = _model(), torch.tensor([[3, 1, 4, 1, 3, 1, 4, 1, 3, 1]])
    with torch.no_grad(), ch.trace(model) as traced:
        model(ids)
    words = [str(identity) for identity in ids[0].tolist()]
    induction = ch.observe.head_scores(traced[1], period=4).induction
    assert induction is not None
    for head in ch.view(traced, tokens=words).data["layers"][1]["heads"]:
        assert head["scores"]["induction"] == pytest.approx(float(induction[0, head["head"]]), abs=1e-6)
    for other in (["x", *words[1:]], ["a"] * 10, None):
        assert "induction" not in ch.view(traced, tokens=other).data["layers"][0]["heads"][0]["scores"]


def test_saved_page_can_be_opened(tmp_path: Path) -> None:
    page = ch.view(torch.eye(3), torch.eye(3), tokens=["a", "</script>", "\u2028"], title="<b>")
    path = page.save(tmp_path / "deep" / "page.html")
    assert Page.open(path).data == page.data
    assert Page.open(path).html == path.read_text("utf-8")


def test_notebook_frame_is_sandboxed() -> None:
    shown = ch.view(torch.eye(3), torch.eye(3), tokens=['"', "</iframe>", "'"])._repr_html_()
    opening, _, rest = shown.partition(' srcdoc="')
    assert 'sandbox="allow-scripts allow-downloads"' in opening
    assert rest.count('"') == 1
    assert rest.endswith('"></iframe>')
    assert "<" not in rest.removesuffix("></iframe>").removesuffix('"')


def test_the_policy_allows_no_request() -> None:
    page = ch.view(torch.eye(3), torch.eye(3)).html
    match = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert match is not None
    rules = dict(rule.split(" ", 1) for rule in match[1].split("; "))
    assert rules.pop("default-src") == "'none'"
    assert rules.pop("img-src") == "data:"
    assert set(rules) == {"style-src", "script-src"}
    assert all(re.fullmatch(r"'sha256-[A-Za-z0-9+/=]{44}'", rule) for rule in rules.values())
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", page.partition('id="data"')[0])


REFUSED: dict[str, tuple[type[ClearheadError], str, Callable[[], object]]] = {
    "a layer": (ShapeError, "layers", lambda: ch.view(_model(), torch.tensor([[1]]), layers=9)),
    "a head": (ShapeError, "heads", lambda: ch.view(torch.eye(3), torch.eye(3), heads=1)),
    "a batch": (ShapeError, "batch", lambda: ch.view(torch.eye(3), torch.eye(3), batch=1)),
    "texts": (ShapeError, "tokens must have one text", lambda: ch.view(torch.eye(3), torch.eye(3), tokens=["a"])),
    "no key": (ShapeError, "inputs", lambda: ch.view(torch.eye(3))),
    "no tokens": (ShapeError, "tokens", lambda: ch.view(torch.zeros(0, 3), torch.zeros(0, 3))),
    "another thing": (UnsupportedError, "subject", lambda: ch.view("text")),  # type: ignore[arg-type]
    "a mask for a model": (UnsupportedError, "mask", lambda: ch.view(_model(), torch.tensor([[1]]), mask=ch.Causal())),
    "a long rule": (
        UnsupportedError, "scores must be Alibi",
        lambda: ch.view(
            torch.zeros(1100, 4), torch.zeros(1100, 4), scores=ch.ScoreFunction(lambda s, b, h, q, k: s + 1)
        ),
    ),
    "patches": (
        ShapeError, "grid must have at most 3 patches",
        lambda: ch.view(torch.eye(3), torch.eye(3), image=torch.eye(4), grid=(2, 2)),
    ),
    "a grid": (
        ShapeError, "grid must be",
        lambda: ch.view(torch.eye(3), torch.eye(3), image=torch.eye(4), grid=(0, 2)),
    ),
    "a first patch": (
        ShapeError, "grid_first must be",
        lambda: ch.view(torch.eye(3), torch.eye(3), image=torch.eye(4), grid=(1, 1), grid_first=-1),
    ),
    "a picture": (
        ShapeError, "image must be",
        lambda: ch.view(torch.eye(3), torch.eye(3), image=torch.ones(3, 4, 4), grid=(1, 1)),
    ),
    "a picture of no run": (
        ShapeError, "image must be one picture", lambda: ch.view(torch.eye(3), torch.eye(3), image={"x": torch.eye(3)}),
    ),
    "a grid of no picture": (
        ShapeError, "grid must go with an image", lambda: ch.view(torch.eye(3), torch.eye(3), grid=(1, 1)),
    ),
    "too much": (
        UnsupportedError, "layers must have at most",
        lambda: ch.view(torch.zeros(1, 1, 1, 1).expand(1, 1, 2**14, 2**13), torch.zeros(1, 1, 1, 2**13)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_page_refuses_what_it_cannot_show(name: str) -> None:
    kind, says, call = REFUSED[name]
    with pytest.raises(kind, match=f"^(view|trace): {says}"):
        call()


def test_statistics_of_observe_are_refused_with_advice() -> None:
    model, ids = _model(), torch.tensor([[3, 1, 4]])
    with torch.no_grad(), ch.observe(model, ch.Want(lse=True)) as records:
        model(ids)
    with pytest.raises(UnsupportedError, match=r"within ch\.trace\(model\)"):
        ch.view(records)  # type: ignore[arg-type]


def test_edited_weights_are_refused_and_edited_queries_are_shown() -> None:
    model, ids = _model(), torch.tensor([[3, 1, 4]])
    with torch.no_grad(), ch.trace(model) as traced:
        traced.temperature(0.5, layers=0)
        traced.replace("masked", lambda masked: masked + 1, layers=1)
        model(ids)
    gap = page_weights(dict(ch.view(traced[0]).data), 0, 0) - traced[0].weights[0, 0].numpy()
    assert np.abs(gap).max() <= TOLERANCE
    with pytest.raises(UnsupportedError, match="edited masked"):
        ch.view(traced)


DAMAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "version": lambda data: data.update(version=3),
    "layers": lambda data: data.update(layers=[]),
    "texts[0]": lambda data: data["texts"][0].append(3),
    "layers[0].queries": lambda data: data["layers"][0].update(queries=9),
    "layers[0].scale": lambda data: data["layers"][0].update(scale=None),
    "layers[0].keys[0].shape": lambda data: data["layers"][0]["keys"][0].update(shape=[2, 2]),
    "layers[0].heads[0].query.data": lambda data: data["layers"][0]["heads"][0]["query"].update(data="~~"),
    "layers[0].heads[0].lse.type": lambda data: data["layers"][0]["heads"][0]["lse"].update(type="f8"),
    "layers[0].heads[0].mask": lambda data: data["layers"][0]["heads"][0].update(mask=4),
    "layers[0].heads[0].thumb.side": lambda data: data["layers"][0]["heads"][0]["thumb"].update(side=0),
    "runs": lambda data: data.update(runs=[]),
    "runs[0].name": lambda data: data["runs"][0].update(name=3),
    "runs[0].bars[0].value": lambda data: data["runs"][0].update(bars=[{"label": "a", "value": 2}]),
    "runs[0].start.layer": lambda data: data["runs"][0].update(start={"layer": 9, "head": 0, "query": 0}),
    "facts[0].note": lambda data: data["facts"].append({"label": "a", "value": "b"}),
    "images[0].pixels.shape": lambda data: data["images"][0].update(pixels=data["layers"][0]["norms"][0]),
    "layers[0].run": lambda data: data["layers"][0].update(run=1),
    "layers[0].image": lambda data: data["images"][0].update(first=1),
    "layers[0].norms": lambda data: data["layers"][0]["norms"].clear(),
    "layers[0].values[0].shape": lambda data: data["layers"][0].update(value_dim=4),
    "layers[0].heads[0].rest": lambda data: data["layers"][0]["heads"][0].pop("rest"),
    "layers[0].heads[0].fix.shape": lambda data: data["layers"][0]["heads"][0]["fix"].update(shape=[9]),
    "masks[0].kind": lambda data: data["masks"][0].update(kind="dense"),
}


@pytest.mark.parametrize("field", DAMAGE)
def test_a_damaged_page_names_its_field(field: str, tmp_path: Path) -> None:
    eye = torch.eye(3)
    data = copy.deepcopy(dict(ch.view(eye, eye, eye, mask=ch.Causal(), image=eye[:1], values=True).data))
    DAMAGE[field](data)
    path = Page(data | {"title": "x"}).save(tmp_path / "page.html")
    with pytest.raises(DataError, match=re.escape(f"Page.open: {field} must")):
        Page.open(path)


def test_other_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.html").write_text("<p>no page")
    with pytest.raises(DataError, match=r"^Page\.open: "):
        Page.open(tmp_path / "other.html")
    with pytest.raises(DataError, match="No such file"):
        Page.open(tmp_path / "none.html")


def test_page_of_version_1_is_read(tmp_path: Path) -> None:
    stored = json.loads((Path(__file__).parent / "version_1.json").read_text("utf-8"))
    opened = Page.open(Page(stored["page"]).save(tmp_path / "old.html"))
    assert opened.data["version"] == 1
    for head, weights in enumerate(stored["weights"]):
        assert np.abs(page_weights(dict(opened.data), 0, head) - np.array(weights)).max() <= TOLERANCE


@pytest.mark.parametrize("name", ["grouped", "sink", "peaked", "empty rows", "long rows", "bias", "batch"])
def test_the_sum_of_weighted_values_is_the_output(name: str) -> None:
    case = CASES[name]
    value = 3 * torch.randn(*case.key.shape[:-1], 5, generator=torch.Generator().manual_seed(9))
    output = ch.attention(case.query, case.key, value, **case.options).double().numpy()
    batch = output.shape[0] - 1
    data = dict(ch.view(case.query, case.key, value, batch=batch, **case.options).data)
    layer = data["layers"][0]
    assert layer["value_dim"] == 5
    for place, head in enumerate(layer["heads"]):
        values = unpack(layer["values"][head["key"]])
        sums = page_weights(data, 0, place) @ values + unpack(head["rest"])
        assert np.abs(sums - output[batch, place]).max() <= TOLERANCE
        norms = np.linalg.norm(value[batch, head["key"]].numpy(), axis=1)
        assert np.abs(unpack(layer["norms"][head["key"]]) - norms).max() <= norms.max() / 65535


@pytest.mark.slow
def test_values_are_stored_if_few_or_requested() -> None:
    query = torch.randn(1, 8, 513, 130, generator=torch.Generator().manual_seed(0))
    carried = {
        wanted: bool(
            ch.view(query, query, query, mask=ch.Causal(), heads=heads, values=wanted).data["layers"][0]["values"]
        )
        for wanted, heads in ((None, None), (True, None), (False, 0))
    }
    assert carried == {None: False, True: True, False: False}
    assert ch.view(query, query, query, heads=[2, 3]).data["layers"][0]["values"] != []


@pytest.mark.slow
@pytest.mark.parametrize("sharp", [2.5, 40.0, 1000.0])
def test_sharp_heads_fit_into_5_mb(sharp: float) -> None:
    query, key, value = torch.randn(3, 1, 144, 128, 64, generator=torch.Generator().manual_seed(0))
    page = ch.view(sharp * query, key, value)
    assert len(page.html.encode()) <= 5 * 10**6
    rows = ch.observe_attention(sharp * query, key, value, want=ch.Want(rows=range(128))).rows
    assert rows is not None
    for head in (0, 77, 143):
        assert np.abs(page_weights(dict(page.data), 0, head) - rows[0, head].double().numpy()).max() <= TOLERANCE


@pytest.mark.slow
def test_twelve_layers_of_twelve_heads_fit_into_5_mb() -> None:
    torch.manual_seed(0)
    model = ch.nn.LanguageModel(100, embed_dim=768, num_heads=12, num_layers=12).eval()
    page = ch.view(model, torch.randint(100, (1, 128)))
    assert len(page.data["layers"]) == 12
    assert len(page.html.encode()) <= 5 * 10**6
