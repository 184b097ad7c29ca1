"""The worked example: the documents' numbers, the formula on any sheet, the script, and what is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import clearhead as ch
from clearhead.errors import ShapeError
from clearhead.lab import worked
from clearhead.lab.worked_presets import PRESETS
from tests.lessons.documents import PRINTED, Document0, Document1, Document4
from tests.processes import with_torch_alone

Sheet = dict[str, Any]


class Ticket:
    """A ticket of a work that nobody ends."""

    def step(self, done: float, text: str = "") -> None:
        """Nothing."""


def asked(run: Any, params: Mapping[str, Any]) -> Any:
    """A work's answer as the page gets it, through JSON both ways."""
    return json.loads(json.dumps(run(json.loads(json.dumps(params)), Ticket()), allow_nan=False))


def preset(name: str) -> Sheet:
    return next(each for each in asked(worked.start, {})["presets"] if each["name"] == name)


def computed(sheet: Mapping[str, Any]) -> dict[str, Any]:
    answer = asked(worked.compute, sheet)
    return {step["id"]: values(step) for step in answer["steps"]}


def values(step: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    return np.array([[-math.inf if cell is None else cell for cell in row] for row in step["values"]])


def by_hand(sheet: Mapping[str, Any]) -> dict[str, Any]:
    """The formula in NumPy, apart from the library."""
    answer: dict[str, Any] = {}
    x, heads = np.array(sheet["X"]), sheet["heads"]
    for letter in "qkv":
        bias = sheet.get(f"b_{letter}")
        answer[letter.upper()] = x @ np.array(sheet[f"W_{letter}"]) + (0 if bias is None else np.array(bias))
    width = answer["Q"].shape[1] // heads
    scale = 1 / math.sqrt(width) if sheet["scale"] is None else sheet["scale"]
    for head in range(heads):
        q, k, v = (answer[name][:, head * width : (head + 1) * width] for name in "QKV")
        answer[f"scores.{head}"] = q @ k.T
        answer[f"scaled.{head}"] = q @ k.T * scale
        masked = np.where(np.array(sheet["allowed"]), q @ k.T * scale, -np.inf)
        answer[f"masked.{head}"] = masked
        largest = masked.max(axis=1, keepdims=True)
        power = np.exp(masked - np.where(np.isfinite(largest), largest, 0))
        total = power.sum(axis=1, keepdims=True)
        answer[f"weights.{head}"] = np.divide(power, total, out=np.zeros_like(power), where=total > 0)
        answer[f"output.{head}"] = answer[f"weights.{head}"] @ v
    answer["concat"] = np.concatenate([answer[f"output.{head}"] for head in range(heads)], axis=1)
    return answer


def agree(sheet: Mapping[str, Any]) -> None:
    got, wanted = computed(sheet), by_hand(sheet)
    for name, answer in got.items():
        if name in wanted:
            # Sums of at most 8 products of numbers up to 10 and of what those give; float64 on both sides.
            np.testing.assert_allclose(answer, wanted[name], rtol=1e-10, atol=1e-10, err_msg=name)
    assert set(got) >= {"Q", "K", "V"} | {name for name in wanted if "." in name}


class TestDocuments:
    def test_lesson_0(self) -> None:
        answer, wanted = computed(preset("lesson-0")), Document0
        for name, numbers in (
            ("Q", wanted.QUERY),
            ("K", wanted.KEY),
            ("V", wanted.VALUE),
            ("scores.0", wanted.SCORES),
            ("scaled.0", wanted.SCALED),
            ("masked.0", wanted.SCALED),
            ("weights.0", wanted.WEIGHTS),
            ("output.0", wanted.OUTPUT),
        ):
            np.testing.assert_allclose(answer[name], numbers, atol=PRINTED, rtol=0)

    def test_lesson_1(self) -> None:
        answer, wanted = computed(preset("lesson-1")), Document1
        np.testing.assert_allclose(answer["K"], wanted.KEYS, atol=PRINTED, rtol=0)
        np.testing.assert_allclose(answer["V"], wanted.VALUES, atol=PRINTED, rtol=0)
        np.testing.assert_allclose(answer["weights.0"][2], wanted.WEIGHTS_3, atol=PRINTED, rtol=0)
        np.testing.assert_allclose(answer["output.0"], wanted.CONTEXT, atol=PRINTED, rtol=0)

    @pytest.mark.parametrize(
        ("name", "module", "tokens", "mask"),
        [
            ("lesson-0", Document0.module, Document0.TOKENS, None),
            ("lesson-1", Document1.module, Document1.TOKENS, None),
            ("lesson-3", Document0.module, Document0.TOKENS, "causal"),
            ("lesson-4", lambda: Document4.module(2), Document0.TOKENS, None),
        ],
    )
    def test_weights_are_those_of_the_lessons(self, name: str, module: Any, tokens: Any, mask: str | None) -> None:
        sheet, made = preset(name), module()
        assert sheet["X"] == [list(row) for row in tokens]
        for letter, projection in (
            ("q", made.query_projection),
            ("k", made.key_projection),
            ("v", made.value_projection),
        ):
            # Eight places of what a seed drew.
            np.testing.assert_allclose(sheet[f"W_{letter}"], projection.weight.detach().T, atol=6e-9, rtol=0)
            if projection.bias is not None:
                np.testing.assert_allclose(sheet[f"b_{letter}"], projection.bias.detach(), atol=6e-9, rtol=0)
            assert (sheet[f"b_{letter}"] is None) == (projection.bias is None)
        assert sheet["scale"] == made.scale
        assert sheet["heads"] == made.num_heads
        assert sheet["causal"] == (mask == "causal")
        output = made(torch.tensor(tokens), **({} if mask is None else {"mask": ch.Causal()}))
        answer = asked(worked.compute, sheet)
        np.testing.assert_allclose(values(answer["steps"][-1]), output.detach(), atol=1e-6, rtol=0)
        assert answer["mask"] == ("none" if mask is None else "Causal")

    @pytest.mark.parametrize("name", [each.name for each in PRESETS])
    def test_every_preset_is_the_formula(self, name: str) -> None:
        agree(preset(name))


@st.composite
def sheets(draw: st.DrawFn) -> Sheet:
    tokens, width, heads = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 2))
    columns = heads * draw(st.integers(1, 3))
    cell = st.floats(-10, 10, width=32)

    def table(rows: int, count: int) -> list[list[float]]:
        return [[draw(cell) for _ in range(count)] for _ in range(rows)]

    sheet: Sheet = {"X": table(tokens, width), "heads": heads, "scale": draw(st.none() | st.floats(-2, 2))}
    biased = draw(st.booleans())
    for letter in "qkv":
        sheet[f"W_{letter}"] = table(width, columns)
        sheet[f"b_{letter}"] = table(1, columns)[0] if biased else None
    sheet["allowed"] = [[draw(st.booleans()) for _ in range(tokens)] for _ in range(tokens)]
    return sheet


