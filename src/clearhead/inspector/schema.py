"""The data of a page, format ``clearhead-page`` version 1: what it holds, stated as data, and its check.

A page's data is one JSON object; the table ``FIELDS`` below names every field with its rule. Arrays of numbers
are base64 of little-endian float32, row by row, because the browser recomputes attention from them and a decimal
text would cost three times the space. With ``T`` tokens, ``L`` layers, ``H`` heads of width ``d`` and a model of
width ``E``:

======================================  ==============================================================
``format``, ``version``                 ``"clearhead-page"``, ``1``
``title``, ``made_by``                  text for people: the heading, and what made the page
``facts``                               ``[{label, value, note}]``: texts, shown in order
``classes``                             the name of each class
``grid``                                ``{rows, columns, max_value}``: ``T = rows * columns`` tokens
``attention``                           ``{num_layers L, num_heads H, head_dim d, embed_dim E, scale}``
``output_weights``                      ``L`` arrays ``[E, H * d]``: what turns heads into the module's output
``examples``                            one object for each sequence that can be picked:
``.name``, ``.truth``, ``.predicted``   text; index of a class or null; index of a class
``.probabilities``                      one number from 0 to 1 for each class
``.values``                             ``T`` whole numbers from 0 to ``max_value``: the tokens
``.telling``                            ``{layer, head, token}``: the view shown first
``.influence``                          ``L`` lists of ``H`` numbers: log-probability lost without each head
``.layers``                             ``L`` objects of arrays:
``.layers.query``, ``key``, ``value``   ``[H, T, d]``
``.layers.lse``                         ``[H, T]``: the library's log-sum-exp of each row of scores
``.layers.output``                      ``[H, T, d]``: the library's output of each head
``.layers.differences``                 ``[len(STEPS), H, T]``: largest ``|library - float64|`` of each step
======================================  ==============================================================

A reader refuses a format or a version that it does not know. A field that is added raises nothing; a field whose
meaning changes raises the version.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clearhead.errors import DataError

__all__ = ["FIELDS", "FORMAT", "STEPS", "VERSION", "pack_floats", "unpack_floats", "validate"]

FORMAT = "clearhead-page"
VERSION = 1

STEPS = ("scores", "scaled", "weights", "output", "part")
"""The steps whose difference from float64 a page carries, in the order of ``differences``."""


def pack_floats(numbers: ArrayLike) -> str:
    """Numbers as base64 of little-endian float32.

    >>> unpack_floats(pack_floats([1.0, -0.5])).tolist()
    [1.0, -0.5]
    """
    return base64.b64encode(np.ascontiguousarray(numbers, dtype="<f4").tobytes()).decode("ascii")


def unpack_floats(text: str) -> NDArray[np.float32]:
    """The numbers of ``pack_floats``, flat; raises ``ValueError`` where the text is not such an array."""
    return np.frombuffer(base64.b64decode(text, validate=True), dtype="<f4")


Sizes = Mapping[str, int]
Rule = Callable[[Any, Sizes], str | None]
"""Says what a value must be where it is not, given the sizes that the page declares."""


def _text(value: Any, sizes: Sizes) -> str | None:
    return None if isinstance(value, str) else "be text"


def _exactly(wanted: object) -> Rule:
    return lambda value, sizes: None if type(value) is type(wanted) and value == wanted else f"be {wanted!r}"


def _index(size: str, *, optional: bool = False) -> Rule:
    def rule(value: Any, sizes: Sizes) -> str | None:
        if optional and value is None:
            return None
        inside = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < sizes[size]
        return None if inside else f"be a whole number from 0 to {sizes[size] - 1}"

    return rule


def _size(value: Any, sizes: Sizes) -> str | None:
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    return None if whole else "be a whole number of at least 1"


def _number(value: Any, sizes: Sizes) -> str | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return None if good else "be a finite number"


def _part(value: Any, sizes: Sizes) -> str | None:
    return None if _number(value, sizes) is None and 0 <= value <= 1 else "be a number from 0 to 1"


def _list_of(rule: Rule, size: str | None = None) -> Rule:
    def check(value: Any, sizes: Sizes) -> str | None:
        if not isinstance(value, list) or (size is not None and len(value) != sizes[size]):
            return f"be a list of {sizes[size] if size else 'entries'}"
        return next((problem for entry in value if (problem := rule(entry, sizes))), None)

    return check


def _floats(*axes: str) -> Rule:
    def check(value: Any, sizes: Sizes) -> str | None:
        shape = [sizes[axis] for axis in axes]
        must = f"be base64 of {' x '.join(map(str, shape))} finite float32 numbers"
        try:
            numbers = unpack_floats(value)
        except (TypeError, ValueError, binascii.Error):
            return must
        return None if numbers.size == math.prod(shape) and bool(np.isfinite(numbers).all()) else must

    return check


Fields = Mapping[str, Any]
"""Each field's rule, or the fields of an object, or a list of one such for a list of objects."""

