"""torch's encoder layer, swapped, as one step: torch's numbers, torch's hooks, and left alone where torch is."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead as ch
from clearhead.backends import native_prepared, native_projection
from clearhead.bridges import swap, unswap
from clearhead.nn import step
from clearhead.nn.layer_step import LayerStep
from clearhead.projection import chosen
from tests.budget import within_budget

pytestmark = pytest.mark.skipif(native_projection.absent() is not None, reason=f"{native_projection.absent()}")

BATCH, LENGTH, WIDTH, HEADS = 3, 7, 32, 4
DTYPES = [torch.float32, torch.bfloat16]
PADDING = torch.arange(LENGTH) >= torch.tensor([7, 3, 5])[:, None]
FORBIDDEN = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
#: Each row may attend to itself, so that torch's rows are numbers too.
SOME = (torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(4)) < 0.5) & ~torch.eye(LENGTH).bool()


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products are the kernels' where larger ones are; and nothing is known of calls before."""
    monkeypatch.setenv("CLEARHEAD_PROJECTION", "native")
    monkeypatch.setattr(chosen, "_CHOICES", {})
    for held in (step._KEPT, step._KNOWN, step._CALLS):
        monkeypatch.setattr(held, "steps", {})


def made(kind: Any = nn.TransformerEncoderLayer, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(1)
    layer = kind(WIDTH, HEADS, **({"dim_feedforward": 50, "dropout": 0.0, "batch_first": True} | options))
    with torch.no_grad():
        for part in layer.parameters():
            if part.ndim == 1:
                part.add_(0.3 * torch.randn_like(part))
        if options.get("activation", F.relu) in ("relu", F.relu) and dtype is torch.bfloat16:
            # A ReLU's gradient jumps at 0, where roundings would decide: each hidden number is well on one side.
            layer.linear1.weight.mul_(0.3)
            if layer.linear1.bias is not None:
                layer.linear1.bias.copy_(torch.randn_like(layer.linear1.bias).sign() * 2.0)
    return layer.to(dtype)


def swapped(theirs: nn.Module) -> Any:
    ours = copy.deepcopy(theirs)
    assert swap(ours).left == ()
    return ours


def tokens(dtype: torch.dtype = torch.float32, seed: int = 2) -> Tensor:
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x.to(dtype).requires_grad_()


def is_layer(output: Tensor) -> bool:
    node: Any = output.grad_fn
    return node is not None and node.name() == "_KernelStepBackward" and isinstance(node.step, LayerStep)


def numbers(
    layer: nn.Module, x: Tensor, call: dict[str, Any], *, is_step: bool | None = None, real: Tensor | None = None
) -> list[Tensor]:
    """Output, and gradients of ``x`` and of every parameter, where ``real`` says that the output counts."""
    output = layer(x, **call)
    assert is_step is None or is_layer(output) == is_step
    output = output if real is None else output[real]
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, [x, *layer.parameters()], upstream)]


def _in(dtype: torch.dtype, call: dict[str, Any]) -> dict[str, Any]:
    """Float masks as wide as what they are added to."""
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in call.items()
    }