class TestAnySheet:
    @pytest.mark.slow
    @given(sheet=sheets())
    @settings(max_examples=80, deadline=None, database=None)
    def test_worksheet_equals_the_formula(self, sheet: Sheet) -> None:
        agree(sheet)

    def test_query_without_keys_gives_0(self) -> None:
        sheet = preset("lesson-0")
        sheet["allowed"][1] = [False, False, False]
        answer = asked(worked.compute, sheet)
        assert answer["empty"] == [1]
        assert answer["mask"] == "Dense"
        agree(sheet)
        assert (computed(sheet)["output.0"][1] == 0).all()

    def test_largest_numbers_give_finite_results(self) -> None:
        def most(rows: int, columns: int) -> list[list[float]]:
            return [[1e6 * (-1) ** (row + column) for column in range(columns)] for row in range(rows)]

        sheet = {"X": most(12, 8), **{name: most(8, 8) for name in ("W_q", "W_k", "W_v")}, "heads": 2, "scale": 1e6}
        for answer in computed(sheet).values():
            assert np.isfinite(answer).all()

    def test_two_heads_are_split_and_joined(self) -> None:
        sheet = preset("lesson-0") | {"heads": 2}
        answer = computed(sheet)
        agree(sheet)
        np.testing.assert_array_equal(answer["Q.1"], answer["Q"][:, 1:])
        np.testing.assert_array_equal(
            answer["concat"], np.concatenate([answer["output.0"], answer["output.1"]], axis=1)
        )

    def test_formulas_and_shapes(self) -> None:
        steps = {step["id"]: step for step in asked(worked.compute, preset("lesson-1"))["steps"]}
        assert steps["Q"]["formula"] == "Q = X · W_q + b_q"
        assert steps["Q"]["shapes"] == "5×4 · 4×3 → 5×3"
        assert steps["scores.0"]["shapes"] == "5×3 · 3×5 → 5×5"
        assert steps["scaled.0"]["formula"] == "Z = S × 0.5"
        usual = {step["id"]: step for step in asked(worked.compute, preset("lesson-0"))["steps"]}
        assert usual["scaled.0"]["formula"] == "Z = S / √2"

    def test_module_agrees_with_the_steps(self) -> None:
        for each in PRESETS:
            assert asked(worked.compute, preset(each.name))["difference"] < 1e-14


