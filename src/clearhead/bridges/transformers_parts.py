"""Parts of transformers' models beside attention: linear layers and dropout by class; norms, and feedforwards in one
step, by the source of their ``forward``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, QuickGELUActivation, SiLUActivation
from transformers.pytorch_utils import Conv1D

from clearhead.backends.native_norm import Norm, NormKind
from clearhead.bridges.torch_parts import SwappedDropout, SwappedLinear, is_plain
from clearhead.bridges.transformers_source import Way, by_source, digest_of, known_by_source, made_of, way_of
from clearhead.nn.feedforward import drop_of, in_one_step, layer_of, name_of
from clearhead.nn.fused_layer import norm_of as torchs_norm_of
from clearhead.nn.linear import looked_at
from clearhead.nn.norm import NormLike, normed, takes_norm
from clearhead.projection import Layer, project, project_activate, project_activate_project

__all__ = ["Fed", "activation_of", "drop_in", "faster", "feedforward_of", "norm_of", "original", "plain_layer"]


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


@dataclass(frozen=True)
class _Parts:
    """What a forward's parts are called; ``contract``, ``last``, ``gate`` and ``hidden``, which drops numbers between
    the layers, may be none. ``halved`` says that what expands is the gate's layer and, behind it, the other one."""

    expand: str
    activation: str
    contract: str | None = None
    last: str | None = None
    gate: str | None = None
    halved: bool = False
    hidden: str | None = None


#: Feedforwards by their source: BertIntermediate's, CLIPMLP's, GPT2MLP's, LlamaMLP's, Phi3MLP's, ModernBertMLP's and
#: T5's two, and of all that repeat them.
_FEEDFORWARDS: Final[Mapping[str, _Parts]] = {
    "cf65bc74f562bf96": _Parts("dense", "intermediate_act_fn"),
    "10797a3e625952cf": _Parts("fc1", "activation_fn", "fc2"),
    "5e4ac81e54593719": _Parts("c_fc", "act", "c_proj", "dropout"),
    "02b47e1a82c9253e": _Parts("up_proj", "act_fn", "down_proj", gate="gate_proj"),
    "99bb0564ac22b299": _Parts("gate_up_proj", "activation_fn", "down_proj", halved=True),
    "eeb897b86a69d301": _Parts("Wi", "act", "Wo", halved=True, hidden="drop"),
    "e58f901554c64960": _Parts("wi", "act", "wo", hidden="dropout"),
    "b68b6575e4a865f8": _Parts("wi_1", "act", "wo", gate="wi_0", hidden="dropout"),
}


@dataclass(frozen=True)
class _Norms:
    """How norms of a kind say what they are: what their epsilon is called, and the digest of ``_norm``, where their
    ``forward`` leaves the work to that."""

    kind: NormKind
    epsilon: str
    inner: str | None = None

    def of(self, module: Any) -> Norm | None:
        if self.inner is not None and digest_of(type(module)._norm) != self.inner:
            return None
        return Norm(self.kind, float(getattr(module, self.epsilon)), module.weight, None)


#: Norms by their source: LlamaRMSNorm's, Olmo2RMSNorm's, which multiplies before it rounds, T5LayerNorm's, which
#: rounds once more, and Gemma's.
_RMS_NORMS: Final[Mapping[str, _Norms]] = {
    "d410d971c2edc3da": _Norms(NormKind.RMS, "variance_epsilon"),
    "2ba825c845aca2cf": _Norms(NormKind.RMS, "variance_epsilon"),
    "351ce598683c19e2": _Norms(NormKind.RMS, "variance_epsilon"),
    "dcf2e36f1533d472": _Norms(NormKind.RMS_FROM_ONE, "eps", inner="b118ac57b1f43776"),
}
_HOLDERS: Final = (GELUActivation, GELUTanh)
_NAMES: Final[dict[type, str]] = {
    NewGELUActivation: "gelu_tanh", SwappedNewGELU: "gelu_tanh", SiLUActivation: "silu",
    QuickGELUActivation: "quick_gelu",
}  # fmt: skip
_NOTHING: Final = nn.Identity()


def _taken(module: nn.Module, parts: _Parts, x: Tensor) -> Tensor | None:
    """The output, where all parts are what they were and nobody looks at them."""
    if not is_plain(x):
        return None
    expand, activation = getattr(module, parts.expand), getattr(module, parts.activation)
    if parts.contract is None:
        layer, name = plain_layer(expand), activation_of(activation)
        if layer is None or name is None or looked_at(expand, activation):
            return None
        return project_activate(x, *layer, activation=name)
    contract = getattr(module, parts.contract)
    between = _NOTHING if parts.hidden is None else getattr(module, parts.hidden)
    if parts.halved:
        halves, last, name = _halves_of(expand), plain_layer(contract), activation_of(activation)
        drop = drop_of(between)
        if halves is None or last is None or name is None or drop is None:
            return None
        if looked_at(expand, activation, contract, between):
            return None
        return project_activate_project(x, *halves[1], *last, gate=halves[0], activation=name, dropout=drop)
    gate = None if parts.gate is None else getattr(module, parts.gate)
    found = in_one_step(x, expand, activation, between, contract, gate=gate, layer=plain_layer, name=activation_of)
    if found is None or parts.last is None:
        return found
    output: Tensor = getattr(module, parts.last)(found)
    return output