def agrees(
    theirs: nn.Module, ours: nn.Module, x: Tensor, call: dict[str, Any] | None = None, *, is_step: bool | None = True,
    real: Tensor | None = None, times: int = 4,
) -> None:  # fmt: skip
    """Ours against theirs in float64, on the budget of theirs; every call has the bits of the first."""
    call = {} if call is None else call
    found = numbers(ours, x, _in(x.dtype, call), is_step=is_step, real=real)
    textbook = numbers(theirs, x, _in(x.dtype, call), real=real)
    wide = x.detach().double().requires_grad_()
    exact = numbers(copy.deepcopy(theirs).double(), wide, _in(torch.float64, call), real=real)
    names = ["output", "dx", *(name for name, _ in theirs.named_parameters())]
    for name, *three in zip(names, found, textbook, exact, strict=True):
        within_budget(name, *three, terms=BATCH * LENGTH + 50, dtype=x.dtype)
    for _ in range(1, times):
        again = numbers(ours, x, _in(x.dtype, call), is_step=is_step, real=real)
        assert all(map(torch.equal, again, found))


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a mask": {"src_mask": SOME},
    "a mask for each head": {"src_mask": SOME.expand(BATCH * HEADS, LENGTH, LENGTH).clone()},
    "causal": {"src_mask": FORBIDDEN, "is_causal": True},
    "causal by look": {"src_mask": FORBIDDEN},
    "causal in floats": {"src_mask": nn.Transformer.generate_square_subsequent_mask(LENGTH), "is_causal": True},
    "padding": {"src_key_padding_mask": PADDING},
    "padding in floats": {"src_key_padding_mask": torch.zeros(PADDING.shape).masked_fill(PADDING, -torch.inf)},
    "padding and causal": {"src_mask": FORBIDDEN, "src_key_padding_mask": PADDING},
}
OPTIONS: list[dict[str, Any]] = [
    {}, {"activation": "gelu"}, {"norm_first": True}, {"norm_first": True, "activation": "gelu"},
    {"layer_norm_eps": 1e-2, "activation": F.silu},
]  # fmt: skip


