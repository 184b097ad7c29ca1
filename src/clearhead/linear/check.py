"""Checks of the arguments of linear attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from clearhead.arguments import FARTHEST, dense, one_of, repr_of, tensor_of, whole_number
from clearhead.errors import ShapeError, UnsupportedError
from clearhead.linear.recurrence import transformed
from clearhead.linear.state import LinearState
from clearhead.ops.library import in_memory
from clearhead.torch_private import has_dispatch_mode

__all__ = [
    "check_chunk", "check_decay", "check_features", "check_form", "check_gate", "check_gate_values", "check_lengths",
    "check_rate", "check_state", "check_tensors", "learns_faint_decays",
]  # fmt: skip

#: For smaller decays the rounding error of the logarithm's gradient, divided by the decay, exceeds about 1e-5 of it.
_FAINT: Final = 0.25
_DTYPES: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_tensors(function: str, query: object, key: object, value: object) -> None:
    """Check that queries, keys and values fit each other."""
    for name, part in (("query", query), ("key", key), ("value", value)):
        if isinstance(part, Tensor):
            dense(function, name, part)
        if not isinstance(part, Tensor) or part.ndim not in (2, 3, 4):
            raise ShapeError.about(
                function,
                name,
                must="have axes [batch, heads, len, head_dim], leading ones optional",
                got=_shape_text(part),
                then="Split the embedding into heads first.",
            )
        if part.dtype not in _DTYPES:
            raise UnsupportedError.about(
                function, name, must="be floating point", got=part.dtype, then="Convert with .to(torch.float32)."
            )
    assert isinstance(query, Tensor)
    assert isinstance(key, Tensor)
    assert isinstance(value, Tensor)
    for name, part in (("key", key), ("value", value)):
        if part.dtype != query.dtype or part.device != query.device:
            raise UnsupportedError.about(
                function,
                name,
                must=f"have query's dtype and device, {query.dtype} on {query.device}",
                got=f"{part.dtype} on {part.device}",
                then="Convert one of them with .to().",
            )
        if part.ndim != query.ndim or part.shape[:-3] != query.shape[:-3] or part.shape[:-2] != key.shape[:-2]:
            raise ShapeError.about(
                function,
                name,
                must=f"have {'query' if part is key else 'key'}'s batch and heads, those of shape "
                f"{tuple((query if part is key else key).shape)}",
                got=_shape_text(part),
                then="Split both into heads in the same way.",
            )
    heads, kv_heads = (part.shape[-3] if part.ndim > 2 else 1 for part in (query, key))
    shared = heads > 0 and heads % kv_heads == 0 if kv_heads else heads == 0
    if not shared:
        raise ShapeError.about(
            function,
            "key",
            must=f"have a number of heads that divides query's {heads}",
            got=_shape_text(key),
            then="Query head h reads key head h // group.",
        )
    for name, part in (("query", query), ("value", value)):
        if part.shape[-1] == 0:
            raise ShapeError.about(
                function,
                name,
                must="have at least one channel",
                got=_shape_text(part),
                then="Check how heads were split.",
            )
    if key.shape[-1] != query.shape[-1]:
        raise ShapeError.about(
            function, "key", must=f"have query's {query.shape[-1]} channels", got=_shape_text(key), then="Project key."
        )
    if value.shape[-2] != key.shape[-2]:
        raise ShapeError.about(
            function,
            "value",
            must=f"have key's length {key.shape[-2]}",
            got=_shape_text(value),
            then="One value per key.",
        )


def check_form(function: str, form: object, forms: Sequence[str]) -> str:
    """Check the name of a form."""
    return one_of(function, "form", form, forms, "Usual: 'auto'.")


def check_chunk(function: str, chunk_size: object) -> int:
    """Check a chunk size, which is a power of two."""
    size = whole_number(chunk_size)
    if size is None or not 1 <= size <= FARTHEST or size & (size - 1):
        raise ShapeError.about(
            function,
            "chunk_size",
            must="be a power of two up to 2**48",
            got=repr_of(chunk_size),
            then="Usual: 64 or 128.",
        )
    return size


def check_lengths(function: str, query: Tensor, key: Tensor) -> None:
    """Check that there is one key per query, for causal and packed calls."""
    if query.shape[-2] != key.shape[-2]:
        raise ShapeError.about(
            function,
            "query",
            must=f"have as many tokens as key, {key.shape[-2]}, where their order counts",
            got=_shape_text(query),
            then="Earlier tokens belong in state=.",
        )


def check_decay(function: str, decay: object, heads: int) -> Tensor:
    """Decays as a tensor ``[heads]`` of at least float32; Python numbers become float64."""
    # By default torch.as_tensor would convert Python floats to float32.
    decays = decay if isinstance(decay, Tensor) else tensor_of(decay, torch.float64)
    if decays is None or decays.shape != (heads,) or decays.is_complex() or not _are_decays(decays):
        raise ShapeError.about(
            function,
            "decay",
            must=f"be {heads} numbers above 0 and at most 1, one per head",
            got=_decay_text(decay, decays, heads),
            then="Usual: 1 - 2^(-5 - head).",
        )
    # Not float64: not every device supports it.
    return decays.to(torch.promote_types(decays.dtype, torch.float32))


def learns_faint_decays(decay: Tensor) -> bool:
    """Whether decays require a gradient and are, or may be, too small for the forms' usual computation of it."""
    wanted = decay.requires_grad and torch.is_grad_enabled()
    return wanted and not (_is_readable(decay) and bool((decay >= _FAINT).all()))


def _are_decays(values: Tensor) -> bool:
    """Whether all values are above 0 and at most 1; True if they cannot be read, under a trace."""
    return not values.is_meta and (not _is_readable(values) or bool(((values > 0) & (values <= 1)).all()))


