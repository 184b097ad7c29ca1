"""A layer of a model of transformers as one step, its cache and all, for those who know what the layer is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from clearhead.bridges.packed import Packed
from clearhead.bridges.torch_parts import is_plain
from clearhead.bridges.transformers_attention import attend_for, is_causal_alone
from clearhead.bridges.transformers_cache import CacheLayer, of_memory, of_own_tokens
from clearhead.bridges.transformers_masks import MaskTensor
from clearhead.bridges.transformers_self_attention import attended, may_be_read, own_tokens
from clearhead.masks import Mask
from clearhead.masks.base import conjuncts
from clearhead.masks.parts import is_padding
from clearhead.nn.fused_attention import Projections
from clearhead.nn.fused_layer import LayerParts, Layers, fused_layers, of_parts
from clearhead.nn.held import Held
from clearhead.nn.unchanged import TakenApart
from clearhead.projection import NATIVE, Layer, project, project_activate_project
from clearhead.shapes import Float
from clearhead.watch import watched

__all__ = ["Kind", "Memory", "hooked_now", "layer_in_one_step"]

#: Where transformers' own hooks come from, which collect only where it is asked for.
_COLLECTS: Final = "transformers.utils.output_capturing"
#: From how many tokens, times the width squared, of padding on it is left out.
_LEAST_LEFT_OUT: Final = 2**22


@dataclass(frozen=True)
class Kind:
    """What somebody knows of a kind of layers.

    Attributes:
        attentions: a layer's, which watchers know: to its own tokens and, where there is one, to a memory.
        marks: what a layer and its attentions are besides their parts: scale, heads, dropout now.
        parts: what a layer is as a step, where all there is to it is that.
    """

    attentions: Callable[[Any], list[Any]]
    marks: Callable[[Any], tuple[object, ...]]
    parts: Callable[[Any, Tensor], LayerParts | None]


class _Reading(NamedTuple):
    """What an attention may attend to in a memory, and what is there already of its keys and values."""

    mask: Mask | None
    held: Held | None


@dataclass(frozen=True)
class Memory:
    """What a layer attends to besides its own tokens, as transformers hands it over.

    Attributes:
        states: ``[batch, memory_len, width]``.
        mask: as in ``attend_for``.
    """

    states: Any
    mask: Any

    def read_by(self, attention: Any, past: Any, batch: int) -> _Reading | None:
        """How so many sequences read it by an attention of a model with this cache; None where that is for others to
        find out, who fill the cache besides."""
        states, held = self.states, None
        if not isinstance(states, Tensor) or not is_plain(states) or states.dim() != 3 or len(states) != batch:
            return None
        if past is not None and (held := of_memory(past, getattr(attention, "layer_idx", None))) is None:
            return None
        if held is not None and len(held.key) != batch:
            return None
        length = states.shape[1] if held is None else held.length
        if self.mask is None:
            return None if is_causal_alone(attention) else _Reading(None, held)
        if type(self.mask) is not MaskTensor or self.mask.shape[-1] != length:
            return None
        mask = self.mask.meaning()
        # Of positions there is nothing to say.
        known = mask is None or all(is_padding(part) for part in conjuncts(mask))
        return _Reading(mask, held) if known else None


_APART: Final = TakenApart[Layers]()


@dataclass
class _None:
    """A layer that is no step: gradients, dtype and mode with which that was found, and for how many more calls like
    that nobody looks whether it still is none, which takes as long as a tenth of one token through a narrow layer."""

    marks: tuple[object, ...]
    left: int


_NONE: Final[WeakKeyDictionary[nn.Module, _None]] = WeakKeyDictionary()
_SKIPPED: Final = 63


def layer_in_one_step(
    kind: Kind, layer: Any, x: Float[Tensor, "batch len width"], mask: Any, past: Any, options: Mapping[str, Any],
    positions: Any = None, memory: Memory | None = None,
) -> Float[Tensor, "batch len width"] | None:  # fmt: skip
    """What a layer gives, and its cache the keys and values behind those that it held; None where it is for
    transformers' own code to find out.

    Args:
        kind: what the layer is.
        layer: it.
        x: tokens, which may be anything.
        mask: as in ``attend_for``.
        past: transformers' cache, or None.
        options: others that the layer was called with.
        positions: as in ``angles_of``, of an attention that turns queries and keys.
        memory: of a layer that has one.
    """
    marks = (torch.is_grad_enabled(), getattr(x, "dtype", None), layer.training)
    if _is_known_to_be_none(layer, marks) or not may_be_read(x, past, options):
        return None
    try:
        apart = _taken_apart(kind, layer, x)
    except AttributeError:
        # Something stands there that is not what the kind says.
        return None
    if apart is None:
        # Whoever looks at an attention may stop at any time.
        if _APART.is_nothing(layer) and not any(map(hooked_now, kind.attentions(layer))):
            _NONE[layer] = _None(marks, _SKIPPED)
        return None
    attentions, layers = apart
    own = layers.parts[0].attentions[0]
    read = own_tokens(attentions[0], own, x, mask, past, options.get("is_causal"), positions)
    if read is None:
        return None
    call = _Call(
        attentions, layers, (x,), (read.mask,), read.causal, (read.held,), read.cached, read.angles,
        # A cache keeps its places.
        packed=_packed(layer, x, mask) if memory is None and past is None else None,
    )  # fmt: skip
    whole = call if memory is None else call.with_memory(memory, past)
    if whole is None:
        return None
    return whole.for_watchers(mask, past, memory) if watched() else whole.at_once()


@dataclass(frozen=True)
class _Call:
    """A call of a layer that a step may take.

    Attributes:
        attentions: those of the layer.
        layers: it as a step takes it.
        tokens: its own, and those of a memory whose keys and values are not there yet.
        masks: of each attention.
        causal: whether the first is causal where it was given no mask.
        held: what each attention reads from a cache, where it does.
        cached: the cache of its own tokens, where there is one.
        angles: of its own tokens, where these are turned.
        packed: how they are laid end to end, and their mask then, where they are.
    """

    attentions: list[Any]
    layers: Layers
    tokens: tuple[Tensor, ...]
    masks: tuple[Mask | None, ...]
    causal: bool
    held: tuple[Held | None, ...]
    cached: CacheLayer | None
    angles: Tensor | None
    packed: tuple[Packed, Mask] | None = None

    def with_memory(self, memory: Memory, past: Any) -> Self | None:
        """The same with a memory; None where it is for others to read it."""
        read = memory.read_by(self.attentions[1], past, len(self.tokens[0]))
        if read is None:
            return None
        tokens = self.tokens if read.held is not None else (*self.tokens, memory.states)
        return replace(self, tokens=tokens, masks=(*self.masks, read.mask), held=(*self.held, read.held))

    def at_once(self) -> Tensor | None:
        """The output in one step, or None."""
        layers, angles, tokens, masks = self.layers, self.angles, self.tokens, self.masks
        laid = None
        if self.packed is not None:
            laid, mask = self.packed
            tokens, masks = (laid.enter(tokens[0])[None],), (mask,)
            angles = None if angles is None else laid.angles(angles)
        output = fused_layers(tokens, layers if angles is None else layers.turned_by(angles), masks, self.held)
        if output is None:
            return None
        if self.cached is not None:
            self.cached.appended(tokens[0])
        return output if laid is None else laid.leave(output[0])

    def for_watchers(self, mask: Any, past: Any, memory: Memory | None) -> Tensor | None:
        """The output part by part, or None; of what the layer was called with."""
        (attention, *others), parts = self.attentions, self.layers.parts[0]
        own, *to_memory = parts.attentions
        sublayers: list[Callable[[Tensor], Tensor]] = [
            partial(
                attended, attention, own, angles=self.angles, mask=mask, causal=self.causal, past=of_own_tokens(past)
            )
        ]
        if memory is not None:
            sublayers.append(partial(_read, *others, *to_memory, memory=memory, held=self.held[1]))
        output = of_parts(self.tokens, parts, self.masks, [*sublayers, partial(_fed, parts)], self.held)
        if output is None or self.packed is None:
            return output
        laid, _ = self.packed
        return laid.leave(laid.enter(output))


def _packed(layer: Any, x: Tensor, given: Any) -> tuple[Packed, Mask] | None:
    """How a layer's tokens are laid end to end, and what they attend to then, where that is asked for and pays."""
    if type(given) is not MaskTensor or not layer.leaves_padding_out:
        return None
    found = given.packed()
    if found is None or found[0].size != x.shape[:2]:
        return None
    rows = x.shape[0] * x.shape[1] - len(found[0].places)
    return found if rows * x.shape[2] ** 2 >= _LEAST_LEFT_OUT else None


