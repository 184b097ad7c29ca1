"""Attention by the operators ``clearhead::attention_forward`` and ``clearhead::attention_gradients``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from clearhead.choices import is_invariant
from clearhead.masks.parts import Parts
from clearhead.ops.kinds import KEY_TILE, Side
from clearhead.problem import Problem
from clearhead.scores import Alibi, DenseBias, RelativeBias, ScoreRule, Sink, SoftCap
from clearhead.shapes import Float
from clearhead.statistics import Want

__all__ = [
    "DENSE",
    "DIFFERENTIABLE",
    "RELATIVE",
    "SLOPE",
    "SOFTCAP",
    "Forward",
    "Gradients",
    "Saved",
    "StatisticGradients",
    "attend",
    "attend_backward",
    "attend_plain",
    "attend_plain_backward",
    "attend_with_lse",
    "attend_with_lse_backward",
    "gathers",
    "mask_options",
    "row_sums",
    "rule_options",
    "softmax_rows",
]

#: A smaller factor makes scores of float32 inputs 0.
_LEAST_SCALE: Final = 1e-30
#: Gradients of tensors that backward returns.
_TENSORS: Final = {Side.BOTH: 3, Side.QUERIES: 1, Side.KEYS: 2}
#: Statistics that backward takes gradients of.
DIFFERENTIABLE: Final = ("max_score", "entropy", "distance", "sink", "received")

#: What forward returns besides the output, in this order: one bit of ``returns`` each (native/torch/attention.cpp).
_RETURNS: Final = (
    *("lse", "softmax", "output32", "max_score", "ties", "entropy", "distance", "sink"),
    *("top_k", "received", "heatmap", "row_weights", "rows"),
)
#: Those that are two tensors.
_PAIRS: Final = {"top_k": ("top_weights", "top_indices"), "heatmap": ("heatmap_max", "heatmap_mean")}
_LSE, _SOFTMAX, _OUTPUT32 = (1 << _RETURNS.index(name) for name in ("lse", "softmax", "output32"))
#: ``ch_rule_kind`` of the native interface.
SLOPE, RELATIVE, DENSE, SOFTCAP = 1, 2, 3, 4


def gathers(want: Want) -> bool:
    """Whether the kernels have to gather statistics; the log-sum-exp is computed anyway."""
    return bool(want.names - {"lse"})


def options_of(problem: Problem) -> tuple[dict[str, Any], Tensor | None]:
    """An operator's keyword arguments for a problem, and the table that was written out for its mask, if any."""
    options: dict[str, Any] = {}
    if problem.dropout:
        options.update(dropout=problem.dropout, seed=_signed(problem.seed))
        places = zip(("first_batch", "first_head", "first_key"), problem.origin, strict=True)
        options.update({name: place for name, place in places if place})
        if problem.token_numbers is not None:
            options["token_numbers"] = problem.token_numbers
    if problem.query_offset:
        options["query_offset"] = problem.query_offset
    written = _add_mask(options, problem, problem.mask_parts) if problem.mask is not None else None
    if problem.scores:
        options.update(rule_options(problem.elementwise, problem.sink))
    return options, written


def _signed(seed: int) -> int:
    """A 64 bit seed as the operators' signed integers hold it."""
    return seed - 2**64 if seed >= 2**63 else seed


def mask_options(parts: Parts) -> dict[str, Any]:
    """The operators' arguments for a mask's band, intervals, table and blocks."""
    options: dict[str, Any] = {}
    if parts.keys_before is not None:
        options["before"] = parts.keys_before
    if parts.keys_after is not None:
        options["after"] = parts.keys_after
    if parts.intervals is not None:
        options["start"], options["stop"] = parts.interval_bounds
    if parts.dense is not None:
        options["allowed"] = parts.dense.allowed
    if parts.blocks is not None:
        options["blocks"], options["block_size"] = parts.blocks.table, parts.blocks.size
    return options


def _add_mask(options: dict[str, Any], problem: Problem, parts: Parts) -> Tensor | None:
    options.update(mask_options(parts))
    if not parts.rest:
        return None
    allowed = options["allowed"] = parts.table(problem.indices())
    return allowed


def rule_options(elementwise: Sequence[ScoreRule], sink: Sink | None) -> dict[str, Any]:
    """The operators' arguments for score rules that the kernels know, in order, and for a sink."""
    kinds: list[int] = []
    values: list[float] = []
    tables: list[Tensor] = []
    for rule in elementwise:
        if isinstance(rule, SoftCap):
            kinds.append(SOFTCAP)
            values.append(rule.cap)
        else:
            kind, table = _table(rule)
            kinds.append(kind)
            tables.append(table)
    options: dict[str, Any] = {"rule_kinds": kinds, "rule_values": values, "rule_tables": tables}
    if sink is not None:
        options["sink"] = sink.logits.detach().to(torch.float32)
    return options


