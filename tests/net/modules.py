"""clearhead's modules in few combinations of their options, from a covering array each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

import clearhead as ch
from tests.net.calls import Call
from tests.net.covering import covering

__all__ = ["MODULES", "Module", "distinct", "modules", "tokens", "typical"]

WIDTH, HEADS, BATCH, VOCAB, MAX_LEN, MEMORY = 32, 4, 2, 29, 80, 9

_LENGTHS: Final = (17, 1, 2, 65)
_SCORES: Final[Mapping[str, Callable[[], Any]]] = {
    "no rule": lambda: (),
    "alibi": lambda: ch.Alibi(HEADS),
    "soft cap": lambda: ch.SoftCap(2.0),
    "relative": lambda: ch.RelativeBias(nn.Parameter(torch.linspace(-1, 1, HEADS * 7).view(HEADS, 7))),
    "sink": lambda: ch.Sink(nn.Parameter(torch.linspace(-1, 1, HEADS))),
}
_MASKS: Final = ("no mask", "causal", "window", "padding", "dense", "empty rows")
_CALL: Final = {
    "length": _LENGTHS,
    "dtype": (torch.float32, torch.bfloat16),
    "training": (False, True),
    "dropout": (0.2, 0.0),
}
_ATTENTION: Final = {
    "num_kv_heads": (None, 2, 1),
    "rotary": (None, True),
    "bias": (True, False),
    "scores": tuple(_SCORES),
}
_LAYER: Final = {
    **_ATTENTION,
    "norm_first": (True, False),
    "norm": ("layer", "rms"),
    "gated": (False, True),
    "activation": ("gelu", "relu", "silu"),
}
_MODEL: Final = {"norm_first": (True, False), "positions": ("learned", "rotary"), "lengths": (False, True)}

MODULES: Final[Mapping[str, Mapping[str, Sequence[Any]]]] = {
    "FeedForward": {
        "gated": (False, True), "activation": ("gelu", "relu", "silu"), "bias": (True, False), **_CALL,
    },
    "MultiHeadAttention": {
        **_ATTENTION, "output_projection": (True, False), "source": ("self", "key", "key and value"), "mask": _MASKS,
        "scale": (None, 0.9),
        **_CALL,
    },
    "EncoderBlock": {**_LAYER, "mask": _MASKS, **_CALL},
    "DecoderBlock": {**_LAYER, "cross_attention": (False, True), "mask": ("no mask", "window"), **_CALL},
    "Encoder": {**_LAYER, "lengths": (False, True), "mask": ("no mask", "window"), **_CALL},
    "Decoder": {**_LAYER, "cross_attention": (False, True), "lengths": (False, True), **_CALL},
    "LanguageModel": {**_MODEL, "num_kv_heads": (None, 2), "tie_embeddings": (True, False), "norm": ("layer", "rms"),
                      "gated": (False, True), **_CALL},
    "SequenceClassifier": {**_MODEL, "pooling": ("mean", "first"), "neighbours": (0, 1), **_CALL},
    "EncoderDecoder": {**_MODEL, **_CALL},
}  # fmt: skip


@dataclass(frozen=True)
class Module:
    """A module of the table, by the name of its class and its options."""

    kind: str
    options: tuple[tuple[str, Any], ...]

    @property
    def values(self) -> dict[str, Any]:
        return dict(self.options)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.values["dtype"]
        return dtype

    @property
    def drops(self) -> bool:
        """Whether its calls use random numbers."""
        return bool(self.values["training"] and self.values["dropout"])

    @property
    def gradient_jumps(self) -> bool:
        """Whether bfloat16's rounding decides on which side of 0, where the gradient jumps, a ReLU's input is,
        which is so without a bias."""
        values = self.values
        return values.get("activation") == "relu" and not values["bias"] and self.dtype is torch.bfloat16

    @property
    def name(self) -> str:
        shown = (f"{name}={value}".replace("torch.", "") for name, value in self.options)
        return f"{self.kind}({', '.join(shown)})"

    def make(self) -> nn.Module:
        """The module, with weights of its options' seed, in its dtype and mode."""
        return copy.deepcopy(_made(self))

    def call(self) -> Call:
        """A call of the length, with the masks and lengths that the options name."""
        return _CALLS[self.kind](self.values).to(self.values["dtype"])


@cache
def modules(kind: str, strength: int = 2) -> tuple[Module, ...]:
    """The rows of a class: every pair of values, or every triple."""
    return tuple(Module(kind, tuple(row.items())) for row in covering(MODULES[kind], strength))


