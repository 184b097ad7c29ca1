"""Jagged nested tensors: results and gradients are those of each sequence alone, and jagged with the same offsets."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from tests.budget import within_budget

WIDTH, HEADS = 16, 2
LENGTHS, OTHERS = [5, 0, 3, 9], [4, 2, 1, 7]


def jagged(lengths: list[int], dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    """A jagged leaf, and its sequences as leaves of their own."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(length, WIDTH, generator=generator, dtype=torch.float64).to(dtype) for length in lengths]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    return nested, [part.clone().requires_grad_() for part in parts]


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(-3, -2)


def same(
    output: Tensor, alone: list[Tensor], *inputs: tuple[Tensor, list[Tensor]], module: nn.Module | None = None
) -> None:
    """Compare values, offsets and gradients, of a module's parameters too."""
    first, _ = inputs[0]
    assert output.layout is torch.jagged
    assert output.offsets() is first.offsets()
    tolerance = {} if output.dtype == torch.float64 else {"rtol": 1e-4, "atol": 2e-5}
    torch.testing.assert_close(output.values(), torch.cat(alone), **tolerance)
    parameters = [] if module is None else [each for each in module.parameters() if each.requires_grad]
    upstream = torch.randn_like(torch.cat(alone))
    nested, parts = [x for x, _ in inputs], [part for _, each in inputs for part in each]
    wanted = {"allow_unused": True, "materialize_grads": True}
    mine = torch.autograd.grad(output.values(), [*nested, *parameters], upstream)
    theirs = torch.autograd.grad(torch.cat(alone), [*parts, *parameters], upstream, **wanted)
    for (x, each), grad in zip(inputs, mine, strict=False):
        assert grad.layout is torch.jagged
        assert torch.equal(grad.offsets(), x.offsets())
        expected, theirs = theirs[: len(each)], theirs[len(each) :]
        torch.testing.assert_close(grad.values(), torch.cat(expected), **tolerance)
    for grad, one in zip(mine[len(nested) :], theirs, strict=True):
        torch.testing.assert_close(grad, one, rtol=1e-3, atol=1e-4)


