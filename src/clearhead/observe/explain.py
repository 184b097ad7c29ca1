"""``explain``: one token's view, step by step, each step computed twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.arguments import repr_of, several, texts_of, whole_number
from clearhead.dispatch import choose
from clearhead.errors import ShapeError, UnsupportedError
from clearhead.masks import Mask
from clearhead.nn.attention import MultiHeadAttention
from clearhead.observe.capture import Captured, attention_modules, capture, find_layer
from clearhead.observe.explanation import Explanation
from clearhead.observe.steps import AttentionRun, steps_of
from clearhead.problem import Problem
from clearhead.scores import ScoreRule
from clearhead.statistics import Want

__all__ = ["explain", "find_token"]


def explain(
    subject: Tensor | nn.Module,
    *inputs: Tensor,
    token: int | str,
    head: int = 0,
    layer: int | str | None = None,
    batch: int = 0,
    tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    mask: Mask | None = None,
    scores: ScoreRule | Iterable[ScoreRule] | None = (),
    scale: float | None = None,
    query_offset: int | None = None,
    backend: str = "auto",
) -> Explanation:
    """Explain one token's attention in one head: every step of the formula, each compared with float64.

    ``explain(query, key, value, token=2)`` explains a call of ``attention``; ``explain(module, x, token=2)`` one of
    a ``MultiHeadAttention``; ``explain(model, ids, token=2, layer=0)`` runs a model once and explains the call of
    one of its attention layers.

    Args:
        subject: query ``[batch, heads, q_len, head_dim]``, leading axes optional; or a module; or a model.
        inputs: key ``[batch, kv_heads, k_len, head_dim]`` and value ``[batch, kv_heads, k_len, value_dim]``; or the
            positional arguments of the module or model. A model takes one sequence, ``[1, len]`` or
            ``[1, len, embed_dim]``, without padding.
        token: index of the query, or its text if ``tokens`` contains that text exactly once.
        head: query head, 0 by default.
        layer: in a model, the attention module by number or name; by default the first.
        batch: which sequence of a call on tensors or on an attention module, 0 by default.
        tokens: text of each query, and of each key if ``q_len == k_len``; by default the indices.
        key_tokens: text of each key, if keys are other tokens than queries.
        mask: which keys each query may attend to, a ``Mask`` or None for all; passed on to a module or model.
        scores: one or more score rules on scaled scores, only with tensors; a module has its own.
        scale: factor of the scores, ``1 / sqrt(head_dim)`` by default, only with tensors; a module has its own.
        query_offset: position of the first query among the keys.
        backend: name of the backend, ``"auto"`` by default, only with tensors; a module has its own.

    Returns:
        An ``Explanation``: ``str()`` gives a table, a notebook shows HTML, and its fields are the values.

    Raises:
        ShapeError: no such token, head, layer or sequence; the text lists what exists.
        UnsupportedError: the model has no attention module of clearhead, or fails on the input.

    Cost: one call of the subject, and ``num_heads`` rows in float64 for the token.

    >>> import torch
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> from clearhead.masks import Causal
    >>> explanation = explain(x, x, x, token=0, mask=Causal(), tokens=["good", "day"])
    >>> explanation.weights.tolist()
    [1.0, 0.0]
    >>> explanation.difference < 1e-6
    True
    """
    if isinstance(subject, Tensor):
        if layer is not None:
            raise UnsupportedError.about(
                "explain",
                "layer",
                must="be left out for tensors",
                got=repr_of(layer),
                then="Pass a model to choose one.",
            )
        options = {"mask": mask, "scores": scores, "scale": scale, "query_offset": query_offset}
        ran, name = _from_tensors((subject, *inputs), options, backend), None
    elif isinstance(subject, nn.Module):
        if (scores is not None and scores != ()) or scale is not None or backend != "auto":
            raise UnsupportedError.about(
                "explain",
                "scores",
                must="be left out for a module, as must scale and backend",
                got="one of them",
                then="A module has its own.",
            )
        ran, name = _from_module(subject, inputs, layer, {"mask": mask, "query_offset": query_offset})
    else:
        raise UnsupportedError.about(
            "explain",
            "subject",
            must="be tensors or a module",
            got=type(subject).__name__,
            then="Pass query, key, value; or a module and its input.",
        )
    return _explanation(ran, name, token, head, batch, _texts(ran.problem, tokens, key_tokens))


def _from_tensors(tensors: tuple[Tensor, ...], options: dict[str, Any], backend: str) -> AttentionRun:
    if len(tensors) != 3:
        raise ShapeError.about(
            "explain",
            "inputs",
            must="be key and value, after query",
            got=f"{len(tensors)} tensors with query",
            then="Pass explain(query, key, value, token=0).",
        )
    problem = Problem.of("explain", *tensors, **options)
    want = Want()
    chosen = choose("explain", problem, want, backend)
    with torch.no_grad():
        heads = chosen.run(problem, want).output
    return AttentionRun(problem=problem, heads=heads, backend=chosen.name)


def _from_module(
    model: nn.Module, inputs: tuple[Tensor, ...], layer: int | str | None, options: dict[str, Any]
) -> tuple[AttentionRun, str | None]:
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(model, MultiHeadAttention):
        if layer is not None and whole_number(layer) != 0:
            raise ShapeError.about(
                "explain",
                "layer",
                must="be left out for one attention module",
                got=repr_of(layer),
                then="Pass a model.",
            )
        return _attention_run(capture(model, model, inputs, given)), None
    name = find_layer("explain", model, layer)
    for value in inputs:
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] != 1:
            raise ShapeError.about(
                "explain",
                "inputs",
                must="be one sequence, batch 1",
                got=f"shape {tuple(value.shape)}",
                then="Pass x[i:i+1] without its padding.",
            )
    return _attention_run(capture(model, attention_modules(model)[name], inputs, given)), name


def _attention_run(captured: Captured) -> AttentionRun:
    """The captured call with the inputs of its projections."""
    module, options = captured.module, dict(captured.options)
    if options.get("cache") is not None:
        raise UnsupportedError.about(
            "explain", "cache", must="be left out", got="a KVCache", then="Explain the whole sequence in one call."
        )
    given = [*captured.inputs, *(options[name] for name in ("query", "key", "value") if name in options)]
    given += [None] * (3 - len(given))
    query = given[0]
    key = query if given[1] is None else given[1]
    value = key if given[2] is None else given[2]
    sources = tuple(part if part.ndim == 3 else part[None] for part in (query, key, value))
    problem = captured.problem
    heads = captured.heads.reshape(*sources[0].shape[:2], module.num_heads, module.head_dim).transpose(1, 2)
    with torch.no_grad():
        chosen = choose("explain", problem, Want(), module.backend)
    return AttentionRun(
        problem=problem,
        heads=heads,
        backend=chosen.name,
        module=module,
        sources=sources,
        output=captured.output.reshape(*sources[0].shape[:2], -1),
    )


def _texts(
    problem: Problem, tokens: Sequence[str] | None, key_tokens: Sequence[str] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The text of each query and of each key; the index if there is none."""
    if key_tokens is None and tokens is not None and problem.q_len == problem.k_len:
        key_tokens = tokens
    texts = []
    for name, given, count in (("tokens", tokens, problem.q_len), ("key_tokens", key_tokens, problem.k_len)):
        names = range(count) if given is None else given
        texts.append(texts_of("explain", name, names, count, "Leave it out to see indices."))
    return texts[0], texts[1]


