"""The suites: their rows, and the floors that their ratios have to reach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from clearhead.benchmark.decoding_rows import PLAIN_LAYERS, decoding_rows
from clearhead.benchmark.encoders import STACK, SWAPPED
from clearhead.benchmark.flex_rows import COMPILED, PLAIN_CAUSAL, flex_rows
from clearhead.benchmark.function_rows import ALIBI, DENSE, LEARNED, MADE, function_rows
from clearhead.benchmark.hugging_face import ONNX_MODEL, SDPA_MODEL, CausalRow, EncoderModelRow
from clearhead.benchmark.layer_rows import LINEAR, layer_rows
from clearhead.benchmark.linear_rows import FULL, linear_rows
from clearhead.benchmark.model_peers.contenders import INT4, INT8, PEERS
from clearhead.benchmark.model_peers.rows import HALF_FILLED, peer_rows
from clearhead.benchmark.observed import MATERIALISED, PLAIN, WANTS, ObserveRow
from clearhead.benchmark.onnx_runtime import ONNX_OPERATORS
from clearhead.benchmark.peers import MODULE, OURS, SDPA, SDPA_WINDOW
from clearhead.benchmark.rows import EncoderRow, ModuleRow, SuiteRow, TensorRow
from clearhead.benchmark.small_layer_rows import (
    DECODER_LAYER,
    ENCODER_LAYER,
    decoder_layer_rows,
    encoder_layer_rows,
)
from clearhead.benchmark.varlen_rows import PADDED, PADDED_SDPA, varlen_rows
from clearhead.benchmark.weights_rows import EAGER_WEIGHTS, weights_rows

__all__ = ["PEERS_SUITE", "SUITES", "Floor", "Suite"]

PEERS_SUITE = "peers"

_DTYPES = (torch.float32, torch.bfloat16)
_FORWARD = ((8, 12, 128, 64), (8, 12, 512, 64), (1, 12, 2048, 64), (1, 12, 8192, 64), (1, 8, 2048, 128))
_TRAINING = tuple((b, h, min(length, 4096), d) for b, h, length, d in _FORWARD)
_DROPPED = ((8, 12, 512, 64), (1, 12, 2048, 64))
_DECODED = ((1, 4096), (16, 2048))
_MODULES = ((32, 100, 512, 8), (8, 128, 768, 12), (8, 512, 768, 12), (1, 2048, 768, 12), (2, 1024, 1024, 16))
#: The same for few tokens, where Python's overhead dominates the time.
_FEW_TOKENS = ((1, 8, 32, 4), (1, 16, 64, 4), (16, 32, 64, 4), (4, 32, 128, 4), (12, 64, 128, 4), (2, 64, 256, 8))
#: Batch, longest sequence, width and heads of stacks of layers with GELU.
_STACKS = ((16, 256, 512, 8), (32, 64, 128, 4))


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Required speed of clearhead relative to its peers; the fastest peer of a row counts.

    Args:
        group: the group of rows that it covers.
        against: the peers.
        each: the ratio that every row has to reach.
        mean: the ratio that the geometric mean has to reach.
        share: the share of the machine's product rate that every row has to reach.
        only: a part of the title; rows without it are not covered.
        ours: name of clearhead's contender.
    """

    group: str
    against: tuple[str, ...] = ()
    each: float | None = None
    mean: float | None = None
    share: float | None = None
    only: str = ""
    ours: str = OURS

    @property
    def label(self) -> str:
        """The rows, and clearhead's contender where it has a name of its own."""
        rows = f"{self.group}, {self.only}" if self.only else self.group
        return rows if self.ours == OURS else f"{rows} ({self.ours})"

    def covers(self, title: str, group: str) -> bool:
        """Whether a row is one of its rows."""
        return group == self.group and self.only in title


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Rows that are measured together, with their floors.

    Args:
        about: what is measured, in a line.
        rows: makes the rows.
        floors: the floors.
        in_all: whether ``--suite all`` measures it.
    """

    about: str
    rows: Callable[[], Sequence[SuiteRow]]
    floors: tuple[Floor, ...]
    in_all: bool = True


def _forward() -> list[SuiteRow]:
    return [
        TensorRow(
            shape=shape,
            causal=causal,
            dtype=dtype,
            yardstick=True,
            peers=(SDPA, *ONNX_OPERATORS) if dtype == torch.float32 else (SDPA,),
        )
        for dtype, shape, causal in product(_DTYPES, _FORWARD, (False, True))
    ]


def _training() -> list[SuiteRow]:
    return [
        TensorRow(shape=shape, causal=causal, dtype=dtype, training=True, yardstick=True)
        for dtype, shape, causal in product(_DTYPES, _TRAINING, (False, True))
    ]


def _dropout() -> list[SuiteRow]:
    return [
        TensorRow(shape=shape, dtype=dtype, training=True, dropout=0.1, yardstick=True)
        for dtype, shape in product(_DTYPES, _DROPPED)
    ]


def _decode() -> list[SuiteRow]:
    return [
        TensorRow(shape=(batch, 32, 1, 128), kv_heads=8, k_len=k_len, dtype=dtype)
        for dtype, (batch, k_len) in product(_DTYPES, _DECODED)
    ]


def _window() -> list[SuiteRow]:
    return [
        TensorRow(shape=(1, 12, 8192, 64), causal=True, window=255, dtype=dtype, peers=(SDPA, SDPA_WINDOW))
        for dtype in _DTYPES
    ]


def _module() -> list[SuiteRow]:
    return [ModuleRow(size=size, dtype=dtype, yardstick=True) for dtype, size in product(_DTYPES, _MODULES)]


def _module_training() -> list[SuiteRow]:
    return [
        ModuleRow(size=size, dtype=dtype, training=True, dropout=dropout, yardstick=True)
        for dtype, dropout, size in product(_DTYPES, (0.0, 0.1), _MODULES)
    ]


def _module_small() -> list[SuiteRow]:
    return [
        ModuleRow(size=size, dtype=dtype, training=training)
        for dtype, training, size in product(_DTYPES, (False, True), _FEW_TOKENS)
    ]


def _encoder() -> list[SuiteRow]:
    return [
        EncoderRow(
            batch=16,
            longest=256,
            embed_dim=512,
            num_heads=8,
            num_layers=4,
            feedforward_dim=2048,
            dtype=dtype,
            dropout=dropout,
            yardstick=True,
        )
        for dtype, dropout in product(_DTYPES, (0.0, 0.1))
    ]


def _encoder_gelu() -> list[SuiteRow]:
    return [
        EncoderRow(
            batch=batch,
            longest=longest,
            embed_dim=embed_dim,
            num_heads=heads,
            num_layers=4,
            feedforward_dim=4 * embed_dim,
            dtype=dtype,
            dropout=dropout,
            activation="gelu",
        )
        for dtype, (batch, longest, embed_dim, heads), dropout in product(_DTYPES, _STACKS, (0.0, 0.1))
    ]


def _observe() -> list[SuiteRow]:
    return [
        ObserveRow(wanted=wanted, shape=(1, 12, 4096, 64), causal=causal)
        for wanted, causal in product(WANTS, (False, True))
    ]


def _models() -> list[SuiteRow]:
    sizes = ((32, 128), (1, 512))
    encoders = [
        EncoderModelRow(model=model, batch=batch, length=length)
        for model, (batch, length) in product(("BERT base", "MiniLM 6x384"), sizes)
    ]
    encoders.append(EncoderModelRow(model="MiniLM 6x384", batch=1, length=16))
    encoders += [
        EncoderModelRow(model=model, batch=32, length=64, ragged=True) for model in ("BERT base", "MiniLM 6x384")
    ]
    dtypes = (torch.float32, torch.bfloat16)
    qwen2 = (
        CausalRow(decode=one, model="Qwen2.5 0.5B", layers=8, dtype=dtype) for dtype in dtypes for one in (False, True)
    )
    others = (
        CausalRow(decode=True, model="Qwen2.5 0.5B", layers=8, batch=4, length=256),
        CausalRow(decode=True, model="Whisper base", layers=6, length=64),
        *(CausalRow(decode=one, model="Gemma 3 270M", layers=18) for one in (False, True)),
        CausalRow(decode=True, model="Granite", layers=8),
    )
    return [*encoders, CausalRow(decode=False), CausalRow(decode=True), *qwen2, *others]


#: Largest time of attention with the statistics of each row, relative to attention without them.
_MOST_EXPENSIVE = dict(zip(WANTS, (1.15, 1.6, 1.3, 1.8, 2.5), strict=True))
#: For each suite: group, clearhead's contender, peers, ratio of each row, ratio of the geometric mean.
_RATIOS: dict[str, tuple[tuple[str, str, tuple[str, ...], float | None, float | None], ...]] = {
    "forward": (
        ("float32", OURS, (SDPA,), 2.0, 2.4),
        ("bfloat16", OURS, (SDPA,), 3.5, 4.5),
        ("float32", OURS, ONNX_OPERATORS, 1.1, None),
    ),
    "training": (
        ("float32", OURS, (SDPA,), None, 2.3),
        ("bfloat16", OURS, (SDPA,), None, 3.0),
    ),
    "dropout": (
        ("float32", OURS, (SDPA,), 6.0, None),
        ("bfloat16", OURS, (SDPA,), 9.0, None),
    ),
    "decode": (
        ("float32", OURS, (SDPA,), 2.0, None),
        ("bfloat16", OURS, (SDPA,), 10.0, None),
    ),
    "window": (
        ("float32", OURS, (SDPA,), 20.0, None),
        ("bfloat16", OURS, (SDPA,), 20.0, None),
    ),
    "module": (
        ("float32", OURS, (MODULE,), 1.8, 2.5),
        ("bfloat16", OURS, (MODULE,), None, 1.6),
    ),
    "module-training": (
        ("float32", OURS, (MODULE,), None, 2.2),
        ("float32, dropout 0.1", OURS, (MODULE,), None, 3.5),
        ("bfloat16", OURS, (MODULE,), None, 2.3),
        ("bfloat16, dropout 0.1", OURS, (MODULE,), None, 4.0),
    ),
    "module-small": (
        ("float32", OURS, (MODULE,), 1 / 1.03, None),
        ("bfloat16", OURS, (MODULE,), 1 / 1.03, None),
    ),
    **{
        suite: tuple(
            (group, ours, (peer,), 1 / 1.03, None)
            for group in ("float32", "float32, training", "bfloat16", "bfloat16, training")
            for ours in (OURS, SWAPPED)
        )
        for suite, peer in (("layer-small", ENCODER_LAYER), ("decoder-small", DECODER_LAYER))
    },
    "decoding": (
        ("float32", OURS, (PLAIN_LAYERS,), 1 / 1.03, None),
        ("bfloat16", OURS, (PLAIN_LAYERS,), 1 / 1.03, None),
    ),
    "encoder-gelu": (
        ("float32", OURS, (STACK,), 1.5, None),
        ("bfloat16", OURS, (STACK,), 1.5, None),
    ),
    "few-tokens": (
        ("float32", OURS, (LINEAR,), 1 / 1.03, None),
        ("bfloat16", OURS, (LINEAR,), 1 / 1.03, None),
    ),
    "observe": (
        *((wanted, OURS, (PLAIN,), round(1 / dearest, 3), None) for wanted, dearest in _MOST_EXPENSIVE.items()),
        *((wanted, OURS, (MATERIALISED,), 6.0, None) for wanted in WANTS),
    ),
    "models": (
        ("encoder", OURS, (SDPA_MODEL,), 1.9, None),
        ("encoder", OURS, (ONNX_MODEL,), 1.0, None),
        ("encoder, few tokens", OURS, (SDPA_MODEL,), 1.0, None),
        ("encoder, ragged", OURS, (SDPA_MODEL, ONNX_MODEL), 1.0, None),
        ("prefill", OURS, (SDPA_MODEL,), 2.0, None),
        ("decode", OURS, (SDPA_MODEL,), 1.0, None),
        *(
            (f"{what}, Llama's kind{dtype}", OURS, (SDPA_MODEL,), 1.0, None)
            for what in ("prefill", "decode")
            for dtype in ("", ", bfloat16")
        ),
        ("decode, Llama's kind, padded", OURS, (SDPA_MODEL,), 1.0, None),
        *(
            (group, OURS, (SDPA_MODEL,), 1.0, None)
            for group in (
                "decode, with a memory",
                "prefill, windows",
                "decode, windows",
                "decode, layers of other kinds",
            )
        ),
    ),
    "varlen": tuple(
        (group, OURS, peers, ratio, None)
        for group in ("float32", "float32, training", "bfloat16", "bfloat16, training")
        for peers, ratio in (((PADDED_SDPA,), 1.8), ((PADDED,), 1.0))
    ),
    "linear": (("linear, training, from 1024 tokens", OURS, (FULL,), 1.0, None),),
    "function": ((ALIBI, OURS, (DENSE,), round(1 / 3, 3), None), (LEARNED, OURS, (MADE,), round(1 / 3, 3), None)),
    "flex": (("forward", OURS, (COMPILED,), 1.0, None), ("training", OURS, (PLAIN_CAUSAL,), round(1 / 3, 3), None)),
    "weights": tuple(
        (group, OURS, (EAGER_WEIGHTS,), round(1 / 1.5, 3), None) for group in ("weights", "weights, training")
    ),
    # A model in float32 or bfloat16 is first, or within 2 % of the first.
    PEERS_SUITE: tuple(
        (dtype, OURS, tuple(peer.name for peer in PEERS if peer.rows == dtype and peer.name != OURS), 0.98, None)
        for dtype in ("float32", "bfloat16")
    ),
    "encoder": (
        ("float32", OURS, (STACK,), 3.0, None),
        ("float32", SWAPPED, (STACK,), 3.0, None),
        ("bfloat16", OURS, (STACK,), 3.0, None),
        ("bfloat16", SWAPPED, (STACK,), 3.0, None),
    ),
}
#: For each suite: group, part of the title, share of the machine's product rate.
_SHARES = {
    "forward": (("float32", "1x12x8192x64 full", 0.85), ("bfloat16", "1x12x8192x64 full", 0.78)),
    "linear": (("linear, training, from 1024 tokens", "", 0.5), ("linear, forward, from 1024 tokens", "", 0.5)),
}
#: For each suite: group, part of the title, clearhead's contender, peers, ratio of each row. 0.98 is level with a peer,
#: within the noise of a run.
_PARTS = {
    PEERS_SUITE: (
        *((dtype, HALF_FILLED, OURS, ("OpenVINO",), 1.3) for dtype in ("float32", "bfloat16")),
        ("int8", "x128", INT8, ("OpenVINO",), 0.98),
        ("int8", HALF_FILLED, INT8, ("OpenVINO",), 1.3),
        ("int8", "a token", INT8, ("OpenVINO", "llama.cpp q8_0"), 0.98),
        ("int8", "a token", INT4, ("llama.cpp q4_0",), 0.98),
    )
}
_ROWS: tuple[tuple[str, str, Callable[[], Sequence[SuiteRow]]], ...] = (
    ("forward", "attention forward, full and causal, against SDPA and ONNX Runtime", _forward),
    ("training", "attention forward and backward, full and causal, against SDPA", _training),
    ("dropout", "attention forward and backward with dropout 0.1, against SDPA", _dropout),
    ("decode", "one query over a long cache, grouped heads, against SDPA", _decode),
    ("window", "Causal & Window(255) at 8192 tokens, against SDPA doing all that is causal", _window),
    ("module", "MultiHeadAttention forward, against nn.MultiheadAttention without weights", _module),
    (
        "module-training",
        "MultiHeadAttention forward and backward, dropout 0 and 0.1, against nn.MultiheadAttention",
        _module_training,
    ),
    (
        "module-small",
        "MultiHeadAttention of few tokens, forward and with backward, against nn.MultiheadAttention",
        _module_small,
    ),
    (
        "layer-small",
        "a small encoder layer, forward and with backward, against nn.TransformerEncoderLayer",
        encoder_layer_rows,
    ),
    (
        "decoder-small",
        "a small decoder layer with a memory, forward and with backward, against nn.TransformerDecoderLayer",
        decoder_layer_rows,
    ),
    (
        "decoding",
        "tokens one by one through four layers with caches, against torch's layers, SDPA and a cache",
        decoding_rows,
    ),
    (
        "encoder",
        "training step of four encoder layers on a half-filled batch, against nn.TransformerEncoder",
        _encoder,
    ),
    (
        "encoder-gelu",
        "training step of four encoder layers with GELU, wide and narrow, against nn.TransformerEncoder",
        _encoder_gelu,
    ),
    ("few-tokens", "a linear layer on 1 to 256 tokens, against torch's own", layer_rows),
    ("observe", "attention with statistics, against the same without and against weights materialised", _observe),
    ("models", "models of transformers after swap, against their sdpa and ONNX Runtime", _models),
    ("weights", "models of transformers that return their weights, after swap, against eager attention", weights_rows),
    ("linear", "the linear family in chunks, causal, against clearhead's full attention", linear_rows),
    ("varlen", "attention on a half-filled batch, packed, against padded and nested tensors", varlen_rows),
    ("function", "a user's own function, forward and backward, against SDPA with the bias in full", function_rows),
    ("flex", "functional.flex_attention, against torch's compiled; in training against plain causal", flex_rows),
    (PEERS_SUITE, "whole models, against the libraries of the extra 'peers'; not part of all", peer_rows),
)


def _floors(suite: str) -> tuple[Floor, ...]:
    return (
        *(
            Floor(group=group, ours=ours, against=against, each=each, mean=mean)
            for group, ours, against, each, mean in _RATIOS[suite]
        ),
        *(Floor(group=group, only=only, share=share) for group, only, share in _SHARES.get(suite, ())),
        *(
            Floor(group=group, only=only, ours=ours, against=against, each=each)
            for group, only, ours, against, each in _PARTS.get(suite, ())
        ),
    )


SUITES: dict[str, Suite] = {
    name: Suite(about=about, rows=rows, floors=_floors(name), in_all=name != PEERS_SUITE) for name, about, rows in _ROWS
}
"""Every suite by its name."""
