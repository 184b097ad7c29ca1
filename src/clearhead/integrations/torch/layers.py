"""torch's transformer layers and stacks with the same parameters and arguments, on our attention.

A layer keeps its order of attention, feedforward and norms. A stack reads its masks once instead of once a layer, and
packs the real tokens of a padded batch, so that every GEMM, norm and attention works on real tokens only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from clearhead.choices import is_invariant
from clearhead.functional.jagged import is_jagged
from clearhead.integrations.recast import stands_for
from clearhead.integrations.torch.attention import SwappedMultiheadAttention, mask_reader
from clearhead.integrations.torch.jagged import JaggedArguments, jagged_mask
from clearhead.integrations.torch.masks import Meaning, may_look, padded_keys
from clearhead.integrations.torch.parts import LINEARS, is_plain
from clearhead.integrations.torch.unpadded import Packed
from clearhead.invariance import eager_if_invariant
from clearhead.masks import Causal, Mask
from clearhead.nn.dropout import Dropout
from clearhead.nn.feedforward import drop_of, in_one_step, name_of
from clearhead.nn.fused import fused_layers, of_parts, takes_parts
from clearhead.nn.fused_blocks import MOST_ELEMENTS
from clearhead.nn.linear import Linear, layer_of, refuse_hooks
from clearhead.nn.norm import LayerNorm, RMSNorm, apply_norm, norm_of
from clearhead.nn.reading import cached_reading, is_frozen, no_gradients_if_frozen
from clearhead.nn.spec import LayerParts, Stack
from clearhead.shapes import Float
from clearhead.torch_private import hooks_of, is_hooked, modules_are_hooked
from clearhead.watch import laid_out, shown_padding, watched

__all__ = [
    "SwappedTransformerDecoder",
    "SwappedTransformerDecoderLayer",
    "SwappedTransformerEncoder",
    "SwappedTransformerEncoderLayer",
]


#: Names of the attentions in torch's layers: self-attention, and attention to a memory.
ATTENTIONS: Final = ("self_attn", "multihead_attn")


@stands_for(nn.TransformerEncoderLayer)
class SwappedTransformerEncoderLayer(nn.TransformerEncoderLayer):
    """``nn.TransformerEncoderLayer`` without torch's fast path of eval mode, which bypasses its attention; put in
    place by ``swap``, not made directly."""

    @eager_if_invariant
    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | Mask | Meaning | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """As ``nn.TransformerEncoderLayer.forward``; ``src`` may be jagged."""
        if is_jagged(src):
            return _jagged_encoder(self, "src_mask", src, src_mask, src_key_padding_mask, is_causal)
        if src.is_nested:
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)  # type: ignore[arg-type]
        fused = _fused(self, [self], (src,), [(src_mask, src_key_padding_mask, is_causal)])
        if fused is not None:
            return fused
        _refuse_hooked(self)
        if self.norm_first:
            src = src + self._sa_block(self.norm1(src), src_mask, src_key_padding_mask, is_causal)  # type: ignore[arg-type]
            return src + self._ff_block(self.norm2(src))
        src = self.norm1(src + self._sa_block(src, src_mask, src_key_padding_mask, is_causal))  # type: ignore[arg-type]
        out: Tensor = self.norm2(src + self._ff_block(src))
        return out

    def _ff_block(self, x: Tensor) -> Tensor:
        output: Tensor = self.dropout2(_feedforward(self, x))
        return output


@stands_for(nn.TransformerDecoderLayer)
class SwappedTransformerDecoderLayer(nn.TransformerDecoderLayer):
    """``nn.TransformerDecoderLayer`` whose attention and GEMMs are ours; put in place by ``swap``."""

    @eager_if_invariant
    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | Mask | Meaning | None = None,
        memory_mask: Tensor | Mask | Meaning | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """As ``nn.TransformerDecoderLayer.forward``; ``tgt`` and ``memory`` may be jagged."""
        if is_jagged(tgt):
            paddings = (tgt_key_padding_mask, memory_key_padding_mask)
            hints = (tgt_is_causal, memory_is_causal)
            return _jagged_decoder(self, (tgt, memory), (tgt_mask, memory_mask), paddings, hints)
        own_mask, other = (
            (tgt_mask, tgt_key_padding_mask, tgt_is_causal),
            (memory_mask, memory_key_padding_mask, memory_is_causal),
        )
        fused = _fused(self, [self], (tgt, memory), [own_mask, other])
        if fused is not None:
            return fused
        _refuse_hooked(self)
        # In torch's order: masks, padding masks, hints.
        theirs: Any = chain.from_iterable(zip(own_mask, other, strict=True))
        return super().forward(tgt, memory, *theirs)

    def _ff_block(self, x: Tensor) -> Tensor:
        output: Tensor = self.dropout3(_feedforward(self, x))
        return output


def _refuse_hooked(layer: nn.Module) -> None:
    """Raise under ``set_invariant(True)`` where hooks let torch compute norms and activations of a layer."""
    if is_invariant() and (modules_are_hooked() or any(map(is_hooked, [*layer.modules()][1:]))):
        refuse_hooks(type(layer).__name__)


def _jagged_encoder(
    module: nn.TransformerEncoderLayer | nn.TransformerEncoder,
    argument: str,
    src: Tensor,
    mask: Tensor | Mask | Meaning | None,
    padding: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """A layer's or a stack's call with jagged tokens."""
    name = type(module).__name__
    jagged = JaggedArguments.of(
        name,
        {argument: ("src", "src")},
        {"src": src, argument: jagged_mask(name, argument, mask, is_causal)},
        batch_first=_is_batch_first(module),
        padding={"src_key_padding_mask": padding},
    )
    return jagged.restored(module(**jagged.arguments))


def _jagged_decoder(
    module: nn.TransformerDecoderLayer | nn.TransformerDecoder,
    tokens: tuple[Tensor, Tensor],
    masks: tuple[Tensor | Mask | Meaning | None, Tensor | Mask | Meaning | None],
    paddings: tuple[Tensor | None, Tensor | None],
    hints: tuple[bool, bool],
) -> Tensor:
    """A layer's or a stack's call with jagged tokens; each pair is that of the tokens and that of the memory."""
    name = type(module).__name__
    arguments = ("tgt_mask", "memory_mask")
    read = zip(arguments, masks, hints, strict=True)
    jagged = JaggedArguments.of(
        name,
        {"tgt_mask": ("tgt", "tgt"), "memory_mask": ("tgt", "memory")},
        dict(zip(("tgt", "memory"), tokens, strict=True)) | {each[0]: jagged_mask(name, *each) for each in read},
        batch_first=_is_batch_first(module),
        padding=dict(zip(("tgt_key_padding_mask", "memory_key_padding_mask"), paddings, strict=True)),
    )
    return jagged.restored(module(**jagged.arguments))


def _is_batch_first(module: nn.Module) -> bool:
    """Whether the attentions of a layer, or of a stack's first layer, are batch first."""
    (layer, *_) = getattr(module, "layers", [module])
    return bool(layer.self_attn.batch_first)