def _is_known_to_be_none(layer: nn.Module, marks: tuple[object, ...]) -> bool:
    """Whether a layer that was no step shortly before is not looked at again."""
    known = _NONE.get(layer)
    if known is None:
        return False
    known.left -= 1
    if known.left >= 0 and known.marks == marks:
        return True
    # Another thread may have done so.
    _NONE.pop(layer, None)
    return False


def _taken_apart(kind: Kind, layer: Any, x: Float[Tensor, "batch len width"]) -> tuple[list[Any], Layers] | None:
    """A layer's attentions, and what it is as a step, where all there is to it is that."""
    attentions = kind.attentions(layer)
    own = [part for each in attentions for part in (type(each), each.config._attn_implementation, hooked_now(each))]
    # What is a view of a weight, as GPT-2's are of theirs, learns only where it was made with gradients.
    like = x.shape[-1], x.dtype, torch.is_grad_enabled(), *own, *kind.marks(layer)
    parts = [*layer._modules.values(), *[part for each in attentions for part in each._modules.values()]]

    def layers() -> Layers | None:
        found = kind.parts(layer, x)
        return None if found is None else Layers([found])

    # Attentions are asked each time, for they may have hooks that do nothing now.
    found = _APART.of(layer, like, parts, layers, apart_from=attentions)
    return None if found is None else (attentions, found)


