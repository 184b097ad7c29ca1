"""Score rules: functions applied to scaled scores before the mask, in the order given.

A rule is a function of a score and its place, ``apply(score, batch, head, q_pos, k_pos)``, on tiles of any size.
``Sink`` is the exception: it does not change scores but adds a logit to the softmax.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Final

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from clearhead.arguments import number, repr_of, tensor_of, whole
from clearhead.closure import Bound, closed_over
from clearhead.errors import ShapeError, UnsupportedError
from clearhead.masks.function import UserFunction, call_user_function, function_name, tile_text
from clearhead.record import Record
from clearhead.shapes import Float, Int

__all__ = ["Alibi", "DenseBias", "RelativeBias", "ScoreFunction", "ScoreRule", "Sink", "SoftCap"]


#: Largest number of heads for which a rule computes its parameters.
_MOST_HEADS: Final = 2**16


class ScoreRule(Record, ABC):
    """Base class of score rules: functions of a score and its place, applied before the mask.

    A subclass lists constructor arguments in ``fields`` and defines ``apply``. It sets ``position_dependent = True``
    if ``apply`` reads ``q_pos``, and ``relative = True`` if ``apply`` depends on ``q_pos - k_pos`` alone.
    """

    #: Reads the query's position, so ``q_len != k_len`` needs a ``query_offset``.
    position_dependent: bool = False
    #: Depends on positions through ``q_pos - k_pos`` alone, so it is the same inside a packed document.
    relative: bool = False

    def apply(
        self,
        score: Float[Tensor, "..."],
        batch: Int[Tensor, "..."],
        head: Int[Tensor, "..."],
        q_pos: Int[Tensor, "..."],
        k_pos: Int[Tensor, "..."],
    ) -> Float[Tensor, "..."]:
        """The new scores of a tile.

        Args:
            score: scores of the tile, ``[batch, heads, q_len, k_len]``.
            batch: batch indices, int64; like the other indices, a tensor that broadcasts to ``score``.
            head: head indices.
            q_pos: absolute positions of the queries.
            k_pos: absolute positions of the keys.

        Returns:
            Scores of the shape and dtype of ``score``.
        """
        return score

    def placed(self, query_offset: int) -> ScoreRule:
        """The rule for a call whose first query is at position ``query_offset``."""
        return self

    def parameters(self) -> list[Tensor]:
        """The rule's tensors that may require a gradient."""
        return self.tensors()

    def check(self, function: str, batch: int, heads: int, q_len: int, k_len: int) -> None:
        """Raise ``ShapeError`` unless the rule fits a call of these sizes."""


def _check_heads(function: str, rule: ScoreRule, entries: int, heads: int) -> None:
    if entries not in (1, heads):
        raise ShapeError.about(
            function,
            "scores",
            must=f"have one entry per query head ({heads})",
            got=f"{entries} in {rule!r}",
            then="Make the rule for this call's number of heads.",
        )


class Alibi(ScoreRule):
    """Attention with linear biases: ``score - slope[head] * |q_pos - k_pos|``.

    Args:
        num_heads: number of query heads, for the paper's geometric slopes. Pass either ``num_heads`` or ``slopes``.
        slopes: float ``[heads]`` or ``[1]``, other slopes.

    Raises:
        ShapeError: both or neither are given, or ``slopes`` is not one axis of floating point numbers.

    Paper: Press et al. 2022, "Train short, test long", section 3.

    >>> Alibi(4)
    Alibi(slopes=[0.25, 0.0625, 0.015625, 0.00390625])
    """

    fields = ("slopes",)
    position_dependent = True
    relative = True

    def __init__(
        self, num_heads: int | None = None, *, slopes: Sequence[float] | Float[Tensor, " heads"] | None = None
    ):
        if (num_heads is None) == (slopes is None):
            raise ShapeError.about(
                "Alibi",
                "num_heads",
                must="be given, or slopes, one of both",
                got="both" if slopes is not None else "neither",
                then="Pass Alibi(8).",
            )
        if num_heads is not None:
            then = "Pass the number of query heads."
            slopes = _alibi_slopes(whole("Alibi", "num_heads", num_heads, low=1, high=_MOST_HEADS, then=then))
        self.slopes = _float_tensor("Alibi", "slopes", slopes, axes=1)

    def apply(self, score: Tensor, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        slope = self.slopes.to(score.dtype)[head if self.slopes.shape[0] > 1 else head * 0]
        return score - slope * (q_pos - k_pos).abs()

    def check(self, function: str, batch: int, heads: int, q_len: int, k_len: int) -> None:
        _check_heads(function, self, self.slopes.shape[0], heads)


def _alibi_slopes(num_heads: int) -> list[float]:
    """The paper's slopes; a number of heads that is no power of two takes every other slope of the next power."""
    whole = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / whole) for head in range(whole)]
    if whole < num_heads:
        slopes += [2.0 ** (-4.0 * (2 * head + 1) / whole) for head in range(num_heads - whole)]
    return slopes


