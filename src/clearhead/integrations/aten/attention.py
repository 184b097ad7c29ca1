"""ATen's CPU attention, forward and backward, and its unfused attention with dropout, computed by clearhead's kernels.

``torch.nn.functional.scaled_dot_product_attention`` calls one of two operators on the CPU. The fused one takes calls
without dropout whose mask has no gradient, the unfused one all others. Here both keep torch's meaning: ``is_causal``
counts from the first query and key, a bool mask arrives as 0 and minus infinity, and a row without keys gives 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from clearhead.backends.native import BACKEND
from clearhead.choices import attention_gains_alone
from clearhead.errors import ClearheadError
from clearhead.integrations.aten.kernel import AtenKernel
from clearhead.integrations.torch.masks import recognised
from clearhead.integrations.torch.polarity import from_additive
from clearhead.masks import Causal, Dense, Mask
from clearhead.ops.attention import attend_with_lse, attend_with_lse_backward, rule_options
from clearhead.ops.kinds import DTYPES, MAX_HEAD_DIM
from clearhead.ops.library import in_memory
from clearhead.problem import Problem
from clearhead.scores import DenseBias
from clearhead.statistics import Want

__all__ = ["ATTENTION", "LEAST_WORK", "LEAST_WORK_OF_TRAINING"]

#: Multiplications below which torch's kernel runs, whose call costs less; with gradients, those of forward.
LEAST_WORK, LEAST_WORK_OF_TRAINING = 2**22, 2**24
_FLOAT32: Final = torch.finfo(torch.float32)


@dataclass(frozen=True)
class _Call:
    """The arguments that forward and backward share."""

    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool
    attn_mask: Tensor | None
    scale: float | None

    def pays(self, *, gradient: bool) -> bool:
        """Whether the kernels can run the call and, by its size and the table of processors, run it faster."""
        query, key, value = self.query, self.key, self.value
        if not (query.dim() == key.dim() == value.dim() == 4 and query.dtype in DTYPES):
            return False
        batch, heads, q_len, head_dim = query.shape
        k_len, value_dim = key.shape[2], value.shape[3]
        least = LEAST_WORK_OF_TRAINING if gradient else LEAST_WORK
        if batch * heads * q_len * k_len * (head_dim + value_dim) < least or max(head_dim, value_dim) > MAX_HEAD_DIM:
            return False
        if not self._mask_fits(batch, heads, q_len, k_len) or not self._scale_is_normal():
            return False
        return attention_gains_alone(query.dtype, min(q_len, k_len), gradient=gradient)

    @property
    def is_recorded(self) -> bool:
        """Whether autograd records the call."""
        tensors = (self.query, self.key, self.value)
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

    def _mask_fits(self, *sizes: int) -> bool:
        """Whether there is no mask, or ``is_causal``, or a mask that broadcasts to ``[batch, heads, q_len, k_len]``."""
        if self.attn_mask is None:
            return True
        shape = (1,) * (4 - self.attn_mask.dim()) + self.attn_mask.shape
        if self.is_causal or len(shape) != 4:
            return False
        return all(given in (1, size) for given, size in zip(shape, sizes, strict=True))

    def _scale_is_normal(self) -> bool:
        """Whether the scale is a normal positive float32, with which the kernels scale in the exponential."""
        return self.scale is None or _FLOAT32.tiny <= self.scale <= _FLOAT32.max / 2

    @property
    def factor(self) -> float:
        """The scale, 1 / sqrt(head_dim) by default."""
        return 1.0 / math.sqrt(self.query.shape[3]) if self.scale is None else self.scale

    def meaning(self) -> tuple[Mask | None, DenseBias | None]:
        """The mask, bool or added to scores, as a mask and a bias; only minus infinity forbids."""
        if self.attn_mask is None:
            return Causal() if self.is_causal else None, None
        four_axes = self.attn_mask.reshape((1,) * (4 - self.attn_mask.dim()) + self.attn_mask.shape)
        if four_axes.dtype is torch.bool:
            return recognised(Dense(four_axes)), None
        mask, rules = from_additive(four_axes, forbids=-math.inf)
        return recognised(mask), rules[0] if rules else None

    def options(self) -> dict[str, Any]:
        """The keyword arguments of clearhead's operators; masks and biases are the only ones that torch has."""
        mask, bias = self.meaning()
        options: dict[str, Any] = {}
        if isinstance(mask, Dense):
            options["allowed"] = mask.allowed
        elif mask is not None:
            options["after"] = 0
        if bias is not None:
            options |= rule_options((bias,), None)
        return options


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Output, and the log-sum-exp, which is 0 in a row without keys."""
    call = _Call(query, key, value, is_causal, attn_mask, scale)
    if dropout_p or not call.pays(gradient=call.is_recorded):
        return None
    try:
        output, lse = attend_with_lse(query, key, value, call.factor, call.options())
    except RuntimeError:
        return None
    if attn_mask is not None:
        lse.masked_fill_(lse == -math.inf, 0.0)
    return _laid_out(output, query), lse.transpose(1, 2).contiguous().transpose(1, 2)


def _laid_out(output: Tensor, query: Tensor) -> Tensor:
    """The output with the strides of ``empty_like(query)``, which compiled programs rely on."""
    batch, head, row, _ = query.stride()
    inner_batch = query.shape[0] > 1 and batch < max(head, row)
    return torch.empty_like(query).copy_(output) if inner_batch else output


def _fused_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Gradients of query, key and value."""
    call = _Call(query, key, value, is_causal, attn_mask, scale)
    if dropout_p or not call.pays(gradient=True):
        return None
    try:
        grads = attend_with_lse_backward(grad_out, query, key, value, out, logsumexp, call.factor, call.options())
    except RuntimeError:
        return None
    if grads is None:
        return None
    query_grad, key_grad, value_grad = map(_by_token, grads)
    return query_grad, key_grad, value_grad


