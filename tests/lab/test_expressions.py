"""Typed formulas: what they mean, what is refused and where, and that nothing else ever comes out of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import clearhead as ch
from clearhead.errors import ClearheadError, MaskError, ShapeError
from clearhead.lab.expressions import FUNCTIONS, LONGEST, Expression, mask_expression, score_expression

T, HEADS = 7, 3
Q, K, H = np.arange(T)[:, None], np.arange(T)[None], np.arange(HEADS)[:, None, None]

MASKS: list[tuple[str, Any]] = [
    ("k_pos <= q_pos", Q >= K),
    ("k_pos <= q_pos < k_pos + 3", (Q >= K) & (Q < K + 3)),
    ("not (q_pos % 3 == 0 or k_pos == 0)", ~((Q % 3 == 0) | (K == 0))),
    ("~(q_pos == 2) & (k_pos > 1)", ~(Q == 2) & (K > 1)),
    ("(q_pos - k_pos) % 3 == 0", (Q - K) % 3 == 0),
    ("q_pos // 2 != k_pos // 2", Q // 2 != K // 2),
    ("q_pos / 2 < k_pos", Q / 2 < K),
    ("min(q_pos, 3, k_pos) >= 2", np.minimum(np.minimum(Q, 3), K) >= 2),
    ("max(2, k_pos) == 2", np.maximum(2, K) == 2),
    ("abs(q_pos - k_pos)**2 < 5", (Q - K) ** 2 < 5),
    ("k_pos < 2 if q_pos > 3 else k_pos >= 2", np.where(Q > 3, K < 2, K >= 2)),
    ("where(q_pos > 3, k_pos, 2 * k_pos) < 5", np.where(Q > 3, K, 2 * K) < 5),
    ("exp(-k_pos) > 0.1 or sqrt(q_pos) > 2", (np.exp(-K) > 0.1) | (np.sqrt(Q) > 2)),
    ("-q_pos + +k_pos > -(1 + 1) * 2", -Q + K > -4),
    ("head == 1 or k_pos <= q_pos", (H == 1) | (K <= Q)),
    ("batch == 0", np.ones((T, T), bool)),
    ("True", np.ones((T, T), bool)),
    ("q_pos > 1 and 2 < 1", np.zeros((T, T), bool)),
    ("floor(q_pos / 2.5) == 1", np.floor(Q / 2.5) == 1),
    ("q_pos*1e0+.5<2_0.5e-1-0.5", Q + 0.5 < 1.55),
    ("q_pos - (k_pos - 1) > 0", Q - (K - 1) > 0),
    ("q_pos - k_pos - 1 > 0", Q - K - 1 > 0),
    ("12 / (q_pos / (k_pos + 1) + 1) > 3", 12 / (Q / (K + 1) + 1) > 3),
    ("q_pos % (k_pos % 3 + 1) == 1", Q % (K % 3 + 1) == 1),
    ("q_pos * (k_pos // 2) > k_pos * q_pos // 3", Q * (K // 2) > K * Q // 3),
    ("-(q_pos**2) < -k_pos < (-1)**2 * q_pos", (-(Q**2) < -K) & (-K < Q)),
    ("(q_pos < 2 or k_pos < 3) and not (k_pos < 1 and q_pos < 1)", ((Q < 2) | (K < 3)) & ~((K < 1) & (Q < 1))),
    ("((q_pos - 3)**2)**2 > 20", (Q - 3) ** 4 > 20),
    ("(-k_pos)**3 < 2 * -q_pos", -(K**3) < -2 * Q),
    ("q_pos % 0 == 1", np.zeros((T, T), bool)),
    ("  k_pos\n< 3 ", np.broadcast_to(K < 3, (T, T))),
]


def indices() -> tuple[torch.Tensor, ...]:
    return (
        torch.zeros(1, 1, 1, 1, dtype=torch.int64),
        torch.arange(HEADS).view(1, -1, 1, 1),
        torch.arange(T).view(1, 1, -1, 1),
        torch.arange(T).view(1, 1, 1, -1),
    )


def dense(mask: ch.Mask) -> np.ndarray[Any, Any]:
    return mask.dense(T, T, num_heads=HEADS, batch=1).expand(1, HEADS, T, T)[0].numpy()


def written(expression: Expression) -> Callable[..., torch.Tensor]:
    """The function that an expression says it is in Python."""
    names: dict[str, Any] = {"torch": torch}
    exec(expression.python("own"), names)
    return names["own"]  # type: ignore[no-any-return]


class TestMeaning:
    @pytest.mark.parametrize(("text", "meant"), MASKS, ids=[text for text, _ in MASKS])
    def test_mask_formula_has_the_expected_mask(self, text: str, meant: Any) -> None:
        expression = mask_expression(text)
        np.testing.assert_array_equal(dense(expression.mask()), np.broadcast_to(meant, (HEADS, T, T)))
        np.testing.assert_array_equal(dense(ch.MaskFunction(written(expression))), dense(expression.mask()))

    @pytest.mark.parametrize("text", [
        "score", "-abs(q_pos - k_pos)", "where(score > 0, 1, 2)", "where(q_pos > k_pos, score, 0.5)", "0",
        "score if k_pos <= q_pos else score - 2.5", "q_pos / -0.0", "score - log(1 + abs(q_pos - k_pos))",
        "2 * tanh(score / 2)",
        "score * (head + 1)**0.5", "max(score, -1, k_pos - q_pos)", "score - where(k_pos < 2, 1, 0)",
    ])  # fmt: skip
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_rule_keeps_shape_and_dtype_and_equals_its_python(self, text: str, dtype: torch.dtype) -> None:
        expression = score_expression(text)
        score = torch.linspace(-2, 2, HEADS * T * T, dtype=torch.float64).view(1, HEADS, T, T).to(dtype)
        got = expression.rule().apply(score, *indices())
        assert got.dtype == dtype
        assert got.shape == score.shape
        from_python = ch.ScoreFunction(written(expression)).apply(score, *indices())
        # Both compute in another order; one rounding of the result's size apart, and a few below it.
        torch.testing.assert_close(
            from_python, got, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps, equal_nan=True
        )

    def test_rule_equals_the_formula(self) -> None:
        score = torch.full((1, HEADS, T, T), 0.5, dtype=torch.float64)
        got = score_expression("score - 0.25 * abs(q_pos - k_pos)").rule().apply(score, *indices())
        alibi = ch.Alibi(slopes=[0.25]).apply(score, *indices())
        assert torch.equal(got, alibi)

    def test_expressions_run_in_attention(self) -> None:
        x = torch.randn(1, HEADS, T, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        mask, rule = (
            mask_expression("k_pos <= q_pos").mask(),
            score_expression("score - 0.25 * abs(q_pos - k_pos)").rule(),
        )
        torch.testing.assert_close(
            ch.attention(x, x, x, mask=mask, scores=[rule]),
            ch.attention(x, x, x, mask=ch.Causal(), scores=[ch.Alibi(slopes=[0.25])]),
        )


class TestRefused:
    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("q_pos > foo", "column 9 must be one of q_pos, k_pos, batch, head; got 'foo'"),
            ("k_pos < score", "column 9 must be one of q_pos, k_pos, batch, head; got 'score'"),
            ("k_pos[0] < 1", "column 6 must be a character of formulas; got '['"),
            ("'a' < 1", "column 1 must be a character of formulas"),
            ("q_pos > 1 & k_pos > 2", "column 9 must combine parts that are true or false"),
            ("9**9**9 > k_pos", "column 4 must have a plain number of at most 8 as its power; got '9**9'"),
            ("2**-99 > k_pos", "must have a plain number of at most 8"),
            ("k_pos ** q_pos > 1", "column 1 must have a plain number"),
            ("99999**8 > q_pos", "must evaluate to at most 1e+09"),
            ("1/0 < q_pos", "column 1 must evaluate to at most 1e+09; got '1/0', inf"),
            ("log(-1) < q_pos", "must evaluate to at most"),
            ("1e999 > q_pos", "must be a number of at most 1e+09"),
            ("9" * 299, "must be a number of at most 1e+09"),
            ("1j > q_pos", "column 1 must be a number alone; got '1j'"),
            ("q_pos > 1or True", "column 9 must be a number alone; got '1o'"),
            (".5if", "column 1 must be a number alone"),
            ("q_pos > 0x10", "column 9 must be a number alone"),
            ("... > 1", "must be a number"),
            (
                "q_pos.real > 1",
                "column 1 must be a number, a name, an operator or a function of formulas; got 'q_pos.real'",
            ),
            ("abs(q_pos, 1) > 1", "must pass 1 positional arguments to abs"),
            ("min(q_pos) > 1", "must pass 2 to 8 positional arguments to min"),
            ("abs(x=1) > 1", "positional arguments"),
            ("abs(*q_pos) > 1", "must be a number, a name"),
            ("print(1)", "column 1 must be one of abs, floor"),
            ("__import__(q_pos)", "column 1 must be one of abs, floor"),
            ("(abs)(q_pos)(q_pos) > 1", "must be one of abs"),
            ("q_pos", "column 1 must be true or false; got 'q_pos', a number"),
            ("q_pos is k_pos", "must compare by < <= > >= == or !="),
            ("q_pos in k_pos", "must compare by"),
            ("q_pos ^ k_pos", "column 7 must be a character"),
            ("q_pos << k_pos", "column 1 must be a number, a name, an operator"),
            ("q_pos @ k_pos", "column 7 must be a character"),
            ("lambda: 1", "must be a character"),
            ("(q_pos := 1) > 0", "must be a character"),
            ("await q_pos", "must"),
            ("(yield)", "must be a number, a name"),
            ("(q_pos, k_pos)", "must be a number, a name"),
            ("((((", "must be valid syntax"),
            ("(" * 150 + "1" + ")" * 150, "must"),
            ("-" * 299 + "1", "must stay within 24 levels"),
            ("1<" * 130 + "2", "must stay within 24 levels and 120 pieces"),
            ("q_pos+" * 40 + "1 > 1", "must stay within 24 levels"),
            ("", "text must have 1 to 300 characters; got 0 characters"),
            (" ", "text must have"),
            ("a" * (LONGEST + 1), "got 301 characters"),
            ("q_pos > 1\x00", "must be a character"),
            ("q_pos > ¹", "column 9 must be a character"),
            ("   q_pos > foo", "column 12 must be one of"),
        ],
    )
    def test_error_names_piece_and_column(self, text: str, said: str) -> None:
        with pytest.raises(MaskError) as caught:
            mask_expression(text)
        assert said in str(caught.value)
        assert str(caught.value).startswith("mask expression: ")
        assert "\n" not in str(caught.value)

    def test_condition_is_not_a_score(self) -> None:
        with pytest.raises(ShapeError, match="column 1 must be a number; got 'q_pos > 1', true"):
            score_expression("q_pos > 1")

    @pytest.mark.parametrize("value", [None, 3, ["q_pos > 1"], b"q_pos > 1"])
    def test_non_text_raises(self, value: Any) -> None:
        with pytest.raises(MaskError, match="text must have"):
            mask_expression(value)


def numbers(depth: int, names: tuple[str, ...]) -> st.SearchStrategy[str]:
    """Formulas that are numbers, mostly good ones."""
    leaf = st.one_of(st.sampled_from(names), st.integers(-3, 9).map(str), st.floats(-2, 2, width=16).map(repr))
    if depth == 0:
        return leaf
    part, truth = numbers(depth - 1, names), truths(depth - 1, names)
    joined = st.builds("({} {} {})".format, part, st.sampled_from(["+", "-", "*", "/", "//", "%"]), part)
    power = st.builds("({})**{}".format, part, st.integers(-9, 9))
    called = st.builds(
        "{}({})".format, st.sampled_from([name for name, (few, _) in FUNCTIONS.items() if few == 1]), part
    )
    several = st.builds("{}({}, {})".format, st.sampled_from(["min", "max"]), part, part)
    chosen = st.builds("where({}, {}, {})".format, truth, part, part)
    return st.one_of(leaf, joined, power, called, several, chosen, part.map("-{}".format))


def truths(depth: int, names: tuple[str, ...]) -> st.SearchStrategy[str]:
    """Formulas that are true or false, mostly good ones."""
    part = numbers(max(depth - 1, 0), names)
    compared = st.builds("({} {} {})".format, part, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), part)
    if depth <= 0:
        return compared
    truth = truths(depth - 1, names)
    joined = st.builds("({} {} {})".format, truth, st.sampled_from(["and", "or", "&", "|"]), truth)
    chosen = st.builds("({} if {} else {})".format, truth, truth, truth)
    return st.one_of(compared, joined, chosen, truth.map("not {}".format), truth.map("~{}".format))


def understood(read: Callable[[str], Expression], text: str) -> Expression | None:
    """The expression, or None where it is refused in the house's words; at most a second of its thread either way."""
    start = time.thread_time()
    try:
        expression = read(text)
        if read is mask_expression:
            expression.mask().dense(64, 64)
        else:
            score = torch.zeros(1, 1, 64, 64, dtype=torch.float64)
            places = torch.arange(64)
            expression.rule().apply(
                score,
                torch.zeros(1, 1, 1, 1),
                torch.zeros(1, 1, 1, 1),
                places.view(1, 1, -1, 1),
                places.view(1, 1, 1, -1),
            )
    except ClearheadError as refused:
        return None if "\n" not in str(refused) else pytest.fail(str(refused))
    finally:
        assert time.thread_time() - start < 1.0
    return expression


