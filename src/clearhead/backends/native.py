"""The backend of the CPU kernels: converts a problem to a call of the compiled library, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from clearhead.backends.capability import Backend, Capability, RowGrads
from clearhead.backends.native_gradients import Arrived, gradients, parameter_gradient
from clearhead.backends.recorded import is_recorded, recorded_attention
from clearhead.choices import attention_path, covers
from clearhead.cut import pulled
from clearhead.int8_rows import is_quantized
from clearhead.masks import Causal
from clearhead.ops.attention import (
    DIFFERENTIABLE,
    Saved,
    attend,
    attend_backward,
    attend_plain,
    attend_plain_backward,
    row_sums,
    softmax_rows,
)
from clearhead.ops.kinds import DTYPES, MAX_BLOCK, MAX_HEAD_DIM, MAX_RULES, Side
from clearhead.ops.library import in_memory, reason
from clearhead.problem import Problem
from clearhead.scores import Alibi, DenseBias, RelativeBias, ScoreFunction, Sink, SoftCap
from clearhead.statistics import Observation, Want
from clearhead.tensors import traces
from clearhead.torch_private import differentiates_forward, transforms

__all__ = ["BACKEND", "MAX_TABLE_ENTRIES", "plain"]

#: The largest table of booleans that is computed for a mask that is neither intervals of keys nor a table.
MAX_TABLE_ENTRIES: Final = 2**26
#: Statistics that are saved for backward.
_SAVED: Final = ("entropy", "distance", "sink", "ties")
_FLOAT32: Final = torch.finfo(torch.float32)
_PLAIN_TYPES: Final = (Tensor, torch.nn.Parameter)
_PLAIN: Final = "needs plain tensors, not subclasses, and not those of torch.func"


def _also(problem: Problem) -> list[str]:
    mask = () if problem.mask is None else problem.mask.tensors()
    if not in_memory(problem.query, problem.key, problem.value, *mask) or transforms():
        return [_PLAIN]
    if differentiates_forward() or traces():
        return ["has no rule for torch.jit.trace or forward-mode differentiation"]
    problem = problem.with_traced_rules
    if not all(in_memory(tensor) for rule in problem.scores for tensor in rule.tensors()):
        return [_PLAIN]
    return [*_rule_reasons(problem), *_size_reasons(problem), *_packing_reasons(problem), *_cache_reasons(problem)]


def _cache_reasons(problem: Problem) -> list[str]:
    gradient = problem.is_quantized and problem.needs_gradient
    return ["has no gradient of a call with an int8 KV cache"] if gradient else []


def _packing_reasons(problem: Problem) -> list[str]:
    """Dropout by sequence needs calls of the kernels in which each sequence is a segment of its own."""
    if problem.token_numbers is None:
        return []
    parts = problem.mask_parts
    tables = parts.dense is not None or parts.blocks is not None or bool(parts.rest)
    tables = tables or any(isinstance(rule, DenseBias) for rule in problem.scores)
    if tables or bool(problem.rule_parameters) or not parts.intervals or problem.query_offset:
        return ["draws dropout of packed sequences without tables and learned rules (ch.set_invariant)"]
    return []


def _rule_reasons(problem: Problem) -> list[str]:
    reasons = []
    if any(isinstance(rule, ScoreFunction) for rule in problem.scores):
        reasons.append(
            "takes a ScoreFunction that caps or masks scores, or adds a bias of q_pos - k_pos, of the key, "
            "or a small one"
        )
    if sum(isinstance(rule, SoftCap) for rule in problem.scores) > 1:
        reasons.append("takes one SoftCap")
    if any(isinstance(rule, SoftCap) and not _FLOAT32.tiny <= rule.cap <= _FLOAT32.max for rule in problem.scores):
        reasons.append("takes a cap within float32's range")
    if len(problem.elementwise) > MAX_RULES:
        reasons.append(f"takes {MAX_RULES} score rules")
    for rule in problem.scores if problem.needs_gradient else ():
        if isinstance(rule, Alibi) and rule.slopes.requires_grad:
            reasons.append("has no gradient for Alibi's slopes")
        if isinstance(rule, DenseBias) and rule.bias.requires_grad and rule.bias.shape[3] != problem.k_len:
            reasons.append("has no gradient for a DenseBias without a key axis")
    return reasons


def _size_reasons(problem: Problem) -> list[str]:
    reasons = []
    if problem.value_dim == 0:
        reasons.append("takes values of at least one channel")
    if max(problem.k_len, problem.q_len) >= 2**30:
        reasons.append("takes lengths below 2**30")
    blocks = None if problem.mask is None else problem.mask_parts.blocks
    if blocks is not None and blocks.size > MAX_BLOCK:
        reasons.append(f"takes blocks of up to {MAX_BLOCK:,} positions")
    entries = _table_entries(problem)
    if entries > MAX_TABLE_ENTRIES:
        reasons.append(f"would need a table of {entries:,} entries (limit {MAX_TABLE_ENTRIES:,})")
    return reasons


def _table_entries(problem: Problem) -> int:
    """Entries of the table that must be computed for the mask."""
    rest = problem.mask_parts.rest if problem.mask is not None else ()
    if not rest:
        return 0
    places = problem.q_len * problem.k_len
    most = problem.batch * problem.num_heads * places
    if most <= MAX_TABLE_ENTRIES:
        return most
    # The shape at one place shows whether batch entries and heads differ, which a user's function does not declare.
    batch, head, q_pos, k_pos = problem.indices()
    sizes = [part.allows(batch, head, q_pos[:, :, :1], k_pos[..., :1]).shape[:2] for part in rest]
    batches, heads = (max(axis) for axis in zip(*sizes, strict=True))
    return int(batches * heads * places)


def _forward(problem: Problem, want: Want) -> Observation:
    """Output and the requested statistics."""
    done = attend(problem, want, for_backward=False)
    return Observation(output=done.output, lse=done.lse, **done.statistics)


def plain(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: object, auto: bool = False
) -> Tensor | None:
    """Attention without rules, dropout or a mask other than ``Causal()``, by the operator, which validates the call.

    Returns:
        The output; None if the call needs the general path, the operator raises (``Problem.of`` then raises the error),
        or ``auto`` is true and the table selects another backend.
    """
    tensors = (query, key, value)
    if any(type(tensor) not in _PLAIN_TYPES or not tensor.is_cpu for tensor in tensors):
        return None
    if scale is not None and not isinstance(scale, float):
        return None
    if query.dtype not in DTYPES or not covers(query.dtype):
        return None
    if transforms() or differentiates_forward() or traces():
        return None
    if reason() is not None:
        return None
    try:
        if causal and query.shape[2] != key.shape[2]:
            return None
        scale = query.shape[3] ** -0.5 if scale is None else scale
        gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        sizes = query.shape[2], key.shape[2]
        if auto and attention_path(query.dtype, *sizes, causal=causal, gradient=gradient) != BACKEND.name:
            return None
        if gradient and is_quantized(key):
            return None
        if gradient:
            output: Tensor = _Plain.apply(query, key, value, causal, scale)  # type: ignore[no-untyped-call]
            return output
        return attend_plain(query, key, value, causal, scale, for_backward=False)[0]
    except (RuntimeError, IndexError, ArithmeticError):
        return None


class _Plain(torch.autograd.Function):
    """A full or causal call, whose backward does not need the output if all keys fit one tile."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Tensor:
        output, softmax, exact = attend_plain(query, key, value, causal, scale, for_backward=True)
        ctx.causal, ctx.scale = causal, scale
        ctx.save_for_backward(query, key, value, softmax, exact)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, softmax, exact = ctx.saved_tensors
        recorded = is_recorded(grad)
        if not recorded:
            grads = attend_plain_backward(grad, query, key, value, softmax, exact, ctx.causal, ctx.scale)
            if grads is not None:
                return *grads, None, None
        mask = Causal() if ctx.causal else None
        problem = Problem.of("attention", query, key, value, mask=mask, scale=ctx.scale)
        if recorded:
            return *recorded_attention(problem, Want(), {"output": grad}, ctx.needs_input_grad[:3]), None, None
        return *gradients(problem, Saved(exact, None, softmax), Arrived(grad)), None, None


