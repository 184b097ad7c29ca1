"""Layers of a frozen model of transformers as one operator, which runs when the model's loop has called the last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from clearhead.errors import UnsupportedError
from clearhead.integrations.recast import class_of, fast_of, original_of, stands_for
from clearhead.integrations.torch.unpadded import Packed
from clearhead.integrations.transformers.attention import weights_wanted
from clearhead.integrations.transformers.cache import CacheLayer, cache_layer_of, of_memory, of_own_tokens
from clearhead.integrations.transformers.calls import Arguments, Signature, arguments_of, signature_of
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
from clearhead.integrations.transformers.traits import traits_of
from clearhead.nn.cache_view import CacheView, same_view
from clearhead.nn.fused import takes_parts
from clearhead.nn.fused_blocks import MOST_ELEMENTS
from clearhead.nn.reading import cached_reading, no_gradients_if_frozen
from clearhead.nn.spec import Projections, Stack
from clearhead.torch_private import any_hooks, outputs_collected, submodules_of
from clearhead.watch import watched

__all__ = ["LayersAsOne", "StackForward", "output_of_layers"]

#: A model's arguments that ask for what is between layers begin so.
_OUTPUTS: Final = "output_"
#: Other arguments that say what the tokens are, and where.
_TOKENS: Final = ("input_ids", "inputs_embeds", "token_type_ids", "cache_position")
_Call = tuple[tuple[Any, ...], dict[str, Any]]


# ---- the model's loop ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StackForward:
    """The forward of a module whose loop over layers only hands their output on.

    Attributes:
        name: of the list of layers.
        start: place of the first layer of those that are one operator.
        stop: place behind the last.
    """

    name: str
    start: int
    stop: int

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layers = submodules_of(module).get(self.name)
        original = original_of(class_of(module))
        assert original is not None
        signature = signature_of(original.forward)
        given = {**dict(zip(signature.names, args, strict=False)), **kwargs}
        if not isinstance(layers, LayersAsOne) or _wants_states(module, given) or _reads_more(signature, given):
            return None
        with no_gradients_if_frozen(module, given.values()):
            output, _ = self.run(original.forward, module, args, kwargs)
        return output

    def run(
        self, forward: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, bool]:
        """What ``forward`` returns, whose layers run when its loop has called the last; and whether as one operator.

        The output is None if the loop does more in this call than to hand the layers' output on: none of them ran.

        Raises:
            UnsupportedError: it does more, and layers in front of these ran, which may have appended to a cache.
        """
        layers = submodules_of(module)[self.name]
        fast = fast_of(layers[self.start])
        if not isinstance(fast, LayerForward):
            return None, False
        loop = _Loop(layers, fast, self.start, self.stop)
        token = _RUNNING.set(loop)
        try:
            return forward(module, *args, **kwargs), loop.fused
        except _OtherLoopError:
            if self.start == 0:
                return None, False
            raise UnsupportedError.about(
                "freeze",
                "a frozen model",
                must="hand its tokens from layer to layer",
                got="other tokens in this call",
                then="Call ch.unfreeze(model) first.",
            ) from None
        finally:
            _RUNNING.reset(token)


def _wants_states(module: Any, given: Mapping[str, Any]) -> bool:
    """Whether what is between the layers is wanted too."""
    if any(name.startswith(_OUTPUTS) and value for name, value in given.items()) or outputs_collected():
        return True
    config = getattr(module, "config", None)
    return bool(getattr(config, "output_hidden_states", False) or getattr(config, "output_attentions", False))


def _reads_more(signature: Signature, given: Mapping[str, Any]) -> bool:
    """Whether a model is given tensors besides tokens, masks and positions, by which its loop may do more."""
    roles = (*_TOKENS, *signature.names[:1], signature.cache, signature.memory, *signature.masks, *signature.positions)
    others = (value for name, value in given.items() if value is not None and name not in roles)
    parts = chain.from_iterable(value if isinstance(value, (list, tuple)) else (value,) for value in others)
    return any(isinstance(part, Tensor) for part in parts)


class _OtherLoopError(Exception):
    """A layer was called out of turn, or its tokens are not what the layer before it gave."""


class _Loop:
    """A model's loop over its layers: what it calls those with that are one operator.

    Attributes:
        owner: the list of all layers.
        fast: the forward of each of those that are one.
        start: place of the first of them in the list.
        layers: in order.
        is_over: whether all were called.
        fused: whether one operator ran them.
    """

    def __init__(self, owner: nn.Module, fast: LayerForward, start: int, stop: int) -> None:
        self.owner, self.fast, self.start = owner, fast, start
        self.layers = [*submodules_of(owner).values()][start:stop]
        self.is_over = self.fused = False
        self._calls: list[_Call] = []
        self._kinds: list[int] = []
        self._places: dict[tuple[object, ...], int] = {}
        self._tokens: Any = None
        original = original_of(class_of(self.layers[0]))
        assert original is not None
        self._name = signature_of(original.forward).names[0]

    def called(self, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a layer returns: its tokens as they are, and of the last one the output of all."""
        if self.is_over:
            return self.layers[place](*args, **kwargs)
        output = args[0] if args else kwargs.get(self._name)
        if place == 0:
            self._tokens = output
        if place != len(self._kinds) or output is not self._tokens:
            raise _OtherLoopError
        self._kinds.append(self._kind_of(args, kwargs))
        if place == len(self.layers) - 1:
            self.is_over = True
            output = output_of_layers(self.owner, self.layers, self.fast, self._kinds, self._calls)
            if output is None:
                return self._one_by_one()
            self.fused = True
        return output if self.fast.length == 0 else (output, *(None,) * (self.fast.length - 1))

    def _kind_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The place of a call in ``_calls``, which has each of the different ones."""
        # The objects of a call that is there are alive, so that no other has their identity.
        key = (*kwargs, *map(id, args), *map(id, kwargs.values()))
        kind = self._places.setdefault(key, len(self._calls))
        if kind == len(self._calls):
            self._calls.append((args, kwargs))
        return kind

    def _one_by_one(self) -> Any:
        output = None
        for layer, kind in zip(self.layers, self._kinds, strict=True):
            args, kwargs = self._calls[kind]
            if output is not None:
                x = output[0] if isinstance(output, tuple) else output
                args, kwargs = ((x, *args[1:]), kwargs) if args else (args, {**kwargs, self._name: x})
            output = layer(*args, **kwargs)
        return output


#: The loop that a model's forward runs.
_RUNNING: Final[ContextVar[_Loop | None]] = ContextVar("clearhead_running_loop", default=None)


class _StandIn:
    """A layer in its model's loop, with the layer's attributes."""

    __slots__ = ("_layer", "_loop", "_place")

    def __init__(self, loop: _Loop, place: int) -> None:
        self._loop, self._place, self._layer = loop, place, loop.layers[place]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._loop.called(self._place, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


@stands_for(nn.ModuleList)
class LayersAsOne(nn.ModuleList):
    """A list of swapped layers. The loop of the model that ``StackForward`` runs gets stand-ins of those that are one
    operator."""

    def __iter__(self) -> Iterator[Any]:
        loop = self._loop
        if loop is None:
            return super().__iter__()
        layers: list[Any] = [*super().__iter__()]
        layers[loop.start : loop.start + len(loop.layers)] = [
            _StandIn(loop, place) for place in range(len(loop.layers))
        ]
        return iter(layers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) and index.indices(len(self)) == (0, len(self), 1) and self._loop is not None:
            return self
        return super().__getitem__(index)

    @property
    def _loop(self) -> _Loop | None:
        loop = _RUNNING.get()
        return None if loop is None or loop.owner is not self or loop.is_over else loop


# ---- the operator -------------------------------------------------------------------------------------------


class _LayersRead(NamedTuple):
    """What was read from a list of layers.

    Attributes:
        stack: weights and options.
        same_as: for each layer the place of the first of which a call says the same, but for its cache.
        cores: what computes each attention of each layer.
        outer: the layers, their attentions and cores.
    """

    stack: Stack
    same_as: Sequence[int]
    cores: Sequence[Sequence[Any]]
    outer: Sequence[nn.Module]


def output_of_layers(
    owner: nn.Module, layers: Sequence[Any], fast: LayerForward, kinds: Sequence[int], calls: Sequence[_Call]
) -> Tensor | None:
    """The output of layers as one operator; None if they are to run one by one.

    Args:
        owner: the list of layers.
        layers: in order.
        fast: the forward of each of them.
        kinds: for each layer the place of its call in ``calls``.
        calls: the different ones, all of the same tokens.
    """
    original = original_of(class_of(layers[0]))
    if original is None or weights_wanted() or watched() or takes_parts() or torch.is_grad_enabled():
        return None
    given: list[Arguments] = []
    for args, kwargs in calls:
        arguments = arguments_of(original.forward, args, kwargs)
        if arguments is None or not may_fuse(arguments) or is_relative(arguments):
            return None
        if (arguments.memory is not None) != (len(fast.match.attentions) > 1):
            return None
        given.append(arguments)
    x = given[0].tokens
    reading = None if x.numel() > MOST_ELEMENTS else _reading_of(owner, layers, fast, kinds, given)
    if reading is None or (fast.interface and not is_ours(reading.cores[0][0])):
        return None
    call = _call_of_all(reading, layers, fast, kinds, given)
    return None if call is None else run_fused(reading.stack, call)


def _reading_of(
    owner: nn.Module, layers: Sequence[Any], fast: LayerForward, kinds: Sequence[int], given: Sequence[Arguments]
) -> _LayersRead | None:
    """What is read from the layers; None if a part is not plain, or is hooked."""
    x, rotary = given[0].tokens, [bool(each.rotary) for each in given]

    def read() -> _LayersRead | None:
        stacks = [
            layer_of(fast.match, layer, x, rotary[kind], fast.formulas)
            for layer, kind in zip(layers, kinds, strict=True)
        ]
        if None in stacks:
            return None
        stack = Stack([each.layers[0] for each in stacks if each is not None])
        traits = [*zip(kinds, map(traits_of, layers), strict=True)]
        return _LayersRead(stack, [*map(traits.index, traits)], *_attending_parts(layers, fast.match))

    def may_be_hooked() -> Sequence[nn.Module]:
        return owner, *_attending_parts(layers, fast.match)[1]

    key = (x.shape[-1], x.dtype, *kinds, *rotary)
    reading = cached_reading(owner, key, read, may_be_hooked=may_be_hooked, views=fast.match.has_views)
    if reading is None or (any_hooks(map(vars, reading.outer)) and any(map(hooked, reading.outer))):
        return None
    return reading


def _attending_parts(layers: Sequence[Any], match: LayerMatch) -> tuple[Sequence[Sequence[Any]], Sequence[nn.Module]]:
    """What computes each attention of each layer; and the same with the attentions and the layers, as one list."""
    attentions = [[at(layer, path) for path in match.row.attentions] for layer in layers]
    cores = [
        [at(module, row.core) for module, row in zip(modules, match.attentions, strict=True)] for modules in attentions
    ]
    return cores, [*layers, *chain.from_iterable((*attentions, *cores))]


def _call_of_layer(
    layer: Any, cores: Sequence[Any], attentions: Sequence[Projections], given: Arguments, interface: bool
) -> LayerCall | None:
    """What the attentions of a layer read; None if the original code is to read it."""
    call = call_of(cores[0], attentions[0], given, interface)
    if call is not None and len(cores) > 1:
        call = with_memory(call, cores[1], attentions[1], given)
    if call is None or given.memory is not None or given.cache is not None:
        return call
    return call.without_padding(unpadded_of(layer, given))


def _call_of_all(
    reading: _LayersRead, layers: Sequence[Any], fast: LayerForward, kinds: Sequence[int], given: Sequence[Arguments]
) -> LayerCall | None:
    """What the attentions of all layers read; None if the original code is to read it."""
    calls, caches, growing = dict[int, LayerCall](), list[CacheView | None](), list[CacheLayer]()
    for place, first in enumerate(reading.same_as):
        arguments, cores = given[kinds[place]], reading.cores[place]
        attentions = reading.stack.layers[place].attentions
        if first == place:
            call = _call_of_layer(layers[place], cores, attentions, arguments, fast.interface)
            if call is None or not _are_packed_alike(calls.get(0, call).packed, call.packed):
                return None
            calls[place] = call
        else:
            call = _with_own_caches(calls[first], cores, attentions[0], arguments)
            if call is None:
                return None
        caches += call.caches
        growing += call.growing
    call = calls[0]._replace(caches=tuple(caches), growing=tuple(growing))
    if len(calls) == 1:
        return call
    of_each = [calls[first] for first in reading.same_as]
    masks = chain.from_iterable(each.masks for each in of_each)
    return call._replace(masks=tuple(masks), rotary=tuple(each.rotary[0] for each in of_each))


def _with_own_caches(
    like: LayerCall, cores: Sequence[Any], projections: Projections, given: Arguments
) -> LayerCall | None:
    """A layer's call, which is ``like`` another one's but for its caches; None where these differ in more than
    contents."""
    if given.cache is None:
        return like
    view, (of_other,) = like.caches[0], like.growing
    layer = cache_layer_of(of_own_tokens(given.cache), getattr(cores[0], "layer_idx", None))
    if view is None or layer is None or layer.most != of_other.most:
        return None
    other = same_view(view, layer.cache) if layer.most is None else None
    if other is None:
        other = layer.view(given.tokens, projections.num_kv_heads, projections.head_dim)
    if other is None or other.length != view.length:
        return None
    if len(cores) == 1:
        return like._replace(caches=(other,), growing=(layer,))
    memory = of_memory(given.cache, getattr(cores[1], "layer_idx", None))
    if (memory is None) != (like.caches[1] is None):
        return None
    return like._replace(caches=(other, memory), growing=(layer,))


def _are_packed_alike(one: Packed | None, two: Packed | None) -> bool:
    """Whether two calls have the same real tokens, or both have their padding."""
    return one is two or (one is not None and two is not None and torch.equal(one.places, two.places))