def later(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A rule that reads the query's position."""
    return s * (1 + q)


#: Mask, rules, lengths of keys, offset of the queries.
CALLS: dict[str, tuple[ch.Mask | None, tuple[ch.ScoreRule, ...], list[int], int | None]] = {
    "full": (None, (), LENGTHS, None),
    "causal": (ch.Causal(), (), LENGTHS, None),
    "window and relative rules": (ch.Window(1, 2), (ch.Alibi(HEADS), ch.SoftCap(3.0)), LENGTHS, None),
    "sink": (ch.Causal(), (ch.Sink(0.5),), LENGTHS, None),
    "prefix": (ch.Causal() | ch.Prefix(2), (), LENGTHS, None),
    "global": (ch.Global(1) | ch.Window(1), (), LENGTHS, None),
    "rule of positions": (None, (ch.ScoreFunction(later),), LENGTHS, None),
    "other keys": (None, (ch.SoftCap(3.0),), OTHERS, None),
    "other keys, causal": (ch.Causal(), (), OTHERS, 0),
    "other keys, alibi": (None, (ch.Alibi(HEADS),), OTHERS, 1),
    "offset": (ch.Causal(), (), LENGTHS, -2),
    "padding": (ch.Padding([4, 0, 3, 2]), (), LENGTHS, None),
}


@pytest.mark.parametrize("name", CALLS)
def test_attention_equals_each_sequence_alone(name: str) -> None:
    mask, rules, k_lengths, offset = CALLS[name]
    query, key, value = jagged(LENGTHS), jagged(k_lengths, seed=1), jagged(k_lengths, seed=2)
    output = ch.attention(*(heads(x) for x, _ in (query, key, value)), mask=mask, scores=rules, query_offset=offset)
    assert output.shape == heads(query[0]).shape
    alone = []
    for place, parts in enumerate(zip(query[1], key[1], value[1], strict=True)):
        each = ch.Padding(mask.lengths[place, None]) if isinstance(mask, ch.Padding) else mask
        options: dict[str, Any] = {"mask": each, "scores": rules, "query_offset": offset, "backend": "reference"}
        alone.append(ch.attention(*map(heads, parts), **options).transpose(-3, -2).flatten(-2))
    same(output.transpose(1, 2).flatten(-2), alone, query, key, value)


def test_batch_index_of_a_mask_function_is_the_sequence() -> None:
    x, parts = jagged(LENGTHS)
    output = ch.attention(x, x, x, mask=ch.MaskFunction(lambda b, h, q, k: k <= q + b))
    for place, part in enumerate(parts):
        alone = ch.attention(part, part, part, mask=ch.MaskFunction(lambda b, h, q, k, n=place: k <= q + n))
        torch.testing.assert_close(output.unbind()[place], alone)


def test_tensors_without_heads_and_grouped_heads() -> None:
    x, parts = jagged(LENGTHS)
    same(ch.attention(x, x, x), [ch.attention(part, part, part, backend="reference") for part in parts], (x, parts))
    one = x.unflatten(-1, (1, -1)).transpose(1, 2)
    pair = torch.nested.nested_tensor_from_jagged(torch.stack([x.values()] * 2), x.offsets(), jagged_dim=2)
    output = ch.attention(pair, one, one)
    assert output.shape == pair.shape
    torch.testing.assert_close(output.values()[1], ch.attention(x, x, x).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attention_is_within_budget(dtype: torch.dtype) -> None:
    x, parts = jagged([70, 1, 130], dtype)
    output = ch.attention(*[heads(x)] * 3, mask=ch.Causal())
    exact = [
        ch.attention(*[heads(part.detach().double())] * 3, mask=ch.Causal(), backend="reference") for part in parts
    ]
    plain = [
        torch.nn.functional.scaled_dot_product_attention(*[heads(part)[None]] * 3, is_causal=True)[0] for part in parts
    ]
    for mine, textbook, true in zip(output.unbind(), plain, exact, strict=True):
        within_budget("output", mine, textbook, true, terms=130, size=4.0, dtype=dtype)


def test_dropout_keeps_the_mean() -> None:
    x = jagged([64, 32], torch.float32)[0].detach()
    ones = torch.nested.nested_tensor_from_jagged(torch.ones(96, WIDTH), x.offsets())
    torch.manual_seed(0)
    output = ch.attention(x, x, ones, dropout=0.5)
    torch.manual_seed(0)
    assert torch.equal(output.values(), ch.attention(x, x, ones, dropout=0.5).values())
    assert abs(float(output.values().mean()) - 1.0) < 0.2


#: Modules, and options of their call.
MODULES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "MultiHeadAttention": (lambda: ch.nn.MultiHeadAttention(WIDTH, HEADS), {}),
    "rotary and ALiBi": (
        lambda: ch.nn.MultiHeadAttention(WIDTH, HEADS, rotary=True, scores=ch.Alibi(HEADS)),
        {"mask": ch.Causal()},
    ),
    "prefix": (lambda: ch.nn.MultiHeadAttention(WIDTH, HEADS, rotary=True), {"mask": ch.Causal() | ch.Prefix(2)}),
    "rule of positions": (lambda: ch.nn.MultiHeadAttention(WIDTH, HEADS, scores=ch.ScoreFunction(later)), {}),
    "FeedForward": (lambda: ch.nn.FeedForward(WIDTH), {}),
    "EncoderBlock": (lambda: ch.nn.EncoderBlock(WIDTH, HEADS, dropout=0.0), {}),
    "SwiGLU": (
        lambda: ch.nn.EncoderBlock(WIDTH, HEADS, dropout=0.0, norm="rms", gated=True, activation="silu"),
        {"mask": ch.Causal()},
    ),
    "checkpointed": (lambda: ch.nn.EncoderBlock(WIDTH, HEADS, dropout=0.0, checkpoint_activations=True), {}),
    "DecoderBlock": (lambda: ch.nn.DecoderBlock(WIDTH, HEADS, dropout=0.0), {}),
    "Encoder": (lambda: ch.nn.Encoder(WIDTH, HEADS, 2), {}),
    "Encoder, rule of positions": (lambda: ch.nn.Encoder(WIDTH, HEADS, 1, scores=ch.ScoreFunction(later)), {}),
    "Decoder": (lambda: ch.nn.Decoder(WIDTH, HEADS, 2), {"mask": ch.Window(2)}),
    "LinearAttention": (lambda: ch.nn.LinearAttention(WIDTH, HEADS), {}),
    "delta": (lambda: ch.nn.LinearAttention(WIDTH, HEADS, kind="delta"), {"mask": ch.Causal()}),
    "LayerNorm": (lambda: nn.LayerNorm(WIDTH), {}),
    "RMSNorm": (lambda: nn.RMSNorm(WIDTH, eps=1e-5), {}),
    "model": (
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), ch.nn.Encoder(WIDTH, HEADS, 1), nn.GELU()),
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", MODULES)
def test_module_equals_each_sequence_alone(name: str, training: bool) -> None:
    torch.manual_seed(0)
    make, options = MODULES[name]
    module = make().train(training)
    x, parts = jagged(LENGTHS, torch.float32)
    output = module(x, **options)
    assert (x + output).layout is torch.jagged
    same(output, [module(part, **options) for part in parts], (x, parts), module=module)


CROSS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "MultiHeadAttention": (lambda: ch.nn.MultiHeadAttention(WIDTH, HEADS), {}, "key"),
    "causal": (lambda: ch.nn.MultiHeadAttention(WIDTH, HEADS), {"mask": ch.Causal(), "query_offset": 1}, "key"),
    "rotary": (lambda: ch.nn.MultiHeadAttention(WIDTH, HEADS, rotary=True), {"query_offset": 0}, "key"),
    "LinearAttention": (lambda: ch.nn.LinearAttention(WIDTH, HEADS), {}, "key"),
    "DecoderBlock": (lambda: ch.nn.DecoderBlock(WIDTH, HEADS, dropout=0.0, cross_attention=True), {}, "memory"),
    "Decoder": (lambda: ch.nn.Decoder(WIDTH, HEADS, 2, cross_attention=True), {}, "memory"),
}


