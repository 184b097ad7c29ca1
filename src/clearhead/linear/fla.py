"""Linear attention on GPUs by the kernels of flash-linear-attention, if they are installed.

They take 16-bit queries, keys and values; sums and states are float32. Other calls (float32 inputs, the delta rule with
a gate per channel, second derivatives) run by torch's operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor

from clearhead.linear.recurrence import Recurrence, bounded, quotient, transformed
from clearhead.linear.state import LinearState

__all__ = ["KERNELS", "PACKAGE", "fla_chunks", "installed", "takes"]

PACKAGE: Final = "fla"
#: Largest number of channels of a key that each of their kernels takes.
_MOST_CHANNELS: Final = 256


@dataclass(frozen=True)
class _Kernel:
    """One of their functions, which take tensors ``[batch, len, heads, dim]``.

    Attributes:
        module: its module.
        name: its name.
        gate: its argument for logarithms of gates; None if it has none.
        rate: its argument for steps; None if it has none.
    """

    module: str
    name: str
    gate: str | None = None
    rate: str | None = None


#: The key is whether there is a rate, and the number of gates of a token: none, one, or one per channel.
KERNELS: Final = {
    (False, "none"): _Kernel("fla.ops.simple_gla", "chunk_simple_gla"),
    (False, "token"): _Kernel("fla.ops.simple_gla", "chunk_simple_gla", gate="g"),
    (False, "channel"): _Kernel("fla.ops.gla", "chunk_gla", gate="g"),
    (True, "none"): _Kernel("fla.ops.delta_rule", "chunk_delta_rule", rate="beta"),
    (True, "token"): _Kernel("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", gate="g", rate="beta"),
}


@cache
def installed() -> bool:
    """Whether flash-linear-attention is installed."""
    return find_spec(PACKAGE) is not None


def takes(call: Recurrence) -> bool:
    """Whether their kernels can compute a call: 16-bit inputs on a GPU, a kernel for its formula, no transforms."""
    if torch.compiler.is_compiling() or not call.key.is_cuda or not installed() or transformed() or call.faint:
        return False
    features = call.feature_map.features(call.key.shape[-1])
    has_kernel = _kind(call) in KERNELS and not (call.normalized and _kind(call) != (False, "none"))
    return has_kernel and call.given in (torch.bfloat16, torch.float16) and features <= _MOST_CHANNELS


def _kind(call: Recurrence) -> tuple[bool, str]:
    gates = 0 if call.log_decay is None else call.log_decay.shape[-1]
    return call.rate is not None, {0: "none", 1: "token"}.get(gates, "channel")


def fla_chunks(call: Recurrence, state: LinearState) -> tuple[Tensor, LinearState]:
    """The chunked form by their kernels, with their chunk size, of a call without grouped heads."""
    kernel = KERNELS[_kind(call)]
    # Scale features here: their kernels apply their own scale to scores.
    call = call.featured()
    given = {
        "q": _moved(call.query, call.given),
        "k": _moved(call.key, call.given),
        "v": _moved(call.value, call.given),
    }
    if kernel.gate is not None and call.log_decay is not None:
        gate = bounded(_moved(call.log_decay, torch.float32))
        given[kernel.gate] = gate[..., 0] if gate.shape[-1] == 1 else gate
    if kernel.rate is not None and call.rate is not None:
        given[kernel.rate] = _moved(call.rate, torch.float32)[..., 0]
    run: Any = getattr(import_module(kernel.module), kernel.name)
    output, matrix = run(**given, scale=1.0, initial_state=state.matrix, output_final_state=True)
    output = output.transpose(1, 2).to(call.query.dtype)
    if state.normalizer is None:
        return output, LinearState(matrix=matrix)
    sums = state.normalizer[:, :, None] + call.key.cumsum(dim=2)
    output = quotient(output, (call.query * sums).sum(dim=-1))
    return output, LinearState(matrix=matrix, normalizer=sums[:, :, -1])


def _moved(part: Tensor, dtype: torch.dtype) -> Tensor:
    return part.transpose(1, 2).to(dtype).contiguous()
