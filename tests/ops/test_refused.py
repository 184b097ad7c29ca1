"""Operators reject invalid arguments with one line and never crash."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.nn import Decoder, DecoderBlock, EncoderBlock, FeedForward, MultiHeadAttention
from clearhead.ops.block import Tape, run_blocks
from clearhead.ops.kinds import Rounding
from clearhead.ops.library import library
from clearhead.ops.packed_weight import PackedWeight
from clearhead.ops.quantized_weight import QuantizedWeight
from clearhead.projection import project_activate_project
from clearhead.testing import choices, force_fused
from tests.agreement import needs_native
from tests.gemms import name_gemm

pytestmark = needs_native

X, WEIGHT, BIAS = torch.ones(5, 6), torch.ones(4, 6), torch.ones(4)
HEADS, TABLE, CACHE = torch.ones(2, 3, 5, 8), torch.ones(9, 8), torch.ones(2, 3, 7, 8)
MOMENTS, SCALE, SHIFT = torch.ones(5, 2), torch.ones(6), torch.ones(6)
GRAD = torch.ones(5, 4)
ROWS = torch.zeros(2, 3, 7, 12, dtype=torch.int8)
INT8_PAGES = torch.zeros(3, 16, 2, 12, dtype=torch.int8)
CODES, GROUPS = torch.ones(4, 6, dtype=torch.int8), torch.ones(4, 2)
PAGES, BLOCKS, KEYS = torch.zeros(3, 16, 2, 8), torch.tensor([[2, 0], [1, 9]]).int(), torch.tensor([20, 3]).int()

PANELS = PackedWeight.of(WEIGHT).panels if library() is not None else WEIGHT
INT8_PANELS = PackedWeight.of(CODES).panels if library() is not None else CODES
#: Valid arguments of each operator.
GOOD: dict[str, tuple[Any, ...]] = {
    "linear": (X, WEIGHT, BIAS, 0),
    "linear_quantized": (X, CODES, GROUPS, GROUPS, BIAS, 0, -128, 127, 0),
    "linear_packed": (X, PANELS, 4, BIAS, 0),
    "pack_weight": (WEIGHT,),
    "unpack_weight": (PANELS, WEIGHT),
    "linear_input_gradient": ([GRAD, GRAD], [WEIGHT, WEIGHT]),
    "linear_weight_gradient": (GRAD, X, True),
    "norm": (X, SCALE, SHIFT, 0, 1e-5, True),
    "norm_gradients": (X, X, MOMENTS, SCALE, SHIFT, 0, 1e-5, True, True),
    "rotary": (HEADS, TABLE, 2, False),
    "token_angles": (HEADS[0], HEADS[0]),
    "dropout_add": (X, X, 9, 1, 0),
    "cache_append": (CACHE, HEADS, 1),
    "attention_paged": (torch.zeros(2, 4, 1, 8), PAGES, PAGES, BLOCKS, KEYS, 1.0),
    "paged_append": (PAGES, PAGES, torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 1, 8), BLOCKS, KEYS),
}
#: Operator, index of the argument, invalid value, and error message.
BAD: list[tuple[str, int, Any, str]] = [
    ("linear", 0, X.double(), "x must be float32, bfloat16 or float16"),
    ("linear", 0, X.int(), "x must be float32, bfloat16 or float16"),
    ("linear", 0, torch.tensor(1.0), "x must have an axis of channels"),
    ("linear", 0, X[:, :5], "weight must read 5 channels"),
    ("linear", 0, X.bfloat16(), r"weight must be \[out, in\] of bfloat16"),
    ("linear", 1, WEIGHT[0], r"weight must be \[out, in\] of float32"),
    ("linear", 1, WEIGHT[None], r"weight must be \[out, in\] of float32"),
    ("linear", 1, WEIGHT.half(), r"weight must be \[out, in\] of float32"),
    ("linear", 2, BIAS[:3], r"bias must be \[out\]"),
    ("linear", 2, BIAS[None], r"bias must be \[out\]"),
    ("linear", 2, BIAS.bfloat16(), r"bias must be \[out\]"),
    ("linear", 3, 6, "activation must be 0 to 5"),
    ("linear", 3, -1, "activation must be 0 to 5"),
    ("linear_quantized", 0, X.double(), "x must be float32, bfloat16 or float16"),
    ("linear_quantized", 0, torch.tensor(1.0), "x must have an axis of channels"),
    ("linear_quantized", 0, X[:, :4], "weight must read 4 channels"),
    ("linear_quantized", 0, X.bfloat16(), r"bias must be \[out\] in the dtype of x"),
    ("linear_quantized", 1, WEIGHT, r"weight must be \[out, in\] of int8, \[out, in / 2\] of uint8"),
    ("linear_quantized", 1, CODES[0], r"weight must be \[out, in\] of int8"),
    ("linear_quantized", 1, CODES.to(torch.uint8), "weight must read 6 channels"),
    ("linear_quantized", 2, GROUPS[:3], r"scale must be float32 \[out, groups\]"),
    ("linear_quantized", 2, GROUPS.double(), r"scale must be float32 \[out, groups\]"),
    ("linear_quantized", 2, torch.ones(4, 4), r"scale must be .* with a number of groups that divides the channels"),
    ("linear_quantized", 2, torch.ones(4, 0), r"scale must be .* with a number of groups that divides the channels"),
    ("linear_quantized", 3, GROUPS[:, :1], "offset must be float32 in the shape of scale"),
    ("linear_quantized", 3, GROUPS.half(), "offset must be float32 in the shape of scale"),
    ("linear_quantized", 4, BIAS[:3], r"bias must be \[out\]"),
    ("linear_quantized", 8, 6, "activation must be 0 to 5"),
    ("linear_quantized", 8, -1, "activation must be 0 to 5"),
    ("linear_quantized", 5, 4, "rounding must be 0 to 3"),
    ("linear_quantized", 5, -1, "rounding must be 0 to 3"),
    ("linear_quantized", 5, 1, "weight must be int8 with one scale a row and no offset where x is rounded"),
    ("linear_quantized", 1, INT8_PANELS, "weight must not be in panels where x is not rounded|panels must be bytes"),
    ("linear_quantized", 1, INT8_PANELS[..., :-1], "panels must be bytes"),
    ("linear_packed", 0, X.double(), "x must be float32, bfloat16 or float16"),
    ("linear_packed", 0, torch.tensor(1.0), "x must have an axis of channels"),
    ("linear_packed", 0, X.half(), "panels must be bytes|bias must be"),
    ("linear_packed", 1, PANELS[0], "panels must be bytes"),
    ("linear_packed", 1, PANELS[..., :-1], "panels must be bytes"),
    ("linear_packed", 2, -1, "out must be 0 or more"),
    ("linear_packed", 2, 400, "panels must be bytes"),
    ("linear_packed", 3, BIAS[:3], r"bias must be \[out\]"),
    ("linear_packed", 3, BIAS.bfloat16(), r"bias must be \[out\]"),
    ("linear_packed", 4, 6, "activation must be 0 to 5"),
    ("pack_weight", 0, WEIGHT.double(), "weight must be float32, bfloat16 or float16"),
    ("pack_weight", 0, WEIGHT[0], r"weight must be \[out, in\] of float32"),
    ("unpack_weight", 0, PANELS[0], "panels must be bytes"),
    ("unpack_weight", 0, WEIGHT, "panels must be bytes"),
    ("unpack_weight", 1, WEIGHT[0], r"like must be \[out, in\]"),
    ("unpack_weight", 1, torch.ones(400, 6), "panels must be bytes"),
    ("unpack_weight", 1, WEIGHT.double(), "like must be float32, bfloat16 or float16"),
    ("linear_input_gradient", 0, [], "grads and weights must be as many, 1 to 4"),
    ("linear_input_gradient", 0, [GRAD], "grads and weights must be as many, 1 to 4"),
    ("linear_input_gradient", 0, [GRAD.double(), GRAD], "grads must be float32, bfloat16 or float16"),
    ("linear_input_gradient", 0, [GRAD, GRAD[:4]], r"grads and weights must be \[\*batch, out\] and \[out, in\]"),
    ("linear_input_gradient", 0, [GRAD[:, :3], GRAD], r"grads and weights must be \[\*batch, out\] and \[out, in\]"),
    ("linear_input_gradient", 1, [WEIGHT, WEIGHT[:, :5]], r"grads and weights must be \[\*batch, out\] and"),
    ("linear_input_gradient", 1, [WEIGHT, WEIGHT.half()], r"weight must be \[out, in\] of float32"),
    ("linear_input_gradient", 1, [WEIGHT, BIAS], r"weight must be \[out, in\] of float32"),
    ("linear_weight_gradient", 0, GRAD.double(), "grad must be float32, bfloat16 or float16"),
    ("linear_weight_gradient", 0, torch.tensor(1.0), "grad must have an axis of channels"),
    ("linear_weight_gradient", 0, GRAD[:4], "grad and x must have the same rows and dtype"),
    ("linear_weight_gradient", 1, X.bfloat16(), "grad and x must have the same rows and dtype"),
    ("linear_weight_gradient", 1, X[None].expand(2, 5, 6), "grad and x must have the same rows and dtype"),
    ("norm", 0, X.double(), "x must be float32, bfloat16 or float16"),
    ("norm", 0, torch.tensor(1.0), "x must have an axis of channels"),
    ("norm", 1, SCALE[:5], r"weight and bias must be contiguous \[6\] in the dtype of x"),
    ("norm", 1, SCALE.half(), r"weight and bias must be contiguous \[6\] in the dtype of x"),
    ("norm", 1, torch.ones(12)[::2], r"weight and bias must be contiguous \[6\] in the dtype of x"),
    ("norm", 2, SHIFT[None], r"weight and bias must be contiguous \[6\] in the dtype of x"),
    ("norm", 3, 3, "kind must be 0, 1 or 2"),
    ("norm", 3, -1, "kind must be 0, 1 or 2"),
    ("norm", 4, -1.0, "epsilon must be 0 or more"),
    ("norm", 4, float("nan"), "epsilon must be 0 or more"),
    ("norm_gradients", 0, X[:4], "grad must have the shape and dtype of x"),
    ("norm_gradients", 0, X.half(), "grad must have the shape and dtype of x"),
    ("norm_gradients", 1, X.double(), "x must be float32, bfloat16 or float16"),
    ("norm_gradients", 2, MOMENTS[:4], "moments must be what forward returned"),
    ("norm_gradients", 2, MOMENTS.half(), "moments must be what forward returned"),
    ("norm_gradients", 2, torch.ones(0, 2), "moments must be what forward returned"),
    ("norm_gradients", 2, torch.ones(2, 5).t(), "moments must be what forward returned"),
    ("norm_gradients", 3, SCALE[:5], r"weight and bias must be contiguous \[6\]"),
    ("norm_gradients", 5, 7, "kind must be 0, 1 or 2"),
    ("rotary", 0, HEADS[0], r"x must be \[batch, heads, len, head_dim\] of an even head_dim"),
    ("rotary", 0, HEADS[..., :7], r"x must be \[batch, heads, len, head_dim\] of an even head_dim"),
    ("rotary", 0, HEADS.double(), "x must be float32, bfloat16 or float16"),
    ("rotary", 1, TABLE[:, :6], r"table must be contiguous float32 \[positions, head_dim\]"),
    ("rotary", 1, TABLE.half(), r"table must be contiguous float32 \[positions, head_dim\]"),
    ("rotary", 1, torch.ones(9, 16)[:, ::2], r"table must be contiguous float32 \[positions, head_dim\]"),
    ("rotary", 1, TABLE[0], r"table must be contiguous float32 \[positions, head_dim\]"),
    ("token_angles", 0, HEADS, r"cosine must be float32 \[batch, len, head_dim\] of an even head_dim"),
    ("token_angles", 0, HEADS[0, ..., :7], r"cosine must be float32 \[batch, len, head_dim\] of an even head_dim"),
    ("token_angles", 0, HEADS[0].half(), r"cosine must be float32 \[batch, len, head_dim\] of an even head_dim"),
    ("token_angles", 1, HEADS[0, :, :4], "sine must have the shape and dtype of cosine"),
    ("token_angles", 1, HEADS[0].double(), "sine must have the shape and dtype of cosine"),
    *[("rotary", 2, first, "first must leave every token a position") for first in (5, -1, 2**63 - 1, -(2**63))],
    ("dropout_add", 0, X.double(), "x must be float32, bfloat16 or float16"),
    ("dropout_add", 0, torch.tensor(1.0), "x must have an axis"),
    ("dropout_add", 1, X[:4], "residual must have the shape and dtype of x"),
    ("dropout_add", 1, X.half(), "residual must have the shape and dtype of x"),
    *[("dropout_add", 2, levels, "levels must be 0 to 65535") for levels in (-1, 2**16, 2**63 - 1)],
    *[("dropout_add", 4, row, "first_row must be 0 or more") for row in (-1, -(2**63))],
    ("attention_paged", 0, torch.zeros(2, 4, 8), r"query must be \[batch, heads, q_len, head_dim\]"),
    ("attention_paged", 1, PAGES[..., :4], "value must have key's blocks|key must have query's dtype and head_dim"),
    ("attention_paged", 1, PAGES.mT.contiguous().mT, "key must have contiguous channels"),
    ("attention_paged", 2, PAGES[:2], "value must have key's blocks, heads and dtype"),
    ("attention_paged", 3, BLOCKS + 2, "block_table must name blocks from 0 to 2"),
    ("attention_paged", 3, BLOCKS - 1, "block_table must name blocks from 0 to 2"),
    ("attention_paged", 3, BLOCKS.long(), "block_table must be contiguous int32"),
    ("attention_paged", 3, BLOCKS[:1], "lengths must have one length|block_table must have a row"),
    ("attention_paged", 4, KEYS + 13, "lengths must lie from 0 to 32"),
    ("attention_paged", 4, -KEYS, "lengths must lie from 0 to 32"),
    ("paged_append", 2, torch.zeros(2, 1, 1, 8), r"key must be \[batch, kv_heads, new, head_dim\] as the pages are"),
    ("paged_append", 0, INT8_PAGES, "value must have key's blocks, heads and dtype"),
    ("paged_append", 0, INT8_PAGES[..., :8], r"key must be \[batch, kv_heads, new, head_dim\] as the pages are"),
    (
        "paged_append",
        2,
        torch.zeros(2, 2, 1, 8).int(),
        r"key must be \[batch, kv_heads, new, head_dim\] as the pages are",
    ),
    ("attention_paged", 1, INT8_PAGES, "value must have key's blocks, heads and dtype"),
    ("paged_append", 4, BLOCKS + 2, "block_table must name blocks from 0 to 2"),
    ("paged_append", 5, KEYS * 0, "lengths must count the new tokens too"),
    ("cache_append", 0, CACHE[0], r"new must be \[batch, kv_heads, new, head_dim\] as the cache is"),
    ("cache_append", 0, CACHE.half(), r"new must be \[batch, kv_heads, new, head_dim\] as the cache is"),
    ("cache_append", 0, CACHE[:1], r"new must be \[batch, kv_heads, new, head_dim\] as the cache is"),
    ("cache_append", 0, CACHE.mT.contiguous().mT, r"new must be \[batch, kv_heads, new, head_dim\] as the cache is"),
    ("cache_append", 0, ROWS[..., :8], r"new must be \[batch, kv_heads, new, head_dim\] as the cache is"),
    ("cache_append", 1, ROWS[:, :, :5], "new must be float32, bfloat16 or float16"),
    ("cache_append", 1, HEADS[:, :2], r"new must be \[batch, kv_heads, new, head_dim\] as the cache is"),
    ("cache_append", 1, HEADS[..., :7], r"new must be \[batch, kv_heads, new, head_dim\] as the cache is"),
    ("cache_append", 1, HEADS.double(), "new must be float32, bfloat16 or float16"),
    *[("cache_append", 2, first, "first must leave capacity for 5 tokens") for first in (3, -1, 2**63 - 1, -(2**63))],
]


def call(operator: str, *arguments: Any) -> Any:
    return getattr(torch.ops.clearhead, operator).default(*arguments)


def is_one_line(message: str) -> bool:
    """``<function>: <argument> must <rule>; got <what>. <what to do>`` on one line."""
    return re.fullmatch(r"\w+: .+ must .+; got .+\. .+\.", message) is not None


@pytest.mark.parametrize(("operator", "place", "bad", "expected"), BAD, ids=[f"{row[0]}-{row[3]}" for row in BAD])
def test_invalid_arguments_raise_one_line(operator: str, place: int, bad: Any, expected: str) -> None:
    arguments = [*GOOD[operator]]
    call(operator, *arguments)
    arguments[place] = bad
    with pytest.raises(RuntimeError, match=f"^{operator}: {expected}") as raised:
        call(operator, *arguments)
    assert is_one_line(str(raised.value).split("\n")[0])


@pytest.mark.parametrize("argument", ["first_batch", "first_head", "first_key", "first_position"])
def test_negative_place_of_a_part_raises_one_line(argument: str) -> None:
    with pytest.raises(RuntimeError, match=f"^attention: {argument} must be 0 or more; got -1") as raised:
        torch.ops.clearhead.attention_forward.default(HEADS, HEADS, HEADS, 1.0, 0, **{argument: -1})
    assert is_one_line(str(raised.value).split("\n")[0])


@pytest.mark.parametrize(
    ("place", "bad", "expected"),
    [
        (0, ROWS, "query must be float32, bfloat16 or float16"),
        (1, CACHE, "value must be float32, bfloat16 or float16|value must be int8 rows of a cache as key is"),
        (2, CACHE, "value must be int8 rows of a cache as key is"),
        (1, ROWS[..., :11], "key must have query's head_dim 8"),
        (2, ROWS[..., :4], "value must have 1 to 256 channels"),
        (2, ROWS[:, :, :6], "value must have key's heads and length"),
    ],
)  # fmt: skip
def test_invalid_int8_rows_raise_one_line(place: int, bad: Tensor, expected: str) -> None:
    arguments = [HEADS, ROWS, ROWS]
    call("attention_forward", *arguments, 1.0, 0)
    arguments[place] = bad
    with pytest.raises(RuntimeError, match=f"^attention: ({expected})") as raised:
        call("attention_forward", *arguments, 1.0, 0)
    assert is_one_line(str(raised.value).split("\n")[0])


def test_gradients_of_int8_rows_are_refused() -> None:
    softmax = torch.ones(2, 3, 5, 2)
    with pytest.raises(RuntimeError, match=r"^attention: key and value must be floating point for gradients"):
        call("attention_gradients", HEADS, HEADS, ROWS, ROWS, softmax, None, 1.0)


# ---- blocks --------------------------------------------------------------------------------------------------------


#: Weights of 24 x 16 and 16 x 16 elements.
WHOLE_INTEGERS = QuantizedWeight(torch.ones(24, 16, dtype=torch.int8), torch.rand(24, 1), rounding=Rounding.SYMMETRIC)
HALF_INTEGERS = QuantizedWeight(torch.ones(16, 8, dtype=torch.uint8), torch.rand(16, 2), torch.rand(16, 2))


class Call(NamedTuple):
    """Arguments of ``block``; ``block_forward`` takes all but the caches."""

    tokens: list[Any]
    tensors: list[Any]
    caches: list[Any]
    integers: list[Any]
    numbers: list[Any]

    def copy(self) -> Call:
        caches = [each.clone() for each in self.caches]
        return Call([*self.tokens], [*self.tensors], caches, [*self.integers], [*self.numbers])


def modules() -> list[Callable[[], Any]]:
    """Calls of every kind of block, in eval mode and without gradients."""
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    kinds: list[dict[str, Any]] = [
        {},
        {"norm_first": False, "dropout": 0.3},
        {"rotary": True, "num_kv_heads": 2, "norm": "rms", "gated": True, "bias": False, "activation": "silu"},
        {"scores": [ch.Alibi(4), ch.SoftCap(2.0), ch.Sink(torch.randn(4)), ch.RelativeBias(torch.randn(4, 5))]},
    ]

    def cached(decoder: Any, dtype: torch.dtype | None = None, **given: Any) -> None:
        caches = {"cache": ch.KVCache(dtype=dtype), **({"memory_cache": ch.KVCache(dtype=dtype)} if given else {})}
        for part in x.split([2, 3], 1):
            decoder(part, **given, **caches)

    calls: list[Callable[[], Any]] = [
        lambda: MultiHeadAttention(16, 4)(x),
        lambda: MultiHeadAttention(16, 4)(x, memory),
        lambda: FeedForward(16, 24, gated=True)(x),
        lambda: Decoder(16, 4, 3).eval()(x),
    ]
    for options in kinds:
        encoder, decoder = EncoderBlock(16, 4, **options), DecoderBlock(16, 4, **options)
        crossing = DecoderBlock(16, 4, cross_attention=True, **options)
        calls += [
            partial(encoder, x, mask=ch.Padding([5, 2])),
            partial(encoder, x, mask=ch.Dense(torch.rand(5, 5) < 0.5)),
            partial(cached, decoder),
            partial(cached, decoder, torch.int8),
            partial(crossing, x, memory=memory, memory_mask=ch.Padding([3, 7])),
            partial(cached, crossing, memory=memory),
        ]
    return [
        *calls,
        lambda: project_activate_project(x, WHOLE_INTEGERS, None, torch.randn(16, 24), torch.randn(16)),
        lambda: project_activate_project(x, torch.randn(16, 16), None, HALF_INTEGERS, None, activation="silu"),
    ]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Record the operator arguments of the calls."""
    calls: list[Call] = []

    def record(tokens: Sequence[Tensor], tape: Tape, recompute: Any = None) -> Tensor:
        calls.append(Call([*tokens], tape.tensors, tape.caches, tape.integers, tape.numbers).copy())
        return run_blocks(tokens, tape, recompute)

    for module in ("clearhead.nn.fused", "clearhead.projection.feedforward"):
        monkeypatch.setattr(f"{module}.run_blocks", record)
    name_gemm(monkeypatch, "native")
    torch.manual_seed(0)
    with choices(attention="native"), torch.no_grad(), force_fused() as fused:
        for each in modules():
            each()
    assert len(calls) == len(fused) >= 26
    return calls


