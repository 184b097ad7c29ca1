"""Fused attention with its projections: bitwise what it gives op by op, as it runs where a part is observed or
changed."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
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

pytestmark = needs_native


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """GEMMs of any size are the kernels'."""
    monkeypatch.setenv("CLEARHEAD_PROJECTION", "native")
    monkeypatch.setattr(sizes, "SMALL", 1)


def module(dtype: torch.dtype = torch.float32, **options: Any) -> ch.nn.MultiHeadAttention:
    torch.manual_seed(1)
    return ch.nn.MultiHeadAttention(48, 4, backend="native", **options).to(dtype)


def tokens(dtype: torch.dtype = torch.float32, batch: int = 3, length: int = 37) -> Tensor:
    return torch.randn(batch, length, 48, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()


def numbers(call: Callable[[], Tensor], inputs: list[Tensor], *, fused: bool = True) -> list[Tensor]:
    """Output and gradients of a call, and what is drawn next; ``fused`` says whether it has to be one operator."""
    torch.manual_seed(7)
    with fused_calls() as calls:
        output = call()
    assert calls == ["attention"] * fused
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output.dtype)
    after = torch.rand(3)
    return [output.detach(), *torch.autograd.grad(output, inputs, upstream), after]


def unfused(call: Callable[..., Tensor], *given: Any, **options: Any) -> Tensor:
    """The output of a call that is no fused attention."""
    with fused_calls() as calls:
        output = call(*given, **options)
    assert calls == []
    return output


def same(call: Callable[[], Tensor], inputs: list[Tensor], rtol: float = 0.0, atol: float = 0.0) -> None:
    """The bits of a fused call, output and gradients, are those op by op; or its gradients are close to those."""
    found = [numbers(call, inputs) for _ in range(2)]
    with forbid_fused():
        right = numbers(call, inputs, fused=False)
    for results in found:
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
def test_bits_are_those_op_by_op(options: dict[str, Any], dtype: torch.dtype, mask: ch.Mask | None) -> None:
    own, x = module(dtype, **options), tokens(dtype)
    same(lambda: own(x, mask=mask), [x, *own.parameters()])


@pytest.mark.parametrize("shape", [(1, 1), (1, 64), (7, 1), (2, 300)])
def test_of_any_length(shape: tuple[int, int]) -> None:
    own, x = module(), tokens(batch=shape[0], length=shape[1])
    same(lambda: own(x), [x, *own.parameters()])


def test_of_tokens_that_lie_otherwise() -> None:
    own, wide = module(), torch.randn(2, 48, 33).requires_grad_()
    same(lambda: own(wide.transpose(1, 2)), [wide, *own.parameters()])


@pytest.mark.parametrize("offset", [None, 0, 5, 1000])
@pytest.mark.parametrize("mask", [None, ch.Causal()], ids=str)
def test_rotary_positions_that_start_elsewhere(mask: ch.Mask | None, offset: int | None) -> None:
    own, x = module(rotary=True), tokens()
    same(lambda: own(x, mask=mask, query_offset=offset), [x, *own.parameters()])


@pytest.mark.parametrize("offset", [0, 3, 700])
def test_rotary_positions_of_another_sequence(offset: int) -> None:
    own, x, memory = module(rotary=True, num_kv_heads=2), tokens(), tokens(length=50)
    options = {"mask": ch.Causal(), "query_offset": offset}
    same(lambda: own(x, memory, **options), [x, memory, *own.parameters()])
    with pytest.raises(ch.MaskError, match="query_offset must be given"):
        own(x, memory)


@pytest.mark.parametrize("offset", [-1, positions.MOST_POSITIONS])
def test_rotary_positions_that_no_table_has_run_op_by_op(offset: int) -> None:
    own, x = module(rotary=True), tokens()
    output = unfused(own, x, query_offset=offset)
    wide = copy.deepcopy(own).double()
    wide.backend = "auto"
    torch.testing.assert_close(output.double(), wide(x.double(), query_offset=offset), rtol=1e-5, atol=1e-5)


