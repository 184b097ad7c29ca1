"""``view``: an attention as a page that shows every weight, in a file or in a notebook."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeGuard

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from clearhead.arguments import repr_of, several, texts_of, whole_number
from clearhead.errors import DataError, ShapeError, UnsupportedError
from clearhead.functional.exact import attention
from clearhead.inspector.carried import FUNCTION
from clearhead.inspector.heads import Shared, layer_of
from clearhead.inspector.html import bundle, fill, inert, policy, read
from clearhead.inspector.pictures import check_grid, picture
from clearhead.inspector.schema import FORMAT, VERSION, validate
from clearhead.inspector.values import AT_MOST
from clearhead.masks import Mask
from clearhead.nn.generation import evaluating
from clearhead.observe.layers import LayerRecords, Layers, choose_heads
from clearhead.observe.observe import Seen
from clearhead.observe.points import Points
from clearhead.observe.trace import Trace, trace
from clearhead.problem import Problem
from clearhead.scores import ScoreRule

__all__ = ["Page", "view"]

_FILES: Final = "viewer"
#: Each after the modules that it imports.
_MODULES: Final = (
    "check", "colours", "dom", "model", "difference", "state", "export", "axes", "painter", "grid", "map", "compare",
    "lines", "token", "profile", "picture", "runs", "main",
)  # fmt: skip
_DATA: Final = re.compile(r'<script type="application/json" id="data">(.*?)</script>')
#: The largest number of elements in all queries and keys of a page.
_MOST_NUMBERS: Final = 2**27


@dataclass(frozen=True, eq=False)
class Page:
    """An attention page: ``save`` writes it as one self-contained HTML file, a notebook shows it in a frame.

    Attributes:
        data: the page's content, an object of the format in ``clearhead.inspector.schema``.
    """

    data: Mapping[str, Any] = field(repr=False)

    @property
    def html(self) -> str:
        """The page as HTML: style, script and data inlined, with a content security policy that allows no request."""
        style, script = read(_FILES, "view.css"), bundle(_FILES, _MODULES)
        parts = {
            "policy": policy(style, script),
            "title": html.escape(self.data["title"]),
            "style": style,
            "script": script,
            "data": inert(self.data),
        }
        return fill(read(_FILES, "view.html"), parts)

    def save(self, path: str | Path) -> Path:
        """Write the page atomically.

        Args:
            path: the file to write; missing folders are created.

        Returns:
            ``path`` as a ``Path``.

        Raises:
            OSError: the file cannot be written.
        """
        # Imported here, as clearhead.train is a large import that only this method needs.
        from clearhead.train.files import write_bytes

        write_bytes(Path(path), self.html.encode("utf-8"))
        return Path(path)

    @classmethod
    def open(cls, path: str | Path) -> Page:
        """Read a page that ``save`` has written; its viewer becomes that of this version.

        Args:
            path: a file written by ``save``, by this version or an earlier one.

        Raises:
            DataError: the file cannot be read, or is not a page of a supported version.
        """
        try:
            match = _DATA.search(Path(path).read_text("utf-8"))
            data: Any = json.loads(match[1]) if match else None
        except (OSError, ValueError, RecursionError) as failure:
            raise DataError.about(
                "Page.open", str(path), must="be a page of ch.view", got=str(failure)[:80], then="Name another file."
            ) from failure
        validate(data, function="Page.open")
        return cls(data)

    def _repr_html_(self) -> str:
        """The page in a sandboxed frame, whose script cannot access the notebook."""
        return (
            '<iframe sandbox="allow-scripts allow-downloads" style="width:100%;height:860px;border:0" '
            f'title="clearhead view" srcdoc="{html.escape(self.html)}"></iframe>'
        )

    def __repr__(self) -> str:
        layers = self.data["layers"]
        heads = sum(len(layer["heads"]) for layer in layers)
        return f"Page({self.data['title']!r}, {len(layers)} layers, {heads} heads)"


def view(
    subject: nn.Module | Trace | Points | Mapping[str, Trace | Points] | Tensor,
    *inputs: Any,
    tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    layers: Layers = None,
    heads: int | Sequence[int] | None = None,
    batch: int = 0,
    mask: Mask | Mapping[str, Mask | None] | None = None,
    scores: ScoreRule | Iterable[ScoreRule] | None = (),
    scale: float | None = None,
    query_offset: int | None = None,
    values: bool | None = None,
    image: Tensor | ArrayLike | Mapping[str, Any] | None = None,
    grid: tuple[int, int] | None = None,
    grid_first: int = 0,
    title: str | None = None,
) -> Page:
    """Make a page that shows an attention: every head, down to every weight, for texts of any length.

    ``view(model, ids)`` runs a model once and shows its layers; ``view(traced)`` shows the record of ``ch.trace``;
    ``view(query, key, value)`` shows the attention of plain tensors; ``view({"before": traced, "after": other})``
    shows several runs, and ``view(query, key, mask={"all": None, "near": ch.Window(9)})`` several masks, whose heads
    the page compares. The page stores queries and keys and computes weights from them, so its size is linear in the
    length.

    Args:
        subject: a model; a ``Trace`` or one of its ``Points``, or a mapping from names to several of them; or query
            ``[batch, heads, q_len, head_dim]``, leading axes optional.
        inputs: positional arguments of the model; or key ``[batch, kv_heads, k_len, head_dim]`` and optionally value
            ``[batch, kv_heads, k_len, value_dim]``.
        tokens: text of each query, and of each key if ``q_len == k_len``; by default positions.
        key_tokens: text of each key, if keys are other tokens than queries.
        layers: which attention layers of a model or trace, by number, name or glob such as ``"encoder.*"``, or
            several; by default all.
        heads: which query heads; by default all.
        batch: index of the sequence to show, 0 by default.
        mask: which keys each query may attend to, a ``Mask`` or None for all; or a mapping from names to several. Only
            with tensors, as are ``scores``, ``scale`` and ``query_offset``.
        scores: one or more score rules on scaled scores.
        scale: factor of ``query @ key^T``, ``1 / sqrt(head_dim)`` by default.
        query_offset: position of the first query among the keys.
        values: whether the page stores values and shows weighted values and their sum; by default if they have at most
            524,288 elements in all. Norms of values are always stored.
        image: the image whose patches or pixels are the keys, ``[height, width]`` or ``[height, width, 3]``, uint8 or
            any other real dtype; for several runs, a mapping from run names to images.
        grid: rows and columns of patches; by default one key for each pixel.
        grid_first: index of the key that is the first patch: 1 after a class token, 0 by default.
        title: the page's heading, ``"Attention"`` by default.

    Returns:
        A ``Page``: ``save(path)`` writes one HTML file, a notebook shows it in a sandboxed frame.

    Raises:
        ShapeError: there is no such layer, head or sequence, or texts or patches do not fit.
        UnsupportedError: a mask or score rule needs too much data at this length, the trace has edited scores or
            weights, queries and keys have more than 2**27 elements, or scores are so large that a weight of the page
            would be off by more than 1e-4.

    Cost: two passes of statistics per layer. About ``3 * length * head_dim`` bytes per head, deflated, and a quarter
    more as text. Every weight of the page is within 1e-4 of the library's.

    >>> import torch, clearhead as ch
    >>> ch.view(torch.eye(3), torch.eye(3), mask=ch.Causal(), tokens=["a", "b", "c"], title="Three tokens")
    Page('Three tokens', 1 layers, 1 heads)
    """
    plain = isinstance(subject, Tensor)
    options = {"mask": mask, "scores": scores, "scale": scale, "query_offset": query_offset}
    for name, value in options.items():
        if not plain and value is not None and not (isinstance(value, tuple) and not value):
            raise UnsupportedError.about(
                FUNCTION, name, must="be left out for a model", got="one", then="Only plain tensors take one."
            )
    heading = "Attention" if title is None else _written("title", title)
    runs = _runs(subject, inputs, layers, options)
    calls = [points for run in runs.values() for points in run]
    batch = _check(calls, batch)
    if heads is not None and not several(heads):
        raise ShapeError.about(
            FUNCTION, "heads", must="name at least one", got="none", then="Leave it out for all of them."
        )
    wanted = not (plain and len(inputs) < 2) and values is not False
    shared = Shared(numbers=_numbers(calls, heads), values=wanted and (values is True or _few_values(calls, heads)))
    images = _images(image, grid, grid_first, list(runs))
    records = []
    for place, (name, run) in enumerate(runs.items()):
        for points in run:
            problem = points.padded
            queries, keys = _texts(problem, tokens, key_tokens)
            chosen = choose_heads(FUNCTION, heads, problem.num_heads)
            # Errors that NaN or infinity make are measured afterwards.
            with np.errstate(all="ignore"):
                record = layer_of(points, batch, chosen, shared, None if tokens is None else _period(queries))
            shown = images.get(name)
            if shown is not None:
                check_grid(shown, problem.k_len)
            records.append(
                record
                | {
                    "queries": shared.place(queries),
                    "tokens": shared.place(keys),
                    "run": place,
                    "image": None if shown is None else shared.image(shown),
                }
            )
    return Page({
        "format": FORMAT, "version": VERSION, "title": heading or "Attention", "made_by": "clearhead",
        "texts": shared.texts, "masks": shared.masks, "images": shared.images, "facts": [],
        "runs": [{"name": name, "says": ""} for name in runs], "layers": records,
    })  # fmt: skip


def _runs(
    subject: object, inputs: tuple[Any, ...], layers: Layers, options: Mapping[str, Any]
) -> dict[str, list[Points]]:
    """The calls to show, by the name of their run, in the model's order."""
    if isinstance(subject, Tensor) and isinstance(options["mask"], Mapping) and options["mask"]:
        masks = options["mask"].items()
        runs = {_written("mask", name): [_plain((subject, *inputs), {**options, "mask": mask})] for name, mask in masks}
    elif _is_several(subject):
        runs = {_written("subject", str(name)): _points(one, (), layers, options) for name, one in subject.items()}
    else:
        return {"": _points(subject, inputs, layers, options)}
    return {name: [replace(points, layer=f"{name}: {points.layer}") for points in run] for name, run in runs.items()}


