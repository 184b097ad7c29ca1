"""The jobs of the tab "Variants": a mask and score rules, selected or typed, and their effect on a head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from clearhead.errors import ClearheadError, ShapeError
from clearhead.functional.exact import explain_dispatch, observe_attention
from clearhead.lab.variants_heads import DIM, HEADS, heads, words
from clearhead.lab.variants_parts import MASKS, RULES, Field, Kind, Part
from clearhead.lab.variants_starts import STARTS
from clearhead.lab.work import Ticket, Work
from clearhead.masks import Mask
from clearhead.masks.base import index_tensors
from clearhead.masks.tile_map import EMPTY, FULL, PARTIAL, tile_map
from clearhead.scores import ScoreRule, Sink
from clearhead.statistics import Observation, Want

__all__ = ["WORKS", "compute"]

FUNCTION: Final = "variants"
_MOST_PARTS: Final = 5
_TOKENS: Final = Field(name="count", kind="whole", start=24, says="number of tokens", low=4, high=64)
_TEMPERATURE: Final = Field(
    name="temperature", kind="number", start=1.0, says="divisor of the scores", low=0.01, high=100
)
#: Scores at which the rules' result is drawn.
_SCORES: Final = torch.linspace(-6, 6, 61, dtype=torch.float64)
_PROBES: Final = (-1.5, 0.0, 1.5)


class _Refused(Exception):
    """A part is invalid; ``place`` says which."""

    def __init__(self, place: str, message: str) -> None:
        super().__init__(message)
        self.place = place


@dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """The requested mask and rules, and the equivalent Python."""

    tokens: int
    head: int
    mask: Mask | None
    mask_python: str
    rules: tuple[ScoreRule, ...]
    parts: tuple[Part, ...]
    rules_python: tuple[str, ...]
    temperature: float

    @property
    def scale(self) -> float:
        return 1.0 / (self.temperature * math.sqrt(DIM))

    @property
    def elementwise(self) -> tuple[ScoreRule, ...]:
        return tuple(rule for rule in self.rules if not isinstance(rule, Sink))


def menu(params: Mapping[str, Any], ticket: Ticket) -> dict[str, Any]:
    """The available masks, rules, heads and presets."""
    return {
        "starts": [start.as_json() for start in STARTS],
        "masks": [kind.as_json() for kind in MASKS.values()],
        "rules": [kind.as_json() for kind in RULES.values()],
        "heads": [{"name": head.name, "says": head.says} for head in HEADS],
        "tokens": {"start": _TOKENS.start, "low": _TOKENS.low, "high": _TOKENS.high},
        "parts": _MOST_PARTS,
    }


def compute(params: Mapping[str, Any], ticket: Ticket) -> dict[str, Any]:
    """The variant's mask, its effect on a head, and its Python; or ``refused``, the invalid part."""
    try:
        variant = _read(params)
    except _Refused as refused:
        return {"refused": {"place": refused.place, "message": str(refused)}}
    query, key, value = heads(variant.tokens)
    indices = index_tensors(1, len(HEADS), variant.tokens, variant.tokens, 0, None)
    allowed = _allowed(variant)
    options: dict[str, Any] = {"mask": variant.mask, "scores": variant.rules, "scale": variant.scale}
    scores = _scores(query, key, variant, indices)
    _check(scores[0, variant.head], allowed[variant.head])
    want = Want(entropy=True, distance=True, rows=range(variant.tokens))
    before = observe_attention(query, key, value, want=want)
    changed = observe_attention(query, key, value, want=want, **options)
    plain = (query @ key.transpose(-2, -1)) / math.sqrt(DIM)
    report = explain_dispatch(query.float(), key.float(), value.float(), **options)
    return {
        "words": words(variant.tokens),
        "mask": _shape(variant, allowed, indices),
        "before": _shown(before, plain, torch.ones_like(allowed), variant.head),
        "after": _shown(changed, scores, allowed, variant.head),
        "curve": _curve(variant, indices),
        "dispatch": {
            "choice": report.choice,
            "reasons": [{"name": name, "against": list(against)} for name, against in report.reasons.items()],
        },
        "python": _python(variant),
    }


