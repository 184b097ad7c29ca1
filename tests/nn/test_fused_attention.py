"""Fused attention with its projections gives the bits of the op-by-op path, which runs if a part is observed or
replaced."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import clearhead as ch
from clearhead import choices as sizes
from clearhead import positions
from clearhead.nn.fused import fused_attention
from clearhead.nn.linear import Linear
from clearhead.testing import forbid_fused, force_fused, fused_calls
from tests.agreement import needs_native
from tests.gemms import name_gemm
from tests.threads import on_threads

pytestmark = [needs_native, pytest.mark.covering(1)]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels for GEMMs of any size."""
    name_gemm(monkeypatch, "native")
    monkeypatch.setattr(sizes, "SMALL", 1)


def module(dtype: torch.dtype = torch.float32, **options: Any) -> ch.nn.MultiHeadAttention:
    torch.manual_seed(1)
    return ch.nn.MultiHeadAttention(48, 4, backend="native", **options).to(dtype)


def tokens(dtype: torch.dtype = torch.float32, batch: int = 3, length: int = 37) -> Tensor:
    return torch.randn(batch, length, 48, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()


def output_and_gradients(call: Callable[[], Tensor], inputs: list[Tensor], *, fused: bool = True) -> list[Tensor]:
    """Output and gradients of a call, then the next random values; ``fused``: whether one operator must run."""
    torch.manual_seed(7)
    with fused_calls() as calls:
        output = call()
    assert calls == ["attention"] * fused
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output.dtype)
    after = torch.rand(3)
    return [output.detach(), *torch.autograd.grad(output, inputs, upstream), after]


def unfused(call: Callable[..., Tensor], *given: Any, **options: Any) -> Tensor:
    """Call, and assert that no fused attention ran."""
    with fused_calls() as calls:
        output = call(*given, **options)
    assert calls == []
    return output


def same(call: Callable[[], Tensor], inputs: list[Tensor], rtol: float = 0.0, atol: float = 0.0) -> None:
    """Assert that outputs have the bits of op-by-op calls, and gradients too or within the tolerances."""
    fused_results = [output_and_gradients(call, inputs) for _ in range(2)]
    with forbid_fused():
        right = output_and_gradients(call, inputs, fused=False)
    for results in fused_results:
        torch.testing.assert_close(
            results[:: len(results) - 1], right[:: len(right) - 1], rtol=0.0, atol=0.0, equal_nan=True
        )
        for one, other in zip(results, right, strict=True):
            torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True)


MASKS = [
    None,
    ch.Causal(),
    ch.Window(5),
    ch.Padding(torch.tensor([37, 5, 0])),
    ch.Causal() & ch.Padding(torch.tensor([1, 37, 9])),
    ch.Dense(torch.rand(37, 37, generator=torch.Generator().manual_seed(4)) < 0.3),
]


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: type(mask).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"num_kv_heads": 2},
        {"dropout": 0.3},
        {"scale": 0.5},
        {"rotary": True},
        {"rotary": 50.0, "num_kv_heads": 2, "head_dim": 22},
    ],
    ids=str,
)
def test_fused_bits_equal_op_by_op_bits(options: dict[str, Any], dtype: torch.dtype, mask: ch.Mask | None) -> None:
    attention, x = module(dtype, **options), tokens(dtype)
    same(lambda: attention(x, mask=mask), [x, *attention.parameters()])


@pytest.mark.parametrize("shape", [(1, 1), (1, 64), (7, 1), (2, 300)])
def test_any_length_equals_op_by_op(shape: tuple[int, int]) -> None:
    attention, x = module(), tokens(batch=shape[0], length=shape[1])
    same(lambda: attention(x), [x, *attention.parameters()])


def test_strided_tokens_equal_op_by_op() -> None:
    attention, wide = module(), torch.randn(2, 48, 33).requires_grad_()
    same(lambda: attention(wide.transpose(1, 2)), [wide, *attention.parameters()])


