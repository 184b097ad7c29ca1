"""A whole layer in one step: the definition's numbers within the budget, the same bits on every call, and left alone
wherever a part is somebody's own."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.utils import parametrize

import clearhead as ch
from clearhead.backends import (
    native_dropout,
    native_memory,
    native_norm,
    native_prepared,
    native_projection,
    native_work,
)
from clearhead.backends.dropout import keep_scale
from clearhead.backends.native_dropout import LEVELS
from clearhead.nn import (
    DecoderBlock,
    EncoderBlock,
    FeedForward,
    MultiHeadAttention,
    attention_step,
    fused_layer,
    layer_step,
    step,
)
from clearhead.nn.dropout import Dropout
from clearhead.nn.layer_step import LayerStep
from clearhead.nn.linear import Linear
from clearhead.problem import draw_seed
from clearhead.projection import chosen
from tests.budget import within_budget
from tests.dropped import kept

pytestmark = pytest.mark.skipif(native_projection.absent() is not None, reason=f"{native_projection.absent()}")

Block = EncoderBlock | DecoderBlock
KINDS = [EncoderBlock, DecoderBlock]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products are the kernels' where larger ones are."""
    monkeypatch.setenv("CLEARHEAD_PROJECTION", "native")
    monkeypatch.setattr(chosen, "_CHOICES", {})


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    for held in (step._KEPT, step._KNOWN, step._CALLS):
        monkeypatch.setattr(held, "steps", {})


def block(
    kind: Any = EncoderBlock, dtype: torch.dtype = torch.float32, width: int = 32, heads: int = 4, **options: Any
) -> Any:
    torch.manual_seed(1)
    made = kind(width, heads, **({"dropout": 0.0} | options))
    with torch.no_grad():
        for part in made.parameters():
            if part.ndim == 1:  # Those of norms are ones and zeros at first.
                part.add_(0.3 * torch.randn_like(part))
        if options.get("activation") == "relu" and dtype is torch.bfloat16:
            # A ReLU's gradient jumps at 0, where roundings would decide: each hidden number is well on one side.
            made.feedforward.expand.weight.mul_(0.3)
            if made.feedforward.expand.bias is not None:
                made.feedforward.expand.bias.copy_(torch.randn_like(made.feedforward.expand.bias).sign() * 2.0)
    return made.to(dtype)