class RelativeBias(ScoreRule):
    """A learned bias of the distance: ``score + table[head, clip(q_pos - k_pos, -R, R) + R]``.

    Args:
        table: float ``[heads, 2 * R + 1]`` or ``[1, 2 * R + 1]``; column ``R`` is distance 0, the last column the keys
            ``R`` or more positions before the query.

    Raises:
        ShapeError: ``table`` is not floating point with 2 axes, or has an even number of columns.

    Paper: Shaw et al. 2018, "Self-attention with relative position representations", section 3.2; the bias is added
    to scores, as in T5 and Swin.

    >>> RelativeBias(torch.zeros(4, 5))
    RelativeBias(table=float32[4, 5])
    """

    fields = ("table",)
    position_dependent = True
    relative = True

    def __init__(self, table: Float[Tensor, "heads distances"]) -> None:
        self.table = _float_tensor("RelativeBias", "table", table, axes=2)
        if self.table.shape[1] % 2 == 0:
            raise ShapeError.about(
                "RelativeBias",
                "table",
                must="have an odd number of columns, 2 * R + 1",
                got=tuple(self.table.shape),
                then="Column R is distance 0.",
            )

    def apply(self, score: Tensor, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        reach = self.table.shape[1] // 2
        distance = (q_pos - k_pos).clamp(-reach, reach) + reach
        row = head if self.table.shape[0] > 1 else head * 0
        return score + self.table.to(score.dtype)[row, distance]

    def check(self, function: str, batch: int, heads: int, q_len: int, k_len: int) -> None:
        _check_heads(function, self, self.table.shape[0], heads)


class SoftCap(ScoreRule):
    """Limits scores to the interval ``(-cap, cap)``: ``cap * tanh(score / cap)``.

    Args:
        cap: a positive number.

    Raises:
        ShapeError: ``cap`` is not a positive number.

    Paper: Gemma Team 2024, "Gemma 2", section 2.

    >>> SoftCap(50.0)
    SoftCap(cap=50.0)
    """

    fields = ("cap",)
    relative = True

    def __init__(self, cap: float) -> None:
        self.cap = number(
            "SoftCap", "cap", cap, must="be a positive number", fits=lambda cap: cap > 0.0, then="Gemma 2 uses 50.0."
        )

    def apply(self, score: Tensor, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return self.cap * torch.tanh(score / self.cap)


class DenseBias(ScoreRule):
    """A bias given as a tensor: ``score + bias[batch, head, row, k_pos]``, one row per query of the call.

    Args:
        bias: float ``[q_len, k_len]``, ``[heads, q_len, k_len]`` or ``[batch, heads, q_len, k_len]``;
            any axis may be 1.

    Raises:
        ShapeError: ``bias`` is not floating point with 2 to 4 axes; during the call, its shape does not broadcast.

    >>> DenseBias(torch.zeros(3, 3))
    DenseBias(bias=float32[1, 1, 3, 3], first=0)
    """

    fields = ("bias", "first")

    def __init__(self, bias: Float[Tensor, "*leading q_len k_len"]) -> None:
        tensor = tensor_of(bias)
        if tensor is None or not tensor.is_floating_point() or not 2 <= tensor.ndim <= 4:
            raise ShapeError.about(
                "DenseBias",
                "bias",
                must="be floating point with 2 to 4 axes",
                got=repr_of(bias if tensor is None else tensor),
                then="Pass booleans as a mask: ch.Dense.",
            )
        self.bias = tensor.reshape((1,) * (4 - tensor.ndim) + tensor.shape)
        self.first = 0

    def placed(self, query_offset: int) -> DenseBias:
        if query_offset == self.first:
            return self
        copy = self.mapped(lambda tensor: tensor)
        copy.first = query_offset
        return copy

    def apply(self, score: Tensor, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        place = (batch, head, q_pos - self.first, k_pos)
        index = [at if size > 1 else at * 0 for at, size in zip(place, self.bias.shape, strict=True)]
        return score + self.bias[index[0], index[1], index[2], index[3]].to(score.dtype)

    def check(self, function: str, batch: int, heads: int, q_len: int, k_len: int) -> None:
        for size, call in zip(self.bias.shape, (batch, heads, q_len, k_len), strict=True):
            if size not in (1, call):
                raise ShapeError.about(
                    function,
                    "scores",
                    must=f"hold a bias that broadcasts to {(batch, heads, q_len, k_len)}",
                    got=tuple(self.bias.shape),
                    then="A dense bias has one row per query and one column per key.",
                )


class Sink(ScoreRule):
    """An attention sink: a logit per head in the softmax's sum, without a value, so weights may sum to less than 1.

    ``weights = exp(score) / (exp(logit[head]) + sum exp(score))``

    Args:
        logits: float ``[heads]``, or one number for all heads.

    Raises:
        ShapeError: ``logits`` is no number and not one axis of floating point numbers.

    Paper: OpenAI 2025, "gpt-oss model card"; Miller 2023, "Attention is off by one", is a logit of 0.

    >>> Sink(0.0)
    Sink(logits=[0.0])
    """

    fields = ("logits",)
    relative = True

    def __init__(self, logits: float | Sequence[float] | Float[Tensor, " heads"]) -> None:
        tensor = tensor_of(logits)
        given = logits if tensor is None or tensor.ndim > 0 else tensor.reshape(1)
        self.logits = _float_tensor("Sink", "logits", given, axes=1)

    def check(self, function: str, batch: int, heads: int, q_len: int, k_len: int) -> None:
        _check_heads(function, self, self.logits.shape[0], heads)


class ScoreFunction(Bound, ScoreRule):
    """A rule defined by a function ``fn(score, batch, head, q_pos, k_pos) -> score`` over a tile of scores.

    Learned tensors that the function closes over receive gradients: those that it names, and those in modules, lists,
    dicts, objects and functions that it names. Backward calls the function with the values that its variables had at
    the attention call, and with the tensors that modules and objects had then. Other attributes of objects and items
    of lists are not copied: bind a value that changes from layer to layer to a variable of its own.

    Args:
        fn: called with float scores ``[batch, heads, q_len, k_len]`` of a tile and int64 index tensors that broadcast
            to them; must return scores of the same shape and dtype, computed element by element. It must not write
            into its arguments or draw random numbers, since backward calls it a second time.

    Raises:
        ShapeError: during the attention call, if ``fn`` raises or returns something else; names ``fn`` and the tile.
        UnsupportedError: during the attention call, if ``fn`` writes into its arguments, draws random numbers on a CPU,
            or reads a learned tensor that it does not name.

    Cost: one call per tile forward and, with its derivative, one per tile backward; memory of a few tiles. On a CPU
    ``fn`` is traced first. If it adds a bias of ``head`` and ``q_pos - k_pos``, or of ``k_pos``, or caps the score as
    ``SoftCap`` does, in torch's elementwise operations, it costs as much as ``RelativeBias``, a ``DenseBias`` of one
    row, or ``SoftCap``. Any other bias is written out as a ``DenseBias`` of up to 2**24 entries, and
    ``torch.where(allowed, score, -inf)`` costs as much as a ``MaskFunction``. ``explain_dispatch`` reports which
    backend runs.

    >>> ScoreFunction(lambda score, batch, head, q_pos, k_pos: score - 0.1 * (q_pos - k_pos).abs())
    ScoreFunction(fn=<lambda>)
    """

    fields = ("fn",)
    position_dependent = True
    subject: ClassVar[UserFunction] = UserFunction(function="ScoreFunction")

    def __init__(self, fn: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
        if not callable(fn):
            raise ShapeError.about("ScoreFunction", "fn", must="be callable", got=repr_of(fn), then="Pass a function.")
        self.set_function(fn)

    def apply(self, score: Tensor, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        with self.as_called():
            result = self._evaluated(score, batch, head, q_pos, k_pos)
        if result.shape != score.shape or result.dtype != score.dtype:
            raise ShapeError.about(
                self.subject.function,
                self.subject.argument,
                must=f"return {str(score.dtype)[6:]} of the tile's shape {tuple(score.shape)}",
                got=f"{str(result.dtype)[6:]} of shape {tuple(result.shape)} from {function_name(self.fn)} "
                f"on {tile_text(batch, head, q_pos, k_pos)}",
                then="Work element by element on the score it is given, and look tensors up by the indices, as in "
                "table[head, q_pos - k_pos].",
            )
        return result

    def _evaluated(self, *arguments: Tensor) -> Tensor:
        """The function's result on a tile's scores and index tensors."""
        return call_user_function(self.subject, self.fn, ShapeError, *arguments)

    def placed(self, query_offset: int) -> ScoreFunction:
        return self.bound()

    def parameters(self) -> list[Tensor]:
        return list(closed_over(self.fn) if self.reached is None else self.reached)


def differentiated(
    rules: Sequence[ScoreRule],
    scores_out: Tensor,
    scores_in: Tensor,
    parameters: Sequence[Tensor],
    grad: Tensor,
    indices: tuple[Tensor, Tensor, Tensor, Tensor],
) -> tuple[Tensor | None, ...]:
    """Gradients of a tile's scores before the rules and of the parameters, from the gradient of the scores after them.

    Raises:
        UnsupportedError: a user's function among the rules has no derivative; names it and the tile.
    """
    try:
        return _stopped_at(scores_out, [scores_in, *parameters], grad)
    except Exception as failure:
        functions = [rule for rule in rules if isinstance(rule, ScoreFunction)]
        if not functions:
            raise
        names = [function_name(rule.fn) for rule in functions]
        raise UnsupportedError.about(
            functions[0].subject.function,
            functions[0].subject.argument,
            must="have a derivative",
            got=f"{type(failure).__name__}: {failure} from {' or '.join(names)} on {tile_text(*indices)}",
            then="Use differentiable tensor operations, out of place.",
        ) from failure


def _stopped_at(output: Tensor, inputs: Sequence[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of inputs, each as if the others were constants: autograd continues from an input that was computed
    from another one, once for the whole call."""
    computed = [place for place, tensor in enumerate(inputs) if tensor.grad_fn is not None]
    if not computed:
        # The graph is shared by all tiles if a module computed a tensor once and stores it.
        return torch.autograd.grad(output, inputs, grad, allow_unused=True, retain_graph=True)
    arrived: dict[int, Tensor] = {}

    def stopping(place: int) -> Callable[[Tensor], Tensor]:
        def stop(gradient: Tensor) -> Tensor:
            arrived[place] = gradient
            return torch.zeros_like(gradient)

        return stop

    hooks = [inputs[place].register_hook(stopping(place)) for place in computed]
    try:
        # The graphs of the inputs receive zeros, and are needed for the next tile.
        grads: list[Tensor | None] = [*torch.autograd.grad(output, inputs, grad, allow_unused=True, retain_graph=True)]
    finally:
        for hook in hooks:
            hook.remove()
    for place in computed:
        grads[place] = arrived.get(place)
    return tuple(grads)


def check_reached(
    rules: Sequence[ScoreRule], scores_out: Tensor, scores_in: Tensor, parameters: Sequence[Tensor]
) -> None:
    """Raise ``UnsupportedError`` if a user's function depends on a learned tensor that is not in ``parameters``."""
    functions = [rule for rule in rules if isinstance(rule, ScoreFunction)]
    if not functions or not scores_out.requires_grad:
        return
    names = [function_name(rule.fn) for rule in functions]
    visited = {get_gradient_edge(tensor).node for tensor in (scores_in, *parameters)}
    waiting = [get_gradient_edge(scores_out).node]
    while waiting:
        node = waiting.pop()
        if node in visited:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            raise UnsupportedError.about(
                functions[0].subject.function,
                functions[0].subject.argument,
                must="name the learned tensors it reads",
                got=f"one of shape {tuple(variable.shape)} that {' or '.join(names)} reaches in another way",
                then="Close over the tensor or its module directly.",
            )
        waiting += [following for following, _ in node.next_functions if following is not None]


def _float_tensor(function: str, argument: str, value: object, *, axes: int) -> Tensor:
    tensor = tensor_of(value)
    if tensor is not None and tensor.dtype != torch.bool and not tensor.is_complex():
        tensor = tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())
    if tensor is None or tensor.ndim != axes or not tensor.is_floating_point():
        raise ShapeError.about(
            function,
            argument,
            must=f"be floating point with {axes} ax{'is' if axes == 1 else 'es'}",
            got=repr_of(value if tensor is None else tensor),
            then=f"See help(ch.{function}) for the shape.",
        )
    return tensor


def as_rules(function: str, scores: object) -> tuple[ScoreRule, ...]:
    """The rules of a call as a tuple; ``scores`` may be a single rule, or None for none."""
    if scores is None or (type(scores) is tuple and not scores):
        return ()
    rules = tuple(scores) if isinstance(scores, Iterable) and not isinstance(scores, Tensor) else (scores,)
    for rule in rules:
        if not isinstance(rule, ScoreRule):
            raise UnsupportedError.about(
                function,
                "scores",
                must="hold score rules",
                got=type(rule).__name__,
                then="Wrap a function in ch.ScoreFunction and a tensor in ch.DenseBias.",
            )
    return rules