def _is_readable(part: Tensor) -> bool:
    """Whether a tensor's elements can be read: it is not traced, mapped over or fake."""
    # In this order: a trace must not read a tensor's memory.
    if torch.compiler.is_compiling() or transformed() or has_dispatch_mode():
        return False
    return in_memory(part)


def _decay_text(decay: object, values: Tensor | None, heads: int) -> str:
    if values is None:
        return repr_of(decay)
    if values.shape != (heads,) or values.is_complex():
        return _shape_text(values)
    return "a tensor without elements" if values.is_meta else repr_of(values.tolist())


def check_gate(function: str, log_gate: object, key: Tensor, features: int) -> None:
    """Logarithms of gates per token, one for all channels or one each; their numbers are looked at later."""
    if not isinstance(log_gate, Tensor) or log_gate.ndim != key.ndim or log_gate.shape[:-1] != key.shape[:-1]:
        raise ShapeError.about(
            function,
            "log_gate",
            must=f"have key's axes {(*key.shape[:-1], 'features | 1')}",
            got=_shape_text(log_gate),
            then="Logarithms of gates; for gates from 0 to 1 use torch.nn.functional.logsigmoid(x).",
        )
    if log_gate.shape[-1] not in (1, features):
        raise ShapeError.about(
            function,
            "log_gate",
            must=f"have {features} features or 1",
            got=_shape_text(log_gate),
            then="One gate for each feature of a key, or one for all.",
        )
    _check_like(function, "log_gate", log_gate, key)


def check_gate_values(function: str, log_gate: Tensor, present: Callable[[], Tensor]) -> None:
    """Check that the gates of present keys are from 0 to 1; those of absent keys are not read.

    Args:
        function: the public name in errors.
        log_gate: ``[batch, kv_heads, len, gates]``.
        present: returns which keys are present, ``[batch | 1, len]``; called only if a value is out of range.
    """
    if log_gate.device.type != "cpu" or not _is_readable(log_gate):
        return
    fits = (log_gate <= 0) & log_gate.isfinite()
    if bool(fits.all()):
        return
    wrong = ~fits & present()[:, None, :, None]
    if bool(wrong.any()):
        outside = log_gate[wrong]
        raise ShapeError.about(
            function,
            "log_gate",
            must="be finite and at most 0",
            got=f"values from {outside.min()} to {outside.max()}",
            then="Pass logarithms of gates; -100 is a gate of nearly 0.",
        )


def check_features(function: str, state: LinearState, inhabited: Callable[[], Tensor]) -> None:
    """Check that not all random features of a head's keys underflow in the state's dtype.

    Args:
        function: the public name in errors.
        state: the state after the call.
        inhabited: returns which entries of the state's first axis have a key; called only if a sum is 0.
    """
    sums = state.normalizer
    if sums is None or sums.device.type != "cpu" or sums.shape[-1] == 0 or not _is_readable(sums):
        return
    lost = (sums.detach().amax(dim=-1) < torch.finfo(sums.dtype).tiny).any(dim=-1)
    if bool(lost.any()) and bool((lost & inhabited()).any()):
        raise UnsupportedError.about(
            function,
            "key",
            must=f"have features within {sums.dtype}'s range",
            got="a head whose keys are so large that all of their features underflow to 0",
            then="Scale keys down, draw the features with a smaller scale=, or pass float64.",
        )


def check_rate(function: str, rate: object, key: Tensor) -> None:
    """Check that there is one step per token."""
    if not isinstance(rate, Tensor) or rate.shape != key.shape[:-1]:
        raise ShapeError.about(
            function,
            "rate",
            must=f"have key's axes but the last, {tuple(key.shape[:-1])}",
            got=_shape_text(rate),
            then="Give one step per token, usually torch.sigmoid(x).",
        )
    _check_like(function, "rate", rate, key)


def _check_like(function: str, name: str, part: Tensor, key: Tensor) -> None:
    """Check that a tensor is real and on the keys' device; the call converts it to the precision of sums."""
    if part.is_complex() or part.device != key.device or part.layout is not key.layout:
        raise UnsupportedError.about(
            function,
            name,
            must=f"be real and on key's device {key.device}",
            got=f"{part.dtype} on {part.device}, {part.layout}",
            then="Convert it with .to() or .to_dense().",
        )


def check_state(function: str, state: object, shape: tuple[int, ...], like: Tensor, *, normalized: bool) -> None:
    """Check that a state's tensors have the right shapes, and the dtype and device of ``like``.

    Kernels read them by address and do not check their sizes.
    """
    if not isinstance(state, LinearState):
        raise ShapeError.about(
            function, "state", must="be a LinearState", got=type(state).__name__, then="Pass what a call gave back."
        )
    fits = _fits(state.matrix, shape, like) and (state.normalizer is not None) == normalized
    if not fits or (normalized and not _fits(state.normalizer, shape[:-1], like)):
        kind = f"with a normalizer of shape {shape[:-1]}" if normalized else "without a normalizer"
        raise ShapeError.about(
            function,
            "state",
            must=f"be of shape {shape}, {like.dtype} on {like.device}, {kind}",
            got=f"{_tensor_text(state.matrix)} and normalizer {_tensor_text(state.normalizer)}",
            then="Pass what a call with the same arguments gave back.",
        )


def _fits(part: object, shape: tuple[int, ...], like: Tensor) -> bool:
    if not isinstance(part, Tensor) or tuple(part.shape) != shape:
        return False
    return part.dtype == like.dtype and part.device == like.device and part.layout is like.layout


def _tensor_text(part: object) -> str:
    return f"{tuple(part.shape)} {part.dtype} on {part.device}" if isinstance(part, Tensor) else type(part).__name__


def _shape_text(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