def _is_several(subject: object) -> TypeGuard[Mapping[str, Trace | Points]]:
    """Whether ``subject`` is a mapping from names to runs; a ``Trace`` is a mapping too, but from layers."""
    if not isinstance(subject, Mapping) or isinstance(subject, LayerRecords) or not subject:
        return False
    return all(isinstance(one, (Trace, Points)) for one in subject.values())


def _points(subject: object, inputs: tuple[Any, ...], layers: Layers, options: Mapping[str, Any]) -> list[Points]:
    """The calls of one run."""
    if isinstance(subject, Tensor):
        return [_plain((subject, *inputs), options)]
    if isinstance(subject, Points):
        return [subject]
    if isinstance(subject, nn.Module):
        # keep="all" shows each call of a module that the model uses several times.
        with evaluating(subject), trace(subject, layers=layers, keep="all") as traced:
            subject(*inputs)
        return [replace(points, layer=name) for name, points in traced.passed()]
    if isinstance(subject, Trace):
        meant = None if layers is None else _meant(subject, layers)
        passed = [(name, points) for name, points in subject.passed() if meant is None or points.layer in meant]
        return [replace(points, layer=name) for name, points in passed]
    kind = "the statistics of ch.observe" if isinstance(subject, Seen) else type(subject).__name__
    raise UnsupportedError.about(
        FUNCTION,
        "subject",
        must="be a model, a ch.trace, several by name, or tensors",
        got=kind,
        then="Run the model within ch.trace(model), or pass it here with its inputs.",
    )