def forward(given: Call, training: bool = False) -> list[Tensor]:
    """The output and, in training, the tensors saved for backward."""
    if not training:
        return [call("block", *given)]
    output: list[Tensor] = call("block_forward", given.tokens, given.tensors, given.integers, given.numbers)
    return output


def refused(given: Call, training: bool = False) -> str:
    """The error message of a call."""
    with pytest.raises(RuntimeError) as raised:
        forward(given, training)
    message = str(raised.value).split("\n")[0]
    assert is_one_line(message), message
    return message


def test_lists_of_wrong_lengths_raise(recorded: list[Call]) -> None:
    for given in recorded:
        assert forward(given.copy())
        for name in ("integers", "numbers", "tensors", "caches"):
            whole = getattr(given, name)
            for count in range(len(whole)):
                refused(given.copy()._replace(**{name: whole[:count]}))
            more = whole[-1] if whole else {"caches": torch.ones(2, 4, 8, 4), "tensors": torch.ones(16)}.get(name, 0)
            refused(given.copy()._replace(**{name: [*whole, more]}))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], "tokens must be one or two"),
        ([torch.ones(2, 5, 16)] * 3, "tokens must be one or two"),
        ([torch.ones(5, 16)], "tokens must be .batch, len, width."),
        ([torch.ones(2, 5, 16).double()], "tokens must be .batch, len, width."),
        ([torch.ones(0, 5, 16)], "tokens must be .batch, len, width., not empty"),
        ([torch.ones(2, 0, 16)], "tokens must be .batch, len, width., not empty"),
        ([torch.ones(2, 5, 15)], "must"),
        ([torch.ones(2, 5, 16), torch.ones(3, 5, 16)], "tokens must be .batch, len, width."),
        ([torch.ones(2, 5, 16), torch.ones(2, 5, 16).half()], "tokens must be .batch, len, width."),
        ([torch.ones(2, 5, 16), torch.ones(2, 5, 12)], "must"),
    ],
    ids=lambda given: None if isinstance(given, str) else str([tuple(each.shape) for each in given]),
)
def test_invalid_tokens_raise(tokens: list[Tensor], expected: str, recorded: list[Call]) -> None:
    assert re.search(expected, refused(recorded[0].copy()._replace(tokens=tokens)))