def numbers_of(printed: str) -> list[tuple[str, list[list[float]]]]:
    """What a script printed: names with their tables."""
    tables: list[tuple[str, list[list[float]]]] = []
    for line in printed.splitlines():
        if answer := re.fullmatch(r"(.+) \[\d+, \d+\]", line):
            tables.append((answer[1], []))
        else:
            tables[-1][1].append([float(number) for number in line.split()])
    return tables


class TestScript:
    @pytest.mark.parametrize(
        "change",
        [
            {"of": "lesson-1"},
            {"of": "lesson-4"},
            {"of": "lesson-3", "scale": -0.25, "heads": 2},
            {"of": "lesson-0", "allowed": [[True, False, True], [False, False, False], [False, True, True]]},
        ],
        ids=["biases", "two heads", "causal", "own mask"],
    )
    def test_script_prints_the_same_values(self, change: dict[str, Any]) -> None:
        sheet = preset(change["of"]) | {name: value for name, value in change.items() if name != "of"}
        answer = asked(worked.exported, sheet)
        assert answer["name"] == "worked_example.py"
        with redirect_stdout(StringIO()) as said:
            exec(answer["script"].replace("PLACES = 4", "PLACES = 12"), {})
        answer = computed(sheet)
        wanted = [(name, answer[name]) for name in "QKV"]
        for head in range(sheet["heads"]):
            for name in ("scores", "scaled", "masked", "weights", "output"):
                wanted.append((f"{name} of head {head + 1}", answer[f"{name}.{head}"]))
        wanted.append(("output", answer.get("concat", answer["output.0"])))
        printed = numbers_of(said.getvalue())
        assert [name for name, _ in printed] == [name for name, _ in wanted]
        for (name, numbers), (_, numbers_shown) in zip(printed, wanted, strict=True):
            np.testing.assert_allclose(numbers, numbers_shown, atol=1e-11, rtol=1e-11, err_msg=name)

    @pytest.mark.slow
    def test_script_runs_alone_and_prints_the_numbers_of_the_documents(self, tmp_path: Path) -> None:
        path = tmp_path / "worked_example.py"
        path.write_text(asked(worked.exported, preset("lesson-0"))["script"], "utf-8")
        ran = with_torch_alone("import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')", [str(path)])
        assert ran.returncode == 0, ran.stderr
        printed = dict(numbers_of(ran.stdout))
        np.testing.assert_allclose(printed["weights of head 1"], Document0.WEIGHTS, atol=1e-9, rtol=0)
        np.testing.assert_allclose(printed["output"], Document0.OUTPUT, atol=1e-9, rtol=0)

    def test_hostile_worksheet_adds_no_code(self) -> None:
        with pytest.raises(ShapeError, match="X row 1 column 1 must be a number"):
            asked(worked.exported, preset("lesson-0") | {"X": [["__import__('os')", 1.0]] * 3})