_LAYER: Fields = {
    "query": _floats("heads", "tokens", "head_dim"),
    "key": _floats("heads", "tokens", "head_dim"),
    "value": _floats("heads", "tokens", "head_dim"),
    "lse": _floats("heads", "tokens"),
    "output": _floats("heads", "tokens", "head_dim"),
    "differences": _floats("steps", "heads", "tokens"),
}

_EXAMPLE: Fields = {
    "name": _text,
    "truth": _index("classes", optional=True),
    "predicted": _index("classes"),
    "probabilities": _list_of(_part, "classes"),
    "values": _list_of(_index("values"), "tokens"),
    "telling": {"layer": _index("layers"), "head": _index("heads"), "token": _index("tokens")},
    "influence": _list_of(_list_of(_number, "heads"), "layers"),
    "layers": [_LAYER],
}

FIELDS: Fields = {
    "format": _exactly(FORMAT),
    "version": _exactly(VERSION),
    "title": _text,
    "made_by": _text,
    "facts": [{"label": _text, "value": _text, "note": _text}],
    "classes": _list_of(_text),
    "grid": {"rows": _size, "columns": _size, "max_value": _size},
    "attention": {"num_layers": _size, "num_heads": _size, "head_dim": _size, "embed_dim": _size, "scale": _number},
    "output_weights": _list_of(_floats("embed_dim", "all_heads"), "layers"),
    "examples": [_EXAMPLE],
}

# The fields that the sizes of the others are read from; they are checked first.
_DECLARING = ("format", "version", "classes", "grid", "attention")


def validate(data: object, *, function: str = "inspector.validate") -> None:
    """Raise ``DataError`` naming the first field of a page's data that does not follow the format.

    >>> validate({"format": "clearhead-page", "version": 2})
    Traceback (most recent call last):
        ...
    clearhead.errors.DataError: inspector.validate: version must be 1; got 2. Make the page again.
    """
    _check(data, {name: FIELDS[name] for name in _DECLARING}, "", {}, function)
    assert isinstance(data, dict)
    sizes = _sizes(data)
    if sizes["classes"] < 2:
        _refuse(function, "classes", "have at least 2", sizes["classes"])
    _check(data, FIELDS, "", sizes, function)
    if not data["examples"]:
        _refuse(function, "examples", "have at least 1", 0)
    for number, example in enumerate(data["examples"]):
        if len(example["layers"]) != sizes["layers"]:
            _refuse(function, f"examples[{number}].layers", f"have {sizes['layers']} entries", len(example["layers"]))


def _sizes(data: Mapping[str, Any]) -> dict[str, int]:
    grid, attention = data["grid"], data["attention"]
    return {
        "tokens": grid["rows"] * grid["columns"],
        "values": grid["max_value"] + 1,
        "classes": len(data["classes"]),
        "layers": attention["num_layers"],
        "heads": attention["num_heads"],
        "head_dim": attention["head_dim"],
        "all_heads": attention["num_heads"] * attention["head_dim"],
        "embed_dim": attention["embed_dim"],
        "steps": len(STEPS),
    }


def _check(value: Any, shape: Any, path: str, sizes: Sizes, function: str) -> None:
    """Walk ``value`` along the shape that the format gives it."""
    if isinstance(shape, Mapping):
        if not isinstance(value, dict):
            _refuse(function, path or "page", "be an object", value)
        for name, inner in shape.items():
            here = f"{path}.{name}" if path else name
            if name not in value:
                _refuse(function, here, "be there", "nothing")
            _check(value[name], inner, here, sizes, function)
    elif isinstance(shape, list):
        if not isinstance(value, list):
            _refuse(function, path, "be a list", value)
        for number, entry in enumerate(value):
            _check(entry, shape[0], f"{path}[{number}]", sizes, function)
    elif problem := shape(value, sizes):
        _refuse(function, path, problem, value)


def _refuse(function: str, path: str, must: str, got: object) -> None:
    shown = repr(got) if not isinstance(got, str) or got != "nothing" else got
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    raise DataError.about(function, path, must=must, got=shown, then="Make the page again.")
