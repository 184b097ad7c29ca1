"""A swapped decoder layer of torch is fused, matches torch under every mask, and runs op by op if hooked or
changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead as ch
from clearhead.bridges import swap, unswap
from tests.agreement import needs_native
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
    make_layer,
    name_of,
    swapped,
    tokens,
)
from tests.budget import within_budget

pytestmark = [needs_native, pytest.mark.usefixtures("_kernels"), pytest.mark.covering(1)]

OTHERS = 9
SOME = torch.rand(LENGTH, OTHERS, generator=torch.Generator().manual_seed(4)) < 0.5
SOME[:, 2] = False  # Each row may attend to a key, so that torch's output is not NaN.
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
    return make_layer(nn.TransformerDecoderLayer, **options)


def memory_of(dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(BATCH, OTHERS, WIDTH, generator=torch.Generator().manual_seed(8))
    return x.to(dtype).requires_grad_()


def output_and_gradients(
    layer: nn.Module, x: Tensor, memory: Tensor, call: dict[str, Any], *, is_fused: bool | None = None
) -> list[Tensor]:
    """Output, and gradients of ``x``, the memory and every parameter."""
    output = layer(x, memory, **in_dtype(x.dtype, call))
    assert is_fused is None or is_layer(output) == is_fused
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, [x, memory, *layer.parameters()], upstream)]


def assert_agrees(
    theirs: nn.Module,
    ours: nn.Module,
    x: Tensor,
    memory: Tensor,
    call: dict[str, Any] | None = None,
    *,
    is_fused: bool | None = True,
    times: int = 4,
) -> None:
    """Assert that ours is within the error budget of theirs, and that every call has the bits of the first."""
    call = {} if call is None else call
    results = output_and_gradients(ours, x, memory, call, is_fused=is_fused)
    textbook = output_and_gradients(theirs, x, memory, call)
    wide = [each.detach().double().requires_grad_() for each in (x, memory)]
    exact = output_and_gradients(copy.deepcopy(theirs).double(), *wide, call)
    names = ["output", "dx", "dmemory", *(name for name, _ in theirs.named_parameters())]
    for name, *three in zip(names, results, textbook, exact, strict=True):
        within_budget(name, *three, terms=BATCH * OTHERS + 50, dtype=x.dtype)
    for _ in range(1, times):
        second = output_and_gradients(ours, x, memory, call, is_fused=is_fused)
        assert all(map(torch.equal, second, results))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
@pytest.mark.parametrize("name", CALLS)
def test_one_layer_matches_torch(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    theirs = decoder(dtype=dtype, **options)
    assert_agrees(theirs, swapped(theirs), tokens(dtype), memory_of(dtype), CALLS[name])


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("name", CALLS)
def test_batch_first_false_matches_torch(name: str, norm_first: bool) -> None:
    theirs = decoder(norm_first=norm_first, batch_first=False)
    x, memory = (each.detach().transpose(0, 1).contiguous().requires_grad_() for each in (tokens(), memory_of()))
    assert_agrees(theirs, swapped(theirs), x, memory, CALLS[name], is_fused=False)


def test_an_additive_mask_runs_op_by_op() -> None:
    theirs, added = decoder(), torch.randn(LENGTH, OTHERS, generator=torch.Generator().manual_seed(9))
    assert_agrees(theirs, swapped(theirs), tokens(), memory_of(), {"memory_mask": added}, is_fused=False)


def test_alternating_masks_match_torch() -> None:
    theirs = decoder(activation="gelu")
    ours = swapped(theirs)
    for _ in range(4):
        for call in CALLS.values():
            assert_agrees(theirs, ours, tokens(), memory_of(), call, times=1)


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_a_fully_padded_memory_gives_the_output_bias(norm_first: bool) -> None:
    """torch gives NaN; ours gives the bias of the output projection."""
    theirs = decoder(norm_first=norm_first)
    ours, x, padded = swapped(theirs), tokens(), PADDED.clone()
    padded[1] = True
    for _ in range(3):
        results = output_and_gradients(ours, x, memory_of(), {"memory_key_padding_mask": padded}, is_fused=True)
        assert all(bool(part.isfinite().all()) for part in results)
        assert bool(results[2][1].eq(0.0).all())
    bias = theirs.multihead_attn.out_proj.bias
    if norm_first:
        row = x[1:2] + theirs._sa_block(theirs.norm1(x[1:2]), None, None) + bias
        right = row + theirs._ff_block(theirs.norm3(row))
    else:
        row = theirs.norm2(theirs.norm1(x[1:2] + theirs._sa_block(x[1:2], None, None)) + bias)
        right = theirs.norm3(row + theirs._ff_block(row))
    torch.testing.assert_close(results[0][1:2], right.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("name", ["plain", "causal", "padding"])
def test_a_stack_matches_torch(name: str, final: bool) -> None:
    theirs = nn.TransformerDecoder(decoder(activation="gelu"), 2, norm=nn.LayerNorm(WIDTH) if final else None)
    ours = swapped(theirs)
    assert_agrees(theirs, ours, tokens(), memory_of(), CALLS[name], is_fused=not final)


def test_a_whole_transformer_matches_torch() -> None:
    torch.manual_seed(0)
    theirs = nn.Transformer(WIDTH, HEADS, 2, 2, 50, dropout=0.0, batch_first=True)
    assert_agrees(theirs, swapped(theirs), tokens(), memory_of(), None, is_fused=None)


@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
@pytest.mark.parametrize(
    "name", ["linear1", "norm1", "norm2", "norm3", "dropout", "dropout3", "self_attn", "multihead_attn"]
)
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_hooks_fire_once_for_each_call(norm_first: bool, name: str, kind: str) -> None:
    theirs = decoder(norm_first=norm_first)
    ours, x, memory = swapped(theirs), tokens(), memory_of()
    for _ in range(3):
        output_and_gradients(ours, x, memory, {})
    part, fired = ours.get_submodule(name), []
    handle = getattr(part, f"register_{kind}_hook")(lambda *given: fired.append(given[0]))
    for count in (1, 2, 3):
        output_and_gradients(ours, x, memory, {}, is_fused=False)
        assert fired == [part] * count
    assert_agrees(theirs, ours, x, memory, is_fused=None, times=1)
    handle.remove()
    assert_agrees(theirs, ours, x, memory)


@pytest.mark.parametrize("name", ["_ff_block", "_sa_block", "_mha_block"])
def test_an_overridden_block_is_called(name: str) -> None:
    original = getattr(nn.TransformerDecoderLayer, name)
    kind = type(
        "Doubled",
        (nn.TransformerDecoderLayer,),
        {name: lambda self, *given, **more: 2.0 * original(self, *given, **more)},
    )
    theirs, plain = make_layer(kind), decoder()
    ours, x, memory = copy.deepcopy(theirs), tokens(), memory_of()
    swap(ours)
    assert not torch.equal(theirs(x, memory), plain(x, memory))
    assert_agrees(theirs, ours, x, memory, is_fused=False)
    block = getattr((on_object := swapped(plain)), name)
    setattr(on_object, name, lambda *given, **more: 2.0 * block(*given, **more))
    assert_agrees(theirs, on_object, x, memory, is_fused=False)


@pytest.mark.parametrize("name", ["plain", "causal", "padding"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_observation_gives_the_same_bits(norm_first: bool, dtype: torch.dtype, dropout: float, name: str) -> None:
    theirs = decoder(dtype=dtype, norm_first=norm_first, dropout=dropout)
    ours, x, memory = swapped(theirs), tokens(dtype), memory_of(dtype)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            for _ in range(3):
                torch.manual_seed(7)
                unobserved = ours(x, memory, **CALLS[name])
                torch.manual_seed(7)
                with ch.observe(ours, ch.Want(entropy=True)) as observations:
                    observed = ours(x, memory, **CALLS[name])
                assert len(list(observations)) == 2
                assert torch.equal(unobserved, observed)
        assert is_layer(unobserved) == gradients


@pytest.mark.parametrize("name", CALLS)
def test_a_hook_on_the_attention_gets_the_callers_masks(name: str) -> None:
    theirs, call = decoder(), CALLS[name]
    ours, x, memory = swapped(theirs), tokens(), memory_of()
    calls: list[dict[str, Any]] = []
    ours.multihead_attn.register_forward_pre_hook(lambda part, given, named: calls.append(named), with_kwargs=True)
    assert_agrees(theirs, ours, x, memory, call, is_fused=False, times=1)
    assert len(calls) == 1
    for shown, given in (("attn_mask", "memory_mask"), ("key_padding_mask", "memory_key_padding_mask")):
        assert calls[0][shown] is call.get(given)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["dropout1", "dropout2", "dropout", "dropout3", "self_attn", "multihead_attn"])
def test_each_dropout_matches_torchs_mean_and_variance(which: str) -> None:
    """With p = 0.9, mean and variance over draws match torch's."""
    theirs = decoder()
    ours, x, memory = swapped(theirs), tokens(), memory_of()
    draws = []
    for layer, is_fused in ((ours, True), (theirs, False)):
        setattr(layer.get_submodule(which), "dropout" if "attn" in which else "p", 0.9)
        torch.manual_seed(6)
        outputs = [layer(x, memory) for _ in range(400)]
        assert all(is_layer(output) == is_fused for output in outputs)
        draws.append(torch.stack([output.detach() for output in outputs]))
    error = (draws[0].mean(0) - draws[1].mean(0)).abs()
    assert bool((error <= 6 * ((draws[0].var(0) + draws[1].var(0)) / 400) ** 0.5 + 1e-5).all())
    spread = [float(draw.var(0).mean()) for draw in draws]
    assert spread[0] == pytest.approx(spread[1], rel=0.1)
    assert spread[0] > 0.0


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_without_gradients_matches_torch(norm_first: bool, training: bool) -> None:
    theirs = decoder(norm_first=norm_first).train(training)
    ours, x, memory, wide = swapped(theirs), tokens(), memory_of(), copy.deepcopy(theirs).double()
    for call in CALLS.values():
        with torch.no_grad():
            exact = wide(x.double(), memory.double(), **in_dtype(torch.float64, call))
            textbook = theirs(x, memory, **call)
            for _ in range(4):
                output = ours(x, memory, **call)
                within_budget("output", output, textbook, exact, terms=60)
        with_gradients = ours(x, memory, **call)
        assert is_layer(with_gradients)
        assert torch.equal(with_gradients, output)


def test_unswap_restores_classes_and_bits() -> None:
    theirs = decoder()
    ours, x, memory = swapped(theirs), tokens(), memory_of()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    unswap(ours)
    assert [type(part) for part in ours.modules()] == [type(part) for part in theirs.modules()]
    assert torch.equal(ours(x, memory), theirs(x, memory))
    swap(ours)
    assert_agrees(theirs, ours, x, memory)


def test_invalid_arguments_raise_after_valid_calls() -> None:
    ours, x, memory = swapped(decoder()), tokens(), memory_of()
    for _ in range(3):
        output_and_gradients(ours, x, memory, {"memory_key_padding_mask": PADDED})
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