def _table(rule: ScoreRule) -> tuple[int, Tensor]:
    """A rule's kind and its tensor as the kernels read it."""
    if isinstance(rule, Alibi):
        return SLOPE, rule.slopes.detach().to(torch.float32)
    if isinstance(rule, RelativeBias):
        return RELATIVE, rule.table.detach().to(torch.float32).contiguous()
    assert isinstance(rule, DenseBias)
    bias = rule.bias.detach().to(torch.float32)
    return DENSE, bias if bias.stride(3) == 1 or bias.shape[3] == 1 else bias.contiguous()


@dataclass(frozen=True)
class Forward:
    """What a forward call gives.

    Attributes:
        output: ``[batch, heads, q_len, value_dim]``, laid out as the queries' heads are.
        lse: ``[batch, heads, q_len]``, where it is wanted or backward needs it.
        softmax: ``[batch, heads, q_len, 2]``, each row's maximum and reciprocal normaliser, for backward.
        exact: the output in float32, where backward reads it.
        statistics: by their names in ``Observation``, and ``ties`` for the maximum's gradient.
        written: the mask as a table, where it was evaluated position by position.
    """

    output: Tensor
    lse: Tensor | None
    softmax: Float[Tensor, "batch heads q_len 2"] | None
    exact: Tensor | None
    statistics: dict[str, Tensor]
    written: Tensor | None


def attend(problem: Problem, want: Want, *, for_backward: bool) -> Forward:
    """Output, and what is wanted or what backward needs besides."""
    options, written = options_of(problem)
    names = set(want.names)
    saves_output = False
    if for_backward:
        tables = "allowed" in options or "blocks" in options
        saves_output = problem.k_len > KEY_TILE or tables or gathers(want) or is_invariant()
        names |= _saved(problem, want, saves_output)
    order = _add_statistics(options, problem, want) if gathers(want) else None
    asked = [place for place, name in enumerate(_RETURNS) if name in names]
    results: list[Tensor] = torch.ops.clearhead.attention_forward.default(
        problem.query, problem.key, problem.value, problem.scale, sum(1 << place for place in asked), **options
    )
    output, *others = results
    labels = [label for place in asked for label in _PAIRS.get(_RETURNS[place], (_RETURNS[place],))]
    returned = dict(zip(labels, others, strict=True))
    if order is not None:
        returned["rows"] = returned["rows"][:, :, order]
    lse, softmax, exact = (returned.pop(name, None) for name in ("lse", "softmax", "output32"))
    return Forward(output, lse, softmax, output if saves_output and exact is None else exact, returned, written)


def attend_plain(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, *, for_backward: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The output of a plain or causal call; for backward its rows and, beyond one tile of keys, the float32 output."""
    operator = torch.ops.clearhead.attention_forward.default
    if not for_backward:
        (output,) = operator(query, key, value, scale, 0, None, 0) if causal else operator(query, key, value, scale, 0)
        return output, None, None
    saves_output = key.shape[2] > KEY_TILE or is_invariant()
    returns = _SOFTMAX | (_OUTPUT32 if saves_output and query.dtype != torch.float32 else 0)
    output, softmax, *exact = operator(query, key, value, scale, returns, None, 0 if causal else None)
    return output, softmax, exact[0] if exact else output if saves_output else None


def attend_plain_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax: Tensor,
    exact: Tensor | None,
    causal: bool,
    scale: float,
) -> list[Tensor] | None:
    """Gradients of query, key and value; None where NaN or infinity meets the causal mask."""
    results, finite = torch.ops.clearhead.attention_gradients.default(
        grad, query, key, value, softmax.contiguous(), exact, scale, None, 0 if causal else None
    )
    return results[:3] if finite else None


def attend_with_lse(
    query: Tensor, key: Tensor, value: Tensor, scale: float, options: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp, ``[batch, heads, q_len]``, by the operator's keyword arguments."""
    output, lse = torch.ops.clearhead.attention_forward.default(query, key, value, scale, _LSE, **options)
    return output, lse


def attend_with_lse_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    scale: float,
    options: Mapping[str, Any],
) -> list[Tensor] | None:
    """Gradients of query, key and value from the output and the log-sum-exp alone, 0 or minus infinity in empty rows.

    None where NaN or infinity meets a mask.
    """
    softmax = softmax_rows(lse, 1.0 if options.get("rule_kinds") else scale)
    exact = output if output.dtype is torch.float32 else output.to(torch.float32).contiguous()
    results, finite = torch.ops.clearhead.attention_gradients.default(
        grad, query, key, value, softmax, exact, scale, **options
    )
    return results[:3] if finite else None