def distinct(module: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights that differ in every part and make attention far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for part in module.parameters():
            part.add_(torch.randn(part.shape, generator=generator) * (0.3 if part.dim() == 1 else 0.15))
    return module


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _ids(length: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(seed))


def _lengths(length: int) -> Tensor:
    return torch.tensor([length, (length + 1) // 2])


def _mask(name: str, length: int, k_len: int) -> Any:
    generator = torch.Generator().manual_seed(5)
    allowed = torch.rand(length, k_len, generator=generator) < 0.5
    if name == "dense":
        allowed[:, 0] = True
    elif name == "empty rows":
        allowed[::2] = False
    return {
        "no mask": None,
        "causal": ch.Causal(),
        "window": ch.Window(3, 1),
        "padding": ch.Padding(_lengths(k_len)),
    }.get(name, ch.Dense(allowed))


@cache
def _made(row: Module) -> nn.Module:
    values, cls = row.values, getattr(ch.nn, row.kind)
    of_call = ("length", "dtype", "training", "mask", "source", "lengths")
    options = {name: value for name, value in values.items() if name not in of_call}
    if "scores" in options:
        options["scores"] = _SCORES[options["scores"]]()
    first: tuple[int, ...] = {
        "FeedForward": (WIDTH,),
        "MultiHeadAttention": (WIDTH, HEADS),
        "EncoderBlock": (WIDTH, HEADS),
        "DecoderBlock": (WIDTH, HEADS),
        "Encoder": (WIDTH, HEADS, 2),
        "Decoder": (WIDTH, HEADS, 2),
        "LanguageModel": (VOCAB, WIDTH, HEADS, 2),
        "SequenceClassifier": (VOCAB, WIDTH, HEADS, 2, 5),
        "EncoderDecoder": (VOCAB, VOCAB, WIDTH, HEADS, 1),
    }[row.kind]
    if row.kind in ("LanguageModel", "SequenceClassifier", "EncoderDecoder"):
        options["max_len"] = MAX_LEN
    if row.kind == "MultiHeadAttention" and values["source"] == "key and value":
        options.update(key_dim=WIDTH - 8, value_dim=WIDTH + 8)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = distinct(cls(*first, **options))
        if values.get("activation") == "relu":
            _away_from_zero(module)
    return module.to(values["dtype"]).train(values["training"])


def _away_from_zero(module: nn.Module) -> None:
    """Move hidden values away from 0, where a ReLU's gradient jumps and rounding would decide."""
    for part in module.modules():
        if isinstance(part, ch.nn.FeedForward):
            layer = part.expand if part.gate is None else part.gate
            with torch.no_grad():
                layer.weight.mul_(0.3)
                if layer.bias is not None:
                    layer.bias.copy_(torch.randn(layer.bias.shape).sign() * 2.0)


def _of_attention(values: Mapping[str, Any]) -> Call:
    length, source = values["length"], values["source"]
    k_len = length if source == "self" else MEMORY
    arguments = {"query": tokens(BATCH, length, WIDTH), "mask": _mask(values["mask"], length, k_len)}
    if source != "self":
        narrow = 8 if source == "key and value" else 0
        arguments["key"] = tokens(BATCH, k_len, WIDTH - narrow, seed=2)
        positional = values["rotary"] or values["scores"] in ("alibi", "relative")
        arguments["query_offset"] = 3 if positional or values["mask"] in ("causal", "window") else None
    if source == "key and value":
        arguments["value"] = tokens(BATCH, k_len, WIDTH + 8, seed=3)
    return Call(arguments)


def _of_layer(values: Mapping[str, Any]) -> Call:
    length = values["length"]
    arguments: dict[str, Any] = {"x": tokens(BATCH, length, WIDTH)}
    if "mask" in values:
        arguments["mask"] = _mask(values["mask"], length, length)
    if values.get("cross_attention"):
        arguments["memory"] = tokens(BATCH, MEMORY, WIDTH, seed=2)
    if values.get("lengths"):
        arguments["lengths"] = _lengths(length)
    return Call(arguments)


def _of_ids(values: Mapping[str, Any]) -> Call:
    arguments: dict[str, Any] = {"ids": _ids(values["length"])}
    if values["lengths"]:
        arguments["lengths"] = _lengths(values["length"])
    return Call(arguments)


def _of_pair(values: Mapping[str, Any]) -> Call:
    arguments: dict[str, Any] = {"source": _ids(11), "target": _ids(values["length"], seed=2)}
    if values["lengths"]:
        arguments.update(source_lengths=_lengths(11), target_lengths=_lengths(values["length"]))
    return Call(arguments)


_CALLS: Final[Mapping[str, Callable[[Mapping[str, Any]], Call]]] = {
    "MultiHeadAttention": _of_attention,
    "FeedForward": _of_layer,
    "EncoderBlock": _of_layer,
    "DecoderBlock": _of_layer,
    "Encoder": _of_layer,
    "Decoder": _of_layer,
    "LanguageModel": _of_ids,
    "SequenceClassifier": _of_ids,
    "EncoderDecoder": _of_pair,
}


@cache
def typical(kind: str) -> tuple[Module, ...]:
    """Two float32 modules of a class in eval mode: with the options' defaults, and with others in their place."""
    defaults = {name: values[0] for name, values in MODULES[kind].items()} | {"dropout": 0.0}
    others = {
        "num_kv_heads": 2, "rotary": True, "norm": "rms", "gated": True, "activation": "silu", "bias": False,
        "norm_first": False, "positions": "rotary", "cross_attention": True, "source": "key", "tie_embeddings": False,
    }  # fmt: skip
    changed = {name: others.get(name, value) for name, value in defaults.items()}
    return tuple(Module(kind, tuple(options.items())) for options in (defaults, changed))
