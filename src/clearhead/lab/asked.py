"""Reads the fields of a request; a field that breaks its rule raises an error of one line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from clearhead.errors import DataError, ShapeError

__all__ = ["choice", "number", "records", "text", "whole", "wholes"]

_FUNCTION = "lab"


def text(params: Mapping[str, Any], name: str, most: int) -> str:
    """A text of at most ``most`` characters."""
    value = params.get(name)
    if not isinstance(value, str):
        raise DataError.about(_FUNCTION, name, must="be a text", got=_kind(value), then="Send one.")
    if len(value) > most:
        raise DataError.about(
            _FUNCTION, name, must=f"have at most {most:,} characters", got=f"{len(value):,}", then="Use a shorter one."
        )
    return value


def whole(params: Mapping[str, Any], name: str, low: int, high: int, default: int | None = None) -> int:
    """A whole number from ``low`` to ``high``."""
    value = params.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ShapeError.about(
            _FUNCTION, name, must=f"be a whole number from {low} to {high}", got=_kind(value), then="Choose another."
        )
    return value


def wholes(params: Mapping[str, Any], name: str, most: int) -> tuple[int, ...]:
    """Whole numbers from 0 to ``most``; empty if the field is absent."""
    values = params.get(name, [])
    if not isinstance(values, list) or any(
        isinstance(each, bool) or not isinstance(each, int) or not 0 <= each <= most for each in values
    ):
        raise ShapeError.about(
            _FUNCTION, name, must=f"be whole numbers from 0 to {most}", got=_kind(values), then="Choose others."
        )
    return tuple(dict.fromkeys(values))


def number(params: Mapping[str, Any], name: str, low: float, high: float, default: float) -> float:
    """A number from ``low`` to ``high``."""
    value = params.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ShapeError.about(
            _FUNCTION, name, must=f"be a number from {low:g} to {high:g}", got=_kind(value), then="Choose another."
        )
    return float(value)


def choice(params: Mapping[str, Any], name: str, among: Iterable[str], default: str) -> str:
    """One of the words in ``among``."""
    value, choices = params.get(name, default), list(among)
    if value not in choices:
        raise DataError.about(
            _FUNCTION, name, must=f"be one of {', '.join(choices)}", got=_kind(value), then="Choose one."
        )
    return str(value)


def records(params: Mapping[str, Any], name: str, most: int) -> Sequence[Mapping[str, Any]]:
    """At most ``most`` objects; empty if the field is absent."""
    values = params.get(name, [])
    if not isinstance(values, list) or len(values) > most or not all(isinstance(each, dict) for each in values):
        raise DataError.about(
            _FUNCTION, name, must=f"be a list of at most {most} objects", got=_kind(values), then="Send fewer."
        )
    return values


def _kind(value: object) -> str:
    return "nothing" if value is None else repr(value)[:80]
