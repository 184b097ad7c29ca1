"""Parts of transformers' models beside attention: linear layers and dropout by class; feedforwards, in one step, by the
code of their ``forward``, which many classes share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final

from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, SiLUActivation
from transformers.pytorch_utils import Conv1D

from clearhead.bridges.torch_parts import SwappedDropout, SwappedLinear, is_plain
from clearhead.nn.feedforward import in_one_step, layer_of, name_of
from clearhead.nn.linear import looked_at
from clearhead.projection import Layer, project, project_activate

__all__ = ["faster", "original"]


class SwappedConv1D(Conv1D):  # type: ignore[misc]
    """GPT-2's linear layer, whose weight is ``[in, out]``, through the faster product."""

    def forward(self, x: Tensor) -> Tensor:
        if not is_plain(x):
            plain: Tensor = super().forward(x)
            return plain
        return project(x, self.weight.t(), self.bias)


class SwappedNewGELU(NewGELUActivation):  # type: ignore[misc]
    """The tanh form of GELU (Hendrycks and Gimpel 2016, section 2) in one pass, where GPT-2's module makes eight."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.gelu(input, approximate="tanh")


_PARTS: Final[Mapping[type[nn.Module], type[nn.Module]]] = {
    nn.Linear: SwappedLinear, nn.Dropout: SwappedDropout, Conv1D: SwappedConv1D, NewGELUActivation: SwappedNewGELU,
}  # fmt: skip


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
_HOLDERS: Final = (GELUActivation, GELUTanh)
_NAMES: Final[dict[type, str]] = {
    NewGELUActivation: "gelu_tanh", SwappedNewGELU: "gelu_tanh", SiLUActivation: "silu",
}  # fmt: skip
_NOTHING: Final = nn.Identity()


def _code(function: object) -> tuple[object, ...] | None:
    own = function.__code__ if isinstance(function, FunctionType) else None
    return None if own is None else (own.co_code, own.co_names, own.co_varnames)


_CODES: Final = {_code(function): parts for function, parts in _KNOWN}
_CLASSES: Final[dict[type[nn.Module], type[nn.Module]]] = {}


def _one_step(kind: type[nn.Module]) -> type[nn.Module] | None:
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
    ours = _one_step(kind) or kind
    made: nn.Module = ours.__new__(ours)
    return made


def _in_steps(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class that ``_one_step`` made ``kind`` of."""
    return next((theirs for theirs, ours in _CLASSES.items() if ours is kind), None)


def _taken(module: nn.Module, parts: _Parts, x: Tensor) -> Tensor | None:
    """The output, where all parts are what they were and nobody looks at them."""
    if not is_plain(x):
        return None
    expand, activation = getattr(module, parts.expand), getattr(module, parts.activation)
    if parts.contract is None:
        layer, name = _layer_of(expand), _name_of(activation)
        if layer is None or name is None or looked_at(expand, activation):
            return None
        return project_activate(x, *layer, activation=name)
    contract = getattr(module, parts.contract)
    found = in_one_step(x, expand, activation, _NOTHING, contract, layer=_layer_of, name=_name_of)
    if found is None or parts.last is None:
        return found
    output: Tensor = getattr(module, parts.last)(found)
    return output


def _layer_of(module: nn.Module) -> Layer | None:
    """Weight ``[out, in]``, which GPT-2's layers hold the other way round, and bias of what ``swap`` puts in place."""
    if type(module) is SwappedConv1D:
        return module.weight.t(), module.bias
    return layer_of(module, SwappedLinear)


def _name_of(activation: object) -> str | None:
    """As ``name_of``, with the classes of transformers."""
    if type(activation) in _HOLDERS:
        # They hold torch's own function, unless they were asked for one in Python.
        held = activation.act  # type: ignore[attr-defined]
        if getattr(held, "func", held) is not functional.gelu:
            return None
        return "gelu_tanh" if getattr(held, "keywords", None) == {"approximate": "tanh"} else "gelu"
    return _NAMES.get(type(activation)) or name_of(activation)


def faster(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class that a part of a model handed over becomes, if there is one."""
    return _PARTS.get(kind) or _one_step(kind)


def original(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class that ``faster`` is for."""
    return next((theirs for theirs, ours in _PARTS.items() if ours is kind), None) or _in_steps(kind)