@pytest.mark.parametrize("offset", [None, 0, 5, 1000])
@pytest.mark.parametrize("mask", [None, ch.Causal()], ids=str)
def test_rotary_query_offset_equals_op_by_op(mask: ch.Mask | None, offset: int | None) -> None:
    attention, x = module(rotary=True), tokens()
    same(lambda: attention(x, mask=mask, query_offset=offset), [x, *attention.parameters()])


@pytest.mark.parametrize("offset", [0, 3, 700])
def test_rotary_cross_attention_equals_op_by_op(offset: int) -> None:
    attention, x, memory = module(rotary=True, num_kv_heads=2), tokens(), tokens(length=50)
    options = {"mask": ch.Causal(), "query_offset": offset}
    same(lambda: attention(x, memory, **options), [x, memory, *attention.parameters()])
    with pytest.raises(ch.MaskError, match="query_offset must be given"):
        attention(x, memory)


@pytest.mark.parametrize("offset", [-1, positions.MOST_POSITIONS])
def test_rotary_positions_beyond_the_table_run_op_by_op(offset: int) -> None:
    attention, x = module(rotary=True), tokens()
    output = unfused(attention, x, query_offset=offset)
    wide = copy.deepcopy(attention).double()
    wide.backend = "auto"
    torch.testing.assert_close(output.double(), wide(x.double(), query_offset=offset), rtol=1e-5, atol=1e-5)