def draw(*shape: int, seed: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tokens(dtype: torch.dtype = torch.float32, batch: int = 2, length: int = 7, width: int = 32) -> Tensor:
    return draw(batch, length, width, dtype=dtype).requires_grad_()


@dataclass
class Factors:
    """What each dropout multiplies by: weights, behind the attention, hidden numbers, behind the feedforward."""

    weights: Tensor
    after: Tensor
    hidden: Tensor
    last: Tensor


def formula(
    own: Any, x: Tensor, mask: ch.Mask | None = None, factors: Factors | None = None, off: Sequence[int] = ()
) -> Tensor:
    """The block by torch's operators, in its own dtype; ``off`` are heads whose output is 0."""
    if isinstance(own, DecoderBlock):
        mask = ch.Causal() if mask is None else ch.Causal() & mask
    part, fed, length = own.attention, own.feedforward, x.shape[1]

    def times(y: Tensor, name: str) -> Tensor:
        return y if factors is None else y * getattr(factors, name).to(y.dtype).view(y.shape)

    def normed(y: Tensor, norm: nn.Module) -> Tensor:
        if isinstance(norm, nn.RMSNorm):
            return F.rms_norm(y, y.shape[-1:], norm.weight, norm.eps)
        return F.layer_norm(y, y.shape[-1:], norm.weight, norm.bias, norm.eps)  # type: ignore[arg-type]

    def attended(y: Tensor) -> Tensor:
        layers = (part.query_projection, part.key_projection, part.value_projection)
        heads = [F.linear(y, one.weight, one.bias).unflatten(-1, (-1, part.head_dim)).transpose(1, 2) for one in layers]
        query, key, value = (one.repeat_interleave(part.num_heads // one.shape[1], 1) for one in heads)
        scale = part.head_dim**-0.5 if part.scale is None else part.scale
        scores = query @ key.transpose(-2, -1) * scale
        allowed = torch.ones((), dtype=torch.bool) if mask is None else mask.dense(length, length)
        allowed = allowed.expand(scores.shape)
        scores = scores.masked_fill(~allowed, -torch.inf).masked_fill(~allowed.any(-1, keepdim=True), 0.0)
        weights = times(torch.softmax(scores, -1).masked_fill(~allowed, 0.0), "weights")
        on = torch.tensor([float(head not in off) for head in range(part.num_heads)], dtype=x.dtype)
        joined = (weights @ value * on[:, None, None]).transpose(1, 2).flatten(-2)
        return F.linear(joined, part.output_projection.weight, part.output_projection.bias)

    def feed(y: Tensor) -> Tensor:
        hidden = times(fed.activation(F.linear(y, fed.expand.weight, fed.expand.bias)), "hidden")
        return F.linear(hidden, fed.contract.weight, fed.contract.bias)

    if own.norm_first:
        x = x + times(attended(normed(x, own.attention_norm)), "after")
        return x + times(feed(normed(x, own.feedforward_norm)), "last")
    x = normed(x + times(attended(x), "after"), own.attention_norm)
    return normed(x + times(feed(x), "last"), own.feedforward_norm)


def is_layer(output: Tensor) -> bool:
    """Whether one step made all of the output."""
    node: Any = output.grad_fn
    return node is not None and node.name() == "_KernelStepBackward" and isinstance(node.step, LayerStep)


def upstream_of(output: Tensor, seed: int = 3) -> Tensor:
    return draw(*output.shape, seed=seed).to(output.dtype)


def numbers(
    own: Any, x: Tensor, mask: ch.Mask | None = None, *, call: Callable[..., Tensor] | None = None,
    layer: bool | None = True, seed: int = 7, upstream: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Output, and gradients of ``x`` and of every parameter; ``layer`` says whether it has to be the one step."""
    torch.manual_seed(seed)
    output = own(x, mask=mask) if call is None else call(own, x)
    assert layer is None or is_layer(output) == layer
    upstream = upstream_of(output) if upstream is None else upstream.to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, [x, *own.parameters()], upstream)]


def budget_of(
    own: Any, x: Tensor, mask: ch.Mask | None, found: list[Tensor], factors: Factors | None = None,
    upstream: Tensor | None = None, off: Sequence[int] = (),
) -> None:  # fmt: skip
    """Output and gradients against the definition in float64, as wrong as it is in their own dtype, twice over."""
    wide = copy.deepcopy(own).double()

    def by_formula(own: Any, x: Tensor) -> Tensor:
        return formula(own, x, mask, factors, off)

    textbook = numbers(own, x, call=by_formula, layer=False, upstream=upstream)
    exact = numbers(wide, x.detach().double().requires_grad_(), call=by_formula, layer=False, upstream=upstream)
    names = ["output", "dx", *(f"d{name}" for name, _ in own.named_parameters())]
    terms = max(x.shape[0] * x.shape[1], own.feedforward.expand.weight.shape[0])
    for name, *three in zip(names, found, textbook, exact, strict=True):
        within_budget(name, *three, terms=terms, dtype=x.dtype)


def same(found: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    for one, two in zip(found, other, strict=True):
        torch.testing.assert_close(one, two, rtol=0.0, atol=0.0, equal_nan=True)


def checked(own: Any, x: Tensor, mask: ch.Mask | None = None) -> None:
    """Right, and the same bits when written down, written down again, and played back."""
    first = numbers(own, x, mask)
    budget_of(own, x, mask, first)
    for _ in range(3):
        same(numbers(own, x, mask), first)


MASKS: list[ch.Mask | None] = [
    None, ch.Causal(), ch.Padding(torch.tensor([7, 3])), ch.Window(2) & ch.Causal(), ch.Padding(torch.tensor([0, 7])),
    ch.Dense(torch.rand(7, 7, generator=torch.Generator().manual_seed(4)) < 0.3),
]  # fmt: skip
MASK_IDS = ["none", "causal", "padding", "window", "nothing to attend to", "dense"]


#: Without a bias nothing keeps hidden numbers away from where a ReLU's gradient jumps.
WITHIN = [
    (activation, bias, dtype)
    for activation in ("gelu", "relu", "silu") for bias in (True, False) for dtype in DTYPES
    if bias or activation != "relu" or dtype is torch.float32
]  # fmt: skip


#: Every layer under one mask, and one under every mask.
CASES = [(*within, MASK_IDS[place % 2]) for place, within in enumerate(WITHIN)]
CASES += [("gelu", True, dtype, mask) for dtype in DTYPES for mask in MASK_IDS[2:]]


@pytest.mark.parametrize(("activation", "bias", "dtype", "mask"), CASES, ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_every_gradient(
    kind: type[Block], norm_first: bool, activation: str, bias: bool, dtype: torch.dtype, mask: str
) -> None:
    own = block(kind, dtype, norm_first=norm_first, activation=activation, bias=bias)
    checked(own, tokens(dtype), MASKS[MASK_IDS.index(mask)])


@pytest.mark.parametrize(
    ("width", "heads", "options"),
    [(20, 2, {}), (36, 3, {"num_kv_heads": 1}), (32, 2, {"num_kv_heads": 1}),
     (64, 4, {"num_kv_heads": 2}), (96, 3, {}), (96, 6, {"feedforward_dim": 100}),
     (64, 1, {"feedforward_dim": 33})],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 17), (1, 300)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_of_any_size(
    norm_first: bool, dtype: torch.dtype, batch: int, length: int, width: int, heads: int, options: dict[str, Any]
) -> None:
    own = block(DecoderBlock, dtype, width, heads, norm_first=norm_first, **options)
    checked(own, tokens(dtype, batch, length, width))


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_norms(dtype: torch.dtype, norm_first: bool) -> None:
    for first, second in (
        (nn.RMSNorm(32, eps=1e-3), nn.RMSNorm(32, eps=1e-6)), (nn.LayerNorm(32, eps=0.1), nn.LayerNorm(32, bias=False)),
        (nn.RMSNorm(32, eps=0.5), nn.LayerNorm(32, elementwise_affine=False)),
        (nn.LayerNorm(32), nn.RMSNorm(32, eps=0.5, elementwise_affine=False)),
    ):  # fmt: skip
        own = block(norm_first=norm_first)
        own.attention_norm, own.feedforward_norm = first, second
        checked(own.to(dtype), tokens(dtype))


def test_a_norm_of_another_width_is_refused() -> None:
    own, x = block(), tokens()
    for norm in (nn.LayerNorm(16), nn.LayerNorm(16, elementwise_affine=False), nn.RMSNorm(8, elementwise_affine=False)):
        own.feedforward_norm = norm
        for _ in range(3):
            with pytest.raises(RuntimeError, match="normalized_shape"):
                own(x)


def test_a_norm_in_float32_in_a_layer_of_16_bits() -> None:
    own, x = block(dtype=torch.bfloat16), tokens(torch.bfloat16)
    own.feedforward_norm.float()
    assert not is_layer(own(x))
    assert torch.equal(own(x), by_modules(own, x))


@pytest.mark.parametrize("activation", ["none", "tanh"])
def test_both_forms_of_gelu(activation: str) -> None:
    own = block()
    own.feedforward.activation = nn.GELU(approximate=activation)
    checked(own, tokens())


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_gradients_too(dtype: torch.dtype, norm_first: bool) -> None:
    own, x = block(dtype=dtype, norm_first=norm_first), tokens(dtype)
    right = own(x, mask=ch.Causal())
    assert is_layer(right)
    for context in (torch.no_grad, torch.inference_mode):
        for _ in range(4):
            with context():
                assert torch.equal(own(x, mask=ch.Causal()), right)


class TestCallsThatComeAgain:
    """From the third call of a layout on, what was written down is played back."""

    @pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
    def test_nothing_is_written_down_any_more(self, norm_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        own, x = block(norm_first=norm_first), tokens()
        first = [numbers(own, x) for _ in range(2)].pop()
        monkeypatch.setattr(native_prepared, "run", None)
        same(numbers(own, x), first)
        same(numbers(own, x), first)

    @pytest.mark.parametrize("dropout", [0.0, 0.3])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_other_tokens_and_gradients(
        self, kind: type[Block], norm_first: bool, dtype: torch.dtype, dropout: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own = block(kind, dtype, norm_first=norm_first, dropout=dropout)
        for round_ in range(5):
            x = draw(2, 7, 32, seed=20 + round_, dtype=dtype).requires_grad_()
            upstream = draw(2, 7, 32, seed=40 + round_)
            again = numbers(own, x, seed=round_, upstream=upstream)
            with monkeypatch.context() as patch:
                forget(patch)
                same(again, numbers(own, x, seed=round_, upstream=upstream))

    @pytest.mark.parametrize("where", ["in place", "data", "replaced"])
    @pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
    def test_weights_that_change(self, norm_first: bool, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
        own, x = block(norm_first=norm_first), tokens()
        before = numbers(own, x)
        for round_ in range(6):
            for name, part in list(own.named_parameters()):
                changed = part.detach() * (1.0 + 0.05 * torch.rand(part.shape)) + 0.01
                if where == "in place":
                    with torch.no_grad():
                        part.copy_(changed)
                elif where == "data":
                    part.data = changed
                else:
                    place, _, last = name.rpartition(".")
                    setattr(own.get_submodule(place), last, nn.Parameter(changed))
            again = numbers(own, x)
            assert not torch.equal(again[0], before[0])
            before = again
            with monkeypatch.context() as patch:
                forget(patch)
                same(again, numbers(own, x))
            if round_ == 5:
                budget_of(own, x, None, again)

    @pytest.mark.parametrize(
        "change",
        [
            lambda own: setattr(own.attention_norm, "eps", 0.5),
            lambda own: setattr(own.feedforward_norm, "eps", 0.5),
            lambda own: setattr(own, "norm_first", False),
            lambda own: setattr(own.feedforward, "activation", nn.ReLU()),
            lambda own: setattr(own.attention, "scale", 2.0),
            lambda own: setattr(own, "attention_norm", nn.RMSNorm(32, eps=1e-5)),
        ],
        ids=["first eps", "second eps", "norm_first", "activation", "scale", "norm"],
    )
    def test_what_else_a_layer_is(self, change: Callable[[Any], None]) -> None:
        own, other, x = block(bias=False), block(bias=False), tokens()
        change(other)
        for _ in range(4):
            budget_of(own, x, None, numbers(own, x))
            budget_of(other, x, None, numbers(other, x))

    @pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
    def test_tensors_that_are_missing_elsewhere(self, norm_first: bool) -> None:
        """Layers of as many tensors, of the same shapes in the same order, that do not mean the same."""
        layers = [block(norm_first=norm_first) for _ in range(3)]
        layers[0].attention_norm.bias = None
        layers[1].feedforward_norm.weight = None
        layers[2].feedforward_norm.bias = None
        x = tokens()
        for _ in range(4):
            for own in layers:
                budget_of(own, x, None, numbers(own, x))

    @pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
    def test_a_bias_that_is_missing_elsewhere(self, norm_first: bool) -> None:
        layers, x = [block(norm_first=norm_first) for _ in range(2)], tokens()
        layers[0].feedforward.contract.bias = None
        layers[1].feedforward_norm.bias = None
        for _ in range(4):
            for own in layers:
                budget_of(own, x, None, numbers(own, x))

    @pytest.mark.parametrize("training", [True, False])
    def test_projections_whose_bias_is_missing_elsewhere(self, training: bool) -> None:
        layers, x = [block() for _ in range(2)], tokens()
        layers[0].attention.query_projection.bias = None
        layers[1].attention.value_projection.bias = None
        for _ in range(4):
            for own in layers:
                if training:
                    budget_of(own, x, None, numbers(own, x))
                    continue
                with torch.no_grad():
                    torch.testing.assert_close(own(x), formula(own, x), rtol=1e-5, atol=1e-5)

    def test_weights_that_are_one(self) -> None:
        """And later are not: what was written down for one would read the other."""
        own, x = block(), tokens()
        own.feedforward_norm.weight = own.attention_norm.weight
        for _ in range(4):
            budget_of(own, x, None, numbers(own, x))
        own.feedforward_norm.weight = nn.Parameter(own.attention_norm.weight.detach() * 2.0)
        checked(own, x)

    @pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
    def test_a_mask_that_is_written_to(self, norm_first: bool) -> None:
        own, x, lengths = block(norm_first=norm_first), tokens(), torch.tensor([7, 3])
        mask = ch.Padding(lengths)
        for _ in range(4):
            numbers(own, x, mask)
        lengths[1] = 6
        for _ in range(4):
            budget_of(own, x, mask, numbers(own, x, mask))

    def test_masks_in_turn(self) -> None:
        own, x = block(), tokens()
        masks = [None, ch.Causal(), *(ch.Padding(torch.tensor(lengths)) for lengths in ([7, 3], [2, 7]))]
        for mask in masks * 4:
            budget_of(own, x, mask, numbers(own, x, mask))

    def test_packed_sequences_each_batch_with_a_mask_of_its_own(self) -> None:
        own, x = block(), tokens(batch=1, length=13)
        for lengths in ([5, 8], [1, 12], [6, 7], [12, 1]):
            mask = ch.Documents(lengths=lengths)
            budget_of(own, x, mask, numbers(own, x, mask))

    def test_other_numbers_of_threads(self) -> None:
        own, x = block(), tokens(batch=3, length=65)
        before = torch.get_num_threads()
        try:
            for count in (1, 2, 3, 1, 2, 1, 2, 1, 2):
                torch.set_num_threads(count)
                budget_of(own, x, None, numbers(own, x))
        finally:
            torch.set_num_threads(before)

    @pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
    def test_several_threads_at_once(self, norm_first: bool) -> None:
        own = block(norm_first=norm_first)
        given = [draw(2, 33, 32, seed=seed) for seed in range(4)]
        parameters = list(own.parameters())

        def once(x: Tensor) -> list[Tensor]:
            leaf = x.detach().requires_grad_()
            output = own(leaf)
            return [output, *torch.autograd.grad(output, [leaf, *parameters], upstream_of(output))]

        right = [once(x) for x in given]
        wrong: list[int] = []

        def often(place: int) -> None:
            for _ in range(25):
                if not all(map(torch.equal, once(given[place]), right[place])):
                    wrong.append(place)

        threads = [threading.Thread(target=often, args=(place,)) for place in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


# ---- dropout ------------------------------------------------------------------------------------------------


def factors_of(own: Any, x: Tensor, seeds: Sequence[int]) -> Factors:
    """What the definitions keep under these seeds."""
    batch, length, width = x.shape
    drops = (own.attention.dropout, own.residual_dropout.p, own.feedforward.dropout.p, own.residual_dropout.p)
    heads, hidden = own.attention.num_heads, own.feedforward.expand.weight.shape[0]

    def of_rows(columns: int, place: int) -> Tensor:
        levels = round(drops[place] * LEVELS)
        if levels == 0:
            return torch.ones(batch * length, columns, dtype=torch.float64)
        factor: Tensor = kept(batch * length, columns, levels, seeds[place]).double() * (LEVELS / (LEVELS - levels))
        return factor

    axes = (batch, heads, length, length)
    places = [
        torch.arange(size).view([-1 if axis == own_axis else 1 for axis in range(4)])
        for own_axis, size in enumerate(axes)
    ]
    weights = torch.ones(axes, dtype=torch.float64)
    if drops[0]:
        weights = keep_scale(seeds[0], drops[0], (places[0], places[1], places[2], places[3]), torch.float64)
    return Factors(weights, of_rows(width, 1), of_rows(hidden, 2), of_rows(width, 3))


def seeds_of(own: Any, seed: int = 7) -> list[int]:
    """What a call after ``torch.manual_seed(seed)`` draws."""
    torch.manual_seed(seed)
    drops = (own.attention.dropout, own.residual_dropout.p, own.feedforward.dropout.p, own.residual_dropout.p)
    return [draw_seed(drop) for drop in drops]


def dropping(kind: Any, dtype: torch.dtype, drops: Sequence[float], **options: Any) -> Any:
    """A block with probabilities of its own for weights, hidden numbers and what is added to the residual."""
    own = block(kind, dtype, attention_dropout=drops[0], **options)
    own.feedforward.dropout.p, own.residual_dropout.p = drops[1:]
    return own


DROPS = [(0.3, 0.0, 0.0), (0.0, 0.3, 0.0), (0.0, 0.0, 0.3), (0.0, 0.5, 0.25), (0.2, 0.4, 0.1), (0.9, 0.9, 0.9)]


def layer_step_of(own: Any, x: Tensor, mask: ch.Mask | None) -> tuple[LayerStep, list[Tensor | None]]:
    parts = own._parts(x)
    problem = fused_layer._attention_of(x, parts, mask, True)
    assert problem is not None
    return LayerStep(problem, True, None, parts.kind()), parts.tensors()


class TestDropout:
    @pytest.mark.parametrize("drops", DROPS, ids=str)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
    @pytest.mark.parametrize("activation", ["gelu", "relu"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_it_is_its_definition(
        self,
        kind: type[Block],
        activation: str,
        norm_first: bool,
        dtype: torch.dtype,
        drops: tuple[float, ...],
    ) -> None:
        own, x = dropping(kind, dtype, drops, norm_first=norm_first, activation=activation), tokens(dtype)
        mask = ch.Padding(torch.tensor([7, 3]))
        factors = factors_of(own, x, seeds_of(own))
        first = numbers(own, x, mask)
        budget_of(own, x, mask, first, factors)
        for _ in range(3):
            same(numbers(own, x, mask), first)
        for seed in (8, 9):  # played back under seeds of its own
            budget_of(own, x, mask, numbers(own, x, mask, seed=seed), factors_of(own, x, seeds_of(own, seed)))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
    def test_the_step_by_its_parts(self, norm_first: bool, dtype: torch.dtype) -> None:
        own, x = dropping(EncoderBlock, dtype, (0.2, 0.4, 0.1), norm_first=norm_first), tokens(dtype)
        made, tensors = layer_step_of(own, x, ch.Causal())
        torch.manual_seed(7)
        seeds = made.draw_seeds()
        assert list(seeds) == seeds_of(own)
        assert len({*seeds}) == 4

        def by_parts(_: Any, x: Tensor) -> Tensor:
            return made.by_parts(x, tensors, seeds)

        factors = factors_of(own, x, seeds)
        budget_of(own, x, ch.Causal(), numbers(own, x, call=by_parts, layer=False), factors)
        budget_of(own, x, ch.Causal(), numbers(own, x, ch.Causal()), factors)

    def test_wide_rows_and_many(self) -> None:
        own = dropping(EncoderBlock, torch.float32, (0.1, 0.2, 0.3), width=160, heads=5, feedforward_dim=300)
        x = tokens(batch=3, length=65, width=160)
        for _ in range(4):
            budget_of(own, x, None, numbers(own, x), factors_of(own, x, seeds_of(own)))

    def test_others_each_time(self) -> None:
        own, x = block(dropout=0.5), tokens()
        outputs = [own(x).detach() for _ in range(6)]
        assert len({tuple(output.flatten().tolist()) for output in outputs}) == 6
        seeded = []
        for seed in (1, 2, 1):
            torch.manual_seed(seed)
            seeded.append(own(x).detach())
        assert torch.equal(seeded[0], seeded[2])
        assert not torch.equal(seeded[0], seeded[1])

    @pytest.mark.parametrize("calls", [0, 3], ids=["written down", "played back"])
    def test_those_behind_attention_and_feedforward_are_two(self, calls: int) -> None:
        """Both parts give ones, so that what is added to the residual shows what was kept."""
        own = dropping(EncoderBlock, torch.float32, (0.0, 0.0, 0.5))
        with torch.no_grad():
            for layer in (own.attention.output_projection, own.feedforward.contract):
                layer.weight.zero_()
                layer.bias.fill_(1.0)
        x = torch.zeros(2, 33, 32, requires_grad=True)
        for _ in range(calls):
            own(x)
        added = own(x)
        counts = [int((added == value).sum()) for value in (0.0, 2.0, 4.0)]
        assert sum(counts) == added.numel()
        share = [count / added.numel() for count in counts]
        # 2112 places: one standard deviation is 0.011 for a half.
        assert share == pytest.approx([0.25, 0.5, 0.25], abs=0.05)

    def test_what_drops_all_goes_in_parts(self) -> None:
        own, x = dropping(EncoderBlock, torch.float32, (0.0, 0.0, 1.0)), tokens()
        output = own(x)
        assert not is_layer(output)
        assert torch.equal(output, x)

    def test_none_in_eval_mode(self) -> None:
        own, x = dropping(EncoderBlock, torch.float32, (0.3, 0.3, 0.3)), tokens()
        for _ in range(3):
            own(x)
        own.eval()
        state = torch.random.get_rng_state()
        checked(own, x)
        torch.manual_seed(0)
        torch.random.set_rng_state(state)
        own(x)
        assert torch.equal(torch.random.get_rng_state(), state)

    @pytest.mark.parametrize("part", ["attention", "feedforward", "residual_dropout"])
    def test_one_part_in_eval_mode(self, part: str) -> None:
        own, x = block(dropout=0.4), tokens()
        own.get_submodule(part).eval()
        off = {"attention": "weights", "feedforward": "hidden", "residual_dropout": "after"}[part]
        torch.manual_seed(7)
        drops = [0.0 if name == off or (name == "last" and off == "after") else 0.4
                 for name in ("weights", "after", "hidden", "last")]  # fmt: skip
        factors = factors_of(own, x, [draw_seed(drop) for drop in drops])
        for name in ("weights", "after", "hidden", "last"):
            if name == off or (name == "last" and off == "after"):
                setattr(factors, name, torch.ones(()).expand(getattr(factors, name).shape))
        budget_of(own, x, None, numbers(own, x), factors)


# ---- gradients that are not needed --------------------------------------------------------------------------

FROZEN: dict[str, Callable[[str], bool]] = {
    "norms": lambda name: "norm" in name,
    "first norm": lambda name: name.startswith("attention_norm"),
    "second norm": lambda name: name.startswith("feedforward_norm"),
    "weight of the first norm": lambda name: name == "attention_norm.weight",
    "bias of the second norm": lambda name: name == "feedforward_norm.bias",
    "feedforward": lambda name: name.startswith("feedforward."),
    "last layer of the feedforward": lambda name: "contract" in name,
    "last layer of the attention": lambda name: "output_projection" in name,
    "queries, keys and values": lambda name: any(part in name for part in ("query_", "key_", "value_")),
    "keys": lambda name: "key_projection" in name,
    "x": lambda name: name == "x",
    "x and norms": lambda name: name == "x" or "norm" in name,
    "all but x": lambda name: name != "x",
    "all but the attention": lambda name: not name.startswith("attention."),
    "all but the feedforward": lambda name: not name.startswith("feedforward."),
    "weights": lambda name: name.endswith("weight"),
    "biases": lambda name: name.endswith("bias"),
    "biases and x": lambda name: name.endswith("bias") or name == "x",
}


@pytest.mark.parametrize("needed", FROZEN)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_only_the_gradients_that_are_needed(norm_first: bool, dropout: float, needed: str) -> None:
    own, x = block(norm_first=norm_first, dropout=dropout), tokens()
    mask = ch.Causal()
    inputs = {"x": x, **dict(own.named_parameters())}
    whole = dict(zip(inputs, numbers(own, x, mask)[1:], strict=True))
    wide, exact_x = copy.deepcopy(own).double(), x.detach().double().requires_grad_()
    factors = factors_of(own, x, seeds_of(own))

    def plainly(own: Any, x: Tensor) -> Tensor:
        return formula(own, x, mask, factors)

    texts = [numbers(*pair, call=plainly, layer=False)[1:] for pair in ((own, x), (wide, exact_x))]
    textbook, exact = (dict(zip(inputs, text, strict=True)) for text in texts)
    for name, part in inputs.items():
        part.requires_grad_(FROZEN[needed](name))
    for _ in range(4):
        torch.manual_seed(7)
        output = own(x, mask=mask)
        assert is_layer(output)
        output.backward(upstream_of(output))
        for name, part in inputs.items():
            if not FROZEN[needed](name):
                assert part.grad is None, name
                continue
            assert part.grad is not None, name
            if "bias" in name and "norm" not in name and not FROZEN[needed](name.replace("bias", "weight")):
                # A sum of its own, not the product's.
                within_budget(name, part.grad, textbook[name], exact[name], terms=14)
            else:
                assert torch.equal(part.grad, whole[name]), name
            part.grad = None


def test_where_nothing_learns() -> None:
    own, x = block().requires_grad_(False), tokens().detach()
    right = formula(copy.deepcopy(own).double(), x.double())
    for _ in range(4):
        output = own(x)
        assert output.grad_fn is None
        within_budget("output", output, formula(own, x), right, terms=128)


# ---- autograd -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_gradients_that_are_recorded(norm_first: bool, dropout: float) -> None:
    own, x = block(norm_first=norm_first, dropout=dropout), tokens()
    for _ in range(4):
        torch.manual_seed(7)
        output = own(x)
        found = torch.autograd.grad(output, [x, *own.parameters()], upstream_of(output), create_graph=True)
        assert found[0].requires_grad
        factors = factors_of(own, x, seeds_of(own))
        budget_of(own, x, None, [output.detach(), *(part.detach() for part in found)], factors)


@pytest.mark.parametrize("activation", ["gelu", "relu", "silu"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_second_derivatives_where_attention_has_no_part_in_them(
    norm_first: bool, dropout: float, activation: str
) -> None:
    own, x = block(norm_first=norm_first, dropout=dropout, activation=activation), tokens().detach()
    factors = factors_of(own, x, seeds_of(own))

    def seconds(own: Any, x: Tensor, call: Callable[[Any, Tensor], Tensor]) -> list[Tensor]:
        learned = [*own.feedforward.parameters(), *own.feedforward_norm.parameters()]
        torch.manual_seed(7)
        output = call(own, x)
        first = torch.autograd.grad((output * upstream_of(output)).square().sum(), learned, create_graph=True)
        total = sum(((part * upstream_of(part, 5)).sum() for part in first), torch.zeros((), dtype=x.dtype))
        return list(torch.autograd.grad(total, learned))

    def plainly(own: Any, x: Tensor) -> Tensor:
        return formula(own, x, None, factors)

    found = seconds(own, x, lambda own, x: own(x))
    textbook, exact = seconds(own, x, plainly), seconds(copy.deepcopy(own).double(), x.double(), plainly)
    for place, three in enumerate(zip(found, textbook, exact, strict=True)):
        within_budget(str(place), *three, terms=128)


def test_its_gradients_tell_that_attention_has_no_second() -> None:
    own, x = block(), tokens()
    (grad,) = torch.autograd.grad(own(x).square().sum(), x, create_graph=True)
    with pytest.raises(ch.UnsupportedError):
        grad.sum().backward()


def test_backward_twice() -> None:
    own, x = block(), tokens()
    inputs = [x, *own.parameters()]
    output = own(x)
    pair = [torch.autograd.grad(output, inputs, upstream_of(output), retain_graph=True) for _ in range(2)]
    same(*pair)
    budget_of(own, x, None, [output.detach(), *pair[0]])


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_many_gradients_at_once(norm_first: bool) -> None:
    """Behind the attention, which takes one at a time and says so."""
    own, x = block(norm_first=norm_first), tokens()
    learned = [*own.feedforward.parameters(), *own.feedforward_norm.parameters()]
    upstream = torch.stack([draw(2, 7, 32, seed=seed) for seed in (3, 9)])
    with pytest.raises(ch.UnsupportedError, match="is_grads_batched"):
        torch.autograd.grad(own(x), [x], upstream, is_grads_batched=True)
    x = x.detach()
    for part in (*own.attention.parameters(), *own.attention_norm.parameters()):
        part.requires_grad_(False)
    output = own(x)
    assert is_layer(output)
    many = torch.autograd.grad(output, learned, upstream, is_grads_batched=True, retain_graph=True)
    wide = copy.deepcopy(own).double()
    wide_learned = [*wide.feedforward.parameters(), *wide.feedforward_norm.parameters()]
    for place, one in enumerate(upstream):
        textbook = torch.autograd.grad(formula(own, x), learned, one)
        exact = torch.autograd.grad(formula(wide, x.double()), wide_learned, one.double())
        for own_part, *two in zip(many, textbook, exact, strict=True):
            within_budget(str(place), own_part[place], *two, terms=128)


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_what_is_saved_may_be_kept_elsewhere(norm_first: bool) -> None:
    own, x = block(norm_first=norm_first, dropout=0.2), tokens()
    right = numbers(own, x)
    for _ in range(4):
        with torch.autograd.graph.saved_tensors_hooks(lambda one: one.clone(), lambda one: one):
            same(numbers(own, x), right)
        with torch.autograd.graph.save_on_cpu():
            same(numbers(own, x), right)


def test_an_output_may_be_changed_in_place() -> None:
    own, x = block(), tokens()
    plain = torch.autograd.grad(own(x).mul(2.0).sum(), x)[0]
    output = own(x)
    output.mul_(2.0)
    assert torch.equal(torch.autograd.grad(output.sum(), x)[0], plain)


@pytest.mark.parametrize("calls", [0, 3])
def test_what_is_changed_before_backward_is_told(calls: int) -> None:
    own = block()
    for change in (own.feedforward.contract.weight, own.attention_norm.weight, own.attention.key_projection.weight):
        for _ in range(calls):
            own(tokens()).sum().backward()
        output = own(tokens())
        with torch.no_grad():
            change.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


LAID: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "batches inside": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "sliced": lambda x: torch.cat([torch.full_like(x, torch.nan), x], -1).chunk(2, -1)[1],
    "every second": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "negative": lambda x: torch._neg_view(-x),
}


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
@pytest.mark.parametrize("lay", LAID)
@pytest.mark.parametrize("dense_first", [True, False])
def test_tokens_and_gradients_that_lie_otherwise(dense_first: bool, lay: str, norm_first: bool) -> None:
    own, x = block(norm_first=norm_first), tokens()
    upstream = upstream_of(own(x))
    right = numbers(own, x, upstream=upstream)
    for round_ in range(12):
        apart, which = (round_ // 4 == 1) == dense_first, round_ % 4
        leaf = x.detach().clone().requires_grad_()
        given = LAID[lay](leaf) if apart and which != 1 else leaf
        arrived = LAID[lay](upstream) if apart and which != 0 else upstream
        output = own(given)
        assert is_layer(output)
        same([output.detach(), *torch.autograd.grad(output, [leaf, *own.parameters()], arrived)], right)


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
@pytest.mark.parametrize("watching", [False, True])
def test_tokens_that_are_negated_when_they_are_read(watching: bool, norm_first: bool) -> None:
    own, x = block(norm_first=norm_first), tokens().detach()
    right = own(x).detach()
    for _ in range(4):
        given = torch._neg_view(-x)
        assert given.is_neg()
        with ch.observe(own, ch.Want(lse=True)) if watching else contextlib.nullcontext():
            assert torch.equal(own(given), right)


WEIGHTS = [
    "attention.query_projection.weight", "attention.output_projection.weight", "feedforward.expand.weight",
    "feedforward.contract.weight", "attention.value_projection.bias", "attention.output_projection.bias",
    "feedforward.expand.bias", "feedforward.contract.bias", "attention_norm.weight", "attention_norm.bias",
    "feedforward_norm.weight", "feedforward_norm.bias",
]  # fmt: skip


@pytest.mark.parametrize("dense_first", [True, False])
@pytest.mark.parametrize("name", WEIGHTS)
def test_parameters_that_lie_otherwise(name: str, dense_first: bool) -> None:
    """Columns one after the other, slices of what is wider, every second number."""
    own, x = block(), tokens()
    place, _, last = name.rpartition(".")
    dense = own.get_submodule(place).get_parameter(last).detach()
    apart = [torch.stack([dense, torch.full_like(dense, torch.nan)], -1)[..., 0]]
    if dense.ndim == 2:
        apart += [dense.t().contiguous().t(), torch.cat([dense, torch.full_like(dense, torch.nan)], 1).chunk(2, 1)[0]]
    order = [[dense], apart] if dense_first else [apart, [dense]]
    for laid in (one for some in order for one in some):
        assert torch.equal(laid, dense)
        setattr(own.get_submodule(place), last, nn.Parameter(laid))
        for _ in range(3):
            budget_of(own, x, None, numbers(own, x, layer=None))


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_gradients_and_tokens_of_which_many_are_one(norm_first: bool) -> None:
    own, one = block(norm_first=norm_first), draw(1, 7, 32)
    for _ in range(4):
        x = one.clone().expand(3, 7, 32).requires_grad_()
        output = own(x)
        row = draw(32, seed=5).expand(3, 7, 32)
        found = [output.detach(), *torch.autograd.grad(output, [x, *own.parameters()], row)]
        budget_of(own, x.detach().clone().requires_grad_(), None, found, upstream=row)


# ---- who looks, and who has something of their own ----------------------------------------------------------


@pytest.mark.parametrize("mask", [None, ch.Causal(), ch.Padding(torch.tensor([7, 3]))], ids=MASK_IDS[:3])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_who_watches_sees_the_same_bits(
    norm_first: bool, dtype: torch.dtype, dropout: float, training: bool, mask: ch.Mask | None
) -> None:
    layers: list[dict[str, Any]] = [{}, {"activation": "relu", "bias": False, "num_kv_heads": 2}]
    for options in layers:
        own, x = block(dtype=dtype, norm_first=norm_first, dropout=dropout, **options), tokens(dtype)
        with torch.set_grad_enabled(training):
            for _ in range(3):
                torch.manual_seed(7)
                alone = own(x, mask=mask)
                torch.manual_seed(7)
                with ch.observe(own, ch.Want(entropy=True)) as seen:
                    watched = own(x, mask=mask)
                assert len(list(seen)) == 1
                assert torch.equal(alone, watched)
        if training:
            assert is_layer(alone)


@pytest.mark.parametrize("name", ["attention", "feedforward", "trace"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_who_only_looks_on_sees_the_same_bits(norm_first: bool, dtype: torch.dtype, dropout: float, name: str) -> None:
    own, x = block(dtype=dtype, norm_first=norm_first, dropout=dropout), tokens(dtype)
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            torch.manual_seed(7)
            alone = own(x)
            torch.manual_seed(7)
            if name == "trace":
                with ch.trace(own):
                    assert torch.equal(own(x), alone)
                continue
            with own.get_submodule(name).register_forward_hook(lambda *_: None):
                assert torch.equal(own(x), alone)


HANDED_ON: dict[str, Callable[[Tensor], Tensor]] = {
    "in 16 bits": lambda y: y.bfloat16(),
    "in 64 bits": lambda y: y.double(),
    "one row for all": lambda y: y.mean((0, 1)),
    "one row a sequence": lambda y: y.mean(1, keepdim=True),
    "a number": lambda y: y.mean(),
    "transposed": lambda y: y.transpose(0, 1).contiguous().transpose(0, 1),
    "negative": lambda y: torch._neg_view(y),
}


@pytest.mark.parametrize("how", HANDED_ON)
@pytest.mark.parametrize("name", ["attention", "feedforward"])
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_a_hook_that_hands_on_something_else(norm_first: bool, name: str, how: str) -> None:
    """Whatever may be added to ``x``."""
    own, x = block(norm_first=norm_first).eval(), tokens()
    own.get_submodule(name).register_forward_hook(lambda part, given, output: HANDED_ON[how](output))
    try:
        textbook = by_modules(own, x)
    except (RuntimeError, ch.ClearheadError):  # a norm of 64 bits with weights of 32
        with pytest.raises((RuntimeError, ch.ClearheadError)):
            own(x)
        return
    found = own(x)
    assert found.dtype == textbook.dtype
    assert found.shape == textbook.shape
    torch.testing.assert_close(found, textbook, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_gradients_of_who_watches(norm_first: bool, dropout: float) -> None:
    own, x = block(norm_first=norm_first, dropout=dropout), tokens()

    def watched(own: Any, x: Tensor) -> Tensor:
        with ch.observe(own, ch.Want(lse=True)):
            output: Tensor = own(x)
        return output

    factors = factors_of(own, x, seeds_of(own))
    budget_of(own, x, None, numbers(own, x, call=watched, layer=False), factors)


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_edits_reach_the_attention(norm_first: bool) -> None:
    own, x = block(norm_first=norm_first), tokens()

    def edited(own: Any, x: Tensor) -> Tensor:
        with ch.trace(own) as traced:
            traced.switch_off(heads=[1])
            output: Tensor = own(x)
        return output

    for _ in range(3):
        numbers(own, x)
    budget_of(own, x, None, numbers(own, x, call=edited, layer=False), off=[1])
    budget_of(own, x, None, numbers(own, x))


def test_backward_while_somebody_watches() -> None:
    own, x = block(), tokens()
    torch.manual_seed(7)
    output = own(x)
    with ch.observe(own, ch.Want(lse=True)):
        found = torch.autograd.grad(output, [x, *own.parameters()], upstream_of(output), retain_graph=True)
        own(x)
    budget_of(own, x, None, [output.detach(), *found])


PARTS = [
    "attention", "attention.query_projection", "attention.value_projection", "attention.output_projection",
    "attention_norm", "feedforward", "feedforward.expand", "feedforward.activation", "feedforward.dropout",
    "feedforward.contract", "feedforward_norm", "residual_dropout",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_hooks_fire(norm_first: bool, name: str, kind: str) -> None:
    own, x = block(norm_first=norm_first), tokens()
    for _ in range(3):
        numbers(own, x)
    part, seen = own.get_submodule(name), []
    handle = getattr(part, f"register_{kind}_hook")(lambda *given: seen.append(given[0]))
    for _ in range(2):
        seen.clear()  # the formula calls the activation
        found = numbers(own, x, layer=False)
        assert seen == [part] * (2 if name == "residual_dropout" else 1)
        budget_of(own, x, None, found)
    handle.remove()
    checked(own, x)


def test_hooks_on_the_block_itself() -> None:
    own, x = block(), tokens()
    seen: list[str] = []
    own.register_forward_pre_hook(lambda *_: seen.append("before"))
    own.register_forward_hook(lambda *_: seen.append("after"))
    checked(own, x)
    assert seen == ["before", "after"] * 4


def test_hooks_on_every_module() -> None:
    own, x = block(), tokens()
    for _ in range(3):
        own(x)
    seen: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda part, given, output: seen.append(part))
    try:
        found = numbers(own, x, layer=False)
    finally:
        handle.remove()
    assert all(own.get_submodule(name) in seen for name in PARTS)
    budget_of(own, x, None, found)
    checked(own, x)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2.0 * weight


@pytest.mark.parametrize(
    "name", [*(name for name in PARTS if "projection" in name or "norm" in name), "feedforward.expand",
             "feedforward.contract"]
)  # fmt: skip
def test_a_parametrized_part(name: str) -> None:
    own, x = block(), tokens()
    for _ in range(3):
        before = own(x)
    parametrize.register_parametrization(own.get_submodule(name), "weight", Doubled())
    found = numbers(own, x, layer=None)
    assert not torch.equal(before, found[0])
    budget_of(own, x, None, found)


class OwnAttention(MultiHeadAttention):
    def forward(self, *given: Any, **options: Any) -> Tensor:
        return 2.0 * super().forward(*given, **options)


class OwnFeedForward(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * super().forward(x)


class OwnLinear(Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * super().forward(input)


class OwnNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * super().forward(input)


class OwnDropout(Dropout):
    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * super().forward(input)


class OwnActivation(nn.GELU):
    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * super().forward(input)


def by_modules(own: Any, x: Tensor, mask: ch.Mask | None = None) -> Tensor:
    """The block by calls of its parts."""
    dropout: Callable[[Tensor], Tensor] = own.residual_dropout
    if own.norm_first:
        x = x + dropout(own.attention(own.attention_norm(x), mask=mask))
        return x + dropout(own.feedforward(own.feedforward_norm(x)))
    x = own.attention_norm(x + dropout(own.attention(x, mask=mask)))
    output: Tensor = own.feedforward_norm(x + dropout(own.feedforward(x)))
    return output


def agrees_with_its_modules(own: Any, x: Tensor, before: Tensor) -> None:
    assert not torch.equal(before, own(x))
    found = numbers(own, x, layer=False)
    textbook = numbers(own, x, call=by_modules, layer=False)
    wide = copy.deepcopy(own).double()
    exact = numbers(wide, x.detach().double().requires_grad_(), call=by_modules, layer=False)
    for place, three in enumerate(zip(found, textbook, exact, strict=True)):
        within_budget(str(place), *three, terms=128)


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("attention", OwnAttention), ("feedforward", OwnFeedForward), ("attention.key_projection", OwnLinear),
     ("attention.output_projection", OwnLinear), ("feedforward.contract", OwnLinear), ("attention_norm", OwnNorm),
     ("feedforward_norm", OwnNorm), ("residual_dropout", OwnDropout), ("feedforward.dropout", OwnDropout),
     ("feedforward.activation", OwnActivation)],
)  # fmt: skip
def test_a_subclass_of_a_part_is_called(name: str, kind: type[nn.Module], norm_first: bool) -> None:
    own, x = block(norm_first=norm_first), tokens()
    for _ in range(3):
        before = own(x)
    own.get_submodule(name).__class__ = kind
    agrees_with_its_modules(own, x, before)


class _Set:
    """A ``forward`` that is set on an object, and goes with its copies."""

    def __init__(self, kind: type[nn.Module], part: nn.Module) -> None:
        self.kind, self.part = kind, part

    def __call__(self, *given: Any, **options: Any) -> Tensor:
        output: Tensor = self.kind.forward(self.part, *given, **options)
        return 2.0 * output


@pytest.mark.parametrize("name", PARTS)
def test_a_forward_that_is_set_on_a_part_is_called(name: str) -> None:
    own, x = block(), tokens()
    for _ in range(3):
        before = own(x)
    part = own.get_submodule(name)
    part.forward = _Set(type(part), part)
    agrees_with_its_modules(own, x, before)


@pytest.mark.parametrize(
    "options", [{"rotary": True}, {"scores": [ch.Alibi(4)]}, {"scores": [ch.Sink(nn.Parameter(torch.zeros(4)))]}],
    ids=["rotary", "alibi", "sink"],
)  # fmt: skip
def test_what_it_cannot_do_goes_in_parts(options: dict[str, Any]) -> None:
    assert not is_layer(block(**options)(tokens()))


def test_a_memory_a_cache_and_other_backends_go_in_parts() -> None:
    x = tokens()
    assert not is_layer(block(DecoderBlock, cross_attention=True)(x, memory=x.detach()))
    own = block(DecoderBlock)
    with torch.no_grad():
        whole, cache = own(x), ch.KVCache()
        steps = [own(x[:, place : place + 1], cache=cache) for place in range(7)]
        torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-5, atol=1e-5)
    own.attention.backend = "tiled"
    found = numbers(own, x, layer=False)
    budget_of(own, x, None, found)


def test_products_that_are_torchs_go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARHEAD_PROJECTION", "torch")
    monkeypatch.setattr(chosen, "_CHOICES", {})
    own, x = block(), tokens()
    for _ in range(3):
        assert not is_layer(own(x))


# ---- torch's own ways of calling a module -------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["norms first", "norms last"])
def warm(request: pytest.FixtureRequest) -> Any:
    """A block whose calls are kept already."""
    own = block(norm_first=request.param)
    for _ in range(3):
        numbers(own, tokens())
    return own


def test_autocast(warm: Any) -> None:
    x = tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, textbook = warm(x), formula(warm, x)
    assert not is_layer(output)
    assert output.dtype == textbook.dtype
    exact = formula(copy.deepcopy(warm).double(), x.double())
    within_budget("output", output, textbook, exact, terms=128, dtype=torch.bfloat16)
    checked(warm, x)


def test_functional_call(warm: Any) -> None:
    x = tokens()
    doubled = {name: (2.0 * part).detach().requires_grad_() for name, part in warm.named_parameters()}
    output = torch.func.functional_call(warm, doubled, (x,))
    other = copy.deepcopy(warm)
    with torch.no_grad():
        for part in other.parameters():
            part.mul_(2.0)
    right = numbers(other, x)
    assert torch.equal(output, right[0])
    assert not torch.equal(output, warm(x))
    same(torch.autograd.grad(output, [x, *doubled.values()], upstream_of(output)), right[1:])


def test_vmap_and_grad(warm: Any) -> None:
    x = draw(3, 2, 7, 32)
    parameters = {name: part.detach() for name, part in warm.named_parameters()}
    wide = copy.deepcopy(warm).double()
    mapped = torch.func.vmap(warm)(x)
    for own, one in zip(mapped, x, strict=True):
        within_budget("vmap", own, formula(warm, one), formula(wide, one.double()), terms=128)

    upstream = upstream_of(x[0])

    def loss(parameters: dict[str, Tensor], one: Tensor) -> Tensor:
        output: Tensor = torch.func.functional_call(warm, parameters, (one,))
        return (output * upstream).sum()

    found = torch.func.grad(loss)(parameters, x[0])
    right = numbers(warm, x[0].clone().requires_grad_())
    leaf = x[0].clone().requires_grad_()
    budget_of(warm, leaf, None, [*right[:2], *found.values()])
    by_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for place, one in enumerate(x):
        leaf = one.clone().requires_grad_()
        own = [part[place] for part in by_sample.values()]
        budget_of(warm, leaf, None, [*numbers(warm, leaf)[:2], *own])


def test_forward_mode(warm: Any) -> None:
    x, tangent = tokens().detach(), draw(2, 7, 32, seed=6)
    wide = copy.deepcopy(warm).double()
    warm.attention.backend = "reference"
    found = torch.func.jvp(warm, (x,), (tangent,))[1]
    textbook = torch.func.jvp(lambda x: formula(warm, x), (x,), (tangent,))[1]
    exact = torch.func.jvp(lambda x: formula(wide, x), (x.double(),), (tangent.double(),))[1]
    within_budget("tangent", found, textbook, exact, terms=128)
    with forward_ad.dual_level():
        dual = warm(forward_ad.make_dual(x, tangent))
        within_budget("tangent", forward_ad.unpack_dual(dual).tangent, textbook, exact, terms=128)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled(kind: type[Block]) -> None:
    own, x = block(kind), tokens()
    for _ in range(3):
        numbers(own, x)
    compiled: Any = torch.compile(own, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        budget_of(own, x, None, numbers(own, x, call=lambda _, x: compiled(x), layer=False))
    checked(own, x)


def test_exported(warm: Any) -> None:
    warm.eval()
    x, other = tokens().detach(), draw(2, 7, 32, seed=11)
    exported = torch.export.export(warm, (x,)).module()
    wide = copy.deepcopy(warm).double()
    within_budget("output", exported(other), formula(warm, other), formula(wide, other.double()), terms=128)


def test_traced_by_jit(warm: Any) -> None:
    warm.eval()
    x, other = tokens().detach(), draw(2, 7, 32, seed=11)
    wide = copy.deepcopy(warm).double()
    with torch.no_grad():
        traced = torch.jit.trace(warm, (x,), check_trace=False)
        output = traced(other)
    within_budget("output", output, formula(warm, other), formula(wide, other.double()), terms=128)


def test_fake_tensors(warm: Any) -> None:
    with FakeTensorMode() as mode:
        own = EncoderBlock(32, 4, dropout=0.0)
        output = own(torch.empty(2, 7, 32))
        assert output.shape == (2, 7, 32)
        assert output.fake_mode is mode
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert warm(torch.empty(2, 7, 32)).shape == (2, 7, 32)


def test_on_meta(warm: Any) -> None:
    own = copy.deepcopy(warm).to("meta")
    for _ in range(3):
        output = own(torch.empty(2, 7, 32, device="meta", requires_grad=True))
        assert output.device.type == "meta"
        assert output.shape == (2, 7, 32)
        output.sum().backward()


def test_float64(warm: Any) -> None:
    own, x = copy.deepcopy(warm).double(), tokens(torch.float64)
    found = numbers(own, x, layer=False)
    right = numbers(own, x, call=formula, layer=False)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_copies_and_pickles(warm: Any) -> None:
    x = tokens()
    right = numbers(warm, x)
    file = io.BytesIO()
    torch.save(warm, file)
    file.seek(0)
    for own in (copy.deepcopy(warm), pickle.loads(pickle.dumps(warm)), torch.load(file, weights_only=False)):
        same(numbers(own, x), right)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_checkpoints_compute_it_again(norm_first: bool, kind: type[Block], dropout: float) -> None:
    own, again = (
        block(kind, norm_first=norm_first, dropout=dropout, checkpoint_activations=flag) for flag in (False, True)
    )
    x = tokens()
    right = numbers(own, x)
    for _ in range(4):
        same(numbers(again, x, layer=None), right)
        leaf = x.detach().requires_grad_()
        torch.manual_seed(7)
        output = again(leaf)
        output.backward(upstream_of(output))
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, right[1])


@pytest.mark.parametrize("shape", [(0, 7, 32), (2, 0, 32), (0, 0, 32), (0, 32)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens(kind: type[Block], shape: tuple[int, ...]) -> None:
    own = block(kind)
    numbers(own, tokens())
    x = torch.zeros(shape, requires_grad=True)
    output = own(x)
    assert output.shape == shape
    output.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape


@pytest.mark.parametrize("kind", KINDS)
def test_one_sequence_without_a_batch(kind: type[Block]) -> None:
    own, x = block(kind), tokens(batch=1)
    for _ in range(4):
        found = numbers(own, x, call=lambda own, x: own(x[0])[None], layer=False)
        budget_of(own, x, None, found)


def test_what_is_wrong_is_told_after_good_calls() -> None:
    own, x = block(), tokens()
    for _ in range(3):
        own(x, mask=ch.Padding([7, 3]))
        own(x)
    for bad, error in ((x[..., :31], "wide|width|channels"), (x.double(), "dtype"), (x[None, None], "axes|3")):
        with pytest.raises(ch.ClearheadError, match=error):
            own(bad)
    with pytest.raises(ch.ClearheadError, match="mask"):
        own(x, mask=[1])
    with pytest.raises(ch.ClearheadError, match="lengths"):
        own(x, mask=ch.Padding([7, 3, 1]))
    checked(own, x)


def test_it_takes_part_in_training() -> None:
    own, x = block(dropout=0.0), tokens()
    optimizer = torch.optim.Adam(own.parameters(), lr=3e-3)
    target, losses = draw(2, 7, 32, seed=9), []
    for _ in range(8):
        optimizer.zero_grad()
        loss = (own(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses == sorted(losses, reverse=True)


# ---- NaN and inf --------------------------------------------------------------------------------------------


def _with(x: Tensor, batch: int, places: slice, value: float) -> Tensor:
    made = x.detach().clone()
    made[batch, places] = value
    return made.requires_grad_()


BAD = pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)


@BAD
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hidden_token_that_is_not_finite(kind: type[Block], norm_first: bool, dtype: torch.dtype, bad: float) -> None:
    """As a key nobody reads it; its own row tells."""
    own, x, mask = block(kind, dtype, norm_first=norm_first), tokens(dtype, length=9), ch.Padding([9, 6])
    clean, spoiled = (_with(x, 1, slice(7, 8), value) for value in (0.0, bad))
    rest = torch.ones(2, 9, dtype=torch.bool)
    rest[1, 7] = False
    for _ in range(4):
        right, found = own(clean, mask=mask), own(spoiled, mask=mask)
        assert is_layer(found)
        assert torch.equal(right[rest], found[rest])
        assert not bool(found[1, 7].isfinite().any())
        # As a query it reads the others of its own sequence: what comes back through it is the others' too.
        upstream = upstream_of(found)
        grads = [torch.autograd.grad(output, leaf, upstream)[0] for output, leaf in ((right, clean), (found, spoiled))]
        assert torch.equal(grads[0][0], grads[1][0])
        assert bool(grads[1][0].isfinite().all())


@BAD
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_a_document_that_is_not_finite(norm_first: bool, dtype: torch.dtype, bad: float) -> None:
    """Neither as keys nor as queries do its tokens meet others: nothing of it is seen, there or back."""
    own, x = block(dtype=dtype, norm_first=norm_first), tokens(dtype, batch=1, length=15)
    mask = ch.Documents(lengths=[4, 5, 6])
    rest = torch.ones(15, dtype=torch.bool)
    rest[4:9] = False
    clean, spoiled = (_with(x, 0, slice(4, 9), value) for value in (0.0, bad))
    for _ in range(4):
        found = []
        for leaf in (clean, spoiled):
            output = own(leaf, mask=mask)
            assert is_layer(output)
            (grad,) = torch.autograd.grad(output, leaf, upstream_of(output))
            found.append((output[0, rest], grad[0, rest]))
        same(*found)
        assert all(bool(part.isfinite().all()) for part in found[1])


@BAD
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_gradients_that_are_finite_are_those_of_the_parts(norm_first: bool, bad: float) -> None:
    """Of every parameter and every token: finite exactly where they are one by one, and right there."""
    own, x = block(norm_first=norm_first), tokens(batch=2, length=9)
    for mask in (ch.Padding([9, 6]), ch.Causal(), ch.Padding([9, 6]) & ch.Causal()):
        spoiled, upstream = _with(x, 1, slice(7, 8), bad), draw(2, 9, 32, seed=3)
        upstream[1, 6:] = 0.0

        def in_parts(own: Any, x: Tensor, mask: ch.Mask = mask) -> Tensor:
            return by_modules(own, x, mask)

        wide = copy.deepcopy(own).double()
        exact = numbers(wide, spoiled.detach().double().requires_grad_(), call=in_parts, layer=False, upstream=upstream)
        parts = numbers(own, spoiled, call=in_parts, layer=None, upstream=upstream)
        for _ in range(3):
            together = numbers(own, spoiled, mask, upstream=upstream)
            for found, near, right in zip(together, parts, exact, strict=True):
                assert torch.equal(found.isfinite(), near.isfinite())
                whole = found.isfinite()
                if bool(whole.any()):
                    within_budget("finite", found[whole], near[whole], right[whole], terms=128)


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_a_gradient_that_is_not_finite_stays_in_its_batch(norm_first: bool) -> None:
    own, x = block(norm_first=norm_first), tokens()
    upstream = draw(2, 7, 32, seed=3)
    right = numbers(own, x, upstream=upstream)
    upstream[1, 3, 5] = torch.inf
    for _ in range(4):
        found = numbers(own, x, upstream=upstream)
        assert torch.equal(found[1][0], right[1][0])
        assert not bool(found[1][1].isfinite().all())


# ---- memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
@pytest.mark.parametrize("call", [1, 2, 3], ids=["written down", "written down again", "played back"])
def test_what_is_saved_goes_with_backward(
    call: int, norm_first: bool, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that is kept, as in a running sum, must keep nothing else, and neither must calls that are."""
    own, x = block(norm_first=norm_first, dropout=dropout), tokens(batch=4, length=65)
    made: list[weakref.ref[Tensor]] = []

    def noted(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def making(*given: Any, **options: Any) -> Tensor:
            made.append(weakref.ref(found := make(*given, **options)))
            return found

        return making

    plain, maker = noted(native_memory.new_tensor), native_memory.maker_like
    for place in (attention_step, layer_step, native_dropout, native_norm, native_projection, native_work):
        monkeypatch.setattr(place, "new_tensor", plain)
    monkeypatch.setattr(native_prepared, "maker_like", lambda own: noted(maker(own)))
    for _ in range(1, call):
        own(x).sum().backward()
    made.clear()
    output = own(x)
    assert is_layer(output)
    loss = output.sum()
    del output
    assert any(place() is not None for place in made)
    loss.backward()
    for part in (x, *own.parameters()):
        part.grad = None
    gc.collect()
    assert [place() for place in made if place() is not None] == []
    assert bool(loss.detach().isfinite())


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_without_gradients_nothing_is_kept(norm_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    own, x = block(norm_first=norm_first), tokens()
    alive: list[weakref.ref[Tensor]] = []
    maker = native_memory.maker_like

    def noting(own: Tensor) -> Callable[..., Tensor]:
        make = maker(own)

        def making(*given: Any, **options: Any) -> Tensor:
            alive.append(weakref.ref(found := make(*given, **options)))
            return found

        return making

    monkeypatch.setattr(native_prepared, "maker_like", noting)
    with torch.no_grad():
        for _ in range(3):
            alive.clear()
            output = own(x)
    gc.collect()
    held = [place() for place in alive if place() is not None]
    assert len(alive) > 1
    assert len(held) == 1
    assert held[0] is output