#: ``attn_mask``, ``key_padding_mask`` and ``is_causal`` of an attention.
_Said = tuple[Tensor | Mask | Meaning | None, Tensor | None, bool]


def _fused(
    owner: nn.Module,
    layers: Sequence[SwappedTransformerEncoderLayer | SwappedTransformerDecoderLayer],
    tokens: Sequence[Tensor],
    said: Sequence[_Said],
) -> Tensor | None:
    """The output of layers whose parts are plain, fused; None otherwise. A single one may be observed.

    Args:
        owner: the single layer, or the list of the layers.
        layers: some of ours.
        tokens: their own and, of decoders, the memory.
        said: the mask arguments of each attention of a layer.
    """
    if torch.compiler.is_compiling() or not is_plain(*tokens):
        return None
    by_layer = [[getattr(layer, name) for name in ATTENTIONS[: len(said)]] for layer in layers]
    attentions = [attention for of_layer in by_layer for attention in of_layer]
    # Parametrized weights are computed anew for each call: not cached.
    if not all(
        _is_seen_as_called(attention, tokens[: place + 1])
        for of_layer in by_layer
        for place, attention in enumerate(of_layer)
    ):
        return None

    def read() -> Stack | None:
        read_layers = [_parts_of(*each, tokens[0]) for each in zip(layers, by_layer, strict=True)]
        if None in read_layers or len({attention.batch_first for attention in attentions}) > 1:
            return None
        return Stack([parts for parts in read_layers if parts is not None])

    key = len(said), tokens[0].shape[-1], tokens[0].dtype
    stack = cached_reading(owner, key, read, may_be_hooked=lambda: (owner, *attentions))
    if stack is None:
        return None
    meanings = [
        _meaning(attention, tokens[0], keys, masks_of_one)
        for attention, keys, masks_of_one in zip(by_layer[0], tokens, said, strict=True)
    ]
    if any(meaning.scores for meaning in meanings):
        return None
    masks, laid = [meaning.mask for meaning in meanings], attentions[0].by_batch(*tokens)
    if watched() or takes_parts() or any(map(is_hooked, attentions)):
        if len(layers) > 1:
            return None
        (layer,) = layers
        sublayers = [partial(_attended, *each) for each in zip(attentions, (None, *tokens[1:]), meanings, strict=True)]
        output = of_parts(laid, stack, masks, [*sublayers, partial(_feedforward, layer)])
    else:
        output = fused_layers(laid, stack, masks)
    return output if output is None or attentions[0].batch_first else output.transpose(0, 1).contiguous()


