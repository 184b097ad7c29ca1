"""Feedforwards of transformers' models in one step: by the code of their ``forward``, which many classes share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, SiLUActivation
from transformers.pytorch_utils import Conv1D

from clearhead.bridges.torch_parts import is_plain
from clearhead.nn.feedforward import in_one_step, name_of
from clearhead.nn.linear import hooked
from clearhead.projection import project_activate

__all__ = ["in_steps", "one_step"]

# What the classes' own forwards look like. Only their compiled code is read.


def _intermediate(self: Any, hidden_states: Any) -> Any:
    hidden_states = self.dense(hidden_states)
    hidden_states = self.intermediate_act_fn(hidden_states)
    return hidden_states


def _fc(self: Any, hidden_states: Any) -> Any:
    hidden_states = self.fc1(hidden_states)
    hidden_states = self.activation_fn(hidden_states)
    hidden_states = self.fc2(hidden_states)
    return hidden_states


def _gpt2(self: Any, hidden_states: Any) -> Any:
    hidden_states = self.c_fc(hidden_states)
    hidden_states = self.act(hidden_states)
    hidden_states = self.c_proj(hidden_states)
    hidden_states = self.dropout(hidden_states)
    return hidden_states


@dataclass(frozen=True)
class _Parts:
    """What a forward's parts are called; ``contract`` and ``last`` may be none."""

    expand: str
    activation: str
    contract: str | None = None
    last: str | None = None


_KNOWN: Final[tuple[tuple[Callable[..., Any], _Parts], ...]] = (
    (_intermediate, _Parts("dense", "intermediate_act_fn")),
    (_fc, _Parts("fc1", "activation_fn", "fc2")),
    (_gpt2, _Parts("c_fc", "act", "c_proj", "dropout")),
)
#: Classes whose ``act`` is torch's own function, unless it was asked for in Python.
_HOLDERS: Final = (GELUActivation, GELUTanh)
_NOTHING: Final = nn.Identity()


def _code(function: object) -> tuple[bytes, tuple[str, ...]] | None:
    return (function.__code__.co_code, function.__code__.co_names) if isinstance(function, FunctionType) else None


_CODES: Final = {_code(function): parts for function, parts in _KNOWN}
_CLASSES: Final[dict[type[nn.Module], type[nn.Module]]] = {}


def one_step(kind: type[nn.Module]) -> type[nn.Module] | None:
    """A class like ``kind`` that takes its products and what stands between in one step, if its code is known."""
    own = vars(kind).get("forward")
    parts = _CODES.get(_code(own))
    if parts is None or own is None:
        return None
    if kind not in _CLASSES:

        def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
            found = _taken(self, parts, hidden_states)
            output: Tensor = own(self, hidden_states) if found is None else found
            return output

        def reduce(self: nn.Module, _protocol: object) -> tuple[object, ...]:
            # Nobody could import this class.
            return _made_again, (kind,), self.__dict__

        body = {"forward": forward, "__reduce_ex__": reduce, "__module__": __name__}
        _CLASSES[kind] = type(f"Swapped{kind.__name__}", (kind,), body)
    return _CLASSES[kind]


def _made_again(kind: type[nn.Module]) -> nn.Module:
    """An empty module, for pickle and deepcopy."""
    ours = one_step(kind) or kind
    made: nn.Module = ours.__new__(ours)
    return made


def in_steps(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class that ``one_step`` made ``kind`` of."""
    return next((theirs for theirs, ours in _CLASSES.items() if ours is kind), None)


def _taken(module: nn.Module, parts: _Parts, x: Tensor) -> Tensor | None:
    """The output, where all parts are what they were and nobody looks at them."""
    expand, activation = getattr(module, parts.expand), getattr(module, parts.activation)
    name = _activation_of(activation)
    if name is None or not is_plain(x):
        return None
    if parts.contract is None:
        if _is_looked_at(expand, activation) or not _is_layer(expand):
            return None
        return project_activate(x, _weight_of(expand), expand.bias, activation=name)
    contract = getattr(module, parts.contract)
    if not _is_layer(expand) or type(contract) is not type(expand):
        return None
    found = in_one_step(
        x, expand, activation, _NOTHING, contract, linear=type(expand), name=name, weight_of=_weight_of
    )  # fmt: skip
    if found is None or parts.last is None:
        return found
    output: Tensor = getattr(module, parts.last)(found)
    return output


def _is_layer(module: nn.Module) -> bool:
    """Whether a layer is one of those that ``swap`` puts in place."""
    return type(module).__module__.startswith("clearhead.") and isinstance(module, nn.Linear | Conv1D)


def _weight_of(layer: nn.Module) -> Tensor:
    """``[out, in]``, which GPT-2's layers hold the other way round."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight.t() if isinstance(layer, Conv1D) else weight


def _activation_of(activation: object) -> str | None:
    if isinstance(activation, _HOLDERS):
        held = activation.act
        tanh = getattr(held, "keywords", None) == {"approximate": "tanh"}
        if type(activation) in _HOLDERS and getattr(held, "func", held) is nn.functional.gelu:
            return "gelu_tanh" if tanh else "gelu"
        return None
    if isinstance(activation, NewGELUActivation):
        return "gelu_tanh"
    return "silu" if type(activation) is SiLUActivation else name_of(activation)


def _is_looked_at(*modules: object) -> bool:
    parts = [module for module in modules if isinstance(module, nn.Module)]
    return torch.compiler.is_compiling() or _has_any_global_hook() or any(map(hooked, parts))