def _read(params: Mapping[str, Any]) -> Variant:
    tokens = _TOKENS.read("tokens", params.get("tokens", _TOKENS.start))
    temperature = _TEMPERATURE.read("scores'", params.get("temperature", 1.0))
    names = [head.name for head in HEADS]
    head = params.get("head", names[0])
    if head not in names:
        raise ShapeError.about(
            FUNCTION, "head", must=f"be one of {', '.join(names)}", got=repr(head)[:40], then="Choose one."
        )
    masks = _parts("mask", params.get("mask", []), MASKS, tokens)
    rules = _parts("rule", params.get("rules", []), RULES, tokens)
    if len([part for _, part in rules if isinstance(part.made, Sink)]) > 1:
        raise ShapeError.about(FUNCTION, "rules", must="have at most one Sink", got="several", then="Remove one.")
    mask, mask_python = _combined(masks)
    return Variant(
        tokens=tokens,
        head=names.index(head),
        mask=mask,
        mask_python=mask_python,
        rules=tuple(part.made for _, part in rules),
        rules_python=tuple(part.python for _, part in rules),
        parts=tuple(part for _, part in (*masks, *rules)),
        temperature=temperature,
    )


def _parts(what: str, given: object, kinds: Mapping[str, Kind], tokens: int) -> list[tuple[Mapping[str, Any], Part]]:
    if not isinstance(given, list) or len(given) > _MOST_PARTS or not all(isinstance(each, dict) for each in given):
        raise ShapeError.about(
            FUNCTION,
            what,
            must=f"be a list of at most {_MOST_PARTS} parts",
            got=repr(given)[:40],
            then="Remove some.",
        )
    made = []
    for place, asked in enumerate(given):
        kind = kinds.get(asked["kind"]) if isinstance(asked.get("kind"), str) else None
        if kind is None:
            raise ShapeError.about(
                FUNCTION,
                f"{what} {place + 1}",
                must=f"be one of {', '.join(kinds)}",
                got=repr(asked.get("kind"))[:40],
                then="Choose one.",
            )
        try:
            made.append((asked, kind.part(asked.get("values", {}), tokens, f"own_{what}_{place + 1}")))
        except ClearheadError as failure:
            raise _Refused(f"{what}/{place}", str(failure)) from failure
    return made


def _combined(masks: Sequence[tuple[Mapping[str, Any], Part]]) -> tuple[Mask | None, str]:
    """The mask of all parts, each combined with the mask of those before it."""
    whole: Mask | None = None
    text, last = "None", ""
    for asked, part in masks:
        one, python = (~part.made, f"~{part.python}") if asked.get("not") is True else (part.made, part.python)
        if whole is None:
            whole, text = one, python
        elif asked.get("join") == "|":
            whole, text, last = whole | one, f"{text} | {python}", "|"
        else:
            whole, text, last = whole & one, f"({text}) & {python}" if last == "|" else f"{text} & {python}", "&"
    return whole, text


def _allowed(variant: Variant) -> Tensor:
    """The allowed pairs, bool ``[heads, tokens, tokens]``."""
    shape = (len(HEADS), variant.tokens, variant.tokens)
    if variant.mask is None:
        return torch.ones(shape, dtype=torch.bool)
    return variant.mask.dense(variant.tokens, variant.tokens, batch=1, num_heads=len(HEADS)).expand(1, *shape)[0]


def _scores(query: Tensor, key: Tensor, variant: Variant, indices: tuple[Tensor, ...]) -> Tensor:
    return _ruled((query @ key.transpose(-2, -1)) * variant.scale, variant, indices)


def _ruled(scores: Tensor, variant: Variant, indices: tuple[Tensor, ...]) -> Tensor:
    batch, head, q_pos, k_pos = indices
    for rule in variant.elementwise:
        scores = rule.apply(scores, batch, head, q_pos, k_pos)
    return scores


def _check(scores: Tensor, allowed: Tensor) -> None:
    """Raise for NaN or +inf in allowed scores, which would give NaN rows; -inf forbids and is valid."""
    wrong = allowed & (scores.isnan() | (scores == torch.inf))
    if bool(wrong.any()):
        query, key = wrong.nonzero()[0].tolist()
        raise ShapeError.about(
            FUNCTION,
            "rules",
            must="give finite scores where the mask allows",
            got=f"{float(scores[query, key])} at q_pos {query}, k_pos {key}",
            then="Keep log and sqrt above 0, and do not divide by 0; a mask can exclude such pairs.",
        )


