"""Schemas, fake kernels, tracing, vmap and FLOP counts of the operators of single layers and blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import clearhead as ch
from clearhead.ops.block import Tape
from clearhead.ops.kinds import Activation, NormKind, Rounding
from clearhead.ops.packed_weight import Weight
from clearhead.ops.quantized_weight import QuantizedWeight
from tests.agreement import needs_native

pytestmark = [
    needs_native,
    # An autograd.Function around the operators computes gradients (docs/adr/0002).
    pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered"),
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Layouts of ``x``: contiguous, rows with a gap, and a last axis that is not contiguous.
LAYOUTS: dict[str, Callable[[int, int], Tensor]] = {
    "contiguous": torch.randn,
    "rows with a gap": lambda rows, width: torch.randn(rows, width + 3)[:, :width],
    "column-major": lambda rows, width: torch.randn(width, rows).T,
}


def _covering(*axes: Iterable[Any]) -> list[Any]:
    """Combine each value of the first axis with cycled values of the others; 16-bit rows are slow."""
    first, *others = axes
    rows = zip(first, *map(itertools.cycle, others), strict=False)
    return [pytest.param(*row, marks=[pytest.mark.slow] * (not {*row}.isdisjoint(DTYPES[1:]))) for row in rows]


EACH = _covering([*LAYOUTS], DTYPES)
#: A quantised weight ``[6, 8]``.
CODES = torch.randint(-128, 128, (6, 8), dtype=torch.int8, generator=torch.Generator().manual_seed(2))
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def _call(operator: str, *arguments: Any) -> Any:
    return getattr(torch.ops.clearhead, operator).default(*arguments)


def _check(operator: str, *arguments: Any) -> None:
    torch.library.opcheck(getattr(torch.ops.clearhead, operator).default, arguments)


def _x(layout: str = "contiguous", dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> Tensor:
    return LAYOUTS[layout](10, 8).to(dtype).requires_grad_(requires_grad)


# ---- single layers -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "dtype"), EACH)
def test_linear_operators_pass_opcheck(layout: str, dtype: torch.dtype) -> None:
    x, weight, bias = _x(layout, dtype), torch.randn(6, 8, dtype=dtype), torch.randn(6, dtype=dtype)
    _check("linear", x, weight, bias, int(Activation.GELU))
    _check("pack_weight", weight)
    panels = torch.ops.clearhead.pack_weight(weight)
    _check("linear_packed", x, panels, 6, bias, int(Activation.GELU))
    if dtype is torch.float32:
        _check("unpack_weight", panels, weight)
    grad = _x(layout, dtype, requires_grad=False)[:, :6].requires_grad_()
    _check("linear_input_gradient", [grad, grad], [weight, weight])
    for with_bias in (False, True):
        _check("linear_weight_gradient", grad, x, with_bias)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "dtype"), EACH)
@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_linear_operator_passes_opcheck(layout: str, dtype: torch.dtype, bits: int) -> None:
    x, bias, scale = _x(layout, dtype), torch.randn(6, dtype=dtype), torch.rand(6, 2)
    codes = CODES if bits == 8 else CODES[:, :4].to(torch.uint8)
    _check("linear_quantized", x, codes, scale, scale - 0.5, bias)
    _check("linear_quantized", x, codes, scale, None, bias, 0, -128, 127, int(Activation.SILU))
    for rounding in [*Rounding][1:] if bits == 8 else []:
        panels = QuantizedWeight(codes, scale, None, rounding).packed().read
        for weight in (codes, panels):
            _check("linear_quantized", x, weight, scale[:, :1], None, None, int(rounding))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8,), (2, 5, 8), (2, 0, 8), (2, 3, 4, 8)])
def test_row_operators_pass_opcheck_with_any_number_of_axes(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(8)
    _check("linear", x, torch.randn(6, 8))
    _check("linear_quantized", x, CODES, torch.rand(6, 1))
    _check("linear_input_gradient", [x], [torch.randn(8, 3)])
    _check("norm", x, weight, None, int(NormKind.RMS), 1e-6, True)
    _check("dropout_add", x, None, 0, 0)


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("layout", "dtype", "kind"),
    _covering([*LAYOUTS] * 3, [*DTYPES, *DTYPES[1:], DTYPES[0], *DTYPES[2:], *DTYPES[:2]], NormKind),
)
def test_norm_operators_pass_opcheck(layout: str, dtype: torch.dtype, kind: NormKind) -> None:
    x, weight, bias = _x(layout, dtype), torch.randn(8, dtype=dtype), torch.randn(8, dtype=dtype)
    _check("norm", x, weight, bias, int(kind), 1e-5)
    _, moments = _call("norm", x.detach(), weight, None, int(kind), 1e-5, True)
    for of_weight, of_bias in ((True, True), (True, False), (False, False)):
        arguments = (x.detach() + 1, x, moments, weight, None, int(kind), 1e-5, of_weight, of_bias)
        _check("norm_gradients", *arguments)


@pytest.mark.parametrize("repeats", [True, False])
def test_token_angles_pass_opcheck(repeats: bool) -> None:
    cosine = torch.randn(2, 5, 4).repeat(1, 1, 2) if repeats else torch.randn(2, 5, 8)
    _check("token_angles", cosine, cosine + 1)


@pytest.mark.slow
@every_dtype
@pytest.mark.parametrize("heads_first", [True, False])
def test_rotary_passes_opcheck(dtype: torch.dtype, heads_first: bool) -> None:
    x = torch.randn((2, 3, 5, 8) if heads_first else (2, 5, 3, 8)).to(dtype)
    table = torch.randn(7, 8)
    _check("rotary", (x if heads_first else x.transpose(1, 2)).requires_grad_(), table, 2, False)
    _check("rotary", x.transpose(1, 3).repeat(1, 2, 1, 1).transpose(1, 3)[..., :8], torch.randn(9, 8), 0, True)


@pytest.mark.covering(0)
@pytest.mark.parametrize(("layout", "dtype", "levels"), _covering([*LAYOUTS] * 2, DTYPES[::-1], [0, 20000]))
def test_dropout_add_passes_opcheck(layout: str, dtype: torch.dtype, levels: int) -> None:
    x = _x(layout, dtype)
    _check("dropout_add", x, None, levels, 7)
    _check("dropout_add", x, x.detach() + 1, levels, 7)
    _check("dropout_add", x, None, levels, 7, 0, torch.arange(x.shape[:-1].numel()) << 31)


@pytest.mark.covering(0)
@every_dtype
@pytest.mark.parametrize("strided", [False, True])
def test_cache_append_passes_opcheck(dtype: torch.dtype, strided: bool) -> None:
    cache, new = torch.zeros(2, 3, 9, 4, dtype=dtype), torch.randn(2, 2, 3, 4).to(dtype).transpose(1, 2)
    _check("cache_append", cache[:, :, ::2] if strided else cache, new, 3)
    rows = torch.zeros(2, 3, 18, 8, dtype=torch.int8)
    _check("cache_append", rows[:, :, ::2] if strided else rows, new, 3)


@pytest.mark.slow
@every_dtype
def test_paged_operators_pass_opcheck(dtype: torch.dtype) -> None:
    pages, new = torch.zeros(3, 16, 2, 8, dtype=dtype), torch.randn(2, 2, 3, 8).to(dtype)
    table, lengths = torch.tensor([[2, 0], [1, 9]]).int(), torch.tensor([20, 3]).int()
    _check("paged_append", pages, pages.clone(), new, new, table, lengths)
    _check("attention_paged", torch.cat([new, new], 1), pages, pages, table, lengths, 1.0, True, None, 0)
    rows = torch.zeros(3, 16, 2, 12, dtype=torch.int8)
    _check("paged_append", rows, rows.clone(), new, new, table, lengths)
    _check("attention_paged", torch.cat([new, new], 1), rows, rows, table, lengths, 1.0, True, None, 0)


# ---- blocks --------------------------------------------------------------------------------------------------------


def _weight(outputs: int, inputs: int, dtype: torch.dtype, bits: int) -> Weight:
    """Random, in floating point for 0 bits; int8 rounds its input, int4 has groups and offsets."""
    if bits == 0:
        return torch.randn(outputs, inputs, dtype=dtype) / 4
    if bits == 8:
        codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
        return QuantizedWeight(codes, torch.rand(outputs, 1) / 256, rounding=Rounding.ASYMMETRIC)
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    return QuantizedWeight(codes, torch.rand(outputs, 2) / 16, torch.rand(outputs, 2) - 0.5)


def _attention(
    tape: Tape,
    dtype: torch.dtype,
    *,
    together: bool = True,
    memory_width: int = 16,
    head_norms: bool = False,
    rotary: bool = False,
    bits: int = 0,
    **_call: Any,
) -> None:
    """Two heads of 8 channels that read one head of keys and values, in tokens 16 wide."""

    def layer(outputs: int, inputs: int = 16) -> tuple[Weight, Tensor]:
        return _weight(outputs, inputs, dtype, bits), torch.randn(outputs, dtype=dtype)

    tape.integer(together, 2, 1)
    tape.linears([layer(32)] if together else [layer(16), layer(8, memory_width), layer(8, memory_width)])
    tape.linears([layer(16)])
    tape.integer(head_norms)
    for _ in range(2 * head_norms):
        tape.norm(NormKind.RMS, 1e-6, torch.randn(8, dtype=dtype), None)
    tape.integer(rotary)


def _attention_call(
    tape: Tape,
    dtype: torch.dtype,
    *,
    rotary: bool = False,
    cache: int = 0,
    options: dict[str, Any] | None = None,
    **_attention: Any,
) -> None:
    given = options or {}
    tape.tensors += [torch.randn(20, 8)] if rotary else []
    tape.integer(*((cache, 4) if cache else (0,)))
    tape.caches += [torch.randn(2, 1, 12, 8, dtype=dtype) for _ in range(2 * bool(cache))]
    tape.number(0.3, given.get("dropout", 0.0))
    tape.integer(7, 0, 0, 0, 0, 0)
    tape.optional(None)
    tape.mask({name: part for name, part in given.items() if name in MASKS})
    tape.rules(given)


MASKS = ("before", "after", "start", "stop", "allowed", "blocks", "block_size")


def _feedforward(
    tape: Tape, dtype: torch.dtype, activation: Activation, gated: bool, dropped: int, bits: int = 0
) -> None:
    expand = [(_weight(24, 16, dtype, bits), None) for _ in range(1 + gated)]
    tape.integer(1, 2 + gated)
    tape.linears([*expand, (_weight(16, 24, dtype, bits), torch.randn(16, dtype=dtype))])
    tape.integer(activation, dropped)


def _around(tape: Tape, dtype: torch.dtype, result_norm: bool = False, dropped: int = 0) -> None:
    tape.norm(NormKind.LAYER, 1e-5, torch.randn(16, dtype=dtype), torch.randn(16, dtype=dtype))
    tape.integer(result_norm)
    if result_norm:
        tape.norm(NormKind.RMS_FROM_ONE, 1e-5, torch.randn(16, dtype=dtype), None)
    tape.integer(dropped)


def _block(
    dtype: torch.dtype = torch.float32,
    *,
    blocks: int = 1,
    pre_norm: bool = True,
    attentions: Sequence[dict[str, Any]] = ({},),
    activation: Activation = Activation.GELU,
    gated: bool = False,
    result_norm: bool = False,
    dropped: int = 0,
    rows: Tensor | int = 0,
    bits: int = 0,
    one_call: bool = False,
) -> Tape:
    tape, structures = Tape(), [Tape() for _ in range(blocks)]
    for structure in structures:
        structure.integer(1, pre_norm, len(attentions))
        for each in attentions:
            _attention(structure, dtype, **each)
        _feedforward(structure, dtype, activation, gated, dropped, bits)
        for _ in range(len(attentions) + 1):
            _around(structure, dtype, result_norm, dropped)
    tape.blocks(structures)
    tape.integer(one_call)
    for _ in range(1 if one_call else blocks):
        for each in attentions:
            _attention_call(tape, dtype, **each)
        tape.seeds((11, *[5] * (len(attentions) + 1)), rows)
    return tape


def _bare(dtype: torch.dtype = torch.float32, **attention: Any) -> Tape:
    """An attention or a feedforward without residuals."""
    tape = Tape()
    tape.integer(1, 0, 0, 0, bool(attention))
    if attention:
        _attention(tape, dtype, **attention)
        tape.integer(0, 0)
        _attention_call(tape, dtype, **attention)
    else:
        _feedforward(tape, dtype, Activation.RELU, False, 300)
        tape.integer(0)
        tape.seeds((11,), 0)
    return tape


SEPARATE: dict[str, Any] = {"together": False}
TABLE: dict[str, Any] = {"options": {"allowed": torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()}}
RUNS: dict[str, Any] = {
    "options": {
        "start": torch.zeros(1, 1, 5, 1, dtype=torch.int32),
        "stop": torch.full((1, 1, 5, 1), 4, dtype=torch.int32),
    }
}
RULES: dict[str, Any] = {
    "options": {
        "after": 0,
        "rule_kinds": [4, 1],
        "rule_values": [3.0],
        "rule_tables": [torch.rand(2)],
        "sink": torch.rand(2),
    }
}
BLOCKS_OF_TABLE: dict[str, Any] = {
    "options": {"blocks": torch.tensor([[True, False], [True, True]]).view(1, 1, 2, 2), "block_size": 3}
}
#: Blocks that train: a function that builds them, and the number of input sequences.
LEARNED: dict[str, tuple[Callable[[torch.dtype], Tape], int]] = {
    "pre-norm": (lambda dtype: _block(dtype), 1),
    "post-norm": (lambda dtype: _block(dtype, pre_norm=False, activation=Activation.RELU), 1),
    "gated": (lambda dtype: _block(dtype, gated=True, activation=Activation.SILU, attentions=[SEPARATE]), 1),
    "dropout": (lambda dtype: _block(dtype, dropped=9000, attentions=[{"options": {"dropout": 0.2}}]), 1),
    "dropout by numbers": (lambda dtype: _block(dtype, dropped=9000, rows=torch.arange(10) << 31), 1),
    "table": (lambda dtype: _block(dtype, attentions=[TABLE]), 1),
    "blocks of a table": (lambda dtype: _block(dtype, attentions=[BLOCKS_OF_TABLE]), 1),
    "intervals, rotary": (lambda dtype: _block(dtype, attentions=[{**RUNS, "rotary": True}]), 1),
    "rules": (lambda dtype: _block(dtype, attentions=[RULES]), 1),
    "decoder": (lambda dtype: _block(dtype, attentions=[{}, {**SEPARATE, "memory_width": 12}]), 2),
    "post-norm decoder": (lambda dtype: _block(dtype, pre_norm=False, attentions=[{}, {}]), 2),
    "bare attention": (lambda dtype: _bare(dtype, together=True), 1),
    "bare cross-attention": (lambda dtype: _bare(dtype, together=True, options={"before": 2}), 2),
    "bare feedforward": (lambda dtype: _bare(dtype), 1),
}
#: Blocks that only run forward.
FORWARD: dict[str, Callable[[torch.dtype], Tape]] = {
    "norms of heads and results": lambda dtype: _block(
        dtype, result_norm=True, attentions=[{**SEPARATE, "head_norms": True}]
    ),
    "growing cache": lambda dtype: _block(dtype, attentions=[{"cache": 1, "options": {"after": 0}}]),
    "cached memory": lambda dtype: _block(dtype, attentions=[{"cache": 1}, {**SEPARATE, "cache": 2}]),
    "int8": lambda dtype: _block(dtype, gated=True, bits=8, attentions=[{"bits": 8, "cache": 1}]),
    "int4": lambda dtype: _block(
        dtype, bits=4, attentions=[{**SEPARATE, "bits": 4}, {"bits": 4, "memory_width": 12}], blocks=2
    ),
    "two blocks": lambda dtype: _block(dtype, blocks=2, pre_norm=False, attentions=[{**TABLE, "rotary": True}]),
    "two blocks of one call": lambda dtype: _block(
        dtype, blocks=2, attentions=[{**TABLE, "rotary": True}], one_call=True
    ),
}


def _tokens(name: str, tape: Tape, dtype: torch.dtype, requires_grad: bool = True) -> list[Tensor]:
    """``[2, 5, 16]``, and a memory of 4 tokens of the width that the block reads."""
    widths = [16, 12 if name == "decoder" else 16][: LEARNED[name][1] if name in LEARNED else 1]
    lengths = (5, 4)
    return [
        torch.randn(2, length, width).to(dtype).requires_grad_(requires_grad)
        for length, width in zip(lengths, widths, strict=False)
    ]


def _forward_call(name: str, dtype: torch.dtype, training: bool) -> tuple[Any, ...]:
    tape = LEARNED[name][0](dtype) if name in LEARNED else FORWARD[name](dtype)
    tokens = _tokens(name, tape, dtype)
    caches = () if training else (tape.caches,)
    return tokens, tape.tensors, *caches, tape.integers, tape.numbers


def _learns(tensor: Tensor, dtype: torch.dtype) -> bool:
    """True if a tensor of a block is a weight, not a table, mask or rule."""
    return tensor.dtype is dtype and tensor.shape not in ((20, 8), (2,), (1, 1, 5, 5))


def _backward_call(name: str, dtype: torch.dtype, needs: Callable[[int], bool]) -> tuple[Any, ...]:
    tokens, tensors, integers, numbers = _forward_call(name, dtype, True)
    tokens = [part.detach() for part in tokens]
    output, *saved = _call("block_forward", tokens, tensors, integers, numbers)
    wanted = [True] * len(tokens) + [_learns(part, dtype) for part in tensors]
    chosen = [int(each and needs(place)) for place, each in enumerate(wanted)]
    return torch.randn_like(output), tokens, tensors, saved, integers, numbers, chosen


@pytest.mark.covering(0)
@pytest.mark.parametrize(("name", "dtype"), _covering(LEARNED, DTYPES))
def test_block_forward_passes_opcheck(name: str, dtype: torch.dtype) -> None:
    _check("block_forward", *_forward_call(name, dtype, True))


@pytest.mark.covering(0)
@pytest.mark.parametrize(("name", "dtype"), _covering([*FORWARD, "pre-norm", "post-norm decoder"], DTYPES))
def test_block_passes_opcheck(name: str, dtype: torch.dtype) -> None:
    _check("block", *_forward_call(name, dtype, False))


def test_blocks_described_once_have_the_bits_of_each_described() -> None:
    attentions = [{**TABLE, "rotary": True}]
    tape, tokens = _block(blocks=3, attentions=attentions, one_call=True), [torch.randn(2, 5, 16)]
    count, same, *integers = tape.integers
    assert (count, same) == (3, True)
    # With two blocks of two calls there is one call more.
    of_call = len(_block(blocks=2, attentions=attentions).integers) - len(tape.integers)
    structure, call = integers[: -of_call - 1], integers[-of_call:]
    # A call has a scale and a probability, a table of angles and a mask.
    numbers = [*tape.numbers[:-2] * 3, *tape.numbers[-2:] * 3]
    tensors = [*tape.tensors, *tape.tensors[-2:] * 2]
    output = _call("block", tokens, tensors, [], [3, 0, *structure * 3, 0, *call * 3], numbers)
    assert torch.equal(_call("block", tokens, tape.tensors, [], tape.integers, tape.numbers), output)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["table", "blocks of a table"])
def test_a_masked_block_saves_its_output_in_float32(name: str) -> None:
    call = _forward_call(name, torch.bfloat16, True)
    assert any(part.shape == (2, 2, 5, 8) and part.dtype is torch.float32 for part in _call("block_forward", *call))
    _check("block_forward", *call)


def test_a_block_of_more_keys_than_a_tile_saves_its_output_in_float32() -> None:
    tape = _bare(torch.bfloat16, together=True)
    tokens = [torch.randn(1, 257, 16, dtype=torch.bfloat16)]
    call = (tokens, tape.tensors, tape.integers, tape.numbers)
    assert _call("block_forward", *call)[-1].dtype is torch.float32
    _check("block_forward", *call)


@pytest.mark.parametrize(("name", "dtype"), _covering(LEARNED, DTYPES[1:]))
def test_block_backward_passes_opcheck(name: str, dtype: torch.dtype) -> None:
    arguments = _backward_call(name, dtype, lambda place: True)
    arguments[0].requires_grad_()
    _check("block_backward", *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("first", [1, 4])
def test_block_backward_passes_opcheck_where_some_gradients_are_needed(first: int) -> None:
    arguments = _backward_call("pre-norm", torch.float32, lambda place: place >= first)
    arguments[0].requires_grad_()
    _check("block_backward", *arguments)


# ---- vmap ----------------------------------------------------------------------------------------------------------

X, W, B, TABLE_OF_ANGLES = torch.randn(3, 2, 5, 8), torch.randn(3, 6, 8), torch.randn(3, 8), torch.randn(3, 9, 8)
HEADS = torch.randn(3, 2, 4, 5, 8)
#: Operators and their arguments; vmapped arguments have a leading axis of 3.
VMAPPED: dict[str, tuple[str, tuple[Any, ...], tuple[Any, ...]]] = {
    "linear": ("linear", (X, W[0], W[0, :, 0].clone(), 2), (0, None, None, None)),
    "linear of each weight": ("linear", (X, W), (0, 0)),
    "quantised linear": ("linear_quantized", (X, CODES, W[0, :, :1].contiguous(), None, None, 1), (0, *(None,) * 5)),
    "quantised linear, one scale for all rows": (
        "linear_quantized",
        (X, CODES, W[0, :, :1].contiguous(), None, None, 3),
        (0, *(None,) * 5),
    ),
    "input gradient": ("linear_input_gradient", ([X, X[0] + 1], [B.T @ B, B.T @ B]), ([0, None], [None, None])),
    "input gradient of each weight": ("linear_input_gradient", ([X[..., :6]], [W]), ([0], [0])),
    "weight gradient": ("linear_weight_gradient", (X[..., :6], X[0], True), (0, None, None)),
    "norm": ("norm", (X, B[0], None, 1, 1e-5, True), (0, None, None, None, None, None)),
    "norm in eval": ("norm", (X, B[0], None, 0, 1e-5), (0, None, None, None, None)),
    "norm of each weight": ("norm", (X, B, B + 1, 0, 1e-5, True), (0, 0, 0, None, None, None)),
    "norm gradients": (
        "norm_gradients",
        (X + 1, X[0], torch.rand(10, 2), B[0], None, 1, 1e-5, True, False),
        (0, None, None, None, None, None, None, None, None),
    ),
    "rotary": ("rotary", (HEADS, TABLE_OF_ANGLES[0], 2), (0, None, None)),
    "rotary of each table": ("rotary", (HEADS[0], TABLE_OF_ANGLES), (None, 0)),
    "residual": ("dropout_add", (X, X[0] + 1, 0, 0), (0, None, None, None)),
    "dropout": ("dropout_add", (X, X + 1, 30000, 5), (0, 0, None, None)),
}


def _entry(part: Any, dim: Any, place: int) -> Any:
    if isinstance(part, list):
        return [_entry(one, each, place) for one, each in zip(part, dim, strict=True)]
    return part if dim is None else part.select(dim, place)


def _listed(results: Any) -> tuple[Any, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


@pytest.mark.parametrize("name", VMAPPED)
def test_single_layers_under_vmap_match_each_entry(name: str) -> None:
    operator, arguments, dims = VMAPPED[name]
    batched = torch.vmap(lambda *given: _listed(_call(operator, *given)), in_dims=dims)(*arguments)
    parts = [[_entry(part, dim, place) for part, dim in zip(arguments, dims, strict=True)] for place in range(3)]
    singles = [_listed(_call(operator, *each)) for each in parts]
    for one, expected in zip(batched, zip(*singles, strict=True), strict=True):
        torch.testing.assert_close(one, torch.stack(expected), rtol=1e-5, atol=1e-5)


def test_blocks_under_vmap_match_each_entry() -> None:
    tape, many = _block(), torch.randn(3, 2, 5, 16)

    def forward(tokens: Tensor) -> tuple[Tensor, ...]:
        return tuple(_call("block_forward", [tokens], tape.tensors, tape.integers, tape.numbers))

    def backward(tokens: Tensor, *results: Tensor) -> tuple[Tensor, ...]:
        needs = [1] * (1 + len(tape.tensors))
        output, *saved = results
        call = (output, [tokens], tape.tensors, saved, tape.integers, tape.numbers, needs)
        grads, finite = _call("block_backward", *call)
        assert finite
        return tuple(grads)

    batched = torch.vmap(forward)(many)
    singles = [forward(one) for one in many]
    for one, expected in zip(batched, zip(*singles, strict=True), strict=True):
        torch.testing.assert_close(one, torch.stack(expected))
    grads = torch.vmap(backward)(many, *batched)
    expected_grads = [backward(one, *results) for one, results in zip(many, singles, strict=True)]
    for one, expected in zip(grads, zip(*expected_grads, strict=True), strict=True):
        torch.testing.assert_close(one, torch.stack(expected))


def test_caches_under_vmap_are_appended_to_entry_by_entry() -> None:
    caches, new = torch.zeros(3, 2, 1, 6, 4), torch.randn(3, 2, 1, 2, 4)

    def append(cache: Tensor, new: Tensor) -> Tensor:
        _call("cache_append", cache, new, 3)
        return cache

    expected = caches.clone()
    expected[:, :, :, 3:5] = new
    assert torch.equal(torch.vmap(append)(caches, new), expected)
    assert torch.equal(caches, expected)
    with pytest.raises(RuntimeError, match=r"^cache_append: cache must have the vmapped axis of new; got none\. "):
        torch.vmap(append, in_dims=(None, 0))(caches[0], new)


# ---- FLOPs ---------------------------------------------------------------------------------------------------------


def _flops(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    total: int = counter.get_total_flops()
    return total


def test_single_layers_count_their_gemms() -> None:
    x, weight, grad = torch.randn(2, 5, 8), torch.randn(6, 8), torch.randn(2, 5, 6)
    gemm = 2 * 10 * 6 * 8
    assert _flops(lambda: _call("linear", x, weight)) == gemm
    assert _flops(lambda: _call("linear_quantized", x, CODES, torch.ones(6, 1))) == gemm
    assert _flops(lambda: _call("linear_input_gradient", [grad, grad], [weight, weight])) == 2 * gemm
    assert _flops(lambda: _call("linear_weight_gradient", grad, x, True)) == gemm
    assert _flops(lambda: _call("norm", x, None, None, 0, 1e-5)) == 0


#: FLOPs of a linear layer of ten rows, and of the query-key pairs of two heads in two batch entries.
ROWS, PAIRS = 2 * 10, 2 * 2 * 2 * 8


def _forward_flops(keys: int) -> int:
    projections = ROWS * 16 * (32 + 16)
    return projections + PAIRS * 5 * keys * 2 + ROWS * 2 * 16 * 24


def test_blocks_count_their_gemms() -> None:
    for name in ("pre-norm", "post-norm", "dropout", "table"):
        arguments = _forward_call(name, torch.float32, True)
        assert _flops(lambda arguments=arguments: _call("block_forward", *arguments)) == _forward_flops(5)  # type: ignore[misc]
    grows = _forward_call("growing cache", torch.float32, False)
    # After four cached tokens, query i of five reads i + 5 keys.
    window = PAIRS * 2 * sum(range(5, 10))
    assert _flops(lambda: _call("block", *grows)) == _forward_flops(0) + window
    two = _forward_call("two blocks", torch.float32, False)
    assert _flops(lambda: _call("block", *two)) == 2 * _forward_flops(5)
    memory = _forward_call("cached memory", torch.float32, False)
    cross = ROWS * 16 * 32 + PAIRS * 5 * 4 * 2
    assert _flops(lambda: _call("block", *memory)) == _forward_flops(9) + cross


def test_blocks_count_the_gradients_that_are_needed() -> None:
    def backward(name: str, needs: Callable[[int], bool]) -> int:
        arguments = _backward_call(name, torch.float32, needs)
        return _flops(lambda: _call("block_backward", *arguments))

    attention, gemms = PAIRS * 25 * 5, _forward_flops(0)
    for name in ("pre-norm", "post-norm"):
        assert backward(name, lambda place: True) == attention + 2 * gemms
        # Only gradients of the tokens: no gradients of weights.
        assert backward(name, lambda place: place == 0) == attention + gemms
        assert (
            backward(name, lambda place: place > 0) == attention + 2 * gemms - name.startswith("post") * ROWS * 16 * 32
        )
    # Only the last layer of the feedforward; its weight follows those of the attention and the first layer.
    assert backward("pre-norm", lambda place: place == 6) == ROWS * 16 * 24


@pytest.fixture
def _op_by_op() -> Iterator[None]:
    """Make torch use operators that its FLOP counter knows, not its fused encoder layer and attention."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.backends.mha.set_fastpath_enabled(enabled)


@pytest.mark.usefixtures("_op_by_op")
@pytest.mark.parametrize("training", [False, True])
def test_flops_of_a_swapped_layer_equal_torchs(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True).train(training)
    expected = _layer_flops(layer, training)
    ch.swap(layer)
    assert _layer_flops(layer, training) == expected + training * RECOMPUTED


@pytest.mark.usefixtures("_op_by_op")
@pytest.mark.parametrize("training", [False, True])
def test_flops_of_a_block_equal_torchs(training: bool) -> None:
    block = ch.nn.EncoderBlock(64, 4, feedforward_dim=128, dropout=0.0).train(training)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True).train(training)
    assert _layer_flops(block, training) == _layer_flops(layer, training) + training * RECOMPUTED


#: Backward recomputes ``Q K^T``; torch's attention reads saved scores.
RECOMPUTED = 2 * 2 * 300 * 300 * 64


def _layer_flops(layer: nn.Module, training: bool) -> int:
    x = torch.randn(2, 300, 64, requires_grad=training)
    with torch.set_grad_enabled(training):
        return _flops(lambda: layer(x).sum().backward() if training else layer(x))