def _by_token(grad: Tensor) -> Tensor:
    """A gradient with the heads of a token side by side, the order that compiled programs rely on."""
    return grad.transpose(1, 2).contiguous().transpose(1, 2)


def _unfused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_mask: Tensor | None = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor] | None:
    """The output, and an empty tensor in place of the weights, which ``scaled_dot_product_attention`` discards."""
    given = [query, key, value] if attn_mask is None else [query, key, value, attn_mask]
    if dropout_mask is not None or query.dim() not in (3, 4) or not in_memory(*given):
        return None
    # Without the fused kernel, the user has asked for the unfused one.
    if not torch.backends.cuda.flash_sdp_enabled():
        return None
    axes = (1,) * (4 - query.dim())
    four = [tensor.reshape(axes + tensor.shape) for tensor in (query, key, value)]
    call = _Call(four[0], four[1], four[2], is_causal, attn_mask, scale)
    if not call.pays(gradient=call.is_recorded) or (not enable_gqa and key.shape[:-2] != query.shape[:-2]):
        return None
    try:
        output = _attend(call, float(dropout_p))
    except (ClearheadError, RuntimeError):
        return None
    return None if output is None else (output.reshape(output.shape[len(axes) :]), query.new_empty(0))


def _attend(call: _Call, dropout: float) -> Tensor | None:
    """Attention with dropout and with gradients of the mask; None where the kernels have none."""
    mask, bias = call.meaning()
    problem = Problem.of(
        "scaled_dot_product_attention", call.query, call.key, call.value, mask=mask,
        scores=() if bias is None else bias, scale=call.scale, dropout=dropout, query_offset=0,
    )  # fmt: skip
    if BACKEND.capability.reasons_against(problem, Want()):
        return None
    return BACKEND.run(problem, Want()).output


#: Attention of ``scaled_dot_product_attention`` on the CPU.
ATTENTION: Final = (
    AtenKernel("_scaled_dot_product_flash_attention_for_cpu", _fused),
    AtenKernel("_scaled_dot_product_flash_attention_for_cpu_backward", _fused_backward),
    AtenKernel("_scaled_dot_product_attention_math", _unfused, keys=("AutogradCPU", "CPU")),
)