def _alibi_function(score: Tensor, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    return score - 0.1 * (q_pos - k_pos).abs()


def _of_batch(score: Tensor, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    return score * (1.0 + 0.1 * batch)


@pytest.mark.parametrize(
    "scores",
    [
        (ch.Alibi(4),),
        (ch.SoftCap(5.0),),
        (ch.Sink([0.0, 1.0, -1.0, 3.0]),),
        (ch.ScoreFunction(_alibi_function),),
        (ch.SoftCap(5.0), ch.ScoreFunction(_alibi_function)),
        (ch.DenseBias(torch.randn(37, 37, generator=torch.Generator().manual_seed(5))), ch.Alibi(4)),
    ],
    ids=["alibi", "softcap", "sink", "function", "capped function", "dense"],
)
def test_fixed_score_rules_equal_op_by_op(scores: Any) -> None:
    attention, x = module(scores=scores), tokens()
    same(lambda: attention(x, mask=ch.Causal()), [x, *attention.parameters()])


@pytest.mark.parametrize("fn", [_alibi_function, _of_batch], ids=["recognised", "unrecognised"])
@pytest.mark.parametrize("grad", [True, False], ids=["training", "no gradients"])
@pytest.mark.parametrize("whole", [False, True], ids=["module", "block"])
def test_a_score_function_in_a_module_matches_float64(whole: bool, grad: bool, fn: Any) -> None:
    """A module as users build it: kernels are chosen by size."""
    torch.manual_seed(0)
    make = ch.nn.DecoderBlock if whole else ch.nn.MultiHeadAttention
    attention, x = make(48, 4, scores=ch.ScoreFunction(fn)).eval(), tokens().detach()
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            output = attention(x, mask=ch.Causal())
            exact = copy.deepcopy(attention).double()(x.double(), mask=ch.Causal())
            torch.testing.assert_close(output.double(), exact, rtol=1e-4, atol=1e-4)
            if grad:
                output.sum().backward()
    with torch.no_grad():
        cache = ch.KVCache()
        parts = [attention(part, mask=ch.Causal(), cache=cache) for part in x.split([20, 1, 16], 1)]
    torch.testing.assert_close(torch.cat(parts, 1).double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("needed", ["x", "weights", "last", "biases", "query", "one bias"])
def test_only_needed_gradients_are_computed(needed: str) -> None:
    attention, x = module(), tokens()
    needed_tensors = {
        "x": [x],
        "weights": [part for name, part in attention.named_parameters() if name.endswith("weight")],
        "last": [attention.output_projection.weight],  # type: ignore[union-attr]
        "biases": [part for name, part in attention.named_parameters() if name.endswith("bias")],
        "query": [attention.query_projection.weight],
        "one bias": [attention.value_projection.bias],
    }[needed]
    for part in (x, *attention.parameters()):
        part.requires_grad_(any(part is one for one in needed_tensors))
    # The gradient of a bias without its weight is a separate sum; op by op, torch computes it.
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if "bias" in needed else {}
    same(lambda: attention(x, mask=ch.Causal()), needed_tensors, **tolerance)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_infinity_reach_only_rows_that_attend_to_them(bad: float, dtype: torch.dtype) -> None:
    attention, x = module(dtype), tokens(dtype)
    with torch.no_grad():
        x[1, 20] = bad
    # Backward runs op by op and sums the input gradients of queries, keys and values in another order.
    rounding = 1e-5 if dtype is torch.float32 else 0.05
    same(lambda: attention(x, mask=ch.Causal()), [x, *attention.parameters()], rtol=rounding, atol=rounding)
    output = attention(x, mask=ch.Causal())
    assert bool(output[0].isfinite().all() and output[1, :20].isfinite().all() and not output[1, 20:].isfinite().any())


def test_no_grad_equals_op_by_op() -> None:
    attention, x = module(), tokens()
    with torch.no_grad():
        together = attention(x, mask=ch.Causal())
        with forbid_fused():
            assert torch.equal(together, attention(x, mask=ch.Causal()))


def test_backward_twice_gives_the_same_bits() -> None:
    attention, x = module(), tokens()
    output = attention(x)
    first = torch.autograd.grad(output.sum(), [x], retain_graph=True)
    second = torch.autograd.grad(output.sum(), [x])
    assert torch.equal(first[0], second[0])


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "rotary": True}, {"scores": ch.Alibi(4)}], ids=str)
def test_second_derivatives_of_tokens_and_every_parameter(options: dict[str, Any]) -> None:
    attention, x = module(**options), tokens(length=6)

    def seconds(attention: ch.nn.MultiHeadAttention, x: Tensor) -> list[Tensor]:
        inputs = [x, *attention.parameters()]
        first = torch.autograd.grad(attention(x, mask=ch.Causal()).square().sum(), inputs, create_graph=True)
        return [*torch.autograd.grad(sum((part.square().sum() for part in first), x.new_zeros(())), inputs)]

    with force_fused():
        actual = seconds(attention, x)
    wide = copy.deepcopy(attention).double()
    wide.backend = "reference"
    exact = seconds(wide, x.detach().double().requires_grad_())
    # The gradient of a key bias is 0: what remains is rounding, relative to the other gradients.
    largest = max(float(part.abs().max()) for part in exact)
    for one, right in zip(actual, exact, strict=True):
        torch.testing.assert_close(one.double(), right, rtol=1e-4, atol=1e-6 * largest)


def test_batched_gradients_equal_single_gradients() -> None:
    attention, x = module(), tokens(length=6)
    inputs, upstream = [x, *attention.parameters()], torch.randn(3, *x.shape)
    with force_fused():
        output = attention(x)
    many = torch.autograd.grad(output, inputs, upstream, is_grads_batched=True, retain_graph=True)
    for place, one in enumerate(upstream):
        alone = torch.autograd.grad(output, inputs, one, retain_graph=True)
        torch.testing.assert_close([part[place] for part in many], [*alone], rtol=1e-4, atol=1e-5)


def test_an_output_may_be_modified_in_place() -> None:
    attention, x = module(), tokens()
    output = attention(x)
    plain = torch.autograd.grad(attention(x).mul(2.0).sum(), x)[0]
    output.mul_(2.0)
    assert torch.equal(torch.autograd.grad(output.sum(), x)[0], plain)


