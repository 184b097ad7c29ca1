"""The masks and score rules of the tab "Variants", as data: kinds with their fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from clearhead.errors import ShapeError
from clearhead.lab.expressions import LONGEST, mask_expression, score_expression
from clearhead.masks import Causal, Documents, Global, Padding, Prefix, Strided, Window
from clearhead.scores import Alibi, RelativeBias, Sink, SoftCap

__all__ = ["MASKS", "RULES", "Field", "Kind", "Part"]

FUNCTION: Final = "variants"


@dataclass(frozen=True, kw_only=True)
class Field:
    """One input field.

    Attributes:
        name: name of the argument in the public API.
        kind: "whole", "number", "wholes", "numbers" (lists) or "text".
        start: the initial value.
        low: the smallest number; for lists, of each entry.
        high: the largest number; for lists, of each entry.
        says: a short description.
    """

    name: str
    kind: str
    start: Any
    says: str
    low: float = 0.0
    high: float = 0.0

    def read(self, owner: str, value: object) -> Any:
        """The checked value of a request."""
        where = f"{owner} {self.name}"
        if self.kind == "text":
            return value
        if self.kind in ("wholes", "numbers"):
            if not isinstance(value, list) or not 1 <= len(value) <= 64:
                raise _wrong(where, "be 1 to 64 numbers", value, "Separate them by commas.")
            return [self._one(where, each) for each in value]
        return self._one(where, value)

    def _one(self, where: str, value: object) -> float | int:
        whole = self.kind.startswith("whole")
        number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
        if not self.low <= number <= self.high or (whole and number != int(number)):
            word = "a whole number" if whole else "a number"
            raise _wrong(where, f"be {word} from {self.low:g} to {self.high:g}", value, f"It is {self.says}.")
        return int(number) if whole else float(number)


def _wrong(argument: str, must: str, got: object, then: str) -> ShapeError:
    shown = repr(got)
    return ShapeError.about(
        FUNCTION, argument, must=must, got=shown if len(shown) <= 40 else shown[:37] + "...", then=then
    )


@dataclass(frozen=True)
class Part:
    """A mask or rule, with its Python: an expression, and the functions that it uses."""

    made: Any
    python: str
    functions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of mask or rule.

    Attributes:
        name: name on the page.
        says: a description in one sentence.
        fields: its input fields.
        make: a function from the fields' values, the number of tokens and a name for a function to the part.
    """

    name: str
    says: str
    fields: tuple[Field, ...]
    make: Callable[[Mapping[str, Any], int, str], Part]

    def part(self, values: object, tokens: int, function: str) -> Part:
        """The part of a request."""
        if not isinstance(values, Mapping):
            raise _wrong(self.name, "have its fields", values, "Send an object.")
        return self.make(
            {each.name: each.read(self.name, values.get(each.name)) for each in self.fields}, tokens, function
        )

    def as_json(self) -> dict[str, Any]:
        """The description from which the page builds the fields."""
        shown = [{"name": each.name, "kind": each.kind, "start": each.start, "says": each.says} for each in self.fields]
        return {"name": self.name, "says": self.says, "fields": shown}


def _plain(cls: Callable[..., Any]) -> Callable[[Mapping[str, Any], int, str], Part]:
    """The ``make`` of a kind whose fields are the arguments of a public class."""

    def make(values: Mapping[str, Any], tokens: int, function: str) -> Part:
        written = ", ".join(f"{name}={value!r}" for name, value in values.items())
        return Part(cls(**values), f"ch.{cls.__name__}({written})")

    return make


def _documents(values: Mapping[str, Any], tokens: int, function: str) -> Part:
    lengths = _fitting(values["lengths"], tokens)
    return Part(Documents(lengths=lengths), f"ch.Documents(lengths={lengths})")


def _fitting(lengths: Sequence[int], tokens: int) -> list[int]:
    """Lengths that sum to ``tokens``: truncated, or with an additional last document."""
    fitting: list[int] = []
    for length in lengths:
        fitting.append(min(length, tokens - sum(fitting)))
    rest = tokens - sum(fitting)
    return [length for length in (*fitting, rest) if length > 0]


def _padding(values: Mapping[str, Any], tokens: int, function: str) -> Part:
    length = min(values["length"], tokens)
    return Part(Padding([length]), f"ch.Padding([{length}])")


def _typed_mask(values: Mapping[str, Any], tokens: int, function: str) -> Part:
    formula = mask_expression(values["formula"])
    return Part(formula.mask(), f"ch.MaskFunction({function})", (formula.python(function),))