def _meaning(attention: SwappedMultiheadAttention, queries: Tensor, keys: Tensor, said: _Said) -> Meaning:
    mask, padding, is_causal = said
    if padding is None and not is_causal and not isinstance(mask, Tensor | Mask):
        return mask or Meaning()
    return mask_reader("MultiheadAttention", attention, queries, keys).meaning(mask, padding, is_causal)


def _attended(
    attention: SwappedMultiheadAttention,
    memory: Tensor | None,
    meaning: Meaning,
    x: Float[Tensor, "batch len width"],
) -> Float[Tensor, "batch len width"]:
    """The output of a layer's attention, called as a module for its hooks and observers."""
    (x,) = attention.by_batch(x)
    keys = x if memory is None else memory
    output: Tensor = attention(x, keys, keys, attn_mask=meaning, need_weights=False)[0]
    return attention.by_batch(output)[0]


def _is_seen_as_called(attention: nn.Module, sequences: Sequence[Tensor]) -> bool:
    """Whether attention of the first of the sequences to the last is plain, and the attention's hooks may see a packed
    batch, as clearhead's own do: a user's hook is shown the arguments as torch passes them."""
    if type(attention) is not SwappedMultiheadAttention or not attention.is_plain(*sequences):
        return False
    return not shown_padding(hooks_of(attention))


def _parts_of(
    layer: SwappedTransformerEncoderLayer | SwappedTransformerDecoderLayer,
    attentions: Sequence[SwappedMultiheadAttention],
    x: Tensor,
) -> LayerParts | None:
    """A layer's weights and options, where there is no more to its parts."""
    places = range(1, len(attentions) + 2)
    norms = [norm for place in places if (norm := norm_of(getattr(layer, f"norm{place}"), x)) is not None]
    if type(layer) not in _LAYERS:
        return None
    first, second, called = layer_of(layer.linear1), layer_of(layer.linear2), name_of(layer.activation)
    hidden, dropouts = drop_of(layer.dropout), [getattr(layer, f"dropout{place}") for place in places]
    residual_drops = [drop for each in dropouts if (drop := drop_of(each)) is not None]
    if first is None or second is None or called is None or hidden is None:
        return None
    if len(norms) < len(places) or len(residual_drops) < len(places):
        return None
    if any(_is_replaced(vars(part)) for part in (layer, *attentions)):
        return None
    read = [each.projections() for each in attentions]
    return LayerParts(read, (first, second), norms, layer.norm_first, called, tuple(residual_drops), hidden)


def _feedforward(layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer, x: Tensor) -> Tensor:
    """The feedforward of one of torch's layers without its last dropout; fused if its parts are plain."""
    output: Tensor | None = None
    if is_plain(x):
        output = in_one_step(x, layer.linear1, layer.activation, layer.dropout, layer.linear2)
    return layer.linear2(layer.dropout(layer.activation(layer.linear1(x)))) if output is None else output


_LAYERS: Final = (SwappedTransformerEncoderLayer, SwappedTransformerDecoderLayer)
#: Modules that compute each token by itself, and their ``forward``. A subclass with another one may not.
_TOKENWISE_KINDS: Final[Sequence[type[nn.Module]]] = (
    nn.Linear, Linear, *LINEARS.values(), nn.LayerNorm, nn.RMSNorm, LayerNorm, RMSNorm, nn.Identity, nn.Dropout,
    Dropout, nn.ReLU, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.Softplus,
)  # fmt: skip
_TOKENWISE: Final = frozenset(kind.forward for kind in _TOKENWISE_KINDS)
_ACTIVATIONS: Final = (functional.relu, functional.gelu, functional.silu, torch.relu, torch.tanh)