def _explanation(
    ran: AttentionRun,
    layer: str | None,
    token: int | str,
    head: int,
    batch: int,
    texts: tuple[tuple[str, ...], tuple[str, ...]],
) -> Explanation:
    problem = ran.problem
    place = find_token("explain", texts[0], token)
    head = _in_range("head", head, problem.num_heads)
    batch = _in_range("batch", batch, problem.batch)
    steps = tuple(steps_of(ran, batch, head, place))
    masked = next(step for step in steps if step.name == "mask")
    return Explanation(
        token=place, label=texts[0][place], position=problem.query_offset + place, head=head,
        num_heads=problem.num_heads, layer=layer, batch=batch, tokens=texts[1], dtype=problem.query.dtype,
        mask=None if problem.mask is None else repr(problem.mask), rules=tuple(map(repr, problem.scores)),
        backend=ran.backend, allowed=masked.exact != -torch.inf, steps=steps,
    )  # fmt: skip


def find_token(function: str, texts: Sequence[str], token: int | str) -> int:
    """The index of a token that is given by index or by text.

    Args:
        function: name of the calling function, for error texts.
        texts: text of each token.
        token: an index, or a text that occurs exactly once in ``texts``.

    Raises:
        ShapeError: no token or several tokens match; the text lists them.

    >>> find_token("explain", ["The", "cat"], "cat")
    1
    """
    texts = [str(text) for text in several(texts)]
    if isinstance(token, str):
        places = [place for place, text in enumerate(texts) if text == token]
        if len(places) == 1:
            return places[0]
        if places:
            raise ShapeError.about(
                function,
                "token",
                must="occur exactly once in the text",
                got=f"{token!r} at {', '.join(map(str, places))}",
                then="Pass the index.",
            )
    elif (place := whole_number(token)) is not None and 0 <= place < len(texts):
        return place
    shown = ", ".join(f"{place} {text!r}" if text != str(place) else text for place, text in enumerate(texts[:40]))
    more = "" if len(texts) <= 40 else f", up to {len(texts) - 1}"
    raise ShapeError.about(
        function, "token", must=f"be one of {shown}{more}", got=repr_of(token), then="Pass its index."
    )


def _in_range(name: str, value: int, count: int) -> int:
    index = whole_number(value)
    if index is None or not 0 <= index < count:
        raise ShapeError.about(
            "explain",
            name,
            must=f"be a whole number from 0 to {count - 1}",
            got=repr_of(value),
            then=f"There {'is one' if count == 1 else f'are {count}'}, counted from 0.",
        )
    return index