def _typed_rule(values: Mapping[str, Any], tokens: int, function: str) -> Part:
    formula = score_expression(values["formula"])
    return Part(formula.rule(), f"ch.ScoreFunction({function})", (formula.python(function),))


def _alibi(values: Mapping[str, Any], tokens: int, function: str) -> Part:
    return Part(Alibi(slopes=[values["slope"]]), f"ch.Alibi(slopes=[{values['slope']!r}])")


def _relative(values: Mapping[str, Any], tokens: int, function: str) -> Part:
    table = values["table"]
    return Part(RelativeBias(torch.tensor([table])), f"ch.RelativeBias(torch.tensor([{table}]))")


def _far(name: str, start: int, says: str, low: int = 0) -> Field:
    return Field(name=name, kind="whole", start=start, says=says, low=low, high=64)


def _formula(start: str, more: str = "") -> Field:
    says = f"at most {LONGEST} characters, with q_pos, k_pos, batch, head{more}"
    return Field(name="formula", kind="text", start=start, says=says)


MASKS: Final[Mapping[str, Kind]] = {
    kind.name: kind
    for kind in (
        Kind(
            name="Causal", says="Each query attends to its own position and those before.", fields=(),
            make=_plain(Causal),
        ),
        Kind(
            name="Window", says="Keys from q_pos − before to q_pos + after, both ends included.", make=_plain(Window),
            fields=(_far("before", 4, "positions before the query"), _far("after", 0, "positions after the query")),
        ),
        Kind(
            name="Prefix", says="Every query attends to the first keys.", make=_plain(Prefix),
            fields=(_far("length", 3, "number of keys"),),
        ),
        Kind(
            name="Global", says="The first tokens attend to all and are attended to by all.", make=_plain(Global),
            fields=(_far("num_tokens", 2, "number of tokens"),),
        ),
        Kind(
            name="Strided", says="Every stride-th key, counted from the query's own.", make=_plain(Strided),
            fields=(_far("stride", 3, "distance from one key to the next", low=1),),
        ),
        Kind(
            name="Documents", says="Tokens attend to their own document of a packed sequence.", make=_documents,
            fields=(Field(name="lengths", kind="wholes", start=[7, 5, 6], says="length of each", low=1, high=64),),
        ),
        Kind(
            name="Padding", says="Keys end at the sequence's length.", make=_padding,
            fields=(_far("length", 15, "number of real tokens"),),
        ),
        Kind(
            name="Expression", says="A formula that is true where a query may attend.", make=_typed_mask,
            fields=(_formula("k_pos <= q_pos and (q_pos - k_pos) % 3 == 0"),),
        ),
    )
}  # fmt: skip

RULES: Final[Mapping[str, Kind]] = {
    kind.name: kind
    for kind in (
        Kind(
            name="Alibi", says="score − slope × |q_pos − k_pos| (Press et al. 2022, section 3).", make=_alibi,
            fields=(Field(name="slope", kind="number", start=0.25, says="penalty per position", low=-10, high=10),),
        ),
        Kind(
            name="SoftCap", says="cap × tanh(score / cap): scores stay within ± cap (Gemma 2 report, section 2).",
            make=_plain(SoftCap),
            fields=(Field(name="cap", kind="number", start=2.0, says="the bound", low=1e-3, high=1e4),),
        ),
        Kind(
            name="RelativeBias", says="score + table[q_pos − k_pos], clipped at the ends (Shaw et al. 2018, sec. 3.2).",
            make=_relative,
            fields=(
                Field(
                    name="table", kind="numbers", start=[-1.0, -0.5, 0.0, 0.0, 2.0, 1.0, -1.0], low=-100, high=100,
                    says="an odd number of values; the middle is distance 0, earlier keys are to its right",
                ),
            ),
        ),
        Kind(
            name="Sink", says="A logit in the softmax without a value, so weights sum to less than 1.",
            make=lambda values, tokens, function: Part(Sink(values["logit"]), f"ch.Sink({values['logit']!r})"),
            fields=(Field(name="logit", kind="number", start=1.0, says="its score", low=-100, high=100),),
        ),
        Kind(
            name="Expression", says="A formula for the new score.", make=_typed_rule,
            fields=(_formula("score - 0.3 * sqrt(abs(q_pos - k_pos))", ", score"),),
        ),
    )
}  # fmt: skip
