"""The arguments and results of a call by their role: transformers renames them from release to release."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from clearhead.integrations.transformers.masks import MaskTensor

__all__ = ["Arguments", "Signature", "arguments_of", "cache_argument", "cache_in", "cache_name", "signature_of"]

#: Arguments that may be True and do not change what a layer computes.
_UNREAD: Final = frozenset(("use_cache", "output_hidden_states", "return_dict"))
#: Arguments that take a cache. Their types do not say so: several forwards give none, or that of tuples.
_CACHES: Final = frozenset(("cache", "past_key_values", "past_key_value", "layer_past"))
#: Arguments of relative positions, and their attribute of ``Arguments``.
_RELATIVE: Final = {"position_bias": "bias", "relative_pos": "distances", "rel_embeddings": "embeddings"}
_AXES_OF_STATES, _AXES_OF_MASK = 3, 4


@dataclass
class Arguments:
    """A call of a layer or of an attention.

    Attributes:
        tokens: ``[batch, len, width]``.
        mask: a ``MaskTensor`` or a tensor ``[batch | 1, heads | 1, q_len, k_len]``.
        cache: transformers' cache.
        rotary: pairs of cosines and sines, ``[batch | 1, len, head_dim]`` each.
        memory: ``[batch, memory_len, width]``, what a decoder attends to besides its own tokens.
        memory_mask: a ``MaskTensor`` or a tensor for the memory.
        is_causal: whether attention without a mask is causal; None leaves it to the module.
        bias: ``[batch | 1, heads, q_len, k_len]``, added to scaled scores.
        distances: ``[1, q_len, k_len]``, the rows of ``embeddings`` for each query and key, from the middle one on.
        embeddings: ``[rows, width]`` of relative positions.
    """

    tokens: Any = None
    mask: Any = None
    cache: Any = None
    rotary: tuple[tuple[Tensor, Tensor], ...] = ()
    memory: Tensor | None = None
    memory_mask: Any = None
    is_causal: bool | None = None
    bias: Tensor | None = None
    distances: Tensor | None = None
    embeddings: Tensor | None = None


@dataclass(frozen=True)
class Signature:
    """The parameters of a ``forward``, in order, with their defaults, and the names of those that have a role, which a
    trial needs to make a call."""

    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    cache: str | None
    rotary: tuple[str, ...]
    masks: tuple[str, ...]
    memory: str | None
    positions: tuple[str, ...]
    required: tuple[str, ...]
    relative: Mapping[str, str]


@functools.cache
def signature_of(forward: Callable[..., Any]) -> Signature:
    """What ``inspect.signature`` says of a ``forward``, without ``self``."""
    _, *parameters = inspect.signature(forward).parameters.values()
    parameters = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    names = [each.name for each in parameters]
    memory = [name for name in names if "encoder" in name and "states" in name]
    return Signature(
        tuple(names),
        {each.name: each.default for each in parameters if each.default is not each.empty},
        next((name for name in names if name in _CACHES), None),
        tuple(each.name for each in parameters if "position_embeddings" in each.name or _is_pair(each.annotation)),
        tuple(name for name in names if "attention_mask" in name or name == "attn_mask"),
        memory[0] if memory else None,
        tuple(name for name in names if "position_ids" in name),
        tuple(each.name for each in parameters[1:] if each.default is each.empty),
        {role: name for name, role in _RELATIVE.items() if name in names},
    )


def cache_name(model: Any) -> str | None:
    """The argument of a model's ``forward`` that takes a cache: ``past_key_values`` before transformers 5.24, ``cache``
    since; None without one."""
    return signature_of(type(model).forward).cache


def cache_argument(model: Any, cache: Cache) -> dict[str, Any]:
    """The cache as a keyword argument of a model that takes one."""
    name = cache_name(model)
    assert name is not None
    return {name: cache}


def cache_in(output: Any) -> Cache | None:
    """The cache that a model or a layer returned; None without one."""
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else ()
    return next((part for part in parts if isinstance(part, Cache)), None)


def arguments_of(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments | None:
    """The arguments of a call; None if one of them has no known role, so that the original code is to run."""
    signature = signature_of(forward)
    names = signature.names
    if not names or len(args) > len(names) or any(name in kwargs for name in names[: len(args)]):
        return None
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    arguments = Arguments(given.pop(names[0], None))
    # In the order of the signature: the masks in front of the memory are those of the layer's own tokens.
    order = [*(name for name in names if name in given), *(name for name in given if name not in names)]
    for name in order:
        value = given[name]
        if value is None or value is False:
            if name == "is_causal" and value is False:
                arguments.is_causal = False
            continue
        if not _place(arguments, name, value) and value is not signature.defaults.get(name, None):
            return None
    return arguments


def _place(arguments: Arguments, name: str, value: Any) -> bool:
    """Assign an argument to its role; False if that is unknown."""
    if isinstance(value, Tensor):
        return _place_tensor(arguments, name, value)
    if isinstance(value, Cache):
        first, arguments.cache = arguments.cache is None, value
        return first
    if value is True and name == "is_causal":
        arguments.is_causal = True
        return True
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(each, Tensor) for each in value):
        arguments.rotary += (value,)
        return True
    return value is True and name in _UNREAD


def _place_tensor(arguments: Arguments, name: str, value: Tensor) -> bool:
    if name in _RELATIVE:
        setattr(arguments, _RELATIVE[name], value)
        return True
    if isinstance(value, MaskTensor) or value.dim() == _AXES_OF_MASK:
        if arguments.memory is not None:
            first, arguments.memory_mask = arguments.memory_mask is None, value
        else:
            first, arguments.mask = arguments.mask is None, value
        return first
    if value.dim() == _AXES_OF_STATES and value.is_floating_point():
        first, arguments.memory = arguments.memory is None, value
        return first
    # Positions: the model has made cosines and sines of them.
    return value.dtype in (torch.int64, torch.int32) and "mask" not in name


def _is_pair(annotation: object) -> bool:
    return any(get_args(kind) == (Tensor, Tensor) for kind in (annotation, *get_args(annotation)))
