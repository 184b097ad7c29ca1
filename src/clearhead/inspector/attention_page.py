"""``view``: any attention as one page that shows every weight, in a file or in a notebook."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from clearhead.errors import DataError, ShapeError, UnsupportedError
from clearhead.functional import attention
from clearhead.inspector.attention_schema import FORMAT, VERSION, validate
from clearhead.inspector.heads import FUNCTION, Texts, layer_of
from clearhead.inspector.html import bundle, fill, inert, policy, read
from clearhead.masks import Mask
from clearhead.observe.layers import Layers, choose_heads
from clearhead.observe.observe import Seen
from clearhead.observe.points import Points
from clearhead.observe.trace import Trace, trace
from clearhead.problem import Problem
from clearhead.scores import ScoreRule

__all__ = ["Page", "view"]

_FILES: Final = "viewer"
#: In an order in which each comes after those that it imports.
_MODULES: Final = (
    "check", "colours", "dom", "model", "state", "export", "grid", "painter", "map", "compare", "lines", "token",
    "profile", "main",
)  # fmt: skip
_DATA: Final = re.compile(r'<script type="application/json" id="data">(.*?)</script>')
#: A page of more queries and keys than this, in numbers, is not written without choosing.
_MOST_NUMBERS: Final = 2**27


@dataclass(frozen=True, eq=False)
class Page:
    """One page: ``save`` writes it as a file that needs nothing else, a notebook shows it in a frame of its own.

    Attributes:
        data: what it shows, an object of ``inspector.attention_schema``.
    """

    data: Mapping[str, Any] = field(repr=False)

    @property
    def html(self) -> str:
        """The page as text: style, script and data inlined under a policy that allows no request."""
        style, script = read(_FILES, "view.css"), bundle(_FILES, _MODULES)
        parts = {
            "policy": policy(style, script), "title": html.escape(self.data["title"]), "style": style,
            "script": script, "data": inert(self.data),
        }  # fmt: skip
        return fill(read(_FILES, "view.html"), parts)

    def save(self, path: str | Path) -> Path:
        """Write the page, whole or not at all, and give its path back."""
        # Not at the top: training is much to import for whoever writes no page.
        from clearhead.train.files import write_bytes

        write_bytes(Path(path), self.html.encode("utf-8"))
        return Path(path)

    @classmethod
    def open(cls, path: str | Path) -> Page:
        """The page of a file that ``save`` has written, with the viewer of this version.

        Raises:
            DataError: the file cannot be read, or holds no page that this version knows.
        """
        try:
            found = _DATA.search(Path(path).read_text("utf-8"))
            data: Any = json.loads(found[1]) if found else None
        except (OSError, ValueError) as failure:
            raise DataError.about(
                "Page.open", str(path), must="be a page of ch.view", got=str(failure)[:80], then="Name another file."
            ) from failure
        validate(data, function="Page.open")
        return cls(data)

    def _repr_html_(self) -> str:
        """The page in a sandboxed frame: its script reaches nothing of the notebook."""
        return (
            '<iframe sandbox="allow-scripts allow-downloads" style="width:100%;height:860px;border:0" '
            f'title="clearhead view" srcdoc="{html.escape(self.html)}"></iframe>'
        )

    def __repr__(self) -> str:
        layers = self.data["layers"]
        heads = sum(len(layer["heads"]) for layer in layers)
        return f"Page({self.data['title']!r}, {len(layers)} layers, {heads} heads)"


def view(
    subject: nn.Module | Trace | Points | dict[str, Trace | Points] | Tensor,
    *inputs: Any,
    tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    layers: Layers = None,
    heads: int | Sequence[int] | None = None,
    batch: int = 0,
    mask: Mask | None = None,
    scores: ScoreRule | Iterable[ScoreRule] = (),
    scale: float | None = None,
    query_offset: int | None = None,
    title: str | None = None,
) -> Page:
    """One page that shows an attention exactly: every head, down to every single weight, however long the text.

    ``view(model, ids)`` runs a model once and shows its layers; ``view(traced)`` shows what ``ch.trace`` has kept;
    ``view(query, key)`` shows the attention of plain tensors; ``view({"before": traced, "after": other})`` shows
    several runs, whose heads the page compares. The page holds queries and keys and computes weights itself, so its
    size grows with the length and not with its square.

    Args:
        subject: a model; a ``Trace`` or one of its ``Points``, or several by name; or query ``[batch, heads, q_len,
            head_dim]``, leading axes optional.
        inputs: what the model is called with; or key, shaped as in ``attention``, and perhaps value.
        tokens: text of each query, and of each key where the lengths agree; numbers by default.
        key_tokens: text of each key, where keys are other tokens.
        layers: of a model or a trace, which attention layers, as in ``ch.trace``; by default all.
        heads: which query heads; by default all.
        batch: which sequence.
        mask: as in ``attention``, for tensors; so are ``scores``, ``scale`` and ``query_offset``.
        scores: score rules.
        scale: factor on ``query @ key^T``.
        query_offset: position of the first query.
        title: the page's heading.

    Returns:
        A ``Page``: ``save(path)`` writes one HTML file, a notebook shows it in a sandboxed frame.

    Raises:
        ShapeError: no such layer, head or sequence, or texts that do not fit.
        UnsupportedError: a mask or score rule whose numbers a page cannot carry at this length; a trace with edited
            scores or weights; more numbers than a page should hold.

    Cost: two passes of statistics a layer. About ``4 * length * head_dim`` bytes a head, deflated, a third more as
    text; every weight of the page is within 1e-4 of the library's.

    >>> import torch, clearhead as ch
    >>> ch.view(torch.eye(3), torch.eye(3), mask=ch.Causal(), tokens=["a", "b", "c"], title="Three tokens")
    Page('Three tokens', 1 layers, 1 heads)
    """
    own = {"mask": mask, "scores": scores, "scale": scale, "query_offset": query_offset}
    plain = isinstance(subject, Tensor)
    for name, value in own.items():
        if not plain and value not in (None, ()):
            raise UnsupportedError.about(
                FUNCTION, name, must="be left to the model", got="another", then="Only plain tensors take one."
            )
    kept = _points(subject, inputs, layers, own)
    _check(kept, batch)
    shared = Texts([], [])
    records = []
    for points in kept:
        problem = points.padded
        chosen = choose_heads(FUNCTION, heads, problem.num_heads)
        queries, keys = _texts(problem, tokens, key_tokens)
        record = layer_of(points, batch, chosen, shared)
        records.append(record | {"queries": shared.place(queries), "tokens": shared.place(keys)})
    data = {
        "format": FORMAT, "version": VERSION, "title": title or "Attention", "made_by": "clearhead",
        "texts": shared.texts, "masks": shared.masks, "layers": records,
    }  # fmt: skip
    return Page(data)


def _points(subject: object, inputs: tuple[Any, ...], layers: Layers, own: Mapping[str, Any]) -> list[Points]:
    """The calls to show, in the model's order."""
    if isinstance(subject, Tensor):
        return [_plain((subject, *inputs), own)]
    if isinstance(subject, Points):
        return [subject]
    if isinstance(subject, dict) and subject and all(isinstance(each, (Trace, Points)) for each in subject.values()):
        runs = ((name, _points(each, (), layers, own)) for name, each in subject.items())
        return [replace(points, layer=f"{name}: {points.layer}") for name, kept in runs for points in kept]
    if isinstance(subject, nn.Module):
        training = subject.training
        with torch.no_grad(), trace(subject, layers=layers) as traced:
            subject.eval()
            try:
                subject(*inputs)
            finally:
                subject.train(training)
        return [traced[name] for name in traced]
    if isinstance(subject, Trace):
        names = list(subject) if layers is None else [name for name in subject if name in _meant(subject, layers)]
        return [subject[name] for name in names]
    kind = "what ch.observe has seen, statistics alone" if isinstance(subject, Seen) else type(subject).__name__
    raise UnsupportedError.about(
        FUNCTION, "subject", must="be a model, a ch.trace, several by name, or tensors", got=kind,
        then="Run the model within ch.trace(model), or pass it here with its inputs.",
    )  # fmt: skip


