"""What the verbs check of their arguments, and say when it is wrong."""

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

#: Decays below it: the rounding of their logarithms' gradient, divided by them, is more than some 1e-5 of their own.
_FAINT: Final = 0.25
_DTYPES: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_tensors(function: str, query: object, key: object, value: object) -> None:
    """Queries, keys and values that fit each other."""
    for name, part in (("query", query), ("key", key), ("value", value)):
        if isinstance(part, Tensor):
            dense(function, name, part)
        if not isinstance(part, Tensor) or part.ndim not in (2, 3, 4):
            raise ShapeError.about(
                function,
                name,
                must="have axes [batch, heads, len, head_dim], the first two or one of them left out",
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
                must=f"have {'query' if part is key else 'key'}'s batch and heads, as in "
                f"{tuple((query if part is key else key).shape)}",
                got=_shape_text(part),
                then="Split both alike.",
            )
    heads, kv_heads = (part.shape[-3] if part.ndim > 2 else 1 for part in (query, key))
    shared = heads > 0 and heads % kv_heads == 0 if kv_heads else heads == 0
    if not shared:
        raise ShapeError.about(
            function,
            "key",
            must=f"have a number of heads that divides query's {heads}",
            got=_shape_text(key),
            then="Grouped heads: each head of keys serves as many heads of queries.",
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
    """A form that there is."""
    return one_of(function, "form", form, forms, "Usual: 'auto'.")


def check_chunk(function: str, chunk_size: object) -> int:
    """A chunk that can be halved until one token is left."""
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
    """One key per query, where keys have an order."""
    if query.shape[-2] != key.shape[-2]:
        raise ShapeError.about(
            function,
            "query",
            must=f"have as many tokens as key, {key.shape[-2]}, where their order counts",
            got=_shape_text(query),
            then="Earlier tokens belong in state=.",
        )


def check_decay(function: str, decay: object, heads: int) -> Tensor:
    """One decay per head, in a floating dtype of at least float32; numbers that are no tensor as float64."""
    # A tensor made of Python's numbers would hold them in float32.
    decays = decay if isinstance(decay, Tensor) else tensor_of(decay, torch.float64)
    if decays is None or decays.shape != (heads,) or decays.is_complex() or not _are_decays(decays):
        raise ShapeError.about(
            function,
            "decay",
            must=f"be {heads} numbers above 0 and at most 1, one per head",
            got=_decay_text(decay, decays, heads),
            then="Usual: 1 - 2^(-5 - head).",
        )
    # Of a tensor's own numbers: not every device has float64.
    return decays.to(torch.promote_types(decays.dtype, torch.float32))


def learns_faint_decays(decay: Tensor) -> bool:
    """Whether gradients of decays are wanted that are, or may be, too small for the forms' usual way to them."""
    wanted = decay.requires_grad and torch.is_grad_enabled()
    return wanted and not (_is_readable(decay) and bool((decay >= _FAINT).all()))


def _are_decays(values: Tensor) -> bool:
    """Whether they let a state decay; what numbers a tensor holds is not known while the call is traced."""
    return not values.is_meta and (not _is_readable(values) or bool(((values > 0) & (values <= 1)).all()))


def _is_readable(part: Tensor) -> bool:
    """Whether the numbers of a tensor can be looked at: nobody traces, maps over or stands in for it."""
    # In this order: what is traced must not ask a tensor about its memory.
    if torch.compiler.is_compiling() or transformed() or has_dispatch_mode():
        return False
    return in_memory(part)


def _decay_text(decay: object, values: Tensor | None, heads: int) -> str:
    if values is None:
        return repr_of(decay)
    if values.shape != (heads,) or values.is_complex():
        return _shape_text(values)
    return "a tensor without numbers" if values.is_meta else repr_of(values.tolist())


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
    """Gates from 0 to 1 at the keys that there are; what an absent one holds nobody reads.

    Args:
        function: the verb.
        log_gate: ``[batch, kv_heads, len, gates]``.
        present: which keys there are, ``[batch | 1, len]``; asked only where a number is not a gate's.
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
            then="Pass logarithms of gates; -100 forgets all.",
        )


def check_features(function: str, state: LinearState, inhabited: Callable[[], Tensor]) -> None:
    """Keys whose features are numbers of the state's dtype: at least one of a head's, of all that were summed up.

    Args:
        function: the verb.
        state: what the call gives back.
        inhabited: which entries of the state's first axis have a key; asked only where a sum is 0.
    """
    sums = state.normalizer
    if sums is None or sums.device.type != "cpu" or sums.shape[-1] == 0 or not _is_readable(sums):
        return
    lost = (sums.detach().amax(dim=-1) < torch.finfo(sums.dtype).tiny).any(dim=-1)
    if bool(lost.any()) and bool((lost & inhabited()).any()):
        raise UnsupportedError.about(
            function,
            "key",
            must=f"have features that {sums.dtype} can hold",
            got="a head whose every key is so long that all of its features are 0",
            then="Scale keys down, draw the features with a smaller scale=, or pass float64.",
        )


def check_rate(function: str, rate: object, key: Tensor) -> None:
    """One step per token."""
    if not isinstance(rate, Tensor) or rate.shape != key.shape[:-1]:
        raise ShapeError.about(
            function,
            "rate",
            must=f"have key's axes but the last, {tuple(key.shape[:-1])}",
            got=_shape_text(rate),
            then="One step per token, usually torch.sigmoid(x).",
        )
    _check_like(function, "rate", rate, key)


def _check_like(function: str, name: str, part: Tensor, key: Tensor) -> None:
    """Real numbers that lie with the keys; converting them to the precision of sums is the call's."""
    if part.is_complex() or part.device != key.device or part.layout is not key.layout:
        raise UnsupportedError.about(
            function,
            name,
            must=f"hold real numbers on key's device {key.device}",
            got=f"{part.dtype} on {part.device}, {part.layout}",
            then="Convert it with .to() or .to_dense().",
        )


def check_state(function: str, state: object, shape: tuple[int, ...], like: Tensor, *, normalized: bool) -> None:
    """A state that a call can go on from: every tensor of it of the right shape, in ``like``'s dtype and device.

    Kernels read both by their addresses, so nothing below would notice one that is too small.
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
