"""All layers of a frozen model of transformers as one operator: a list of layers that a model's loop sees as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from clearhead.integrations.recast import class_of, fast_of, original_of, stands_for
from clearhead.integrations.transformers.attention import weights_wanted
from clearhead.integrations.transformers.cache import CacheLayer, cache_layer_of, of_memory, of_own_tokens
from clearhead.integrations.transformers.calls import Arguments, arguments_of, signature_of
from clearhead.integrations.transformers.forwards import LayerForward
from clearhead.integrations.transformers.layer import (
    LayerCall,
    call_of,
    is_ours,
    is_relative,
    may_fuse,
    run_fused,
    unpadded_of,
    with_memory,
)
from clearhead.integrations.transformers.match import LayerMatch, at
from clearhead.integrations.transformers.specs import hooked, layer_of
from clearhead.nn.cache_view import CacheView, same_view
from clearhead.nn.fused import takes_parts
from clearhead.nn.fused_blocks import MOST_ELEMENTS
from clearhead.nn.reading import cached_reading, no_gradients_if_frozen
from clearhead.nn.spec import Stack
from clearhead.torch_private import any_hooks, outputs_collected, submodules_of
from clearhead.watch import watched

__all__ = ["LayersAsOne", "StackForward", "forward_of_layers"]

#: The list whose model's loop runs, and sees its layers as one.
_RUNNING: Final[ContextVar[nn.Module | None]] = ContextVar("clearhead_running_layers", default=None)
#: A model's arguments that ask for what is between layers begin so.
_OUTPUTS: Final = "output_"


@dataclass(frozen=True)
class StackForward:
    """The forward of a module whose loop over the layers in ``name`` does nothing else: it sees them as one."""

    name: str

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layers = submodules_of(module).get(self.name)
        original = original_of(class_of(module))
        assert original is not None
        given = {**dict(zip(signature_of(original.forward).names, args, strict=False)), **kwargs}
        if not isinstance(layers, LayersAsOne) or _wants_states(module, given):
            return None
        token = _RUNNING.set(layers)
        try:
            with no_gradients_if_frozen(module, given.values()):
                return original.forward(module, *args, **kwargs)
        finally:
            _RUNNING.reset(token)


def _wants_states(module: Any, given: Mapping[str, Any]) -> bool:
    """Whether what is between the layers is wanted too."""
    if any(name.startswith(_OUTPUTS) and value for name, value in given.items()) or outputs_collected():
        return True
    config = getattr(module, "config", None)
    return bool(getattr(config, "output_hidden_states", False) or getattr(config, "output_attentions", False))


@stands_for(nn.ModuleList)
class LayersAsOne(nn.ModuleList):
    """A list of swapped layers. The loop of the model that ``StackForward`` runs gets itself as the only layer."""

    def __iter__(self) -> Iterator[nn.Module]:
        return iter((self,)) if _RUNNING.get() is self else super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        if _RUNNING.get() is self and isinstance(index, slice) and index.indices(len(self)) == (0, len(self), 1):
            return self
        return super().__getitem__(index)

    def __getattr__(self, name: str) -> Any:
        # transformers 4 chooses a mask by an attribute of each layer.
        try:
            return super().__getattr__(name)
        except AttributeError:
            if _RUNNING.get() is not self:
                raise
            first, *others = (getattr(layer, name) for layer in submodules_of(self).values())
            if any(other != first for other in others):
                raise
            return first

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the layers return one after another, given the same arguments besides tokens."""
        layers = [*submodules_of(self).values()]
        output = forward_of_layers(self, layers, args, kwargs)
        if output is not None:
            return output
        original = original_of(class_of(layers[0])) or type(layers[0])
        name = signature_of(original.forward).names[0]
        for layer in layers:
            output = layer(*args, **kwargs)
            x = output[0] if isinstance(output, tuple) else output
            args, kwargs = ((x, *args[1:]), kwargs) if args else (args, {**kwargs, name: x})
        return output