class TestRefused:
    @pytest.mark.parametrize(("change", "said"), [
        ({"X": [[1.0, "abc"], [1.0, 2.0], [3.0, 4.0]]}, "X row 1 column 2 must be a number"),
        ({"X": [[1.0, None], [1.0, 2.0], [3.0, 4.0]]}, "X row 1 column 2 must be a number"),
        ({"X": [[1.0, True], [1.0, 2.0], [3.0, 4.0]]}, "X row 1 column 2 must be a number"),
        ({"X": [[1.0, 1e7], [1.0, 2.0], [3.0, 4.0]]}, "between -1,000,000 and 1,000,000; got 10000000.0"),
        ({"X": [[1.0, 10**400], [1.0, 2.0], [3.0, 4.0]]}, "X row 1 column 2 must be a number"),
        ({"X": [[1.0], [1.0, 2.0], [3.0, 4.0]]}, "X must have rows of one length"),
        ({"X": [[1.0, 2.0]] * 13}, "X must have rows of one length, at most 12 × 8"),
        ({"X": [[1.0] * 9]}, "X must have rows of one length, at most 12 × 8"),
        ({"X": []}, "X must be a table"), ({"X": None}, "X must be a table"), ({"X": "abc"}, "X must be a table"),
        ({"X": [[]]}, "X must be a table"), ({"X": {"a": 1}}, "X must be a table"),
        ({"W_q": [[1.0, 2.0]]}, "W_q must be 2 × 2, X's columns by W_q's columns; got 1 × 2"),
        ({"W_v": [[1.0], [2.0]]}, "W_v must be 2 × 2"),
        ({"W_k": [[1.0, "inf"], [1.0, 2.0]]}, "W_k row 1 column 2 must be a number"),
        ({"heads": 3}, "heads must divide the 2 columns of W_q evenly; got 3"), ({"heads": 0}, "heads must divide"),
        ({"heads": True}, "heads must divide"), ({"heads": "2"}, "heads must divide"),
        ({"scale": "1"}, "scale must be a number"), ({"scale": 1e9}, "scale must be a number"),
        ({"allowed": [[True]]}, "mask must be 3 × 3"), ({"allowed": [[1, 1, 1]] * 3}, "mask must have true and false"),
        ({"allowed": 5}, "mask must be 3 × 3"), ({"b_q": [1.0, 2.0]}, "biases must be given for all three"),
        ({"b_q": [1.0], "b_k": [1.0], "b_v": [1.0]}, "b_q must have 2 numbers"),
        ({"b_q": [1.0, "x"], "b_k": [1.0, 2.0], "b_v": [1.0, 2.0]}, "b_q column 2 must be a number"),
    ])  # fmt: skip
    def test_error_names_the_cell(self, change: dict[str, Any], said: str) -> None:
        sheet = preset("lesson-0") | change
        with pytest.raises(ShapeError) as caught:
            worked.compute(sheet, Ticket())
        assert said in str(caught.value)
        assert str(caught.value).startswith("worked example: ")
        assert "\n" not in str(caught.value)

    def test_nan_and_infinity_raise(self) -> None:
        for number in (math.nan, math.inf, -math.inf):
            with pytest.raises(ShapeError, match="X row 1 column 1 must be a number"):
                worked.compute(preset("lesson-0") | {"X": [[number, 1.0]] * 3}, Ticket())

    @pytest.mark.slow
    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
            lambda part: st.lists(part, max_size=3) | st.dictionaries(st.sampled_from(["X", "W_q"]), part, max_size=3),
            max_leaves=12,
        )
    )
    @settings(max_examples=150, deadline=None, database=None)
    def test_any_json_value_is_answered_or_refused(self, value: Any) -> None:
        sheet = PRESETS[0].as_json() | {"X": [list(row) for row in PRESETS[0].X]}
        for name in ("X", "W_q", "b_q", "allowed", "scale", "heads"):
            try:
                worked.compute({**sheet, name: value}, Ticket())
            except ShapeError as refused:
                assert str(refused).count("\n") == 0  # noqa: PT017