@pytest.mark.parametrize("name", CROSS)
def test_cross_attention_equals_each_sequence_alone(name: str) -> None:
    torch.manual_seed(0)
    make, options, argument = CROSS[name]
    module = make()
    (x, parts), (y, others) = jagged(LENGTHS, torch.float32), jagged(OTHERS, torch.float32, seed=1)
    output = module(x, **{argument: y}, **options)
    alone = [module(part, **{argument: other}, **options) for part, other in zip(parts, others, strict=True)]
    same(output, alone, (x, parts), (y, others), module=module)


def test_padded_road_is_taken_only_where_positions_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed tokens have no padding to compute on."""
    sizes: list[tuple[int, ...]] = []
    x, _ = jagged(LENGTHS, torch.float32)
    for mask, wanted in ((ch.Causal(), (1, 17, WIDTH)), (ch.Prefix(2), (4, 9, WIDTH))):
        module = ch.nn.MultiHeadAttention(WIDTH, HEADS)
        monkeypatch.setattr(
            module.query_projection, "forward", lambda y: sizes.append(tuple(y.shape)) or y[..., :WIDTH]
        )
        module(x, mask=mask)
        assert sizes.pop() == wanted


def test_observed_call_is_that_of_the_padded_batch() -> None:
    module = ch.nn.MultiHeadAttention(WIDTH, HEADS)
    x, parts = jagged([3, 2], torch.float32)
    with ch.observe(module, want=ch.Want(entropy=True)) as observed:
        output = module(x)
    assert torch.equal(output.values(), module(x).values())
    assert observed[0].lengths == (3, 2)
    assert observed[0].entropy.shape == (2, HEADS, 3)
    with ch.observe(module, want=ch.Want(entropy=True)) as alone:
        module(parts[1][None])
    torch.testing.assert_close(observed[0].entropy[1, :, :2], alone[0].entropy[0])


def swapped(module: nn.Module) -> nn.Module:
    copied = copy.deepcopy(module)
    ch.swap(copied)
    return copied


class Block(nn.Module):
    """A model of another author, around torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.linear, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        output: Tensor = x + self.dropout(self.linear(self.attention(y, y, y, need_weights=False)[0]))
        return output


def layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True, **options)


THEIRS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "attention": (
        lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
        lambda module, x: module(x, x, x, need_weights=False)[0],
    ),
    "attention with weights": (
        lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
        lambda module, x: module(x, x, x)[0],
    ),
    "layer": (layer, lambda module, x: module(x)),
    "pre-norm layer": (lambda: layer(norm_first=True, activation="gelu"), lambda module, x: module(x)),
    "stack": (
        lambda: nn.TransformerEncoder(layer(), 2, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False),
        lambda module, x: module(x),
    ),
    "model": (Block, lambda module, x: module(x)),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", THEIRS)
def test_swapped_module_equals_torch_on_each_sequence(name: str, training: bool) -> None:
    torch.manual_seed(0)
    make, call = THEIRS[name]
    theirs = make().train(training)
    ours = swapped(theirs)
    x, parts = jagged([5, 1, 3, 9], torch.float32)
    same(call(ours, x), [call(theirs, part[None])[0] for part in parts], (x, parts))
    grads = torch.autograd.grad(call(ours, x).values().square().sum(), list(ours.parameters()))
    alone = torch.cat([call(theirs, part[None])[0] for part in parts]).square().sum()
    for mine, expected in zip(grads, torch.autograd.grad(alone, list(theirs.parameters())), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_swapped_decoder_equals_torch_on_each_sequence(stacked: bool, causal: bool) -> None:
    torch.manual_seed(0)
    one = nn.TransformerDecoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)
    theirs = nn.TransformerDecoder(one, 2) if stacked else one
    ours = swapped(theirs)
    (x, parts), (y, others) = jagged([5, 1, 3, 9], torch.float32), jagged(OTHERS, torch.float32, seed=1)
    for options in [{"tgt_is_causal": True}, {"tgt_mask": ch.Causal()}] if causal else [{}]:
        alone = []
        for part, other in zip(parts, others, strict=True):
            mask = nn.Transformer.generate_square_subsequent_mask(len(part)) if causal else None
            alone.append(theirs(part[None], other[None], tgt_mask=mask, tgt_is_causal=causal)[0])
        same(ours(x, y, **options), alone, (x, parts), (y, others))


@pytest.mark.parametrize("average", [True, False])
def test_weights_are_padded_with_zero(average: bool) -> None:
    theirs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    x, parts = jagged([5, 1, 3], torch.float32)
    _, weights = swapped(theirs)(x, x, x, average_attn_weights=average)
    assert weights.shape == ((3, 5, 5) if average else (3, HEADS, 5, 5))
    for place, part in enumerate(parts):
        alone = theirs(part[None], part[None], part[None], average_attn_weights=average)[1][0]
        expected = torch.zeros(*alone.shape[:-2], 5, 5)
        expected[..., : len(part), : len(part)] = alone
        torch.testing.assert_close(weights[place], expected)


def test_empty_batches_and_sequences() -> None:
    for offsets in ([0, 0, 0], [0, 3, 3]):
        x = torch.nested.nested_tensor_from_jagged(torch.randn(offsets[-1], WIDTH), torch.tensor(offsets))
        for module in (ch.nn.MultiHeadAttention(WIDTH, HEADS), ch.nn.Encoder(WIDTH, HEADS, 1)):
            assert module(x).values().shape == (offsets[-1], WIDTH)
        assert ch.attention(x, x, x).values().shape == (offsets[-1], WIDTH)


def strided() -> Tensor:
    return torch.nested.nested_tensor([torch.randn(5, WIDTH), torch.randn(3, WIDTH)])


