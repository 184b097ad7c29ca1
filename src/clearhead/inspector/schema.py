"""The data of an attention page, format ``clearhead-view`` version 2, and its check.

One JSON object. Arrays are those of ``inspector.arrays``. With ``Q`` queries, ``K`` keys and heads of width ``d``:

==============================  ======================================================================
``format``, ``version``         ``"clearhead-view"``, ``2``
``title``, ``made_by``          texts to show
``texts``                       lists of token texts, which layers refer to by index
``masks``                       masks, which heads refer to by index: ``{"kind": "runs", "start", "stop"}`` with ``i32``
                                ``[Q, runs]``, keys from ``start`` up to, not including, ``stop``; or ``{"kind":
                                "table", "bits"}`` with ``u8`` ``[Q, ceil(K / 8)]``, the first key in the lowest bit
``images``                      images, which layers refer to by index: ``{"pixels"}`` ``u8`` ``[height, width, 1|3]``,
                                and ``rows``, ``columns``, ``first``: key ``first`` is the upper left patch, the others
                                follow row by row; likewise for queries if they are the same tokens
``facts``                       results to show at the top: ``[{"label", "value", "note"}]``, texts
``runs``                        one object for each run:
``.name``, ``.says``            text; description of the run
``.bars``                       optional, ``[{"label", "value"}]``: numbers from 0 to 1, such as probabilities
``.start``                      optional, ``{"layer", "head", "query"}``: what to show first; the layer by its index in
                                ``layers``, the head by its index in the layer
``layers``                      one object for each layer:
``.run``, ``.image``            index in ``runs``; index in ``images`` or null
``.name``, ``.says``            text; texts that name the mask and the score rules
``.queries``, ``.tokens``       indices in ``texts``: of the queries, and of the keys
``.first``                      position of the first query; keys count from 0
``.q_len``, ``.k_len``          ``Q`` and ``K``
``.head_dim``, ``.value_dim``   ``d``, and the width ``V`` of values
``.scale``                      the factor of ``q . k``
``.num_heads``                  how many heads the layer has, on the page or not
``.keys``, ``.norms``           for each key head an array ``[K, d]``, and ``[K]``: the norm of each value
``.values``                     for each key head an array ``[K, V]``; empty if values are not stored
``.heads``                      one object for each head on the page:
``..head``, ``..key``           its number in the layer; index in ``keys``
``..mask``                      index in ``masks``, or null: every key is allowed
``..query``                     array ``[Q, d]``
``..rules``                     the rules on scaled scores, in order: ``{"kind": "softcap", "cap"}`` or ``{"kind":
                                "relative", "bias"}`` with ``f32`` ``[Q + K - 1]``, of which element
                                ``q - k + K - 1`` is added at row ``q``, column ``k``
``..table``                     optional, ``[Q, K]``: scores after all rules, which replace the computed ones
``..lse``                       ``[Q]``: log-sum-exp of the row's scores, a sink's included, for the quantised queries
                                and keys; -inf if the row is empty
``..fix``                       optional, ``[Q, K]``: a correction, added to each weight that the mask allows
``..near``                      optional, corrections of some weights of long rows: ``counts`` ``u8`` ``[Q]``, how many
                                each row has, ``places``, their keys, and ``fix``, the corrections
``..rest``                      with ``values``, ``[Q, V]``: a correction, added to the sum of weighted values
``..entropy``, ``..distance``   ``[Q]``; these and the next two only with an ``overview``, else compute them
``..first``                     ``[Q]``: weight on the first key
``..received``                  ``[K]``: attention received
``..thumb``                     ``{side, cells}``: the largest weight of each block of ``side`` x ``side``, ``u8`` of
                                255 times its square root; at most 32 x 32
``..overview``                  optional, the same in smaller blocks
``..scores``                    numbers that heads are sorted by: means over queries of entropy, distance and weight on
                                the first key; ``previous``, ``following``, ``same``, and ``induction`` if the text
                                repeats, from ``ch.observe.head_scores``; a page's author may add others
``..error``                     ``{weight, score}``: the largest differences from the library
==============================  ======================================================================

A weight is ``max(0, exp(score - lse) + fix)`` if the mask allows the key, else 0; a score is
``rules(scale * q . k)``; the output is ``sum_j weight_j value_j + rest``.

Version 1 did not have the fields ``images``, ``facts``, ``runs``, ``run``, ``image``, ``value_dim``, ``norms``,
``values``, ``fix``, ``near`` and ``rest``.

A reader refuses an unknown format or version. An added field keeps the version; a field whose meaning changes
increases it, and readers continue to read older versions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from clearhead.errors import DataError
from clearhead.inspector.arrays import TYPES, unpack

__all__ = ["FORMAT", "VERSION", "validate"]

#: Name of the format of the JSON data in a page, its ``"format"`` field.
FORMAT: Final = "clearhead-view"
#: Version of the format that ``view`` writes; ``Page.open`` reads versions 1 and 2.
VERSION: Final = 2
_READ: Final = (1, 2)

_WHOLE: Final = ("first", "q_len", "k_len", "head_dim", "num_heads")
_PICTURE: Final = ("rows", "columns", "first")
_STATISTICS: Final = ("entropy", "distance", "first")


def validate(data: object, *, function: str = "inspector.validate") -> None:
    """Check that ``data`` follows the format of an attention page.

    Args:
        data: the page's JSON object.
        function: name of the calling function, for the error text.

    Raises:
        DataError: a field does not follow the format; the text names the first such field.

    >>> validate({"format": "clearhead-view", "version": 3}, function="view")
    Traceback (most recent call last):
        ...
    clearhead.errors.DataError: view: version must be 1 or 2; got 3. Make the page again.
    """
    _Check(function).page(data)


class _Check:
    """The checks of all fields; the first wrong field raises."""

    def __init__(self, function: str) -> None:
        self._function = function
        self._since_2 = True

    def page(self, data: object) -> None:
        page = self._object(data, "page")
        self._is(page.get("format") == FORMAT, "format", f"be {FORMAT!r}", page.get("format"))
        version = page.get("version")
        self._is(_whole(version) and version in _READ, "version", f"be {' or '.join(map(str, _READ))}", version)
        self._since_2 = version != 1
        for name in ("title", "made_by"):
            self._is(isinstance(page.get(name), str), name, "be text", page.get(name))
        for name in ("texts", "masks", "layers"):
            self._list(page.get(name), name)
        for place, texts in enumerate(page["texts"]):
            good = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
            self._is(good, f"texts[{place}]", "be a list of texts", texts)
        self._is(bool(page["layers"]), "layers", "have at least one", 0)
        if self._since_2:
            self._around(page)
        for place, layer in enumerate(page["layers"]):
            self._layer(layer, f"layers[{place}]", page)

    def _around(self, page: Mapping[str, Any]) -> None:
        """Check the fields besides the layers."""
        for place, image in enumerate(self._list(page.get("images"), "images")):
            self._image(image, f"images[{place}]")
        for place, fact in enumerate(self._list(page.get("facts"), "facts")):
            self._named(fact, f"facts[{place}]", ("label", "value", "note"))
        self._is(bool(self._list(page.get("runs"), "runs")), "runs", "have at least one", 0)
        for place, run in enumerate(page["runs"]):
            path = f"runs[{place}]"
            self._named(run, path, ("name", "says"))
            for at, bar in enumerate(self._list(run.get("bars", []), f"{path}.bars")):
                self._named(bar, f"{path}.bars[{at}]", ("label",))
                value = bar.get("value")
                good = isinstance(value, (int, float)) and 0 <= value <= 1
                self._is(good, f"{path}.bars[{at}].value", "be a number from 0 to 1", value)
            if "start" in run:
                start = self._object(run["start"], f"{path}.start")
                layer = self._object(self._place(start.get("layer"), page["layers"], f"{path}.start.layer"), "layers")
                self._place(start.get("head"), self._list(layer.get("heads"), "heads"), f"{path}.start.head")
                self._is(_whole(start.get("query")), f"{path}.start.query", "be a whole number", start.get("query"))

    def _named(self, value: object, path: str, names: tuple[str, ...]) -> None:
        one = self._object(value, path)
        for name in names:
            self._is(isinstance(one.get(name), str), f"{path}.{name}", "be text", one.get(name))

    def _image(self, value: object, path: str) -> None:
        image = self._object(value, path)
        shape = self._array(image.get("pixels"), None, f"{path}.pixels")
        self._is(len(shape) == 3 and shape[2] in (1, 3), f"{path}.pixels.shape", "be [height, width, 1 or 3]", shape)
        for name in _PICTURE:
            self._is(_whole(image.get(name)), f"{path}.{name}", "be a whole number", image.get(name))

    def _layer(self, value: object, path: str, page: Mapping[str, Any]) -> None:
        layer = self._object(value, path)
        self._is(isinstance(layer.get("name"), str), f"{path}.name", "be text", layer.get("name"))
        for name in _WHOLE:
            self._is(_whole(layer.get(name)), f"{path}.{name}", "be a whole number", layer.get(name))
        scale = layer.get("scale")
        self._is(isinstance(scale, (int, float)) and math.isfinite(scale), f"{path}.scale", "be a number", scale)
        for name, count in (("queries", layer["q_len"]), ("tokens", layer["k_len"])):
            texts = self._place(layer.get(name), page["texts"], f"{path}.{name}")
            self._is(len(texts) == count, f"{path}.{name}", f"name {count} texts", len(texts))
        self._list(layer.get("keys"), f"{path}.keys")
        for place, key in enumerate(layer["keys"]):
            self._array(key, (layer["k_len"], layer["head_dim"]), f"{path}.keys[{place}]")
        if self._since_2:
            self._values(layer, path, page)
        self._is(bool(self._list(layer.get("heads"), f"{path}.heads")), f"{path}.heads", "have at least one", 0)
        for place, head in enumerate(layer["heads"]):
            self._head(head, f"{path}.heads[{place}]", layer, page)

    def _values(self, layer: Mapping[str, Any], path: str, page: Mapping[str, Any]) -> None:
        self._place(layer.get("run"), page["runs"], f"{path}.run")
        self._is(_whole(layer.get("value_dim")), f"{path}.value_dim", "be a whole number", layer.get("value_dim"))
        if layer.get("image") is not None:
            image = self._place(layer["image"], page["images"], f"{path}.image")
            last = image["first"] + image["rows"] * image["columns"]
            self._is(last <= layer["k_len"], f"{path}.image", f"have patches within {layer['k_len']} keys", last)
        k_len, keys = layer["k_len"], len(layer["keys"])
        for name, shape, least in (("norms", (k_len,), keys), ("values", (k_len, layer["value_dim"]), 0)):
            listed = self._list(layer.get(name), f"{path}.{name}")
            self._is(len(listed) in (least, keys), f"{path}.{name}", f"have {keys} entries", len(listed))
            for place, array in enumerate(listed):
                self._array(array, shape, f"{path}.{name}[{place}]")

    def _head(self, value: object, path: str, layer: Mapping[str, Any], page: Mapping[str, Any]) -> None:
        head = self._object(value, path)
        q_len, k_len = layer["q_len"], layer["k_len"]
        self._is(_whole(head.get("head")), f"{path}.head", "be a whole number", head.get("head"))
        self._place(head.get("key"), layer["keys"], f"{path}.key")
        self._array(head.get("query"), (q_len, layer["head_dim"]), f"{path}.query")
        self._array(head.get("lse"), (q_len,), f"{path}.lse")
        self._blocks(head.get("thumb"), f"{path}.thumb", q_len, k_len)
        for name in ("table", "fix"):
            if name in head:
                self._array(head[name], (q_len, k_len), f"{path}.{name}")
        if "near" in head:
            near = self._object(head["near"], f"{path}.near")
            self._array(near.get("counts"), (q_len,), f"{path}.near.counts")
            counts, places = unpack(near["counts"]), self._array(near.get("places"), None, f"{path}.near.places")
            self._is(places == (int(counts.sum()),), f"{path}.near.places", f"be {int(counts.sum())}", places)
            self._array(near.get("fix"), places, f"{path}.near.fix")
        if layer.get("values"):
            self._array(head.get("rest"), (q_len, layer["value_dim"]), f"{path}.rest")
        if "overview" in head:
            self._blocks(head["overview"], f"{path}.overview", q_len, k_len)
            for name in _STATISTICS:
                self._array(head.get(name), (q_len,), f"{path}.{name}")
            self._array(head.get("received"), (k_len,), f"{path}.received")
        for place, rule in enumerate(self._list(head.get("rules"), f"{path}.rules")):
            self._rule(rule, f"{path}.rules[{place}]", q_len + k_len - 1)
        if head.get("mask") is not None:
            mask = self._object(self._place(head["mask"], page["masks"], f"{path}.mask"), f"{path}.mask")
            self._mask(mask, f"masks[{head['mask']}]", q_len, k_len)
        for name in ("scores", "error"):
            numbers = self._object(head.get(name), f"{path}.{name}")
            good = all(isinstance(number, (int, float)) and math.isfinite(number) for number in numbers.values())
            self._is(good, f"{path}.{name}", "hold numbers", numbers)

    def _blocks(self, value: object, path: str, q_len: int, k_len: int) -> None:
        blocks = self._object(value, path)
        side = blocks.get("side")
        if not isinstance(side, int) or side < 1:
            self._refuse(f"{path}.side", "be a whole number above 0", side)
        self._array(blocks.get("cells"), (-(-q_len // side), -(-k_len // side)), f"{path}.cells")

    def _rule(self, value: object, path: str, distances: int) -> None:
        rule = self._object(value, path)
        if rule.get("kind") == "softcap":
            self._is(isinstance(rule.get("cap"), (int, float)), f"{path}.cap", "be a number", rule.get("cap"))
        elif rule.get("kind") == "relative":
            self._array(rule.get("bias"), (distances,), f"{path}.bias")
        else:
            self._refuse(f"{path}.kind", "be softcap or relative", rule.get("kind"))

    def _mask(self, mask: Mapping[str, Any], path: str, q_len: int, k_len: int) -> None:
        if mask.get("kind") == "runs":
            start, stop = (self._array(mask.get(name), None, f"{path}.{name}") for name in ("start", "stop"))
            self._is(start == stop and start[0] == q_len, path, f"have {q_len} rows", start)
        elif mask.get("kind") == "table":
            self._array(mask.get("bits"), (q_len, -(-k_len // 8)), f"{path}.bits")
        else:
            self._refuse(f"{path}.kind", "be runs or table", mask.get("kind"))

    def _array(self, value: object, shape: tuple[int, ...] | None, path: str) -> tuple[int, ...]:
        array = self._object(value, path)
        kind = array.get("type")
        self._is(isinstance(kind, str) and kind in TYPES, f"{path}.type", f"be one of {', '.join(TYPES)}", kind)
        listed_shape = tuple(self._list(array.get("shape"), f"{path}.shape"))
        self._is(shape is None or listed_shape == shape, f"{path}.shape", f"be {shape}", listed_shape)
        self._is(isinstance(array.get("data"), str), f"{path}.data", "be text", array.get("data"))
        if "steps" in array:
            self._array(array["steps"], listed_shape[:1], f"{path}.steps")
        try:
            unpack(array)
        except (ValueError, TypeError) as failure:
            self._refuse(f"{path}.data", "be a whole array", str(failure))
        return listed_shape

    def _place(self, value: object, among: list[Any], path: str) -> Any:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < len(among):
            self._refuse(path, f"be a whole number below {len(among)}", value)
        return among[value]

    def _object(self, value: object, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self._refuse(path, "be an object", value)
        return value

    def _list(self, value: object, path: str) -> list[Any]:
        if not isinstance(value, list):
            self._refuse(path, "be a list", value)
        return value

    def _is(self, good: bool, path: str, must: str, got: object) -> None:
        if not good:
            self._refuse(path, must, got)

    def _refuse(self, path: str, must: str, got: object) -> NoReturn:
        raise DataError.about(self._function, path, must=must, got=repr(got)[:60], then="Make the page again.")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
