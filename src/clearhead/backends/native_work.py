"""One attention written down for the CPU kernels: a problem as a description, with the tensors that it points into."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from clearhead.backends.native_header import (
    DTYPES,
    MAX_THREADS,
    TILE,
    Code,
    Description,
    Rule,
    RuleKind,
    Table,
    TensorView,
    Verb,
)
from clearhead.backends.native_library import library, message, new_description
from clearhead.backends.native_memory import new_tensor, room_like
from clearhead.errors import UnsupportedError
from clearhead.masks.parts import Parts
from clearhead.ops.attention import Saved as Rows
from clearhead.problem import Problem
from clearhead.scores import Alibi, DenseBias, RelativeBias, ScoreRule, SoftCap
from clearhead.statistics import Want

__all__ = ["BackwardWork", "ForwardWork", "Rows", "Work", "check", "strides"]


class Work:
    """A description together with the tensors that it points into; they may be written until ``run``.

    Attributes:
        written: the mask as a table, where it was asked place by place.
    """

    verb: Verb
    written: Tensor | None = None

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.held: list[Tensor] = []
        description = new_description(Description)
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
            start, stop = map(self.keep, parts.edges)
            description.start, description.stop, description.runs = start.data_ptr(), stop.data_ptr(), start.shape[3]
            description.run_batch, description.run_head, description.run_row = strides(start)[:3]
        allowed = parts.table(self.problem.indices()) if parts.rest or parts.dense is not None else None
        if allowed is not None:
            description.allowed = self._table(allowed)
            self.written = allowed if parts.rest else None
        if parts.blocks is not None:
            table = parts.blocks.table
            description.blocks, description.block_size = self._table(table), parts.blocks.size
            description.block_rows, description.block_columns = table.shape[2], table.shape[3]

    def _table(self, table: Tensor) -> Table:
        self.held.append(table)
        return Table(table.data_ptr(), *strides(table))

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

    @property
    def call(self) -> tuple[Verb, Description]:
        """What ``native_library.run`` takes."""
        return self.verb, self.description

    def run(self) -> bool:
        """Make the call; see ``check``."""
        kernels = library()
        assert kernels is not None
        name = f"ch_{self.verb.name.lower()}"
        return check(name, int(getattr(kernels, name)(ctypes.byref(self.description))))


class ForwardWork(Work):
    """A forward call: what it writes.

    Attributes:
        output: ``[batch, heads, q_len, value_dim]``, its heads as the queries' lie.
        lse: ``[batch, heads, q_len]``, where somebody wants it.
        rows: what backward needs, where there is to be one.
    """

    verb = Verb.FORWARD

    def __init__(self, problem: Problem, want: Want, *, for_backward: bool) -> None:
        super().__init__(problem)
        self.output = self.tensor("output", room_like(problem.query, problem.value_dim))
        self.rows: Rows | None = None
        needs_lse = want.lse or (for_backward and problem.sink is not None)
        self.lse = self.result("lse") if needs_lse else None
        if for_backward:
            own: Tensor | None = None
            if self._backward_reads_output(want):
                exact = problem.query.dtype == torch.float32
                own = self.output if exact else self.result("output32", problem.value_dim)
            self.rows = Rows(own, self.lse, self.result("softmax", 2))

    def _backward_reads_output(self, want: Want) -> bool:
        """One tile of keys tells a row's delta from its weights."""
        tables = self.description.allowed.data or self.description.blocks.data
        return self.problem.k_len > TILE or bool(tables)


class BackwardWork(Work):
    """A backward call: what it writes.

    Attributes:
        tensors: gradients of query, key and value: those given, or new ones that lie as the tensors do.
        rule_grads: gradients of rules, by the identity of their tensor.
        delta: each row's ``sum(output * grad_output)``.
    """

    verb = Verb.BACKWARD

    def __init__(self, problem: Problem, rows: Rows, grad_output: Tensor, into: Sequence[Tensor] | None = None) -> None:
        super().__init__(problem)
        if rows.output is not None:
            self.tensor("output", rows.output)
            if problem.query.dtype != torch.float32:
                self.description.output32 = self.keep(rows.output).data_ptr()
        self.description.softmax = self.keep(rows.softmax).data_ptr()
        self.tensor("grad_output", grad_output)
        self.delta = self.result("delta")
        inputs = (problem.query, problem.key, problem.value)
        into = [room_like(tensor, tensor.shape[3]) for tensor in inputs] if into is None else into
        names = ("grad_query", "grad_key", "grad_value")
        self.tensors = [self.tensor(name, tensor) for name, tensor in zip(names, into, strict=True)]
        self.rule_grads: dict[int, Tensor] = {}
        for place, rule in enumerate(self.rules):
            if isinstance(rule, (RelativeBias, DenseBias)) and rule.parameters()[0].requires_grad:
                _add_rule_gradient(self.description.rules[place], rule, self.rule_grads)


def check(name: str, code: int) -> bool:
    """Whether a call is done; False where numbers that are not finite meet a mask, in backward alone."""
    if code == Code.NO_MEMORY:
        raise MemoryError(f"{name}: {message(code)}")
    # To look at each address beforehand would take small calls longer than it is worth.
    if code == Code.BAD_POINTER:
        raise UnsupportedError.about(
            "attention", "every tensor", must="hold its numbers, at addresses that their size divides",
            got="one whose memory was freed or begins between two numbers", then="Copy it with .clone().",
        )  # fmt: skip
    # What a Problem lets through, the kernels take: any other code is a mistake of ours.
    if code not in (Code.OK, Code.NOT_FINITE):
        raise RuntimeError(
            f"{name}: the call must fit the CPU kernels; got code {int(code)}, {message(code)}. "
            "Use backend='tiled', and report this: it should have been refused before."
        )
    return code == Code.OK


def _add_rule_gradient(into: Rule, rule: RelativeBias | DenseBias, grads: dict[int, Tensor]) -> None:
    """Point a rule at the float32 tensor that the kernel adds its gradient to: one for each learned tensor."""
    learned = rule.parameters()[0]
    grad = grads.get(id(learned))
    if grad is None:
        grad = torch.zeros_like(learned, dtype=torch.float32, memory_format=torch.contiguous_format)
        grads[id(learned)] = grad
    into.grad = grad.data_ptr()
    if isinstance(rule, DenseBias):
        into.grad_batch, into.grad_head, into.grad_row, _ = strides(grad)
    else:
        into.grad_head = strides(grad[None, :, None])[1]


def strides(tensor: Tensor) -> tuple[int, int, int, int]:
    """Strides in which an axis of one entry stands still."""
    batch, head, row, column = (
        0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return batch, head, row, column
