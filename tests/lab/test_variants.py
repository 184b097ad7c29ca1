"""Variants: the mask's shape, what a variant does to a head, its Python, and what is refused."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import clearhead as ch
from clearhead.errors import ClearheadError, ShapeError
from clearhead.lab import variants
from clearhead.lab.variants_heads import DIM, HEADS, heads, words
from clearhead.lab.variants_parts import MASKS, RULES
from clearhead.lab.variants_starts import STARTS

Params = dict[str, Any]


class Ticket:
    """A ticket of a work that nobody ends."""

    def step(self, done: float, text: str = "") -> None:
        """Nothing."""


def asked(**params: Any) -> dict[str, Any]:
    """The answer as the page gets it, through JSON both ways."""
    answer = variants.compute(json.loads(json.dumps(params)), Ticket())
    return json.loads(json.dumps(answer, allow_nan=False))  # type: ignore[no-any-return]


def part(kind: str, join: str = "&", negated: bool = False, **values: Any) -> Params:
    return {"kind": kind, "values": values, "join": join, "not": negated}


def formula(text: str) -> Params:
    return part("Expression", formula=text)


def allowed(answer: dict[str, Any]) -> np.ndarray[Any, Any]:
    return np.array([[place == "1" for place in row] for row in answer["mask"]["allowed"]])


def numbers(rows: list[list[float | None]]) -> np.ndarray[Any, Any]:
    return np.array([[-math.inf if cell is None else cell for cell in row] for row in rows])


def said_in_python(answer: dict[str, Any]) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(answer["python"], names)
    return names


def agrees_with_its_python(answer: dict[str, Any], head: str) -> None:
    """The Python that is shown gives the mask and the weights that are shown."""
    names, tokens = said_in_python(answer), len(answer["words"])
    query, key, value = heads(tokens)
    if names["mask"] is not None:
        shown = names["mask"].dense(tokens, tokens, batch=1, num_heads=len(HEADS))
        expected = shown.expand(1, len(HEADS), tokens, tokens)[0, [each.name for each in HEADS].index(head)]
        np.testing.assert_array_equal(expected.numpy(), allowed(answer))
    # Values of one-hot rows turn outputs into weights.
    value = torch.eye(tokens, dtype=torch.float64).expand(1, len(HEADS), tokens, tokens)
    weights = names["attend"](query, key, value)[0, [each.name for each in HEADS].index(head)]
    # The page is sent nine places.
    np.testing.assert_allclose(weights.numpy(), answer["after"]["weights"], atol=1e-9, rtol=0)


class TestStarts:
    @pytest.mark.parametrize("start", STARTS, ids=[start.name for start in STARTS])
    def test_each_preset_runs_and_equals_its_python(self, start: Any) -> None:
        for tokens in (12, 24):
            answer = asked(mask=list(start.mask), rules=list(start.rules), head=start.head, tokens=tokens)
            agrees_with_its_python(answer, start.head)

    def test_menu_is_complete(self) -> None:
        menu = variants.menu({}, Ticket())
        json.dumps(menu, allow_nan=False)
        for kinds, table in ((menu["masks"], MASKS), (menu["rules"], RULES)):
            assert [kind["name"] for kind in kinds] == list(table)
        assert {start["head"] for start in menu["starts"]} <= {head["name"] for head in menu["heads"]}

    @pytest.mark.parametrize("what", ["mask", "rules"])
    def test_every_kind_runs_with_its_initial_values(self, what: str) -> None:
        menu = variants.menu({}, Ticket())
        for kind in menu[{"mask": "masks", "rules": "rules"}[what]]:
            first = part(kind["name"], **{field["name"]: field["start"] for field in kind["fields"]})
            agrees_with_its_python(asked(**{what: [first], "head": "same word"}), "same word")


class TestShape:
    def test_masks_combine_from_the_left(self) -> None:
        answer = asked(
            tokens=12,
            mask=[
                part("Causal"),
                part("Prefix", "|", length=4),
                part("Strided", "&", True, stride=3),
            ],
        )
        assert answer["mask"]["python"] == "(ch.Causal() | ch.Prefix(length=4)) & ~ch.Strided(stride=3)"
        wanted = ((ch.Causal() | ch.Prefix(4)) & ~ch.Strided(3)).dense(12, 12)
        np.testing.assert_array_equal(allowed(answer), wanted.numpy())
        agrees_with_its_python(answer, HEADS[0].name)
        flat = asked(
            tokens=12, mask=[part("Causal"), part("Window", before=2, after=1), part("Global", "|", num_tokens=1)]
        )
        assert flat["mask"]["python"] == "ch.Causal() & ch.Window(before=2, after=1) | ch.Global(num_tokens=1)"
        agrees_with_its_python(flat, HEADS[0].name)

    @pytest.mark.parametrize("tokens", [12, 24, 33, 64])
    def test_facts(self, tokens: int) -> None:
        shape = asked(tokens=tokens, mask=[part("Window", before=2, after=0), part("Prefix", negated=True, length=5)])[
            "mask"
        ]
        table = (ch.Window(2) & ~ch.Prefix(5)).dense(tokens, tokens).numpy()
        assert shape["fraction"] == pytest.approx(table.mean())
        assert shape["counts"] == table.sum(axis=1).tolist()
        assert shape["empty"] == [0, 1, 2, 3, 4]
        assert shape["runs"] is True
        side = shape["tiles"]["side"]
        kinds = [
            [
                0 if not tile.any() else 2 if tile.all() else 1
                for tile in (table[row : row + side, column : column + side] for column in range(0, tokens, side))
            ]
            for row in range(0, tokens, side)
        ]
        assert shape["tiles"]["kinds"] == kinds
        flat = [kind for row in kinds for kind in row]
        assert [shape["tiles"][name] for name in ("empty", "partial", "full")] == [
            flat.count(kind) for kind in range(3)
        ]

    def test_formula_is_evaluated_for_each_pair(self) -> None:
        shape = asked(mask=[formula("k_pos <= q_pos")])
        causal = asked(mask=[part("Causal")])
        assert shape["mask"]["runs"] is True
        for name in ("allowed", "fraction", "counts", "empty", "tiles"):
            assert shape["mask"][name] == causal["mask"][name]
        assert shape["after"]["weights"] == causal["after"]["weights"]

    def test_by_head(self) -> None:
        only = [formula("head == 1 or k_pos <= q_pos")]
        assert asked(mask=only, head=HEADS[1].name)["mask"]["fraction"] == 1.0
        assert asked(mask=only, head=HEADS[0].name)["mask"]["fraction"] < 1.0

    @pytest.mark.parametrize("lengths", [[5], [5, 3, 2, 40], [1] * 64, [64]])
    def test_document_lengths_are_fitted_to_the_tokens(self, lengths: list[int]) -> None:
        answer = asked(tokens=12, mask=[part("Documents", lengths=lengths)])
        agrees_with_its_python(answer, HEADS[0].name)
        assert allowed(answer).diagonal().all()

    def test_nothing_chosen(self) -> None:
        answer = asked()
        assert answer["mask"]["python"] == "None"
        assert answer["mask"]["fraction"] == 1.0
        assert answer["curve"] == {"relative": None}
        assert answer["before"] == answer["after"]


class TestHead:
    def test_statistics_are_those_of_the_weights(self) -> None:
        rules = [part("Alibi", slope=0.5), part("SoftCap", cap=2.0)]
        answer = asked(tokens=16, mask=[part("Causal")], rules=rules, head="same word", temperature=0.5)
        places = np.abs(np.arange(16)[:, None] - np.arange(16))
        for observed in (answer["before"], answer["after"]):
            weights = np.array(observed["weights"])
            logs = np.where(weights > 0, np.log(np.where(weights > 0, weights, 1)), 0)
            np.testing.assert_allclose(observed["entropy"], -(weights * logs).sum(axis=1), atol=1e-6)
            np.testing.assert_allclose(observed["distance"], (weights * places).sum(axis=1), atol=1e-6)
            np.testing.assert_allclose(observed["mass"], 1, atol=1e-6)
            # The scores that are shown are those that the weights come from.
            scores = numbers(observed["scores"])
            power = np.exp(scores - scores.max(axis=1, keepdims=True))
            np.testing.assert_allclose(weights, power / power.sum(axis=1, keepdims=True), atol=1e-7)

    def test_scores_are_the_rules_in_their_order(self) -> None:
        query, key, _ = heads(12)
        at = [head.name for head in HEADS].index("token before")
        plain = (query @ key.transpose(-2, -1))[0, at].numpy() / (2.0 * math.sqrt(DIM))
        places = np.abs(np.arange(12)[:, None] - np.arange(12))
        # A rule holds its slopes in float32.
        bias = float(np.float32(0.3)) * places
        options: Params = {"tokens": 12, "head": "token before", "temperature": 2.0}
        one = asked(**options, rules=[part("Alibi", slope=0.3), part("SoftCap", cap=1.5)])
        np.testing.assert_allclose(numbers(one["after"]["scores"]), 1.5 * np.tanh((plain - bias) / 1.5), atol=1e-8)
        other = asked(**options, rules=[part("SoftCap", cap=1.5), part("Alibi", slope=0.3)])
        np.testing.assert_allclose(numbers(other["after"]["scores"]), 1.5 * np.tanh(plain / 1.5) - bias, atol=1e-8)

    def test_a_sink_takes_mass(self) -> None:
        mass = asked(rules=[part("Sink", logit=3.0)])["after"]["mass"]
        assert all(0 < each < 1 for each in mass)

    def test_each_head_has_its_pattern(self) -> None:
        def heaviest(head: str) -> list[int]:
            return np.array(asked(head=head)["before"]["weights"]).argmax(axis=1).tolist()  # type: ignore[no-any-return]

        assert heaviest("near tokens") == list(range(24))
        assert heaviest("token before")[1:] == list(range(23))
        assert heaviest("first token") == [0] * 24
        assert {words(24)[key] for key in heaviest("same word")} <= set(words(24))
        assert all(words(24)[key] == words(24)[query] for query, key in enumerate(heaviest("same word")))
        np.testing.assert_allclose(asked(head="uniform")["before"]["weights"], 1 / 24, atol=1e-9)


class TestCurve:
    def test_over_the_distance(self) -> None:
        curve = asked(tokens=12, rules=[part("Alibi", slope=0.25)])["curve"]
        assert curve["relative"]
        assert curve["distances"] == list(range(-11, 12))
        np.testing.assert_allclose(curve["values"], -0.25 * np.abs(np.arange(-11, 12)))
        assert curve["shifts"]

    def test_over_the_score(self) -> None:
        curve = asked(rules=[part("SoftCap", cap=2.0)])["curve"]
        assert curve["relative"]
        assert not curve["shifts"]
        np.testing.assert_allclose(curve["answers"], 2 * np.tanh(np.array(curve["scores"]) / 2), atol=1e-8)

    def test_of_a_table(self) -> None:
        curve = asked(tokens=12, rules=[part("RelativeBias", table=[1.0, 2.0, 3.0])])["curve"]
        assert curve["values"] == [1.0] * 11 + [2.0] + [3.0] * 11

    @pytest.mark.parametrize(
        ("text", "relative"),
        [
            ("score - abs(q_pos - k_pos)", True),
            ("score + (q_pos - k_pos) % 3", True),
            ("score * 2", True),
            ("score - k_pos", False),
            ("where(q_pos > 3, score, 0)", False),
            ("score * k_pos", False),
        ],
    )
    def test_no_curve_if_more_than_the_distance_matters(self, text: str, relative: bool) -> None:
        curve = asked(rules=[formula(text)])["curve"]
        assert curve["relative"] is relative
        assert bool(curve["values"]) is relative


class TestDispatch:
    def test_dispatch_equals_explain_dispatch(self) -> None:
        answer = asked(tokens=12, mask=[part("Causal")], rules=[formula("score * 2")])["dispatch"]
        query, key, value = (each.float() for each in heads(12))
        rule = ch.ScoreFunction(lambda score, batch, head, q_pos, k_pos: score * 2)
        report = ch.explain_dispatch(query, key, value, mask=ch.Causal(), scores=[rule])
        assert answer["choice"] == report.choice
        assert {each["name"]: tuple(each["against"]) for each in answer["reasons"]} == dict(report.reasons)


class TestRefused:
    @pytest.mark.parametrize(("params", "place", "said"), [
        ({"mask": [formula("k_pos <")]}, "mask/0", "mask expression: column"),
        ({"mask": [part("Causal"), formula("foo > 1")]}, "mask/1", "must be one of q_pos"),
        ({"rules": [formula("q_pos > 1")]}, "rule/0", "score expression: column 1 must be a number"),
        ({"mask": [part("Window", before=-1, after=0)]}, "mask/0", "Window before must be a whole number from 0 to 64"),
        ({"mask": [part("Window", before=1.5, after=0)]}, "mask/0", "Window before must be a whole number"),
        ({"mask": [part("Window", before="x", after=0)]}, "mask/0", "Window before must be a whole number"),
        ({"mask": [part("Window", before=True, after=0)]}, "mask/0", "Window before must be a whole number"),
        ({"mask": [part("Strided", stride=0)]}, "mask/0", "Strided stride must be a whole number from 1 to 64"),
        ({"mask": [part("Documents", lengths=[])]}, "mask/0", "Documents lengths must be 1 to 64 numbers"),
        ({"mask": [part("Documents", lengths="5")]}, "mask/0", "Documents lengths must be 1 to 64 numbers"),
        ({"mask": [{"kind": "Window", "values": 3}]}, "mask/0", "Window must have its fields"),
        ({"rules": [part("SoftCap", cap=0)]}, "rule/0", "SoftCap cap must be a number from 0.001"),
        ({"rules": [part("RelativeBias", table=[1.0, 2.0])]}, "rule/0", "RelativeBias: table must have an odd number"),
        ({"rules": [part("RelativeBias", table=[1.0, "b"])]}, "rule/0", "RelativeBias table must be a number"),
        ({"rules": [part("Alibi")]}, "rule/0", "Alibi slope must be a number"),
    ])  # fmt: skip
    def test_error_names_the_part(self, params: Params, place: str, said: str) -> None:
        refused = asked(**params)["refused"]
        assert refused["place"] == place
        assert said in refused["message"]
        assert "\n" not in refused["message"]

    @pytest.mark.parametrize(("params", "said"), [
        ({"tokens": 3}, "tokens count must be a whole number from 4 to 64"), ({"tokens": 65}, "from 4 to 64; got 65"),
        ({"tokens": "24"}, "tokens count must be"), ({"head": "none"}, "head must be one of near tokens"),
        ({"head": ["near tokens"]}, "head must be one of"), ({"temperature": 0}, "temperature must be a number from"),
        ({"mask": "Causal"}, "mask must be a list of at most 5 parts"), ({"mask": [1]}, "mask must be a list"),
        ({"mask": [part("Causal")] * 6}, "mask must be a list of at most 5 parts"),
        ({"mask": [part("Dense")]}, "mask 1 must be one of Causal, Window"),
        ({"mask": [{"kind": ["Causal"]}]}, "mask 1 must be one of"), ({"rules": [{}]}, "rule 1 must be one of"),
        ({"rules": [part("Sink", logit=1.0)] * 2}, "rules must have at most one Sink"),
        ({"rules": [formula("log(q_pos - k_pos)")]}, "give finite scores where the mask allows; got nan at q_pos 0"),
        ({"rules": [formula("score / (q_pos - k_pos)**2")], "head": "same word"}, "got inf at q_pos 0, k_pos 0"),
    ])  # fmt: skip
    def test_error_is_one_line(self, params: Params, said: str) -> None:
        with pytest.raises(ShapeError) as caught:
            variants.compute(params, Ticket())
        assert said in str(caught.value)
        assert str(caught.value).startswith("variants: ")
        assert "\n" not in str(caught.value)

    def test_mask_can_exclude_invalid_scores(self) -> None:
        answer = asked(mask=[formula("k_pos < q_pos")], rules=[formula("score - log(max(q_pos - k_pos, 0))")])
        assert answer["mask"]["empty"] == [0]
        assert answer["after"]["mass"][0] == 0.0

    def test_minus_infinity_forbids(self) -> None:
        answer = asked(mask=[part("Causal")], rules=[formula("score + log(q_pos - k_pos)")])
        assert np.array(answer["after"]["weights"]).diagonal().max() == 0.0


KINDS = st.sampled_from([*MASKS, *RULES, "None"])
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 70),
    st.floats(),
    st.text(max_size=12),
    st.lists(st.integers(-2, 9), max_size=5),
    st.sampled_from(["k_pos <= q_pos", "score / 0", "score * q_pos", "exp(score)**8"]),
)
NAMES = st.sampled_from([field.name for table in (MASKS, RULES) for kind in table.values() for field in kind.fields])
PARTS = st.lists(
    st.fixed_dictionaries({"kind": KINDS, "values": st.dictionaries(NAMES, VALUES, max_size=4)}), max_size=3
)


@pytest.mark.slow
@given(
    mask=PARTS, rules=PARTS, tokens=st.sampled_from([4, 5, 24, 64]), head=st.sampled_from([head.name for head in HEADS])
)
@settings(max_examples=150, deadline=None, database=None)
def test_any_request_is_answered_or_refused(mask: Any, rules: Any, tokens: int, head: str) -> None:
    start = time.thread_time()
    try:
        answer = variants.compute({"mask": mask, "rules": rules, "tokens": tokens, "head": head}, Ticket())
        json.dumps(answer, allow_nan=False)
    except ClearheadError as refused:
        if "\n" in str(refused):
            pytest.fail(str(refused))
    assert time.thread_time() - start < 1.0