X, Y = jagged(LENGTHS, torch.float32)[0], jagged(OTHERS, torch.float32)[0]
PLAIN = torch.randn(4, 9, WIDTH)
TABLE = torch.ones(9, 9, dtype=torch.bool)
ATTENTION = ch.nn.MultiHeadAttention(WIDTH, HEADS)
TORCHS = swapped(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "strided": (
        lambda: ch.attention(*[strided()] * 3),
        r"attention: query must be a dense tensor; got a nested one\. "
        r"Make it with layout=torch\.jagged",
    ),
    "strided in a module": (lambda: ATTENTION(strided()), r"MultiHeadAttention: query must .* layout=torch\.jagged"),
    "dense key": (lambda: ch.attention(X, PLAIN, PLAIN), r"attention: key must be jagged where another is"),
    "dense query": (lambda: ch.attention(PLAIN, X, X), r"attention: query must be jagged where another is"),
    "dense key of a module": (lambda: ATTENTION(X, PLAIN), r"MultiHeadAttention: key must be jagged"),
    "table": (
        lambda: ch.attention(X, X, X, mask=ch.Causal() & ch.Dense(TABLE)),
        r"attention: mask must hold no table of queries and keys where tensors are jagged",
    ),
    "bias": (
        lambda: ch.attention(X, X, X, scores=ch.DenseBias(torch.ones(9, 9))),
        r"attention: scores must hold no table",
    ),
    "table of a module": (lambda: ATTENTION(X, mask=ch.Dense(TABLE)), r"MultiHeadAttention: mask must hold no table"),
    "no mask": (lambda: ch.attention(X, X, X, mask=TABLE), r"attention: mask must be a mask; got Tensor"),
    "lengths": (
        lambda: ch.attention(X, Y, Y, mask=ch.Causal()),
        r"attention: query_offset must be given when the lengths",
    ),
    "values": (lambda: ch.attention(X, X, Y), r"attention: value must have the lengths of key's sequences"),
    "values of a module": (lambda: ATTENTION(X, X, Y), r"MultiHeadAttention: value must have the lengths"),
    "sequences": (
        lambda: ATTENTION(X, jagged([1, 2])[0].float()),
        r"MultiHeadAttention: key must have as many sequences",
    ),
    "axis": (
        lambda: ch.attention(*[X.unflatten(-1, (HEADS, -1))] * 3),
        r"attention: query must have its jagged axis before",
    ),
    "gaps": (
        lambda: ATTENTION(
            torch.nested.narrow(PLAIN, 1, torch.tensor([0, 1, 2, 0]), torch.tensor([3, 2, 1, 4]), layout=torch.jagged)
        ),
        r"MultiHeadAttention: query must have no gaps",
    ),
    "width": (
        lambda: ATTENTION(torch.nested.nested_tensor([torch.randn(3, 5)], layout=torch.jagged)),
        r"MultiHeadAttention: ",
    ),
    "dtype": (lambda: ATTENTION(jagged(LENGTHS)[0]), r"MultiHeadAttention: query must have the module's dtype"),
    "given lengths": (lambda: ch.nn.Encoder(WIDTH, HEADS, 1)(X, lengths=LENGTHS), r"Encoder: lengths must be None"),
    "cache": (
        lambda: ATTENTION(X, cache=ch.KVCache()),
        r"MultiHeadAttention: cache must be None where tokens are jagged",
    ),
    "observe": (
        lambda: ch.observe_attention(X, X, X, want=ch.Want(lse=True)),
        r"observe_attention: query must be a dense",
    ),
    "torch's dense query": (
        lambda: TORCHS(PLAIN, X, X),
        r"MultiheadAttention: query must be jagged where another is",
    ),
    "torch's padding": (
        lambda: TORCHS(X, X, X, key_padding_mask=~TABLE[:4]),
        r"MultiheadAttention: key_padding_mask must be",
    ),
    "torch's mask": (
        lambda: TORCHS(X, X, X, attn_mask=TABLE),
        r"MultiheadAttention: attn_mask must be None, a clearhead mask",
    ),
    "torch's layout": (
        lambda: swapped(nn.TransformerEncoderLayer(WIDTH, HEADS))(X),
        r"TransformerEncoderLayer: batch_first must be True for jagged tensors",
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", WRONG)
def test_bad_input_raises_one_line(name: str) -> None:
    call, text = WRONG[name]
    with pytest.raises(ch.ClearheadError, match=f"^{text}") as raised:
        call()
    assert "\n" not in str(raised.value)
