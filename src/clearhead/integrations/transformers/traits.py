"""What distinguishes modules of transformers of one class."""

from __future__ import annotations

import inspect
import json
from types import FunctionType
from typing import Any, Final

from torch import nn

from clearhead.integrations.recast import class_of, original_of
from clearhead.integrations.transformers.match import first_of

__all__ = ["traits_of"]

#: Attributes that say where a layer stands. What it computes differs by others, unless one of these says that it
#: depends on the place, as GPT-2's ``scale_attn_by_inverse_layer_idx``.
_PLACES: Final = ("layer_idx", "layer_id")


def traits_of(module: nn.Module) -> tuple[object, ...]:
    """All that may distinguish two modules of one class, besides their weights."""
    traits: list[object] = []
    for name, part in module.named_modules():
        simple = [
            (key, value) for key, value in vars(part).items() if isinstance(value, bool | int | float | str | None)
        ]
        if not any("layer_idx" in key and value is True for key, value in simple):
            simple = [(key, value) for key, value in simple if key not in _PLACES]
        traits.append((name, class_of(part), *_code_of(class_of(part)), tuple(simple)))
    config = first_of(module.modules(), ("config",))
    return (*traits, None if config is None else json.dumps(config.to_dict(), default=repr, sort_keys=True))


def _code_of(kind: type[nn.Module]) -> tuple[object, ...]:
    """A class's forward and the functions that it calls by name, any of which may have been replaced."""
    forward: Any = inspect.unwrap((original_of(kind) or kind).forward)
    code = getattr(forward, "__code__", None)
    if code is None:
        return (forward,)
    called = (forward.__globals__.get(name) for name in code.co_names)
    return forward, *(each for each in called if isinstance(each, FunctionType))