def _shape(variant: Variant, allowed: Tensor, indices: tuple[Tensor, Tensor, Tensor, Tensor]) -> dict[str, Any]:
    of_head = allowed[variant.head]
    counts = of_head.sum(dim=1)
    side = 8 if variant.tokens >= 16 else 4
    mask = variant.mask
    if mask is None:
        tiles = torch.full((-(-variant.tokens // side),) * 2, FULL, dtype=torch.int8)
    else:
        every = tile_map(mask, indices, side, side)
        tiles = every[0, variant.head if every.shape[1] > 1 else 0]
    runs = mask is None or mask.intervals(indices[0], indices[1], indices[2], variant.tokens) is not None
    return {
        "python": variant.mask_python,
        "allowed": ["".join("1" if may else "0" for may in row) for row in of_head.tolist()],
        "fraction": float(of_head.double().mean()),
        "counts": counts.tolist(),
        "empty": [query for query, count in enumerate(counts.tolist()) if count == 0],
        "runs": runs,
        "tiles": {
            "side": side,
            "kinds": tiles.tolist(),
            "empty": int((tiles == EMPTY).sum()),
            "partial": int((tiles == PARTIAL).sum()),
            "full": int((tiles == FULL).sum()),
        },
    }


def _numbers(values: Tensor) -> Any:
    """Nested lists, rounded to nine places; None for NaN and infinity."""
    if values.ndim > 1:
        return [_numbers(row) for row in values]
    return [round(value, 9) if math.isfinite(value) else None for value in values.tolist()]


def _shown(observation: Observation, scores: Tensor, allowed: Tensor, head: int) -> dict[str, Any]:
    assert observation.rows is not None
    assert observation.entropy is not None
    assert observation.distance is not None
    weights = observation.rows[0, head]
    return {
        "weights": _numbers(weights),
        "scores": _numbers(scores[0, head].masked_fill(~allowed[head], -torch.inf)),
        "entropy": _numbers(observation.entropy[0, head]),
        "distance": _numbers(observation.distance[0, head]),
        "mass": _numbers(weights.sum(dim=1)),
    }


def _curve(variant: Variant, indices: tuple[Tensor, ...]) -> dict[str, Any]:
    """The rules' result for a score: over the distance, if it depends on that alone, and over the score."""
    if not variant.elementwise:
        return {"relative": None}
    tokens, head = variant.tokens, variant.head
    shape = (1, len(HEADS), tokens, tokens)
    probes = [_ruled(torch.full(shape, probe, dtype=torch.float64), variant, indices)[0, head] for probe in _PROBES]
    relative = all(_along_diagonals(probe) for probe in probes)
    batch, heads_, _, _ = indices
    place = torch.full((1, 1, 1, 1), tokens // 2)
    asked = _SCORES.expand(1, len(HEADS), 1, -1)
    answers = _ruled(asked, variant, (batch, heads_, place, place))[0, head, 0]
    at_zero = probes[_PROBES.index(0.0)]
    by_distance = torch.cat([at_zero[0].flip(0)[:-1], at_zero[:, 0]])
    return {
        "relative": relative,
        "distances": list(range(1 - tokens, tokens)) if relative else [],
        "values": _numbers(by_distance) if relative else [],
        "scores": _SCORES.tolist(),
        "answers": _numbers(answers),
        "shifts": bool((answers - _SCORES).max() - (answers - _SCORES).min() < 1e-9),
    }


def _along_diagonals(square: Tensor) -> bool:
    """Whether all elements of each diagonal are equal."""
    return torch.allclose(square[1:, 1:], square[:-1, :-1], rtol=1e-9, atol=1e-9, equal_nan=True)


def _python(variant: Variant) -> str:
    scale = "" if variant.temperature == 1.0 else f", scale=query.shape[-1] ** -0.5 / {variant.temperature!r}"
    functions = [function for part in variant.parts for function in part.functions]
    values = f"mask = {variant.mask_python}\nscores = [{', '.join(variant.rules_python)}]"
    call = (
        f"def attend(query, key, value):\n    return ch.attention(query, key, value, mask=mask, scores=scores{scale})\n"
    )
    body = "\n\n\n".join([*functions, values, call])
    imports = "import torch\n\nimport clearhead as ch" if "torch." in body else "import clearhead as ch"
    # Two empty lines before a function, as Python is written.
    gap = "\n\n\n" if functions else "\n\n"
    return f"{imports}{gap}{body}"


WORKS: tuple[Work, ...] = (
    Work(name="variants-menu", run=menu, seconds=5.0),
    Work(name="variants", run=compute, seconds=10.0),
)