#: Signs alone, several deep: where brackets stand decides what they say.
SUMS = st.recursive(
    st.sampled_from(["q_pos", "k_pos", "score", "2", "3", "0.5"]),
    lambda part: st.builds("({} {} {})".format, part, st.sampled_from("+-*/%"), part) | part.map("(-{})".format),
    max_leaves=7,
)
CHOICES = st.recursive(
    st.builds(
        "({} {} {})".format, st.sampled_from(["q_pos", "k_pos"]), st.sampled_from(["<", "=="]), st.integers(0, 6)
    ),
    lambda part: st.builds("({} {} {})".format, part, st.sampled_from("&|"), part) | part.map("(not {})".format),
    max_leaves=7,
)

PIECES = st.sampled_from([
    "q_pos", "k_pos", "score", "head", "batch", "**", "9", "9e9", "(", ")", "+", "-", "~", "not ", " and ", " or ", "<",
    "where(", "min(", ",", "exp(", "log(", " if ", " else ", "lambda", ".", "_", "__class__", "import os", " ", "&",
    "|", "!=", "==",
])  # fmt: skip


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
class TestFuzz:
    @given(text=st.one_of(st.text(max_size=320), st.lists(PIECES, max_size=60).map("".join)))
    @settings(max_examples=300, deadline=None, database=None)
    def test_any_text_is_parsed_or_raises(self, text: str) -> None:
        understood(mask_expression, text)
        understood(score_expression, text)

    @pytest.mark.slow
    @given(text=SUMS)
    @settings(max_examples=200, deadline=None, database=None)
    def test_brackets_of_arithmetic_are_correct(self, text: str) -> None:
        expression = understood(score_expression, text)
        if expression is None:
            return
        # Python reads the typed text itself: signs mean the same there, on float64 tensors.
        score = torch.linspace(-2, 2, HEADS * T * T, dtype=torch.float64).view(1, HEADS, T, T)
        places = dict(zip(("batch", "head", "q_pos", "k_pos"), (each.double() for each in indices()), strict=True))
        meant = torch.zeros_like(score) + eval(text, {"score": score, **places})
        # 3 % (3 / 5) is 0 or 0.6 by how 3 / 5 is rounded, which for positions is in float32.
        narrow = {name: each.float() for name, each in {"score": score, **places}.items()}
        otherwise = [eval(text, narrow)]
        for off in ("1.000001", "0.999999"):
            otherwise += [eval(text.replace("/", f"/ {off} /"), {"score": score, **places})]
        close = [torch.isclose(meant, (torch.zeros_like(score) + each), 1e-4, 1e-4, True) for each in otherwise]
        sure = torch.stack(close).all(dim=0) | ("%" not in text)
        for rule in (expression.rule(), ch.ScoreFunction(written(expression))):
            result = rule.apply(score, *indices()).expand(meant.shape)
            torch.testing.assert_close(result[sure], meant[sure], rtol=1e-9, atol=1e-9, equal_nan=True)

    @given(text=CHOICES)
    @settings(max_examples=100, deadline=None, database=None)
    def test_brackets_of_conditions_are_correct(self, text: str) -> None:
        as_python = text.replace("&", "and").replace("|", "or")
        meant = np.array([[eval(as_python, {"q_pos": q, "k_pos": k}) for k in range(T)] for q in range(T)])
        expression = mask_expression(text)
        for mask in (expression.mask(), ch.MaskFunction(written(expression))):
            np.testing.assert_array_equal(dense(mask), np.broadcast_to(meant, (HEADS, T, T)))

    @pytest.mark.slow
    @given(text=truths(3, ("q_pos", "k_pos", "head", "batch")))
    @settings(max_examples=200, deadline=None, database=None)
    def test_mask_equals_its_python(self, text: str) -> None:
        expression = understood(mask_expression, text)
        if expression is not None:
            with np.errstate(all="ignore"):
                np.testing.assert_array_equal(
                    dense(ch.MaskFunction(written(expression))),
                    dense(expression.mask()),
                    err_msg=expression.python("own"),
                )

    @pytest.mark.slow
    @given(text=numbers(3, ("q_pos", "k_pos", "head", "score")))
    @settings(max_examples=200, deadline=None, database=None)
    def test_rule_equals_its_python(self, text: str) -> None:
        expression = understood(score_expression, text)
        if expression is not None:
            score = torch.linspace(-2, 2, HEADS * T * T, dtype=torch.float64).view(1, HEADS, T, T)
            got = expression.rule().apply(score, *indices())
            from_python = ch.ScoreFunction(written(expression)).apply(score, *indices())
            torch.testing.assert_close(
                from_python, got, rtol=1e-9, atol=1e-9, equal_nan=True, msg=expression.python("own")
            )