def _name(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in options.items()) or "plain"


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=_name)
@pytest.mark.parametrize("name", CALLS)
def test_one_layer(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    theirs = made(dtype=dtype, **options)
    agrees(theirs, swapped(theirs), tokens(dtype), CALLS[name])


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("name", ["plain", "causal", "padding"])
def test_without_biases(name: str, activation: str, norm_first: bool) -> None:
    theirs = made(bias=False, activation=activation, norm_first=norm_first)
    agrees(theirs, swapped(theirs), tokens(), CALLS[name])


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
@pytest.mark.parametrize("where", ["src_mask", "src_key_padding_mask"])
def test_a_mask_that_is_added_goes_part_by_part(where: str, norm_first: bool) -> None:
    theirs = made(norm_first=norm_first)
    size = (LENGTH, LENGTH) if where == "src_mask" else (BATCH, LENGTH)
    added = torch.randn(size, generator=torch.Generator().manual_seed(9))
    agrees(theirs, swapped(theirs), tokens(), {where: added}, is_step=False)


def test_one_of_our_masks() -> None:
    theirs, x = made(), tokens()
    ours, window = swapped(theirs), ch.Window(2, after=1)
    right = numbers(ours, x, {"src_mask": ~window.dense(LENGTH, LENGTH)}, is_step=True)
    for _ in range(4):
        found = numbers(ours, x, {"src_mask": window}, is_step=True)
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_a_row_that_may_attend_to_nothing(norm_first: bool) -> None:
    """torch has NaN there; ours is the layer whose attention gives 0 before its last bias."""
    theirs = made(norm_first=norm_first)
    ours, x = swapped(theirs), tokens()
    nothing = PADDING.clone()
    nothing[1] = True
    for _ in range(3):
        found = numbers(ours, x, {"src_key_padding_mask": nothing}, is_step=True)
        assert all(bool(part.isfinite().all()) for part in found)
        rest = numbers(ours, x, {"src_key_padding_mask": PADDING}, is_step=True)
        assert torch.equal(found[0][[0, 2]], rest[0][[0, 2]])
        bias, (one, two) = theirs.self_attn.out_proj.bias, (theirs.norm1, theirs.norm2)
        row = x[1] + bias if norm_first else one(x[1] + bias)
        right = row + theirs._ff_block(two(row)) if norm_first else two(row + theirs._ff_block(row))
        torch.testing.assert_close(found[0][1], right.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("final", [False, True])
def test_a_stack(final: bool, padded: bool, norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = made(norm_first=norm_first, activation="gelu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        theirs = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH) if final else None)
    call = {"src_key_padding_mask": PADDING} if padded else {}
    agrees(theirs, swapped(theirs), tokens(), call, is_step=None if padded or final else True, real=~PADDING)
    for mask in (FORBIDDEN, SOME):
        agrees(theirs, swapped(theirs), tokens(), {"mask": mask, **call}, is_step=None, real=~PADDING)


def test_a_stacks_layers_are_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding is left out, and what is left is one step a layer."""
    theirs = nn.TransformerEncoder(made(), 2, enable_nested_tensor=False)
    ours, x = swapped(theirs), tokens()
    for _ in range(3):
        output = ours(x, src_key_padding_mask=PADDING)
    steps, seen = [output.grad_fn], []
    while steps:
        node = steps.pop()
        if node is None:
            continue
        seen += [node] if node.name() == "_KernelStepBackward" else []
        steps += [one for one, _ in node.next_functions]
    assert len({id(node) for node in seen}) == 2
    assert all(isinstance(node.step, LayerStep) for node in seen)
    numbers(ours, x, {"src_key_padding_mask": PADDING})
    numbers(ours, x, {"src_key_padding_mask": PADDING})
    monkeypatch.setattr(native_prepared, "run", None)
    numbers(ours, x, {"src_key_padding_mask": PADDING})


# ---- dropout ------------------------------------------------------------------------------------------------


def test_dropout_is_drawn_anew_and_each_its_own() -> None:
    """Both parts give ones, so that what is added to the residual shows what was kept."""
    theirs = made(dropout=0.5, norm_first=True)
    ours = swapped(theirs)
    with torch.no_grad():
        for layer in (ours.self_attn.out_proj, ours.linear2):
            layer.weight.zero_()
            layer.bias.fill_(1.0)
    x = torch.zeros(3, 33, WIDTH, requires_grad=True)
    outputs = []
    for _ in range(4):
        outputs.append(ours(x))
        assert is_layer(outputs[-1])
        counts = [int((outputs[-1] == value).sum()) for value in (0.0, 2.0, 4.0)]
        assert sum(counts) == x.numel()
        # 3168 places: one standard deviation is 0.009 for a half.
        assert [count / x.numel() for count in counts] == pytest.approx([0.25, 0.5, 0.25], abs=0.04)
    assert not any(torch.equal(outputs[0], other) for other in outputs[1:])
    torch.manual_seed(5)
    first = ours(x)
    torch.manual_seed(5)
    assert torch.equal(first, ours(x))
    ours.eval()
    assert bool((ours(x) == 2.0).all())


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
@pytest.mark.parametrize("which", ["dropout", "dropout1", "dropout2", "attention"])
def test_each_dropout_where_it_belongs(which: str, norm_first: bool) -> None:
    """Of one that drops 9 of 10 numbers, torch's average and its spread, over draws."""
    theirs = made(norm_first=norm_first)
    ours = swapped(theirs)
    for layer in (theirs, ours):
        if which == "attention":
            layer.self_attn.dropout = 0.9
        else:
            getattr(layer, which).p = 0.9
    x = tokens()
    draws = []
    for layer, is_step in ((ours, True), (theirs, False)):
        torch.manual_seed(6)
        outputs = [layer(x) for _ in range(400)]
        assert all(is_layer(output) == is_step for output in outputs)
        draws.append(torch.stack([output.detach() for output in outputs]))
    error = (draws[0].mean(0) - draws[1].mean(0)).abs()
    assert bool((error <= 6 * ((draws[0].var(0) + draws[1].var(0)) / 400) ** 0.5 + 1e-5).all())
    spread = [float(draw.var(0).mean()) for draw in draws]
    assert spread[0] == pytest.approx(spread[1], rel=0.1)
    assert spread[0] > 0.0


# ---- what a swap is -----------------------------------------------------------------------------------------


def test_state_goes_both_ways_and_unswap_restores() -> None:
    theirs, other = made(), made(norm_first=False)
    with torch.no_grad():
        for part in other.parameters():
            part.mul_(1.5)
    ours, x = swapped(theirs), tokens()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for _ in range(3):
        numbers(ours, x, {}, is_step=True)
    ours.load_state_dict(other.state_dict())
    agrees(other, ours, x)
    theirs.load_state_dict(ours.state_dict())
    agrees(theirs, ours, x)
    unswap(ours)
    assert [type(part) for part in ours.modules()] == [type(part) for part in theirs.modules()]
    assert not is_layer(ours(x))
    assert torch.equal(ours(x), theirs(x))
    swap(ours)
    agrees(theirs, ours, x)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_without_gradients(activation: str, norm_first: bool, training: bool) -> None:
    """In eval mode against torch's own closed road."""
    theirs = made(norm_first=norm_first, activation=activation).train(training)
    ours, x, wide = swapped(theirs), tokens(), copy.deepcopy(theirs).double()
    for call in ({}, {"src_key_padding_mask": PADDING}, {"src_mask": FORBIDDEN}):
        with torch.no_grad():
            exact = wide(x.double(), **call)
            textbook = theirs(x, **call)
            for _ in range(4):
                found = ours(x, **call)
                counts = ~PADDING if "src_key_padding_mask" in call else torch.ones(BATCH, LENGTH, dtype=torch.bool)
                within_budget("output", found[counts], textbook[counts], exact[counts], terms=60)
        with_gradients = ours(x, **call)
        assert is_layer(with_gradients)
        assert torch.equal(with_gradients, found)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
@pytest.mark.parametrize(
    "name", ["linear1", "linear2", "norm1", "norm2", "dropout", "dropout1", "dropout2", "self_attn", ""]
)
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_hooks_fire_once_for_each_call(norm_first: bool, name: str, kind: str) -> None:
    theirs = made(norm_first=norm_first)
    ours, x = swapped(theirs), tokens()
    for _ in range(3):
        numbers(ours, x, {})
    part, seen = ours.get_submodule(name), []
    handle = getattr(part, f"register_{kind}_hook")(lambda *given: seen.append(given[0]))
    for count in (1, 2, 3):
        numbers(ours, x, {}, is_step=not (name or kind == "full_backward"))
        assert seen == [part] * count
    agrees(theirs, ours, x, is_step=None, times=1)
    handle.remove()
    agrees(theirs, ours, x)


def test_a_hook_that_changes_what_passes() -> None:
    theirs = made()
    ours, x = swapped(theirs), tokens()
    for _ in range(3):
        numbers(ours, x, {})
    for layer in (theirs, ours):
        layer.linear2.register_forward_hook(lambda part, given, output: 2.0 * output)
        layer.self_attn.register_forward_hook(lambda part, given, output: (3.0 * output[0], output[1]))
    agrees(theirs, ours, x, is_step=False)


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
@pytest.mark.parametrize("name", ["plain", "causal", "padding"])
def test_the_batch_second(name: str, norm_first: bool) -> None:
    theirs = made(norm_first=norm_first, batch_first=False)
    x = torch.randn(LENGTH, BATCH, WIDTH, generator=torch.Generator().manual_seed(2)).requires_grad_()
    agrees(theirs, swapped(theirs), x, CALLS[name], is_step=False)


def test_one_sequence_and_none() -> None:
    theirs = made()
    ours = swapped(theirs)
    for _ in range(3):
        numbers(ours, tokens(), {})
    x = tokens()[0].detach().requires_grad_()
    agrees(theirs, ours, x, is_step=False)
    for shape in ((0, LENGTH, WIDTH), (BATCH, 0, WIDTH)):
        assert ours(torch.zeros(shape)).shape == shape


class OwnFeedForward(nn.TransformerEncoderLayer):
    def _ff_block(self, x: Tensor) -> Tensor:
        return 2.0 * super()._ff_block(x)


class OwnAttention(nn.TransformerEncoderLayer):
    def _sa_block(self, *given: Any, **options: Any) -> Tensor:
        return 2.0 * super()._sa_block(*given, **options)


@pytest.mark.parametrize("kind", [OwnFeedForward, OwnAttention])
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_a_subclass_with_a_block_of_its_own(norm_first: bool, kind: type[nn.Module]) -> None:
    theirs, plain = made(kind, norm_first=norm_first), made(norm_first=norm_first)
    ours, x = copy.deepcopy(theirs), tokens()
    swap(ours)
    assert not torch.equal(theirs(x), plain(x))
    agrees(theirs, ours, x, is_step=False)


@pytest.mark.parametrize("name", ["_ff_block", "_sa_block"])
@pytest.mark.parametrize("when", ["before the swap", "after it", "after calls"])
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_a_block_that_is_set_on_an_object(norm_first: bool, when: str, name: str) -> None:
    ours, theirs, x = made(norm_first=norm_first), made(norm_first=norm_first), tokens()
    if when != "before the swap":
        swap(ours)
    if when == "after calls":
        for _ in range(3):
            numbers(ours, x, {}, is_step=True)
    seen: list[str] = []

    def replace(layer: Any, own: bool) -> None:
        block = getattr(layer, name)

        def mine(*given: Any, **options: Any) -> Tensor:
            seen.extend(["mine"] if own else [])
            return 2.0 * block(*given, **options)  # type: ignore[no-any-return]

        setattr(layer, name, mine)

    for layer in (ours, theirs):
        replace(layer, layer is ours)
    swap(ours)
    found, textbook = numbers(ours, x, {}, is_step=False), numbers(theirs, x, {})
    assert seen == ["mine"]
    for one, other in zip(found, textbook, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert not torch.equal(textbook[0], made(norm_first=norm_first)(x))


class OwnLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * super().forward(input)


class OwnNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * super().forward(input)


class OwnDropout(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * super().forward(input)


class OwnSelfAttention(nn.MultiheadAttention):
    def forward(self, *given: Any, **options: Any) -> Any:
        output, weights = super().forward(*given, **options)
        return 2.0 * output, weights


@pytest.mark.parametrize("swap_first", [True, False])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("linear1", OwnLinear), ("linear2", OwnLinear), ("norm1", OwnNorm), ("norm2", OwnNorm), ("dropout", OwnDropout),
     ("dropout1", OwnDropout), ("dropout2", OwnDropout), ("self_attn", OwnSelfAttention)],
)  # fmt: skip
def test_a_part_of_somebodys_own(name: str, kind: type[nn.Module], swap_first: bool) -> None:
    theirs, x = made(), tokens()
    ours = copy.deepcopy(theirs)
    if swap_first:
        swap(ours)
        for _ in range(3):
            numbers(ours, x, {}, is_step=True)
    before = theirs(x)
    for layer in (ours, theirs):
        part = layer.get_submodule(name)
        part.__class__ = kind
    if not swap_first:
        swap(ours)
    assert not torch.equal(before, theirs(x))
    agrees(theirs, ours, x, is_step=False)


@pytest.mark.parametrize("name", ["self_attn", "self_attn.out_proj", "linear1", "norm2"])
def test_a_parametrized_part(name: str) -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2.0 * weight

    theirs, x = made(), tokens()
    ours = swapped(theirs)
    for _ in range(3):
        before = numbers(ours, x, {})[0]
    for layer in (theirs, ours):
        which = "in_proj_weight" if name == "self_attn" else "weight"
        nn.utils.parametrize.register_parametrization(layer.get_submodule(name), which, Doubled())
    agrees(theirs, ours, x, is_step=None)
    assert not torch.equal(before, ours(x))


@pytest.mark.parametrize("name", ["plain", "causal", "padding"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_who_watches_sees_the_same_bits(
    norm_first: bool, dtype: torch.dtype, dropout: float, training: bool, name: str
) -> None:
    ours, x = swapped(made(dtype=dtype, norm_first=norm_first, dropout=dropout)), tokens(dtype)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            ours.train(training)
            for _ in range(3):
                torch.manual_seed(7)
                alone = ours(x, **CALLS[name])
                torch.manual_seed(7)
                with ch.observe(ours, ch.Want(entropy=True)) as seen:
                    watched = ours(x, **CALLS[name])
                assert len(list(seen)) == 1
                assert torch.equal(alone, watched)
        assert is_layer(alone) == gradients


@pytest.mark.parametrize("name", ["plain", "causal", "padding"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_a_trace_without_edits_changes_nothing(norm_first: bool, dtype: torch.dtype, dropout: float, name: str) -> None:
    ours, x = swapped(made(dtype=dtype, norm_first=norm_first, dropout=dropout)), tokens(dtype)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            torch.manual_seed(7)
            alone = ours(x, **CALLS[name])
            torch.manual_seed(7)
            with ch.trace(ours) as traced:
                assert torch.equal(ours(x, **CALLS[name]), alone)
            assert traced[0].weights.shape == (BATCH, HEADS, LENGTH, LENGTH)


@pytest.mark.parametrize("name", CALLS)
def test_a_hook_on_the_attention_is_shown_the_callers_masks(name: str) -> None:
    """And not what they were read as."""
    theirs, x, call = made(), tokens(), CALLS[name]
    ours = swapped(theirs)
    for _ in range(3):
        numbers(ours, x, call, is_step=True)
    seen: list[dict[str, Any]] = []
    ours.self_attn.register_forward_pre_hook(lambda part, given, named: seen.append(named), with_kwargs=True)
    agrees(theirs, ours, x, call, is_step=False, times=1)
    assert len(seen) == 1
    for shown, given in (("attn_mask", "src_mask"), ("key_padding_mask", "src_key_padding_mask")):
        assert seen[0][shown] is call.get(given)


@pytest.mark.parametrize("how", ["in 16 bits", "one row a sequence", "a number"])
@pytest.mark.parametrize("name", ["self_attn", "linear2", "dropout2"])
def test_a_hook_that_hands_on_something_else(name: str, how: str) -> None:
    """Whatever may be added to ``x``."""
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "in 16 bits": lambda y: y.bfloat16(),
        "one row a sequence": lambda y: y.mean(1, keepdim=True),
        "a number": lambda y: y.mean((0, 1), keepdim=True),
    }
    change = changes[how]
    theirs, x = made(norm_first=True).eval(), tokens()
    ours = swapped(theirs)
    if name == "self_attn" and how == "in 16 bits":
        theirs.dropout1 = ours.dropout1 = nn.Identity()
    for _ in range(3):
        ours(x)

    def hand_on(part: nn.Module, given: Any, output: Any) -> Any:
        return (change(output[0]), output[1]) if isinstance(output, tuple) else change(output)

    for layer in (theirs, ours):
        layer.get_submodule(name).register_forward_hook(hand_on)
    found, right = ours(x), theirs(x)
    assert found.dtype == right.dtype
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


def test_edits_reach_the_attention() -> None:
    ours, x = swapped(made()), tokens()
    for _ in range(3):
        before = numbers(ours, x, {})[0]
    with ch.trace(ours) as traced:
        traced.switch_off(heads=list(range(HEADS)))
        edited = ours(x)
    assert not torch.equal(before, edited)
    # Without any head the attention is the bias of its last layer.
    row = ours.norm1(x + ours.self_attn.out_proj.bias)
    right = ours.norm2(row + ours._ff_block(row))
    torch.testing.assert_close(edited, right, rtol=1e-5, atol=1e-5)


def test_what_is_wrong_is_told_after_good_calls() -> None:
    ours, x = swapped(made()), tokens()
    for _ in range(3):
        numbers(ours, x, {"src_key_padding_mask": PADDING})
    for bad, error in ((x[..., :31], "wide"), (x.double(), "dtype")):
        with pytest.raises(ch.ClearheadError, match=error):
            ours(bad)
    with pytest.raises(ch.MaskError, match="key_padding_mask"):
        ours(x, src_key_padding_mask=PADDING[:, :3])
    with pytest.raises(ch.MaskError, match="attn_mask"):
        ours(x, src_mask=FORBIDDEN[:3])
    with pytest.raises(ch.MaskError, match="is_causal"):
        ours(x, is_causal=True)


def test_masks_in_turn() -> None:
    theirs, x = made(activation="gelu"), tokens()
    ours: Callable[..., Tensor] = swapped(theirs)
    for _ in range(4):
        for call in CALLS.values():
            agrees(theirs, ours, x, call, times=1)  # type: ignore[arg-type]


def test_other_numbers_in_the_same_mask() -> None:
    """One that is written to between calls."""
    theirs, x, padding = made(activation="gelu"), tokens(), PADDING.clone()
    ours = swapped(theirs)
    for round_ in range(8):
        padding[2] = torch.arange(LENGTH) >= 1 + round_ % 7
        agrees(theirs, ours, x, {"src_key_padding_mask": padding}, times=1)