class _Native(torch.autograd.Function):
    """Output, log-sum-exp and statistics; rule parameters are inputs so that autograd knows them."""

    @staticmethod
    def forward(
        ctx: Any, problem: Problem, want: Want, names: list[str], *tensors: Tensor
    ) -> tuple[Tensor | None, ...]:
        done = attend(problem, want, for_backward=True)
        names.extend(done.statistics)
        # Saved tensors are freed after backward; the problem stays alive as long as the output, so it holds no
        # elements.
        ctx.problem, ctx.names, ctx.want = problem.without_elements(), names, replace(want, lse=True)
        ctx.set_materialize_grads(False)
        fixed = (tensor for name, tensor in done.statistics.items() if name not in DIFFERENTIABLE)
        ctx.mark_non_differentiable(*fixed)
        # Statistics of rows, which are small, and those that their gradients need.
        ctx.save_for_backward(
            *tensors[:3],
            done.exact,
            done.lse,
            done.softmax,
            done.written,
            *(done.statistics.get(name) for name in _SAVED),
            *_read_in_backward(problem),
        )
        return done.output, done.lse, *done.statistics.values()

    @staticmethod
    def backward(
        ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None, *others: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse, softmax, written, *small = ctx.saved_tensors
        problem = ctx.problem.with_tensors(query, key, value)
        problem = problem if written is None else problem.with_table(written)
        rows = Saved(output, lse, softmax)
        given = {name: grad for name, grad in zip(ctx.names, others, strict=True) if grad is not None}
        if is_recorded(grad_output, grad_lse, *others):
            named = {"output": grad_output, "lse": grad_lse, **given}
            arrived = {name: grad for name, grad in named.items() if grad is not None}
            return None, None, None, *recorded_attention(problem, ctx.want, arrived, ctx.needs_input_grad[3:])
        row_statistics = dict(zip(_SAVED, small[: len(_SAVED)], strict=True))
        if grad_output is None:
            grad_output = query.new_zeros((*softmax.shape[:3], problem.value_dim))
        arrived_grads = Arrived(grad_output, grad_lse, given, row_statistics, ctx.want)
        return None, None, None, *gradients(problem, rows, arrived_grads)


def _read_in_backward(problem: Problem) -> list[Tensor]:
    """Tensors of rules and mask that backward reads without a copy; autograd raises if one was written into."""
    tensors = [tensor for rule in problem.scores for tensor in rule.tensors()]
    if problem.mask is not None:
        parts = problem.mask_parts
        tensors += [] if parts.dense is None else [parts.dense.allowed]
        tensors += [] if parts.blocks is None else [parts.blocks.table]
    return [tensor for tensor in tensors if not tensor.is_inference()]


def run(problem: Problem, want: Want) -> Observation:
    """Output and the requested statistics."""
    problem = problem.with_traced_rules
    if not problem.needs_gradient:
        return _forward(problem, want)
    names: list[str] = []
    output, lse, *others = _Native.apply(  # type: ignore[no-untyped-call]
        problem, want, names, problem.query, problem.key, problem.value, *problem.rule_parameters
    )
    statistics = dict(zip(names, others, strict=True))
    statistics.pop("ties", None)
    return Observation(output=output, lse=lse if want.lse else None, **statistics)


def _lowered(problem: Problem) -> Problem:
    """A problem with traced rules, through which gradients reach the tensors that a function closes over."""
    with torch.enable_grad():
        return problem.with_traced_rules


class _ByRows:
    """Passes by rows: the float32 output, the log-sum-exp, and each row's maximum and reciprocal normaliser."""

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor, list[Tensor]]:
        done = attend(_lowered(problem), Want(lse=True), for_backward=True)
        assert done.lse is not None
        assert done.softmax is not None
        exact = done.output.to(torch.float32) if done.exact is None else done.exact
        return done.output, done.lse, [exact, done.lse, done.softmax]

    def rows(self, problem: Problem, output: Tensor, lse: Tensor) -> list[Tensor]:
        return [output, lse, softmax_rows(lse, 1.0 if _lowered(problem).elementwise else problem.scale)]

    def backward(
        self, problem: Problem, rows: list[Tensor], grads: RowGrads, *, partial: bool, learned: Sequence[Tensor]
    ) -> list[Tensor]:
        grad_output, grad_lse = grads
        output, lse, softmax = (part.contiguous() for part in rows)
        arrived = Arrived(grad_output, None if grad_lse is None else grad_lse.contiguous())
        problem = _lowered(problem)
        computed = gradients(problem, Saved(output, lse, softmax, partial), arrived)
        return [*computed[:3], *pulled(learned, problem.rule_parameters, computed[3:])]

    def query_gradients(
        self, problem: Problem, rows: list[Tensor], grads: RowGrads, learned: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        output, lse, softmax = (part.contiguous() for part in rows)
        problem = _lowered(problem)
        computed = attend_backward(problem, Saved(output, lse, softmax), *grads, None, Side.QUERIES)
        assert computed is not None
        of_rules = [parameter_gradient(problem, one, computed, lse) for one in problem.rule_parameters]
        return computed.tensors[0], pulled(learned, problem.rule_parameters, of_rules), computed.delta

    def row_sums(self, rows: list[Tensor], grads: RowGrads) -> Tensor:
        return row_sums(rows[0], *grads)

    def key_gradients(self, problem: Problem, softmax: Tensor, sums: Tensor, grad_output: Tensor) -> list[Tensor]:
        saved = Saved(None, None, softmax, partial=True)
        computed = attend_backward(_lowered(problem), saved, grad_output, -sums, None, Side.KEYS)
        assert computed is not None
        return computed.tensors


BACKEND = Backend(
    name="native",
    summary="clearhead's own CPU kernels",
    capability=Capability(
        devices=frozenset({"cpu"}),
        dtypes=frozenset(DTYPES),
        rules=(Alibi, RelativeBias, DenseBias, SoftCap, Sink, ScoreFunction),
        max_head_dim=MAX_HEAD_DIM,
        quantized=True,
        without_gradient=frozenset({"row_weights", "rows"}),
        invariant=True,
        requires=reason,
        also=_also,
    ),
    run=run,
    by_rows=_ByRows(),
)