def softmax_rows(lse: Tensor, scale: float) -> Float[Tensor, "batch heads q_len 2"]:
    """Each row's maximum and reciprocal normaliser, with which the kernels compute weights from the log-sum-exp.

    Args:
        lse: ``[batch, heads, q_len]``, -infinity for an empty row.
        scale: the factor that the kernels apply to differences of scores: the call's without score rules, else 1.
    """
    if abs(scale) < _LEAST_SCALE:
        # All scores are 0, and the log-sum-exp divided by the factor would be infinite.
        largest, normaliser = torch.zeros_like(lse), torch.exp(-lse)
    else:
        largest, normaliser = lse / scale, torch.ones_like(lse)
    # A row maximum of infinity and a reciprocal normaliser of 0 make all weights of a row 0.
    empty = lse == -torch.inf
    return torch.stack((largest.masked_fill(empty, torch.inf), normaliser.masked_fill(empty, 0.0)), dim=-1)


def _saved(problem: Problem, want: Want, saves_output: bool) -> set[str]:
    """What backward reads: with one tile of keys a row's delta follows from its weights, without the output."""
    names = {"softmax"}
    if problem.sink is not None or gathers(want):
        names.add("lse")
    if "max_score" in want.names:
        names.add("ties")
    if saves_output and problem.query.dtype != torch.float32:
        names.add("output32")
    return names


def _add_statistics(options: dict[str, Any], problem: Problem, want: Want) -> Tensor | None:
    """The statistics' arguments; the order in which single rows were asked for, where they are wanted."""
    # A tile larger than the whole is the whole.
    side = min(want.heatmap, max(1, problem.q_len, problem.k_len)) if want.heatmap else 0
    count, order = 0, None
    if want.row_weights is not None:
        options["row_weights"] = want.row_weights.detach().to(torch.float32).contiguous()
    if want.rows is not None:
        rows = want.rows_on(problem.query.device)
        chosen, order = torch.unique(rows, return_inverse=True)
        slots = rows.new_full((problem.q_len,), -1, dtype=torch.int32)
        slots[chosen] = torch.arange(chosen.numel(), dtype=torch.int32, device=rows.device)
        # Rows in order are returned as the kernel writes them: a copy of all weights would double the memory.
        order = None if torch.equal(chosen, rows) else order
        options["row_slots"], count = slots, chosen.numel()
    options["statistic_sizes"] = [want.sink, want.top_k, side, count]
    return order


@dataclass
class Gradients:
    """What a backward call gives.

    Attributes:
        tensors: gradients of query, key and value, of which ``side`` may leave some out.
        delta: ``[batch, heads, q_len]``, each row's ``sum(output * grad_output)`` less what arrives at its sum.
        rules: gradients of rules' tensors in float32, by the identity of the tensor.
    """

    tensors: list[Tensor]
    delta: Tensor
    rules: dict[int, Tensor]


def attend_backward(
    problem: Problem,
    saved: Saved,
    grad_output: Tensor,
    row_sums: Tensor | None,
    statistics: StatisticGradients | None,
    side: Side = Side.BOTH,
) -> Gradients | None:
    """Gradients of query, key, value and rules; None where NaN or infinity meets a mask.

    Args:
        problem: as forward had it.
        saved: what forward saved.
        grad_output: ``[batch, heads, q_len, value_dim]``.
        row_sums: ``[batch, heads, q_len]``, what is added to each row's delta with the opposite sign, or None.
        statistics: gradients of statistics, or None.
        side: which of the three tensors have a gradient; those of the rules come with that of the queries.
    """
    options, _ = options_of(problem)
    learned = [] if side is Side.KEYS else _add_learned(options, problem)
    if row_sums is not None:
        options["grad_lse"] = row_sums.to(torch.float32).contiguous()
    if saved.partial:
        options["partial_rows"] = True
    if statistics is not None:
        options.update(statistics=statistics.tensors, sink_keys=statistics.sink_keys)
    if side is not Side.BOTH:
        options["side"] = int(side)
    results, finite = torch.ops.clearhead.attention_gradients.default(
        grad_output,
        problem.query,
        problem.key,
        problem.value,
        saved.softmax.contiguous(),
        saved.output,
        problem.scale,
        **options,
    )
    if not finite:
        return None
    count = _TENSORS[side]
    delta, *rules = results[count:]
    return Gradients(results[:count], delta, {id(table): grad for table, grad in zip(learned, rules, strict=True)})