def hooked_now(module: nn.Module) -> bool:
    """Whether somebody looks at a module's calls, or set a ``forward`` of its own on it; transformers, where nothing is
    to be collected, does not."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values(), *module._backward_hooks.values()]
    hooks += module._backward_pre_hooks.values()
    return "forward" in vars(module) or any(getattr(own, "__module__", "") != _COLLECTS for own in hooks)


# ---- the same part by part, for those who watch --------------------------------------------------------------


def _read(
    attention: Any, own: Projections, x: Float[Tensor, "batch len width"], *, memory: Memory, held: Held | None
) -> Float[Tensor, "batch len width"]:
    """What an attention to a memory gives, for those who watch it."""

    def heads(rows: Tensor, layer: Layer, count: int) -> Tensor:
        found: Tensor = project(rows, *layer, path=NATIVE).unflatten(-1, (count, -1)).transpose(1, 2)
        return found

    query = heads(x, own.sources[0], own.num_heads)
    if held is None:
        key, value = (heads(memory.states, layer, own.num_kv_heads) for layer in own.sources[1:])
    else:
        key, value = held.key, held.value
    output, _ = attend_for(attention, query, key, value, memory.mask, own.dropout, own.scale, is_causal=False)
    return project(output.flatten(-2), *own.last, path=NATIVE)


def _fed(parts: LayerParts, x: Float[Tensor, "batch len width"]) -> Float[Tensor, "batch len width"]:
    """What a feedforward gives that a step knows."""
    *gate, expand, contract = parts.feedforward
    found = project_activate_project(
        x, *expand, *contract, gate=gate[0] if gate else None, activation=parts.activation, dropout=parts.hidden
    )
    assert found is not None
    return found
