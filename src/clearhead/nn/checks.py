"""Checks of the modules' arguments, and their error texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from clearhead.arguments import dense, repr_of, whole
from clearhead.errors import ShapeError, UnsupportedError

__all__ = ["check_model", "check_tokens", "compile_each", "converts", "depth", "positive", "sources_of"]


def positive(function: str, argument: str, value: object) -> int:
    """A size of a module: a whole number, at least 1, that fits in memory."""
    return whole(function, argument, value, low=1, high=2**31)


def depth(function: str, argument: str, value: object) -> int:
    """How many layers a model has."""
    return whole(function, argument, value, low=1, high=2**16)


def compile_each(function: str, blocks: Iterable[nn.Module], backend: object) -> None:
    """Compile blocks in place with ``torch.compile`` and this backend of it, for any length."""
    named = isinstance(backend, str) and backend in torch.compiler.list_backends(exclude_tags=())
    if not named and not callable(backend):
        raise UnsupportedError.about(
            function,
            "backend",
            must="be one of torch.compiler.list_backends(), or a function",
            got=repr_of(backend),
            then="The usual one is 'inductor'.",
        )
    for block in blocks:
        block.compile(dynamic=True, backend=backend)


def converts(x: Tensor) -> bool:
    """Whether autocast casts ``x`` to the dtype of its GEMMs."""
    device = x.device.type
    return x.is_floating_point() and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def check_model(function: str, model: object) -> None:
    """Raise unless ``model`` is a module."""
    if not isinstance(model, nn.Module):
        raise UnsupportedError.about(
            function, "model", must="be a torch.nn.Module", got=type(model).__name__, then="Pass the model itself."
        )


def check_tokens(function: str, argument: str, x: object, width: int, weight: Tensor) -> None:
    """Raise unless ``x`` is ``[batch, len, width]`` or ``[len, width]`` of the dtype and device of ``weight``."""
    shape: Sequence[int] = ()
    if isinstance(x, Tensor):
        dense(function, argument, x)
        shape = x.shape
    if not isinstance(x, Tensor) or len(shape) not in (2, 3) or shape[-1] != width:
        raise ShapeError.about(
            function,
            argument,
            must=f"have axes [batch, len, {width}] or [len, {width}]",
            got=f"shape {tuple(shape)}" if isinstance(x, Tensor) else type(x).__name__,
            then="Check the width, and that the batch comes first.",
        )
    if x.device != weight.device:
        raise UnsupportedError.about(
            function,
            argument,
            must=f"be on the module's device {weight.device}",
            got=x.device,
            then="Move one of them with .to(device).",
        )
    if x.dtype != weight.dtype and not converts(x):
        raise UnsupportedError.about(
            function,
            argument,
            must=f"have the module's dtype {weight.dtype}",
            got=x.dtype,
            then="Convert with .to(dtype), or run under torch.autocast.",
        )


def sources_of(
    name: str, query: Tensor, key: Tensor | None, value: Tensor | None, *, widths: tuple[int, int, int], like: Tensor
) -> tuple[Tensor, Tensor]:
    """The inputs that keys and values are projected from, by default the query's; all three are checked.

    ``widths`` are those of query, key and value; ``like`` is a weight whose dtype and device they must have.
    """
    if key is None:
        if value is not None and value is not query:
            raise ShapeError.about(
                name, "key", must="be given with value", got="None", then="Pass query, key and value."
            )
        key = query
    value = key if value is None else value
    check_tokens(name, "query", query, widths[0], like)
    if key is query and value is query and widths[0] == widths[1] == widths[2]:
        return key, value
    for role, tensor, width in zip(("key", "value"), (key, value), widths[1:], strict=True):
        check_tokens(name, role, tensor, width, like)
        if tensor.ndim != query.ndim or tensor.shape[:-2] != query.shape[:-2]:
            raise ShapeError.about(
                name,
                role,
                must=f"have query's batch, as in {tuple(query.shape)}",
                got=f"shape {tuple(tensor.shape)}",
                then="Give all three the same leading axes.",
            )
    if value.shape[-2] != key.shape[-2]:
        raise ShapeError.about(
            name,
            "value",
            must=f"have key's length {key.shape[-2]}",
            got=f"shape {tuple(value.shape)}",
            then="One value per key.",
        )
    return key, value