def forward_of_layers(owner: nn.Module, layers: Sequence[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The output of layers as one operator, as the last one returns it; None if they are to run one by one."""
    fast, original = fast_of(layers[0]), original_of(class_of(layers[0]))
    if not isinstance(fast, LayerForward) or original is None or weights_wanted() or watched() or takes_parts():
        return None
    given = arguments_of(original.forward, args, kwargs)
    if given is None or not may_fuse(given) or is_relative(given) or given.tokens.numel() > MOST_ELEMENTS:
        return None
    if (given.memory is not None) != (len(fast.match.attentions) > 1) or torch.is_grad_enabled():
        return None
    output = _stack_output(owner, layers, fast, given)
    return output if output is None or fast.length == 0 else (output, *(None,) * (fast.length - 1))


class _LayersRead(NamedTuple):
    """What was read from a list of layers.

    Attributes:
        stack: weights and options.
        cores: what computes each attention of each layer.
        outer: the layers, their attentions and cores.
    """

    stack: Stack
    cores: Sequence[Sequence[Any]]
    outer: Sequence[nn.Module]


def _stack_output(owner: nn.Module, layers: Sequence[Any], fast: LayerForward, given: Arguments) -> Tensor | None:
    x, rotary = given.tokens, bool(given.rotary)

    def read() -> _LayersRead | None:
        stacks = [layer_of(fast.match, layer, x, rotary, fast.formulas) for layer in layers]
        if None in stacks:
            return None
        stack = Stack([each.layers[0] for each in stacks if each is not None])
        return _LayersRead(stack, *_attending_parts(layers, fast.match))

    def may_be_hooked() -> Sequence[nn.Module]:
        return owner, *_attending_parts(layers, fast.match)[1]

    key = (x.shape[-1], x.dtype, rotary)
    reading = cached_reading(owner, key, read, may_be_hooked=may_be_hooked, views=fast.match.has_views)
    if reading is None or (any_hooks(map(vars, reading.outer)) and any(map(hooked, reading.outer))):
        return None
    stack, cores, _ = reading
    if fast.interface and not is_ours(cores[0][0]):
        return None
    call = call_of(cores[0][0], stack.attentions[0], given, fast.interface)
    if call is not None and len(cores[0]) > 1:
        call = with_memory(call, cores[0][1], stack.attentions[1], given)
    call = None if call is None else _call_of_all(call, cores, stack, given)
    if call is None:
        return None
    unpadded = unpadded_of(layers[0], given) if given.memory is None and given.cache is None else None
    return run_fused(stack, call, unpadded)


def _attending_parts(layers: Sequence[Any], match: LayerMatch) -> tuple[Sequence[Sequence[Any]], Sequence[nn.Module]]:
    """What computes each attention of each layer; and the same with the attentions and the layers, as one list."""
    attentions = [[at(layer, path) for path in match.row.attentions] for layer in layers]
    cores = [
        [at(module, row.core) for module, row in zip(modules, match.attentions, strict=True)] for modules in attentions
    ]
    return cores, [*layers, *chain.from_iterable((*attentions, *cores))]


def _call_of_all(call: LayerCall, cores: Sequence[Sequence[Any]], stack: Stack, given: Arguments) -> LayerCall | None:
    """The call of all layers, from that of the first; None where their caches differ."""
    caches, growing = list[CacheView | None](), list[CacheLayer]()
    if given.cache is None:
        return call
    first, view, of_first = stack.attentions[0], call.caches[0], call.growing[0]
    past = of_own_tokens(given.cache)
    assert view is not None
    for place, core in enumerate(cores):
        layer = cache_layer_of(past, getattr(core[0], "layer_idx", None)) if place else of_first
        if layer is None or layer.most != of_first.most:
            return None
        other = (same_view(view, layer.cache) if layer.most is None else None) if place else view
        if other is None:
            other = layer.view(given.tokens, first.num_kv_heads, first.head_dim)
        if other is None or other.length != view.length:
            return None
        growing.append(layer)
        caches.append(other)
        if len(core) > 1:
            memory = of_memory(given.cache, getattr(core[1], "layer_idx", None))
            if (memory is None) != (call.caches[1] is None):
                return None
            caches.append(memory)
    return call._replace(caches=tuple(caches), growing=tuple(growing))
