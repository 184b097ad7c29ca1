"""LinearAttention: the interface of MultiHeadAttention for linear attention."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import clearhead as ch
from clearhead.errors import ClearheadError, MaskError, ShapeError, UnsupportedError
from clearhead.linear import LinearCache, PositiveRandomFeatures, linear_attention
from clearhead.nn import LinearAttention

KINDS = ("linear", "retention", "gated", "delta")
CLOSE = 1e-10


def module(kind: str = "linear", **options: object) -> LinearAttention:
    torch.manual_seed(0)
    return LinearAttention(12, 3, kind=kind, **options).double()  # type: ignore[arg-type]


def tokens(*size: int, seed: int = 1) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def near(one: Tensor, other: Tensor) -> None:
    assert one.shape == other.shape
    assert float((one - other).detach().abs().max()) <= CLOSE


def test_module_matches_the_function_between_projections() -> None:
    attention, x = module(), tokens(2, 7, 12)
    heads = [
        layer(x).reshape(2, 7, 3, 4).transpose(1, 2)
        for layer in (attention.query_projection, attention.key_projection, attention.value_projection)
    ]
    output, _ = linear_attention(*heads, causal=True)
    assert attention.output_projection is not None
    expected = attention.output_projection(output.transpose(1, 2).reshape(2, 7, 12))
    near(attention(x, mask=ch.Causal()), expected)
    near(attention(x[0], mask=ch.Causal()), expected[0])
    near(module(output_projection=False)(x, mask=ch.Causal()), output.transpose(1, 2).reshape(2, 7, 12))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [[1] * 9, [4, 1, 4], [5, 4]])
def test_decoding_gives_the_prefill(kind: str, steps: list[int]) -> None:
    attention, x, cache = module(kind), tokens(2, 9, 12), LinearCache()
    parts = [attention(part, mask=ch.Causal(), cache=cache) for part in x.split(steps, dim=1)]
    near(torch.cat(parts, dim=1), attention(x, mask=ch.Causal()))
    assert cache.length == 9
    assert cache.state is not None
    assert cache.state.matrix.shape == (2, 3, 4, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_packing_give_each_sequence_alone(kind: str) -> None:
    attention, x, lengths = module(kind), tokens(2, 9, 12), [4, 9]
    padded = attention(x, mask=ch.Causal() & ch.Padding(lengths))
    packed, documents = ch.pack(x, lengths)
    unpacked = ch.unpack(attention(packed, mask=documents & ch.Causal()), lengths)
    for row, length in enumerate(lengths):
        alone = attention(x[row, :length], mask=ch.Causal())
        near(padded[row, :length], alone)
        near(unpacked[row, :length], alone)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_in_padding_does_not_reach_real_tokens(kind: str) -> None:
    attention, x, lengths = module(kind), tokens(2, 9, 12), [4, 9]
    mask = ch.Causal() & ch.Padding(lengths)
    expected = attention(x, mask=mask)
    x[0, 4:] = torch.nan
    output = attention(x, mask=mask)
    near(output[0, :4], expected[0, :4])
    near(output[1], expected[1])
    packed, documents = ch.pack(x, lengths)
    near(ch.unpack(attention(packed, mask=documents & ch.Causal()), lengths)[0, :4], expected[0, :4])


def test_gates_are_computed_in_at_least_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes: list[torch.dtype] = []
    original = functional.logsigmoid

    def watched(x: Tensor) -> Tensor:
        gates = original(x)
        dtypes.append(gates.dtype)
        return gates

    monkeypatch.setattr(functional, "logsigmoid", watched)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        module("gated").to(dtype)(tokens(1, 5, 12).to(dtype), mask=ch.Causal())
    assert dtypes == [torch.float64, torch.float32, torch.float32]


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_after_a_padded_prompt_matches_each_sequence(kind: str) -> None:
    attention, x, lengths = module(kind), tokens(2, 9, 12), torch.tensor([4, 6])
    cache = LinearCache()
    attention(x[:, :6], mask=ch.Causal() & ch.Padding(lengths), cache=cache)
    following = attention(x[:, 6:], mask=ch.Causal(), cache=cache)
    short = torch.cat([x[:1, :4], x[:1, 6:]], dim=1)
    near(following[:1], attention(short, mask=ch.Causal())[:, 4:])
    # Lengths count from the first cached token: one more token of the second sequence is real.
    cache.reset()
    attention(x[:, :6], mask=ch.Causal(), cache=cache)
    later = attention(x[:, 6:], mask=ch.Causal() & ch.Padding([9, 7]), cache=cache)
    near(later[1, 1], attention(x[1:, :9], mask=ch.Causal() & ch.Padding([7]))[0, 7])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [[1] * 9, [2, 0, 5, 2]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_one_mask_of_the_whole_sequence_serves_every_piece(kind: str, steps: list[int], dtype: torch.dtype) -> None:
    attention, x, cache = module(kind, num_kv_heads=1).to(dtype), tokens(3, 9, 12).to(dtype), LinearCache()
    lengths = [9, 4, 1]
    mask = ch.Causal() & ch.Padding(lengths)
    parts = torch.cat([attention(part, mask=mask, cache=cache) for part in x.split(steps, dim=1)], dim=1)
    whole = attention(x, mask=mask)
    assert cache.length == 9
    for row, length in enumerate(lengths):
        close = CLOSE if dtype is torch.float64 else 2e-2
        torch.testing.assert_close(parts[row, :length], whole[row, :length], rtol=close, atol=close)


def test_a_cached_memory_is_read_once() -> None:
    attention, cache = module(key_dim=5, value_dim=6), LinearCache()
    query, key, value = tokens(2, 3, 12), tokens(2, 8, 5), tokens(2, 8, 6)
    mask = ch.Padding([8, 5])
    whole = attention(query, key, value, mask=mask)
    parts = [attention(part, key, value, mask=mask, cache=cache) for part in query.split(1, dim=1)]
    near(torch.cat(parts, dim=1), whole)
    assert cache.length == 8
    near(whole[1:], attention(query[1:], key[1:, :5], value[1:, :5]))


def test_random_features_are_saved_and_move_with_the_module() -> None:
    first = module(feature_map=PositiveRandomFeatures.draw(4, 16, seed=5))
    second = module(feature_map=PositiveRandomFeatures.draw(4, 16, seed=6))
    x = tokens(1, 6, 12)
    assert float((first(x) - second(x)).detach().abs().max()) > 1e-3
    second.load_state_dict(first.state_dict())
    near(second(x), first(x))
    assert module(feature_map="performer").random_features.dtype == torch.float64


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_learns(kind: str) -> None:
    attention, x, wanted = module(kind), tokens(4, 16, 12), tokens(4, 16, 12, seed=2).cumsum(dim=1) / 4
    optimizer = torch.optim.Adam(attention.parameters(), lr=0.02)
    losses = []
    for _ in range(25):
        loss = (attention(x, mask=ch.Causal()) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        assert all(part.grad is not None and bool(part.grad.isfinite().all()) for part in attention.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.95 * losses[0]


X = torch.zeros(1, 4, 12)
WRONG: dict[str, tuple[Callable[[], object], type[ClearheadError], str]] = {
    "kind": (lambda: LinearAttention(12, 3, kind="mamba"), UnsupportedError, "linear, retention, gated, delta"),
    "heads": (lambda: LinearAttention(12, 5), ShapeError, "embed_dim must be a multiple of num_heads 5"),
    "size": (lambda: LinearAttention(0, 1), ShapeError, "embed_dim must be a whole number"),
    "width": (lambda: LinearAttention(12, 3)(X[..., :5]), ShapeError, "query must have axes [batch, len, 12]"),
    "dtype": (lambda: LinearAttention(12, 3)(X.double()), UnsupportedError, "have the module's dtype"),
    "value alone": (lambda: LinearAttention(12, 3)(X, value=X + 1), ShapeError, "key must be given with value"),
    "window": (lambda: LinearAttention(12, 3)(X, mask=ch.Window(2)), MaskError, "Causal(), Padding, Documents"),
    "no order": (lambda: LinearAttention(12, 3, kind="delta")(X), MaskError, "hold Causal() with kind 'delta'"),
    "not a mask": (lambda: LinearAttention(12, 3, kind="gated")(X, mask=X), MaskError, "hold Causal()"),  # type: ignore[arg-type]
    "cross order": (lambda: LinearAttention(12, 3)(X, X + 1, mask=ch.Causal()), MaskError, "where key is not query"),
    "cache": (
        lambda: LinearAttention(12, 3)(X, cache=ch.KVCache()),
        UnsupportedError,
        "cache must be a LinearCache",  # type: ignore[arg-type]
    ),
    "documents with a cache": (lambda: _documents_with_a_cache(), MaskError, "hold no Documents with a cache"),
    "another memory": (lambda: _other_memory(), ShapeError, "be the memory that filled the cache, 4 tokens"),
}


def _documents_with_a_cache() -> None:
    attention, cache = LinearAttention(12, 3), LinearCache()
    attention(X, mask=ch.Causal(), cache=cache)
    attention(X, mask=ch.Documents([8]), cache=cache)


def _other_memory() -> None:
    attention, cache = LinearAttention(12, 3), LinearCache()
    attention(X, X + 1, cache=cache)
    attention(X, X[:, :2], cache=cache)


@pytest.mark.parametrize("call", WRONG)
def test_invalid_input_raises_one_line(call: str) -> None:
    run, kind, text = WRONG[call]
    with pytest.raises(kind) as raised:
        run()
    said = str(raised.value)
    assert text in said
    assert "\n" not in said
    assert " must " in said
    assert "; got " in said


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_heads_share_keys_values_and_state(kind: str) -> None:
    torch.manual_seed(0)
    attention, x, cache = LinearAttention(12, 6, kind=kind, num_kv_heads=2).double(), tokens(2, 9, 12), LinearCache()
    whole = attention(x, mask=ch.Causal())
    near(torch.cat([attention(part, mask=ch.Causal(), cache=cache) for part in x.split([4, 5], dim=1)], dim=1), whole)
    assert cache.state is not None
    assert cache.state.matrix.shape == (2, 2, 2, 2)
    assert "num_kv_heads=2" in repr(attention)

    equal = LinearAttention(12, 6, kind=kind).double()
    state = attention.state_dict()
    for name, part in state.items():
        if part.shape != equal.state_dict()[name].shape:
            # One key head per query head: repeat the rows of a shared head three times.
            per_head = part.shape[0] // 2
            state[name] = part.unflatten(0, (2, per_head)).repeat_interleave(3, 0).flatten(0, 1)
    equal.load_state_dict(state)
    if kind == "retention":
        return  # decays depend on the number of key heads
    near(equal(x, mask=ch.Causal()), whole)


def test_num_kv_heads_must_divide_num_heads() -> None:
    with pytest.raises(ShapeError, match="num_kv_heads must divide num_heads 3"):
        LinearAttention(12, 3, num_kv_heads=2)
