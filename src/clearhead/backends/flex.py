"""torch's FlexAttention, compiled, on CUDA: masks as its mask_mod, score rules as its score_mod."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from clearhead.backends.capability import Backend, Capability
from clearhead.masks import Mask
from clearhead.problem import Problem
from clearhead.scores import Alibi, RelativeBias, ScoreFunction, ScoreRule, SoftCap
from clearhead.statistics import Observation, Want
from clearhead.tensors import without_overlap

__all__ = ["BACKEND", "block_mask", "score_mod"]

#: The width of a matrix product in Triton.
_LEAST_HEAD_DIM: Final = 16


def block_mask(mask: Mask, problem: Problem) -> BlockMask:
    """The mask as FlexAttention's block mask, whose queries count from 0; a mask's count from ``query_offset``."""

    def mask_mod(batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return mask.allows(batch, head, q_index + problem.query_offset, k_index)

    return create_block_mask(
        mask_mod,
        problem.batch,
        problem.num_heads,
        problem.q_len,
        problem.k_len,
        device=str(problem.query.device),
    )


def score_mod(rules: tuple[ScoreRule, ...], query_offset: int) -> Callable[..., Tensor] | None:
    """The rules, in order, as FlexAttention's score_mod."""
    if not rules:
        return None

    def modify(score: Tensor, batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        for rule in rules:
            score = rule.apply(score, batch, head, q_index + query_offset, k_index)
        return score

    return modify


@cache
def _compiled() -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    return compiled


def _requires() -> str | None:
    return None if torch.cuda.is_available() else "needs a CUDA device, and torch finds none"


def _also(problem: Problem) -> list[str]:
    if min(problem.head_dim, problem.value_dim) < _LEAST_HEAD_DIM:
        return [f"takes head sizes from {_LEAST_HEAD_DIM}"]
    group = problem.num_heads // problem.num_kv_heads
    return [] if group & (group - 1) == 0 else ["takes key heads that 1, 2, 4, 8, ... query heads share"]


def run(problem: Problem, want: Want, call: Callable[..., Any] | None = None) -> Observation:
    """Output, and log-sum-exp on request, by FlexAttention; ``call`` replaces the compiled function, in tests."""
    flex = call or _compiled()
    output, lse = flex(
        without_overlap(problem.query),
        without_overlap(problem.key),
        without_overlap(problem.value),
        score_mod=score_mod(problem.elementwise, problem.query_offset),
        block_mask=None if problem.mask is None else block_mask(problem.mask, problem),
        scale=problem.scale,
        enable_gqa=problem.num_heads != problem.num_kv_heads,
        return_lse=True,
    )
    empty = lse == -torch.inf
    output = output.masked_fill(empty[..., None], 0.0)
    return Observation(output=output, lse=lse if want.lse else None)


BACKEND = Backend(
    name="flex",
    summary="compiled FlexAttention on CUDA",
    capability=Capability(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
        rules=(Alibi, RelativeBias, SoftCap, ScoreFunction),
        statistics=frozenset({"lse"}),
        dropout=False,
        max_head_dim=256,
        requires=_requires,
        also=_also,
    ),
    run=run,
)
