"""The CPU kernels: a problem written down as one description, run by the compiled library."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import forward_ad

from clearhead.backends.capability import SMALL_TRAINING, Backend, Capability, multiplications
from clearhead.backends.containment import contained
from clearhead.backends.native_library import (
    DTYPES,
    MAX_HEAD_DIM,
    MAX_RULES,
    MAX_THREADS,
    Code,
    Description,
    Rule,
    RuleKind,
    Table,
    TensorView,
    in_memory,
    library,
    message,
    reason,
)
from clearhead.backends.native_memory import new_tensor, room_like
from clearhead.backends.native_replay import remember
from clearhead.backends.native_statistics import DIFFERENTIABLE, Gathered, Grads, kernel_gives
from clearhead.backends.once import once
from clearhead.masks import Causal
from clearhead.masks.parts import Parts
from clearhead.problem import Problem
from clearhead.scores import Alibi, DenseBias, RelativeBias, ScoreRule, Sink, SoftCap
from clearhead.shapes import Float
from clearhead.statistics import Observation, Want

__all__ = ["BACKEND"]

#: The largest table of booleans that is written out for a mask that is neither runs of keys nor a table of its own.
_MAX_TABLE_ENTRIES: Final = 2**26


def _also(problem: Problem) -> list[str]:
    if not all(map(in_memory, (problem.query, problem.key, problem.value))):
        return ["needs plain tensors, not subclasses, and not those of torch.func"]
    if torch._C._len_torch_dispatch_stack() > 0 or forward_ad._current_level >= 0:
        return ["is not seen by what traces operators or differentiates forward"]
    reasons = []
    if sum(isinstance(rule, SoftCap) for rule in problem.scores) > 1:
        reasons.append("takes one SoftCap")
    if len(problem.elementwise) > MAX_RULES:
        reasons.append(f"takes {MAX_RULES} score rules")
    for rule in problem.scores if problem.needs_gradient else ():
        if isinstance(rule, Alibi) and rule.slopes.requires_grad:
            reasons.append("has no gradient for Alibi's slopes")
        if isinstance(rule, DenseBias) and rule.bias.requires_grad and rule.bias.shape[3] != problem.k_len:
            reasons.append("has no gradient for a DenseBias without a key axis")
    if max(problem.k_len, problem.q_len) >= 2**30:
        reasons.append("takes lengths below 2**30")
    entries = _table_entries(problem)
    if entries > _MAX_TABLE_ENTRIES:
        reasons.append(f"would need a table of {entries:,} entries (limit {_MAX_TABLE_ENTRIES:,})")
    return reasons


def _table_entries(problem: Problem) -> int:
    """Entries of the table that has to be written out for the mask."""
    rest = problem.mask_parts.rest if problem.mask is not None else ()
    if not rest:
        return 0
    places = problem.q_len * problem.k_len
    most = problem.batch * problem.num_heads * places
    if most <= _MAX_TABLE_ENTRIES:
        return most
    # One place tells whether batch entries and heads differ; a user's function does not say it otherwise.
    batch, head, q_pos, k_pos = problem.indices()
    sizes = [part.allows(batch, head, q_pos[:, :, :1], k_pos[..., :1]).shape[:2] for part in rest]
    batches, heads = (max(own) for own in zip(*sizes, strict=True))
    return int(batches * heads * places)


class _Work:
    """A description together with the tensors that it points into."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.held: list[Tensor] = []
        description = Description.new()
        description.threads = min(torch.get_num_threads(), MAX_THREADS)
        description.dtype = DTYPES[problem.query.dtype]
        description.batch, description.heads, description.kv_heads = (
            problem.batch, problem.num_heads, problem.num_kv_heads,
        )  # fmt: skip
        description.q_len, description.k_len = problem.q_len, problem.k_len
        description.head_dim, description.value_dim = problem.head_dim, problem.value_dim
        description.query_offset = problem.query_offset
        description.scale, description.dropout, description.seed = problem.scale, problem.dropout, problem.seed
        self.description = description
        for name in ("query", "key", "value"):
            self.tensor(name, getattr(problem, name).detach())
        if problem.mask is not None:
            self._mask(problem.mask_parts)
        self.rules: list[ScoreRule] = list(problem.elementwise)
        for place, rule in enumerate(self.rules):
            self._rule(description.rules[place], rule)
        description.num_rules = len(self.rules)
        if problem.sink is not None:
            logits = self.keep(problem.sink.logits.detach().to(torch.float32))
            description.sink = logits.data_ptr()
            description.sink_head = 1 if logits.shape[0] > 1 else 0

    def keep(self, tensor: Tensor) -> Tensor:
        """The tensor, contiguous, kept alive as long as the description."""
        tensor = tensor.contiguous()
        self.held.append(tensor)
        return tensor

    def tensor(self, name: str, tensor: Tensor) -> Tensor:
        """Point a field at a tensor; its last axis is made contiguous where it is not."""
        tensor = tensor.resolve_neg()
        if tensor.stride(3) != 1 and tensor.shape[3] > 1:
            tensor = tensor.contiguous()
        self.held.append(tensor)
        batch, head, row, _ = tensor.stride()
        setattr(self.description, name, TensorView(tensor.data_ptr(), batch, head, row))
        return tensor

    def gather(self, want: Want, *, for_backward: bool) -> Gathered | None:
        """Ask for statistics, where any are wanted that the kernel has to gather."""
        if not kernel_gives(want):
            return None
        self.gathered = Gathered(self.problem, want, for_backward=for_backward)
        self.description.statistics = ctypes.addressof(self.gathered.structure)
        return self.gathered

    def result(self, name: str, *trailing: int) -> Tensor:
        """A new float32 ``[batch, heads, q_len, *trailing]`` that the kernel writes."""
        own = self.problem
        tensor = new_tensor(own.query, (own.batch, own.num_heads, own.q_len, *trailing), torch.float32)
        setattr(self.description, name, tensor.data_ptr())
        return tensor

    def _mask(self, parts: Parts) -> None:
        description = self.description
        if parts.before is not None:
            description.before = parts.before
        if parts.after is not None:
            description.after = parts.after
        if parts.runs is not None:
            start, stop = torch.broadcast_tensors(parts.runs.start, parts.runs.stop)
            # A run that intersection emptied may lie anywhere.
            start, stop = (self.keep(edge.clamp(0, self.problem.k_len).to(torch.int32)) for edge in (start, stop))
            description.start, description.stop, description.runs = start.data_ptr(), stop.data_ptr(), start.shape[3]
            description.run_batch, description.run_head, description.run_row = _strides(start)[:3]
        allowed = parts.table(self.problem.indices()) if parts.rest or parts.dense is not None else None
        if allowed is not None:
            description.allowed = self._table(allowed)
        if parts.blocks is not None:
            table = parts.blocks.table
            description.blocks, description.block_size = self._table(table), parts.blocks.size
            description.block_rows, description.block_columns = table.shape[2], table.shape[3]

    def _table(self, table: Tensor) -> Table:
        self.held.append(table)
        return Table(table.data_ptr(), *_strides(table))

    def _rule(self, into: Rule, rule: ScoreRule) -> None:
        if isinstance(rule, Alibi):
            slopes = rule.slopes.detach().to(torch.float32)[None, :, None, None]
            into.kind, into.table = RuleKind.SLOPE, self._table(slopes)
        elif isinstance(rule, RelativeBias):
            table = self.keep(rule.table.detach().to(torch.float32))
            into.kind, into.table = RuleKind.RELATIVE, self._table(table[None, :, None, :])
            into.reach = table.shape[1] // 2
        elif isinstance(rule, DenseBias):
            bias = rule.bias.detach().to(torch.float32)
            if bias.stride(3) != 1:
                bias = bias.contiguous()
            into.kind, into.table = RuleKind.DENSE, self._table(bias)
        else:
            assert isinstance(rule, SoftCap)
            into.kind, into.value = RuleKind.SOFTCAP, rule.cap