@stands_for(nn.TransformerEncoder)
class SwappedTransformerEncoder(nn.TransformerEncoder):
    """``nn.TransformerEncoder`` that reads masks once and works on real tokens; put in place by ``swap``.

    At padding the output is 0, while training as in eval mode. (torch has 0 there in eval mode, followed by the last
    norm, and otherwise what padding attends to.)
    """

    #: Whether padding is removed; with False padded tokens get what torch computes for them while training.
    leaves_padding_out = True

    @eager_if_invariant
    def forward(
        self,
        src: Tensor,
        mask: Tensor | Mask | Meaning | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """As ``nn.TransformerEncoder.forward``; ``is_causal=None`` looks at the mask. ``src`` may be jagged."""
        if is_jagged(src) and _all_ours(self.layers, SwappedTransformerEncoderLayer):
            return _jagged_encoder(self, "mask", src, mask, src_key_padding_mask, bool(is_causal))
        if not is_plain(src) or not _all_ours(self.layers, SwappedTransformerEncoderLayer):
            return super().forward(src, mask, src_key_padding_mask, is_causal)  # type: ignore[arg-type]
        if _is_watched(self):
            output = _through(
                self, src, src_mask=mask, src_key_padding_mask=src_key_padding_mask, is_causal=bool(is_causal)
            )
            return self._without_padding(output, src_key_padding_mask)
        attention = self.layers[0].self_attn
        reader = mask_reader("TransformerEncoder", attention, src, src)
        attended, padding = reader.attn_mask(mask, bool(is_causal)), reader.key_padding(src_key_padding_mask)
        real = self._real_tokens(attended, padding, src, src_key_padding_mask)
        if real is None:
            output = _through_masked(self, (src,), src_mask=attended.joined(padding))
            return self._without_padding(output, src_key_padding_mask)
        packed = Packed.of(real, batch_first=attention.batch_first)
        laid_out(packed.documents, *real.shape)
        axis, mask = (0 if attention.batch_first else 1), attended.joined(Meaning(packed.documents))
        return packed.unpack(_through_masked(self, (packed.pack(src).unsqueeze(axis),), src_mask=mask).squeeze(axis))

    def _real_tokens(
        self, attended: Meaning, padding: Meaning, src: Tensor, key_padding_mask: Tensor | None
    ) -> Tensor | None:
        """Real tokens as bool ``[batch, len]``, if packing them is equivalent and there is padding; None otherwise."""
        relative = attended.mask is None or attended.mask.relative
        if not self.leaves_padding_out or src.ndim != 3 or not relative or attended.scores or padding.scores:
            return None
        forbidden = padded_keys(key_padding_mask)
        if padding.mask is None or forbidden is None or not may_look(src) or bool(forbidden.all()):
            return None
        # Packing over a gap keeps the tokens' order but not their distances.
        if not (attended.mask is None or isinstance(attended.mask, Causal)) and not _is_one_run(~forbidden):
            return None
        # A large negative number masks a token but does not mark it as padding.
        # dense() leaves out the axes of one batch entry.
        allowed = padding.mask.dense(1, k_len := forbidden.shape[-1], query_offset=0).reshape(-1, k_len)
        return ~forbidden if torch.equal(allowed.expand_as(forbidden), ~forbidden) and _by_token(self) else None

    def _without_padding(self, output: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        forbidden = padded_keys(key_padding_mask)
        if forbidden is None or not self.leaves_padding_out:
            return output
        if output.ndim == 3 and not self.layers[0].self_attn.batch_first:
            forbidden = forbidden.transpose(0, 1)
        return output.masked_fill(forbidden[..., None], 0.0)


@stands_for(nn.TransformerDecoder)
class SwappedTransformerDecoder(nn.TransformerDecoder):
    """``nn.TransformerDecoder`` that reads masks once; put in place by ``swap``."""

    @eager_if_invariant
    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | Mask | Meaning | None = None,
        memory_mask: Tensor | Mask | Meaning | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """As ``nn.TransformerDecoder.forward``; ``tgt_is_causal=None`` looks at the mask. Both may be jagged."""
        if is_jagged(tgt) and _all_ours(self.layers, SwappedTransformerDecoderLayer):
            paddings = (tgt_key_padding_mask, memory_key_padding_mask)
            hints = (bool(tgt_is_causal), memory_is_causal)
            return _jagged_decoder(self, (tgt, memory), (tgt_mask, memory_mask), paddings, hints)
        masks: dict[str, Any] = {
            "tgt_mask": tgt_mask,
            "memory_mask": memory_mask,
            "tgt_key_padding_mask": tgt_key_padding_mask,
            "memory_key_padding_mask": memory_key_padding_mask,
            "memory_is_causal": memory_is_causal,
        }
        if not is_plain(tgt, memory) or not _all_ours(self.layers, SwappedTransformerDecoderLayer):
            return super().forward(tgt, memory, **masks, tgt_is_causal=tgt_is_causal)
        if _is_watched(self):
            return _through(self, tgt, memory, **masks, tgt_is_causal=bool(tgt_is_causal))
        attention = self.layers[0].self_attn
        own_mask, other = (mask_reader("TransformerDecoder", attention, tgt, keys) for keys in (tgt, memory))
        return _through_masked(
            self,
            (tgt, memory),
            tgt_mask=own_mask.meaning(tgt_mask, tgt_key_padding_mask, bool(tgt_is_causal)),
            memory_mask=other.meaning(memory_mask, memory_key_padding_mask, memory_is_causal),
        )


def _through_masked(
    stack: nn.TransformerEncoder | nn.TransformerDecoder, tokens: Sequence[Tensor], **masks: Meaning
) -> Tensor:
    """The layers with masks that were read: as one operator where the stack is frozen and the call not large."""
    layers, x = stack.layers, tokens[0]
    if is_frozen(stack) and len(layers) > 1 and x.numel() <= MOST_ELEMENTS:
        with no_gradients_if_frozen(stack, tokens):
            said: list[_Said] = [(mask, None, False) for mask in masks.values()]
            output = None if torch.is_grad_enabled() else _fused(layers, [*layers], tokens, said)
        if output is not None:
            return output if stack.norm is None else apply_norm(stack.norm, output)
    return _through(stack, x, *tokens[1:], **masks)


def _through(
    stack: nn.TransformerEncoder | nn.TransformerDecoder, x: Tensor, *args: Tensor, **kwargs: object
) -> Tensor:
    for layer in stack.layers:
        x = layer(x, *args, **kwargs)
    return x if stack.norm is None else apply_norm(stack.norm, x)


def _is_one_run(real: Tensor) -> bool:
    """Whether the real tokens of each sequence are contiguous."""
    begins = real[:, 1:] & ~real[:, :-1]
    return bool((begins.sum(dim=1) + real[:, 0] <= 1).all())


def _all_ours(layers: Iterable[nn.Module], kind: type[nn.Module]) -> bool:
    """Whether all layers are swapped ones that read masks in the same way; one may have been replaced since."""
    attentions = []
    for layer in layers:
        if not isinstance(layer, kind):
            return False
        attentions += [layer.get_submodule(name) for name in ATTENTIONS if hasattr(layer, name)]
    kinds = set()
    for attention in attentions:
        if not isinstance(attention, SwappedMultiheadAttention) or attention.bias_k is not None:
            return False
        kinds.add((attention.batch_first, attention.num_heads, attention.add_zero_attn))
    return len(kinds) == 1 and not attentions[0].add_zero_attn


def _by_token(stack: nn.Module) -> bool:
    """Whether all modules but attention compute tokens one by one; a norm may have been replaced since."""
    for module in stack.modules():
        if module is stack or isinstance(module, (*_LAYERS, nn.MultiheadAttention, nn.ModuleList)):
            activation = getattr(module, "activation", functional.relu)
            if isinstance(activation, nn.Module) or activation in _ACTIVATIONS:
                continue
            return False
        if type(module).forward not in _TOKENWISE:
            return False
    return True


def _is_watched(stack: nn.Module) -> bool:
    """Whether a submodule has hooks or a replaced method, which are given the padded batch. clearhead's hooks read a
    packed one."""
    return modules_are_hooked() or any(
        module is not stack and (_is_replaced(module.__dict__) or shown_padding(hooks_of(module)))
        for module in stack.modules()
    )


def _is_replaced(attributes: Mapping[str, object]) -> bool:
    """Whether a method was replaced on the object."""
    return (
        "forward" in attributes or "_sa_block" in attributes or "_mha_block" in attributes or "_ff_block" in attributes
    )