class TestChanges:
    """A call does not reuse stale data of an earlier call."""

    def test_changed_tokens_and_weights_take_effect(self) -> None:
        attention = module()
        for round_ in range(6):
            x = torch.randn(3, 37, 48, generator=torch.Generator().manual_seed(round_)).requires_grad_()
            for part in attention.parameters():
                part.data = part.data + 0.01 * round_  # elsewhere in memory
            same(partial(attention, x), [x, *attention.parameters()])

    @pytest.mark.parametrize("dense_first", [True, False])
    @pytest.mark.parametrize("where", ["x", "weight", "gradient"])
    def test_changed_strides_take_effect(self, where: str, dense_first: bool) -> None:
        """Slices after dense tensors and before them: cache keys include row strides."""
        attention = module()
        plain, weight = tokens(), attention.query_projection.weight.detach()

        def laid(tensor: Tensor, strided: bool) -> Tensor:
            wide = torch.cat([torch.full_like(tensor, torch.nan), tensor], -1)
            return wide.chunk(2, -1)[1] if strided else tensor.clone()

        for round_ in range(2):
            strided = (round_ == 1) == dense_first
            x = laid(plain.detach(), strided and where == "x").requires_grad_()
            attention.query_projection.weight = nn.Parameter(laid(weight, strided and where == "weight"))
            inputs = [x, *attention.parameters()]

            def called(x: Tensor = x, wide: bool = strided and where == "gradient") -> list[Tensor]:
                output = attention(x)
                upstream = laid(torch.randn(output.shape, generator=torch.Generator().manual_seed(3)), wide)
                return [output.detach(), *torch.autograd.grad(output, inputs, upstream)]  # noqa: B023

            with force_fused():
                together = called()
            with forbid_fused():
                assert all(torch.equal(one, other) for one, other in zip(together, called(), strict=True))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("band", [None, ch.Causal(), ch.Window(5)], ids=str)
    def test_packed_batches_with_different_masks(self, band: ch.Mask | None, dtype: torch.dtype) -> None:
        """Packed sequences of different lengths: interval bounds are read from each mask."""
        attention, x = module(dtype), tokens(dtype, batch=1)

        def masked(*lengths: int) -> ch.Mask:
            documents = ch.Documents(lengths=lengths)
            return documents if band is None else documents & band

        for lengths in ((30, 7), (1, 36), (2, 35)):
            mask = masked(*lengths)
            same(partial(attention, x, mask=mask), [x, *attention.parameters()])

    def test_alternating_masks_take_effect(self) -> None:
        attention, x = module(), tokens()
        masks = [ch.Padding(torch.tensor(lengths)) for lengths in ([37, 5, 1], [2, 30, 37])]
        for mask in masks * 4:
            same(partial(attention, x, mask=mask), [x, *attention.parameters()])

    def test_a_mask_modified_in_place_takes_effect(self) -> None:
        attention, x, lengths = module(), tokens(), torch.tensor([37, 5, 1])
        table = torch.ones(37, 37, dtype=torch.bool)
        for mask in (ch.Padding(lengths), ch.Dense(table)):
            for _ in range(4):
                attention(x, mask=mask).sum().backward()
            lengths[1], table[:, 3] = 30, False
            same(partial(attention, x, mask=mask), [x, *attention.parameters()])

    @pytest.mark.parametrize("offset", [True, [1], 1.5, "1"])
    def test_an_invalid_option_raises_after_valid_calls(self, offset: Any) -> None:
        attention, x = module(), tokens()
        for _ in range(3):
            attention(x, query_offset=1)
        with pytest.raises(ch.ClearheadError, match="query_offset"):
            attention(x, query_offset=offset)

    def test_each_call_draws_a_new_dropout_mask(self) -> None:
        attention, x = module(dropout=0.5), tokens()
        outputs = [attention(x).detach() for _ in range(5)]
        assert all(not torch.equal(one, other) for one, other in itertools.pairwise(outputs))

    def test_tied_weights_can_be_separated(self) -> None:
        attention, x = module(), tokens()
        tied = attention.query_projection.weight
        attention.key_projection.weight = tied
        for _ in range(4):
            attention(x).sum().backward()
        attention.key_projection.weight = nn.Parameter(tied.detach() * 2.0)
        same(lambda: attention(x), [x, *attention.parameters()])

    def test_concurrent_threads_give_the_same_bits(self) -> None:
        attention, x = module(), tokens(batch=2, length=100)
        right = attention(x).detach()
        wrong: list[int] = []

        def repeat(_: int) -> None:
            for _ in range(40):
                leaf = x.detach().requires_grad_()
                output = attention(leaf)
                (grad,) = torch.autograd.grad(output.sum(), leaf)
                if not torch.equal(output, right) or not torch.equal(grad, expected):
                    wrong.append(1)

        leaf = x.detach().requires_grad_()
        (expected,) = torch.autograd.grad(attention(leaf).sum(), leaf)
        on_threads(6, repeat)
        assert wrong == []


