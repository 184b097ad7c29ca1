"""Blocks and stacks against torch's, packed against padded, cached against the full pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.cache import KVCache
from clearhead.nn import Decoder, DecoderBlock, Encoder, EncoderBlock, FeedForward
from clearhead.positions import Rotary

pytestmark = pytest.mark.covering(1)

EXACT = {"atol": 1e-10, "rtol": 1e-10}


def _input(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("bias", [True, False])
def test_encoder_block_matches_torchs_layer(norm_first: bool, activation: str, bias: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(
        12, 3, 20, dropout=0.0, activation=activation, batch_first=True, norm_first=norm_first, bias=bias,
        layer_norm_eps=1e-3, dtype=torch.float64,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    ours = EncoderBlock.from_torch(theirs)
    lengths = torch.tensor([5, 3])
    inputs = [_input(2, 5, 12).requires_grad_() for _ in range(2)]
    expected = theirs(inputs[0], src_key_padding_mask=torch.arange(5) >= lengths[:, None])
    got = ours(inputs[1], mask=ch.Padding(lengths))
    torch.testing.assert_close(got, expected, **EXACT)
    direction = _input(2, 5, 12, seed=1)
    expected.backward(direction)
    got.backward(direction)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, **EXACT)
    torch.testing.assert_close(ours.feedforward.expand.weight.grad, theirs.linear1.weight.grad, **EXACT)
    torch.testing.assert_close(ours.attention_norm.weight.grad, theirs.norm1.weight.grad, **EXACT)


def test_from_torch_keeps_dropout_and_mode() -> None:
    theirs = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True).eval()
    ours = EncoderBlock.from_torch(theirs)
    assert not any(part.training for part in ours.modules())
    assert (ours.residual_dropout.p, ours.feedforward.dropout.p, ours.attention.dropout) == (0.3, 0.3, 0.3)
    odd = nn.TransformerEncoderLayer(8, 2, activation=torch.tanh)
    with pytest.raises(ch.UnsupportedError, match="layer must use GELU or ReLU; got tanh"):
        EncoderBlock.from_torch(odd)


class _IdentityNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("place", "part", "text"),
    [
        ("norm1", nn.RMSNorm(8), r"have a plain LayerNorm as its norm1; got RMSNorm"),
        ("norm2", nn.Identity(), r"have a plain LayerNorm as its norm2; got Identity\(\)"),
        ("norm2", _IdentityNorm(8), r"have a plain LayerNorm as its norm2; got _IdentityNorm"),
        ("norm2", nn.LayerNorm(8, bias=False), r"have a plain LayerNorm as its norm2; got LayerNorm"),
        ("linear1", nn.Sequential(nn.Linear(8, 16)), r"have a plain Linear as its linear1; got Sequential"),
        ("dropout", nn.Identity(), r"have a plain Dropout as its dropout; got Identity\(\)"),
        ("activation", type("Odd", (nn.ReLU,), {})(), r"use GELU or ReLU; got Odd\(\)"),
        ("activation", nn.GELU(approximate="tanh"), r"use GELU or ReLU; got GELU\(approximate='tanh'\)"),
    ],
)
def test_from_torch_rejects_replaced_parts(place: str, part: nn.Module, text: str) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    setattr(layer, place, part)
    with pytest.raises(ch.UnsupportedError, match=r"^EncoderBlock.from_torch: layer must " + text):
        EncoderBlock.from_torch(layer)


@pytest.mark.parametrize("norm", [nn.LayerNorm(8, elementwise_affine=False), nn.Identity()], ids=["plain", "none"])
def test_norms_without_weights_work(norm: nn.Module) -> None:
    stack = Encoder(8, 2, num_layers=2, dropout=0.0).double()
    for block in stack.blocks:
        block.attention_norm = norm
    x = _input(2, 5, 8)
    wanted = x
    for block in stack.blocks:
        wanted = wanted + block.attention(norm(wanted))
        wanted = wanted + block.feedforward(block.feedforward_norm(wanted))
    torch.testing.assert_close(stack(x), stack.norm(wanted), **EXACT)


def test_from_torch_recognises_every_form_of_relu() -> None:
    for activation in (torch.relu, nn.functional.relu, nn.ReLU(), "relu"):
        block = EncoderBlock.from_torch(nn.TransformerEncoderLayer(8, 2, 16, activation=activation))
        assert isinstance(block.feedforward.activation, nn.ReLU)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_decoder_block_matches_torchs_layer(bias: bool, norm_first: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.TransformerDecoderLayer(
        12, 3, 20, dropout=0.0, activation="gelu", batch_first=True, norm_first=norm_first, bias=bias,
        layer_norm_eps=1e-3, dtype=torch.float64,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    ours = DecoderBlock.from_torch(theirs)
    pairs = [[_input(2, 5, 12).requires_grad_(), _input(2, 7, 12, seed=1).requires_grad_()] for _ in range(2)]
    forbidden = ~ch.Causal().dense(5, 5)
    padded = torch.arange(7) >= torch.tensor([[7], [4]])
    expected = theirs(*pairs[0], tgt_mask=forbidden, memory_key_padding_mask=padded)
    got = ours(pairs[1][0], memory=pairs[1][1], memory_mask=ch.Padding([7, 4]))
    torch.testing.assert_close(got, expected, **EXACT)
    direction = _input(2, 5, 12, seed=2)
    expected.backward(direction)
    got.backward(direction)
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(other.grad, one.grad, **EXACT)
    torch.testing.assert_close(ours.cross_norm.weight.grad, theirs.norm2.weight.grad, **EXACT)


def test_decoder_block_from_torch_keeps_dropout_and_mode() -> None:
    ours = DecoderBlock.from_torch(nn.TransformerDecoderLayer(8, 2, 16, dropout=0.3).eval())
    assert not any(part.training for part in ours.modules())
    assert ours.cross_attention is not None
    assert (ours.residual_dropout.p, ours.feedforward.dropout.p, ours.cross_attention.dropout) == (0.3, 0.3, 0.3)
    with pytest.raises(ch.UnsupportedError, match=r"^DecoderBlock.from_torch: layer must be a torch.nn.TransformerDec"):
        DecoderBlock.from_torch(nn.TransformerEncoderLayer(8, 2))  # type: ignore[arg-type]
    odd = nn.TransformerDecoderLayer(8, 2)
    odd.norm3 = nn.RMSNorm(8)  # type: ignore[assignment]
    with pytest.raises(ch.UnsupportedError, match="layer must have a plain LayerNorm as its norm3; got RMSNorm"):
        DecoderBlock.from_torch(odd)


def test_decoder_block_is_causal_and_decoding_matches_the_full_pass() -> None:
    block = DecoderBlock(8, 2, rotary=True, memory_dim=6).double().eval()
    x, memory = _input(2, 7, 8), _input(2, 4, 6, seed=1)
    whole = block(x, memory=memory)
    changed = x.clone()
    changed[:, 5:] += 1.0
    torch.testing.assert_close(block(changed, memory=memory)[:, :5], whole[:, :5], **EXACT)
    cache, memory_cache = KVCache(), KVCache()
    steps = [block(x[:, t : t + 1], memory=memory, cache=cache, memory_cache=memory_cache) for t in range(7)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, **EXACT)
    assert (cache.length, memory_cache.length) == (7, 4)


def test_memory_must_match_cross_attention() -> None:
    x = torch.zeros(1, 2, 8)
    with pytest.raises(ch.ShapeError, match="DecoderBlock: memory must be given exactly where"):
        DecoderBlock(8, 2)(x, memory=x)
    with pytest.raises(ch.ShapeError, match=r"cross-attention; got none\."):
        DecoderBlock(8, 2, cross_attention=True)(x)


PACKABLE = [
    {},
    {"scores": (ch.Alibi(2), ch.SoftCap(4.0))},
    {"rotary": True},
    {"num_kv_heads": 1, "norm_first": False},
    {"scores": (ch.RelativeBias(torch.tensor([[0.5, 0.0, -1.0], [1.0, 2.0, 3.0]])), ch.Sink(torch.tensor([0.1, 0.2])))},
]


@pytest.mark.parametrize("options", PACKABLE, ids=str)
@pytest.mark.parametrize("mask", [None, ch.Window(2, 1), ch.Causal()], ids=repr)
@pytest.mark.parametrize("kind", [Encoder, Decoder])
def test_packed_equals_each_sequence_alone(kind: type, options: dict[str, object], mask: ch.Mask | None) -> None:
    torch.manual_seed(0)
    model = kind(8, 2, 2, **options).double()
    x = _input(4, 9, 8)
    lengths = [9, 1, 0, 4]
    layout = model.layout("test", x, lengths=lengths, mask=mask)
    assert layout.packed
    whole = model(x, lengths=lengths, mask=mask)
    assert whole.shape == x.shape
    for row, length in enumerate(lengths):
        assert (whole[row, length:] == 0).all()
        if length:
            alone = model(x[row : row + 1, :length], mask=mask)[0]
            torch.testing.assert_close(whole[row, :length], alone, **EXACT)


@pytest.mark.parametrize(
    "mask", [ch.Prefix(2), ch.Dense(torch.rand(9, 9) > 0.3), ch.Global(1) | ch.Window(1)], ids=repr
)
def test_masks_that_read_absolute_positions_stay_padded(mask: ch.Mask) -> None:
    torch.manual_seed(0)
    model = Encoder(8, 2, 2).double()
    x = _input(3, 9, 8)
    lengths = [9, 0, 4]
    assert not model.layout("test", x, lengths=lengths, mask=mask).packed
    whole = model(x, lengths=lengths, mask=mask)
    assert torch.isfinite(whole).all()
    assert (whole[2, 4:] == 0).all()
    small = ch.Dense(mask.allowed[..., :4, :4]) if isinstance(mask, ch.Dense) else mask
    torch.testing.assert_close(whole[2, :4], model(x[2:, :4], mask=small)[0], **EXACT)


def test_packed_and_padded_give_the_same_gradients() -> None:
    model = Encoder(8, 2, 2, scores=ch.Alibi(2)).double()
    lengths, everything = [5, 0, 3], ch.Dense(torch.ones(1, 1, dtype=torch.bool))
    grads = []
    for mask in (None, everything):
        x = _input(3, 5, 8).requires_grad_()
        model.zero_grad()
        assert model.layout("test", x, lengths=lengths, mask=mask).packed == (mask is None)
        model(x, lengths=lengths, mask=mask).square().sum().backward()
        grads.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    for packed, padded in zip(*grads, strict=True):
        torch.testing.assert_close(packed, padded, **EXACT)


@pytest.mark.parametrize("mask", [None, ch.Prefix(2)], ids=repr)
@pytest.mark.parametrize("kind", [Encoder, Decoder])
def test_nan_in_the_padding_changes_nothing_gradients_included(kind: type, mask: ch.Mask | None) -> None:
    model = kind(8, 2, 2).double()
    lengths = [5, 0, 3]
    results = []
    for fill in (0.0, torch.nan):
        x = _input(3, 5, 8)
        for row, length in enumerate(lengths):
            x[row, length:] = fill
        x.requires_grad_()
        model.zero_grad()
        output = model(x, lengths=lengths, mask=mask)
        output.square().sum().backward()
        results.append([output, x.grad, *(parameter.grad for parameter in model.parameters())])
    for clean, spoiled in zip(*results, strict=True):
        assert torch.equal(clean, spoiled)


def test_a_padding_mask_equals_lengths() -> None:
    model = Encoder(8, 2, 1).double()
    x = _input(2, 5, 8)
    expected = model(x, lengths=[5, 2], mask=ch.Window(1, 1))
    assert torch.equal(model(x, mask=ch.Padding([5, 2]) & ch.Window(1, 1)), expected)
    assert torch.equal(model(x, lengths=torch.tensor([5, 2]), mask=ch.Window(1, 1)), expected)
    with pytest.raises(ch.MaskError, match="mask must contain no Padding where lengths are given"):
        model(x, lengths=[5, 2], mask=ch.Padding([5, 2]))


def test_full_lengths_need_no_mask() -> None:
    model = Encoder(8, 2, 1)
    assert model.layout("test", torch.zeros(2, 5, 8), lengths=[5, 5], mask=None).mask is None


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ([5], r"be whole numbers, one per sequence \(2\); got \[5\]\."),
        ([5, 6], r"lie from 0 to 5; got 6\."),
        ([5, -1], r"lie from 0 to 5; got -1\."),
        ([5.0, 1.5], "be whole numbers"),
        (torch.tensor([[5, 2]]), "be whole numbers"),
    ],
)
def test_invalid_lengths_raise(lengths: object, text: str) -> None:
    with pytest.raises(ch.ShapeError, match="^Encoder: lengths must " + text):
        Encoder(8, 2, 1)(torch.zeros(2, 5, 8), lengths=lengths)


def test_unbatched_stacks_equal_batched() -> None:
    x = _input(5, 8)
    for model in (Encoder(8, 2, 2).double(), Decoder(8, 2, 2).double()):
        torch.testing.assert_close(model(x), model(x[None])[0], **EXACT)


def test_far_positions_are_as_exact_as_near_ones() -> None:
    """RoPE positions of a packed row count all earlier sequences; the float32 error stays below 1e-5."""
    torch.manual_seed(0)
    model = Encoder(16, 2, 1, rotary=True)
    x = torch.randn(1, 6, 16)
    batch = torch.randn(2000, 6, 16)
    batch[-1] = x[0]
    lengths = [5] * 1999 + [6]
    far = model(batch, lengths=lengths)[-1]
    torch.testing.assert_close(far, model(x)[0], atol=1e-5, rtol=1e-5)
    assert Rotary().rotate(torch.ones(1, 4), first=10**6).isfinite().all()


def test_checkpointing_saves_memory_and_matches_gradients() -> None:
    torch.manual_seed(0)
    plain = Encoder(8, 2, 2, dropout=0.3)
    thrifty = Encoder(8, 2, 2, dropout=0.3, checkpoint_activations=True)
    thrifty.load_state_dict(plain.state_dict())
    x = torch.randn(3, 6, 8)
    saved: list[int] = []
    for model in (plain, thrifty):
        torch.manual_seed(5)
        count = [0]

        def note(tensor: Tensor, count: list[int] = count) -> Tensor:
            count[0] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = model(x, lengths=[6, 2, 4])
        output.square().sum().backward()
        saved.append(count[0])
    assert saved[1] < saved[0] / 3
    for parameter, other in zip(thrifty.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"cross_attention": True}], ids=str)
def test_a_call_with_a_cache_is_not_checkpointed(options: dict[str, bool]) -> None:
    x, memory = _input(1, 6, 8), _input(1, 4, 8, seed=1) if options else None
    grads = []
    for thrifty in (False, True):
        torch.manual_seed(0)
        decoder = Decoder(8, 2, 2, checkpoint_activations=thrifty, **options).double()
        cache = decoder.new_cache()
        outputs = [decoder(part, memory=memory, cache=cache) for part in x.split(3, dim=1)]
        torch.cat(outputs, dim=1).square().sum().backward()
        assert cache.length == 6
        grads.append([parameter.grad for parameter in decoder.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("recorded", [True, False])
def test_truncated_drafts_do_not_change_later_tokens(recorded: bool) -> None:
    decoder = Decoder(8, 2, 2, cross_attention=True).double()
    x, memory, cache = _input(1, 6, 8), _input(1, 4, 8, seed=1), decoder.new_cache()
    with torch.set_grad_enabled(recorded):
        whole = decoder(x, memory=memory)
        decoder(x[:, :3], memory=memory, cache=cache)
        decoder(x[:, :2] + 1.0, memory=memory, cache=cache)
        cache.truncate(3)
        torch.testing.assert_close(decoder(x[:, 3:], memory=memory, cache=cache), whole[:, 3:], **EXACT)


def test_a_failing_stack_leaves_its_caches_unmodified() -> None:
    decoder = Decoder(8, 2, 2, cross_attention=True).double()
    x, memory, cache = _input(1, 6, 8), _input(1, 4, 8, seed=1), decoder.new_cache()
    whole = decoder(x, memory=memory)
    with pytest.raises(ch.ShapeError):
        decoder(x[:, :3], memory=memory[..., :7], cache=cache)
    assert [each.length for each in (*cache.layers, *cache.memory)] == [0] * 4
    decoder(x[:, :3], memory=memory, cache=cache)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    handle = decoder.blocks[1].feedforward.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        decoder(x[:, 3:], memory=memory, cache=cache)
    handle.remove()
    assert [each.length for each in cache.layers] == [3, 3]
    torch.testing.assert_close(decoder(x[:, 3:], memory=memory, cache=cache), whole[:, 3:], **EXACT)


def test_a_cache_of_another_decoder_raises() -> None:
    decoder, x = Decoder(8, 2, 2), torch.zeros(1, 2, 8)
    for cache in (KVCache(), {}):
        text = rf"^Decoder: cache must be a DecoderCache; got {type(cache).__name__}\."
        with pytest.raises(ch.UnsupportedError, match=text):
            decoder(x, cache=cache)  # type: ignore[arg-type]
    for layers in (1, 3):
        with pytest.raises(ch.ShapeError, match=rf"^Decoder: cache must hold .* the 2 layers, .*; got {layers}, and 0"):
            decoder(x, cache=Decoder(8, 2, layers).new_cache())
    with pytest.raises(ch.UnsupportedError, match=r"^MultiHeadAttention: cache must be a KVCache; got DecoderCache"):
        DecoderBlock(8, 2)(x, cache=decoder.new_cache())  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Encoder, Decoder])
def test_scores_that_are_not_rules_raise(kind: type) -> None:
    with pytest.raises(ch.UnsupportedError, match=rf"^{kind.__name__}: scores must hold score rules; got int\."):
        kind(8, 2, 1, scores=5)


def test_dropout_is_active_only_in_training_mode() -> None:
    for model in (Encoder(8, 2, 1, dropout=0.5), Decoder(8, 2, 1, dropout=0.5)):
        x = torch.randn(2, 4, 8)
        assert not torch.equal(model(x), model(x))
        model.eval()
        assert torch.equal(model(x), model(x))


def test_decoding_with_a_memory_matches_the_full_pass() -> None:
    decoder = Decoder(8, 2, 2, cross_attention=True).double()
    x, memory = _input(2, 6, 8), _input(2, 4, 8, seed=1)
    whole = decoder(x, memory=memory, memory_lengths=[4, 2])
    cache = decoder.new_cache()
    steps = [decoder(part, memory=memory, memory_lengths=[4, 2], cache=cache) for part in x.split([2, 1, 3], dim=1)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, **EXACT)
    assert repr(cache) == "DecoderCache(layers=2, length=6)"
    cache.reset()
    torch.testing.assert_close(decoder(x, memory=memory, memory_lengths=[4, 2], cache=cache), whole, **EXACT)


def test_nan_in_a_memorys_padding_changes_nothing_gradients_included() -> None:
    decoder = Decoder(8, 2, 2, memory_dim=6).double()
    x, results = _input(2, 6, 8), []
    for fill in (0.0, torch.nan):
        memory = _input(2, 4, 6, seed=1)
        memory[1, 2:] = fill
        decoder.zero_grad()
        output = decoder(x, memory=memory, memory_lengths=[4, 2])
        output.square().sum().backward()
        results.append([output, *(parameter.grad for parameter in decoder.parameters())])
    for clean, spoiled in zip(*results, strict=True):
        assert torch.equal(clean, spoiled)
    with pytest.raises(ch.ShapeError, match=r"^Decoder: memory must be given with memory_lengths"):
        decoder(x, memory_lengths=[4, 2])
    with pytest.raises(ch.ShapeError, match=r"^Decoder: memory must have axes \[batch, len, 6\]"):
        decoder(x, memory=x, memory_lengths=[4, 2])


def test_padding_with_a_cache_raises() -> None:
    decoder = Decoder(8, 2, 1)
    with pytest.raises(ch.UnsupportedError, match="lengths must all be the batch's length where there is a cache"):
        decoder(torch.zeros(2, 3, 8), lengths=[3, 2], cache=decoder.new_cache())


@pytest.mark.parametrize("kind", [EncoderBlock, DecoderBlock, Encoder, Decoder])
def test_norm_selects_the_norm_class(kind: type) -> None:
    depth = (2,) if kind in (Encoder, Decoder) else ()
    for norm, other in (("layer", nn.LayerNorm), ("rms", nn.RMSNorm)):
        module = kind(8, 2, *depth, norm=norm, bias=False)
        norms = [part for part in module.modules() if isinstance(part, nn.LayerNorm | nn.RMSNorm)]
        assert all(isinstance(part, other) for part in norms)
        assert len(norms) == (5 if depth else 2)
        assert [name for name, _ in module.named_parameters() if "bias" in name] == []


def test_feedforward_matches_its_formula_and_rejects_invalid_input() -> None:
    layer = FeedForward(4, 6, activation="silu")
    x = torch.randn(2, 3, 4)
    expected = layer.contract(nn.functional.silu(layer.expand(x)))
    torch.testing.assert_close(layer(x), expected)
    with pytest.raises(ch.UnsupportedError, match="activation must be one of gelu, relu, silu; got 'tanh'"):
        FeedForward(4, activation="tanh")
    with pytest.raises(ch.ShapeError, match="FeedForward: x must have axes"):
        layer(torch.zeros(2, 3))


def test_autocast_runs_in_bfloat16() -> None:
    torch.manual_seed(0)
    model = Encoder(32, 4, 2, rotary=True)
    x = torch.randn(3, 10, 32)
    exact = model(x, lengths=[10, 3, 7])
    dtypes: list[torch.dtype] = []
    model.blocks[0].attention.output_projection.register_forward_hook(lambda m, i, o: dtypes.append(o.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x, lengths=[10, 3, 7])
    output.float().square().mean().backward()
    assert dtypes == [torch.bfloat16]
    assert (output - exact).abs().max() < 0.1
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