def _meant(traced: Trace, layers: Layers) -> set[str]:
    from clearhead.observe.layers import meant

    return set(meant(FUNCTION, list(traced), list(traced), layers))


def _plain(tensors: tuple[Any, ...], own: Mapping[str, Any]) -> Points:
    if len(tensors) not in (2, 3):
        raise ShapeError.about(
            FUNCTION, "inputs", must="be key, and perhaps value, behind query", got=f"{len(tensors) - 1} tensors",
            then="Pass view(query, key).",
        )  # fmt: skip
    query, key, value = tensors if len(tensors) == 3 else (*tensors, tensors[1])
    problem = Problem.of(FUNCTION, query, key, value, **own)
    with torch.no_grad():
        output = attention(query, key, value, **own)
    output = output.reshape((1,) * (4 - output.ndim) + output.shape)
    return Points(layer="attention", problem=problem, head_outputs=output, output=None, inputs=(), options={})


def _check(kept: Sequence[Points], batch: int) -> None:
    """Refuse what no page could carry, before anything is computed."""
    numbers = 0
    for points in kept:
        problem = points.padded
        numbers += problem.head_dim * (problem.num_heads * problem.q_len + problem.num_kv_heads * problem.k_len)
        if isinstance(batch, bool) or not isinstance(batch, int) or not 0 <= batch < problem.batch:
            raise ShapeError.about(
                FUNCTION, "batch", must=f"be a whole number from 0 to {problem.batch - 1}", got=repr(batch)[:80],
                then="It says which sequence to show.",
            )  # fmt: skip
        if problem.q_len == 0 or problem.k_len == 0:
            got = f"{problem.q_len} queries and {problem.k_len} keys"
            raise ShapeError.about(FUNCTION, "tokens", must="be at least one", got=got, then="Give a text.")
        changed = sorted(set(points.edited) & {"scores", "scaled", "masked", "weights"})
        if changed:
            raise UnsupportedError.about(
                FUNCTION, "trace", must="leave scores and weights to the formula", got=f"edited {', '.join(changed)}",
                then="Edit queries or keys, or take temperature, or view the model without the edit.",
            )  # fmt: skip
    if numbers > _MOST_NUMBERS:
        raise UnsupportedError.about(
            FUNCTION, "layers", must=f"hold at most {_MOST_NUMBERS:,} numbers in queries and keys", got=f"{numbers:,}",
            then="Choose layers= or heads= to look at.",
        )  # fmt: skip


def _texts(
    problem: Problem, tokens: Sequence[str] | None, key_tokens: Sequence[str] | None
) -> tuple[list[str], list[str]]:
    if key_tokens is None and problem.q_len == problem.k_len:
        key_tokens = tokens
    texts = []
    for name, given, count, first in (
        ("tokens", tokens, problem.q_len, problem.query_offset), ("key_tokens", key_tokens, problem.k_len, 0),
    ):  # fmt: skip
        if given is not None and len(given) != count:
            raise ShapeError.about(
                FUNCTION, name, must=f"have one text for each of {count} tokens", got=len(given),
                then="Leave it out to see positions.",
            )  # fmt: skip
        texts.append([str(each) for each in given] if given is not None else [str(first + at) for at in range(count)])
    return texts[0], texts[1]