def row_sums(output: Tensor, grad_output: Tensor, grad_lse: Tensor | None) -> Float[Tensor, "batch heads q_len"]:
    """Each row's ``sum(output * grad_output) - grad_lse`` in the kernels' order.

    Args:
        output: the float32 output of whole rows, ``[batch, heads, q_len, value_dim]``.
        grad_output: its gradient in the tensors' dtype.
        grad_lse: ``[batch, heads, q_len]``, or None.
    """
    batch, heads, q_len, value_dim = output.shape
    query, key, value = (grad_output.new_zeros(batch, heads, *sizes) for sizes in ((q_len, 1), (1, 1), (1, value_dim)))
    # No query may attend to the key, so nothing else is computed.
    options: dict[str, Any] = {"after": 0, "query_offset": -q_len, "partial_rows": True, "side": int(Side.QUERIES)}
    if grad_lse is not None:
        options["grad_lse"] = grad_lse.to(torch.float32).contiguous()
    softmax = output.new_zeros(batch, heads, q_len, 2)
    results, _ = torch.ops.clearhead.attention_gradients.default(
        grad_output, query, key, value, softmax, output, 1.0, **options
    )
    delta: Tensor = results[1]
    return delta


def _add_learned(options: dict[str, Any], problem: Problem) -> list[Tensor]:
    """Rules' tensors that learn; ``rule_slots`` says for each rule with a tensor which gradient it adds to, or -1."""
    tensors = [rule.tensors()[0] for rule in problem.elementwise if not isinstance(rule, SoftCap)]
    learned = list({id(tensor): tensor for tensor in tensors if tensor.requires_grad}.values())
    if learned:
        places = {id(tensor): place for place, tensor in enumerate(learned)}
        options["rule_slots"] = [places.get(id(tensor), -1) for tensor in tensors]
    return learned


@dataclass(frozen=True)
class Saved:
    """What forward saves for backward: the float32 output and log-sum-exp where something needs them, and the rows.

    With ``partial`` the rows have keys besides those of the problem, and the output is that of all.
    """

    output: Tensor | None
    lse: Tensor | None
    softmax: Float[Tensor, "batch heads q_len 2"]
    partial: bool = False


class StatisticGradients:
    """Gradients of statistics as the kernels take them.

    With weights ``P`` of a row and ``G_j`` what statistics add to the gradient of ``P_j``, a score's gradient is
    ``P_j (G_j - sum_k P_k G_k)``. The kernels compute ``G_j``; ``row_sums`` is the sum.

    Args:
        problem: as forward had it.
        given: gradients by the statistic's name.
        forward: the statistics' values, and ``received_mean``, each row's weighted mean of ``received``'s gradient.
        lse: ``[batch, heads, q_len]``.
        sink_keys: how many first keys count as a sink.

    Attributes:
        tensors: ties, then gradients of the maximum, entropy, distance, sink and received, None for absent ones.
    """

    def __init__(
        self, problem: Problem, given: Mapping[str, Tensor], forward: Mapping[str, Tensor], lse: Tensor, sink_keys: int
    ) -> None:
        self.sink_keys = sink_keys
        self.row_sums = torch.zeros_like(lse)
        plain = {name: grad.to(torch.float32).contiguous() for name, grad in given.items()}
        ties = forward["ties"] if "max_score" in given else None
        self.tensors = [ties, *(plain.get(name) for name in DIFFERENTIABLE)]
        if "entropy" in plain:
            self.row_sums += plain["entropy"] * (forward["entropy"] - _mass(problem, lse))
        for name in ("distance", "sink"):
            if name in plain:
                self.row_sums += plain[name] * forward[name]
        if "received" in plain:
            self.row_sums += forward["received_mean"]


def _mass(problem: Problem, lse: Tensor) -> Tensor:
    """The sum of each row's weights: 1, less a sink's weight; 0 for a row without keys."""
    mass = (lse != -torch.inf).to(torch.float32)
    if problem.sink is None:
        return mass
    logits = problem.sink.logits.detach().to(torch.float32).view(1, -1, 1)
    return mass - torch.exp(logits - lse).masked_fill(logits == -torch.inf, 0.0)