class Doubled(Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * super().forward(input)


def _hooked(attention: ch.nn.MultiHeadAttention) -> None:
    attention.key_projection.register_forward_hook(lambda module, given, output: 2.0 * output)


def _replaced(attention: ch.nn.MultiHeadAttention) -> None:
    attention.value_projection = Doubled(48, 48)


def _patched(attention: ch.nn.MultiHeadAttention) -> None:
    attention.output_projection.forward = lambda input: input * 3.0  # type: ignore[union-attr, method-assign, assignment]


@pytest.mark.parametrize("change", [_hooked, _replaced, _patched])
def test_a_replaced_part_is_called(change: Callable[[ch.nn.MultiHeadAttention], None]) -> None:
    attention, x = module(), tokens()
    change(attention)
    output = unfused(attention, x)
    with forbid_fused():
        assert torch.equal(output, attention(x))


@pytest.mark.parametrize(
    "options",
    [
        {"output_projection": False},
        {"scores": [ch.RelativeBias(nn.Parameter(torch.zeros(4, 9)))]},
        {"scores": [ch.Sink(nn.Parameter(torch.zeros(4)))]},
    ],
    ids=["no output", "learned bias", "learned sink"],
)
def test_unsupported_options_run_op_by_op(options: dict[str, Any]) -> None:
    attention, x = module(**options), tokens()
    unfused(attention, x)


def test_observers_see_the_attention() -> None:
    attention, x = module(), tokens()
    with ch.observe(attention, ch.Want(entropy=True)) as observations:
        attention(x)
    assert len(list(observations)) == 1


def test_separate_values_caches_and_other_backends_run_op_by_op() -> None:
    attention, x = module(), tokens()
    unfused(attention, x, x, x.detach().clone())
    unfused(attention, x, tokens(), tokens())
    with torch.no_grad():
        cache = ch.KVCache()
        first = attention(x, mask=ch.Causal(), cache=cache)
        assert cache.length == 37
        torch.testing.assert_close(first, attention(x, mask=ch.Causal()), rtol=1e-6, atol=1e-6)
    attention.backend = "tiled"
    unfused(attention, x)


def test_op_by_op_calls_draw_the_same_seeds() -> None:
    attention, x = module(dropout=0.5), tokens()
    attention.backend = "tiled"
    outputs = []
    for context in (contextlib.nullcontext(), forbid_fused()):
        torch.manual_seed(11)
        with context:
            outputs.append(attention(x).detach())
    assert torch.equal(*outputs)


def test_autocast_and_functional_transforms_run_op_by_op() -> None:
    attention, x = module(), tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        unfused(attention, x)
    plain = attention(x)
    mapped = torch.func.functional_call(attention, dict(attention.named_parameters()), (x,))
    assert torch.equal(plain, mapped)


def test_checkpointing_gives_the_same_bits() -> None:
    attention, x = module(dropout=0.3), tokens()
    results = []
    for call in (attention, lambda x: checkpoint(attention, x, use_reentrant=False)):
        torch.manual_seed(13)
        output = call(x)
        results.append([output, *torch.autograd.grad(output.square().sum(), [x, *attention.parameters()])])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_fused_and_op_by_op_errors_are_equal() -> None:
    attention, x = module(), tokens()
    messages = []
    for context in (contextlib.nullcontext(), forbid_fused()):
        with context, pytest.raises(ch.MaskError) as raised:
            attention(x, mask=ch.Padding(torch.tensor([1, 2])))
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_swapped_torch_module_matches_the_original(dtype: torch.dtype, padded: bool, batch_first: bool) -> None:
    torch.manual_seed(1)
    theirs = nn.MultiheadAttention(48, 4, dropout=0.2, batch_first=batch_first).to(dtype)
    ours = copy.deepcopy(theirs)
    ch.swap(ours)
    x = tokens(dtype, batch=3 if batch_first else 37, length=37 if batch_first else 1)
    batch = x.shape[0] if batch_first else 1
    padding = torch.arange(37)[None] >= torch.tensor([37, 5, 20])[:batch, None] if padded else None

    def call(layer: nn.Module) -> Tensor:
        output: Tensor = layer(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        return output

    results = [output_and_gradients(lambda: call(ours), [x, *ours.parameters()]) for _ in range(2)]
    assert all(map(torch.equal, *results))
    with torch.no_grad():
        rounding = 4 * torch.finfo(dtype).eps
        pair = [call(layer.eval()) for layer in (ours, theirs)]
        torch.testing.assert_close(*pair, rtol=rounding, atol=rounding)


def test_training_decreases_the_loss() -> None:
    attention, x = module(), tokens()
    optimizer = torch.optim.SGD(attention.parameters(), lr=0.5)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (attention(x, mask=ch.Causal()) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)


def test_unsupported_shapes_and_dtypes_return_none() -> None:
    attention = module()
    projections = attention.projections()
    assert projections is not None
    for x in (torch.zeros(5, 48), torch.zeros(0, 5, 48), torch.zeros(2, 0, 48), torch.zeros(2, 5, 48).double()):
        assert fused_attention([x], projections) is None
    x = torch.zeros(2, 5, 48)
    for memory in (torch.zeros(2, 3, 47), torch.zeros(1, 3, 48), torch.zeros(2, 0, 48), x.double(), x[0]):
        assert fused_attention([x, memory], projections) is None
    assert fused_attention([x, x.clone()], projections) is not None


class TestFewTokens:
    """Calls too small for any GEMM to be chosen by size, with the default thresholds."""

    @pytest.fixture(autouse=True)
    def _default_thresholds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sizes, "SMALL", 2**22)

    @pytest.mark.parametrize("mask", MASKS[:5], ids=lambda mask: type(mask).__name__)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_few_tokens_are_fused(self, dtype: torch.dtype, mask: ch.Mask | None) -> None:
        attention, x = module(dtype), tokens(dtype)
        inputs, within = [x, *attention.parameters()], 1e-5 if dtype == torch.float32 else 0.05
        together = [output_and_gradients(lambda: attention(x, mask=mask), inputs, fused=True) for _ in range(2)]
        with torch.no_grad():
            assert torch.equal(attention(x, mask=mask), together[0][0])
        with forbid_fused():
            parts = output_and_gradients(lambda: attention(x, mask=mask), inputs, fused=False)
        for results in together:
            for one, part in zip(results, parts, strict=True):
                torch.testing.assert_close(one, part, rtol=within, atol=within)

    @pytest.mark.parametrize("training", [False, True])
    def test_observation_gives_the_same_bits(self, training: bool) -> None:
        attention, x = module(), tokens()
        inputs = [x, *attention.parameters()]

        def called(watching: bool) -> list[Tensor]:
            with torch.set_grad_enabled(training):
                if not watching:
                    output = attention(x, mask=ch.Causal())
                else:
                    with ch.observe(attention, ch.Want(lse=True)):
                        output = attention(x, mask=ch.Causal())
            return [output, *(torch.autograd.grad(output.square().sum(), inputs) if training else ())]

        for _ in range(3):
            for one, other in zip(called(False), called(True), strict=True):
                assert torch.equal(one, other)

    def test_torch_projections_run_op_by_op(self, monkeypatch: pytest.MonkeyPatch) -> None:
        name_gemm(monkeypatch, "torch")
        attention, x = module(), tokens()
        for _ in range(3):
            unfused(attention, x)

    def test_wrong_arguments_raise_after_good_calls(self) -> None:
        attention, x = module(), tokens()
        for _ in range(3):
            attention(x, mask=ch.Padding([37, 5, 0]))
            attention(x)
        for bad, error in (
            (x[..., :47], "width"),
            (x.double(), "dtype"),
            (x[None], "axes"),
            ([1.0], "axes"),
            (None, "axes"),
        ):
            with pytest.raises(ch.ClearheadError, match=error):
                attention(bad)
        with pytest.raises(ch.ClearheadError, match="mask"):
            attention(x, mask=[1])
        with pytest.raises(ch.ClearheadError, match="lengths"):
            attention(x, mask=ch.Padding([37, 5]))
        fired: list[Any] = []
        with attention.value_projection.register_forward_hook(lambda *given: fired.append(given)):
            attention(x)
        assert len(fired) == 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert attention(x).dtype == torch.bfloat16
        with force_fused():
            attention(x)


class TestMemory:
    """Queries of one sequence, keys and values of another."""

    @staticmethod
    def memory(dtype: torch.dtype = torch.float32, batch: int = 3, length: int = 21, width: int = 48) -> Tensor:
        made = torch.randn(batch, length, width, generator=torch.Generator().manual_seed(6))
        return made.to(dtype).requires_grad_()

    @pytest.mark.parametrize(
        "mask", [None, ch.Padding([21, 5, 0]), ch.Dense(torch.rand(37, 21) < 0.5)], ids=lambda mask: type(mask).__name__
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        "options", [{}, {"bias": False}, {"num_kv_heads": 2}, {"dropout": 0.3}, {"scale": 0.5}], ids=str
    )
    def test_fused_bits_equal_op_by_op_bits(
        self, options: dict[str, Any], dtype: torch.dtype, mask: ch.Mask | None
    ) -> None:
        attention, x, memory = module(dtype, **options), tokens(dtype), self.memory(dtype)
        fused = [
            output_and_gradients(
                lambda: attention(x, memory, mask=mask), [x, memory, *attention.parameters()], fused=True
            )
        ]
        same(lambda: attention(x, memory, mask=mask), [x, *attention.parameters()])
        within = 1e-5 if dtype is torch.float32 else 0.05
        with forbid_fused():
            parts = output_and_gradients(
                lambda: attention(x, memory, mask=mask), [x, memory, *attention.parameters()], fused=False
            )
        for one, part in zip(*fused, parts, strict=True):  # the memory's gradient: two GEMMs op by op, one fused
            torch.testing.assert_close(one, part, rtol=within, atol=within)

    def test_a_memory_of_another_width_equals_op_by_op(self) -> None:
        attention, x, memory = module(key_dim=20, value_dim=20), tokens(), self.memory(width=20)
        same(lambda: attention(x, memory, memory), [x, *attention.parameters()])

    @pytest.mark.parametrize("lengths", [(1, 300), (300, 1), (5, 5)])
    def test_any_length_equals_op_by_op(self, lengths: tuple[int, int]) -> None:
        attention, x, memory = module(), tokens(length=lengths[0]), self.memory(length=lengths[1])
        same(lambda: attention(x, memory), [x, *attention.parameters()])

    def test_positions_count_from_the_offset(self) -> None:
        attention, x, memory = module(), tokens(), self.memory(length=50)
        with pytest.raises(ch.MaskError, match="query_offset"):
            attention(x, memory, mask=ch.Causal())
        same(lambda: attention(x, memory, mask=ch.Causal(), query_offset=13), [x, *attention.parameters()])

    @pytest.mark.parametrize("needed", ["x", "memory", "weights", "biases", "key"])
    def test_only_needed_gradients_are_computed(self, needed: str) -> None:
        attention, x, memory = module(), tokens(), self.memory()
        inputs = {"x": x, "memory": memory, **dict(attention.named_parameters())}
        whole = dict(
            zip(
                inputs,
                output_and_gradients(lambda: attention(x, memory), list(inputs.values()), fused=True)[1:-1],
                strict=True,
            )
        )
        wanted = [name for name in inputs if needed.rstrip("es") in name]
        for name, part in inputs.items():
            part.requires_grad_(name in wanted)
        for _ in range(4):
            gradients = output_and_gradients(
                lambda: attention(x, memory), [inputs[name] for name in wanted], fused=True
            )[1:-1]
            for name, one in zip(wanted, gradients, strict=True):
                torch.testing.assert_close(one, whole[name], rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("training", [False, True])
    def test_observation_gives_the_same_bits(self, training: bool) -> None:
        attention, x, memory = module(), tokens(), self.memory()
        with torch.set_grad_enabled(training):
            for _ in range(3):
                alone = attention(x, memory)
                with ch.observe(attention, ch.Want(lse=True)):
                    assert torch.equal(attention(x, memory), alone)

    @pytest.mark.parametrize("mask", [None, torch.rand(37, 21) < 0.3], ids=["plain", "a mask"])
    @pytest.mark.parametrize("options", [{}, {"bias": False}, {"batch_first": False}, {"dropout": 0.3}], ids=str)
    def test_a_swapped_torch_module_matches_the_original(self, options: dict[str, Any], mask: Tensor | None) -> None:
        torch.manual_seed(1)
        theirs = nn.MultiheadAttention(48, 4, **({"batch_first": True} | options))
        holder = nn.ModuleList([copy.deepcopy(theirs)])
        ch.swap(holder)
        (attention,), x, memory = holder, tokens(), self.memory()
        if not attention.batch_first:
            x, memory = (each.detach().transpose(0, 1).contiguous().requires_grad_() for each in (x, memory))
        inputs = [x, memory, *attention.parameters()]

        def call() -> Tensor:
            output: Tensor = attention(x, memory, memory, attn_mask=mask, need_weights=False)[0]
            return output

        results = [output_and_gradients(call, inputs, fused=True) for _ in range(2)]
        for result in results[1:]:
            assert all(map(torch.equal, result, results[0]))
        if not options.get("dropout"):  # small op-by-op calls use torch and its dropout
            with forbid_fused():
                parts = output_and_gradients(call, inputs, fused=False)
            for one, part in zip(results[0], parts, strict=True):
                torch.testing.assert_close(one, part, rtol=1e-5, atol=1e-5)
            right = theirs(x, memory, memory, attn_mask=mask, need_weights=False)[0]
            torch.testing.assert_close(results[0][0], right.detach(), rtol=1e-4, atol=1e-5)

    def test_wrong_arguments_raise_after_good_calls(self) -> None:
        attention, x, memory = module(), tokens(), self.memory()
        for _ in range(3):
            attention(x, memory)
        for bad, error in (
            (memory[..., :47], "width"),
            (memory.double(), "dtype"),
            (memory[:2], "batch"),
            (memory[0], "batch"),
            ([1.0], "key"),
        ):
            with pytest.raises(ch.ClearheadError, match=error):
                attention(x, bad)
        with force_fused():
            attention(x, memory)
