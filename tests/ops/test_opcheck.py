"""Schemas, fake kernels, tracing, vmap and FLOP counts of the attention operators."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import clearhead as ch
from clearhead.int8_rows import quantize
from clearhead.ops.kinds import Side
from tests.agreement import needs_native

pytestmark = [
    needs_native,
    # An autograd.Function around the operators computes gradients (docs/adr/0002).
    pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered"),
]

#: Arguments of ``attention_forward`` besides query, key and value, which are ``[2, 4, 9, 8]``, ``[2, 2, 11, 8]`` and
#: ``[2, 2, 11, 6]``.
Options = dict[str, Any]
#: Every bit of ``returns``.
ALL = (1 << 13) - 1
LSE, SOFTMAX, OUTPUT32, MAX_SCORE, TIES = 1, 2, 4, 8, 16

OPTIONS: dict[str, Callable[[], Options]] = {
    "plain": dict,
    "causal": lambda: {"after": 0},
    "window": lambda: {"before": 3, "after": 1, "query_offset": 2},
    "intervals": lambda: {
        "start": torch.zeros(1, 1, 9, 2, dtype=torch.int32),
        "stop": torch.full((1, 1, 9, 2), 7, dtype=torch.int32),
    },
    "intervals per entry": lambda: {
        "start": torch.arange(2, dtype=torch.int32).view(2, 1, 1, 1).repeat(1, 4, 9, 1),
        "stop": torch.full((2, 4, 9, 1), 9, dtype=torch.int32),
    },
    "table": lambda: {"allowed": torch.rand(1, 4, 9, 11) > 0.3},
    "table per entry": lambda: {"allowed": torch.rand(2, 1, 9, 11) > 0.3},
    "blocks": lambda: {"blocks": torch.tensor([[True, False], [True, True]]).view(1, 1, 2, 2), "block_size": 6},
    "slopes": lambda: {"rule_kinds": [1], "rule_tables": [torch.rand(4)]},
    "distances": lambda: {"rule_kinds": [2], "rule_tables": [torch.randn(4, 7)]},
    "dense bias": lambda: {"rule_kinds": [3], "rule_tables": [torch.randn(2, 1, 9, 11)]},
    "soft-cap, then a bias": lambda: {
        "rule_kinds": [4, 3],
        "rule_values": [5.0],
        "rule_tables": [torch.randn(1, 4, 9, 11)],
    },
    "sink": lambda: {"sink": torch.randn(4)},
    "dropout": lambda: {"dropout": 0.4, "seed": 7},
}


def _rows(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_(requires_grad)


def _interleaved(*shape: int, **options: Any) -> Tensor:
    """Heads interleaved within each token."""
    batch, heads, length, dim = shape
    return _rows(batch, length, heads, dim, **options).transpose(1, 2)


def _column_major(*shape: int, **options: Any) -> Tensor:
    """A last axis that is not contiguous."""
    return _rows(*shape[:2], shape[3], shape[2], **options).mT


LAYOUTS: dict[str, Callable[..., Tensor]] = {
    "contiguous": _rows,
    "interleaved": _interleaved,
    "column-major": _column_major,
}
every_option = pytest.mark.parametrize("name", OPTIONS)


#: Layouts of the operators' tensors.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _covering(*axes: Iterable[Any]) -> list[Any]:
    """Combine each value of the first axis with cycled values of the others; 16-bit rows are slow."""
    first, *others = axes
    rows = zip(first, *map(itertools.cycle, others), strict=False)
    return [pytest.param(*row, marks=[pytest.mark.slow] * (not {*row}.isdisjoint(DTYPES[1:]))) for row in rows]


def _qkv(layout: str = "contiguous", **options: Any) -> list[Tensor]:
    return [LAYOUTS[layout](*shape, **options) for shape in ((2, 4, 9, 8), (2, 2, 11, 8), (2, 2, 11, 6))]


def _statistics() -> Options:
    """Every statistic: keys of the sink, top-k, side of tiles, single rows."""
    slots = torch.full((9,), -1, dtype=torch.int32)
    slots[3] = 0
    return {"statistic_sizes": [1, 3, 4, 1], "row_weights": torch.rand(2, 4, 2, 9), "row_slots": slots}


def _attention(tensors: list[Tensor], returns: int, **options: Any) -> list[Tensor]:
    results: list[Tensor] = torch.ops.clearhead.attention_forward.default(*tensors, 0.3, returns, **options)
    return results


def _gradient_call(
    name: str, layout: str, dtype: torch.dtype, *, learned: bool = False
) -> tuple[tuple[Any, ...], Options]:
    """Arguments of ``attention_gradients`` for a call."""
    options, tensors = OPTIONS[name](), _qkv(layout, dtype=dtype)
    output, softmax, *exact = _attention(tensors, SOFTMAX | OUTPUT32, **options)
    extra = {"rule_slots": [0]} if learned else {}
    return (torch.randn_like(output), *tensors, softmax, *exact, 0.3), {**options, **extra}


def _check(operator: str, arguments: Any, options: Options) -> None:
    torch.library.opcheck(getattr(torch.ops.clearhead, operator).default, tuple(arguments), options)


# ---- attention -----------------------------------------------------------------------------------------------------


@pytest.mark.covering(0)
@pytest.mark.parametrize(("name", "returns"), _covering(OPTIONS, (0, LSE | SOFTMAX | OUTPUT32, LSE)))
def test_attention_forward_passes_opcheck(name: str, returns: int) -> None:
    _check("attention_forward", (*_qkv(requires_grad=True), 0.3, returns), OPTIONS[name]())


@pytest.mark.covering(0)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("returns", [0, LSE | OUTPUT32])
def test_attention_forward_passes_opcheck_with_int8_rows(returns: int, dtype: torch.dtype) -> None:
    query, key, value = _qkv(dtype=dtype)
    _check("attention_forward", (query, quantize(key), quantize(value), 0.3, returns), {})


@pytest.mark.parametrize(("layout", "dtype"), _covering([*LAYOUTS] * 3, DTYPES))
def test_attention_forward_passes_opcheck_in_every_layout_and_dtype(layout: str, dtype: torch.dtype) -> None:
    _check("attention_forward", (*_qkv(layout, dtype=dtype, requires_grad=True), 0.3, OUTPUT32 | SOFTMAX), {})


@pytest.mark.slow
@pytest.mark.parametrize("returns", [ALL, MAX_SCORE | TIES, 1 << 8, 1 << 10 | 1 << 12])
def test_attention_forward_passes_opcheck_with_statistics(returns: int) -> None:
    _check("attention_forward", (*_qkv(requires_grad=True), 0.3, returns), _statistics())


@pytest.mark.covering(0)
@pytest.mark.parametrize(("name", "layout", "dtype"), _covering(OPTIONS, LAYOUTS, DTYPES[:2]))
def test_attention_gradients_pass_opcheck(name: str, layout: str, dtype: torch.dtype) -> None:
    arguments, options = _gradient_call(name, layout, dtype)
    arguments[1].requires_grad_()
    _check("attention_gradients", arguments, options)


@pytest.mark.parametrize("side", [Side.QUERIES, Side.KEYS])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_one_side_have_the_bits_of_all(name: str, side: Side) -> None:
    arguments, options = _gradient_call(name, "contiguous", torch.float32)
    operator = torch.ops.clearhead.attention_gradients.default
    (query, key, value, delta, *_), _ = operator(*arguments, **options)
    computed, _ = operator(*arguments, **options, side=int(side))
    expected = [query, delta] if side is Side.QUERIES else [key, value, delta]
    assert len(computed) == len(expected)
    assert all(map(torch.equal, computed, expected))


#: Each option with one side in turn; the other side is slow.
_SIDES = [
    pytest.param(name, side, marks=[pytest.mark.slow] * ((place + which) % 2))
    for place, name in enumerate(OPTIONS)
    for which, side in enumerate((Side.QUERIES, Side.KEYS))
]


@pytest.mark.covering(0)
@pytest.mark.parametrize(("name", "side"), _SIDES)
def test_gradients_of_one_side_pass_opcheck(name: str, side: Side) -> None:
    arguments, options = _gradient_call(name, "contiguous", torch.float32)
    arguments[1].requires_grad_()
    _check("attention_gradients", arguments, {**options, "side": int(side)})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["distances", "dense bias", "soft-cap, then a bias"])
def test_attention_gradients_of_rules_pass_opcheck(name: str) -> None:
    arguments, options = _gradient_call(name, "contiguous", torch.float32, learned=True)
    arguments[1].requires_grad_()
    _check("attention_gradients", arguments, options)


@pytest.mark.slow
def test_attention_gradients_of_statistics_pass_opcheck() -> None:
    tensors = _qkv()
    output, softmax, exact, _, ties = _attention(
        tensors, SOFTMAX | OUTPUT32 | MAX_SCORE | TIES, statistic_sizes=[1, 0, 0, 0]
    )
    statistics = [ties, *(torch.randn(2, 4, 9) for _ in range(4)), torch.randn(2, 4, 11)]
    tensors[0].requires_grad_()
    arguments = (torch.randn_like(output), *tensors, softmax, exact, 0.3)
    _check(
        "attention_gradients", arguments, {"statistics": statistics, "sink_keys": 1, "grad_lse": torch.randn(2, 4, 9)}
    )


# ---- linear attention ----------------------------------------------------------------------------------------------

MEMBERS = ("plain", "normalized", "gate per token", "gate per channel", "delta", "delta with gates")


def _linear_call(member: str, layout: str = "contiguous", *, state: bool = True, length: int = 21) -> list[Any]:
    """Tensor arguments of ``linear_attention_forward``, without ``chunk`` and later options."""
    make = LAYOUTS[layout]
    gates = {"gate per token": 1, "gate per channel": 5, "delta with gates": 1}.get(member, 0)
    return [
        *(make(2, heads, length, dim) for heads, dim in ((4, 5), (2, 5), (2, 7))),
        -make(2, 2, length, gates).abs() if gates else None,
        make(2, 2, length, 1).sigmoid() if member.startswith("delta") else None,
        torch.randn(2, 2, 5, 7) if state else None,
        torch.rand(2, 2, 5) + 1.0 if state and member == "normalized" else None,
    ]


def _linear(member: str, tensors: list[Any], for_backward: bool = True) -> tuple[Tensor | None, ...]:
    results: tuple[Tensor | None, ...] = torch.ops.clearhead.linear_attention_forward.default(
        *tensors, *_numbers(member), member == "normalized", for_backward
    )
    return results


def _numbers(member: str) -> tuple[int, float, int]:
    return 1 if member == "normalized" else 0, 0.7, 8


def _linear_gradient_call(member: str, layout: str = "contiguous", length: int = 21) -> list[Any]:
    tensors = _linear_call(member, layout, length=length)
    output, matrix, normalizer, shares, states, sums = _linear(member, tensors)
    grads = [None if part is None else torch.randn_like(part) for part in (output, matrix, normalizer)]
    read = output if member == "normalized" else None
    return [*grads, *tensors[:5], read, shares, states, sums, *_numbers(member)]


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("member", "for_backward", "layout"), _covering([*MEMBERS] * 2, [False] * 6 + [True] * 6, LAYOUTS)
)
def test_linear_attention_forward_passes_opcheck(layout: str, member: str, for_backward: bool) -> None:
    tensors = _linear_call(member, layout)
    tensors[0].requires_grad_()
    _check("linear_attention_forward", (*tensors, *_numbers(member), member == "normalized", for_backward), {})


@pytest.mark.slow
@pytest.mark.parametrize(("member", "layout"), _covering([*MEMBERS], LAYOUTS))
def test_linear_attention_gradients_pass_opcheck(layout: str, member: str) -> None:
    arguments = _linear_gradient_call(member, layout)
    arguments[3].requires_grad_()
    _check("linear_attention_gradients", arguments, {})


@pytest.mark.covering(0)
@pytest.mark.parametrize("member", MEMBERS)
def test_linear_attention_of_no_tokens_returns_the_state(member: str) -> None:
    tensors = _linear_call(member, length=0)
    output, matrix, normalizer, *_ = _linear(member, tensors)
    assert output is not None
    assert output.shape == (2, 4, 0, 7)
    assert torch.equal(matrix, tensors[5])  # type: ignore[arg-type]
    if normalizer is not None:
        assert torch.equal(normalizer, tensors[6])
    arguments = _linear_gradient_call(member, length=0)
    grads = torch.ops.clearhead.linear_attention_gradients.default(*arguments)
    assert torch.equal(grads[5], arguments[1])
    arguments[3].requires_grad_()
    _check("linear_attention_gradients", arguments, {})


BAD: dict[str, tuple[int, Any, str]] = {
    "query without heads": (0, torch.ones(2, 21, 5), "query must be float32 .batch, heads, len, head_dim."),
    "query of another dtype": (0, torch.ones(2, 4, 21, 5).double(), "query must be float32"),
    "too many channels": (0, torch.ones(2, 4, 21, 257), "query must have 1 to 256 channels"),
    "fewer keys": (1, torch.ones(2, 2, 20, 5), r"key must be float32 of shape \(2, 2, 21, 5\)"),
    "heads that do not divide": (1, torch.ones(2, 3, 21, 5), "key must have a number of heads that divides"),
    "value of another batch": (2, torch.ones(1, 2, 21, 7), r"value must be float32 of shape \(2, 2, 21, 7\)"),
    "gates of some features": (3, torch.ones(2, 2, 21, 3), "log_decay must be float32 of shape"),
    "rate without its axis": (4, torch.ones(2, 2, 21), "rate must be float32 of shape"),
    "state of another width": (5, torch.ones(2, 2, 5, 6), r"state must be float32 of shape \(2, 2, 5, 7\)"),
    "normaliser of another width": (6, torch.ones(2, 2, 4), r"normalizer must be float32 of shape \(2, 2, 5\)"),
    "no such feature map": (7, 3, "feature_map must be 0"),
    "infinite scale": (8, float("inf"), "scale must be finite"),
    "no tokens in a chunk": (9, 0, "chunk must be 1 to 256"),
    "normalised states that decay": (10, True, "normalized must be False with log_decay or rate"),
}


@pytest.mark.parametrize("name", BAD)
def test_linear_attention_rejects_invalid_arguments(name: str) -> None:
    place, bad, expected = BAD[name]
    arguments = [*_linear_call("delta with gates"), *_numbers("delta with gates"), False, True]
    torch.ops.clearhead.linear_attention_forward.default(*arguments)
    arguments[place] = bad
    with pytest.raises(RuntimeError, match=f"linear_attention: {expected}.*; got .*"):
        torch.ops.clearhead.linear_attention_forward.default(*arguments)


BAD_GRADIENTS: dict[str, tuple[int, Any, str]] = {
    "gradient of another shape": (0, torch.ones(2, 4, 20, 7), "grad_output must be"),
    "gradient of another state": (1, torch.ones(2, 2, 5, 6), "grad_last_state must be"),
    "gradient of another normaliser": (2, torch.ones(2, 2, 4), "grad_last_normalizer must be"),
    "no output": (8, None, "output must be a tensor"),
    "row sums of other rows": (9, torch.ones(2, 4, 20), "shares must be"),
    "states of other chunks": (10, torch.ones(2, 2, 2, 5, 16), "states must be"),
    "no sums": (11, None, "sums must be a tensor"),
}


@pytest.mark.parametrize("name", BAD_GRADIENTS)
def test_linear_attention_gradients_reject_invalid_arguments(name: str) -> None:
    place, bad, expected = BAD_GRADIENTS[name]
    arguments = _linear_gradient_call("normalized")
    arguments[place] = bad
    with pytest.raises(RuntimeError, match=f"linear_attention: {expected}"):
        torch.ops.clearhead.linear_attention_gradients.default(*arguments)


@pytest.mark.parametrize("place", [0, 1])
def test_operators_reject_tensors_of_several_devices(place: int) -> None:
    tensors, inputs = _qkv(), _linear_call("plain")
    tensors[place], inputs[place] = tensors[place].to("meta"), inputs[place].to("meta")
    with pytest.raises(RuntimeError, match=r"^attention: every tensor must be on one device; got cpu and meta"):
        _attention(tensors, 0)
    with pytest.raises(RuntimeError, match=r"^linear_attention: every tensor must be on one device; got cpu and meta"):
        _linear("plain", inputs)


def test_operators_on_the_meta_device_give_shapes() -> None:
    inputs = _linear_call("normalized", "interleaved")
    results = _linear("normalized", [None if part is None else part.to("meta") for part in inputs])
    for one, real in zip(results, _linear("normalized", inputs), strict=True):
        assert one is not None
        assert real is not None
        assert (one.shape, one.stride(), one.dtype) == (real.shape, real.stride(), real.dtype)
        assert one.is_meta


# ---- vmap ----------------------------------------------------------------------------------------------------------


def _same(actual: Any, expected: list[Any]) -> None:
    """Assert that a vmapped call equals the stacked single calls."""
    for one, singles in zip(actual, zip(*expected, strict=True), strict=True):
        if one is None:
            assert all(single is None for single in singles)
        else:
            torch.testing.assert_close(one, torch.stack(singles), rtol=1e-6, atol=1e-6)


@every_option
@pytest.mark.parametrize("vmapped", [(0, None, None), (1, 0, 2), (None, None, 0)])
def test_attention_forward_under_vmap_matches_each_entry(name: str, vmapped: tuple[int | None, ...]) -> None:
    options = OPTIONS[name]()
    many = [[_qkv()[place] for _ in range(3)] for place in range(3)]
    inputs = [parts[0] if dim is None else torch.stack(parts, dim) for parts, dim in zip(many, vmapped, strict=True)]

    def call(*tensors: Tensor) -> list[Tensor]:
        return _attention([*tensors], LSE | SOFTMAX, **options)

    singles = [
        call(*(parts[0] if dim is None else parts[place] for parts, dim in zip(many, vmapped, strict=True)))
        for place in range(3)
    ]
    _same(torch.vmap(call, in_dims=vmapped)(*inputs), singles)


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("sink", lambda: torch.randn(3, 4)),
        ("allowed", lambda: torch.rand(3, 1, 4, 9, 11) > 0.3),
        ("stop", lambda: torch.randint(1, 11, (3, 1, 1, 9, 1), dtype=torch.int32)),
    ],
)
def test_attention_under_vmap_over_a_mask_or_sink(argument: str, parts: Callable[[], Tensor]) -> None:
    tensors, many = _qkv(), parts()
    shared = {"start": torch.zeros(1, 1, 9, 1, dtype=torch.int32)} if argument == "stop" else {}

    def call(part: Tensor) -> list[Tensor]:
        return _attention(tensors, LSE, **{argument: part}, **shared)

    _same(torch.vmap(call)(many), [call(part) for part in many])


@pytest.mark.parametrize("shape", [(3, 2, 1, 9, 11), (3, 4)], ids=["dense", "slopes"])
def test_attention_under_vmap_over_a_bias(shape: tuple[int, ...]) -> None:
    (query, key, value), tables = _qkv(), torch.rand(shape)
    queries = torch.randn(3, *query.shape)

    def call(query: Tensor, table: Tensor) -> list[Tensor]:
        return _attention([query, key, value], 0, rule_kinds=[3 if table.ndim == 4 else 1], rule_tables=[table])

    _same(torch.vmap(call)(queries, tables), [call(*pair) for pair in zip(queries, tables, strict=True)])


@pytest.mark.parametrize(
    ("name", "learned"),
    [
        ("causal", False),
        ("intervals per entry", False),
        ("dense bias", False),
        ("dense bias", True),
        ("dropout", False),
    ],
)
def test_attention_gradients_under_vmap_match_each_entry(name: str, learned: bool) -> None:
    (grad, *rest), options = _gradient_call(name, "interleaved", torch.float32, learned=learned)
    many = torch.stack([torch.randn_like(grad) for _ in range(3)])

    def call(upstream: Tensor) -> list[Tensor]:
        grads, finite = torch.ops.clearhead.attention_gradients.default(upstream, *rest, **options)
        assert finite
        return list(grads)

    _same(torch.vmap(call)(many), [call(one) for one in many])


@pytest.mark.parametrize("member", MEMBERS)
def test_linear_attention_under_vmap_matches_each_entry(member: str) -> None:
    many = [_linear_call(member) for _ in range(3)]
    stacked = [None if parts[0] is None else torch.stack(parts) for parts in zip(*many, strict=True)]
    dims = tuple(None if part is None else 0 for part in stacked)

    def call(*tensors: Any) -> tuple[Any, ...]:
        return tuple(part for part in _linear(member, [*tensors]) if part is not None)

    _same(torch.vmap(call, in_dims=dims)(*stacked), [call(*tensors) for tensors in many])
    # Only the value is mapped.
    only = torch.vmap(lambda value: call(*many[0][:2], value, *many[0][3:]))(stacked[2])
    _same(only, [call(*many[0][:2], tensors[2], *many[0][3:]) for tensors in many])


@pytest.mark.parametrize("member", MEMBERS)
def test_linear_attention_gradients_under_vmap_match_each_entry(member: str) -> None:
    arguments = _linear_gradient_call(member)
    many = torch.randn(3, *arguments[0].shape)

    def call(upstream: Tensor) -> tuple[Any, ...]:
        grads = torch.ops.clearhead.linear_attention_gradients.default(upstream, *arguments[1:])
        return tuple(part for part in grads if part is not None)

    _same(torch.vmap(call)(many), [call(one) for one in many])


# ---- FLOPs ---------------------------------------------------------------------------------------------------------


def _flops(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    total: int = counter.get_total_flops()
    return total


@pytest.mark.parametrize(
    ("before", "after", "offset"), [(None, None, 0), (None, 0, 0), (3, 1, 2), (0, 0, 5), (None, 2, 20), (2, None, -30)]
)
def test_attention_counts_the_pairs_within_its_window(before: int | None, after: int | None, offset: int) -> None:
    tensors = _qkv()
    options = {"before": before, "after": after, "query_offset": offset}
    pairs = sum(
        (before is None or row + offset - key <= before) and (after is None or key - row - offset <= after)
        for row in range(9)
        for key in range(11)
    )
    assert _flops(lambda: _attention(tensors, 0, **options)) == 2 * 2 * 4 * pairs * (8 + 6)
    output, softmax, exact = _attention(tensors, SOFTMAX | OUTPUT32, **options)
    backward = torch.ops.clearhead.attention_gradients.default
    flops = _flops(lambda: backward(output, *tensors, softmax, exact, 0.3, **options))
    assert flops == 2 * 2 * 4 * pairs * (3 * 8 + 2 * 6)


def test_flops_of_full_attention_equal_torchs() -> None:
    query, key, value = (torch.randn(2, 4, 9, 8, requires_grad=True) for _ in range(3))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = _flops(lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value))
    assert _flops(lambda: _attention([query.detach(), key.detach(), value.detach()], 0)) == expected


def test_linear_attention_counts_its_chunks() -> None:
    """21 tokens in chunks of 8, 8 and 5: 36 + 36 + 15 pairs; 4 heads of queries, 2 of keys; 5 features, 7 channels."""
    state, pairs, earlier = 21 * 5 * 7, 87, 66
    forward = 4 * (state + pairs * 12) + 2 * state
    correction = 2 * (state + earlier * 12)
    for member, expected in (("plain", forward), ("delta", forward + correction)):
        tensors = _linear_call(member)
        assert _flops(lambda member=member, tensors=tensors: _linear(member, tensors)) == 2 * 2 * expected  # type: ignore[misc]
    backward = 4 * (2 * state + pairs * (3 * 5 + 2 * 7)) + 2 * 2 * state
    through = correction + 2 * (2 * state + earlier * (2 * 5 + 2 * 7))
    for member, expected in (("plain", backward), ("delta", backward + through)):
        arguments = _linear_gradient_call(member)
        flops = _flops(lambda arguments=arguments: torch.ops.clearhead.linear_attention_gradients.default(*arguments))  # type: ignore[misc]
        assert flops == 2 * 2 * expected


def test_a_training_step_of_linear_attention_counts_both_operators() -> None:
    query, key, value = (torch.randn(1, 2, 64, 16, requires_grad=True) for _ in range(3))

    def step() -> None:
        output, _ = ch.linear_attention(query, key, value, causal=True, form="chunked", chunk_size=32)
        output.sum().backward()

    state, pairs = 64 * 16 * 16, 2 * (32 * 33 // 2)
    assert _flops(step) == 2 * 2 * (2 * state + pairs * 32 + 4 * state + pairs * 5 * 16)


@pytest.mark.parametrize("options", [{}, {"mask": ch.Window(3, 2)}, {"scores": ch.SoftCap(5.0)}, {"dropout": 0.5}])
def test_a_training_step_of_attention_counts_both_operators(options: dict[str, Any]) -> None:
    query, key, value = (torch.randn(1, 2, 300, 16, requires_grad=True) for _ in range(3))
    before, after = (3, 2) if "mask" in options else (None, None)
    pairs = sum(
        (before is None or row - key_place <= before) and (after is None or key_place - row <= after)
        for row in range(300)
        for key_place in range(300)
    )
    flops = _flops(lambda: ch.attention(query, key, value, backend="native", **options).sum().backward())
    assert flops == 2 * 2 * pairs * (2 * 16 + 5 * 16)