def test_training_blocks_without_gradients_raises(recorded: list[Call]) -> None:
    stacks = [given for given in recorded if given.integers[0] > 1]
    cached = [given for given in recorded if given.caches]
    quantised = [given for given in recorded if any(not part.is_floating_point() for part in given.tensors[:1])]
    for kind, expected in ((stacks, "training must be"), (cached, "caches must"), (quantised, "training must be")):
        assert kind
        for given in kind:
            assert refused(given.copy(), training=True).startswith(f"block: {expected}")


def test_integers_of_a_block_are_checked(recorded: list[Call]) -> None:
    given = next(each for each in recorded if each.tensors[0].dtype is torch.int8)
    codes, scale, *others = given.tensors
    for wrong, expected in [
        (
            [codes.float(), scale],
            "a weight must be int8, uint8 of two integers, or panels.*is malformed",
        ),
        ([codes.to(torch.uint8), scale], "a weight must be int8, uint8 of two integers"),
        ([codes[:, :4], scale], "a feedforward's layer must be"),
        ([codes, scale[:3]], "scale must be float32"),
        ([codes, scale.double()], "scale must be float32"),
    ]:
        assert re.search(expected, refused(given.copy()._replace(tensors=[*wrong, *others])))


def backward(given: Call, output: list[Tensor], needs: list[int], **other: Any) -> list[Tensor]:
    grad, saved = other.get("grad", torch.ones_like(output[0])), other.get("saved", output[1:])
    gradients: list[Tensor] = call("block_backward", grad, given.tokens, given.tensors, saved, *given[3:], needs)[0]
    return gradients