def _alibi_by_hand(score: Tensor, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    return score - 0.1 * (q_pos - k_pos).abs()


def _of_batch(score: Tensor, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    return score * (1.0 + 0.1 * batch)


@pytest.mark.parametrize(
    "scores",
    [
        (ch.Alibi(4),),
        (ch.SoftCap(5.0),),
        (ch.Sink([0.0, 1.0, -1.0, 3.0]),),
        (ch.ScoreFunction(_alibi_by_hand),),
        (ch.SoftCap(5.0), ch.ScoreFunction(_alibi_by_hand)),
        (ch.DenseBias(torch.randn(37, 37, generator=torch.Generator().manual_seed(5))), ch.Alibi(4)),
    ],
    ids=["alibi", "softcap", "sink", "by hand", "capped by hand", "dense"],
)
def test_with_rules_that_do_not_learn(scores: Any) -> None:
    own, x = module(scores=scores), tokens()
    same(lambda: own(x, mask=ch.Causal()), [x, *own.parameters()])


@pytest.mark.parametrize("fn", [_alibi_by_hand, _of_batch], ids=["known", "unknown"])
@pytest.mark.parametrize("grad", [True, False], ids=["training", "no gradients"])
@pytest.mark.parametrize("whole", [False, True], ids=["module", "block"])
def test_a_function_of_the_users_in_a_module(whole: bool, grad: bool, fn: Any) -> None:
    """As anybody makes one, products chosen by size."""
    torch.manual_seed(0)
    make = ch.nn.DecoderBlock if whole else ch.nn.MultiHeadAttention
    own, x = make(48, 4, scores=ch.ScoreFunction(fn)).eval(), tokens().detach()
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            found = own(x, mask=ch.Causal())
            exact = copy.deepcopy(own).double()(x.double(), mask=ch.Causal())
            torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)
            if grad:
                found.sum().backward()
    with torch.no_grad():
        cache = ch.KVCache()
        parts = [own(part, mask=ch.Causal(), cache=cache) for part in x.split([20, 1, 16], 1)]
    torch.testing.assert_close(torch.cat(parts, 1).double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("needed", ["x", "weights", "last", "biases", "query", "one bias"])
def test_only_the_gradients_that_are_needed(needed: str) -> None:
    own, x = module(), tokens()
    chosen_ones = {
        "x": [x],
        "weights": [part for name, part in own.named_parameters() if name.endswith("weight")],
        "last": [own.output_projection.weight],  # type: ignore[union-attr]
        "biases": [part for name, part in own.named_parameters() if name.endswith("bias")],
        "query": [own.query_projection.weight],
        "one bias": [own.value_projection.bias],
    }[needed]
    for part in (x, *own.parameters()):
        part.requires_grad_(any(part is one for one in chosen_ones))
    # A bias without its weight is summed by itself, by torch op by op.
    alone = {"atol": 1e-5, "rtol": 1e-5} if "bias" in needed else {}
    same(lambda: own(x, mask=ch.Causal()), chosen_ones, **alone)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_that_are_not_finite_stay_where_they_are(bad: float, dtype: torch.dtype) -> None:
    own, x = module(dtype), tokens(dtype)
    with torch.no_grad():
        x[1, 20] = bad
    # Backward runs op by op, and adds the input gradients of queries, keys and values up in another order.
    rounding = 1e-5 if dtype is torch.float32 else 0.05
    same(lambda: own(x, mask=ch.Causal()), [x, *own.parameters()], rtol=rounding, atol=rounding)
    output = own(x, mask=ch.Causal())
    assert bool(output[0].isfinite().all() and output[1, :20].isfinite().all() and not output[1, 20:].isfinite().any())


def test_without_gradients_too() -> None:
    own, x = module(), tokens()
    with torch.no_grad():
        together = own(x, mask=ch.Causal())
        with forbid_fused():
            assert torch.equal(together, own(x, mask=ch.Causal()))


def test_backward_twice_and_in_two_parts() -> None:
    own, x = module(), tokens()
    output = own(x)
    first = torch.autograd.grad(output.sum(), [x], retain_graph=True)
    again = torch.autograd.grad(output.sum(), [x])
    assert torch.equal(first[0], again[0])


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "rotary": True}, {"scores": ch.Alibi(4)}], ids=str)
def test_second_derivatives_of_tokens_and_every_parameter(options: dict[str, Any]) -> None:
    own, x = module(**options), tokens(length=6)

    def seconds(own: ch.nn.MultiHeadAttention, x: Tensor) -> list[Tensor]:
        inputs = [x, *own.parameters()]
        first = torch.autograd.grad(own(x, mask=ch.Causal()).square().sum(), inputs, create_graph=True)
        return [*torch.autograd.grad(sum((part.square().sum() for part in first), x.new_zeros(())), inputs)]

    with force_fused():
        found = seconds(own, x)
    wide = copy.deepcopy(own).double()
    wide.backend = "reference"
    exact = seconds(wide, x.detach().double().requires_grad_())
    # A key's bias has no gradient at all: what is left of it is rounding, of the size of the others.
    largest = max(float(part.abs().max()) for part in exact)
    for one, right in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), right, rtol=1e-4, atol=1e-6 * largest)


