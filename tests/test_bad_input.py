"""Bad input never crashes, never hangs, never half-writes: every argument of every public call, replaced by junk.

Junk may be accepted where it has a meaning. Otherwise the call raises one of the library's errors, on one line.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead import linear
from clearhead.record import decode

#: What stands for an argument of the wrong kind, by a name that says it.
JUNK: Final[dict[str, Callable[[], Any]]] = {
    "None": lambda: None,
    "text": lambda: "x",
    "two lines": lambda: "x\ny",
    "1.5": lambda: 1.5,
    "True": lambda: True,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "-1": lambda: -1,
    "0": lambda: 0,
    "2**63": lambda: 2**63,
    "-2**63": lambda: -(2**63),
    "10**400": lambda: 10**400,
    "empty list": lambda: [],
    "list of None": lambda: [None],
    "list of text": lambda: ["x"],
    "list of 10**400": lambda: [10**400],
    "list of lists": lambda: [[1], [2, 3]],
    "dict": lambda: {"x": 1},
    "object": object,
    "class": lambda: dict,
    "module": lambda: nn.Identity(),
    "array": lambda: np.zeros((2, 2)),
    "number tensor": lambda: torch.tensor(1.5),
    "five axes": lambda: torch.zeros(1, 1, 1, 1, 1),
    "two axes": lambda: torch.zeros(2, 2),
    "empty tensor": lambda: torch.zeros(0),
    "whole tensor": lambda: torch.ones(3, 3, dtype=torch.int64),
    "bool tensor": lambda: torch.ones(3, 3, dtype=torch.bool),
    "complex tensor": lambda: torch.zeros(2, 2, dtype=torch.complex64),
    "meta tensor": lambda: torch.zeros(2, 2, device="meta"),
    "meta whole tensor": lambda: torch.zeros(2, dtype=torch.int64, device="meta"),
}

FORM: Final = re.compile(r"[\w.]+( [&|])?: .+ must .+; got .+\. .+")

#: A call: what is called, and good arguments for it by name.
Call = tuple[Callable[..., Any], dict[str, Any]]
CALLS: Final[dict[str, Callable[[], Call]]] = {}


def call(make: Callable[[], Call]) -> Callable[[], Call]:
    CALLS[make.__name__] = make
    return make


def calls(**makers: Callable[[], Call]) -> None:
    CALLS.update(makers)


def heads() -> Tensor:
    return torch.zeros(1, 2, 3, 4)


def tokens() -> Tensor:
    return torch.zeros(1, 3, 8)


def ids() -> Tensor:
    return torch.tensor([[1, 2, 3]])


def qkv() -> dict[str, Any]:
    return {"query": heads(), "key": heads(), "value": heads()}


def entered(verb: Callable[..., Any], run: Callable[[], Any]) -> Callable[..., None]:
    """The verb of a block, with something run within it."""

    def block(**arguments: Any) -> None:
        with verb(**arguments):
            run()

    return block


@cache
def encoder() -> nn.Module:
    return ch.nn.Encoder(8, 2, 2).eval()


@cache
def language_model() -> nn.Module:
    return ch.nn.LanguageModel(10, 8, 2, 1, max_len=8).eval()


@cache
def translator() -> nn.Module:
    return ch.nn.EncoderDecoder(10, 10, 8, 2, 1, max_len=8).eval()


@cache
def classifier() -> nn.Module:
    return ch.nn.SequenceClassifier(10, 8, 2, 1, 3, max_len=8).eval()


@cache
def traced() -> Any:
    model = encoder()
    with torch.no_grad(), ch.trace(model) as trace:
        model(tokens())
    return trace


# --- masks and rules ---

calls(
    Window=lambda: (ch.Window, {"before": 1, "after": 0}),
    Prefix=lambda: (ch.Prefix, {"length": 1}),
    Global=lambda: (ch.Global, {"num_tokens": 1}),
    Strided=lambda: (ch.Strided, {"stride": 2}),
    Padding=lambda: (ch.Padding, {"lengths": [1, 2]}),
    Padding_from_tokens=lambda: (ch.Padding.from_tokens, {"real": torch.ones(2, 2, dtype=torch.bool)}),
    Documents=lambda: (ch.Documents, {"lengths": [1, 2]}),
    Documents_ids=lambda: (ch.Documents, {"ids": [0, 0, 1]}),
    Blocks=lambda: (ch.Blocks, {"table": torch.ones(2, 2, dtype=torch.bool), "size": 2}),
    Dense=lambda: (ch.Dense, {"allowed": torch.ones(2, 2, dtype=torch.bool)}),
    MaskFunction=lambda: (ch.MaskFunction, {"fn": lambda batch, head, q_pos, k_pos: q_pos >= k_pos}),
    MaskFunction_called=lambda: (
        lambda fn: ch.MaskFunction(fn).dense(2, 2),
        {"fn": lambda batch, head, q_pos, k_pos: q_pos >= k_pos},
    ),
    Mask_and=lambda: (lambda other: ch.Causal() & other, {"other": ch.Causal()}),
    Mask_or=lambda: (lambda other: ch.Causal() | other, {"other": ch.Causal()}),
    Mask_dense=lambda: (ch.Causal().dense, {"q_len": 2, "k_len": 2, "query_offset": 0, "batch": 1, "num_heads": 1}),
    Mask_picture=lambda: (ch.Causal().picture, {"q_len": 2, "k_len": 2}),
    Alibi=lambda: (ch.Alibi, {"num_heads": 2}),
    Alibi_slopes=lambda: (ch.Alibi, {"slopes": [0.5, 0.25]}),
    RelativeBias=lambda: (ch.RelativeBias, {"table": torch.zeros(2, 3)}),
    SoftCap=lambda: (ch.SoftCap, {"cap": 30.0}),
    DenseBias=lambda: (ch.DenseBias, {"bias": torch.zeros(2, 2)}),
    Sink=lambda: (ch.Sink, {"logits": [0.0, 1.0]}),
    ScoreFunction=lambda: (ch.ScoreFunction, {"fn": lambda score, batch, head, q_pos, k_pos: score}),
    ScoreFunction_called=lambda: (
        lambda fn: ch.attention(heads(), heads(), heads(), scores=ch.ScoreFunction(fn)),
        {"fn": lambda score, batch, head, q_pos, k_pos: score},
    ),
)

# --- the verbs ---

OPTIONS: Final[dict[str, Any]] = {
    "mask": ch.Causal(),
    "scores": (),
    "scale": 0.5,
    "dropout": 0.0,
    "seed": 0,
    "query_offset": 0,
    "backend": "auto",
}
LINEAR: Final[dict[str, Any]] = {"feature_map": "elu", "scale": 1.0, "state": None, "form": "auto", "chunk_size": 64}

calls(
    attention=lambda: (ch.attention, {**qkv(), **OPTIONS}),
    explain_dispatch=lambda: (ch.explain_dispatch, {**qkv(), "want": ch.Want(), **OPTIONS}),
    observe_attention=lambda: (ch.observe_attention, {**qkv(), "want": ch.Want(lse=True), **OPTIONS}),
    Want=lambda: (
        lambda **given: ch.observe_attention(heads(), heads(), heads(), want=ch.Want(**given)),
        {
            "lse": True, "max_score": True, "entropy": True, "top_k": 1, "received": True,
            "row_weights": torch.zeros(1, 1, 1, 3), "heatmap": 2, "sink": 1, "distance": True, "rows": [0],
        },
    ),
    linear_attention=lambda: (ch.linear_attention, {**qkv(), "mask": ch.Causal(), **LINEAR, "normalize": True}),
    retention=lambda: (linear.retention, {**qkv(), "mask": ch.Causal(), **LINEAR, "decay": [0.5, 0.5]}),
    gated_linear_attention=lambda: (
        linear.gated_linear_attention, {**qkv(), "mask": ch.Causal(), **LINEAR, "log_gate": -torch.ones(1, 2, 3, 4)}
    ),
    delta_attention=lambda: (
        linear.delta_attention,
        {**qkv(), "mask": ch.Causal(), **LINEAR, "feature_map": "unit", "rate": torch.ones(1, 2, 3)},
    ),
    PositiveRandomFeatures=lambda: (
        linear.PositiveRandomFeatures.draw,
        {"head_dim": 4, "num_features": 4, "orthogonal": True, "seed": 0, "scale": 1.0},
    ),
    default_decay=lambda: (linear.default_decay, {"heads": 2}),
    sinusoidal=lambda: (ch.positions.sinusoidal, {"positions": 2, "dim": 4, "dtype": torch.float32}),
    Rotary=lambda: (ch.positions.Rotary, {"base": 10.0}),
    Rotary_rotate=lambda: (ch.positions.Rotary().rotate, {"x": torch.zeros(2, 4), "first": 0}),
    pack=lambda: (ch.pack, {"x": torch.zeros(2, 2, 4), "lengths": [1, 2]}),
    unpack=lambda: (ch.unpack, {"packed": torch.zeros(1, 3, 4), "lengths": [1, 2], "max_len": 2}),
    KVCache_append=lambda: (ch.KVCache().append, {"key": heads(), "value": heads()}),
    LinearCache_update=lambda: (
        linear.LinearCache().update, {"state": linear.LinearState(matrix=torch.zeros(1, 1, 2, 2)), "tokens": 1}
    ),
    longformer=lambda: (ch.sparse.longformer, {"length": 4, "window": 2, "num_global": 1}),
    big_bird=lambda: (
        ch.sparse.big_bird,
        {"length": 4, "size": 2, "window": 1, "num_global": 1, "num_random": 1, "num_heads": 1, "seed": 0},
    ),
    covered=lambda: (
        ch.sparse.covered, {"mask": ch.Window(1), "q_len": 4, "k_len": 4, "query_offset": 0, "size": 2}
    ),
    dilated=lambda: (ch.sparse.dilated, {"stride": 2, "before": 1, "after": 0}),
    strided=lambda: (ch.sparse.strided, {"stride": 2}),
    dilated_attention=lambda: (
        ch.sparse.dilated_attention,
        {**qkv(), "stride": 2, "before": 1, "after": 0, "local": 1, "scale": 1.0, "backend": "auto"},
    ),
    routed=lambda: (
        ch.sparse.routed,
        {"query": heads(), "key": heads(), "keep": 2, "size": 2, "causal": True, "first": 0, "query_offset": 0},
    ),
    top_k_attention=lambda: (
        ch.sparse.top_k_attention,
        {**qkv(), "k": 2, "mask": None, "scores": (), "scale": 1.0, "query_offset": 0, "backend": "auto"},
    ),
)  # fmt: skip

# --- modules ---

ATTENTION: Final[dict[str, Any]] = {
    "embed_dim": 8,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 4,
    "key_dim": 8,
    "value_dim": 8,
    "bias": True,
    "output_projection": True,
}
BLOCK: Final[dict[str, Any]] = {
    "embed_dim": 8, "num_heads": 2, "feedforward_dim": 8, "dropout": 0.1, "attention_dropout": 0.1,
    "norm_first": True, "activation": "gelu", "bias": True, "num_kv_heads": 1, "scores": (), "rotary": None,
    "checkpoint_activations": False,
}  # fmt: skip
MODEL: Final[dict[str, Any]] = {
    "embed_dim": 8, "num_heads": 2, "num_layers": 1, "max_len": 4, "dropout": 0.1, "attention_dropout": 0.1,
    "feedforward_dim": 8, "norm_first": True, "positions": "learned", "checkpoint_activations": False,
}  # fmt: skip
SAMPLING: Final[dict[str, Any]] = {
    "max_new_tokens": 1,
    "temperature": 1.0,
    "top_k": 2,
    "seed": 0,
    "stop": 3,
    "cached": True,
}


def torch_encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, dim_feedforward=8)


calls(
    MultiHeadAttention=lambda: (
        ch.nn.MultiHeadAttention,
        {**ATTENTION, "dropout": 0.0, "scores": (), "rotary": None, "scale": 1.0, "backend": "auto"},
    ),
    MultiHeadAttention_called=lambda: (
        ch.nn.MultiHeadAttention(8, 2),
        {
            "query": tokens(), "key": tokens(), "value": tokens(), "mask": None, "cache": ch.KVCache(),
            "query_offset": None,
        },
    ),
    MultiHeadAttention_itself=lambda: (ch.nn.MultiHeadAttention(8, 2), {"query": tokens(), "query_offset": 0}),
    MultiHeadAttention_project=lambda: (
        ch.nn.MultiHeadAttention(8, 2, rotary=True).project, {"query": tokens(), "key": tokens(), "first": 0}
    ),
    MultiHeadAttention_from_torch=lambda: (
        ch.nn.MultiHeadAttention.from_torch, {"module": nn.MultiheadAttention(8, 2)}
    ),
    MultiHeadAttention_from_heads=lambda: (
        ch.nn.MultiHeadAttention.from_heads,
        {"heads": [(torch.eye(4), torch.eye(4), torch.eye(4))], "output": torch.eye(4), "scale": 1.0},
    ),
    MultiHeadAttention_from_head=lambda: (
        lambda weight, bias: ch.nn.MultiHeadAttention.from_heads([(torch.eye(4), (weight, bias), torch.eye(4))]),
        {"weight": torch.eye(4), "bias": torch.zeros(4)},
    ),
    LinearAttention=lambda: (ch.nn.LinearAttention, {**ATTENTION, "kind": "linear", "feature_map": "elu"}),
    LinearAttention_called=lambda: (
        ch.nn.LinearAttention(8, 2),
        {"query": tokens(), "key": tokens(), "value": tokens(), "mask": None, "cache": linear.LinearCache()},
    ),
    FeedForward=lambda: (
        ch.nn.FeedForward,
        {"embed_dim": 8, "feedforward_dim": 8, "activation": "gelu", "dropout": 0.0, "bias": True},
    ),
    FeedForward_called=lambda: (ch.nn.FeedForward(8), {"x": tokens()}),
    EncoderBlock=lambda: (ch.nn.EncoderBlock, BLOCK),
    EncoderBlock_called=lambda: (ch.nn.EncoderBlock(8, 2), {"x": tokens(), "mask": None}),
    EncoderBlock_from_torch=lambda: (ch.nn.EncoderBlock.from_torch, {"layer": torch_encoder_layer()}),
    DecoderBlock=lambda: (ch.nn.DecoderBlock, {**BLOCK, "cross_attention": True, "memory_dim": 8}),
    DecoderBlock_called=lambda: (
        ch.nn.DecoderBlock(8, 2, cross_attention=True),
        {
            "x": tokens(), "mask": None, "memory": tokens(), "memory_mask": None, "cache": ch.KVCache(),
            "memory_cache": ch.KVCache(),
        },
    ),
    Encoder=lambda: (ch.nn.Encoder, {**BLOCK, "num_layers": 1}),
    Encoder_called=lambda: (encoder(), {"x": tokens(), "lengths": [2], "mask": None}),
    Encoder_compile_blocks=lambda: (ch.nn.Encoder(8, 2, 1).compile_blocks, {"backend": "eager"}),
    Decoder=lambda: (ch.nn.Decoder, {**BLOCK, "num_layers": 1, "cross_attention": True, "memory_dim": 8}),
    Decoder_called=lambda: (
        ch.nn.Decoder(8, 2, 1, cross_attention=True),
        {"x": tokens(), "lengths": [3], "mask": None, "memory": tokens(), "memory_lengths": [2], "cache": None},
    ),
    DecoderCache=lambda: (
        lambda layers, memory: ch.nn.Decoder(8, 2, 1)(tokens(), cache=ch.nn.DecoderCache(layers, memory)),
        {"layers": [ch.KVCache()], "memory": []},
    ),
    SequenceClassifier=lambda: (
        ch.nn.SequenceClassifier,
        {
            **MODEL, "vocab_size": 10, "num_classes": 2, "embedding_dropout": 0.0, "pooling": "mean",
            "num_kv_heads": 1, "neighbours": 1, "scores": (),
        },
    ),
    SequenceClassifier_called=lambda: (classifier(), {"ids": ids(), "lengths": [2], "mask": None}),
    SequenceClassifier_encode=lambda: (classifier().encode, {"ids": ids(), "lengths": [2], "mask": None}),
    LanguageModel=lambda: (
        ch.nn.LanguageModel,
        {**MODEL, "vocab_size": 10, "tie_embeddings": True, "bias": True, "num_kv_heads": 1, "scores": ()},
    ),
    LanguageModel_called=lambda: (language_model(), {"ids": ids(), "lengths": [3], "mask": None, "cache": None}),
    LanguageModel_generate=lambda: (language_model().generate, {"ids": ids(), **SAMPLING}),
    EncoderDecoder=lambda: (
        ch.nn.EncoderDecoder, {**MODEL, "source_vocab_size": 10, "target_vocab_size": 10, "tie_embeddings": True}
    ),
    EncoderDecoder_called=lambda: (
        translator(), {"source": ids(), "target": ids(), "source_lengths": [2], "target_lengths": [3]}
    ),
    EncoderDecoder_encode=lambda: (translator().encode, {"source": ids(), "source_lengths": [2]}),
    EncoderDecoder_decode=lambda: (
        translator().decode,
        {"target": ids(), "memory": tokens(), "source_lengths": [2], "target_lengths": [3], "cache": None},
    ),
    EncoderDecoder_generate=lambda: (
        translator().generate, {"source": ids(), **SAMPLING, "start": 1, "source_lengths": [2]}
    ),
)  # fmt: skip

# --- looking inside ---

calls(
    explain=lambda: (
        lambda query, key, value, **options: ch.explain(query, key, value, **options),
        {
            **qkv(), "token": 1, "head": 0, "layer": None, "batch": 0, "tokens": ["a", "b", "c"],
            "key_tokens": ["a", "b", "c"], "mask": ch.Causal(), "scores": (), "scale": 1.0, "query_offset": 0,
            "backend": "auto",
        },
    ),
    explain_model=lambda: (
        lambda subject, x, **options: ch.explain(subject, x, **options),
        {"subject": encoder(), "x": tokens(), "token": 1, "head": 0, "layer": 0, "batch": 0, "tokens": ["a", "b", "c"]},
    ),
    explain_module=lambda: (
        lambda subject, x, **options: ch.explain(subject, x, **options),
        {"subject": ch.nn.MultiHeadAttention(8, 2), "x": tokens(), "token": 1, "layer": 0, "mask": None,
         "query_offset": 0},
    ),
    find_token=lambda: (ch.observe.find_token, {"function": "find_token", "texts": ["a", "b"], "token": "a"}),
    attention_layers=lambda: (ch.observe.attention_layers, {"model": encoder()}),
    observe=lambda: (
        entered(ch.observe, lambda: encoder()(tokens())),
        {
            "model": encoder(), "want": ch.Want(lse=True), "layers": [0], "heads": [0], "queries": [0],
            "keep": "last", "detach": True,
        },
    ),
    observe_rows=lambda: (
        lambda rows, top_k: entered(ch.observe, lambda: encoder()(tokens()))(
            model=encoder(), want=ch.Want(rows=rows, top_k=top_k)
        ),
        {"rows": [0], "top_k": 1},
    ),
    trace=lambda: (
        entered(ch.trace, lambda: encoder()(tokens())),
        {"model": encoder(), "layers": [0], "keep": "last", "record": True, "detach": True},
    ),
    Trace_item=lambda: (lambda layer: traced()[layer], {"layer": 0}),
    Trace_replace=lambda: (edited("replace"), {"point": "query", "by": torch.zeros(()), "layers": [0], "heads": [0]}),
    Trace_switch_off=lambda: (edited("switch_off"), {"heads": [0], "layers": [0]}),
    Trace_temperature=lambda: (edited("temperature"), {"temperature": 2.0, "layers": [0], "heads": [0]}),
    head_effects=lambda: (
        lambda model, x, **options: ch.observe.head_effects(model, x, **options),
        {"model": encoder(), "x": tokens(), "measure": lambda output: output.sum(), "layers": [0]},
    ),
    rollout=lambda: (ch.observe.rollout, {"traced": traced(), "tokens": [0], "residual": 0.5}),
    contributions=lambda: (
        ch.observe.contributions,
        {"points": traced()[0], "projection": encoder().blocks[0].attention, "queries": [0]},
    ),
    received_contributions=lambda: (
        ch.observe.received_contributions,
        {"points": traced()[0], "projection": encoder().blocks[0].attention},
    ),
    value_norms=lambda: (
        ch.observe.value_norms, {"points": traced()[0], "projection": encoder().blocks[0].attention}
    ),
    head_scores=lambda: (ch.observe.head_scores, {"points": traced()[0], "period": 1}),
    repeated_tokens=lambda: (
        ch.observe.repeated_tokens, {"vocab_size": 5, "period": 2, "repeats": 2, "batch": 1, "seed": 0}
    ),
    view=lambda: (
        lambda query, key, value, **options: ch.view(query, key, value, **options),
        {
            **qkv(), "tokens": ["a", "b", "c"], "key_tokens": ["a", "b", "c"], "layers": None, "heads": [0], "batch": 0,
            "mask": ch.Causal(), "scores": (), "scale": 1.0, "query_offset": 0, "values": True,
            "image": torch.zeros(1, 3), "grid": (1, 3), "grid_first": 0, "title": "x",
        },
    ),
    view_model=lambda: (
        lambda subject, x, **options: ch.view(subject, x, **options),
        {"subject": encoder(), "x": tokens(), "layers": [0], "heads": [0], "batch": 0},
    ),
    view_trace=lambda: (ch.view, {"subject": traced(), "layers": [0]}),
)  # fmt: skip


def edited(verb: str) -> Callable[..., None]:
    """A verb of a trace, with the model run after it."""

    def run(**arguments: Any) -> None:
        model = encoder()
        with ch.trace(model) as trace:
            with contextlib.suppress(ch.ClearheadError):
                model(tokens())
            getattr(trace, verb)(**arguments)
            model(tokens())

    return run


# --- other libraries' modules and masks ---

calls(
    swap=lambda: (ch.swap, {"model": torch_encoder_layer(), "leave_padding_out": True}),
    unswap=lambda: (ch.unswap, {"model": torch_encoder_layer()}),
    from_forbidden=lambda: (
        ch.bridges.from_forbidden,
        {"forbidden": torch.zeros(2, 2, 2, dtype=torch.bool), "num_heads": 2},
    ),
    from_zero_forbids=lambda: (ch.bridges.from_zero_forbids, {"mask": torch.ones(2, 2)}),
    from_key_padding=lambda: (ch.bridges.from_key_padding, {"padding": torch.zeros(2, 2, dtype=torch.bool)}),
    from_additive=lambda: (ch.bridges.from_additive, {"bias": torch.zeros(2, 2, 2), "num_heads": 2, "forbids": -1e9}),
    to_forbidden=lambda: (ch.bridges.to_forbidden, {"mask": ch.Causal(), "q_len": 2, "k_len": 2, "query_offset": 0}),
)


#: A function that can be called is no junk where one is asked for: what it raises is its own.
OWN_ERRORS: Final = {("Trace_replace", "by", "class"), ("head_effects", "measure", "class")}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Calls are thousands and tiny: threads that wait for each other would take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def complaint_about(name: str, argument: str, junk: str) -> str | None:
    """What is wrong with how junk is received; None where nothing is."""
    verb, given = CALLS[name]()
    try:
        verb(**{**given, argument: JUNK[junk]()})
    except ch.ClearheadError as failure:
        return None if FORM.fullmatch(str(failure)) else f"{junk}: says {failure}"
    except Exception as failure:
        if (name, argument, junk) in OWN_ERRORS:
            return None
        return f"{junk}: {type(failure).__name__}: {str(failure)[:80]}"
    return None


@pytest.mark.parametrize("name", CALLS)
def test_valid_input_is_accepted(name: str) -> None:
    verb, given = CALLS[name]()
    verb(**given)


def _arguments() -> Iterator[Any]:
    """Every argument of every call; all but every third are slow, beginning with another one in each call."""
    for row, (name, make) in enumerate(CALLS.items()):
        for column, argument in enumerate(make()[1]):
            slow = [pytest.mark.slow] * ((row + column) % 3 > 0)
            yield pytest.param(name, argument, id=f"{name}-{argument}", marks=slow)


@pytest.mark.parametrize(("name", "argument"), list(_arguments()))
@pytest.mark.filterwarnings("ignore")
def test_junk_is_accepted_or_raises_one_line(name: str, argument: str) -> None:
    wrong = [complaint for junk in JUNK if (complaint := complaint_about(name, argument, junk)) is not None]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("explain", {"token": np.int64(1), "head": np.int32(1), "batch": torch.tensor(0)}),
        ("explain", {"tokens": np.array(["a", "b", "c"]), "token": "c"}),
        ("explain_model", {"layer": np.int64(1)}),
        ("Window", {"before": np.int64(1), "after": torch.tensor(1)}),
        ("Mask_dense", {"q_len": np.int64(2), "query_offset": np.int64(0)}),
        ("SoftCap", {"cap": np.float32(3.0)}),
        ("Alibi", {"num_heads": np.int64(2)}),
        ("Sink", {"logits": np.float32(0.5)}),
        ("Rotary", {"base": np.int64(100)}),
        ("sinusoidal", {"positions": np.int64(3), "dim": np.int64(4)}),
        ("sinusoidal", {"positions": [0, 5]}),
        ("unpack", {"max_len": np.int64(2)}),
        ("big_bird", {"window": np.int64(3), "seed": np.int64(1), "length": np.int64(8)}),
        ("dilated_attention", {"stride": np.int64(2), "local": np.int64(1)}),
        ("top_k_attention", {"k": np.int64(2)}),
        ("MultiHeadAttention", {"num_heads": np.int64(2), "bias": np.True_, "dropout": np.float32(0.5)}),
        ("SequenceClassifier", {"num_layers": np.int64(1), "vocab_size": np.int64(9), "neighbours": np.int64(1)}),
        ("LanguageModel_generate", {"max_new_tokens": np.int64(2), "top_k": np.int64(2), "stop": np.int64(1)}),
        ("LanguageModel_generate", {"temperature": np.float32(0.5), "seed": np.int64(1)}),
        ("head_scores", {"period": np.int64(1)}),
        ("rollout", {"tokens": np.arange(2), "residual": np.float32(0.5)}),
        ("view", {"grid": [np.int64(1), 3], "grid_first": np.int64(0)}),
        ("attention", {"scale": np.float32(0.5), "dropout": np.float32(0.1), "seed": np.int64(1)}),
        ("Want", {"top_k": np.int64(1), "heatmap": np.int64(2), "sink": np.int64(1), "rows": np.arange(2)}),
        ("linear_attention", {"scale": np.float32(0.5), "chunk_size": np.int64(64), "normalize": np.False_}),
        ("retention", {"scale": np.int64(2), "decay": np.array([0.5, 0.25])}),
        ("PositiveRandomFeatures", {"head_dim": np.int64(4), "num_features": np.int64(8), "seed": np.int64(1)}),
        ("PositiveRandomFeatures", {"scale": np.float32(0.5), "orthogonal": np.True_}),
        ("default_decay", {"heads": np.int64(2)}),
        ("LinearCache_update", {"tokens": np.int64(1)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_numpy_and_torch_numbers_are_accepted(name: str, given: dict[str, Any]) -> None:
    verb, good = CALLS[name]()
    verb(**{**good, **given})


@pytest.mark.parametrize("kind", ["retention", "gated", "delta"])
def test_a_map_that_needs_a_normaliser_is_refused_where_the_module_is_built(kind: str) -> None:
    with pytest.raises(ch.UnsupportedError, match=f"feature_map must need no normaliser with kind '{kind}'"):
        ch.nn.LinearAttention(8, 2, kind=kind, feature_map="performer")


def test_a_name_that_is_no_map_is_refused_where_the_module_is_built() -> None:
    with pytest.raises(ch.UnsupportedError, match=r"^LinearAttention: feature_map must be one of .*; got 'x'\."):
        ch.nn.LinearAttention(8, 2, feature_map="x")


@pytest.mark.parametrize("argument", ["key", "value"])
def test_junk_does_not_change_a_cache(argument: str) -> None:
    for junk in JUNK.values():
        cache = ch.KVCache()
        with torch.no_grad():
            cache.append(heads(), heads())
            with contextlib.suppress(ch.ClearheadError):
                cache.append(**{"key": heads(), "value": heads(), argument: junk()})
        assert cache.length == 3
        assert repr(cache) == "KVCache(length=3, shape=[1, 2, 3, 4])"


@pytest.mark.parametrize("argument", ["state", "tokens"])
def test_junk_does_not_change_a_linear_cache(argument: str) -> None:
    good = {"state": linear.LinearState(matrix=torch.zeros(1, 1, 2, 2)), "tokens": 3}
    for junk in (None, "x", 1.5, -1, [], torch.zeros(2)):
        cache = linear.LinearCache()
        cache.update(**good)  # type: ignore[arg-type]
        with pytest.raises(ch.ShapeError, match=f"^LinearCache.update: {argument} must"):
            cache.update(**{**good, argument: junk})  # type: ignore[arg-type]
        assert cache.length == 3
        assert cache.state is good["state"]


def test_want_with_numpy_numbers_round_trips() -> None:
    given = ch.Want(top_k=np.int64(2), heatmap=np.int32(1), sink=torch.tensor(1), rows=[np.int64(0), 1])  # type: ignore[arg-type]
    assert decode(given.encode([]), []).encode([]) == ch.Want(top_k=2, heatmap=1, sink=1, rows=[0, 1]).encode([])


@pytest.mark.parametrize(
    ("verb", "given"),
    [
        (ch.attention, {"scale": 10**5000}),
        (ch.attention, {"seed": 10**5000}),
        (linear.retention, {"scale": 10**5000}),
        (linear.retention, {"decay": 10**5000}),
        (ch.linear_attention, {"form": 10**5000}),
        (ch.linear_attention, {"feature_map": 10**5000}),
        (ch.linear_attention, {"chunk_size": 10**5000}),
        (ch.linear_attention, {"scale": 1e300}),
    ],
    ids=lambda value: value.__name__ if callable(value) else "-".join(value),
)
def test_numbers_out_of_range_raise_one_line(verb: Callable[..., Any], given: dict[str, Any]) -> None:
    with pytest.raises(ch.ClearheadError, match=f"^{verb.__name__}: {next(iter(given))} must"):
        verb(heads(), heads(), heads(), **given)


def test_endless_texts_are_refused() -> None:
    with pytest.raises(ch.ShapeError, match=r"tokens must have one text for each of 3 tokens; got 4 or more\."):
        ch.explain(heads(), heads(), heads(), token=0, tokens=itertools.repeat("a"))  # type: ignore[arg-type]