def _numbers(calls: Sequence[Points], heads: int | Sequence[int] | None) -> int:
    """The number of elements in all queries and keys of the page."""
    return sum(
        points.padded.head_dim * (queries * points.padded.q_len + keys * points.padded.k_len)
        for points in calls
        for queries, keys in [_counts(points.padded, heads)]
    )


def _few_values(calls: Sequence[Points], heads: int | Sequence[int] | None) -> bool:
    numbers = (_counts(each.padded, heads)[1] * each.padded.k_len * each.padded.value_dim for each in calls)
    return sum(numbers) <= AT_MOST


def _counts(problem: Problem, heads: int | Sequence[int] | None) -> tuple[int, int]:
    """The numbers of chosen query heads and key heads."""
    chosen = choose_heads(FUNCTION, heads, problem.num_heads)
    return len(chosen), len({head * problem.num_kv_heads // problem.num_heads for head in chosen})


def _images(image: Any, grid: tuple[int, int] | None, first: int, runs: list[str]) -> dict[str, dict[str, Any]]:
    """The image of each run that has one."""
    if image is None:
        if grid is not None:
            raise ShapeError.about(FUNCTION, "grid", must="go with an image", got=repr_of(grid), then="Pass image=.")
        return {}
    by_name = dict(image) if isinstance(image, Mapping) else dict.fromkeys(runs, image)
    unknown = sorted(set(by_name) - set(runs))
    if unknown:
        raise ShapeError.about(
            FUNCTION,
            "image",
            must=f"be one picture, or a mapping with names of runs, {', '.join(runs)[:80]}",
            got=unknown[0][:80],
            then="Use the names of the runs.",
        )
    return {
        name: picture(one, tuple(np.shape(one)[:2]) if grid is None else grid, first) for name, one in by_name.items()
    }


def _period(texts: Sequence[str]) -> int | None:
    """The period of a text that repeats to its end, at least once in full; None if it does not repeat."""
    # The failure function of Knuth, Morris and Pratt: for each prefix, its longest proper prefix that is a suffix.
    ends = [0] * len(texts)
    for place in range(1, len(texts)):
        length = ends[place - 1]
        while length and texts[place] != texts[length]:
            length = ends[length - 1]
        ends[place] = length + (texts[place] == texts[length])
    period = len(texts) - ends[-1]
    return period if 1 < period <= len(texts) // 2 else None


def _meant(traced: Trace, layers: Layers) -> set[str]:
    from clearhead.observe.layers import meant

    return set(meant(FUNCTION, list(traced), list(traced), layers))


def _plain(tensors: tuple[Any, ...], options: Mapping[str, Any]) -> Points:
    if len(tensors) not in (2, 3):
        raise ShapeError.about(
            FUNCTION,
            "inputs",
            must="be key, and optionally value, after query",
            got=f"{len(tensors) - 1} tensors",
            then="Pass view(query, key).",
        )
    query, key, value = tensors if len(tensors) == 3 else (*tensors, tensors[1])
    problem = Problem.of(FUNCTION, query, key, value, **options)
    with torch.no_grad():
        output = attention(query, key, value, **options)
    output = output.reshape((1,) * (4 - output.ndim) + output.shape)
    return Points(layer="attention", problem=problem, head_outputs=output, output=None, inputs=(), options={})


def _check(calls: Sequence[Points], batch: int) -> int:
    """Raise for what a page cannot show, before anything is computed; return the index of the sequence."""
    numbers, given = 0, batch
    batch = -1 if (number := whole_number(given)) is None else number
    if not calls:
        raise ShapeError.about(
            FUNCTION,
            "subject",
            must="have a call of attention",
            got="none",
            then="Run the model within ch.trace(model), with record=True.",
        )
    for points in calls:
        problem = points.padded
        numbers += problem.head_dim * (problem.num_heads * problem.q_len + problem.num_kv_heads * problem.k_len)
        if not 0 <= batch < problem.batch:
            raise ShapeError.about(
                FUNCTION,
                "batch",
                must=f"be a whole number from 0 to {problem.batch - 1}",
                got=repr_of(given),
                then="It is the index of the sequence to show.",
            )
        if problem.q_len == 0 or problem.k_len == 0:
            got = f"{problem.q_len} queries and {problem.k_len} keys"
            raise ShapeError.about(FUNCTION, "tokens", must="be at least one", got=got, then="Give a text.")
        changed = sorted(set(points.edited) & {"scores", "scaled", "masked", "weights"})
        if changed:
            raise UnsupportedError.about(
                FUNCTION,
                "trace",
                must="not have edited scores or weights",
                got=f"edited {', '.join(changed)}",
                then="Edit queries or keys, use temperature, or view the model without the edit.",
            )
    if numbers > _MOST_NUMBERS:
        raise UnsupportedError.about(
            FUNCTION,
            "layers",
            must=f"have at most {_MOST_NUMBERS:,} elements in queries and keys",
            got=f"{numbers:,}",
            then="Choose layers= or heads=.",
        )
    return batch


def _written(name: str, text: object) -> str:
    """A text, checked to be valid in UTF-8."""
    if not isinstance(text, str) or any("\ud800" <= sign <= "\udfff" for sign in text):
        raise ShapeError.about(
            FUNCTION,
            name,
            must="be text that UTF-8 can encode",
            got=ascii(text)[:80],
            then="Remove lone surrogates.",
        )
    return text


def _texts(
    problem: Problem, tokens: Sequence[str] | None, key_tokens: Sequence[str] | None
) -> tuple[list[str], list[str]]:
    if key_tokens is None and problem.q_len == problem.k_len:
        key_tokens = tokens
    texts = []
    for name, given, count, first in (
        ("tokens", tokens, problem.q_len, problem.query_offset),
        ("key_tokens", key_tokens, problem.k_len, 0),
    ):
        given_texts = range(first, first + count) if given is None else given
        checked = texts_of(FUNCTION, name, given_texts, count, "Leave it out to see positions.")
        texts.append([_written(name, each) for each in checked])
    return texts[0], texts[1]