def test_invalid_backward_arguments_raise(recorded: list[Call]) -> None:
    given = recorded[4].copy()
    output = forward(given, training=True)
    count = len(given.tokens) + len(given.tensors)
    needs = [1, *(int(each.requires_grad) for each in given.tensors)]
    assert len(backward(given, output, needs)) == sum(needs)
    for grad in (torch.ones(2, 5, 15), torch.ones(2, 5, 17), torch.ones(10, 16), torch.ones(2, 5, 16).half()):
        with pytest.raises(RuntimeError, match=r"^block: grad must have the output's shape and dtype"):
            backward(given, output, needs, grad=grad)
    for place, each in enumerate(output[1:]):
        for bad in (each.double(), each.flatten(), each[..., :-1], each[:0], torch.ones(1)):
            saved = [*output[1:]]
            saved[place] = bad
            with pytest.raises(RuntimeError, match=r"^block: saved must be what forward saved"):
                backward(given, output, needs, saved=saved)
    for some in range(len(output) - 1):
        with pytest.raises(RuntimeError, match=r"^block: saved must be what forward saved"):
            backward(given, output, needs, saved=output[1 : 1 + some])
    for wrong in ([], needs[:-1], [*needs, 1]):
        with pytest.raises(RuntimeError, match=r"^block: needs must be one for each token and tensor"):
            backward(given, output, wrong)
    with pytest.raises(RuntimeError, match=r"^block: needs must be 0 for what the block does not learn"):
        backward(given, output, [1] * count)