def test_many_gradients_at_once() -> None:
    own, x = module(), tokens(length=6)
    inputs, upstream = [x, *own.parameters()], torch.randn(3, *x.shape)
    with force_fused():
        output = own(x)
    many = torch.autograd.grad(output, inputs, upstream, is_grads_batched=True, retain_graph=True)
    for place, one in enumerate(upstream):
        alone = torch.autograd.grad(output, inputs, one, retain_graph=True)
        torch.testing.assert_close([part[place] for part in many], [*alone], rtol=1e-4, atol=1e-5)


def test_an_output_may_be_changed_in_place() -> None:
    own, x = module(), tokens()
    output = own(x)
    plain = torch.autograd.grad(own(x).mul(2.0).sum(), x)[0]
    output.mul_(2.0)
    assert torch.equal(torch.autograd.grad(output.sum(), x)[0], plain)


class TestChanges:
    """Nothing of an earlier call is read."""

    def test_other_tokens_and_weights(self) -> None:
        own = module()
        for round_ in range(6):
            x = torch.randn(3, 37, 48, generator=torch.Generator().manual_seed(round_)).requires_grad_()
            for part in own.parameters():
                part.data = part.data + 0.01 * round_  # elsewhere in memory
            same(partial(own, x), [x, *own.parameters()])

    @pytest.mark.parametrize("dense_first", [True, False])
    @pytest.mark.parametrize("where", ["x", "weight", "gradient"])
    def test_rows_that_lie_apart(self, where: str, dense_first: bool) -> None:
        """Slices after dense tensors and before them: a description has the rows' distance too."""
        own = module()
        plain, weight = tokens(), own.query_projection.weight.detach()

        def laid(tensor: Tensor, apart: bool) -> Tensor:
            wide = torch.cat([torch.full_like(tensor, torch.nan), tensor], -1)
            return wide.chunk(2, -1)[1] if apart else tensor.clone()

        for round_ in range(2):
            apart = (round_ == 1) == dense_first
            x = laid(plain.detach(), apart and where == "x").requires_grad_()
            own.query_projection.weight = nn.Parameter(laid(weight, apart and where == "weight"))
            inputs = [x, *own.parameters()]

            def called(x: Tensor = x, wide: bool = apart and where == "gradient") -> list[Tensor]:
                output = own(x)
                upstream = laid(torch.randn(output.shape, generator=torch.Generator().manual_seed(3)), wide)
                return [output.detach(), *torch.autograd.grad(output, inputs, upstream)]  # noqa: B023

            with force_fused():
                together = called()
            with forbid_fused():
                assert all(torch.equal(one, other) for one, other in zip(together, called(), strict=True))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("band", [None, ch.Causal(), ch.Window(5)], ids=str)
    def test_each_batch_has_a_mask_of_its_own(self, band: ch.Mask | None, dtype: torch.dtype) -> None:
        """Packed sequences of other lengths: where runs begin and end is read elsewhere."""
        own, x = module(dtype), tokens(dtype, batch=1)

        def masked(*lengths: int) -> ch.Mask:
            documents = ch.Documents(lengths=lengths)
            return documents if band is None else documents & band

        for lengths in ((30, 7), (1, 36), (2, 35)):
            mask = masked(*lengths)
            same(partial(own, x, mask=mask), [x, *own.parameters()])

    def test_masks_in_turn(self) -> None:
        own, x = module(), tokens()
        masks = [ch.Padding(torch.tensor(lengths)) for lengths in ([37, 5, 1], [2, 30, 37])]
        for mask in masks * 4:
            same(partial(own, x, mask=mask), [x, *own.parameters()])

    def test_a_mask_that_is_written_to(self) -> None:
        own, x, lengths = module(), tokens(), torch.tensor([37, 5, 1])
        table = torch.ones(37, 37, dtype=torch.bool)
        for mask in (ch.Padding(lengths), ch.Dense(table)):
            for _ in range(4):
                own(x, mask=mask).sum().backward()
            lengths[1], table[:, 3] = 30, False
            same(partial(own, x, mask=mask), [x, *own.parameters()])

    @pytest.mark.parametrize("offset", [True, [1], 1.5, "1"])
    def test_a_bad_option_is_told_after_good_ones(self, offset: Any) -> None:
        own, x = module(), tokens()
        for _ in range(3):
            own(x, query_offset=1)
        with pytest.raises(ch.ClearheadError, match="query_offset"):
            own(x, query_offset=offset)

    def test_another_dropout_each_time(self) -> None:
        own, x = module(dropout=0.5), tokens()
        outputs = [own(x).detach() for _ in range(5)]
        assert all(not torch.equal(one, other) for one, other in itertools.pairwise(outputs))

    def test_weights_that_are_one(self) -> None:
        """And later are not."""
        own, x = module(), tokens()
        tied = own.query_projection.weight
        own.key_projection.weight = tied
        for _ in range(4):
            own(x).sum().backward()
        own.key_projection.weight = nn.Parameter(tied.detach() * 2.0)
        same(lambda: own(x), [x, *own.parameters()])

    def test_many_threads(self) -> None:
        own, x = module(), tokens(batch=2, length=100)
        right = own(x).detach()
        wrong: list[int] = []

        def often() -> None:
            for _ in range(40):
                leaf = x.detach().requires_grad_()
                output = own(leaf)
                (grad,) = torch.autograd.grad(output.sum(), leaf)
                if not torch.equal(output, right) or not torch.equal(grad, expected):
                    wrong.append(1)

        leaf = x.detach().requires_grad_()
        (expected,) = torch.autograd.grad(own(leaf).sum(), leaf)
        threads = [threading.Thread(target=often) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


class Doubled(Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * super().forward(input)


def _hooked(own: ch.nn.MultiHeadAttention) -> None:
    own.key_projection.register_forward_hook(lambda module, given, output: 2.0 * output)


def _exchanged(own: ch.nn.MultiHeadAttention) -> None:
    own.value_projection = Doubled(48, 48)


def _patched(own: ch.nn.MultiHeadAttention) -> None:
    own.output_projection.forward = lambda input: input * 3.0  # type: ignore[union-attr, method-assign, assignment]


@pytest.mark.parametrize("change", [_hooked, _exchanged, _patched])
def test_a_part_that_is_somebodys_own_is_called(change: Callable[[ch.nn.MultiHeadAttention], None]) -> None:
    own, x = module(), tokens()
    change(own)
    output = unfused(own, x)
    with forbid_fused():
        assert torch.equal(output, own(x))


@pytest.mark.parametrize(
    "options",
    [
        {"output_projection": False},
        {"scores": [ch.RelativeBias(nn.Parameter(torch.zeros(4, 9)))]},
        {"scores": [ch.Sink(nn.Parameter(torch.zeros(4)))]},
    ],
    ids=["no output", "learned bias", "learned sink"],
)
def test_what_it_cannot_do_runs_op_by_op(options: dict[str, Any]) -> None:
    own, x = module(**options), tokens()
    unfused(own, x)


def test_watchers_see_the_attention() -> None:
    own, x = module(), tokens()
    with ch.observe(own, ch.Want(entropy=True)) as seen:
        own(x)
    assert len(list(seen)) == 1


def test_other_values_a_cache_and_other_backends_run_op_by_op() -> None:
    own, x = module(), tokens()
    unfused(own, x, x, x.detach().clone())
    unfused(own, x, tokens(), tokens())
    with torch.no_grad():
        cache = ch.KVCache()
        first = own(x, mask=ch.Causal(), cache=cache)
        assert cache.length == 37
        torch.testing.assert_close(first, own(x, mask=ch.Causal()), rtol=1e-6, atol=1e-6)
    own.backend = "tiled"
    unfused(own, x)


def test_what_is_refused_leaves_the_generator_alone() -> None:
    own, x = module(dropout=0.5), tokens()
    own.backend = "tiled"
    found = []
    for context in (contextlib.nullcontext(), forbid_fused()):
        torch.manual_seed(11)
        with context:
            found.append(own(x).detach())
    assert torch.equal(*found)


def test_autocast_and_functional_transforms_run_op_by_op() -> None:
    own, x = module(), tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        unfused(own, x)
    plain = own(x)
    mapped = torch.func.functional_call(own, dict(own.named_parameters()), (x,))
    assert torch.equal(plain, mapped)


def test_checkpoints_compute_it_again() -> None:
    own, x = module(dropout=0.3), tokens()
    found = []
    for call in (own, lambda x: checkpoint(own, x, use_reentrant=False)):
        torch.manual_seed(13)
        output = call(x)
        found.append([output, *torch.autograd.grad(output.square().sum(), [x, *own.parameters()])])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_errors_are_the_same() -> None:
    own, x = module(), tokens()
    messages = []
    for context in (contextlib.nullcontext(), forbid_fused()):
        with context, pytest.raises(ch.MaskError) as raised:
            own(x, mask=ch.Padding(torch.tensor([1, 2])))
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_module_swapped(dtype: torch.dtype, padded: bool, batch_first: bool) -> None:
    torch.manual_seed(1)
    theirs = nn.MultiheadAttention(48, 4, dropout=0.2, batch_first=batch_first).to(dtype)
    ours = copy.deepcopy(theirs)
    ch.swap(ours)
    x = tokens(dtype, batch=3 if batch_first else 37, length=37 if batch_first else 1)
    batch = x.shape[0] if batch_first else 1
    padding = torch.arange(37)[None] >= torch.tensor([37, 5, 20])[:batch, None] if padded else None

    def call(own: nn.Module) -> Tensor:
        found: Tensor = own(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        return found

    found = [numbers(lambda: call(ours), [x, *ours.parameters()]) for _ in range(2)]
    assert all(map(torch.equal, *found))
    with torch.no_grad():
        rounding = 4 * torch.finfo(dtype).eps
        pair = [call(own.eval()) for own in (ours, theirs)]
        torch.testing.assert_close(*pair, rtol=rounding, atol=rounding)


def test_it_takes_part_in_training() -> None:
    own, x = module(), tokens()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (own(x, mask=ch.Causal()) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)


def test_none_for_what_has_another_form() -> None:
    own = module()
    projections = own.projections()
    assert projections is not None
    for x in (torch.zeros(5, 48), torch.zeros(0, 5, 48), torch.zeros(2, 0, 48), torch.zeros(2, 5, 48).double()):
        assert fused_attention([x], projections) is None
    x = torch.zeros(2, 5, 48)
    for memory in (torch.zeros(2, 3, 47), torch.zeros(1, 3, 48), torch.zeros(2, 0, 48), x.double(), x[0]):
        assert fused_attention([x, memory], projections) is None
    assert fused_attention([x, x.clone()], projections) is not None


class TestFewTokens:
    """A call too small for any of its products to have a choice, as it is shipped."""

    @pytest.fixture(autouse=True)
    def _as_shipped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sizes, "SMALL", 2**22)

    @pytest.mark.parametrize("mask", MASKS[:5], ids=lambda mask: type(mask).__name__)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_they_are_fused(self, dtype: torch.dtype, mask: ch.Mask | None) -> None:
        own, x = module(dtype), tokens(dtype)
        inputs, within = [x, *own.parameters()], 1e-5 if dtype == torch.float32 else 0.05
        together = [numbers(lambda: own(x, mask=mask), inputs, fused=True) for _ in range(2)]
        with torch.no_grad():
            assert torch.equal(own(x, mask=mask), together[0][0])
        with forbid_fused():
            parts = numbers(lambda: own(x, mask=mask), inputs, fused=False)
        for found in together:
            for one, part in zip(found, parts, strict=True):
                torch.testing.assert_close(one, part, rtol=within, atol=within)

    @pytest.mark.parametrize("training", [False, True])
    def test_observation_gives_the_same_bits(self, training: bool) -> None:
        own, x = module(), tokens()
        inputs = [x, *own.parameters()]

        def called(watching: bool) -> list[Tensor]:
            with torch.set_grad_enabled(training):
                if not watching:
                    output = own(x, mask=ch.Causal())
                else:
                    with ch.observe(own, ch.Want(lse=True)):
                        output = own(x, mask=ch.Causal())
            return [output, *(torch.autograd.grad(output.square().sum(), inputs) if training else ())]

        for _ in range(3):
            for one, other in zip(called(False), called(True), strict=True):
                assert torch.equal(one, other)

    def test_not_by_kernels_that_have_no_larger_products(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CLEARHEAD_PROJECTION", "torch")
        own, x = module(), tokens()
        for _ in range(3):
            unfused(own, x)

    def test_wrong_arguments_raise_after_good_calls(self) -> None:
        own, x = module(), tokens()
        for _ in range(3):
            own(x, mask=ch.Padding([37, 5, 0]))
            own(x)
        for bad, error in (
            (x[..., :47], "width"),
            (x.double(), "dtype"),
            (x[None], "axes"),
            ([1.0], "axes"),
            (None, "axes"),
        ):
            with pytest.raises(ch.ClearheadError, match=error):
                own(bad)
        with pytest.raises(ch.ClearheadError, match="mask"):
            own(x, mask=[1])
        with pytest.raises(ch.ClearheadError, match="lengths"):
            own(x, mask=ch.Padding([37, 5]))
        seen: list[Any] = []
        with own.value_projection.register_forward_hook(lambda *given: seen.append(given)):
            own(x)
        assert len(seen) == 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert own(x).dtype == torch.bfloat16
        with force_fused():
            own(x)


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
    def test_bits_are_those_op_by_op(self, options: dict[str, Any], dtype: torch.dtype, mask: ch.Mask | None) -> None:
        own, x, memory = module(dtype, **options), tokens(dtype), self.memory(dtype)
        together = [numbers(lambda: own(x, memory, mask=mask), [x, memory, *own.parameters()], fused=True)]
        same(lambda: own(x, memory, mask=mask), [x, *own.parameters()])
        within = 1e-5 if dtype is torch.float32 else 0.05
        with forbid_fused():
            parts = numbers(lambda: own(x, memory, mask=mask), [x, memory, *own.parameters()], fused=False)
        for one, part in zip(*together, parts, strict=True):  # the memory's: two GEMMs op by op, one here
            torch.testing.assert_close(one, part, rtol=within, atol=within)

    def test_of_another_width(self) -> None:
        own, x, memory = module(key_dim=20, value_dim=20), tokens(), self.memory(width=20)
        same(lambda: own(x, memory, memory), [x, *own.parameters()])

    @pytest.mark.parametrize("lengths", [(1, 300), (300, 1), (5, 5)])
    def test_of_any_length(self, lengths: tuple[int, int]) -> None:
        own, x, memory = module(), tokens(length=lengths[0]), self.memory(length=lengths[1])
        same(lambda: own(x, memory), [x, *own.parameters()])

    def test_positions_count_from_the_offset(self) -> None:
        own, x, memory = module(), tokens(), self.memory(length=50)
        with pytest.raises(ch.MaskError, match="query_offset"):
            own(x, memory, mask=ch.Causal())
        same(lambda: own(x, memory, mask=ch.Causal(), query_offset=13), [x, *own.parameters()])

    @pytest.mark.parametrize("needed", ["x", "memory", "weights", "biases", "key"])
    def test_only_the_gradients_that_are_needed(self, needed: str) -> None:
        own, x, memory = module(), tokens(), self.memory()
        inputs = {"x": x, "memory": memory, **dict(own.named_parameters())}
        whole = dict(zip(inputs, numbers(lambda: own(x, memory), list(inputs.values()), fused=True)[1:-1], strict=True))
        wanted = [name for name in inputs if needed.rstrip("es") in name]
        for name, part in inputs.items():
            part.requires_grad_(name in wanted)
        for _ in range(4):
            found = numbers(lambda: own(x, memory), [inputs[name] for name in wanted], fused=True)[1:-1]
            for name, one in zip(wanted, found, strict=True):
                torch.testing.assert_close(one, whole[name], rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("training", [False, True])
    def test_observation_gives_the_same_bits(self, training: bool) -> None:
        own, x, memory = module(), tokens(), self.memory()
        with torch.set_grad_enabled(training):
            for _ in range(3):
                alone = own(x, memory)
                with ch.observe(own, ch.Want(lse=True)):
                    assert torch.equal(own(x, memory), alone)

    @pytest.mark.parametrize("mask", [None, torch.rand(37, 21) < 0.3], ids=["plain", "a mask"])
    @pytest.mark.parametrize("options", [{}, {"bias": False}, {"batch_first": False}, {"dropout": 0.3}], ids=str)
    def test_torchs_module(self, options: dict[str, Any], mask: Tensor | None) -> None:
        torch.manual_seed(1)
        theirs = nn.MultiheadAttention(48, 4, **({"batch_first": True} | options))
        holder = nn.ModuleList([copy.deepcopy(theirs)])
        ch.swap(holder)
        (own,), x, memory = holder, tokens(), self.memory()
        if not own.batch_first:
            x, memory = (each.detach().transpose(0, 1).contiguous().requires_grad_() for each in (x, memory))
        inputs = [x, memory, *own.parameters()]

        def call() -> Tensor:
            output: Tensor = own(x, memory, memory, attn_mask=mask, need_weights=False)[0]
            return output

        found = [numbers(call, inputs, fused=True) for _ in range(2)]
        for again in found[1:]:
            assert all(map(torch.equal, again, found[0]))
        if not options.get("dropout"):  # small calls by parts are torch's own, and so is what they drop
            with forbid_fused():
                parts = numbers(call, inputs, fused=False)
            for one, part in zip(found[0], parts, strict=True):
                torch.testing.assert_close(one, part, rtol=1e-5, atol=1e-5)
            right = theirs(x, memory, memory, attn_mask=mask, need_weights=False)[0]
            torch.testing.assert_close(found[0][0], right.detach(), rtol=1e-4, atol=1e-5)

    def test_wrong_arguments_raise_after_good_calls(self) -> None:
        own, x, memory = module(), tokens(), self.memory()
        for _ in range(3):
            own(x, memory)
        for bad, error in (
            (memory[..., :47], "width"),
            (memory.double(), "dtype"),
            (memory[:2], "batch"),
            (memory[0], "batch"),
            ([1.0], "key"),
        ):
            with pytest.raises(ch.ClearheadError, match=error):
                own(x, bad)
        with force_fused():
            own(x, memory)
