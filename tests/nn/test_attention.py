"""MultiHeadAttention against torch's module with the same weights, and with its own options varied."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.cache import KVCache
from clearhead.nn import DecoderCache, MultiHeadAttention
from clearhead.positions import Rotary

EXACT = {"atol": 1e-11, "rtol": 1e-11}


def _input(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _torch_module(**options: object) -> nn.MultiheadAttention:
    torch.manual_seed(1)
    module = nn.MultiheadAttention(12, 3, batch_first=True, **options).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
    return module


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 7, "vdim": 5}, {"kdim": 7, "bias": False}], ids=str)
def test_from_torch_matches_forward_and_backward(options: dict[str, object]) -> None:
    theirs = _torch_module(**options)
    ours = MultiHeadAttention.from_torch(theirs)
    query, key, value = _input(2, 5, 12), _input(2, 6, theirs.kdim, seed=1), _input(2, 6, theirs.vdim, seed=2)
    forbidden = torch.rand(5, 6, generator=torch.Generator().manual_seed(3)) > 0.6
    forbidden[:, 0] = False
    inputs = [[x.clone().requires_grad_() for x in (query, key, value)] for _ in range(2)]
    expected, _ = theirs(*inputs[0], attn_mask=forbidden, need_weights=False)
    output = ours(*inputs[1], mask=ch.Dense(~forbidden))
    torch.testing.assert_close(output, expected, **EXACT)
    direction = _input(2, 5, 12, seed=4)
    expected.backward(direction)
    output.backward(direction)
    for mine, other in zip(inputs[1], inputs[0], strict=True):
        torch.testing.assert_close(mine.grad, other.grad, **EXACT)
    names = ("query", "key", "value")
    if theirs.in_proj_weight is not None:
        grads = theirs.in_proj_weight.grad.chunk(3)
    else:
        grads = [getattr(theirs, f"{name[0]}_proj_weight").grad for name in names]
    for name, grad in zip(names, grads, strict=True):
        torch.testing.assert_close(getattr(ours, f"{name}_projection").weight.grad, grad, **EXACT)
    torch.testing.assert_close(ours.output_projection.weight.grad, theirs.out_proj.weight.grad, **EXACT)


def test_a_fully_padded_row_is_zero_where_torch_gives_nan() -> None:
    theirs = _torch_module().eval()
    ours = MultiHeadAttention.from_torch(theirs)
    x = _input(2, 4, 12).requires_grad_()
    lengths = torch.tensor([4, 0])
    padding = torch.arange(4) >= lengths[:, None]
    expected, _ = theirs(x, x, x, key_padding_mask=padding)
    assert torch.isnan(expected[1]).all()
    heads = MultiHeadAttention.from_torch(theirs)
    heads.output_projection = None
    got = ours(x, mask=ch.Padding(lengths))
    torch.testing.assert_close(got[0], expected[0], **EXACT)
    assert (heads(x, mask=ch.Padding(lengths))[1] == 0).all()
    torch.testing.assert_close(got[1], ours.output_projection.bias.expand(4, -1), **EXACT)
    got.sum().backward()
    assert torch.isfinite(x.grad).all()


def test_from_torch_keeps_mode_dropout_and_dtype() -> None:
    theirs = nn.MultiheadAttention(8, 2, dropout=0.25).eval().bfloat16()
    ours = MultiHeadAttention.from_torch(theirs)
    assert (ours.dropout, ours.training, ours.query_projection.weight.dtype) == (0.25, False, torch.bfloat16)


@pytest.mark.parametrize("extra", ["add_bias_kv", "add_zero_attn"])
def test_from_torch_rejects_extra_keys(extra: str) -> None:
    with pytest.raises(ch.UnsupportedError, match=rf"from_torch: module must have no extra key; got {extra}"):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(8, 2, **{extra: True}))  # type: ignore[arg-type]


def test_a_sink_of_0_matches_add_zero_attn() -> None:
    """The error for add_zero_attn recommends Sink(0.0), which is equivalent."""
    theirs = _torch_module()
    ours = MultiHeadAttention.from_torch(theirs)
    theirs.add_zero_attn = True
    with_sink = MultiHeadAttention(12, 3, scores=[ch.Sink(0.0)]).double()
    with_sink.load_state_dict(ours.state_dict(), strict=False)
    x = _input(1, 4, 12)
    torch.testing.assert_close(with_sink(x), theirs(x, x, x)[0], **EXACT)


def test_from_heads_concatenates_the_heads() -> None:
    torch.manual_seed(0)
    heads = [tuple(nn.Linear(6, 4, dtype=torch.float64) for _ in range(3)) for _ in range(3)]
    module = MultiHeadAttention.from_heads(heads)  # type: ignore[arg-type]
    x = _input(2, 5, 6)
    expected = torch.cat([ch.attention(q(x), k(x), v(x)) for q, k, v in heads], dim=-1)
    torch.testing.assert_close(module(x), expected, **EXACT)
    mixer = nn.Linear(12, 6, dtype=torch.float64)
    pairs = [tuple((part.weight, part.bias) for part in head) for head in heads]
    mixed = MultiHeadAttention.from_heads(pairs, output=mixer)  # type: ignore[arg-type]
    torch.testing.assert_close(mixed(x), mixer(expected), **EXACT)


def test_from_heads_copies_the_weights() -> None:
    weight = torch.eye(4)
    module = MultiHeadAttention.from_heads([(weight, weight, weight)])
    weight.zero_()
    assert module.query_projection.weight.abs().sum() == 4


def test_creation_order_is_query_key_value_output() -> None:
    """Tutorials seed torch and then create W_q, W_k, W_v in this order."""
    torch.manual_seed(42)
    expected = [nn.Linear(4, 4).weight for _ in range(4)]
    torch.manual_seed(42)
    module = MultiHeadAttention(4, 2)
    names = [name for name, _ in module.named_parameters() if name.endswith("weight")]
    assert names == [f"{role}_projection.weight" for role in ("query", "key", "value", "output")]
    for weight, other in zip((p for n, p in module.named_parameters() if n in names), expected, strict=True):
        assert torch.equal(weight, other)


@pytest.mark.parametrize("mask", [None, ch.Causal(), ch.Window(2)], ids=repr)
def test_unbatched_equals_batched(mask: ch.Mask | None) -> None:
    module = MultiHeadAttention(8, 2, rotary=True, scores=[ch.Alibi(2)]).double()
    x = _input(5, 8)
    torch.testing.assert_close(module(x, mask=mask), module(x[None], mask=mask)[0], **EXACT)
    memory = _input(5, 8, seed=1)
    torch.testing.assert_close(module(x, memory, mask=mask), module(x[None], memory[None], mask=mask)[0], **EXACT)


def test_grouped_heads_equal_repeated_heads() -> None:
    torch.manual_seed(0)
    grouped = MultiHeadAttention(12, 6, num_kv_heads=2).double()
    full = MultiHeadAttention(12, 6).double()
    state = grouped.state_dict()
    for role in ("key", "value"):
        for kind in ("weight", "bias"):
            heads = state[f"{role}_projection.{kind}"].unflatten(0, (2, 2))
            state[f"{role}_projection.{kind}"] = heads.repeat_interleave(3, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    x = _input(2, 7, 12)
    torch.testing.assert_close(grouped(x, mask=ch.Causal()), full(x, mask=ch.Causal()), **EXACT)


@pytest.mark.parametrize(
    "options", [{}, {"rotary": True}, {"scores": (ch.Alibi(2),)}, {"num_kv_heads": 1, "rotary": 500.0}], ids=str
)
@pytest.mark.parametrize("grad", [False, True])
def test_step_by_step_equals_the_full_pass(options: dict[str, object], grad: bool) -> None:
    torch.manual_seed(0)
    module = MultiHeadAttention(8, 2, **options).double()  # type: ignore[arg-type]
    x = _input(2, 23, 8)
    for mask in (ch.Causal(), ch.Causal() & ch.Window(3)):
        cache = KVCache()
        with torch.set_grad_enabled(grad):
            steps = [module(part, mask=mask, cache=cache) for part in x.split([3, 1, 1, 12, 6], dim=1)]
            torch.testing.assert_close(torch.cat(steps, dim=1), module(x, mask=mask), **EXACT)
        assert cache.length == 23


def test_gradient_flows_through_a_cache() -> None:
    module = MultiHeadAttention(8, 2).double()
    x = _input(1, 6, 8)
    module(x, mask=ch.Causal()).sum().backward()
    expected = module.value_projection.weight.grad.clone()
    module.zero_grad()
    cache = KVCache()
    sum(module(part, mask=ch.Causal(), cache=cache).sum() for part in x.split(2, dim=1)).backward()
    torch.testing.assert_close(module.value_projection.weight.grad, expected, **EXACT)


def test_a_cached_memory_is_projected_once() -> None:
    module = MultiHeadAttention(8, 2, key_dim=5, value_dim=5).double()
    x, memory, cache = _input(2, 3, 8), _input(2, 4, 5, seed=1), KVCache()
    expected = module(x, memory)
    calls: list[int] = []
    module.key_projection.register_forward_hook(lambda *_: calls.append(1))
    steps = torch.cat([module(x[:, t : t + 1], memory, cache=cache) for t in range(3)], dim=1)
    torch.testing.assert_close(steps, expected, **EXACT)
    assert len(calls) == 1
    with pytest.raises(ch.ShapeError, match="be the memory that filled the cache, 2 x 4 tokens"):
        module(x, memory[:, :3], cache=cache)


@pytest.mark.parametrize("grad", [True, False])
def test_a_failing_call_leaves_its_cache_unmodified(grad: bool) -> None:
    module = MultiHeadAttention(8, 2).double()
    x, cache, bad = _input(2, 5, 8), KVCache(), ch.Dense(torch.ones(2, 2, dtype=torch.bool))
    with torch.set_grad_enabled(grad):
        whole = module(x, mask=ch.Causal())
        with pytest.raises(ch.MaskError):
            module(x[:, :3], mask=bad, cache=cache)
        assert (cache.length, cache.key) == (0, None)
        for t in range(5):
            with pytest.raises(ch.MaskError):
                module(x[:, t : t + 1], mask=bad, cache=cache)
            got = module(x[:, t : t + 1], mask=ch.Causal(), cache=cache)
            torch.testing.assert_close(got, whole[:, t : t + 1], **EXACT)
        memory_cache = KVCache()
        with pytest.raises(ch.MaskError):
            module(x, x[:, :3].clone(), mask=ch.Causal(), cache=memory_cache)
        assert memory_cache.length == 0


@pytest.mark.parametrize("cache", [{}, DecoderCache([KVCache()])], ids=["dict", "of a decoder"])
def test_a_cache_of_another_class_raises(cache: object) -> None:
    text = rf"^MultiHeadAttention: cache must be a KVCache; got {type(cache).__name__}\."
    with pytest.raises(ch.UnsupportedError, match=text):
        MultiHeadAttention(8, 2)(torch.zeros(1, 2, 8), cache=cache)  # type: ignore[arg-type]


def test_meta_device_gives_shapes() -> None:
    module = MultiHeadAttention(8, 2).to("meta")
    x = torch.zeros(2, 5, 8, device="meta")
    assert module(x).shape == module(x, mask=ch.Causal()).shape == x.shape
    with pytest.raises(ch.UnsupportedError, match="must have the module's dtype"):
        module(x.double())


def test_the_same_tensor_three_times_is_self_attention() -> None:
    module = MultiHeadAttention(8, 2).double()
    x, cache = _input(1, 2, 8), KVCache()
    module(x, x, x, mask=ch.Causal(), cache=cache)
    assert cache.length == 2
    torch.testing.assert_close(module(x, x, x), module(x), **EXACT)


def test_rotary_depends_on_relative_positions_only() -> None:
    module = MultiHeadAttention(8, 2, rotary=Rotary()).double()
    x = _input(1, 6, 8)
    shifted = module.project(x, first=1000)
    plain = module.project(x)
    torch.testing.assert_close(ch.attention(*shifted, scale=None), ch.attention(*plain), atol=1e-9, rtol=1e-9)
    assert not torch.allclose(module(x), module(x.flip(1)).flip(1))


def test_dropout_is_active_only_in_training_mode_and_uses_torchs_seed() -> None:
    module = MultiHeadAttention(8, 2, dropout=0.5)
    x = torch.randn(2, 16, 8)
    torch.manual_seed(3)
    first = module(x)
    torch.manual_seed(3)
    assert torch.equal(module(x), first)
    assert not torch.equal(module(x), first)
    module.eval()
    assert torch.equal(module(x), module(x))


def test_attention_over_project_matches_forward() -> None:
    module = MultiHeadAttention(8, 2, rotary=True, scores=[ch.Alibi(2)], output_projection=False).double()
    x = _input(2, 5, 8)
    heads = ch.attention(*module.project(x), scores=module.scores.rules(), mask=ch.Causal())
    torch.testing.assert_close(heads.transpose(1, 2).flatten(2), module(x, mask=ch.Causal()), **EXACT)


def test_state_dict_and_deepcopy_give_the_same_bits() -> None:
    options = {"num_kv_heads": 1, "scores": [ch.RelativeBias(nn.Parameter(torch.randn(2, 5)))]}
    module, other = (MultiHeadAttention(8, 2, **options) for _ in range(2))  # type: ignore[arg-type]
    other.load_state_dict(module.state_dict())
    x = torch.randn(1, 4, 8)
    assert torch.equal(module(x), other(x))
    assert torch.equal(module(x), copy.deepcopy(module)(x))


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_a_named_backend_is_used(backend: str) -> None:
    module = MultiHeadAttention(8, 2, backend=backend).double()
    plain = MultiHeadAttention(8, 2).double()
    plain.load_state_dict(module.state_dict())
    x = _input(1, 5, 8)
    torch.testing.assert_close(module(x), plain(x), **EXACT)
    with pytest.raises(ch.UnsupportedError, match="backend must be one of"):
        MultiHeadAttention(8, 2, backend="fast")(torch.zeros(1, 2, 8))


def test_nan_in_padding_does_not_reach_real_tokens() -> None:
    module = MultiHeadAttention(8, 2)
    x = torch.randn(2, 5, 8)
    spoiled = x.clone()
    spoiled[1, 3:] = torch.nan
    mask = ch.Padding([5, 3])
    torch.testing.assert_close(module(spoiled, mask=mask)[1, :3], module(x, mask=mask)[1, :3], atol=1e-6, rtol=1e-5)


def test_empty_inputs_give_empty_or_bias_outputs() -> None:
    module = MultiHeadAttention(8, 2)
    assert module(torch.zeros(2, 0, 8)).shape == (2, 0, 8)
    assert module(torch.zeros(0, 3, 8)).shape == (0, 3, 8)
    output = module(torch.zeros(2, 3, 8), torch.zeros(2, 0, 8))
    torch.testing.assert_close(output, module.output_projection.bias.expand(2, 3, 8))


def test_repr_lists_the_options() -> None:
    text = repr(MultiHeadAttention(8, 4, num_kv_heads=2, dropout=0.1, rotary=True, scores=[ch.SoftCap(30.0)]))
    assert "8, num_heads=4, num_kv_heads=2, head_dim=2, dropout=0.1, rotary=Rotary(base=10000)" in text
    assert "SoftCap(cap=30.0)" in text


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: MultiHeadAttention(10, 3), r"num_heads must divide embed_dim 10; got 3\."),
        (lambda: MultiHeadAttention(0, 1), r"embed_dim must be a whole number of at least 1; got 0\."),
        (lambda: MultiHeadAttention(8, 4, num_kv_heads=3), r"num_kv_heads must divide num_heads 4; got 3\."),
        (lambda: MultiHeadAttention(8, 2, dropout=1.0), r"dropout must be a probability"),
        (lambda: MultiHeadAttention(6, 2, rotary=True), r"head_dim must be even with rotary; got 3\."),
        (lambda: MultiHeadAttention(8, 2, rotary=0.5), r"base must be a number above 1; got 0\.5\."),
        (lambda: MultiHeadAttention(8, 2, scores=[len]), r"scores must hold score rules"),
        (lambda: MultiHeadAttention.from_heads([]), r"from_heads: heads must hold one"),
        (lambda: MultiHeadAttention.from_heads(5), r"from_heads: heads must hold one .*; got int\."),
        (lambda: MultiHeadAttention.from_heads([5]), r"from_heads: heads must hold one .*; got list\."),
        (lambda: MultiHeadAttention.from_torch(nn.Linear(2, 2)), r"module must be a torch\.nn\.MultiheadAttention"),
    ],
)
def test_invalid_arguments_raise_one_line(build: object, text: str) -> None:
    with pytest.raises(ch.ClearheadError, match=text) as caught:
        build()  # type: ignore[operator]
    assert "\n" not in str(caught.value)


X = torch.zeros(2, 5, 8)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((X[..., :7],), ch.ShapeError, r"query must have axes \[batch, len, 8\] or \[len, 8\]; got shape \(2, 5, 7\)"),
        ((torch.zeros(1, 2, 5, 8),), ch.ShapeError, r"query must have axes \[batch, len, 8\]"),
        (([1, 2],), ch.ShapeError, r"query must have axes .*; got list\."),
        ((X, torch.zeros(2, 5, 9)), ch.ShapeError, r"key must have axes \[batch, len, 8\]"),
        ((X, torch.zeros(3, 5, 8)), ch.ShapeError, r"key must have query's batch, as in \(2, 5, 8\)"),
        ((X, X, torch.zeros(2, 4, 8)), ch.ShapeError, r"value must have key's length 5"),
        ((X, None, torch.zeros(2, 5, 8)), ch.ShapeError, r"key must be given with value"),
        ((X.double(),), ch.UnsupportedError, r"query must have the module's dtype torch\.float32; got torch\.float64"),
        ((X.long(),), ch.UnsupportedError, r"query must have the module's dtype"),
    ],
)
def test_invalid_input_raises_one_line(arguments: tuple[object, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match="^MultiHeadAttention: " + text) as caught:
        MultiHeadAttention(8, 2)(*arguments)
    assert "\n" not in str(caught.value)


def test_ambiguous_positions_raise() -> None:
    x, memory = torch.zeros(1, 2, 8), torch.zeros(1, 5, 8)
    with pytest.raises(ch.MaskError, match="query_offset must be given"):
        MultiHeadAttention(8, 2)(x, memory, mask=ch.Causal())
    with pytest.raises(ch.MaskError, match=r"query_offset must be given .* under rotary"):
        MultiHeadAttention(8, 2, rotary=True)(x, memory)
    MultiHeadAttention(8, 2, rotary=True)(x, memory, mask=ch.Causal(), query_offset=3)
    with pytest.raises(ch.MaskError, match="query_offset must not be given with a cache; got 3"):
        MultiHeadAttention(8, 2)(x, cache=KVCache(), query_offset=3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mask", [None, ch.Causal()], ids=str)
def test_a_jit_trace_matches_with_and_without_gradients(mask: ch.Mask | None) -> None:
    """torch.jit.trace checks a trace by tracing again without gradients."""
    module, x = ch.nn.MultiHeadAttention(32, 4).eval(), torch.randn(2, 8, 32)

    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            actual: torch.Tensor = self.attention(x, mask=mask)
            return actual

    traced: Any = torch.jit.trace(Masked(), x)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(traced(x), module(x, mask=mask))