def _strides(tensor: Tensor) -> tuple[int, int, int, int]:
    """Strides in which an axis of one entry stands still."""
    batch, head, row, column = (
        0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return batch, head, row, column


def _call(name: str, work: _Work) -> int:
    kernels = library()
    assert kernels is not None
    code: int = int(getattr(kernels, name)(ctypes.byref(work.description)))
    if code == Code.NO_MEMORY:
        raise MemoryError(f"{name}: {message(code)}")
    # What a Problem lets through, the kernels take: any other code is a mistake of ours.
    assert code in (Code.OK, Code.NOT_FINITE), f"{name}: {message(code)}"
    return code


@dataclass(frozen=True)
class _Rows:
    """What forward leaves for backward: its output in float32, log-sum-exp, and each row's largest score and share."""

    output: Tensor
    lse: Tensor
    softmax: Float[Tensor, "batch heads q_len 2"]


def _forward(problem: Problem, want: Want) -> Observation:
    """Output, and the statistics that are wanted."""
    work = _Work(problem)
    output = work.tensor("output", room_like(problem.query, problem.value_dim))
    lse = work.result("lse") if want.lse else None
    gathered = work.gather(want, for_backward=False)
    _call("ch_forward", work)
    if not want.names and _may_come_again(problem):
        remember(
            problem.query, problem.key, problem.value, causal=problem.mask is not None,
            description=work.description, output=output,
        )  # fmt: skip
    return Observation(output=output, lse=lse, **({} if gathered is None else gathered.results()))


def _may_come_again(problem: Problem) -> bool:
    """Whether shapes, strides and dtype say all there is to say about a call."""
    return (
        problem.leading == 2
        and not problem.scores
        and problem.dropout == 0.0
        and problem.scale == 1.0 / math.sqrt(problem.head_dim)
        and (problem.mask is None or _square_causal(problem))
    )


def _square_causal(problem: Problem) -> bool:
    return isinstance(problem.mask, Causal) and problem.query_offset == 0 and problem.q_len == problem.k_len


def _forward_for_backward(problem: Problem, want: Want) -> tuple[Tensor, _Rows, dict[str, Tensor]]:
    """Output, what backward needs besides, and the statistics that are wanted."""
    work = _Work(problem)
    output = work.tensor("output", room_like(problem.query, problem.value_dim))
    exact = output if output.dtype == torch.float32 else work.result("output32", problem.value_dim)
    rows = _Rows(exact, work.result("lse"), work.result("softmax", 2))
    gathered = work.gather(want, for_backward=True)
    _call("ch_forward", work)
    return output, rows, {} if gathered is None else gathered.results()


class _Native(torch.autograd.Function):
    """Output, log-sum-exp and statistics; rule parameters ride along so that autograd knows them."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, want: Want, names: list[str], *tensors: Tensor) -> tuple[Tensor, ...]:
        output, rows, found = _forward_for_backward(problem, want)
        names.extend(found)
        ctx.problem, ctx.names, ctx.sink_keys = problem, names, want.sink
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(tensor for name, tensor in found.items() if name not in DIFFERENTIABLE))
        # Small ones, and what a gradient of them needs.
        ctx.save_for_backward(
            *tensors[:3], rows.output, rows.lse, rows.softmax,
            *(found.get(name) for name in ("entropy", "distance", "sink", "ties")),
        )  # fmt: skip
        return output, rows.lse, *found.values()

    @staticmethod
    def backward(
        ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None, *others: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse, softmax, *small = ctx.saved_tensors
        problem = ctx.problem.with_tensors(query, key, value)
        rows = _Rows(output, lse, softmax)
        given = {name: grad for name, grad in zip(ctx.names, others, strict=True) if grad is not None}
        found = dict(zip(("entropy", "distance", "sink", "ties"), small, strict=True))
        with torch.no_grad():
            if grad_output is None:
                grad_output = torch.zeros_like(output, dtype=query.dtype)
            arrived = _Arrived(grad_output, grad_lse, given, found, ctx.sink_keys)
            grads = _gradients(problem, rows, arrived)
        return None, None, None, *once(grads, (query, key, value, grad_output))


@dataclass(frozen=True)
class _Arrived:
    """Gradients that came in: of the output, the log-sum-exp, and statistics by name; and forward's row statistics."""

    output: Tensor
    lse: Tensor | None
    statistics: dict[str, Tensor]
    found: dict[str, Tensor]
    sink_keys: int

    def without(self, rows: Tensor) -> _Arrived:
        """The same with nothing arriving at some rows."""

        def clean(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {
                name: tensor if tensor is None or name in ("received", "ties") else tensor.masked_fill(rows, 0.0)
                for name, tensor in tensors.items()
            }

        return replace(
            self, output=self.output.masked_fill(rows[..., None], 0.0),
            lse=None if self.lse is None else self.lse.masked_fill(rows, 0.0),
            statistics=clean(self.statistics), found=clean(self.found),
        )  # fmt: skip


def _gradients(problem: Problem, rows: _Rows, arrived: _Arrived) -> list[Tensor]:
    """Gradients of query, key, value and the rules' parameters."""
    grads = _backward(problem, rows, arrived)
    if grads is None:
        clean = contained(problem, rows.output, rows.lse)
        # A row with an infinite largest score and no share has no weights.
        gone = torch.tensor([torch.inf, 0.0])
        softmax = torch.where(clean.spoiled[..., None], gone, rows.softmax)
        finite = _Rows(clean.finite(rows.output), rows.lse, softmax)
        grads = _backward(clean.problem, finite, arrived.without(clean.spoiled))
        assert grads is not None
        grads = replace(grads, tensors=clean.spoil(grads.tensors))
    return [*grads.tensors, *(_parameter_gradient(problem, own, grads, rows.lse) for own in problem.rule_parameters)]


def _received_mean(problem: Problem, grad: Tensor) -> Tensor:
    """Each row's weighted mean of a number per key, ``[batch, heads, q_len]``: attention to a value one wide."""
    group = problem.num_heads // problem.num_kv_heads
    query, key = (tensor.detach().to(torch.float32) for tensor in (problem.query, problem.key))
    values = grad.to(torch.float32)[..., None]
    alone = replace(
        problem, query=query, key=key.repeat_interleave(group, dim=1), value=values, dropout=0.0
    )  # fmt: skip
    return _forward(alone, Want()).output[..., 0]


@dataclass(frozen=True)
class _Gradients:
    """Gradients of query, key and value; of rules, by the identity of their tensor; and each row's delta."""

    tensors: list[Tensor]
    rules: dict[int, Tensor]
    delta: Tensor


def _backward(problem: Problem, rows: _Rows, arrived: _Arrived) -> _Gradients | None:
    """The kernel's call; None where numbers that are not finite meet a mask."""
    grad_lse = arrived.lse
    work = _Work(problem)
    description = work.description
    work.tensor("output", rows.output)
    if problem.query.dtype != torch.float32:
        description.output32 = work.keep(rows.output).data_ptr()
    description.softmax = work.keep(rows.softmax).data_ptr()
    work.tensor("grad_output", arrived.output)
    if arrived.statistics:
        found = arrived.found
        if "received" in arrived.statistics:
            found = {**found, "received_mean": _received_mean(problem, arrived.statistics["received"])}
        extra = Grads(problem, arrived.statistics, found, rows.lse, arrived.sink_keys)
        description.statistics = extra.pointer()
        grad_lse = -extra.row_sums if grad_lse is None else grad_lse - extra.row_sums
    if grad_lse is not None:
        description.grad_lse = work.keep(grad_lse.to(torch.float32)).data_ptr()
    delta = work.result("delta")
    tensors = [
        work.tensor(f"grad_{name}", room_like(tensor, tensor.shape[3]))
        for name, tensor in (("query", problem.query), ("key", problem.key), ("value", problem.value))
    ]
    rules: dict[int, Tensor] = {}
    for place, rule in enumerate(work.rules):
        if isinstance(rule, (RelativeBias, DenseBias)) and rule.parameters()[0].requires_grad:
            _add_rule_gradient(description.rules[place], rule, rules)
    return _Gradients(tensors, rules, delta) if _call("ch_backward", work) == Code.OK else None


def _add_rule_gradient(into: Rule, rule: RelativeBias | DenseBias, grads: dict[int, Tensor]) -> None:
    """Point a rule at the float32 tensor that the kernel adds its gradient to: one for each learned tensor."""
    learned = rule.parameters()[0]
    grad = grads.get(id(learned))
    if grad is None:
        grad = torch.zeros_like(learned, dtype=torch.float32, memory_format=torch.contiguous_format)
        grads[id(learned)] = grad
    into.grad = grad.data_ptr()
    if isinstance(rule, DenseBias):
        into.grad_batch, into.grad_head, into.grad_row, _ = _strides(grad)
    else:
        into.grad_head = _strides(grad[None, :, None])[1]


def _parameter_gradient(problem: Problem, parameter: Tensor, grads: _Gradients, lse: Tensor) -> Tensor:
    """One parameter's gradient in its own dtype."""
    if problem.sink is not None and parameter is problem.sink.logits:
        # A sink's weight is exp(logit - lse) and its value nothing, so its gradient is -weight * delta.
        logits = parameter.detach().to(torch.float32).view(1, -1, 1)
        # A logit of -inf beside an empty row is -inf less -inf.
        weight = torch.exp(logits - lse).masked_fill(logits == -torch.inf, 0.0)
        per_head = -(weight * grads.delta).sum(dim=(0, 2))
        grad = per_head if parameter.shape == per_head.shape else per_head.sum().view(1)
    else:
        grad = grads.rules[id(parameter)]
    return grad.to(parameter.dtype)


def run(problem: Problem, want: Want) -> Observation:
    """Output, and the statistics that are wanted."""
    if not problem.needs_gradient:
        return _forward(problem, want)
    names: list[str] = []
    output, lse, *others = _Native.apply(  # type: ignore[no-untyped-call]
        problem, want, names, problem.query, problem.key, problem.value, *problem.rule_parameters
    )
    found = dict(zip(names, others, strict=True))
    found.pop("ties", None)
    return Observation(output=output, lse=lse if want.lse else None, **found)


def _yields(problem: Problem) -> str | None:
    """A training step this small is over in torch before autograd has called back into Python."""
    plain = not problem.scores and (problem.mask is None or isinstance(problem.mask, Causal))
    small = multiplications(problem) <= SMALL_TRAINING.get(problem.query.dtype, 0)
    return "sdpa" if plain and small and problem.needs_gradient else None


BACKEND = Backend(
    name="native",
    summary="clearhead's own CPU kernels",
    capability=Capability(
        devices=frozenset({"cpu"}),
        dtypes=frozenset(DTYPES),
        rules=(Alibi, RelativeBias, DenseBias, SoftCap, Sink),
        max_head_dim=MAX_HEAD_DIM,
        learned_row_weights=False,
        requires=reason,
        also=_also,
    ),
    run=run,
    yields=_yields,
)