def plain_layer(module: nn.Module) -> Layer | None:
    """Weight ``[out, in]``, which GPT-2's layers hold the other way round, and bias of what ``swap`` puts in place."""
    if type(module) is SwappedConv1D:
        return module.weight.t(), module.bias
    return layer_of(module, SwappedLinear)


def _halves_of(module: nn.Module) -> tuple[Layer, Layer] | None:
    """The two layers that one is side by side, which read and learn what that does."""
    layer = plain_layer(module)
    if layer is None or len(layer[0]) % 2:
        return None
    weight, bias = layer
    (one, two), biases = weight.chunk(2), (None, None) if bias is None else bias.chunk(2)
    return (one, biases[0]), (two, biases[1])


def activation_of(activation: object) -> str | None:
    """As ``name_of``, with the classes of transformers."""
    if type(activation) in _HOLDERS:
        # They hold torch's own function, unless they were asked for one in Python.
        held = activation.act  # type: ignore[attr-defined]
        if getattr(held, "func", held) is not functional.gelu:
            return None
        return "gelu_tanh" if getattr(held, "keywords", None) == {"approximate": "tanh"} else "gelu"
    return _NAMES.get(type(activation)) or name_of(activation)


class Fed(NamedTuple):
    """A feedforward that is its layers, the gate's in front where it has one, an activation, by name, and dropouts of
    what it gives and of what is between its layers."""

    layers: list[Layer]
    activation: str
    after: float
    hidden: float = 0.0
    halved: bool = False


def drop_in(module: nn.Module, name: str | None) -> float | None:
    """The probability with which a part of a module drops now, 0 where there is none; None where it is not known."""
    return 0.0 if name is None else drop_of(getattr(module, name))


def feedforward_of(module: nn.Module) -> Fed | None:
    """What one of ours by source is, where it is nothing else."""
    parts = _FED.get(way_of(type(module)))
    if parts is None or parts.contract is None:
        return None
    if parts.halved:
        return _halved(module, parts)
    names = [name for name in (parts.gate, parts.expand, parts.contract) if name is not None]
    layers = [layer for name in names if (layer := plain_layer(getattr(module, name))) is not None]
    activation = activation_of(getattr(module, parts.activation))
    after, hidden = drop_in(module, parts.last), drop_in(module, parts.hidden)
    if activation is None or after is None or hidden is None or len(layers) < len(names):
        return None
    return Fed(layers, activation, after, hidden)


def _halved(module: nn.Module, parts: _Parts) -> Fed | None:
    assert parts.contract is not None
    # Read where they lie, for as long as nobody learns: the step would not know whose parts they are.
    with torch.inference_mode(False), torch.no_grad():
        halves = _halves_of(getattr(module, parts.expand))
    contract, activation = (
        plain_layer(getattr(module, parts.contract)),
        activation_of(getattr(module, parts.activation)),
    )
    hidden = drop_in(module, parts.hidden)
    if halves is None or contract is None or activation is None or hidden is None:
        return None
    return Fed([*halves, contract], activation, 0.0, hidden, halved=True)


def norm_of(module: nn.Module, x: Tensor) -> NormLike | None:
    """What a norm of ``x`` is, where it is one of torch's, or of ours by source."""
    norms = _NORMED.get(way_of(type(module)))
    if norms is None:
        return torchs_norm_of(module, x)
    norm = norms.of(module)
    return None if norm is None else ((norm.kind, norm.epsilon), (norm.weight, norm.bias))


def _way_to_norm(norms: _Norms) -> Way:
    def way(module: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor | None:
        # What it reads is called x by some.
        (x,) = (*args, *kwargs.values())
        norm = norms.of(module) if is_plain(x) else None
        return normed(x, norm) if norm is not None and takes_norm(x, norm) else None

    return way


def _way_through(parts: _Parts) -> Way:
    def fed(module: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor | None:
        # What it reads is called x by some.
        (x,) = (*args, *kwargs.values())
        return _taken(module, parts, x)

    return fed


_FED: Final[dict[Way | None, _Parts]] = {}
for _digest, _own in _FEEDFORWARDS.items():
    _FED[_way := _way_through(_own)] = _own
    known_by_source(_digest, _way)
_NORMED: Final[dict[Way | None, _Norms]] = {}
for _digest, _norms in _RMS_NORMS.items():
    _NORMED[_way := _way_to_norm(_norms)] = _norms
    known_by_source(_digest, _way)


def faster(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class that a part of a model handed over becomes, if there is one."""
    return _PARTS.get(kind) or by_source(kind)


def original(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class that ``faster`` is for."""
    return next((theirs for theirs, ours in _PARTS.items() if ours is kind), None) or made_of(kind)
