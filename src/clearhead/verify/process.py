"""Global state that a function under test may change: detected and restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.backends import cuda

__all__ = ["undisturbed", "undrawn"]


def _set_default_device(device: torch.device) -> None:
    """Set the default device; None for the CPU, as a set device leaves a torch function mode active."""
    torch.set_default_device(None if device.type == "cpu" else device)


#: The getter and setter of each part of the state.
_STATE: Final[dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]] = {
    "whether gradients are recorded": (torch.is_grad_enabled, torch.set_grad_enabled),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the deterministic mode": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "the precision of float32 products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "autocast on the CPU": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda on: torch.set_autocast_enabled("cpu", on),
    ),
    "autocast on CUDA": (
        lambda: torch.is_autocast_enabled("cuda"),
        lambda on: torch.set_autocast_enabled("cuda", on),
    ),
    "the default device": (torch.get_default_device, _set_default_device),
    "whether torch may use its flash kernels": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "whether torch may use its memory-efficient kernels": (
        cuda.mem_efficient_sdp_enabled,
        cuda.enable_mem_efficient_sdp,
    ),
    "whether torch may use its plain kernels": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
}


@contextmanager
def undisturbed() -> Iterator[list[str]]:
    """Restore the global state at the end; the list then describes what had changed."""
    before = [read() for read, _ in _STATE.values()]
    changed: list[str] = []
    try:
        yield changed
    finally:
        current = [read() for read, _ in _STATE.values()]
        for (name, (_, write)), old, new in zip(_STATE.items(), before, current, strict=True):
            if new != old:
                changed.append(f"{name} from {old} to {new}")
                write(old)


@contextmanager
def undrawn(device: torch.device) -> Iterator[list[str]]:
    """Restore torch's random state at the end, of the CPU and of a CUDA device; the list says if it had changed.

    This is not part of ``undisturbed``, as a generator's state cannot be printed and dropout may change it.
    """
    before = _random_states(device)
    drawn: list[str] = []
    try:
        yield drawn
    finally:
        current = _random_states(device)
        if any(not torch.equal(one, other) for one, other in zip(before, current, strict=True)):
            drawn.append("which random numbers come next")
            torch.set_rng_state(before[0])
            for state in before[1:]:
                torch.cuda.set_rng_state(state, device)


def _random_states(device: torch.device) -> list[torch.Tensor]:
    on_device = device.type == "cuda" and torch.cuda.is_available()
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if on_device else [])]
