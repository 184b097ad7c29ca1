"""torch's decoder layer, swapped, as one step: torch's numbers under every mask, torch's hooks, and left alone where
torch is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead as ch
from clearhead.bridges import swap, unswap
from clearhead.ops import library as native_library
from tests.bridges.torch_layers import (
    BATCH,
    DTYPES,
    FORBIDDEN,
    HEADS,
    LENGTH,
    PADDING,
    WIDTH,
    in_dtype,
    is_layer,
    made,
    swapped,
    tokens,
)
from tests.budget import within_budget

pytestmark = [
    pytest.mark.skipif(native_library.library() is None, reason=f"{native_library.reason()}"),
    pytest.mark.usefixtures("_kernels"),
]

OTHERS = 9
SOME = torch.rand(LENGTH, OTHERS, generator=torch.Generator().manual_seed(4)) < 0.5
SOME[:, 2] = False  # Each row may attend to something, so that torch's rows are numbers too.
PADDED = torch.arange(OTHERS) >= torch.tensor([9, 3, 5])[:, None]
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"tgt_mask": FORBIDDEN, "tgt_is_causal": True},
    "causal in floats": {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(LENGTH), "tgt_is_causal": True},
    "padded memory": {"tgt_mask": FORBIDDEN, "tgt_is_causal": True, "memory_key_padding_mask": PADDED},
    "padding": {"tgt_key_padding_mask": PADDING, "memory_key_padding_mask": PADDED},
    "a mask of the memory": {"memory_mask": SOME},
    "a mask for each head": {"memory_mask": SOME.expand(BATCH * HEADS, LENGTH, OTHERS).clone()},
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"activation": "gelu"},
    {"norm_first": True},
    {"norm_first": True, "activation": "gelu", "bias": False},
    {"layer_norm_eps": 1e-2, "activation": F.silu},
]


def decoder(**options: Any) -> Any:
    return made(nn.TransformerDecoderLayer, **options)


def memory_of(dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(BATCH, OTHERS, WIDTH, generator=torch.Generator().manual_seed(8))
    return x.to(dtype).requires_grad_()


def numbers(
    layer: nn.Module, x: Tensor, memory: Tensor, call: dict[str, Any], *, is_step: bool | None = None
) -> list[Tensor]:
    """Output, and gradients of ``x``, the memory and every parameter."""
    output = layer(x, memory, **in_dtype(x.dtype, call))
    assert is_step is None or is_layer(output) == is_step
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, [x, memory, *layer.parameters()], upstream)]


def agrees(
    theirs: nn.Module,
    ours: nn.Module,
    x: Tensor,
    memory: Tensor,
    call: dict[str, Any] | None = None,
    *,
    is_step: bool | None = True,
    times: int = 4,
) -> None:
    """Ours against theirs in float64, on the budget of theirs; every call has the bits of the first."""
    call = {} if call is None else call
    found = numbers(ours, x, memory, call, is_step=is_step)
    textbook = numbers(theirs, x, memory, call)
    wide = [each.detach().double().requires_grad_() for each in (x, memory)]
    exact = numbers(copy.deepcopy(theirs).double(), *wide, call)
    names = ["output", "dx", "dmemory", *(name for name, _ in theirs.named_parameters())]
    for name, *three in zip(names, found, textbook, exact, strict=True):
        within_budget(name, *three, terms=BATCH * OTHERS + 50, dtype=x.dtype)
    for _ in range(1, times):
        again = numbers(ours, x, memory, call, is_step=is_step)
        assert all(map(torch.equal, again, found))


def _name(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in options.items()) or "plain"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=_name)
@pytest.mark.parametrize("name", CALLS)
def test_one_layer(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    theirs = decoder(dtype=dtype, **options)
    agrees(theirs, swapped(theirs), tokens(dtype), memory_of(dtype), CALLS[name])


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
@pytest.mark.parametrize("name", CALLS)
def test_the_batch_second(name: str, norm_first: bool) -> None:
    theirs = decoder(norm_first=norm_first, batch_first=False)
    x, memory = (each.detach().transpose(0, 1).contiguous().requires_grad_() for each in (tokens(), memory_of()))
    agrees(theirs, swapped(theirs), x, memory, CALLS[name], is_step=False)


def test_a_mask_that_is_added_goes_part_by_part() -> None:
    theirs, added = decoder(), torch.randn(LENGTH, OTHERS, generator=torch.Generator().manual_seed(9))
    agrees(theirs, swapped(theirs), tokens(), memory_of(), {"memory_mask": added}, is_step=False)


def test_masks_in_turn() -> None:
    theirs = decoder(activation="gelu")
    ours = swapped(theirs)
    for _ in range(4):
        for call in CALLS.values():
            agrees(theirs, ours, tokens(), memory_of(), call, times=1)


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_a_memory_of_nothing(norm_first: bool) -> None:
    """torch has NaN there; here the attention to it is the bias of its last layer."""
    theirs = decoder(norm_first=norm_first)
    ours, x, padded = swapped(theirs), tokens(), PADDED.clone()
    padded[1] = True
    for _ in range(3):
        found = numbers(ours, x, memory_of(), {"memory_key_padding_mask": padded}, is_step=True)
        assert all(bool(part.isfinite().all()) for part in found)
        assert bool(found[2][1].eq(0.0).all())
    bias = theirs.multihead_attn.out_proj.bias
    if norm_first:
        row = x[1:2] + theirs._sa_block(theirs.norm1(x[1:2]), None, None) + bias
        right = row + theirs._ff_block(theirs.norm3(row))
    else:
        row = theirs.norm2(theirs.norm1(x[1:2] + theirs._sa_block(x[1:2], None, None)) + bias)
        right = theirs.norm3(row + theirs._ff_block(row))
    torch.testing.assert_close(found[0][1:2], right.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("name", ["plain", "causal", "padding"])
def test_a_stack(name: str, final: bool) -> None:
    theirs = nn.TransformerDecoder(decoder(activation="gelu"), 2, norm=nn.LayerNorm(WIDTH) if final else None)
    ours = swapped(theirs)
    agrees(theirs, ours, tokens(), memory_of(), CALLS[name], is_step=not final)


def test_a_whole_transformer() -> None:
    torch.manual_seed(0)
    theirs = nn.Transformer(WIDTH, HEADS, 2, 2, 50, dropout=0.0, batch_first=True)
    agrees(theirs, swapped(theirs), tokens(), memory_of(), None, is_step=None)


@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
@pytest.mark.parametrize(
    "name", ["linear1", "norm1", "norm2", "norm3", "dropout", "dropout3", "self_attn", "multihead_attn"]
)
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_hooks_fire_once_for_each_call(norm_first: bool, name: str, kind: str) -> None:
    theirs = decoder(norm_first=norm_first)
    ours, x, memory = swapped(theirs), tokens(), memory_of()
    for _ in range(3):
        numbers(ours, x, memory, {})
    part, seen = ours.get_submodule(name), []
    handle = getattr(part, f"register_{kind}_hook")(lambda *given: seen.append(given[0]))
    for count in (1, 2, 3):
        numbers(ours, x, memory, {}, is_step=False)
        assert seen == [part] * count
    agrees(theirs, ours, x, memory, is_step=None, times=1)
    handle.remove()
    agrees(theirs, ours, x, memory)


@pytest.mark.parametrize("name", ["_ff_block", "_sa_block", "_mha_block"])
def test_a_block_of_somebodys_own(name: str) -> None:
    own = getattr(nn.TransformerDecoderLayer, name)
    kind = type(
        "Own", (nn.TransformerDecoderLayer,), {name: lambda self, *given, **more: 2.0 * own(self, *given, **more)}
    )
    theirs, plain = made(kind), decoder()
    ours, x, memory = copy.deepcopy(theirs), tokens(), memory_of()
    swap(ours)
    assert not torch.equal(theirs(x, memory), plain(x, memory))
    agrees(theirs, ours, x, memory, is_step=False)
    block = getattr((on_object := swapped(plain)), name)
    setattr(on_object, name, lambda *given, **more: 2.0 * block(*given, **more))
    agrees(theirs, on_object, x, memory, is_step=False)


@pytest.mark.parametrize("name", ["plain", "causal", "padding"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_who_watches_sees_the_same_bits(norm_first: bool, dtype: torch.dtype, dropout: float, name: str) -> None:
    theirs = decoder(dtype=dtype, norm_first=norm_first, dropout=dropout)
    ours, x, memory = swapped(theirs), tokens(dtype), memory_of(dtype)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            for _ in range(3):
                torch.manual_seed(7)
                alone = ours(x, memory, **CALLS[name])
                torch.manual_seed(7)
                with ch.observe(ours, ch.Want(entropy=True)) as seen:
                    watched = ours(x, memory, **CALLS[name])
                assert len(list(seen)) == 2
                assert torch.equal(alone, watched)
        assert is_layer(alone) == gradients


@pytest.mark.parametrize("name", CALLS)
def test_a_hook_on_the_attention_is_shown_the_callers_masks(name: str) -> None:
    theirs, call = decoder(), CALLS[name]
    ours, x, memory = swapped(theirs), tokens(), memory_of()
    seen: list[dict[str, Any]] = []
    ours.multihead_attn.register_forward_pre_hook(lambda part, given, named: seen.append(named), with_kwargs=True)
    agrees(theirs, ours, x, memory, call, is_step=False, times=1)
    assert len(seen) == 1
    for shown, given in (("attn_mask", "memory_mask"), ("key_padding_mask", "memory_key_padding_mask")):
        assert seen[0][shown] is call.get(given)


@pytest.mark.parametrize("which", ["dropout1", "dropout2", "dropout", "dropout3", "self_attn", "multihead_attn"])
def test_each_dropout_where_it_belongs(which: str) -> None:
    """Of one that drops 9 of 10 numbers, torch's average and its spread, over draws."""
    theirs = decoder()
    ours, x, memory = swapped(theirs), tokens(), memory_of()
    draws = []
    for layer, is_step in ((ours, True), (theirs, False)):
        setattr(layer.get_submodule(which), "dropout" if "attn" in which else "p", 0.9)
        torch.manual_seed(6)
        outputs = [layer(x, memory) for _ in range(400)]
        assert all(is_layer(output) == is_step for output in outputs)
        draws.append(torch.stack([output.detach() for output in outputs]))
    error = (draws[0].mean(0) - draws[1].mean(0)).abs()
    assert bool((error <= 6 * ((draws[0].var(0) + draws[1].var(0)) / 400) ** 0.5 + 1e-5).all())
    spread = [float(draw.var(0).mean()) for draw in draws]
    assert spread[0] == pytest.approx(spread[1], rel=0.1)
    assert spread[0] > 0.0


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_without_gradients(norm_first: bool, training: bool) -> None:
    theirs = decoder(norm_first=norm_first).train(training)
    ours, x, memory, wide = swapped(theirs), tokens(), memory_of(), copy.deepcopy(theirs).double()
    for call in CALLS.values():
        with torch.no_grad():
            exact = wide(x.double(), memory.double(), **in_dtype(torch.float64, call))
            textbook = theirs(x, memory, **call)
            for _ in range(4):
                found = ours(x, memory, **call)
                within_budget("output", found, textbook, exact, terms=60)
        with_gradients = ours(x, memory, **call)
        assert is_layer(with_gradients)
        assert torch.equal(with_gradients, found)


def test_unswap_restores() -> None:
    theirs = decoder()
    ours, x, memory = swapped(theirs), tokens(), memory_of()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    unswap(ours)
    assert [type(part) for part in ours.modules()] == [type(part) for part in theirs.modules()]
    assert torch.equal(ours(x, memory), theirs(x, memory))
    swap(ours)
    agrees(theirs, ours, x, memory)


def test_what_is_wrong_is_told_after_good_calls() -> None:
    ours, x, memory = swapped(decoder()), tokens(), memory_of()
    for _ in range(3):
        numbers(ours, x, memory, {"memory_key_padding_mask": PADDED})
    for bad, error in (
        (memory[..., :31], "wide"),
        (memory.double(), "dtype"),
        (memory[:1], "batch"),
        (memory[0], "axes"),
    ):
        with pytest.raises(ch.ClearheadError, match=error):
            ours(x, bad)
    with pytest.raises(ch.MaskError, match="key_padding_mask"):
        ours(x, memory, memory_key_padding_mask=PADDED[:, :3])
    with pytest.raises(ch.MaskError, match="attn_mask"):
        ours(x, memory, memory_mask=SOME[:3])