# ---- random lists --------------------------------------------------------------------------------------------------

INTEGERS = (-(2**63), -(2**31), -5, -1, 0, 1, 2, 3, 4, 5, 7, 8, 16, 64, 255, 256, 2**16, 2**20, 2**31, 2**40, 2**63 - 1)
NUMBERS = (0.0, -1.0, float("nan"), float("inf"), -float("inf"), 1.0, 0.5, 1e-30, 1e300)
SPOILED: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x.double(),
    lambda x: x.flatten(),
    lambda x: x[..., :-1] if x.dim() else x,
    lambda x: x[None],
    lambda x: x.bfloat16(),
    lambda x: x.to(torch.int32),
    lambda x: x[:0] if x.dim() else x,
    lambda x: x.mT if x.dim() > 1 else x,
    lambda x: x[..., :1].expand(x.shape) if x.dim() else x,
    lambda x: x.repeat_interleave(2, -1)[..., ::2] if x.dim() else x,
    lambda x: torch.tensor(1.0),
    lambda x: torch.empty(0),
    lambda x: torch.ones(16, 16),
)


def spoil(given: Call, rng: random.Random) -> Call:
    """A call with one to three lists changed."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind = rng.choice(("integer", "integer", "number", "tensor", "tensor", "shorter", "longer"))
        if kind == "integer" and given.integers:
            given.integers[rng.randrange(len(given.integers))] = rng.choice(INTEGERS)
        elif kind == "number" and given.numbers:
            given.numbers[rng.randrange(len(given.numbers))] = rng.choice(NUMBERS)
        elif kind == "tensor":
            tensors = rng.choice([each for each in given[:3] if each] or [[torch.ones(1)]])
            place = rng.randrange(len(tensors))
            tensors[place] = rng.choice(SPOILED)(tensors[place])
        elif kind in ("shorter", "longer"):
            some = rng.choice([each for each in given if each] or [[0]])
            if kind == "shorter":
                del some[rng.randrange(len(some)) :]
            else:
                some.insert(rng.randrange(len(some) + 1), rng.choice(some))
    return given


@pytest.mark.parametrize("seed", range(8))
def test_random_lists_raise_or_run(seed: int, recorded: list[Call]) -> None:
    rng, raised, ran = random.Random(seed), 0, 0
    for _ in range(150):
        given, training = spoil(rng.choice(recorded).copy(), rng), rng.random() < 0.5
        if not any(given[:3]):
            continue  # torch finds no operator without a tensor
        try:
            output = forward(given, training)
            ran += 1
            if training:
                needs = [rng.randrange(2) for _ in (*given.tokens, *given.tensors)]
                backward(given, output, needs, saved=output[1 : rng.choice((None, None, -1))])
        except RuntimeError as error:
            raised += 1
            message = str(error).split("\n")[0]
            assert is_one_line(message), message
    assert raised > 50
    assert ran > 5
